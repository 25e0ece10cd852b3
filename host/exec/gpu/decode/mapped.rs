//! How a decode reads a page pool.

use kernels_gpu::{abi::KvStrides, registry::KernelInfo};

use super::DecodeCall;
use crate::{
    Error,
    checks::extent,
    exec::gpu::{
        KvPool,
        maps::{BOX_TOKENS, MapShape},
        tensor::{COUNTED, fits},
        walk::{PaddedPool, Walk, slab},
    },
    problem::{Padding, Quantity, Spec},
};

/// How a launch reads a pool: by tensor maps, or else row by row.
pub struct Mapped {
    /// Shapes of the maps of keys and of values.
    pub shapes: Option<[MapShape; 2]>,
    /// As in [`DecodeParams`].
    pub piece_tokens: u32,
    /// `half_per_head`, `page_per_page` and `page_per_head` of [`DecodeParams`].
    pub steps: [u32; 3],
    pub outside: u32,
}

impl Mapped {
    pub const BY_ROWS: Self = Self {
        shapes: None,
        piece_tokens: 1,
        steps: [0; 3],
        outside: 0,
    };

    /// By tensor maps.
    pub fn new(
        call: &DecodeCall<'_>,
        row: &KernelInfo,
        padding: Option<Padding>,
    ) -> Result<Self, Error> {
        let DecodeCall { spec, pool, .. } = *call;
        if row.head_dim != row.value_dim {
            return Self::of_two(spec, pool, row);
        }
        if pool.k_strides != pool.v_strides {
            return Err(Error::Stride {
                tensor: "the value pool",
                dimension: "tokens, heads or pages",
                got: pool.v_strides.token as usize,
                rule: format!("as the keys': {:?}", pool.k_strides),
            });
        }
        let piece_tokens = piece_tokens(pool);
        let padded = match padding {
            Some(padding) if padding.is_cut() || pool.dtype.bytes() == 1 => {
                let rule = "that of a kernel, or with keys and values of 16 bits a multiple of 16 up to 208";
                let got = spec.head_dim_qk as usize;
                return Err(extent("the pool", "elements in a head", got, rule));
            }
            Some(padding) => Some(PaddedPool::new(padding, &pool.k_strides, pool.pages)?),
            None => overlapping(spec, pool, row)?,
        };
        let (walked, strides) = side_by_side(spec, &pool.k_strides, row.kv_heads);
        if let Some(padded) = padded {
            return Ok(Self {
                shapes: Some([padded.shape(pool.dtype, piece_tokens); 2]),
                piece_tokens,
                steps: [0, padded.places_per_page, 1],
                outside: padded.places,
            });
        }
        let walk = Walk::new(&walked, pool.pages, &strides, pool.dtype)?;
        let slabs = walked.head_dim_qk / slab(walked.head_dim_qk, pool.dtype);
        let boxes = row.boxes.unwrap_or([[slabs, piece_tokens]; 2]);
        let shape =
            |[slabs, tokens]: [u32; 2]| walk.shape(pool.dtype, slabs, tokens.min(piece_tokens));
        Self::along(&walk, boxes.map(shape), piece_tokens)
    }

    /// By tensor maps, where keys and values have different numbers of elements.
    fn of_two(spec: &Spec, pool: &KvPool, row: &KernelInfo) -> Result<Self, Error> {
        let [k, v] = Walk::of_two(spec, pool)?;
        let piece_tokens = piece_tokens(pool);
        let [of_k, of_v] = row.boxes.expect("such kernels have boxes of their own");
        let shape = |walk: &Walk, [slabs, tokens]: [u32; 2]| {
            walk.shape(pool.dtype, slabs, tokens.min(piece_tokens))
        };
        Self::along(&k, [shape(&k, of_k), shape(&v, of_v)], piece_tokens)
    }

    /// With the steps of a walk.
    fn along(walk: &Walk, shapes: [MapShape; 2], piece_tokens: u32) -> Result<Self, Error> {
        Ok(Self {
            shapes: Some(shapes),
            piece_tokens,
            steps: [walk.half_per_head, walk.page_per_page, walk.page_per_head],
            outside: fits(
                Quantity::Pool("pages × KV heads"),
                walk.dims[4] as usize,
                COUNTED,
            )?,
        })
    }
}

/// The largest power of two that divides the page size, and at most the tokens of a box.
fn piece_tokens(pool: &KvPool) -> u32 {
    (1 << pool.k_strides.page_size.trailing_zeros()).min(BOX_TOKENS)
}

/// The tensor map of a pool for a kernel that reads several 16-bit KV heads at a time: their slabs may overlap.
pub fn overlapping(
    spec: &Spec,
    pool: &KvPool,
    row: &KernelInfo,
) -> Result<Option<PaddedPool>, Error> {
    if row.kv_heads == 1 || pool.dtype.bytes() != 2 {
        return Ok(None);
    }
    let (walked, strides) = side_by_side(spec, &pool.k_strides, row.kv_heads);
    let slabs = Padding::of_row(walked.head_dim_qk);
    let pool = slabs.map(|slabs| PaddedPool::new(slabs, &strides, pool.pages));
    pool.transpose()
}

/// Heads and strides of a pool of which `heads` KV heads are read at a time, as one row.
fn side_by_side(spec: &Spec, strides: &KvStrides, heads: u32) -> (Spec, KvStrides) {
    let spec = Spec {
        kv_heads: spec.kv_heads / heads,
        head_dim_qk: spec.head_dim_qk * heads,
        ..*spec
    };
    let strides = KvStrides {
        head: strides.head * heads,
        ..*strides
    };
    (spec, strides)
}
