//! What `transformers` computed: `peers/step.py`.

use serde::Deserialize;
use tandem_attn::{
    kv::{AppendScales, KvScales, KvViewMut},
    problem::{Dtype, KvLayout, Spec},
    step::{
        Activation, Draw, Pairing, RmsNorm, Rope, RopeScaling, Sampling, Yarn,
        cpu::{QkvStep, gate, qkv, rms_norm, sample},
    },
};

#[derive(Deserialize)]
struct Fixtures {
    positions: Vec<u32>,
    ropes: Vec<RopeCase>,
    norms: Vec<NormCase>,
    activations: Vec<ActivationCase>,
    filters: Filters,
}

#[derive(Deserialize)]
struct RopeCase {
    name: String,
    dim: u32,
    head_dim: u32,
    pairing: Pairing,
    rope: Parameters,
    magnitude: f64,
    inverse_frequencies: Vec<f64>,
    heads: Vec<f32>,
    turned: Vec<f32>,
}

/// As they stand in a model's `config.json`.
#[derive(Deserialize)]
struct Parameters {
    rope_theta: f64,
    rope_type: String,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<u32>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    truncate: Option<bool>,
}

#[derive(Deserialize)]
struct NormCase {
    name: String,
    gemma: bool,
    eps: f32,
    x: Vec<f32>,
    weight: Vec<f32>,
    out: Vec<f32>,
}

#[derive(Deserialize)]
struct ActivationCase {
    name: Activation,
    x: Vec<f32>,
    out: Vec<f32>,
}

#[derive(Deserialize)]
struct Filters {
    logits: Vec<f32>,
    samplings: Vec<SamplingCase>,
}

#[derive(Deserialize)]
struct SamplingCase {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    probabilities: Vec<f64>,
}

fn fixtures() -> Fixtures {
    serde_json::from_str(include_str!("../../data/step.json")).expect("fixtures")
}

impl RopeCase {
    fn rope(&self) -> Rope {
        let Parameters {
            factor,
            original_max_position_embeddings: original,
            ..
        } = self.rope;
        let scaling = match self.rope.rope_type.as_str() {
            "linear" => RopeScaling::Linear {
                factor: factor.unwrap(),
            },
            "llama3" => RopeScaling::Llama3 {
                factor: factor.unwrap(),
                low_freq_factor: self.rope.low_freq_factor.unwrap(),
                high_freq_factor: self.rope.high_freq_factor.unwrap(),
                original_positions: original.unwrap(),
            },
            "yarn" => RopeScaling::Yarn(Yarn {
                mscale: self.rope.mscale,
                mscale_all_dim: self.rope.mscale_all_dim,
                truncate: self.rope.truncate.unwrap_or(true),
                ..Yarn::new(factor.unwrap(), original.unwrap())
            }),
            _ => RopeScaling::None,
        };
        Rope::new(self.dim, self.rope.rope_theta)
            .with_pairing(self.pairing)
            .with_scaling(scaling)
    }
}

#[test]
fn frequencies_are_those_of_transformers() {
    for case in fixtures().ropes {
        let rope = case.rope();
        let off = (rope.magnitude() - case.magnitude).abs();
        assert!(off < 1e-6, "{}: magnitude {}", case.name, rope.magnitude());
        let frequencies = rope.inverse_frequencies().expect("a good embedding");
        assert_eq!(
            frequencies.len(),
            case.inverse_frequencies.len(),
            "{}",
            case.name
        );
        for (pair, (got, right)) in frequencies.iter().zip(case.inverse_frequencies).enumerate() {
            // They were computed in single precision.
            let near = (got - right).abs() <= 3e-6 * right;
            assert!(
                near,
                "{}: pair {pair} turns by {got} instead of {right}",
                case.name
            );
        }
    }
}

