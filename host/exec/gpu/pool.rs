//! A page pool in device memory, and the layout of its pages.

use kernels_gpu::abi::{KvStrides, ScaleParams};

use super::{
    DevicePtr, DeviceTensor, KvScales,
    tensor::{COUNTED, VECTOR_BYTES, check_address, fits},
};
#[cfg(feature = "unstable")]
use crate::kv::{ScalesByHead, view_by_head};
use crate::{
    Error,
    checks::{check_extent, check_same, extent},
    exec::apart::check_sides,
    kv::{LATENT_656_BYTES, by_token},
    problem::{Dtype, KvLayout, MAX_PAGE_SIZE, ProblemError, Quantity, Spec},
    tensor::ShapeError,
};

/// Keys and values of a page pool in device memory; the counterpart of [`KvView`](crate::kv::KvView).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvPool {
    /// Address of the first key of page 0.
    pub k: DevicePtr,
    /// Address of the first value of page 0.
    pub v: DevicePtr,
    /// Element type.
    pub dtype: Dtype,
    /// Pages in the pool.
    pub pages: u32,
    /// Strides of the keys.
    pub k_strides: KvStrides,
    /// Strides of the values.
    pub v_strides: KvStrides,
    /// Scales by which keys and values are multiplied.
    pub scales: KvScales,
    /// The elements of latent keys that are no part of the values, if they have a pool of their own: see
    /// [`latent_parts`](Self::latent_parts). `k` and `v` are then the pool of the values.
    pub rope: Option<RopePart>,
    /// The heads that it was described for. None if its strides were given.
    pub(super) heads: Option<PoolHeads>,
}

/// The heads that a pool was described for, which strides do not show: those of a pool of more heads also fit fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PoolHeads {
    kv_heads: u32,
    head_dim_qk: u32,
    head_dim_v: u32,
    /// The strides that follow. If the pool has others, a caller has set them.
    strides: [KvStrides; 2],
}

impl PoolHeads {
    const fn new(spec: &Spec, kv_heads: u32, strides: [KvStrides; 2]) -> Self {
        Self {
            kv_heads,
            head_dim_qk: spec.head_dim_qk,
            head_dim_v: spec.head_dim_v,
            strides,
        }
    }
}

/// The pool of the elements of latent keys that are no part of the values; the counterpart of
/// [`kv::RopePart`](crate::kv::RopePart).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RopePart {
    /// Address of the first element of token 0 of page 0.
    pub pool: DevicePtr,
    /// Its strides. There is one head.
    pub strides: KvStrides,
}

impl KvPool {
    /// Keys and values in dense pools of their own.
    #[must_use]
    pub const fn new(
        spec: &Spec,
        layout: KvLayout,
        page_size: u32,
        pages: u32,
        k: DevicePtr,
        v: DevicePtr,
    ) -> Self {
        let k_strides = layout.strides(page_size, spec.kv_heads, spec.head_dim_qk);
        let v_strides = layout.strides(page_size, spec.kv_heads, spec.head_dim_v);
        let strides = [k_strides, v_strides];
        Self::of(spec.kv_dtype, pages, [k, v], strides).of_heads(spec, spec.kv_heads)
    }

    /// With the heads that the pool was described for.
    pub(super) const fn of_heads(mut self, spec: &Spec, kv_heads: u32) -> Self {
        let strides = [self.k_strides, self.v_strides];
        self.heads = Some(PoolHeads::new(spec, kv_heads, strides));
        self
    }

    /// Pools of keys and of values, which may be one, without scales.
    pub(super) const fn of(
        dtype: Dtype,
        pages: u32,
        [k, v]: [DevicePtr; 2],
        [k_strides, v_strides]: [KvStrides; 2],
    ) -> Self {
        Self {
            k,
            v,
            dtype,
            pages,
            k_strides,
            v_strides,
            scales: KvScales::One,
            rope: None,
            heads: None,
        }
    }

    /// With scales of 8-bit keys and values.
    #[must_use]
    pub const fn with_scales(mut self, scales: KvScales) -> Self {
        self.scales = scales;
        self
    }

    /// The one pool of [latent](Spec::latent) attention: `[pages, page_size, head_dim_qk]`.
    #[must_use]
    pub const fn latent(spec: &Spec, page_size: u32, pages: u32, pool: DevicePtr) -> Self {
        let strides = KvLayout::Nhd.strides(page_size, 1, spec.head_dim_qk);
        Self::of(spec.kv_dtype, pages, [pool; 2], [strides; 2]).of_heads(spec, 1)
    }

