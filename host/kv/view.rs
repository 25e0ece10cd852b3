//! Raw pools as tensors: `[pages, page_size, kv_heads, head_dim]` in any order of the middle two.

use kernels_gpu::abi::KvStrides;

use super::{
    KvScales, LATENT_656_BYTES,
    latent_656::{self, ELEMENTS},
    rows::{check_rows, row},
};
use crate::{
    problem::{KvLayout, Spec},
    tensor::{Element, ShapeError, TensorRef},
};

/// Read access to the keys and values of a page pool.
///
/// The strides are free. Keys and values can be in separate pools ([`KvView::new`]) or side by side in each page
/// ([`KvView::paired`]). A view can also be one layer of a larger pool, or the same memory with another page size (set the fields).
#[derive(Clone, Copy, Debug)]
pub struct KvView<'a, T> {
    /// The keys, starting with the first key of page 0.
    pub k: &'a [T],
    /// The values, starting with the first value of page 0.
    pub v: &'a [T],
    /// Strides of `k`.
    pub k_strides: KvStrides,
    /// Strides of `v`.
    pub v_strides: KvStrides,
    /// Scales by which keys and values are multiplied.
    pub scales: KvScales<'a>,
    /// The elements of latent keys that are no part of the values, if they have a pool of their own: see
    /// [`latent_parts`](Self::latent_parts). `k` and `v` are then the pool of the values.
    pub rope: Option<RopePart<'a, T>>,
}

/// The pool of the elements of [latent](Spec::latent) keys that are no part of the values (those with a rotary embedding).
///
/// Its pages have the same ids as those of the other elements, and as many tokens.
#[derive(Clone, Copy, Debug)]
pub struct RopePart<'a, T> {
    /// The pool, starting with the first token of page 0.
    pub pool: &'a [T],
    /// Its strides. There is one head.
    pub strides: KvStrides,
}

impl<'a, T: Element> KvView<'a, T> {
    /// Keys and values in dense pools of their own.
    #[must_use]
    pub const fn new(
        spec: &Spec,
        layout: KvLayout,
        page_size: u32,
        k: &'a [T],
        v: &'a [T],
    ) -> Self {
        let k_strides = layout.strides(page_size, spec.kv_heads, spec.head_dim_qk);
        let v_strides = layout.strides(page_size, spec.kv_heads, spec.head_dim_v);
        Self::of([k, v], [k_strides, v_strides])
    }

    /// Pools of keys and of values, which may be one, without scales.
    pub(super) const fn of([k, v]: [&'a [T]; 2], [k_strides, v_strides]: [KvStrides; 2]) -> Self {
        Self {
            k,
            v,
            k_strides,
            v_strides,
            scales: KvScales::One,
            rope: None,
        }
    }

    /// With scales of 8-bit keys and values.
    #[must_use]
    pub const fn with_scales(mut self, scales: KvScales<'a>) -> Self {
        self.scales = scales;
        self
    }

    /// The one pool of [latent](Spec::latent) attention: `[pages, page_size, head_dim_qk]`.
    #[must_use]
    pub const fn latent(spec: &Spec, page_size: u32, pool: &'a [T]) -> Self {
        let strides = KvLayout::Nhd.strides(page_size, 1, spec.head_dim_qk);
        Self::of([pool; 2], [strides; 2])
    }

    /// The one pool of latent attention whose [rows contain their scales](KvScales::InRow): `[pages, page_size, 656]`
    /// bytes.
    #[must_use]
    pub const fn latent_656(page_size: u32, pool: &'a [T]) -> Self {
        let strides = KvLayout::Nhd.strides(page_size, 1, LATENT_656_BYTES);
        Self::of([pool; 2], [strides; 2]).with_scales(KvScales::InRow)
    }

    /// A pool in which each page has its keys and then its values: `[pages, 2, …]`.
    ///
    /// # Errors
    /// [`ShapeError::Unpaired`] if keys and values differ in head dimension, [`ShapeError::PartOfPage`] if
    /// the pool is not a whole number of pages.
    pub fn paired(
        spec: &Spec,
        layout: KvLayout,
        page_size: u32,
        pool: &'a [T],
    ) -> Result<Self, ShapeError> {
        let (strides, half) = paired_strides(spec, layout, page_size, pool.len())?;
        Ok(Self::of(
            [pool, &pool[half.min(pool.len())..]],
            [strides; 2],
        ))
    }

    /// The key of a head at `offset` in a page.
    ///
    /// # Panics
    /// If keys are in [two pools](Self::latent_parts).
    #[must_use]
    #[inline(always)]
    pub fn key(&self, page: u32, offset: u32, head: u32, head_dim: u32) -> &'a [T] {
        assert!(self.rope.is_none(), "the key is in two pools");
        &self.k[row(self.k_strides, page, offset, head, head_dim)]
    }

