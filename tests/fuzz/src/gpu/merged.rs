//! Two runs over different keys, and their results merged.

use tandem_attn::{
    exec::gpu::{DeviceBuffer, DeviceTensor},
    problem::{Batch, Dtype, PageTable, Part},
};

use super::{Runner, text};
use crate::{
    case::Case,
    numeric::Rng,
    oracle::{self, Right},
    world::Image,
};

/// The first pages of each request as one batch, the rest as another.
fn halves(case: &Case, at: usize, rng: &mut Rng) -> [Batch; 2] {
    let (tables, pages) = case.tables();
    let mut halves = [(); 2].map(|()| PageTable::new(case.page_size, pages));
    let (mut indptr, mut after) = (vec![0], Vec::new());
    for row in &case.steps[at].rows {
        let table = &tables[row.sequence][..row.keys.div_ceil(case.page_size) as usize];
        // New tokens have their keys in one of the two.
        let old = ((row.keys - row.queries) / case.page_size) as usize;
        let cut = match rng.below(6) {
            0 => table.len(),
            _ => rng.below(old + 1),
        };
        let first = row.keys.min(cut as u32 * case.page_size);
        halves[0].push(&table[..cut], first);
        halves[1].push(&table[cut..], row.keys - first);
        after.push(row.keys - first);
        indptr.push(indptr[indptr.len() - 1] + row.queries);
    }
    let [first, rest] = halves;
    let part = Part::new(indptr.clone(), first).with_keys_after(after);
    [
        Batch::composed(indptr.clone(), vec![part]),
        Batch::new(indptr, rest),
    ]
}

impl Runner<'_> {
    pub(super) fn merged(&mut self, at: usize, q: &[f32], rng: &mut Rng) -> Result<(), String> {
        let case = self.case;
        let mut spec = self.in_16_bits();
        if spec.variant.adds_up {
            self.tally
                .unsupported("results without a softmax are not merged");
            return Ok(());
        }
        let mut step = case.steps[at].clone();
        (step.composed, step.trees, step.masks) = (false, false, false);
        let whole = case.batch(&step);
        let (tokens, heads) = (whole.total_q() as usize, spec.q_heads as usize);
        let mut image = Image::new(case.poison);
        let element = spec.out_dtype.bytes() as usize;
        let places = [(); 2].map(|()| {
            let out = image.room(tokens * heads * spec.head_dim_v as usize * element);
            (
                out.start as u64,
                image.room(4 * tokens * heads).start as u64,
            )
        });
        let memory = DeviceBuffer::from_slice(self.gpu, image.bytes()).map_err(text)?;
        let mut results = Vec::new();
        for (batch, (out, lse)) in halves(case, at, rng).iter().zip(places) {
            let mut given = self.given(1, tokens);
            given.out = DeviceTensor::new(memory.address() + out, spec.out_dtype, given.out.shape);
            let lse = DeviceTensor::new(memory.address() + lse, Dtype::F32, [tokens, heads]);
            given.lse = Some(lse);
            if !spec.variant.sinks {
                given.sinks = None;
            }
            if !self.call(&spec, batch, &given)? {
                return Ok(());
            }
            results.push((given.out, lse));
            // Sinks count once.
            (spec.variant.sinks, spec.variant.sink_tokens) = (false, 1);
        }
        let right = Right {
            roundings: 3.0,
            ..Right::from(oracle::right(case, &whole, &self.world, q))
        };
        let (given, mut first) = (self.given(0, tokens), None);
        for _ in 0..2 {
            let bytes = self.world.results.bytes();
            self.results.write(0, bytes).map_err(text)?;
            // SAFETY: all of it is in memory of ours, and the stream is waited for.
            let done = unsafe {
                let (out, lse) = (&given.out, given.lse.as_ref());
                self.gpu.merge_results(&results, out, lse, *self.stream)
            };
            if let Err(error) = done {
                return self.refused(error);
            }
            self.stream.synchronize().map_err(text)?;
            self.judge("results that are merged", tokens, &right, &mut first)?;
        }
        Ok(())
    }
}