    /// The one pool of latent attention whose rows contain their scales: `[pages, page_size, 656]` bytes, see
    /// [`kv::KvScales::InRow`](crate::kv::KvScales::InRow).
    #[must_use]
    pub const fn latent_656(page_size: u32, pages: u32, pool: DevicePtr) -> Self {
        let strides = KvLayout::Nhd.strides(page_size, 1, LATENT_656_BYTES);
        Self::of(Dtype::F8E4M3, pages, [pool; 2], [strides; 2]).with_scales(KvScales::InRow)
    }

    /// The same memory as pages of one token, for token-level parts: the counterpart of
    /// [`KvView::by_token`](crate::kv::KvView::by_token). `None` if tokens are not evenly spaced, or are 2³² or more.
    #[must_use]
    pub fn by_token(&self) -> Option<Self> {
        let page_size = self.k_strides.page_size;
        let pages = self.pages.checked_mul(page_size)?;
        let scales = match self.scales {
            KvScales::Token { k, v } => KvScales::Token {
                k: scales_by_token(&k)?,
                v: scales_by_token(&v)?,
            },
            other => other,
        };
        let rope = match self.rope {
            None => None,
            Some(RopePart { pool, strides }) => Some(RopePart {
                pool,
                strides: by_token(strides)?,
            }),
        };
        let [k_strides, v_strides] = [by_token(self.k_strides)?, by_token(self.v_strides)?];
        let heads = self.own_heads().map(|heads| PoolHeads {
            strides: [k_strides, v_strides],
            ..heads
        });
        Some(Self {
            pages,
            k_strides,
            v_strides,
            scales,
            rope,
            heads,
            ..*self
        })
    }

    /// The part of a page that belongs to one head as a page of its own: the counterpart of
    /// [`KvView::by_head`](crate::kv::KvView::by_head).
    ///
    /// # Errors
    /// As that; [`ProblemError::TooLarge`].
    #[cfg(feature = "unstable")]
    pub fn by_head(&self, kv_heads: u32) -> Result<Self, ProblemError> {
        let scales = match self.scales {
            KvScales::One | KvScales::Tensor { .. } => ScalesByHead::Same,
            KvScales::Head { .. } => ScalesByHead::OfHeads,
            KvScales::Request { .. } => ScalesByHead::Others("scales of requests"),
            KvScales::Token { .. } => ScalesByHead::Others("a scale for each token"),
            KvScales::InRow => ScalesByHead::Others("scales in its rows"),
        };
        let strides = [self.k_strides, self.v_strides];
        let ([k_strides, v_strides], step) = view_by_head(strides, scales, self.rope.is_some())?;
        // The view ends with the heads of the last page.
        let pages = match u64::from(self.pages) {
            0 => 0,
            pages => (pages - 1) * u64::from(step) + u64::from(kv_heads),
        };
        Ok(Self {
            pages: fits(
                Quantity::Pool("pages × heads of the pool"),
                pages as usize,
                u32::MAX,
            )?,
            k_strides,
            v_strides,
            heads: None,
            ..*self
        })
    }

    /// The heads that it was described for, if its strides are still theirs.
    fn own_heads(&self) -> Option<PoolHeads> {
        let strides = [self.k_strides, self.v_strides];
        self.heads.filter(|heads| heads.strides == strides)
    }

    /// Checks that it was described for the heads of the specification, or that its strides were given.
    pub(super) fn check_heads(&self, spec: &Spec) -> Result<(), Error> {
        let Some(heads) = self.own_heads() else {
            return Ok(());
        };
        for (dimension, got, expected) in [
            ("KV heads", heads.kv_heads, spec.kv_heads),
            (
                "elements in a head of the keys",
                heads.head_dim_qk,
                spec.head_dim_qk,
            ),
            (
                "elements in a head of the values",
                heads.head_dim_v,
                spec.head_dim_v,
            ),
        ] {
            if got != expected {
                let rule = format!(
                    "{expected}, as in the specification (KvPool::with_strides describes some heads of a larger pool)"
                );
                return Err(extent("the KV pool", dimension, got as usize, rule));
            }
        }
        Ok(())
    }

    /// Tokens of a page, for calls that write keys and values. Checks that both have the same number, and that keys
    /// are in one pool.
    pub(super) fn page_size(&self) -> Result<u32, Error> {
        if self.rope.is_some() {
            return Err(Error::NoInstance {
                kernel: "append",
                asked: "keys into two pools (KvPool::latent_parts)".into(),
                there: "append_rows, or append_rows_quantised, once for each of the two pools",
            });
        }
        self.tokens_of_page(0)
    }

