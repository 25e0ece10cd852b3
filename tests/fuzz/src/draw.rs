//! Cases at random.

use tandem_attn::{
    plan::{MergeMode, PackRule, PlanOptions, SplitMode, pod::PodMode},
    problem::{Dtype, Spec},
    variants::ALIBI,
};

use crate::{
    case::{Case, Numbers, PoolLayout, Row, Scales, Sequence, Step},
    numeric::Rng,
};

/// Who is to run it, and how large it may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    pub gpu: bool,
    pub size: Size,
}

/// How many requests of how many keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// For the emulator, which takes a second for what a GPU does in ten microseconds.
    Tiny,
    /// For attention in f64 on a core.
    Usual,
    /// For plans that nobody runs.
    Large,
}

/// One of some values.
pub fn one<T: Clone>(rng: &mut Rng, of: &[T]) -> T {
    of[rng.below(of.len())].clone()
}

/// True so many times out of a hundred.
pub fn chance(rng: &mut Rng, percent: usize) -> bool {
    rng.below(100) < percent
}

impl Draw {
    /// The case of a seed.
    pub fn case(self, seed: u64) -> Case {
        let rng = &mut Rng(seed);
        let spec = self.spec(rng);
        let native =
            matches!((spec.head_dim_qk, spec.head_dim_v), (64, 64) | (128, 128)) && !spec.latent;
        let page_size = match rng.below(10) {
            0 => 8,
            1 => 24,
            2 => 64,
            3 if native || !self.gpu => 1 + rng.below(7) as u32,
            4 if native || !self.gpu => 9 + rng.below(120) as u32,
            _ => 16,
        };
        let wide = self.size == Size::Usual && chance(rng, 4);
        let (sequences, steps) = match wide {
            true => self.behind_a_prefix(rng, page_size),
            false => self.steps(rng, &spec, page_size),
        };
        let options = self.options(rng, page_size);
        let eight_bits = spec.kv_dtype.bytes() == 1;
        let scales = match (eight_bits, rng.below(5)) {
            (false, _) | (true, 0) => Scales::One,
            (true, 1) => Scales::Tensor,
            (true, 2) => Scales::Head,
            (true, 3) => Scales::Request,
            (true, _) => Scales::Token,
        };
        let numbers = match rng.below(20) {
            0 => Numbers::Steep,
            1 => Numbers::Huge,
            2 => Numbers::Rising,
            3 => Numbers::Falling,
            4 => Numbers::OneKey,
            5 => Numbers::Equal,
            6 => Numbers::Tiny,
            // Latent values are a part of the keys, and a weight of 0 does not keep an infinite value out.
            7 if !eight_bits && !spec.latent => Numbers::Infinite,
            _ => Numbers::Usual,
        };
        let pools = [(); 2].map(|()| self.pool(rng, &spec));
        let ampere = self.gpu && native && !eight_bits && chance(rng, 20);
        Case {
            seed,
            page_size,
            pools,
            scales,
            numbers,
            poison: if chance(rng, 70) { 0xFF } else { 0x7F },
            sequences,
            steps,
            options,
            sms: one(rng, &[1, 2, 8, 132]),
            joint: !ampere && chance(rng, 70),
            ampere,
            graph: self.gpu && !ampere && chance(rng, 50),
            gaps: [(); 2].map(|()| {
                if chance(rng, 30) {
                    8 * rng.below(9) as u32
                } else {
                    0
                }
            }),
            slack: one(rng, &[0, 0, 1, 50]),
            wrong: 2,
            spec,
        }
    }

