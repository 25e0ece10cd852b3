//! A short Llama or Qwen 2 in f64, from the formulas, without windows and scaling of frequencies.

use std::{fs, path::Path};

use safetensors::{
    Dtype, SafeTensors,
    tensor::{View, serialize},
};
use std::borrow::Cow;
use tandem_engine::{Architecture, Weights};

/// A tensor by its name; none if the files have none.
fn tensor(weights: &Weights, name: &str, shape: &[usize]) -> Option<Vec<f64>> {
    let read = || {
        weights
            .get::<f32>(name, shape)
            .expect("as config.json says")
    };
    let wide = |numbers: Vec<f32>| numbers.into_iter().map(f64::from).collect();
    weights.has(name).then(|| wide(read()))
}

/// `x · wᵀ + bias` of a layer, for each row of `x`.
fn linear(weights: &Weights, name: &str, x: &[Vec<f64>], outputs: usize) -> Vec<Vec<f64>> {
    let inputs = x[0].len();
    let w = tensor(weights, &format!("{name}.weight"), &[outputs, inputs]).expect("a matrix");
    let bias = tensor(weights, &format!("{name}.bias"), &[outputs]);
    let bias = bias.unwrap_or_else(|| vec![0.0; outputs]);
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let row = |x: &Vec<f64>| {
        let rows = w.chunks(inputs).zip(&bias);
        rows.map(|(w, bias)| dot(x, w) + bias).collect()
    };
    x.iter().map(row).collect()
}

fn norm(weights: &Weights, name: &str, x: &[Vec<f64>], eps: f64) -> Vec<Vec<f64>> {
    let w = tensor(weights, &format!("{name}.weight"), &[x[0].len()]).expect("a norm");
    let row = |x: &Vec<f64>| {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let x = x.iter().zip(&w);
        x.map(|(x, w)| x / (mean + eps).sqrt() * w).collect()
    };
    x.iter().map(row).collect()
}