    /// The value of a head at `offset` in a page.
    #[must_use]
    #[inline(always)]
    pub fn value(&self, page: u32, offset: u32, head: u32, head_dim: u32) -> &'a [T] {
        &self.v[row(self.v_strides, page, offset, head, head_dim)]
    }

    /// Number of whole pages in the slices. The last page ends with its last row, even if the page stride leads beyond
    /// it.
    #[cfg(feature = "emulator")]
    pub(crate) fn pages(&self, spec: &Spec) -> u32 {
        let of = |len, strides, dim| {
            super::rows::pages_in(len, strides, spec.kv_heads, self.stored(dim))
        };
        let [key, rope] = self.key_parts(spec);
        let of_rope = self
            .rope
            .map(|of_keys| of(of_keys.pool.len(), of_keys.strides, rope));
        of(self.k.len(), self.k_strides, key)
            .min(of(self.v.len(), self.v_strides, spec.head_dim_v))
            .min(of_rope.unwrap_or(u32::MAX))
    }

    /// The numbers of a key, before scales that are not in its row.
    pub(crate) fn wide_key(&self, spec: &Spec, page: u32, offset: u32, head: u32) -> Vec<f64> {
        let [dim, rope] = self.key_parts(spec);
        let mut key = self.wide(
            &self.k[row(self.k_strides, page, offset, head, self.stored(dim))],
            dim,
        );
        let rope = self.rope_row(page, offset, rope).iter();
        key.extend(rope.map(|x| f64::from(x.to_f32())));
        key
    }

    /// The numbers of a value, likewise.
    pub(crate) fn wide_value(&self, page: u32, offset: u32, head: u32, head_dim: u32) -> Vec<f64> {
        self.wide(
            &self.v[row(self.v_strides, page, offset, head, self.stored(head_dim))],
            head_dim,
        )
    }

    /// Elements of a row in the pool.
    const fn stored(&self, head_dim: u32) -> u32 {
        match self.scales {
            KvScales::InRow => LATENT_656_BYTES,
            _ => head_dim,
        }
    }

    fn wide(&self, row: &[T], head_dim: u32) -> Vec<f64> {
        if self.scales == KvScales::InRow {
            let mut elements = [0.0; ELEMENTS];
            let elements = &mut elements[..head_dim as usize];
            latent_656::widen(bytemuck::cast_slice(row), elements);
            return elements.iter().map(|&x| x.into()).collect();
        }
        row.iter().map(|x| x.to_f32().into()).collect()
    }

    /// Checks that every page of a table's pool is inside the slices.
    ///
    /// # Errors
    /// [`ShapeError::PageSize`], [`ShapeError::NoKvHeads`], [`ShapeError::PoolTooSmall`], [`ShapeError::NotLatent`],
    /// [`ShapeError::OneHead`], [`ShapeError::NotInParts`] or [`ShapeError::NoRows656`].
    pub fn check(
        &self,
        spec: &Spec,
        part: usize,
        page_size: u32,
        pool_pages: u32,
    ) -> Result<(), ShapeError> {
        let one = self.k.as_ptr() == self.v.as_ptr() && self.k_strides == self.v_strides;
        if spec.latent && !one {
            return Err(ShapeError::NotLatent { part });
        }
        check_heads(spec, self.k_strides, part)?;
        let [key, rope] = self.key_parts(spec);
        let of_rope = self
            .rope
            .map(|of_keys| ("rope", of_keys.pool.len(), of_keys.strides, rope));
        self.check_rope(spec, part)?;
        let tensors = [
            ("k", self.k.len(), self.k_strides, key),
            ("v", self.v.len(), self.v_strides, spec.head_dim_v),
        ];
        for (tensor, len, strides, head_dim) in tensors.into_iter().chain(of_rope) {
            let elements = self.scales.row_elements(spec, T::DTYPE, head_dim)?;
            let (pool, pages) = ((tensor, len), [page_size, pool_pages]);
            check_rows(part, pool, strides, pages, spec.kv_heads, elements)?;
        }
        Ok(())
    }
}

/// Checks that a pool has a row for each KV head. In one with a row for each token, as that of latent attention, the rows
/// of other heads would be those of the next tokens.
pub(crate) fn check_heads(spec: &Spec, keys: KvStrides, part: usize) -> Result<(), ShapeError> {
    let next = match keys.page_size {
        1 => keys.page,
        _ => keys.token,
    };
    let kv_heads = spec.kv_heads;
    match kv_heads > 1 && keys.head > 0 && keys.head == next {
        true => Err(ShapeError::OneHead { part, kv_heads }),
        false => Ok(()),
    }
}

/// Read access to the keys and values of a page pool whose element type is known only at run time.
///
/// Both have the shape `[pages, page_size, kv_heads, head_dim]`, with any order in memory. For a pool of
/// [`KvLayout::Hnd`], [exchange](TensorRef::swap_axes) the middle axes. Latent keys are in one pool; for two see
/// [`KvView::latent_parts`].
#[derive(Clone, Copy, Debug)]
pub struct KvTensors<'a> {
    /// The keys.
    pub k: TensorRef<'a, 4>,
    /// The values.
    pub v: TensorRef<'a, 4>,
    /// Scales by which keys and values are multiplied.
    pub scales: KvScales<'a>,
}

fn paired_strides(
    spec: &Spec,
    layout: KvLayout,
    page_size: u32,
    len: usize,
) -> Result<(KvStrides, usize), ShapeError> {
    let &Spec {
        head_dim_qk,
        head_dim_v,
        ..
    } = spec;
    if head_dim_qk != head_dim_v {
        return Err(ShapeError::Unpaired {
            head_dim_qk,
            head_dim_v,
        });
    }
    let strides = layout.strides(page_size, spec.kv_heads, head_dim_qk);
    let half = strides.page as usize;
    if !len.is_multiple_of(2 * half) {
        return Err(ShapeError::PartOfPage {
            got: len,
            page: 2 * half,
        });
    }
    // Saturated, as the strides of a page are: a pool that large is refused where it is described.
    let page = strides.page.saturating_mul(2);
    Ok((KvStrides { page, ..strides }, half))
}
