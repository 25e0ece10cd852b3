//! Writing new keys and values to pages.

mod latent_656;
mod quantise;

use kernels_gpu::abi::NO_SLOT;

use super::{Cpu, check::check_together};
use crate::{
    Error,
    checks::{check_extent, check_least, check_same},
    exec::apart::{check_apart, check_copies, check_own_values, check_sides},
    kv::{KvViewMut, PageCopy},
    problem::{Dtype, Integer, ProblemError, Spec},
    tensor::{Element, ShapeError, TensorMut, TensorRef},
};

impl Cpu {
    /// Copies the keys and values of new tokens (`[tokens, kv_heads, head_dim]` each) into a page pool.
    ///
    /// `slots` gives the place of each token, as `page × page_size + offset`, in any [`Integer`] type. A token with −1 or
    /// `u32::MAX` is not written. No two tokens may have the same slot. [`append_rows`](Self::append_rows) writes keys or values only;
    /// keys of [latent](Spec::latent) attention, which have no values of their own, are appended with it.
    ///
    /// ```
    /// use tandem_attn::{Cpu, kv::KvViewMut, problem::{Dtype, KvLayout, Spec}};
    ///
    /// let spec = Spec::new(1, 1, 16).with_dtype(Dtype::F32);
    /// let (mut k, mut v) = ([0.0_f32; 2 * 4 * 16], [0.0_f32; 2 * 4 * 16]); // two pages of four tokens
    /// let mut pool = KvViewMut::new(&spec, KvLayout::Nhd, 4, &mut k, &mut v);
    /// Cpu::append_paged_kv(&spec, 2, &[6], &[1.0; 16], &[2.0; 16], &mut pool)?;
    /// assert_eq!((k[6 * 16], v[6 * 16]), (1.0, 2.0));
    /// # Ok::<(), tandem_attn::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::DtypesDiffer`] for a pool that has not the type of the spec's keys and values, [`Error::Shape`], [`Error::Stride`]
    /// for a pool whose rows overlap, [`Error::IndexOutOfRange`] or [`Error::WrittenTwice`]; [`Error::NoInstance`] for latent
    /// attention. Nothing is written then.
    pub fn append_paged_kv<T: Element>(
        spec: &Spec,
        pool_pages: u32,
        slots: &[impl Integer],
        k: &[T],
        v: &[T],
        pool: &mut KvViewMut<'_, T>,
    ) -> Result<(), Error> {
        let page_size = pool.k_strides.page_size;
        if page_size == 0 {
            return Err(ProblemError::PageSize { part: 0, got: 0 }.into());
        }
        check_heads(spec, "append_rows with the keys alone")?;
        check_dtype(spec, T::DTYPE)?;
        pool.view().check(spec, 0, page_size, pool_pages)?;
        check_sides(spec, pool_pages, [pool.k_strides, pool.v_strides])?;
        let (tokens, heads) = (slots.len(), spec.kv_heads as usize);
        let sides = [
            ("k", k, spec.head_dim_qk, &mut *pool.k, pool.k_strides),
            ("v", v, spec.head_dim_v, &mut *pool.v, pool.v_strides),
        ];
        for (name, rows, dim, ..) in &sides {
            let (shape, dim) = ("[tokens, kv_heads, head_dim]", *dim as usize);
            ShapeError::length(name, rows.len(), shape, tokens * heads * dim)?;
        }
        check_slots(slots, u64::from(pool_pages) * u64::from(page_size))?;

        for (_, rows, dim, pool, strides) in sides {
            let dim = dim as usize;
            let pool = TensorMut::strided(
                pool,
                [pool_pages as usize, page_size as usize, heads, dim],
                [strides.page, strides.token, strides.head, 1].map(|stride| stride as usize),
            )?;
            copy(&TensorRef::new(rows, [tokens, heads, dim])?, slots, pool);
        }
        Ok(())
    }

