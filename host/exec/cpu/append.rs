//! New keys and values into pages.

use kernels_gpu::abi::{KvStrides, NO_SLOT};

use crate::{
    Error,
    kv::KvViewMut,
    problem::{ProblemError, Spec},
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
    if page_size == 0 {
        return Err(ProblemError::PageSize { part: 0, got: 0 }.into());
    }
    if spec.kv_heads == 0 {
        return Err(Error::Extent {
            tensor: "the KV pool",
            dimension: "KV heads",
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        kv::KvView,
        problem::{KvLayout, ProblemError},
    };

    proptest! {
        #[test]
        fn rows_are_where_a_view_reads_them(
            heads in 1..5_u32,
            dims in (1..4_u32, 1..4_u32),
            (page_size, pages) in (1..20_u32, 1..6_u32),
            nhd in any::<bool>(),
            order in prop::collection::vec(any::<prop::sample::Index>(), 0..30),
        ) {
            let spec = Spec::new(heads, heads, dims.0 * 16).with_head_dim_v(dims.1 * 16);
            let layout = if nhd { KvLayout::Nhd } else { KvLayout::Hnd };
            let mut free: Vec<u32> = (0..pages * page_size).collect();
            let slots: Vec<u32> = order
                .iter()
                .map(|index| if free.is_empty() { NO_SLOT } else { free.swap_remove(index.index(free.len())) })
                .collect();
            let numbered = |width: u32, first: f32| -> Vec<f32> {
                (0..slots.len() as u32 * width).map(|i| first + i as f32).collect()
            };
            let (k, v) = (numbered(heads * spec.head_dim_qk, 1.0), numbered(heads * spec.head_dim_v, 2.0));
            let slots_in_pool = (pages * page_size * heads) as usize;
            let mut k_pool = vec![0.0; slots_in_pool * spec.head_dim_qk as usize];
            let mut v_pool = vec![0.0; slots_in_pool * spec.head_dim_v as usize];
            let mut pool = KvViewMut::new(&spec, layout, page_size, &mut k_pool, &mut v_pool);
            append_paged_kv(&spec, pages, &slots, &k, &v, &mut pool).unwrap();

            let view = KvView::new(&spec, layout, page_size, &k_pool, &v_pool);
            let mut k_rows = k.chunks_exact(spec.head_dim_qk as usize);
            let mut v_rows = v.chunks_exact(spec.head_dim_v as usize);
            for &slot in &slots {
                for head in 0..heads {
                    let (k, v) = (k_rows.next().unwrap(), v_rows.next().unwrap());
                    if slot != NO_SLOT {
                        let (page, offset) = (slot / page_size, slot % page_size);
                        prop_assert_eq!(view.key(page, offset, head, spec.head_dim_qk), k);
                        prop_assert_eq!(view.value(page, offset, head, spec.head_dim_v), v);
                    }
                }
            }
            for slot in free {
                for head in 0..heads {
                    let untouched = view.key(slot / page_size, slot % page_size, head, spec.head_dim_qk);
                    prop_assert!(untouched.iter().all(|&x| x == 0.0));
                }
            }
        }
    }

    #[test]
    fn each_thing_that_is_wrong_has_its_error_and_nothing_is_written() {
        let good = Spec::new(1, 1, 16);
        let call =
            |spec: Spec, page_size: u32, pages: u32, slots: &[u32], tokens: (usize, usize)| {
                let (mut k_pool, mut v_pool) = ([7.0_f32; 8 * 16], [7.0_f32; 8 * 16]);
                let mut pool =
                    KvViewMut::new(&spec, KvLayout::Hnd, page_size, &mut k_pool, &mut v_pool);
                let (k, v) = (vec![1.0; tokens.0 * 16], vec![1.0; tokens.1 * 16]);
                let error = append_paged_kv(&spec, pages, slots, &k, &v, &mut pool).unwrap_err();
                assert!(k_pool.iter().chain(&v_pool).all(|&x| x == 7.0), "{error}");
                error
            };
        let length = |error| match error {
            Error::Shape(ShapeError::Length { name, got, .. }) => (name, got),
            other => panic!("{other:?}"),
        };
        assert_eq!(length(call(good, 4, 2, &[0, 1], (1, 2))), ("k", 16));
        assert_eq!(length(call(good, 4, 2, &[0, 1], (2, 3))), ("v", 48));
        let too_small = call(good, 4, 3, &[0], (1, 1));
        assert!(
            matches!(
                too_small,
                Error::Shape(ShapeError::PoolTooSmall { tensor: "k", .. })
            ),
            "{too_small:?}"
        );
        assert!(matches!(
            call(good, 4, 2, &[0, 8], (2, 2)),
            Error::IndexOutOfRange {
                index: 1,
                got: 8,
                limit: 8,
                ..
            }
        ));
        assert!(matches!(
            call(good, 4, 2, &[3, 3], (2, 2)),
            Error::WrittenTwice {
                index: 1,
                got: 3,
                ..
            }
        ));
        let headless = Spec {
            kv_heads: 0,
            ..good
        };
        assert!(matches!(
            call(headless, 4, 2, &[], (0, 0)),
            Error::Extent { got: 0, .. }
        ));
        let no_page = call(good, 0, 2, &[], (0, 0));
        assert!(
            matches!(
                no_page,
                Error::Problem(ProblemError::PageSize { got: 0, .. })
            ),
            "{no_page:?}"
        );
    }
}
