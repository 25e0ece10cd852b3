//! New keys and values into pages.

use kernels_gpu::abi::{KvStrides, NO_SLOT};

use crate::{
    Error,
    kv::KvViewMut,
    problem::Spec,
    tensor::{Element, ShapeError},
};

/// Copies the keys and values of new tokens (`[tokens, kv_heads, head_dim]` each) into a page pool.
///
/// `slots` says where each token goes, as `page × page_size + offset`; a token with [`NO_SLOT`] is left
/// out. No two tokens may go to one slot.
///
/// ```
/// use tandem_attn::{exec::cpu::append_paged_kv, kv::KvViewMut, problem::{KvLayout, Spec}};
///
/// let spec = Spec::new(1, 1, 16);
/// let (mut k, mut v) = ([0.0_f32; 2 * 4 * 16], [0.0_f32; 2 * 4 * 16]); // two pages of four tokens
/// let mut pool = KvViewMut::new(&spec, KvLayout::Nhd, 4, &mut k, &mut v);
/// append_paged_kv(&spec, 2, &[6], &[1.0; 16], &[2.0; 16], &mut pool)?;
/// assert_eq!((k[6 * 16], v[6 * 16]), (1.0, 2.0));
/// # Ok::<(), tandem_attn::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`], [`Error::IndexOutOfRange`] or [`Error::WrittenTwice`]; nothing is written then.
pub fn append_paged_kv<T: Element>(
    spec: &Spec,
    pool_pages: u32,
    slots: &[u32],
    k: &[T],
    v: &[T],
    pool: &mut KvViewMut<'_, T>,
) -> Result<(), Error> {
    let page_size = pool.k_strides.page_size;
    if page_size == 0 || spec.kv_heads == 0 {
        return Err(Error::Extent {
            tensor: "the KV pool",
            dimension: "tokens in a page or KV heads",
            got: 0,
            rule: "at least 1".into(),
        });
    }
    pool.view().check(spec, 0, page_size, pool_pages)?;
    let heads = spec.kv_heads as usize;
    for (name, got, dim) in [
        ("k", k.len(), spec.head_dim_qk),
        ("v", v.len(), spec.head_dim_v),
    ] {
        let expected = slots.len() * heads * dim as usize;
        if got != expected {
            let shape = "[tokens, kv_heads, head_dim]";
            return Err(ShapeError::Length {
                name,
                got,
                shape,
                expected,
            }
            .into());
        }
    }
    check_slots(slots, u64::from(pool_pages) * u64::from(page_size))?;

    copy(
        &mut *pool.k,
        pool.k_strides,
        slots,
        heads,
        spec.head_dim_qk as usize,
        k,
    );
    copy(
        &mut *pool.v,
        pool.v_strides,
        slots,
        heads,
        spec.head_dim_v as usize,
        v,
    );
    Ok(())
}

fn check_slots(slots: &[u32], limit: u64) -> Result<(), Error> {
    let mut taken = vec![false; limit as usize];
    for (index, &got) in slots
        .iter()
        .enumerate()
        .filter(|&(_, &slot)| slot != NO_SLOT)
    {
        match taken.get_mut(got as usize) {
            Some(taken) if !*taken => *taken = true,
            Some(_) => {
                return Err(Error::WrittenTwice {
                    array: "slots",
                    index,
                    got,
                });
            }
            None => {
                return Err(Error::IndexOutOfRange {
                    array: "slots",
                    index,
                    got: got.into(),
                    limit,
                    of: "tokens in the pool",
                });
            }
        }
    }
    Ok(())
}

fn copy<T: Element>(
    pool: &mut [T],
    strides: KvStrides,
    slots: &[u32],
    heads: usize,
    dim: usize,
    rows: &[T],
) {
    for (&slot, row) in slots.iter().zip(rows.chunks_exact(heads * dim)) {
        if slot == NO_SLOT {
            continue;
        }
        let (page, offset) = (slot / strides.page_size, slot % strides.page_size);
        let token =
            page as usize * strides.page as usize + offset as usize * strides.token as usize;
        for (head, row) in row.chunks_exact(dim).enumerate() {
            pool[token + head * strides.head as usize..][..dim].copy_from_slice(row);
        }
    }
}
