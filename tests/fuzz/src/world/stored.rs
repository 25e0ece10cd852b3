//! What the pools hold of a slot, and what it means.

use tandem_attn::problem::Dtype;

use super::World;
use crate::{
    case::{Appends, Case, Scales},
    numbers::{cached, put, round},
    row_656,
};

impl World {
    /// The scale of a slot's key or value, where scales are of the cache and not of who reads it.
    fn scale(&self, case: &Case, side: usize, slot: u32, head: u32) -> f32 {
        if case.appends == Appends::Computed {
            let row = self.appended(case, side, slot, head);
            return computed(case.spec.kv_dtype, &row);
        }
        let values = &self.scale_values[side];
        match case.scales {
            Scales::One | Scales::Request | Scales::InRow => 1.0,
            Scales::Tensor => values[0],
            Scales::Head => values[head as usize],
            Scales::Token => values[(slot * case.spec.kv_heads + head) as usize],
        }
    }

    /// What an append is given of a slot: a side, a head.
    pub(super) fn appended(&self, case: &Case, side: usize, slot: u32, head: u32) -> Vec<f32> {
        if case.appends == Appends::Copied {
            return self.stored(case, side, slot, head);
        }
        let position = self.positions[slot as usize].unwrap_or(0);
        let numbers = cached(case, side == 1, slot, position, head).into_iter();
        numbers.map(|x| round(case.row_dtype(), x)).collect()
    }

    /// The stored numbers of a slot: a side, a head. Those of rows of 656 bytes are with their scales.
    fn stored(&self, case: &Case, side: usize, slot: u32, head: u32) -> Vec<f32> {
        let dtype = case.spec.kv_dtype;
        if case.scales == Scales::InRow {
            let row = row_656::bytes(&self.appended(case, side, slot, head));
            return row_656::key(&row);
        }
        let scale = self.scale(case, side, slot, head);
        if case.appends != Appends::Copied {
            let row = self.appended(case, side, slot, head).into_iter();
            return row.map(|x| round(dtype, x * (1.0 / scale))).collect();
        }
        let position = self.positions[slot as usize].unwrap_or(0);
        let numbers = cached(case, side == 1, slot, position, head).into_iter();
        numbers.map(|x| round(dtype, x / scale)).collect()
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
                let row = (slot * spec.kv_heads + head) as usize;
                if case.appends == Appends::Computed {
                    self.scale_values[side][row] = scale;
                    let at = self.scales[side].start + 4 * row;
                    put(Dtype::F32, &[scale], &mut self.given.bytes_mut()[at..]);
                }
                let at = row * dim as usize;
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
            let row = match case.scales {
                Scales::InRow => row_656::bytes(&self.appended(case, side, slot, head)),
                _ => Vec::new(),
            };
            let numbers = self.stored(case, side, slot, head);
            for (pool, at) in self.pools.iter().zip(self.cached_at) {
                let strides = [pool.k, pool.v][side];
                let place = page * strides.page + offset * strides.token + head * strides.head;
                let place = at[side] + place as usize * element;
                let to = &mut self.cache.bytes_mut()[place..];
                match row.is_empty() {
                    true => put(spec.kv_dtype, &numbers, to),
                    false => to[..row.len()].copy_from_slice(&row),
                }
            }
        }
    }
}

/// The scale by which the largest number of a row becomes the largest of the type.
fn computed(dtype: Dtype, row: &[f32]) -> f32 {
    let largest = match dtype {
        Dtype::F8E5M2 => 57_344.0,
        _ => 448.0,
    };
    match row.iter().fold(0.0_f32, |most, x| most.max(x.abs())) {
        0.0 => 1.0,
        most => (most / largest).max(1e-30),
    }
}
