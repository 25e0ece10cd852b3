//! The memory of a case: what its tensors are, where they lie, and poison everywhere else.

mod calls;
mod image;
mod stored;

use std::{collections::BTreeSet, ops::Range};

use tandem_attn::problem::Dtype;

pub use self::image::Image;
use crate::{
    case::{Appends, Case, Pool, Scales},
    hooks,
    numbers::put,
    numeric::Rng,
};

/// The memory of the case, and what it means.
pub struct World {
    pub pages: u32,
    pub pools: [Pool; 2],
    /// Keys and values of both pools.
    pub cache: Image,
    /// First bytes of keys and values of each pool.
    pub cached_at: [[usize; 2]; 2],
    /// What calls read besides.
    pub given: Image,
    pub q: Range<usize>,
    pub sinks: Range<usize>,
    pub slopes: Range<usize>,
    pub scales: [Range<usize>; 2],
    pub of_token: Range<usize>,
    /// New keys and values, and their slots.
    pub rows: [Range<usize>; 2],
    pub slots: Range<usize>,
    /// Keys that were chosen for each token.
    pub indices: Range<usize>,
    /// What calls write.
    pub results: Image,
    pub out: Range<usize>,
    pub lse: Range<usize>,
    /// Elements from a query token to the next, and likewise of outputs.
    pub strides: [usize; 2],
    /// For each slot of the pool the position that it holds, if it is a sequence's.
    positions: Vec<Option<u32>>,
    filled: Vec<bool>,
    /// What the reference reads: `[slot, head, element]`, with scales.
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
    pub slope_values: Vec<f32>,
    pub sink_values: Vec<f32>,
    /// Scales of keys and of values, as many as the granularity has.
    pub scale_values: [Vec<f32>; 2],
}

/// The most keys that are chosen for a query token.
pub const MOST_CHOSEN: usize = 200;

/// Requests that scales of 8-bit caches count.
pub const REQUESTS: u32 = 3;

impl World {
    pub fn new(case: &Case) -> Self {
        let spec = &case.spec;
        let (tables, pages) = case.tables();
        let slots = (pages * case.page_size) as usize;
        let mut positions = vec![None; slots];
        for (table, sequence) in tables.iter().zip(&case.sequences) {
            for position in 0..sequence.tokens {
                let page = table[(position / case.page_size) as usize];
                let slot = page * case.page_size + position % case.page_size;
                positions[slot as usize] = Some(position);
            }
        }
        let (heads, kv_heads) = (spec.q_heads as usize, spec.kv_heads as usize);
        let (dim, dim_v) = (spec.head_dim_qk as usize, spec.head_dim_v as usize);
        let tokens = case.most_tokens();
        let mut rng = Rng(case.seed ^ 5);

        let pools = case.pools.each_ref().map(|layout| case.pool(layout, pages));
        let mut cache = Image::new(case.poison);
        let element = spec.kv_dtype.bytes() as usize;
        let cached_at = pools.each_ref().map(|pool| {
            let [k, v] = pool.elements.map(|elements| cache.room(elements * element));
            let v = pool
                .v_from_k
                .map_or(v.start, |from| k.start + from * element);
            [k.start, v]
        });

        let mut given = Image::new(case.poison);
        let strides = [
            heads * dim + case.gaps[0] as usize,
            heads * dim_v + case.gaps[1] as usize,
        ];
        let q = given.room(tokens * strides[0] * spec.q_dtype.bytes() as usize);
        let sink_values = match spec.variant.sinks {
            true => rng.floats(spec.sinks(), -2.0, 6.0),
            false => Vec::new(),
        };
        let slope_values = hooks::slopes(spec);
        let count = match case.scales {
            Scales::One | Scales::InRow => 0,
            Scales::Tensor => 1,
            Scales::Head => kv_heads,
            Scales::Request => REQUESTS as usize * kv_heads,
            Scales::Token => slots * kv_heads,
        };
        let scale_values = [(); 2].map(|()| {
            let mut scales = rng.floats(count, 0.3, 1.5);
            if case.appends == Appends::Computed {
                // They are written where keys are.
                scales.fill(f32::NAN);
            } else if case.scales == Scales::Token {
                // Powers of two: prefills on a GPU round keys times these scales to 16 bits.
                scales
                    .iter_mut()
                    .for_each(|scale| *scale = scale.log2().floor().exp2());
            }
            scales
        });
        let count_of_sinks = sink_values.len().max(heads);
        let words = [count_of_sinks, slope_values.len(), tokens, 2 * slots];
        let [sinks, slopes, of_token, slots_at] = words.map(|words| given.room(4 * words));
        let scales = [(); 2].map(|()| given.room(4 * count));
        let of_row = case.row_dtype().bytes() as usize;
        let rows = [dim, dim_v].map(|dim| given.room(2 * slots * kv_heads * dim * of_row));
        let indices = given.room(4 * MOST_CHOSEN * tokens);
        put(
            Dtype::F32,
            &sink_values,
            &mut given.bytes_mut()[sinks.clone()],
        );
        put(
            Dtype::F32,
            &slope_values,
            &mut given.bytes_mut()[slopes.clone()],
        );
        for (place, values) in scales.iter().zip(&scale_values) {
            put(Dtype::F32, values, &mut given.bytes_mut()[place.clone()]);
        }

        let mut results = Image::new(case.poison);
        let out = results.room(tokens * strides[1] * spec.out_dtype.bytes() as usize);
        let lse = results.room(tokens * heads * 4);
        let mut world = Self {
            pages,
            pools,
            cache,
            cached_at,
            given,
            q,
            sinks,
            slopes,
            scales,
            of_token,
            rows,
            slots: slots_at,
            indices,
            results,
            out,
            lse,
            strides,
            positions,
            filled: vec![false; slots],
            keys: vec![f32::NAN; slots * kv_heads * dim],
            values: vec![f32::NAN; slots * kv_heads * dim_v],
            slope_values,
            sink_values,
            scale_values,
        };
        // Before the first step there is all but what it appends.
        let new = world.new_slots(case, 0);
        for slot in world.due(case, 0) {
            if !new.contains(&slot) {
                world.fill(case, slot);
                world.write_cache(case, slot);
            }
        }
        world
    }

    /// The slots of all keys of a step, and which of them are of new tokens.
    fn keys_of(case: &Case, step: usize) -> Vec<(u32, bool)> {
        let (tables, _) = case.tables();
        let rows = case.steps.get(step).map_or(&[][..], |step| &step.rows);
        let keys = rows.iter().flat_map(|row| {
            let table = &tables[row.sequence];
            (0..row.keys).map(move |position| {
                let page = table[(position / case.page_size) as usize];
                let slot = page * case.page_size + position % case.page_size;
                (slot, position >= row.keys - row.queries)
            })
        });
        keys.collect()
    }

    /// The slots that a step reads, each once.
    fn due(&self, case: &Case, step: usize) -> Vec<u32> {
        let slots: BTreeSet<u32> = Self::keys_of(case, step)
            .into_iter()
            .map(|(slot, _)| slot)
            .collect();
        slots.into_iter().collect()
    }

    /// The slots that a step appends to: of new tokens, and from the second step on of all keys that are not there.
    pub fn new_slots(&self, case: &Case, step: usize) -> Vec<u32> {
        let missing = Self::keys_of(case, step)
            .into_iter()
            .filter(|&(slot, is_new)| (is_new || step > 0) && !self.filled[slot as usize]);
        let slots: BTreeSet<u32> = missing.map(|(slot, _)| slot).collect();
        slots.into_iter().collect()
    }
}
