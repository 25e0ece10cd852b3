//! Keys that were chosen for each query token: named on the device for latent rows of 656 bytes, in the plan for others.

use tandem_attn::{exec::gpu::DeviceArray, problem::Batch};

use super::{Runner, text};
use crate::{case::Scales, numeric::Rng, oracle};

impl Runner<'_> {
    pub(super) fn chosen(
        &mut self,
        at: usize,
        q: &[f32],
        keys: u32,
        rng: &mut Rng,
    ) -> Result<(), String> {
        let case = self.case;
        let (mut spec, tables) = (self.in_16_bits(), case.tables().0);
        // Positions count the chosen keys only.
        (spec.rotary, spec.variant.window_left) = (None, None);
        (spec.variant.hooks, spec.variant.adds_up) = (None, false);
        let on_device = case.scales == Scales::InRow;
        let slots = self.world.pages * case.page_size;
        let none_in_100 = [0, 20, 97, 100][rng.below(4)];
        let mut indices: Vec<i32> = Vec::new();
        for row in &case.steps[at].rows {
            let table = &tables[row.sequence];
            for _ in 0..row.queries * keys {
                let key = rng.below(row.keys as usize) as u32;
                let page = table[(key / case.page_size) as usize];
                let slot = page * case.page_size + key % case.page_size;
                // On the device every number that is no slot is no key.
                let none = match rng.below(4) {
                    0 if on_device => (slots + rng.below(3) as u32) as i32,
                    1 if on_device => i32::MIN,
                    _ => -1,
                };
                indices.push(match rng.below(100) < none_in_100 {
                    true => none,
                    false => slot as i32,
                });
            }
        }
        let tokens = indices.len() / keys as usize;
        let batch = match on_device {
            true => Batch::of_top_k(tokens as u32, keys),
            false => Batch::of_indices(keys, &indices, slots),
        };
        let batch = match batch {
            Ok(batch) => batch,
            Err(error) => return self.refused(error),
        };
        let mut given = self.given(0, tokens);
        given.own.clear();
        let Some(pool) = self.pools()[at % 2].by_token() else {
            self.tally
                .unsupported("tokens that are not evenly spaced are no pages");
            return Ok(());
        };
        given.pools = vec![pool];
        if on_device {
            let place = self.world.indices.start;
            let bytes: &[u8] = bytemuck::cast_slice(&indices);
            self.world.given.bytes_mut()[place..][..bytes.len()].copy_from_slice(bytes);
            let all = self.world.given.bytes();
            self.given.write(0, all).map_err(text)?;
            let address = self.given.address() + place as u64;
            given.indices = Some(DeviceArray::new(address, indices.len()));
        }
        let seen = |token: usize, _| -> Vec<u32> {
            let chosen = &indices[token * keys as usize..][..keys as usize];
            let slots = chosen
                .iter()
                .filter(|&&index| (0..slots as i32).contains(&index));
            slots.map(|&index| index as u32).collect()
        };
        let right = oracle::of_slots(case, &self.world, q, spec.variant.sinks, seen);
        let called = match on_device {
            true => "keys chosen on the device",
            false => "keys chosen by the host",
        };
        self.call_and_judge(called, &spec, &batch, &given, right)
    }
}
