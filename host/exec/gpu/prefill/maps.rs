//! Tensor maps of queries, outputs and pages, by which Hopper's prefills load and store.

use kernels_gpu::abi::{KvStrides, PageCoordinates};

use super::{
    super::{
        DeviceTensor, KvPool,
        maps::{BOX_TOKENS, MapShape},
        tensor::{COUNTED, fits},
    },
    PrefillCall,
};
use crate::{
    Error,
    plan::gcd,
    problem::{Quantity, Spec},
};

/// How a tensor map can describe a pool with heads of `dim` elements: with heads side by side in a token (true), or
/// filling a page one after the other (false). None if it cannot.
pub(super) fn heads_in_token(strides: &KvStrides, spec: &Spec, dim: u32) -> Option<bool> {
    if !strides.page_size.is_multiple_of(8) {
        None
    } else if strides.head == dim {
        Some(true)
    } else {
        let heads = u64::from(spec.kv_heads) * u64::from(strides.head);
        (u64::from(strides.page) == heads).then_some(false)
    }
}

/// Tokens that one box loads: within one page and one block of keys.
pub(super) const fn box_tokens(page_size: u32, keys: u32) -> u32 {
    gcd(gcd(page_size, keys), BOX_TOKENS)
}

/// The map whose boxes have 64 columns of the queries (or outputs) of a tile: see [`PrefillParams::q_map`].
pub(super) fn query_map(tensor: &DeviceTensor<3>, call: &PrefillCall<'_>, rows: u32) -> MapShape {
    let pack = u64::from(call.pack);
    let [tokens, _, dim] = tensor.shape.map(|extent| extent as u64);
    let (head, token) = (dim * 2, tensor.strides[0] as u64 * 2);
    MapShape {
        dtype: tensor.dtype,
        dims: [
            dim,
            pack,
            tokens.max(1),
            1,
            u64::from(call.spec.q_heads) / pack,
        ],
        // The stride of a dimension with one coordinate does not matter.
        strides: [head, token, head, pack * head],
        box_dims: [64, call.pack, rows / call.pack, 1, 1],
    }
}

/// Coordinates in the maps of a pool whose heads are side by side in a token, or fill a page.
pub(super) fn page_coordinates(
    pool: &KvPool,
    spec: &Spec,
    in_token: bool,
) -> Result<PageCoordinates, Error> {
    let (pages, heads) = (pool.pages, spec.kv_heads);
    if in_token {
        return Ok(PageCoordinates {
            step_in_token: 1,
            step_per_page: 1,
            step_per_head: 0,
            outside: pages,
        });
    }
    Ok(PageCoordinates {
        step_in_token: 0,
        step_per_page: heads,
        step_per_head: 1,
        outside: fits(
            Quantity::Pool("pages × KV heads"),
            pages as usize * heads as usize,
            COUNTED,
        )?,
    })
}

/// Coordinates in the maps of a pool whose heads are not a multiple of 64 columns.
pub(super) const fn cut_coordinates(pool: &KvPool) -> PageCoordinates {
    PageCoordinates {
        step_in_token: 1,
        step_per_page: 1,
        step_per_head: 0,
        outside: pool.pages,
    }
}

/// The map whose boxes have 64 columns of tokens of a page, for heads that are not a multiple of 64 columns: missing
/// columns are zero. Columns are one dimension and heads are another, so that heads may be anywhere.
pub(super) fn cut_page_map(
    strides: &KvStrides,
    call: &PrefillCall<'_>,
    dim: u32,
    box_tokens: u32,
) -> MapShape {
    let bytes = |elements: u32| u64::from(elements) * 2;
    MapShape {
        dtype: call.pool.dtype,
        dims: [
            dim.into(),
            8,
            call.spec.kv_heads.into(),
            (strides.page_size / 8).into(),
            call.pool.pages.max(1).into(),
        ],
        strides: [
            bytes(strides.token),
            bytes(strides.head),
            8 * bytes(strides.token),
            bytes(strides.page),
        ],
        box_dims: [64, 8, 1, box_tokens / 8, 1],
    }
}

/// The map whose boxes have tokens of a page: one group of 8 after the other, and within a group one slab of 64 columns
/// after the other. See [`PageCoordinates`].
pub(super) fn page_map(
    pool: &KvPool,
    strides: &KvStrides,
    spec: &Spec,
    dim: u32,
    in_token: bool,
    box_tokens: u32,
) -> MapShape {
    let (heads, slabs, pages) = (spec.kv_heads, dim / 64, pool.pages);
    let bytes = |elements: u32| u64::from(elements) * 2;
    // The hardware has five dimensions: heads share one with the slabs of 64 columns, or with the pages.
    let (slab_dim, page_dim, page_stride) = if in_token {
        (slabs * heads, pages, strides.page)
    } else {
        (slabs, pages * heads, strides.head)
    };
    MapShape {
        dtype: pool.dtype,
        dims: [
            64,
            8,
            slab_dim.into(),
            (strides.page_size / 8).into(),
            page_dim.max(1).into(),
        ],
        strides: [
            bytes(strides.token),
            128,
            8 * bytes(strides.token),
            bytes(page_stride),
        ],
        box_dims: [64, 8, slabs, box_tokens / 8, 1],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pool whose heads follow one another as a whole: 32 bits cannot count all heads.
    #[test]
    fn heads_that_are_far_apart_are_read_row_by_row() {
        let spec = Spec::new(64, 64, 128);
        let strides = KvStrides {
            page: 16 * 128,
            token: 128,
            head: 50_000 * 16 * 128,
            page_size: 16,
        };
        assert_eq!(heads_in_token(&strides, &spec, 128), None);
        // The stride between heads times their number wraps around to the stride of a page.
        let wraps = KvStrides {
            page: 1 << 12,
            head: (1 << 26) + (1 << 6),
            ..strides
        };
        assert_eq!(heads_in_token(&wraps, &spec, 128), None);
    }
}