    /// Copies the keys or the values of new tokens into their pool. The time depends on the number of new tokens only.
    ///
    /// - `rows`: `[tokens, kv_heads, head_dim]`, with any strides of tokens and heads
    /// - `slots`: `[tokens]`, as in [`append_paged_kv`](Self::append_paged_kv)
    /// - `pool`: `[pages, page_size, kv_heads, head_dim]`, with any order in memory; for
    ///   [`KvLayout::Hnd`](crate::problem::KvLayout::Hnd), [exchange](TensorMut::swap_axes) the middle axes
    ///
    /// ```
    /// use tandem_attn::{Cpu, tensor::{TensorMut, TensorRef}};
    ///
    /// // Keys of one head from the middle third of a fused row, to the second of two pages of four tokens.
    /// let (qkv, mut pool) = ([0.0, 1.0, 2.0_f32].map(|x| [x; 16]).concat(), vec![0.0_f32; 2 * 4 * 16]);
    /// let k = TensorRef::strided(&qkv[16..], [1, 1, 16], [48, 16, 1])?;
    /// Cpu::append_rows(&k, &[6_i64], TensorMut::new(&mut pool, [2, 4, 1, 16])?)?;
    /// assert_eq!(pool[6 * 16..7 * 16], [1.0; 16]);
    /// # Ok::<(), tandem_attn::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::DtypesDiffer`], [`Error::Extent`], [`Error::Stride`], [`Error::IndexOutOfRange`] or
    /// [`Error::WrittenTwice`]; nothing is written then.
    pub fn append_rows(
        rows: &TensorRef<'_, 3>,
        slots: &[impl Integer],
        pool: TensorMut<'_, 4>,
    ) -> Result<(), Error> {
        let [tokens, heads, dim] = rows.shape();
        let [pages, page_size, pool_heads, pool_dim] = pool.shape();
        check_same("rows", rows.dtype(), "the pool", pool.dtype())?;
        check_extent("rows", "tokens", tokens, slots.len(), "in the slots")?;
        check_extent("rows", "KV heads", heads, pool_heads, "the pool has")?;
        check_extent("rows", "elements in a head", dim, pool_dim, "the pool has")?;
        check_together("rows", dim, rows.strides()[2])?;
        check_together("the pool", dim, pool.strides()[3])?;
        let [page, token, head, _] = pool.strides();
        check_apart(
            "the pool",
            [pages, page_size, heads],
            dim,
            [page, token, head],
        )?;
        check_slots(slots, (pages as u64).saturating_mul(page_size as u64))?;
        copy(rows, slots, pool);
        Ok(())
    }
}

impl Cpu {
    /// Copies whole pages of keys or of values, one after the other: what a [`PageCopy`] asks for. Call it for the pools of all
    /// layers, and for the scales of tokens if each has one (as rows of one element), before the pages are written. `pool` is as in
    /// [`append_rows`](Self::append_rows).
    ///
    /// ```
    /// use tandem_attn::{Cpu, kv::PageCopy, tensor::TensorMut};
    ///
    /// let mut pool: Vec<f32> = (0..3 * 2 * 16).map(|i| i as f32).collect(); // three pages of two tokens
    /// Cpu::copy_pages(TensorMut::new(&mut pool, [3, 2, 1, 16])?, &[PageCopy { from: 2, to: 0 }])?;
    /// assert_eq!((pool[0], pool[31], pool[32]), (64.0, 95.0, 32.0));
    /// # Ok::<(), tandem_attn::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::IndexOutOfRange`] for a page that the pool does not have, [`Error::Stride`] for a pool whose rows overlap; nothing is
    /// written then.
    pub fn copy_pages(pool: TensorMut<'_, 4>, copies: &[PageCopy]) -> Result<(), Error> {
        let ([pages, tokens, heads, dim], strides) = (pool.shape(), pool.strides());
        let [page, token, head, element] = strides;
        check_together("the pool", dim, element)?;
        check_apart("the pool", [pages, tokens, heads], dim, [page, token, head])?;
        check_copies(copies, pages as u64)?;
        let size = pool.dtype().bytes() as usize;
        let bytes = pool.into_elements().into_bytes();
        for &PageCopy { from, to } in copies {
            for row in 0..tokens * heads {
                let row = row / heads * token + row % heads * head;
                let [from, to] = [from, to].map(|index| (index as usize * page + row) * size);
                bytes.copy_within(from..from + dim * size, to);
            }
        }
        Ok(())
    }
}

