//! Latent attention on the GPU: one tile group of a plan, keys and values in one pool.

use kernels_gpu::{abi::LatentParams, divisor::Divisor, registry::Loads};

use super::{
    DecodeCall, Gpu, KvPool,
    decode::{attention, extent, walk::Walk},
    maps::{MapShape, Maps, ShapeId},
    module::Kernel,
    prefill_rows::vectors,
    steps::{Parameters, Step},
    tensor::{COUNTED, fits},
};
use crate::{Error, tensor::ShapeError};

/// The shapes of a launch's tensor maps.
#[derive(Clone, Copy, Debug)]
pub(super) struct LatentShapes {
    pub(super) q: ShapeId,
    /// Shapes of the two halves of the keys, if they are loaded by tensor maps.
    pub(super) halves: Option<[ShapeId; 2]>,
}

/// Bytes of an element.
const ELEMENT: u64 = 2;

/// Checks that keys and values are the same pool: values are read as a part of the keys.
pub(super) fn check_latent(pool: &KvPool) -> Result<(), Error> {
    match (pool.k, pool.k_strides) == (pool.v, pool.v_strides) {
        true => Ok(()),
        false => Err(ShapeError::NotLatent { part: 0 }.into()),
    }
}

impl Gpu {
    /// The launch of a call that passed the checks of all decodes.
    pub(super) fn prepare_latent(
        &self,
        kernel: &Kernel,
        call: &DecodeCall<'_>,
        maps: &mut Maps,
    ) -> Result<Step, Error> {
        let (row, spec) = (kernel.info, call.spec);
        check_latent(call.pool)?;
        if call.arrivals.is_some() {
            let rule = format!("0: {} leaves merges to others", row.name);
            return Err(extent("arrivals", "counters", call.merges.len, rule));
        }
        // The same division as the planner's: equal tiles, as few as can hold all heads.
        let tiles = spec.q_heads.div_ceil(row.rows);
        let heads = spec.q_heads.div_ceil(tiles);
        if call.tile.rows > row.rows {
            let rule = format!("at most {}, as in {}", row.rows, row.name);
            return Err(extent("the tile", "rows", call.tile.rows as usize, rule));
        }
        let strides = &call.pool.k_strides;
        let (by_rows, converts) = (row.loads == Loads::Rows, row.cache.is_some());
        if by_rows {
            let pool = call.pool;
            vectors("the pool", pool.k, strides, [pool.pages, 1], pool.dtype)?;
        }
        // The largest power of two that divides both page and block. Keys that are converted are loaded one by one.
        let both = strides
            .page_size
            .trailing_zeros()
            .min(row.keys.trailing_zeros());
        let piece_tokens = match converts {
            true => 1,
            false => 1 << both,
        };
        let q = call.q;
        let bytes = |elements: usize| elements as u64 * ELEMENT;
        let query_shape = MapShape {
            dtype: q.dtype,
            dims: [
                64,
                spec.q_heads.into(),
                (row.head_dim / 64).into(),
                q.shape[0].max(1) as u64,
                1,
            ],
            strides: [
                bytes(row.head_dim as usize),
                128,
                bytes(q.strides[0]),
                bytes(q.strides[0]),
            ],
            box_dims: [64, heads, 1, 1, 1],
        };
        let (q_shape, q_map) = maps.make("q", q.address, query_shape)?;
        // Slabs of 64 columns in a box: those of both halves of the columns, or those of an equal part.
        let halves = [row.value_dim / 128, (row.head_dim - row.value_dim / 2) / 64];
        let [left, right] = row
            .boxes
            .map_or(halves, |boxes| boxes.map(|[slabs, _]| slabs));
        let pool = call.pool;
        let (halves, outside) = match by_rows {
            true => (None, fits("pages", pool.pages as usize, COUNTED)?),
            false => {
                let walk = Walk::new(spec, pool.pages, strides, pool.dtype)?;
                let mut half = |slabs| {
                    let shape = walk.shape(pool.dtype, slabs, piece_tokens);
                    maps.make("the pool", pool.k, shape)
                };
                let halves = [half(left)?, half(right)?];
                (Some(halves), fits("pages", walk.dims[4] as usize, COUNTED)?)
            }
        };
        // If keys are loaded one by one, these maps are not used.
        let [left_map, right_map] = match &halves {
            Some([left, right]) => [left.1, right.1],
            None => [q_map; 2],
        };
        let mut attention = attention(call, tiles)?;
        let ctas = attention.units;
        attention.leave_to_record(call.items.len);
        let parameters = LatentParams {
            q_map,
            left_map,
            right_map,
            attention,
            heads: Divisor::new(heads),
            tiles: Divisor::new(tiles),
            page_size: Divisor::new(strides.page_size),
            piece_tokens,
            outside,
            long: call.tile.long.into(),
            reserved: [0; 2],
        };
        let shapes = LatentShapes {
            q: q_shape,
            halves: halves.map(|halves| halves.map(|(shape, _)| shape)),
        };
        Ok(Step {
            kernel: *kernel,
            launch: self.resident(kernel, ctas),
            part: 0,
            parameters: Parameters::Latent(parameters, shapes),
        })
    }
}