    fn spec(self, rng: &mut Rng) -> Spec {
        let tiny = self.size == Size::Tiny;
        let kv_heads = 1 + rng.below(if tiny { 2 } else { 4 }) as u32;
        let group = match rng.below(12) {
            0 => 16,
            1 if !tiny => 40,
            2 => 5,
            _ => 1 + rng.below(8) as u32,
        };
        let mut spec = match (self.gpu, rng.below(20)) {
            (true, 0) => Spec::latent(one(rng, &[3, 16, 64]), 512, 64),
            (true, 1) => Spec::new(kv_heads * group.min(8), kv_heads, one(rng, &[256, 512])),
            (true, 2) => {
                let (qk, v) = one(rng, &[(192, 128), (64, 512)]);
                Spec::new(kv_heads * group.min(8), kv_heads, qk).with_head_dim_v(v)
            }
            (true, 3 | 4) => {
                let dim = one(
                    rng,
                    &[16, 32, 48, 80, 96, 112, 144, 160, 176, 192, 208, 224, 240],
                );
                Spec::new(kv_heads * group.min(8), kv_heads, dim)
            }
            (true, n) => Spec::new(
                kv_heads * group,
                kv_heads,
                if n % 2 == 0 { 64 } else { 128 },
            ),
            (false, 0) => Spec::latent(one(rng, &[3, 16]), 64, 16),
            (false, _) => {
                let dim = one(rng, &[16, 32, 48, 64, 128]);
                Spec::new(kv_heads * group, kv_heads, dim).with_head_dim_v(one(rng, &[16, 80, dim]))
            }
        };
        spec = spec.with_dtype(one(rng, &[Dtype::BF16, Dtype::F16]));
        if !self.gpu {
            spec.q_dtype = one(rng, &[Dtype::BF16, Dtype::F16, Dtype::F32]);
            spec.out_dtype = one(rng, &[Dtype::BF16, Dtype::F16, Dtype::F32]);
            spec.kv_dtype = one(rng, &[Dtype::BF16, Dtype::F16, Dtype::F32, Dtype::F8E5M2]);
        }
        let eight_bits = chance(rng, 15) && !spec.latent;
        if eight_bits {
            spec.kv_dtype = Dtype::F8E4M3;
        }
        spec.variant.causal = chance(rng, 90);
        if chance(rng, 25) {
            spec.variant.window_left = Some(rng.below(300) as u32);
        }
        if chance(rng, 15) {
            spec.variant.soft_cap = Some(rng.between(5.0, 50.0));
        } else if eight_bits && self.gpu && chance(rng, 25) {
            spec.kv_dtype = Dtype::F8E5M2;
        }
        spec.variant.sinks = chance(rng, 25) && !eight_bits;
        if spec.variant.sinks && !spec.latent && chance(rng, 30) {
            spec.variant.sink_tokens = 2 + rng.below(3) as u32;
        }
        let plain = spec.variant.soft_cap.is_none() && !eight_bits && !spec.latent;
        if self.gpu && plain && spec.head_dim_qk <= 128 && chance(rng, 12) {
            spec = spec.with_hooks(&ALIBI);
        }
        spec
    }

    fn pool(self, rng: &mut Rng, spec: &Spec) -> PoolLayout {
        let mut gap = |percent| {
            let gap = 16 * (1 + rng.below(4)) as u32;
            if chance(rng, percent) { gap } else { 0 }
        };
        let gaps = [gap(5), gap(10), gap(15)];
        PoolLayout {
            hnd: chance(rng, 40),
            values_differ: chance(rng, 10) && !spec.latent,
            paired: chance(rng, 20),
            gaps,
            two_pools: spec.latent && chance(rng, 50),
        }
    }

    fn options(self, rng: &mut Rng, page_size: u32) -> PlanOptions {
        let split = match rng.below(7) {
            0 => SplitMode::Off,
            1 | 2 => SplitMode::Fixed {
                tokens: page_size * (1 + rng.below(20)) as u32,
            },
            _ => SplitMode::Makespan,
        };
        let pods = [
            PodMode::Auto,
            PodMode::Auto,
            PodMode::Serial,
            PodMode::Streams,
            PodMode::Fused,
            PodMode::Tickets,
        ];
        let packing = [
            PackRule::Fastest,
            PackRule::Fastest,
            PackRule::Exact,
            PackRule::Off,
        ];
        let merges = [MergeMode::Auto, MergeMode::Kernel, MergeMode::Fused];
        PlanOptions::default()
            .with_split(split)
            .with_packing(one(rng, &packing))
            .with_merge_mode(one(rng, &merges))
            .with_pod(one(rng, &pods))
    }

    /// Many requests behind one prefix, with a token each in two steps: a wide prefix, if the kernels for it exist.
    fn behind_a_prefix(self, rng: &mut Rng, page_size: u32) -> (Vec<Sequence>, Vec<Step>) {
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
            }
        });
        let steps = steps.collect();
        (sequences, steps)
    }

    /// Sequences, and steps in which they grow.
    fn steps(self, rng: &mut Rng, spec: &Spec, page_size: u32) -> (Vec<Sequence>, Vec<Step>) {
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
            let masks = !trees && chance(rng, 15);
            // Row blocks of several requests know no distances.
            let distances = spec.variant.window_left.is_some() || spec.variant.hooks.is_some();
            Step {
                rows,
                composed: !distances && !trees && !masks && chance(rng, 15),
                trees,
                masks,
                update: at > 0 && chance(rng, 70),
                others: (0..others).map(|_| self.options(rng, page_size)).collect(),
            }
        });
        let steps = steps.collect();
        (sequences, steps)
    }
}