/// Checks that there are heads, with values of their own: what else can be written is written by `instead`.
fn check_heads(spec: &Spec, instead: &'static str) -> Result<(), Error> {
    for (dimension, got) in [
        ("KV heads", spec.kv_heads),
        ("elements in a key", spec.head_dim_qk),
        ("elements in a value", spec.head_dim_v),
    ] {
        check_least("the KV pool", dimension, got as usize, 1, "")?;
    }
    check_own_values(spec, instead)
}

/// Checks that the pool has the specification's type, as a run of attention over it will.
fn check_dtype(spec: &Spec, got: Dtype) -> Result<(), Error> {
    check_same("the KV pool", got, "the spec's KV", spec.kv_dtype)
}

/// Where a token goes. None if it is not written.
fn place(slot: impl Integer) -> Option<i128> {
    let slot = slot.value();
    (slot != -1 && slot != i128::from(NO_SLOT)).then_some(slot)
}

fn check_slots(slots: &[impl Integer], limit: u64) -> Result<(), Error> {
    let array = "slots";
    let places = || {
        let places = slots.iter().map(|&slot| place(slot)).enumerate();
        places.filter_map(|(index, place)| Some((place?, index)))
    };
    // Slots of a prompt's chunk ascend, and so cannot be equal.
    let (mut last, mut ascend) = (-1, true);
    for (got, index) in places() {
        if u64::try_from(got).map_or(true, |got| got >= limit) {
            return Err(Error::IndexOutOfRange {
                array,
                index,
                got,
                limit,
                of: "tokens in the pool",
            });
        }
        ascend &= got > last;
        last = got;
    }
    if ascend {
        return Ok(());
    }
    // All are in the pool.
    let mut sorted: Vec<_> = places().map(|(place, at)| (place as u64, at)).collect();
    sorted.sort_unstable();
    let meet = |pair: &[(u64, usize)]| (pair[0].0 == pair[1].0).then_some((pair[1].1, pair[0].0));
    match sorted.windows(2).filter_map(meet).min() {
        Some((index, got)) => Err(Error::WrittenTwice { array, index, got }),
        None => Ok(()),
    }
}

/// Copies the rows after all checks. The bytes are not interpreted.
fn copy(rows: &TensorRef<'_, 3>, slots: &[impl Integer], pool: TensorMut<'_, 4>) {
    let size = rows.dtype().bytes() as usize;
    let ([_, mut heads, dim], row_strides) = (rows.shape(), rows.strides());
    let ([_, page_size, ..], pool_strides) = (pool.shape(), pool.strides());
    let mut bytes = dim * size;
    let (mut row_head, mut pool_head) = (row_strides[1] * size, pool_strides[2] * size);
    // Heads that are contiguous in source and pool are copied as one long row.
    if (row_head, pool_head) == (bytes, bytes) {
        (heads, bytes) = (heads.min(1), heads * bytes);
        (row_head, pool_head) = (bytes, bytes);
    }
    let (from, to) = (rows.elements().bytes(), pool.into_elements().into_bytes());
    for (token, &slot) in slots.iter().enumerate() {
        let Some(place) = place(slot) else { continue };
        let (page, offset) = (place as usize / page_size, place as usize % page_size);
        let row = token * row_strides[0] * size;
        let at = (page * pool_strides[0] + offset * pool_strides[1]) * size;
        for head in 0..heads {
            let row = &from[row + head * row_head..][..bytes];
            to[at + head * pool_head..][..bytes].copy_from_slice(row);
        }
    }
}

#[cfg(test)]
mod tests;
