//! The step around attention, by its formulas in f64.
// Each program uses its own part of this.
#![allow(dead_code)]

use proptest::prelude::*;
use tandem_attn::step::{
    Activation, AdjustToken, NO_TOKEN, Pairing, Penalties, RmsNorm, Rope, RopeScaling, Sampling,
    Yarn,
};

/// A rotary embedding of so many elements, of every kind.
pub fn rope(rotated: impl Strategy<Value = u32>) -> impl Strategy<Value = Rope> {
    let scaling = prop_oneof![
        Just(RopeScaling::None),
        Just(RopeScaling::Linear { factor: 8.0 }),
        Just(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_positions: 8192,
        }),
        Just(RopeScaling::Yarn(Yarn::new(4.0, 32_768))),
    ];
    let pairing = prop_oneof![Just(Pairing::HalfSplit), Just(Pairing::Interleaved)];
    let theta = prop_oneof![Just(1e4), Just(5e5), Just(1e6)];
    (rotated, theta, pairing, scaling).prop_map(|(rotated, theta, pairing, scaling)| {
        Rope::new(rotated, theta)
            .with_pairing(pairing)
            .with_scaling(scaling)
    })
}

/// Norms of heads, or none.
pub fn norm() -> impl Strategy<Value = Option<RmsNorm>> + Clone {
    prop_oneof![
        Just(None),
        Just(Some(RmsNorm::new(1e-6))),
        Just(Some(RmsNorm::gemma(1e-5))),
    ]
}

/// Each row divided by the root of its mean square, times its weights.
pub fn rms_norm(norm: RmsNorm, x: &[f64], weight: &[f64]) -> Vec<f64> {
    let row = |x: &[f64]| {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let inverse = 1.0 / (mean + f64::from(norm.eps)).sqrt();
        let weighted = |(x, w): (&f64, &f64)| x * inverse * (w + f64::from(norm.offset));
        x.iter().zip(weight).map(weighted).collect::<Vec<_>>()
    };
    x.chunks(weight.len()).flat_map(row).collect()
}

/// A head, turned.
pub fn turn(rope: &Rope, position: u32, head: &[f64]) -> Vec<f64> {
    let frequencies = rope.inverse_frequencies().expect("a good embedding");
    let mut turned = head.to_vec();
    let pairs = rope.dim as usize / 2;
    for (pair, frequency) in frequencies.into_iter().enumerate() {
        let [first, second] = match rope.pairing {
            Pairing::HalfSplit => [pair, pair + pairs],
            Pairing::Interleaved => [2 * pair, 2 * pair + 1],
        };
        let (sine, cosine) = (f64::from(position) * frequency).sin_cos();
        let (x, y) = (head[first], head[second]);
        turned[first] = (x * cosine - y * sine) * rope.magnitude();
        turned[second] = (y * cosine + x * sine) * rope.magnitude();
    }
    turned
}

/// What a fused projection becomes.
pub struct Qkv<'a> {
    pub heads: [usize; 2],
    pub dim: usize,
    pub qkv: &'a [f64],
    pub bias: Option<&'a [f64]>,
    pub norm: Option<(RmsNorm, [&'a [f64]; 2])>,
    pub rope: Option<(Rope, &'a [u32])>,
}

impl Qkv<'_> {
    /// Queries, keys and values of all tokens.
    pub fn parts(&self) -> [Vec<f64>; 3] {
        let [q_heads, kv_heads] = self.heads;
        let row = (q_heads + 2 * kv_heads) * self.dim;
        let mut parts = [const { Vec::new() }; 3];
        for (token, source) in self.qkv.chunks(row).enumerate() {
            let mut source = source.to_vec();
            if let Some(bias) = self.bias {
                source.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
            }
            for (index, head) in source.chunks(self.dim).enumerate() {
                let part = usize::from(index >= q_heads) + usize::from(index >= q_heads + kv_heads);
                let mut head = head.to_vec();
                if let Some((norm, weights)) = self.norm.filter(|_| part < 2) {
                    head = rms_norm(norm, &head, weights[part]);
                }
                if let Some((rope, positions)) = self.rope.filter(|_| part < 2) {
                    head = turn(&rope, positions[token], &head);
                }
                parts[part].extend(head);
            }
        }
        parts
    }
}

/// An activated gate.
pub fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + inner.tanh())
        }
    }
}

/// The probabilities that a sampling draws from.
pub fn probabilities(sampling: &Sampling, logits: &[f64]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weigh = |logit: f64| ((logit - largest) / f64::from(sampling.temperature)).exp();
    let mut weights: Vec<f64> = logits.iter().map(|&logit| weigh(logit)).collect();
    let mut ordered: Vec<usize> = (0..logits.len()).collect();
    ordered.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    let mut least = f64::NEG_INFINITY;
    if (1..logits.len()).contains(&(sampling.top_k as usize)) {
        least = logits[ordered[sampling.top_k as usize - 1]];
    }
    let all: f64 = (0..logits.len())
        .filter(|&i| logits[i] >= least)
        .map(|i| weights[i])
        .sum();
    if sampling.top_p < 1.0 {
        let mut sum = 0.0;
        for i in ordered {
            sum += weights[i];
            if sum >= f64::from(sampling.top_p) * all {
                least = least.max(logits[i]);
                break;
            }
        }
    }
    for (weight, &logit) in weights.iter_mut().zip(logits) {
        if logit < least || *weight < f64::from(sampling.min_p) {
            *weight = 0.0;
        }
    }
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / sum).collect()
}

/// A logit with the bias of its token and the penalties of its row.
pub fn adjusted(penalties: &Penalties, logit: f64, token: &AdjustToken) -> f64 {
    let count = token.seen & !AdjustToken::IN_PROMPT;
    let mut x = logit + f64::from(token.bias);
    if token.seen > 0 {
        let factor = f64::from(penalties.repetition);
        x = if x > 0.0 { x / factor } else { x * factor };
    }
    if count > 0 {
        x -= f64::from(penalties.presence);
    }
    x - f64::from(penalties.frequency) * f64::from(count)
}

/// The log-probability of a token, and of the most probable ones, in order.
pub fn log_probs(logits: &[f32], token: u32, top: usize) -> Vec<(u32, f64)> {
    let log_sum = logits.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
    let of = |token: u32| (token, f64::from(logits[token as usize]) - log_sum);
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    // The first of equal ones; −0 equals 0.
    let larger = |a: f32, b: f32| b.partial_cmp(&a).expect("numbers");
    order.sort_by(|&a, &b| larger(logits[a as usize], logits[b as usize]).then(a.cmp(&b)));
    let none = std::iter::repeat((NO_TOKEN, f64::NEG_INFINITY));
    let most = order.into_iter().map(of).chain(none).take(top);
    std::iter::once(of(token)).chain(most).collect()
}