#[test]
fn heads_are_turned_as_by_transformers() {
    let fixtures = fixtures();
    for case in fixtures.ropes {
        let (tokens, dim) = (fixtures.positions.len(), case.head_dim as usize);
        let spec = Spec::new(1, 1, case.head_dim).with_dtype(Dtype::F32);
        // Queries and keys are the same heads, values come through as they are.
        let source: Vec<f32> = case
            .heads
            .chunks(dim)
            .flat_map(|head| head.repeat(3))
            .collect();
        let table = case.rope().table().expect("a good embedding");
        let step = QkvStep {
            qkv: &source,
            bias: None,
            norm: None,
            rope: Some((&table, &fixtures.positions)),
        };
        let (mut k, mut v) = (vec![0.0; 8 * dim], vec![0.0; 8 * dim]);
        let mut pool = KvViewMut::new(&spec, KvLayout::Nhd, 8, &mut k, &mut v);
        let mut q = vec![0.0; tokens * dim];
        let slots: Vec<u32> = (0..tokens as u32).collect();
        let scales = AppendScales::Given(KvScales::One);
        qkv(&spec, &step, &slots, &mut q, &mut pool, 1, scales).expect("a good call");
        assert_eq!(q, k[..q.len()]);
        assert_eq!(case.heads, v[..q.len()]);
        for (at, (got, right)) in q.iter().zip(&case.turned).enumerate() {
            // Their angles are products in single precision: off by 2⁻²⁴ of the position.
            let limit = 1e-5 + 2.5e-7 * fixtures.positions[at / dim] as f32 * 3.0;
            let (position, name) = (fixtures.positions[at / dim], &case.name);
            assert!(
                (got - right).abs() <= limit,
                "{name}: {got} instead of {right} at {position}"
            );
        }
    }
}

#[test]
fn norms_are_those_of_transformers() {
    for case in fixtures().norms {
        let norm = match case.gemma {
            true => RmsNorm::gemma(case.eps),
            false => RmsNorm::new(case.eps),
        };
        let mut out = vec![0.0; case.x.len()];
        rms_norm(norm, &case.x, &case.weight, None, &mut out).expect("a good call");
        for (got, right) in out.iter().zip(case.out) {
            assert!(
                (got - right).abs() <= 2e-6 * right.abs().max(1.0),
                "{}: {got} {right}",
                case.name
            );
        }
    }
}

#[test]
fn activations_are_those_of_transformers() {
    for case in fixtures().activations {
        let both: Vec<f32> = case.x.iter().flat_map(|&x| [x, 1.0]).collect();
        let mut out = vec![0.0; case.x.len()];
        gate(case.name, &both, 1, &mut out).expect("a good call");
        for ((x, got), right) in case.x.iter().zip(out).zip(case.out) {
            let near = (got - right).abs() <= 1e-6 * x.abs().max(1.0);
            assert!(near, "{:?} of {x} is {got} instead of {right}", case.name);
        }
    }
}

#[test]
fn tokens_come_as_often_as_transformers_says() {
    let Filters { logits, samplings } = fixtures().filters;
    let count = 20_000_u64;
    for case in samplings {
        let SamplingCase {
            temperature,
            top_k,
            top_p,
            min_p,
            probabilities,
        } = case;
        let sampling = Sampling {
            temperature,
            top_k,
            top_p,
            min_p,
            seed: 1,
        };
        let draws: Vec<Draw> = (0..count).map(|at| sampling.draw(at).unwrap()).collect();
        let mut ids = vec![0; draws.len()];
        let rows = logits.repeat(draws.len());
        sample(&rows, logits.len(), &draws, &mut ids).expect("a good call");
        let mut counts = vec![0_u32; logits.len()];
        ids.iter().for_each(|&id| counts[id as usize] += 1);
        for (id, (&got, p)) in counts.iter().zip(probabilities).enumerate() {
            let (mean, deviation) = (p * count as f64, (p * (1.0 - p) * count as f64).sqrt());
            let off = (f64::from(got) - mean).abs();
            assert!(
                off <= 5.0 * deviation + 1e-3,
                "token {id}: {got} of {count}, p = {p}, {sampling:?}"
            );
        }
    }
}
