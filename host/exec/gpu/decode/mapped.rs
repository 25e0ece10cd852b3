//! How a decode reads a page pool.

use kernels_gpu::{abi::PageCoordinates, registry::KernelInfo};

use super::DecodeCall;
use crate::{
    Error,
    checks::extent,
    exec::gpu::{
        KvPool,
        maps::{BOX_TOKENS, MapShape},
        walk::{Columns, Walk},
    },
    problem::{Padding, Spec},
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
        let [k, v] = match padding {
            Some(padding) if padding.is_cut() || pool.dtype.bytes() == 1 => {
                let rule = "that of a kernel, or with keys and values of 16 bits a multiple of 16 up to 208";
                let got = spec.head_dim_qk as usize;
                return Err(extent("the pool", "elements in a head", got, rule));
            }
            Some(padding) => Walk::both(spec.kv_heads, 1, [Columns::padded(padding); 2], pool)?,
            None => walks(row, spec, pool)?,
        };
        let piece_tokens = piece_tokens(pool);
        let shapes = match row.boxes {
            None => [k, v].map(|walk| walk.whole_heads(pool.dtype, piece_tokens)),
            Some([of_k, of_v]) => [(k, of_k), (v, of_v)].map(|(walk, [slabs, tokens])| {
                walk.shape(pool.dtype, slabs, tokens.min(piece_tokens))
            }),
        };
        let PageCoordinates {
            step_per_page,
            step_per_head,
            outside,
            ..
        } = k.at;
        Ok(Self {
            shapes: Some(shapes),
            piece_tokens,
            steps: [k.slabs_per_head(), step_per_page, step_per_head],
            outside,
        })
    }
}

/// The largest power of two that divides the page size, and at most the tokens of a box.
fn piece_tokens(pool: &KvPool) -> u32 {
    (1 << pool.k_strides.page_size.trailing_zeros()).min(BOX_TOKENS)
}

/// The walks of keys and of values for a kernel that pads no heads. Slabs may overlap where it reads several 16-bit heads at a time.
pub fn walks(row: &KernelInfo, spec: &Spec, pool: &KvPool) -> Result<[Walk; 2], Error> {
    let columns = [spec.head_dim_qk, spec.head_dim_v].map(|dim| {
        let dim = dim * row.kv_heads;
        let slabs = match row.kv_heads > 1 && pool.dtype.bytes() == 2 {
            true => Padding::of_row(dim),
            false => None,
        };
        slabs.map_or_else(|| Columns::whole(dim, pool.dtype), Columns::padded)
    });
    Walk::both(spec.kv_heads, row.kv_heads, columns, pool)
}
