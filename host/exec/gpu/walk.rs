//! How tensor maps describe a page pool: one description for prefills and decodes.

mod columns;

use kernels_gpu::abi::{KvStrides, PageCoordinates};

pub(super) use self::columns::Columns;
use super::{
    KvPool,
    maps::MapShape,
    tensor::{COUNTED, fits},
};
use crate::{
    Error,
    checks::extent,
    problem::{Dtype, Quantity, Spec},
};

/// The tensor map of the keys or the values of a pool, and the ways in it to a page and to a head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Walk {
    /// Steps in the third dimension count heads.
    pub(super) at: PageCoordinates,
    /// Dimensions of the tensor map. The last one counts the places that may be read.
    dims: [u64; 5],
    strides: [u64; 4],
    columns: Columns,
}

impl Walk {
    /// Of `heads` heads, or groups of neighbouring heads.
    ///
    /// # Errors
    /// [`Error::Extent`] for pages that break a group of 8 tokens; [`Error::Stride`] for heads at no multiple of a distance that
    /// pages are apart, too; [`ProblemError::TooLarge`](crate::ProblemError::TooLarge).
    pub(super) fn new(
        heads: u32,
        columns: Columns,
        pages: u32,
        s: &KvStrides,
        dtype: Dtype,
    ) -> Result<Self, Error> {
        if s.page_size == 0 || !s.page_size.is_multiple_of(8) {
            let (got, rule) = (s.page_size as usize, "a multiple of 8");
            return Err(extent("the pool", "tokens in a page", got, rule));
        }
        let bytes = |elements: u32| u64::from(elements) * u64::from(dtype.bytes());
        let groups = u64::from(s.page_size / 8);
        let walk = |at, slabs, places: u64, place| {
            let what = Quantity::Pool("pages × KV heads");
            let outside = fits(what, places as usize, COUNTED)?;
            Ok(Self {
                at: PageCoordinates { outside, ..at },
                dims: [columns.width.into(), 8, slabs, groups, places],
                strides: [
                    bytes(s.token),
                    bytes(columns.step),
                    8 * bytes(s.token),
                    bytes(place),
                ],
                columns,
            })
        };
        let (slabs, pages) = (u64::from(columns.slabs), u64::from(pages.max(1)));
        // With a single head, the stride between heads does not matter.
        if heads == 1 || columns.dense() == Some(s.head) {
            let at = PageCoordinates {
                step_in_token: 1,
                step_per_page: 1,
                ..PageCoordinates::default()
            };
            return walk(at, slabs * u64::from(heads), pages, s.page);
        }
        if s.head == 0 || !s.page.is_multiple_of(s.head) {
            return Err(Error::Stride {
                tensor: "the pool",
                dimension: "pages",
                got: s.page as usize,
                rule: "a multiple of that between heads".into(),
            });
        }
        let at = PageCoordinates {
            step_per_page: s.page / s.head,
            step_per_head: 1,
            ..PageCoordinates::default()
        };
        let last = (pages - 1) * u64::from(at.step_per_page);
        walk(at, slabs, last + u64::from(heads), s.head)
    }

    /// Of keys and of values, of whose heads `together` neighbours are read as one. Kernels step through both alike, except that a
    /// head of the values may have another number of slabs.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Error::Stride`] where the steps differ, for example where heads follow each other in the tokens of
    /// one pool, and in the pages of the other.
    pub(super) fn both(
        kv_heads: u32,
        together: u32,
        columns: [Columns; 2],
        pool: &KvPool,
    ) -> Result<[Self; 2], Error> {
        let side = |columns, strides: &KvStrides| {
            let strides = KvStrides {
                head: strides.head.saturating_mul(together),
                ..*strides
            };
            let heads = kv_heads / together;
            Self::new(heads, columns, pool.pages, &strides, pool.dtype)
        };
        let [k, v] = [
            side(columns[0], &pool.k_strides)?,
            side(columns[1], &pool.v_strides)?,
        ];
        if k.at == v.at && pool.k_strides.page_size == pool.v_strides.page_size {
            return Ok([k, v]);
        }
        Err(Error::Stride {
            tensor: "the value pool",
            dimension: "tokens, heads or pages",
            got: pool.v_strides.token as usize,
            rule: format!(
                "in the layout of the keys' {:?}, with heads of {} elements",
                pool.k_strides,
                columns[1].elements()
            ),
        })
    }

