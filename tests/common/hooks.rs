//! The hooks of the library with their numbers, and rotary embeddings: what tests and random calls give to attention.
// Each program uses its own part of this.
#![allow(dead_code)]

use tandem_attn::{
    problem::Spec,
    step::{Pairing, Rope, RopeScaling, Yarn},
    variant::FromLaunch,
    variants::{
        Alibi, BiasTable, DISTANCE_BIAS, DistanceBias, SIGMOID, Sigmoid, SigmoidBias, Slopes,
    },
};

use super::Rng;

/// Slopes of each head, as models have them: from 1/2 down to 1/256. For biases by distance their table.
pub fn slopes(spec: &Spec) -> Vec<f32> {
    if spec.variant.hooks == Some(DISTANCE_BIAS.name) {
        return Rng(13).floats(spec.q_heads as usize * BIASES, -3.0, 3.0);
    }
    let slope = |head| (-8.0 * (head + 1) as f32 / spec.q_heads as f32).exp2();
    (0..spec.q_heads).map(slope).collect()
}

/// The hooks of that name with these slopes, which outlive it.
pub fn alibi(spec: &Spec, slopes: &[f32]) -> Alibi {
    let address = slopes.as_ptr() as u64;
    // SAFETY: a slope for each head; callers keep them.
    unsafe { Alibi::from_launch(spec.variant_params(), &Slopes { address }) }
}

/// Sigmoid weights, about one for all keys together.
pub fn sigmoid(spec: &Spec) -> Sigmoid {
    // SAFETY: there are no addresses in it.
    unsafe { Sigmoid::from_launch(spec.variant_params(), &SIGMOID_BIAS) }
}

const SIGMOID_BIAS: SigmoidBias = SigmoidBias { bias: -5.0 };

/// Biases by distance from this table, which outlives them.
pub fn distance_bias(spec: &Spec, table: &[f32]) -> DistanceBias {
    let table = bias_table(spec, table.as_ptr() as u64);
    // SAFETY: a table of these heads; callers keep it.
    unsafe { DistanceBias::from_launch(spec.variant_params(), &table) }
}

/// Biases of a head: fewer than there are keys, also to the right of a query.
const BIASES: usize = 50;

fn bias_table(spec: &Spec, address: u64) -> BiasTable {
    let first = if spec.variant.causal { 0 } else { -20 };
    let len = spec.q_heads as usize * BIASES;
    BiasTable::new(address, len, spec.q_heads, first).expect("a table for these heads")
}

/// What a run gives the hooks of a specification, whose numbers lie at an address.
pub fn own_bytes(spec: &Spec, address: u64) -> Vec<u8> {
    match spec.variant.hooks {
        None => Vec::new(),
        Some(name) if name == SIGMOID.name => bytemuck::bytes_of(&SIGMOID_BIAS).to_vec(),
        Some(name) if name == DISTANCE_BIAS.name => {
            bytemuck::bytes_of(&bias_table(spec, address)).to_vec()
        }
        Some(_) => bytemuck::bytes_of(&Slopes { address }).to_vec(),
    }
}

/// A rotary embedding of heads of so many elements: any pairs, part of a head, frequencies as they are or scaled. Half-split
/// parts are multiples of 32 elements, as kernels have them.
pub fn rotary(head_dim: u32, seed: u64) -> Rope {
    let mut rng = Rng(seed);
    let pairing = [Pairing::HalfSplit, Pairing::Interleaved][rng.below(2)];
    let step = match pairing {
        Pairing::HalfSplit => 32.min(head_dim),
        Pairing::Interleaved => 2,
    };
    let dim = match rng.below(2) {
        0 => head_dim,
        _ => step * (1 + rng.below((head_dim / step) as usize) as u32),
    };
    let dim = dim / step * step;
    let scaling = match rng.below(4) {
        0 => RopeScaling::None,
        1 => RopeScaling::Linear { factor: 4.0 },
        2 => RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_positions: 64,
        },
        _ => RopeScaling::Yarn(Yarn::new(4.0, 128)),
    };
    let theta = [10_000.0, 500_000.0][rng.below(2)];
    Rope::new(dim, theta)
        .with_pairing(pairing)
        .with_scaling(scaling)
}
