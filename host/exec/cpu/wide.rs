//! Many rows: the lanes of a vector are query rows.
//!
//! Logits and outputs are transposed, `[key][row]` and `[element][row]`, in blocks of `R` rows. The softmax then works
//! lane by lane, and both products have the same form: each number of a key (or value) is broadcast and multiplied with
//! a vector of queries (or weights), with `M × R` sums in registers.

use kernels_gpu::variant::Variant;

use self::inner::{Block, MAX_M};
use super::{
    isa::Isa,
    unit::{Row, Scratch, Unit, hidden},
};

pub(super) mod inner;

/// Keys of a tile: 64 of 128 elements as f32 are 32 KiB, which leaves room for the other operand in a
/// first-level cache of 48.
const KEYS: usize = 64;

/// Writes the states of a unit to `out` and `lse`.
pub(super) fn attend<V: Variant>(
    unit: &Unit<'_, V>,
    isa: Isa,
    scratch: &mut Scratch,
    out: &mut [f32],
    lse: &mut [f32],
) {
    let rows = unit.rows.len();
    let states = out
        .chunks_mut(rows * unit.spec.head_dim_v as usize)
        .zip(lse.chunks_mut(rows));
    for (kv_head, (out, lse)) in unit.kv_heads.clone().zip(states) {
        attend_head(unit, isa, kv_head, scratch, out, lse);
    }
}

fn attend_head<V: Variant>(
    unit: &Unit<'_, V>,
    isa: Isa,
    kv_head: u32,
    scratch: &mut Scratch,
    out: &mut [f32],
    lse: &mut [f32],
) {
    let [small, large] = &isa.kernels().wide;
    let kernels = if unit.rows.len() <= small.rows {
        small
    } else {
        large
    };
    let lanes = kernels.rows;
    let (dim_qk, dim_v) = (
        unit.spec.head_dim_qk as usize,
        unit.spec.head_dim_v as usize,
    );
    let mut blocks: Vec<Block<'_>> = unit
        .rows
        .chunks(lanes)
        .map(|rows| Block::new(rows, V::SOFTMAX))
        .collect();
    let queries = scratch.queries.floats(blocks.len() * dim_qk * lanes);
    let outputs = scratch.outputs.floats(blocks.len() * dim_v * lanes);
    // Products past the last key are computed, but not used.
    let logits = scratch.logits.floats((KEYS + MAX_M) * lanes);
    let keys = scratch.keys.floats((KEYS + MAX_M) * dim_qk);
    let values = scratch.values.floats((KEYS * dim_v).max(dim_qk));
    for (block, queries) in blocks.iter().zip(queries.chunks_exact_mut(dim_qk * lanes)) {
        pack_queries(unit, kv_head, block.rows, queries, &mut values[..dim_qk]);
    }
    outputs.fill(0.0);

    let mut begin = unit.keys.start;
    while begin < unit.keys.end {
        let tile = begin..unit.keys.end.min(begin + KEYS as u32);
        unit.load_keys(kv_head, tile.clone(), &mut keys[..tile.len() * dim_qk]);
        unit.load_values(kv_head, tile.clone(), &mut values[..tile.len() * dim_v]);
        let operands = queries
            .chunks_exact(dim_qk * lanes)
            .zip(outputs.chunks_exact_mut(dim_v * lanes));
        for (block, (queries, outputs)) in blocks.iter_mut().zip(operands) {
            // Only keys that some row of the block sees.
            let seen = block.seen(&tile);
            if seen.is_empty() {
                continue;
            }
            let (skip, len) = ((seen.start - tile.start) as usize, seen.len());
            let logits = &mut logits[..len.next_multiple_of(MAX_M) * lanes];
            (kernels.products)(&keys[skip * dim_qk..], dim_qk, queries, logits);
            let logits = &mut logits[..len * lanes];
            if Unit::<V>::HAS_LOGIT_HOOKS {
                isa.wide_hooks(unit, kv_head, block, seen.clone(), logits);
            }
            for (lane, row) in block.rows.iter().enumerate() {
                let logits = logits[lane..].iter_mut().step_by(lanes);
                row.hide_masked(seen.clone(), hidden(V::SOFTMAX), logits);
            }
            (kernels.absorb)(block, seen, logits, &values[skip * dim_v..], dim_v, outputs);
        }
        begin = tile.end;
    }
    let states = out.chunks_mut(lanes * dim_v).zip(lse.chunks_mut(lanes));
    for ((block, outputs), (out, lse)) in blocks
        .iter()
        .zip(outputs.chunks_exact(dim_v * lanes))
        .zip(states)
    {
        block.finish(outputs, lanes, out, lse);
        for (row, out) in block.rows.iter().zip(out.chunks_exact_mut(dim_v)) {
            let [_, of_values] = unit.row_scales(row, kv_head);
            if of_values != 1.0 {
                out.iter_mut().for_each(|x| *x *= of_values);
            }
        }
    }
}

/// The queries of a block, transposed. Missing rows are zero.
fn pack_queries<V: Variant>(
    unit: &Unit<'_, V>,
    kv_head: u32,
    rows: &[Row],
    to: &mut [f32],
    query: &mut [f32],
) {
    let lanes = to.len() / query.len();
    to.fill(0.0);
    for (lane, row) in rows.iter().enumerate() {
        unit.load_query(row, kv_head, query);
        to[lane..]
            .iter_mut()
            .step_by(lanes)
            .zip(&*query)
            .for_each(|(to, &x)| *to = x);
    }
}
