//! What calls are given: new keys and values, queries.

use tandem_attn::abi::NO_SLOT;

use super::{REQUESTS, World};
use crate::{
    case::Case,
    numbers::{put, query},
    numeric::Rng,
};

impl World {
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
            let dtype = case.row_dtype();
            let row = (dim * dtype.bytes()) as usize;
            let place = self.rows[side].clone();
            self.given.spoil(&place);
            for (index, &slot) in listed
                .iter()
                .enumerate()
                .filter(|(_, slot)| **slot != NO_SLOT)
            {
                for head in 0..spec.kv_heads {
                    let numbers = self.appended(case, side, slot, head);
                    let at = place.start + (index * spec.kv_heads as usize + head as usize) * row;
                    put(dtype, &numbers, &mut self.given.bytes_mut()[at..]);
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
