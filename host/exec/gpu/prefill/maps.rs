//! Tensor maps of queries, outputs and pages, by which Hopper's prefills load and store.

use kernels_gpu::registry::KernelInfo;

use super::{
    super::{
        DeviceTensor,
        maps::{BOX_TOKENS, MapShape},
        walk::{Columns, Walk},
    },
    PrefillCall,
};
use crate::{Error, plan::gcd};

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

/// How the keys and the values of a launch are described, for a kernel that loads pages. None: row by row.
pub(super) fn walks(call: &PrefillCall<'_>, row: &KernelInfo) -> Result<Option<[Walk; 2]>, Error> {
    let (pool, heads) = (call.pool, call.spec.kv_heads);
    if let Some(padding) = call.extras.padding {
        return Walk::both(heads, 1, [Columns::padded(padding); 2], pool).map(Some);
    }
    if row.products_of_8_bits {
        return Ok(None);
    }
    let dims = [row.head_dim, row.value_dim];
    if !row.head_dim.is_multiple_of(64) {
        let cut = |dim, strides| Walk::cut(heads, dim, pool.pages, strides);
        return match pool.k_strides.page_size.is_multiple_of(8) {
            true => Ok(Some([
                cut(dims[0], &pool.k_strides)?,
                cut(dims[1], &pool.v_strides)?,
            ])),
            false => Ok(None),
        };
    }
    let columns = dims.map(|dim| Columns::whole(dim, pool.dtype));
    let walks = match &call.extras.values {
        None => Walk::both(heads, 1, columns, pool),
        // Values in pages of their own have steps of their own.
        Some(values) => {
            let k = Walk::new(heads, columns[0], pool.pages, &pool.k_strides, pool.dtype);
            let (pages, strides) = (values.pages, &values.v_strides);
            let v = Walk::new(heads, columns[1], pages, strides, values.dtype);
            k.and_then(|k| Ok([k, v?]))
        }
    };
    Ok(walks.ok())
}
