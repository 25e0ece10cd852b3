//! The memory of a case: what its tensors are, where they lie, and poison everywhere else.

use std::{collections::BTreeSet, ops::Range};

use tandem_attn::{abi::NO_SLOT, problem::Dtype};

use crate::{
    case::{Case, Pool, Scales},
    numbers::{cached, put, query, round},
    numeric::Rng,
};

/// Poison before each tensor and behind the last.
const ZONE: usize = 512;

/// Bytes at addresses that vector loads take.
#[derive(Clone, Debug)]
pub struct Image {
    words: Vec<u128>,
    len: usize,
}

impl Image {
    fn new(poison: u8) -> Self {
        Self {
            words: vec![u128::from_ne_bytes([poison; 16]); ZONE / 16],
            len: ZONE,
        }
    }

    /// Room for so many bytes, poison until something is written there.
    fn room(&mut self, bytes: usize) -> Range<usize> {
        let place = self.len..self.len + bytes;
        self.len = (place.end + ZONE).next_multiple_of(256);
        self.words.resize(self.len / 16, self.words[0]);
        place
    }

    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.words)
    }

    /// Poison again.
    pub fn spoil(&mut self, place: &Range<usize>) {
        let poison = self.bytes()[0];
        self.bytes_mut()[place.clone()].fill(poison);
    }

    /// Where another image differs first.
    pub fn differs(&self, other: &[u8]) -> Option<usize> {
        let bytes = self.bytes();
        (bytes != other).then(|| {
            let mut pairs = bytes.iter().zip(other);
            pairs.position(|(a, b)| a != b).unwrap_or(other.len())
        })
    }
}

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
        let slope = |head: usize| (-8.0 * (head + 1) as f32 / heads as f32).exp2();
        let slope_values: Vec<f32> = (0..heads).map(slope).collect();
        let count = match case.scales {
            Scales::One => 0,
            Scales::Tensor => 1,
            Scales::Head => kv_heads,
            Scales::Request => REQUESTS as usize * kv_heads,
            Scales::Token => slots * kv_heads,
        };
        let scale_values = [(); 2].map(|()| {
            let mut scales = rng.floats(count, 0.3, 1.5);
            if case.scales == Scales::Token {
                // Powers of two: prefills on a GPU round keys times these scales to 16 bits.
                scales
                    .iter_mut()
                    .for_each(|scale| *scale = scale.log2().floor().exp2());
            }
            scales
        });
        let count_of_sinks = sink_values.len().max(heads);
        let [sinks, slopes, of_token, slots_at] =
            [count_of_sinks, heads, tokens, 2 * slots].map(|words| given.room(4 * words));
        let scales = [(); 2].map(|()| given.room(4 * count));
        let rows = [dim, dim_v].map(|dim| given.room(2 * slots * kv_heads * dim * element));
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

    /// The scale of a slot's key or value, where scales are of the cache and not of who reads it.
    fn scale(&self, case: &Case, side: usize, slot: u32, head: u32) -> f32 {
        let values = &self.scale_values[side];
        match case.scales {
            Scales::One | Scales::Request => 1.0,
            Scales::Tensor => values[0],
            Scales::Head => values[head as usize],
            Scales::Token => values[(slot * case.spec.kv_heads + head) as usize],
        }
    }

    /// The stored numbers of a slot: a side, a head.
    fn stored(&self, case: &Case, side: usize, slot: u32, head: u32) -> Vec<f32> {
        let position = self.positions[slot as usize].unwrap_or(0);
        let mut numbers = cached(case, side == 1, slot, position, head);
        let scale = self.scale(case, side, slot, head);
        let dtype = case.spec.kv_dtype;
        numbers
            .iter_mut()
            .for_each(|x| *x = round(dtype, *x / scale));
        numbers
    }

    /// The slot has its numbers from now on, for the reference.
    pub fn fill(&mut self, case: &Case, slot: u32) {
        let spec = &case.spec;
        for head in 0..spec.kv_heads {
            for (side, dim) in [spec.head_dim_qk, spec.head_dim_v].into_iter().enumerate() {
                let scale = self.scale(case, side, slot, head);
                let mut numbers = match (side, spec.latent) {
                    (1, true) => self.stored(case, 0, slot, head)[..dim as usize].to_vec(),
                    _ => self.stored(case, side, slot, head),
                };
                numbers.iter_mut().for_each(|x| *x *= scale);
                let at = ((slot * spec.kv_heads + head) * dim) as usize;
                let to = if side == 0 {
                    &mut self.keys
                } else {
                    &mut self.values
                };
                to[at..at + dim as usize].copy_from_slice(&numbers);
            }
        }
        self.filled[slot as usize] = true;
    }

    /// Writes a slot into the image of both pools: what an append does.
    pub fn write_cache(&mut self, case: &Case, slot: u32) {
        let spec = &case.spec;
        let (page, offset) = (slot / case.page_size, slot % case.page_size);
        let element = spec.kv_dtype.bytes() as usize;
        for (head, side) in (0..spec.kv_heads).flat_map(|head| [(head, 0), (head, 1)]) {
            if side == 1 && spec.latent {
                continue;
            }
            let numbers = self.stored(case, side, slot, head);
            for (pool, at) in self.pools.iter().zip(self.cached_at) {
                let strides = [pool.k, pool.v][side];
                let place = page * strides.page + offset * strides.token + head * strides.head;
                let place = at[side] + place as usize * element;
                put(
                    spec.kv_dtype,
                    &numbers,
                    &mut self.cache.bytes_mut()[place..],
                );
            }
        }
    }

    /// New rows and their slots where appends read them, some without a slot; how many.
    pub fn write_rows(&mut self, case: &Case, slots: &[u32]) -> usize {
        let spec = &case.spec;
        let mut rng = Rng(case.seed ^ 6);
        let mut listed: Vec<u32> = Vec::new();
        for &slot in slots {
            if rng.below(8) == 0 {
                listed.push(NO_SLOT);
            }
            listed.push(slot);
        }
        let place = self.slots.clone();
        self.given.spoil(&place);
        let bytes: &[u8] = bytemuck::cast_slice(&listed);
        self.given.bytes_mut()[place.start..][..bytes.len()].copy_from_slice(bytes);
        for (side, dim) in [spec.head_dim_qk, spec.head_dim_v].into_iter().enumerate() {
            let row = (dim * spec.kv_dtype.bytes()) as usize;
            let place = self.rows[side].clone();
            self.given.spoil(&place);
            for (index, &slot) in listed
                .iter()
                .enumerate()
                .filter(|(_, slot)| **slot != NO_SLOT)
            {
                for head in 0..spec.kv_heads {
                    let numbers = self.stored(case, side, slot, head);
                    let at = place.start + (index * spec.kv_heads as usize + head as usize) * row;
                    put(spec.kv_dtype, &numbers, &mut self.given.bytes_mut()[at..]);
                }
            }
        }
        listed.len()
    }

    /// The queries of a step, for calls and for the reference.
    pub fn write_queries(&mut self, case: &Case, step: usize, tokens: usize) -> Vec<f32> {
        let spec = &case.spec;
        let place = self.q.clone();
        self.given.spoil(&place);
        let (heads, dim) = (spec.q_heads as usize, spec.head_dim_qk as usize);
        let element = spec.q_dtype.bytes() as usize;
        let mut all = Vec::with_capacity(tokens * heads * dim);
        for token in 0..tokens {
            for head in 0..heads {
                let numbers = query(case, step, token * heads + head);
                let at = place.start + (token * self.strides[0] + head * dim) * element;
                put(spec.q_dtype, &numbers, &mut self.given.bytes_mut()[at..]);
                all.extend(numbers);
            }
        }
        let place = self.of_token.clone();
        let requests: Vec<u32> = (0..tokens as u32)
            .map(|token| token * 7 % REQUESTS)
            .collect();
        let bytes: &[u8] = bytemuck::cast_slice(&requests);
        self.given.bytes_mut()[place.start..][..bytes.len()].copy_from_slice(bytes);
        all
    }
}