/// Turns the first `turned` elements of each head.
fn turn(x: &mut [Vec<f64>], dim: usize, turned: usize, theta: f64) {
    for (position, row) in x.iter_mut().enumerate() {
        for head in row.chunks_mut(dim) {
            for i in 0..turned / 2 {
                let angle = position as f64 * theta.powf(-2.0 * i as f64 / turned as f64);
                let (sin, cos) = angle.sin_cos();
                let (a, b) = (head[i], head[i + turned / 2]);
                (head[i], head[i + turned / 2]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
    }
}

fn add(x: &mut [Vec<f64>], more: &[Vec<f64>]) {
    let pairs = x.iter_mut().flatten().zip(more.iter().flatten());
    pairs.for_each(|(x, more)| *x += more);
}

/// Logits at every position of a text. The first `turned` elements of heads are turned.
pub fn logits(folder: &Path, turned: usize, ids: &[u32]) -> Vec<f32> {
    let a = Architecture::read(folder).expect("a model");
    let weights = Weights::open(folder).expect("a model");
    let w = &weights;
    let spec = *a.spec();
    let (dim, group) = (
        spec.head_dim_qk as usize,
        (spec.q_heads / spec.kv_heads) as usize,
    );
    let (q_width, kv_width) = (a.q_width(), dim * spec.kv_heads as usize);
    let (theta, eps) = (a.kinds[0].rope.theta, f64::from(a.norm.eps));
    let embedding = tensor(w, "model.embed_tokens.weight", &[a.vocabulary, a.hidden]);
    let embedding = embedding.expect("a matrix");
    let row = |&id: &u32| embedding[id as usize * a.hidden..][..a.hidden].to_vec();
    let mut x: Vec<Vec<f64>> = ids.iter().map(row).collect();
    for layer in 0..a.layers.len() {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let normed = norm(w, &name("input_layernorm"), &x, eps);
        let mut q = linear(w, &name("self_attn.q_proj"), &normed, q_width);
        let mut k = linear(w, &name("self_attn.k_proj"), &normed, kv_width);
        let v = linear(w, &name("self_attn.v_proj"), &normed, kv_width);
        turn(&mut q, dim, turned, theta);
        turn(&mut k, dim, turned, theta);
        let attend = |(at, q): (usize, &Vec<f64>)| {
            let heads = q.chunks(dim).enumerate().flat_map(|(head, q)| {
                let kv = head / group * dim;
                let score = |k: &Vec<f64>| {
                    let dot: f64 = q.iter().zip(&k[kv..]).map(|(q, k)| q * k).sum();
                    (dot / (dim as f64).sqrt()).exp()
                };
                let weights: Vec<f64> = k[..=at].iter().map(score).collect();
                let sum: f64 = weights.iter().sum();
                let v = &v;
                let element = move |i: usize| {
                    let values = weights.iter().zip(v);
                    values
                        .map(|(weight, v)| weight / sum * v[kv + i])
                        .sum::<f64>()
                };
                (0..dim).map(element).collect::<Vec<_>>()
            });
            heads.collect()
        };
        let attended: Vec<Vec<f64>> = q.iter().enumerate().map(attend).collect();
        let out = linear(w, &name("self_attn.o_proj"), &attended, a.hidden);
        add(&mut x, &out);
        let normed = norm(w, &name("post_attention_layernorm"), &x, eps);
        let mut gate = linear(w, &name("mlp.gate_proj"), &normed, a.intermediate);
        let up = linear(w, &name("mlp.up_proj"), &normed, a.intermediate);
        let pairs = gate.iter_mut().flatten().zip(up.iter().flatten());
        pairs.for_each(|(gate, up)| *gate *= up / (1.0 + (-*gate).exp()));
        let out = linear(w, &name("mlp.down_proj"), &gate, a.hidden);
        add(&mut x, &out);
    }
    let normed = norm(w, "model.norm", &x, eps);
    let head = if a.tied {
        "model.embed_tokens"
    } else {
        "lm_head"
    };
    let logits = linear(w, head, &normed, a.vocabulary);
    logits.into_iter().flatten().map(|x| x as f32).collect()
}

/// A tensor of random numbers in f32.
struct Drawn(usize, Vec<u8>);

impl View for Drawn {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        std::slice::from_ref(&self.0)
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.1)
    }

    fn data_len(&self) -> usize {
        self.1.len()
    }
}

/// A copy of a model whose `config.json` is changed, with random biases of the given projections of attention.
pub fn changed(
    from: &Path,
    change: impl Fn(&mut serde_json::Value),
    biases: &[&str],
) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("writable");
    let config = fs::read(from.join("config.json")).expect("a fixture");
    let mut config = serde_json::from_slice(&config).expect("a fixture");
    change(&mut config);
    fs::write(copy.path().join("config.json"), config.to_string()).expect("writable");
    let bytes = fs::read(from.join("model.safetensors")).expect("a fixture");
    let tensors = SafeTensors::deserialize(&bytes).expect("as made");
    let mut random = fastrand::Rng::with_seed(5);
    let mut drawn = Vec::new();
    for (name, tensor) in tensors.iter() {
        for bias in biases {
            if name.ends_with(&format!("self_attn.{bias}.weight")) {
                let rows = tensor.shape()[0];
                let numbers = (0..rows).flat_map(|_| (random.f32() - 0.5).to_le_bytes());
                let name = name.replace(".weight", ".bias");
                drawn.push((name, Drawn(rows, numbers.collect())));
            }
        }
    }
    let file = copy.path().join("model.safetensors");
    let index = serialize(drawn, None).expect("sound");
    let biases = copy.path().join("biases.safetensors");
    fs::write(biases, index).expect("writable");
    fs::write(file, &bytes).expect("writable");
    write_index(copy.path());
    copy
}

/// An index of both files.
fn write_index(folder: &Path) {
    let map: serde_json::Map<_, _> = ["model.safetensors", "biases.safetensors"]
        .into_iter()
        .map(|file| (file.to_owned(), file.into()))
        .collect();
    let index = serde_json::json!({ "weight_map": map });
    let path = folder.join("model.safetensors.index.json");
    fs::write(path, index.to_string()).expect("writable");
}