    /// Tokens of a page. Checks that keys and values have the same number.
    pub(super) fn tokens_of_page(&self, part: usize) -> Result<u32, Error> {
        let page_size = self.k_strides.page_size;
        check_page_size(part, page_size)?;
        let [of_k, of_v] = [page_size, self.v_strides.page_size].map(|tokens| tokens as usize);
        let tokens = "tokens in a page";
        check_extent("the value pool", tokens, of_v, of_k, "in the key pool")?;
        Ok(page_size)
    }

    /// Checks that its elements have the specification's type.
    pub(super) fn check_dtype(&self, spec: &Spec) -> Result<(), Error> {
        check_same("the KV pool", self.dtype, "the spec's KV", spec.kv_dtype)
    }

    /// Checks what making a tensor map would check.
    pub(super) fn check_addresses(&self) -> Result<(), Error> {
        check_address("the key pool", self.k, self.pages == 0, VECTOR_BYTES)?;
        check_address("the value pool", self.v, self.pages == 0, VECTOR_BYTES)
    }

    /// Checks that keys and values are the same pool: values are read as a part of the keys.
    pub(super) fn check_is_one(&self) -> Result<(), Error> {
        match (self.k, self.k_strides) == (self.v, self.v_strides) {
            true => Ok(()),
            false => Err(ShapeError::NotLatent { part: 0 }.into()),
        }
    }

    /// Checks the scales for this number of query tokens, and makes the kernel parameters.
    pub(super) fn scale_parameters(
        &self,
        spec: &Spec,
        tokens: usize,
    ) -> Result<ScaleParams, Error> {
        let extents = [self.pages, self.k_strides.page_size];
        self.scales.parameters(spec, self.dtype, extents, tokens)
    }

    /// Checks that no rows overlap, for calls that write them.
    pub(super) fn check_apart(&self, spec: &Spec) -> Result<(), Error> {
        check_sides(spec, self.pages, [self.k_strides, self.v_strides])
    }

    /// With other strides, for example for keys and values in one pool, for one layer of a larger pool, or for some of its heads.
    /// They say which memory is read: the heads that the pool was described for are no longer compared with those of the plan.
    #[must_use]
    pub const fn with_strides(mut self, k: KvStrides, v: KvStrides) -> Self {
        self.heads = None;
        self.k_strides = k;
        self.v_strides = v;
        self
    }
}

/// Scales of tokens, `[pages, page_size, kv_heads]`, as those of pages of one token.
fn scales_by_token(scales: &DeviceTensor<3>) -> Option<DeviceTensor<3>> {
    let ([pages, page_size, heads], [page, token, head]) = (scales.shape, scales.strides);
    if page_size == 1 {
        return Some(*scales);
    }
    let even = page == page_size.checked_mul(token)?;
    let shape = [pages.checked_mul(page_size)?, 1, heads];
    even.then_some(DeviceTensor {
        shape,
        strides: [token, token, head],
        ..*scales
    })
}

/// The strides of `[pages, page_size, kv_heads, head_dim]`, for calls that write rows to it.
pub(super) fn pool_strides(pool: &DeviceTensor<4>) -> Result<KvStrides, Error> {
    let page_size = fits(Quantity::Page("tokens in a page"), pool.shape[1], u32::MAX)?;
    check_page_size(0, page_size)?;
    pool.check_dense("the pool", 3)?;
    let stride = |axis: usize| {
        let what = Quantity::Stride("a stride of the pool");
        fits(what, pool.strides[axis], u32::MAX)
    };
    Ok(KvStrides {
        page: stride(0)?,
        token: stride(1)?,
        head: stride(2)?,
        page_size,
    })
}

/// Tokens of a pool, which kernels that write to it divide by those of a page.
pub(super) fn pool_slots(pages: u32, page_size: u32) -> Result<u32, ProblemError> {
    let slots = u64::from(pages) * u64::from(page_size);
    fits(
        Quantity::Pool("tokens in the pool"),
        slots as usize,
        COUNTED,
    )
}

pub(super) fn check_page_size(part: usize, got: u32) -> Result<(), ProblemError> {
    match got {
        1..=MAX_PAGE_SIZE => Ok(()),
        _ => Err(ProblemError::PageSize { part, got }),
    }
}

