//! Few rows: the lanes of a vector are neighbouring elements of a head.
//!
//! These are decodes, which are limited by memory. All heads of a unit go through the keys together, one tile at a
//! time, because they are adjacent in most layouts. Keys and values become f32 on their way into registers. While a
//! tile is computed, the next one is prefetched little by little, so that memory is always busy.

use std::ops::Range;

use kernels_gpu::{state::Softmax, variant::Variant};

use self::inner::Logits;
pub(super) use self::inner::MAX_ROWS;
use super::{
    isa::Isa,
    tile::{KEYS, Places},
    unit::{Pool, Row, Scratch, Unit, hidden},
};

pub(super) mod inner;

/// The state of a KV head while it goes through the keys.
struct Head {
    kv_head: u32,
    logits: Logits,
    softmax: [Softmax; MAX_ROWS],
    /// The factor by which earlier outputs must still be multiplied.
    factor: [f32; MAX_ROWS],
}

/// Writes the states of a unit to `out` and `lse`.
pub(super) fn attend<V: Variant>(
    unit: &Unit<'_, V>,
    isa: Isa,
    scratch: &mut Scratch,
    out: &mut [f32],
    lse: &mut [f32],
) {
    let rows = unit.rows.len();
    let kernels = isa
        .kernels()
        .narrow
        .iter()
        .find(|kernels| rows <= kernels.rows)
        .expect("the rows are few");
    // The kernel's rows beyond those of the unit are zero, and their results are not used.
    let padded = kernels.rows;
    let (dim_qk, dim_v) = (
        unit.spec.head_dim_qk as usize,
        unit.spec.head_dim_v as usize,
    );
    let mut heads: Vec<Head> = unit.kv_heads.clone().map(Head::new).collect();
    let queries = scratch.queries.floats(heads.len() * padded * dim_qk);
    let outputs = scratch.outputs.floats(heads.len() * padded * dim_v);
    // Keys (or values) of a tile that differ from those of the pool.
    let made = scratch.keys.floats(KEYS * dim_qk.max(dim_v));
    queries.fill(0.0);
    outputs.fill(0.0);
    for (head, queries) in heads.iter().zip(queries.chunks_exact_mut(padded * dim_qk)) {
        for (row, query) in unit.rows.iter().zip(queries.chunks_exact_mut(dim_qk)) {
            unit.load_query(row, head.kv_head, query);
        }
    }

    let end = unit.keys.end;
    let tile_at = |begin: u32| begin.min(end)..end.min(begin.saturating_add(KEYS as u32));
    let mut places = [
        Places::new(unit, Pool::Keys),
        Places::new(unit, Pool::Values),
    ];
    let mut next = tile_at(unit.keys.start);
    for places in &mut places {
        places.advance(unit, &next);
    }
    while !next.is_empty() {
        let tile = next;
        next = tile_at(tile.end);
        for places in &mut places {
            places.advance(unit, &next);
        }
        for (head, queries) in heads.iter_mut().zip(queries.chunks_exact(padded * dim_qk)) {
            let rows = unit.tile_rows(head.kv_head, &tile, &places[0], made);
            (kernels.products)(queries, &rows, &mut head.logits);
            if Unit::<V>::HAS_LOGIT_HOOKS {
                isa.narrow_hooks(unit, head.kv_head, tile.clone(), &mut head.logits);
            }
            for (r, row) in unit.rows.iter().enumerate() {
                mask(row, &tile, hidden(V::SOFTMAX), &mut head.logits[r]);
                if V::SOFTMAX {
                    head.factor[r] = (kernels.weigh)(&mut head.softmax[r], &mut head.logits[r]);
                }
            }
        }
        for (head, outputs) in heads.iter().zip(outputs.chunks_exact_mut(padded * dim_v)) {
            let rows = unit.tile_rows(head.kv_head, &tile, &places[1], made);
            (kernels.accumulate)(&head.logits, &head.factor, &rows, outputs);
        }
    }
    let targets = out
        .chunks_exact_mut(rows * dim_v)
        .zip(lse.chunks_exact_mut(rows));
    for ((head, outputs), (out, lse)) in heads
        .iter()
        .zip(outputs.chunks_exact(padded * dim_v))
        .zip(targets)
    {
        for (r, lse) in lse.iter_mut().enumerate() {
            let norm = if V::SOFTMAX {
                head.softmax[r].norm()
            } else {
                1.0
            };
            *lse = if V::SOFTMAX {
                head.softmax[r].lse()
            } else {
                0.0
            };
            let [_, of_values] = unit.row_scales(&unit.rows[r], head.kv_head);
            let norm = norm * of_values;
            let at = r * dim_v..(r + 1) * dim_v;
            out[at.clone()]
                .iter_mut()
                .zip(&outputs[at])
                .for_each(|(out, x)| *out = x * norm);
        }
    }
}

impl Head {
    fn new(kv_head: u32) -> Self {
        Self {
            kv_head,
            logits: [[0.0; KEYS]; MAX_ROWS],
            softmax: [Softmax::EMPTY; MAX_ROWS],
            factor: [1.0; MAX_ROWS],
        }
    }
}

fn mask(row: &Row, keys: &Range<u32>, hidden: f32, logits: &mut [f32; KEYS]) {
    let &Row { first, last, .. } = row;
    row.hide_masked(keys.clone(), hidden, logits.iter_mut());
    let begin = keys.start as i32;
    // The last position to consider: the last one that is seen, or the tile's last key.
    let last = last.min(keys.end as i32 - 1);
    if first > begin || last < begin + KEYS as i32 - 1 {
        for (logit, key) in logits.iter_mut().zip(begin..) {
            let visible = (first <= key) & (key <= last);
            *logit = if visible { *logit } else { hidden };
        }
    }
}
