//! Sequences, the steps in which they grow, and the calls of each step.

use tandem_attn::problem::{Compute, Spec};

use super::{Draw, Size, chance, one};
use crate::{
    case::{Extra, Masked, Row, Sequence, Step},
    numeric::Rng,
    world::MOST_CHOSEN,
};

impl Draw {
    /// Calls besides those of a step.
    fn extras(self, rng: &mut Rng, spec: &Spec) -> Vec<Extra> {
        if !self.gpu {
            return Vec::new();
        }
        let mut extras = Vec::new();
        if !spec.latent && chance(rng, 15) {
            extras.push(Extra::ByHead);
        }
        // Sinks of single heads do not follow each other where tokens have them in turn.
        if !spec.latent && spec.variant.sink_tokens == 1 && chance(rng, 12) {
            let masked = one(rng, &[Masked::All, Masked::KvHead, Masked::QueryHead]);
            extras.push(Extra::Blocks(masked));
        }
        if chance(rng, 15) {
            extras.push(Extra::Merged);
        }
        if spec.variant.causal && chance(rng, 12) {
            extras.push(Extra::Tree);
        }
        if chance(rng, if spec.latent { 60 } else { 12 }) {
            let most = one(rng, &[8, 70, MOST_CHOSEN]);
            extras.push(Extra::Chosen(1 + rng.below(most) as u32));
        }
        extras
    }

    /// Many requests behind one prefix, with a token each in two steps: a wide prefix, if the kernels for it exist.
    pub(super) fn behind_a_prefix(
        self,
        rng: &mut Rng,
        spec: &Spec,
        page_size: u32,
    ) -> (Vec<Sequence>, Vec<Step>) {
        let pages = (256 + rng.below(1000) as u32).div_ceil(page_size);
        let prefix = Sequence {
            tokens: pages * page_size,
            parent: None,
        };
        let count = 20 + rng.below(120);
        let most_own = one(rng, &[1, 40, 200]);
        let own = (0..count).map(|_| Sequence {
            // In the first step some requests end where the prefix does.
            tokens: pages * page_size + 1 + rng.below(most_own) as u32,
            parent: Some((0, pages)),
        });
        let sequences: Vec<_> = std::iter::once(prefix).chain(own).collect();
        let first = usize::from(chance(rng, 50));
        let steps = (0..2).map(|at| {
            let rows = sequences.iter().enumerate().skip(first);
            let rows = rows.map(|(sequence, held)| Row {
                sequence,
                queries: 1,
                keys: held.tokens - 1 + at,
            });
            Step {
                rows: rows.collect(),
                composed: false,
                trees: false,
                masks: false,
                update: at > 0 && chance(rng, 70),
                others: (0..rng.below(3))
                    .map(|_| self.options(rng, page_size))
                    .collect(),
                extras: self.extras(rng, spec),
            }
        });
        let steps = steps.collect();
        (sequences, steps)
    }

    /// Sequences, and steps in which they grow.
    pub(super) fn steps(
        self,
        rng: &mut Rng,
        spec: &Spec,
        page_size: u32,
    ) -> (Vec<Sequence>, Vec<Step>) {
        let tiny = self.size == Size::Tiny;
        let most = [4, 9, 30][self.size as usize];
        let count = rng.below(most);
        let mut sequences: Vec<Sequence> = Vec::new();
        for _ in 0..count {
            let parent = (!sequences.is_empty() && chance(rng, 50)).then(|| {
                let parent = rng.below(sequences.len());
                let full = sequences[parent].tokens / page_size;
                (parent, (1 + rng.below(12) as u32).min(full))
            });
            let own = match (self.size, rng.below(20)) {
                (_, 0) => 0,
                (Size::Tiny, 1) => rng.below(300),
                (Size::Tiny, _) => rng.below(70),
                (Size::Large, 1..4) => rng.below(10_000),
                (_, 1 | 2) => rng.below(300),
                (_, 3) if rng.below(4) == 0 => rng.below(1500),
                (_, _) => rng.below(90),
            } as u32;
            let shared = parent.map_or(0, |(_, pages)| pages * page_size);
            sequences.push(Sequence {
                tokens: shared + own,
                parent,
            });
        }
        let steps = 1 + rng.below(if tiny { 2 } else { 4 });
        let steps = (0..steps).map(|at| {
            let mut rows = Vec::new();
            for (sequence, held) in sequences.iter_mut().enumerate() {
                if chance(rng, 12) {
                    continue;
                }
                let queries = match rng.below(20) {
                    0 => 0,
                    1..4 => 2 + rng.below(7),
                    4 | 5 => 9 + rng.below(60),
                    6 if !tiny && rng.below(5) == 0 => 60 + rng.below(160),
                    _ => 1,
                } as u32;
                held.tokens += queries;
                rows.push(Row {
                    sequence,
                    queries,
                    keys: held.tokens,
                });
            }
            let others = rng.below(if tiny { 2 } else { 7 });
            let trees = spec.variant.causal && chance(rng, 15);
            // What products of 8 bits make of masks of any keys, and of several parts, is not said.
            let in_8_bits = spec.compute == Compute::F8;
            let masks = !trees && !in_8_bits && chance(rng, 15);
            // Row blocks of several requests know no distances.
            let distances = spec.variant.window_left.is_some()
                || spec.variant.hooks.is_some()
                || spec.rotary.is_some();
            let composed = !distances && !in_8_bits && chance(rng, 15);
            Step {
                rows,
                composed: composed && !trees && !masks,
                trees,
                masks,
                update: at > 0 && chance(rng, 70),
                others: (0..others).map(|_| self.options(rng, page_size)).collect(),
                extras: self.extras(rng, spec),
            }
        });
        let steps = steps.collect();
        (sequences, steps)
    }
}