#[cfg(all(test, feature = "unstable"))]
mod tests {
    use super::*;

    #[test]
    fn a_pool_by_token_has_a_page_for_each_slot() {
        let spec = Spec::new(8, 2, 64);
        let [nhd, hnd] = [KvLayout::Nhd, KvLayout::Hnd]
            .map(|layout| KvPool::new(&spec, layout, 16, 3, 1 << 20, 1 << 21));
        let by_token = nhd.by_token().unwrap();
        assert_eq!(
            (by_token.pages, by_token.k_strides),
            (48, KvLayout::Nhd.strides(1, 2, 64))
        );
        assert_eq!(hnd.by_token(), None);
        let tensor = DeviceTensor::new(1 << 22, Dtype::F32, [3, 16, 2]);
        let scaled = |k| nhd.with_scales(KvScales::Token { k, v: tensor }).by_token();
        let Some(KvScales::Token { k, .. }) = scaled(tensor).map(|pool| pool.scales) else {
            panic!("scales of tokens");
        };
        assert_eq!((k.shape, k.strides[0], k.strides[2]), ([48, 1, 2], 2, 1));
        assert_eq!(scaled(tensor.with_stride(0, 40)), None);
        let many = KvPool::new(&spec, KvLayout::Nhd, 128, 1 << 30, 1 << 20, 1 << 21);
        assert_eq!(many.by_token(), None);
    }

    /// What was given by strides, or reads one head of several, has no other heads to compare.
    #[test]
    fn a_pool_is_for_the_heads_that_it_was_described_for() {
        let (two, four) = (Spec::new(8, 2, 64), Spec::new(8, 4, 64));
        let pool = KvPool::new(&four, KvLayout::Nhd, 16, 3, 1 << 20, 1 << 21);
        let error = pool.check_heads(&two).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the KV pool has 4 KV heads: it must be 2, as in the specification (KvPool::with_strides describes some heads of \
             a larger pool)"
        );
        let tokens = pool.by_token().unwrap();
        assert_eq!(tokens.check_heads(&two), Err(error));
        assert_eq!(tokens.check_heads(&four), Ok(()));
        assert_eq!(
            pool.with_strides(pool.k_strides, pool.v_strides)
                .check_heads(&two),
            Ok(())
        );
        let mut set = pool;
        set.k_strides.page *= 2;
        assert_eq!(set.check_heads(&two), Ok(()));
        let by_head = KvPool::new(&four, KvLayout::Hnd, 16, 3, 1 << 20, 1 << 21).by_head(4);
        assert_eq!(by_head.unwrap().check_heads(&Spec::new(2, 1, 64)), Ok(()));
        let latent = Spec::latent(16, 512, 64);
        let other = Spec::latent(16, 256, 64);
        for pool in [
            KvPool::latent(&latent, 16, 3, 1 << 20),
            KvPool::latent_parts(&latent, 16, 3, 1 << 20, 1 << 21),
        ] {
            assert_eq!(pool.check_heads(&latent), Ok(()));
            assert!(pool.check_heads(&other).is_err());
        }
        assert_eq!(
            KvPool::latent_656(16, 3, 1 << 20).check_heads(&latent),
            Ok(())
        );
    }

    #[test]
    fn what_a_pool_by_head_cannot_have_is_named() {
        let spec = Spec::new(8, 2, 64);
        let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 3, 1 << 20, 1 << 21);
        let scale = DeviceTensor::new(1 << 22, Dtype::F32, [2]);
        let scaled = pool.with_scales(KvScales::Head { k: scale, v: scale });
        let error = scaled.by_head(2).unwrap_err();
        assert!(matches!(error, ProblemError::PoolByHead { .. }), "{error}");
        let huge = KvPool {
            pages: u32::MAX,
            ..pool
        };
        let error = huge.by_head(2).unwrap_err();
        assert!(matches!(error, ProblemError::TooLarge { .. }), "{error}");
    }

    /// An empty pool had as many pages of heads as there are heads.
    #[test]
    fn an_empty_pool_has_no_pages_of_heads() {
        let spec = Spec::new(8, 2, 64);
        let pages = |pages| {
            let pool = KvPool::new(&spec, KvLayout::Hnd, 16, pages, 1 << 20, 1 << 20);
            pool.by_head(2).ok().map(|pool| pool.pages)
        };
        assert_eq!([0, 1, 3].map(pages), [Some(0), Some(2), Some(6)]);
    }
}