    /// Of a single head of whole slabs.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub(super) fn one(dim: u32, pages: u32, s: &KvStrides, dtype: Dtype) -> Result<Self, Error> {
        Self::new(1, Columns::whole(dim, dtype), pages, s, dtype)
    }

    /// Of heads of whole slabs.
    ///
    /// # Errors
    /// As [`both`](Self::both).
    pub(super) fn whole(spec: &Spec, pool: &KvPool) -> Result<[Self; 2], Error> {
        let columns =
            [spec.head_dim_qk, spec.head_dim_v].map(|dim| Columns::whole(dim, pool.dtype));
        Self::both(spec.kv_heads, 1, columns, pool)
    }

    /// Of 16-bit heads that are no multiple of 64 columns, each slab in a box of its own: heads may be anywhere in a token or page.
    ///
    /// # Errors
    /// [`ProblemError::TooLarge`](crate::ProblemError::TooLarge).
    pub(super) fn cut(heads: u32, dim: u32, pages: u32, s: &KvStrides) -> Result<Self, Error> {
        let bytes = |elements: u32| u64::from(elements) * 2;
        let places = pages.max(1);
        let outside = fits(Quantity::Pool("pages"), places as usize, COUNTED)?;
        Ok(Self {
            at: PageCoordinates {
                step_in_token: 1,
                step_per_page: 1,
                step_per_head: 0,
                outside,
            },
            dims: [
                dim.into(),
                8,
                heads.into(),
                (s.page_size / 8).into(),
                places.into(),
            ],
            strides: [
                bytes(s.token),
                bytes(s.head),
                8 * bytes(s.token),
                bytes(s.page),
            ],
            columns: Columns {
                width: dim,
                slabs: 1,
                step: dim,
                boxed: 64,
                boxed_slabs: 1,
            },
        })
    }

    /// The step in the third dimension of the map from one head to the next.
    pub(super) const fn slabs_per_head(&self) -> u32 {
        self.at.step_in_token * self.columns.slabs
    }

    /// The shape with boxes of a whole head and `tokens` tokens.
    pub(super) fn whole_heads(&self, dtype: Dtype, tokens: u32) -> MapShape {
        self.shape(dtype, self.columns.boxed_slabs, tokens)
    }

    /// The shape with boxes of `slabs` slabs of a head and `tokens` tokens.
    pub(super) fn shape(&self, dtype: Dtype, slabs: u32, tokens: u32) -> MapShape {
        MapShape {
            dtype,
            dims: self.dims,
            strides: self.strides,
            box_dims: [self.columns.boxed, 8, slabs, tokens / 8, 1],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{KvLayout, Padding};

    fn walk(layout: KvLayout, page_size: u32) -> Result<Walk, Error> {
        let columns = Columns::whole(128, Dtype::BF16);
        let strides = layout.strides(page_size, 8, 128);
        Walk::new(8, columns, 100, &strides, Dtype::BF16)
    }

    fn steps(walk: &Walk) -> (u32, u32, u32) {
        let at = walk.at;
        (walk.slabs_per_head(), at.step_per_page, at.step_per_head)
    }

    #[test]
    fn keys_of_8_bits_have_lines_of_128_bytes_or_less() {
        let walk = |head_dim| {
            let strides = KvLayout::Nhd.strides(16, 8, head_dim);
            let columns = Columns::whole(head_dim, Dtype::F8E4M3);
            let walk = Walk::new(8, columns, 100, &strides, Dtype::F8E4M3).unwrap();
            (walk.dims, walk.strides, walk.slabs_per_head())
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
        assert_eq!((steps(&nhd), nhd.at.outside), ((2, 1, 0), 100));
        let hnd = walk(KvLayout::Hnd, 24).unwrap();
        assert_eq!(hnd.dims, [64, 8, 2, 3, 800]);
        assert_eq!(hnd.strides, [256, 128, 2048, 6144]);
        assert_eq!((steps(&hnd), hnd.at.outside), ((0, 8, 1), 800));
    }

    /// Latent attention has such pools, and its kernels only step from page to page.
    #[test]
    fn a_single_head_is_walked_by_pages_whatever_lies_between_its_tokens() {
        let strides = KvStrides {
            page: 40 * 640,
            token: 624,
            head: 624,
            page_size: 40,
        };
        let walk = Walk::one(576, 100, &strides, Dtype::BF16).unwrap();
        assert_eq!(walk.dims, [64, 8, 9, 5, 100]);
        assert_eq!(walk.strides, [1248, 128, 9984, 51200]);
        assert_eq!(steps(&walk), (9, 1, 0));
    }

    #[test]
    fn pages_that_break_a_group_of_8_are_refused() {
        for page_size in [1, 4, 12] {
            let error = walk(KvLayout::Nhd, page_size).expect_err("is refused");
            assert!(error.to_string().contains("a multiple of 8"), "{error}");
        }
    }

    /// Heads of 192 have three whole slabs, and the kernels that pad them four: in a box, the fourth is missing and not the next
    /// head's first.
    #[test]
    fn heads_that_get_more_slabs_are_walked_one_by_one() {
        let spec = Spec::new(8, 2, 192);
        let columns = Columns::padded(Padding::of(&spec).unwrap());
        let strides = KvLayout::Nhd.strides(16, 2, 192);
        let walk = Walk::new(2, columns, 100, &strides, Dtype::BF16).unwrap();
        assert_eq!(walk.dims[2], 3);
        assert_eq!(steps(&walk), (0, 32, 1));
        assert_eq!(walk.whole_heads(Dtype::BF16, 16).box_dims[2], 4);
    }

    /// A pool of `[pages, 2, heads, page size, dim]`: the places of the keys' heads and those of the values' take turns, and what a
    /// side may read ends with its own heads of the last page.
    #[test]
    fn keys_and_values_may_share_a_pool_of_heads() {
        let spec = Spec::new(8, 2, 64);
        let mut strides = KvLayout::Hnd.strides(16, 2, 64);
        strides.page *= 2;
        let pool = KvPool::new(&spec, KvLayout::Hnd, 16, 100, 1 << 20, (1 << 20) + 4096);
        let paired = pool.with_strides(strides, strides);
        for walk in Walk::whole(&spec, &paired).unwrap() {
            assert_eq!(walk.dims, [64, 8, 1, 2, 99 * 4 + 2]);
            assert_eq!(walk.strides, [128, 128, 1024, 2048]);
            assert_eq!(steps(&walk), (0, 4, 1));
        }
        // With tokens first, pages may be anything apart; with heads first, both have to have as many places.
        let apart = |layout: KvLayout| {
            let strides = layout.strides(16, 2, 64);
            let longer = KvStrides {
                page: 3 * strides.page,
                ..strides
            };
            let walks = Walk::whole(&spec, &pool.with_strides(strides, longer));
            walks.map(|[k, v]| [k, v].map(|walk| walk.strides[3]))
        };
        assert_eq!(apart(KvLayout::Nhd), Ok([4096, 3 * 4096]));
        assert!(matches!(apart(KvLayout::Hnd), Err(Error::Stride { .. })));
    }

    /// A pool whose heads follow one another as a whole: 32 bits cannot count all heads.
    #[test]
    fn heads_that_are_far_apart_are_read_row_by_row() {
        let strides = KvStrides {
            page: 16 * 128,
            token: 128,
            head: 50_000 * 16 * 128,
            page_size: 16,
        };
        let walk = |strides| {
            let columns = Columns::whole(128, Dtype::BF16);
            Walk::new(64, columns, 100, strides, Dtype::BF16)
        };
        assert!(walk(&strides).is_err());
        // The stride between heads times their number wraps around to the stride of a page.
        let wraps = KvStrides {
            page: 1 << 12,
            head: (1 << 26) + (1 << 6),
            ..strides
        };
        assert!(walk(&wraps).is_err());
    }
}
