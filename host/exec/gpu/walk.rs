//! How tensor maps describe a page pool.

use kernels_gpu::abi::KvStrides;

use super::{
    KvPool,
    maps::MapShape,
    tensor::{COUNTED, fits},
};
use crate::{
    Error,
    checks::extent,
    problem::{Dtype, Padding, Quantity, Spec},
};

/// The tensor map of a pool, with two ways to reach a head: see [`DecodeParams`].
pub struct Walk {
    pub half_per_head: u32,
    pub page_per_page: u32,
    pub page_per_head: u32,
    /// Dimensions of the tensor map. The last one counts the places that may be read.
    pub dims: [u64; 5],
    strides: [u64; 4],
}

impl Walk {
    pub fn new(spec: &Spec, pages: u32, s: &KvStrides, dtype: Dtype) -> Result<Self, Error> {
        let (dim, kv_heads) = (spec.head_dim_qk, u64::from(spec.kv_heads));
        let stride = |dimension, got: u32, rule: &str| Error::Stride {
            tensor: "the pool",
            dimension,
            got: got as usize,
            rule: rule.into(),
        };
        if s.page_size == 0 || !s.page_size.is_multiple_of(8) {
            let (got, rule) = (s.page_size as usize, "a multiple of 8");
            return Err(extent("the pool", "tokens in a page", got, rule));
        }
        let bytes = |elements: u32| u64::from(elements) * u64::from(dtype.bytes());
        // Lines of 128 bytes, or of a whole row.
        let columns = slab(dim, dtype);
        let slabs = dim / columns;
        let line = bytes(columns);
        let groups = u64::from(s.page_size / 8);
        // With a single head, the stride between heads does not matter.
        if s.head == dim || kv_heads == 1 {
            return Ok(Self {
                half_per_head: slabs,
                page_per_page: 1,
                page_per_head: 0,
                dims: [
                    columns.into(),
                    8,
                    u64::from(slabs) * kv_heads,
                    groups,
                    pages.max(1).into(),
                ],
                strides: [bytes(s.token), line, 8 * bytes(s.token), bytes(s.page)],
            });
        }
        if s.head == 0 || !s.page.is_multiple_of(s.head) {
            return Err(stride("pages", s.page, "a multiple of that between heads"));
        }
        let heads_per_page = s.page / s.head;
        let places = u64::from(pages.max(1) - 1) * u64::from(heads_per_page) + kv_heads;
        Ok(Self {
            half_per_head: 0,
            page_per_page: heads_per_page,
            page_per_head: 1,
            dims: [columns.into(), 8, slabs.into(), groups, places],
            strides: [bytes(s.token), line, 8 * bytes(s.token), bytes(s.head)],
        })
    }

    /// The maps of keys and of values whose heads have different numbers of elements, all multiples of 64. Kernels step
    /// through both alike, except that a head of the values has more slabs.
    ///
    /// # Errors
    /// [`Error::Stride`] also where heads follow each other in the tokens of one pool, and in the pages of the other.
    pub fn of_two(spec: &Spec, pool: &KvPool) -> Result<[Self; 2], Error> {
        let k = Self::new(spec, pool.pages, &pool.k_strides, pool.dtype)?;
        let values = Spec {
            head_dim_qk: spec.head_dim_v,
            ..*spec
        };
        let v = Self::new(&values, pool.pages, &pool.v_strides, pool.dtype)?;
        let steps = |walk: &Self, dim| {
            let slabs = walk.half_per_head * slab(dim, pool.dtype);
            let (per_page, per_head) = (walk.page_per_page, walk.page_per_head);
            (slabs / dim, per_page, per_head, walk.dims[3], walk.dims[4])
        };
        if steps(&k, spec.head_dim_qk) == steps(&v, spec.head_dim_v) {
            return Ok([k, v]);
        }
        Err(Error::Stride {
            tensor: "the value pool",
            dimension: "tokens, heads or pages",
            got: pool.v_strides.token as usize,
            rule: format!(
                "in the layout of the keys' {:?}, with heads of {} elements",
                pool.k_strides, spec.head_dim_v
            ),
        })
    }

    /// The shape with boxes of `slabs` slabs of a head and `piece_tokens` tokens.
    pub fn shape(&self, dtype: Dtype, slabs: u32, piece_tokens: u32) -> MapShape {
        MapShape {
            dtype,
            dims: self.dims,
            strides: self.strides,
            box_dims: [self.dims[0] as u32, 8, slabs, piece_tokens / 8, 1],
        }
    }
}

/// Elements of a line in shared memory: 128 bytes, or a row if that is less.
pub fn slab(dim: u32, dtype: Dtype) -> u32 {
    dim.min(128 / dtype.bytes())
}

/// The tensor map of a pool whose heads are padded. A place is a head of a page.
#[derive(Clone, Copy, Debug)]
pub(super) struct PaddedPool {
    padding: Padding,
    strides: KvStrides,
    /// Places of a page.
    pub(super) places_per_page: u32,
    /// Number of all places. Reads behind them give zeros.
    pub(super) places: u32,
}

