//! Latent attention on the GPU: one tile group of a plan. Values are a part of the keys.

use kernels_gpu::{
    abi::{LatentParams, PieceOf},
    divisor::Divisor,
    registry::Loads,
};

use super::{
    DecodeCall, Gpu,
    decode::attention,
    maps::{MapShape, Maps},
    module::Kernel,
    steps::{LatentShapes, Parameters, Step},
    tensor::{COUNTED, fits},
    vectors::vectors,
    walk::Walk,
};
use crate::{
    Error, checks::extent, exec::apart::check_pool, kv::latent_parts::rope_dim,
    plan::launched::pieces::tiles_of, problem::Quantity,
};

/// Bytes of an element.
const ELEMENT: u64 = 2;

impl Gpu {
    /// The launch of a call that passed the checks of all decodes.
    pub(super) fn prepare_latent(
        &self,
        kernel: &Kernel,
        call: &DecodeCall<'_>,
        maps: &mut Maps,
    ) -> Result<Step, Error> {
        let (row, spec) = (kernel.info, call.spec);
        call.pool.check_is_one()?;
        let [tiles, heads] = tiles_of(spec.q_heads, row.rows);
        let counters = call.arrivals.map(|arrivals| arrivals.len);
        let of_merge = (tiles * PieceOf::COUNTERS) as usize;
        match (row.merges_pieces, counters) {
            (true, Some(counters)) if counters >= call.merges.len * of_merge => {}
            (false, None) => {}
            (true, counters) => {
                let rule = format!("{of_merge} for each merge, as {} counts", row.name);
                return Err(extent("arrivals", "counters", counters.unwrap_or(0), rule));
            }
            (false, Some(_)) => {
                let rule = format!("0: {} leaves merges to others", row.name);
                return Err(extent("arrivals", "counters", call.merges.len, rule));
            }
        }
        if call.tile.rows > row.rows {
            let rule = format!("at most {}, as in {}", row.rows, row.name);
            return Err(extent("the tile", "rows", call.tile.rows as usize, rule));
        }
        let strides = &call.pool.k_strides;
        let (by_rows, converts) = (row.loads == Loads::Rows, row.cache.is_some());
        let pool = call.pool;
        if converts && pool.rope.is_some() {
            return Err(Error::NoInstance {
                kernel: "decode",
                asked: format!("keys in two pools by {}", row.name),
                there: "keys of 16 bits in two pools (KvPool::latent_parts)",
            });
        }
        if !converts {
            // This error is also returned if the pool holds the first columns alone and the pool of the others is missing.
            let columns = if pool.rope.is_some() {
                spec.head_dim_v
            } else {
                spec.head_dim_qk
            };
            check_pool("the pool", pool.pages, 1, columns, *strides)?;
        }
        if by_rows {
            let extents = [pool.pages, 1];
            vectors("the pool", pool.k, strides, extents, pool.dtype)?;
            if let Some(rope) = &pool.rope {
                vectors(
                    "the rope pool",
                    rope.pool,
                    &rope.strides,
                    extents,
                    pool.dtype,
                )?;
            }
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
        // The part that only keys have is the last slab.
        let (mut columns, mut rope_map) = (spec.head_dim_qk, None);
        let mut boxes = [(left, piece_tokens), (right, piece_tokens)];
        if let (Some(rope), false) = (&pool.rope, by_rows) {
            (columns, boxes[1]) = (spec.head_dim_v, (right - 1, 8));
            let walk = Walk::one(rope_dim(spec), pool.pages, &rope.strides, pool.dtype)?;
            let shape = walk.shape(pool.dtype, 1, 8);
            rope_map = Some(maps.make("the rope pool", rope.pool, shape)?);
        }
        let (halves, outside) = match by_rows {
            true => (
                None,
                fits(Quantity::Pool("pages"), pool.pages as usize, COUNTED)?,
            ),
            false => {
                let walk = Walk::one(columns, pool.pages, strides, pool.dtype)?;
                let mut half = |(slabs, tokens)| {
                    let shape = walk.shape(pool.dtype, slabs, tokens);
                    maps.make("the pool", pool.k, shape)
                };
                let halves = [half(boxes[0])?, half(boxes[1])?];
                (Some(halves), walk.at.outside)
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
            rope_map: rope_map.map_or(q_map, |(_, map)| map),
            attention,
            rope: pool.rope.map_or(0, |rope| rope.pool),
            rope_page: pool.rope.map_or(0, |rope| rope.strides.page),
            rope_token: pool.rope.map_or(0, |rope| rope.strides.token),
            heads: Divisor::new(heads),
            tiles: Divisor::new(tiles),
            page_size: Divisor::new(strides.page_size),
            piece_tokens,
            outside,
            long: call.tile.long.into(),
            apart: pool.rope.is_some().into(),
            early: 0,
        };
        let shapes = LatentShapes {
            q: q_shape,
            halves: halves.map(|halves| halves.map(|(shape, _)| shape)),
            rope: rope_map.map(|(shape, _)| shape),
        };
        Ok(self.step(kernel, ctas, Parameters::Latent(parameters, shapes)))
    }
}
