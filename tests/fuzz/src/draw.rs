//! Cases at random.

mod spec;
mod steps;

use tandem_attn::{
    plan::{MergeMode, PackRule, PlanOptions, SplitMode, pod::PodMode},
    problem::{Compute, Spec},
};

use crate::{
    case::{Appends, Case, Numbers, PoolLayout, Scales},
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
            true => self.behind_a_prefix(rng, &spec, page_size),
            false => self.steps(rng, &spec, page_size),
        };
        let options = self.options(rng, page_size);
        let eight_bits = spec.kv_dtype.bytes() == 1;
        let in_8_bits = spec.compute == Compute::F8;
        let scales = match (eight_bits, rng.below(5)) {
            (true, _) if self.gpu && spec.latent => Scales::InRow,
            (false, _) | (true, 0) => Scales::One,
            (true, 1) => Scales::Tensor,
            (true, 2) => Scales::Head,
            (true, 3) => Scales::Request,
            // What prefills with products of 8 bits make of these is not said.
            (true, _) if in_8_bits => Scales::One,
            (true, _) => Scales::Token,
        };
        let appends = match (scales, self.gpu && eight_bits) {
            (Scales::InRow, _) => Appends::Quantised,
            // Those of the new tokens would be of other requests than those of who reads them.
            (Scales::Request, _) | (_, false) => Appends::Copied,
            (Scales::Token, true) if chance(rng, 60) => Appends::Computed,
            (_, true) => one(rng, &[Appends::Copied, Appends::Quantised]),
        };
        // Numbers that are rounded again: only of usual ones is known how much that may be.
        let rounded = spec.rotary.is_some() || appends == Appends::Computed;
        let numbers = match rng.below(20) {
            0..5 | 6 | 7 if rounded => Numbers::Usual,
            // A term of a product that outweighs the others cuts off more of them than is allowed for.
            2..5 if in_8_bits => Numbers::Usual,
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
        let ampere = self.gpu && !spec.latent && chance(rng, 20);
        Case {
            seed,
            page_size,
            pools,
            scales,
            appends,
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
            two_pools: spec.latent && spec.kv_dtype.bytes() > 1 && chance(rng, 50),
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
}