impl PaddedPool {
    pub(super) fn new(padding: Padding, strides: &KvStrides, pages: u32) -> Result<Self, Error> {
        debug_assert!(!padding.is_cut(), "such heads are copied row by row");
        let wrong = |dimension, got: u32, rule: &str| Error::Stride {
            tensor: "the pool",
            dimension,
            got: got as usize,
            rule: rule.into(),
        };
        let page_size = strides.page_size;
        if page_size == 0 || !page_size.is_multiple_of(8) {
            let got = page_size as usize;
            let rule = "a multiple of 8, where heads have no kernel of their dimension";
            return Err(extent("the pool", "tokens in a page", got, rule));
        }
        if strides.head == 0 || !strides.page.is_multiple_of(strides.head) {
            let rule = "a multiple of that between heads";
            return Err(wrong("pages", strides.page, rule));
        }
        let places_per_page = strides.page / strides.head;
        let places = pages as usize * places_per_page as usize;
        Ok(Self {
            padding,
            strides: *strides,
            places_per_page,
            places: fits(Quantity::Pool("pages × heads of a page"), places, COUNTED)?,
        })
    }

    pub(super) fn shape(&self, dtype: Dtype, box_tokens: u32) -> MapShape {
        let bytes = |elements: u32| u64::from(elements) * 2;
        let Padding {
            dim,
            kernel_dim,
            slabs,
            step,
        } = self.padding;
        MapShape {
            dtype,
            dims: [
                dim.min(64).into(),
                8,
                slabs.into(),
                (self.strides.page_size / 8).into(),
                self.places.max(1).into(),
            ],
            strides: [
                bytes(self.strides.token),
                bytes(step),
                8 * bytes(self.strides.token),
                bytes(self.strides.head),
            ],
            box_dims: [64, 8, kernel_dim / 64, box_tokens / 8, 1],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::KvLayout;

    fn walk(layout: KvLayout, page_size: u32) -> Result<Walk, Error> {
        let spec = Spec::new(32, 8, 128);
        Walk::new(
            &spec,
            100,
            &layout.strides(page_size, 8, 128),
            spec.kv_dtype,
        )
    }

    #[test]
    fn keys_of_8_bits_have_lines_of_128_bytes_or_less() {
        let walk = |head_dim| {
            let strides = KvLayout::Nhd.strides(16, 8, head_dim);
            let spec = Spec::new(32, 8, head_dim);
            let walk = Walk::new(&spec, 100, &strides, Dtype::F8E4M3).unwrap();
            (walk.dims, walk.strides, walk.half_per_head)
        };
        assert_eq!(
            walk(256),
            ([128, 8, 16, 2, 100], [2048, 128, 16384, 32768], 2)
        );
        assert_eq!(
            walk(128),
            ([128, 8, 8, 2, 100], [1024, 128, 8192, 16384], 1)
        );
        assert_eq!(walk(64), ([64, 8, 8, 2, 100], [512, 64, 4096, 8192], 1));
    }

    #[test]
    fn both_layouts_are_walked() {
        let nhd = walk(KvLayout::Nhd, 16).unwrap();
        assert_eq!(nhd.dims, [64, 8, 16, 2, 100]);
        assert_eq!(nhd.strides, [2048, 128, 16384, 32768]);
        assert_eq!(
            (nhd.half_per_head, nhd.page_per_page, nhd.page_per_head),
            (2, 1, 0)
        );
        let hnd = walk(KvLayout::Hnd, 24).unwrap();
        assert_eq!(hnd.dims, [64, 8, 2, 3, 800]);
        assert_eq!(hnd.strides, [256, 128, 2048, 6144]);
        assert_eq!(
            (hnd.half_per_head, hnd.page_per_page, hnd.page_per_head),
            (0, 8, 1)
        );
    }

    /// Latent attention has such pools, and its kernels only step from page to page.
    #[test]
    fn a_single_head_is_walked_by_pages_whatever_lies_between_its_tokens() {
        let spec = Spec::latent(16, 512, 64);
        let strides = KvStrides {
            page: 40 * 640,
            token: 624,
            head: 624,
            page_size: 40,
        };
        let walk = Walk::new(&spec, 100, &strides, spec.kv_dtype).unwrap();
        assert_eq!(walk.dims, [64, 8, 9, 5, 100]);
        assert_eq!(walk.strides, [1248, 128, 9984, 51200]);
        let steps = (walk.half_per_head, walk.page_per_page, walk.page_per_head);
        assert_eq!(steps, (9, 1, 0));
    }

    #[test]
    fn pages_that_break_a_group_of_8_are_refused() {
        for page_size in [1, 4, 12] {
            let error = walk(KvLayout::Nhd, page_size).err().expect("is refused");
            assert!(error.to_string().contains("a multiple of 8"), "{error}");
        }
    }
}
