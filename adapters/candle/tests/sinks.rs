//! Attention sinks against a plain softmax, on the CPU.

use candle_core::{DType, Device, Result, Tensor};
use tandem_candle::{Attention, Layer, paged_attention, varlen_attention};

const HEADS: (usize, usize) = (8, 2);
const DIM: usize = 64;
const BLOCK: usize = 16;
const SCALE: f32 = 0.11;

fn randn(shape: &[usize], dtype: DType) -> Result<Tensor> {
    Tensor::randn(0_f32, 1.0, shape, &Device::Cpu)?.to_dtype(dtype)
}

fn rows(tensor: &Tensor) -> Result<Vec<Vec<Vec<f32>>>> {
    tensor.to_dtype(DType::F32)?.to_vec3()
}

/// Attention of one request; the queries are its last tokens. The sink of a head is one more logit, without a value.
fn assert_plain_softmax(got: &Tensor, [q, k, v]: [&Tensor; 3], layer: &Layer) -> Result<()> {
    let tolerance = if got.dtype() == DType::F32 {
        1e-5
    } else {
        1.6e-2
    };
    let sinks: Vec<f32> = layer
        .sinks
        .as_ref()
        .expect("the layer has sinks")
        .to_vec1()?;
    let (got, q, k, v) = (rows(got)?, rows(q)?, rows(k)?, rows(v)?);
    for (token, heads) in q.iter().enumerate() {
        let position = k.len() - q.len() + token;
        let first = layer
            .window_left
            .map_or(0, |left| position.saturating_sub(left as usize));
        for (head, q) in heads.iter().enumerate() {
            let of = head / (HEADS.0 / HEADS.1);
            let weight = |key: usize| {
                let dot = q.iter().zip(&k[key][of]).map(|(q, k)| f64::from(q * k));
                (dot.sum::<f64>() * f64::from(layer.scale)).exp()
            };
            let weights: Vec<(usize, f64)> =
                (first..=position).map(|key| (key, weight(key))).collect();
            let sum = weights.iter().map(|(_, weight)| weight).sum::<f64>();
            let sum = sum + f64::from(sinks[head]).exp();
            for (element, &got) in got[token][head].iter().enumerate() {
                let values = weights
                    .iter()
                    .map(|&(key, weight)| weight * f64::from(v[key][of][element]));
                let right = values.sum::<f64>() / sum;
                assert!(
                    (f64::from(got) - right).abs() < tolerance,
                    "token {token}, head {head}: {got} and {right}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn sinks_are_logits_without_values() -> Result<()> {
    let attention = Attention::new(&Device::Cpu)?;
    let (lengths, queries) = ([37_usize, 1, 300], [1_usize, 1, 40]);
    // The sinks of a layer are a row of those of all layers. Layers that differ in them share a plan.
    let sinks = (randn(&[3, HEADS.0], DType::F32)? * 3.0)?;
    for dtype in [DType::F32, DType::BF16] {
        let tokens = lengths
            .iter()
            .map(|len| len.div_ceil(BLOCK) * BLOCK)
            .sum::<usize>();
        let kv = [0; 2].map(|_| randn(&[tokens, HEADS.1, DIM], dtype));
        let [k, v] = [kv[0].as_ref().unwrap(), kv[1].as_ref().unwrap()];
        let paged = |rows: &Tensor| rows.reshape((tokens / BLOCK, BLOCK, HEADS.1, DIM));
        let (k_cache, v_cache) = (paged(k)?, paged(v)?);
        // Blocks in order, so that the keys of a request are rows of the caches.
        let mut next = 0;
        let tables = lengths.map(|len| {
            let first = next;
            next += len.div_ceil(BLOCK);
            (first..next).collect::<Vec<_>>()
        });
        let q = randn(&[queries.iter().sum(), HEADS.0, DIM], dtype)?;
        let step = attention.step(&tables, &lengths, &queries, BLOCK)?;
        for layer in 0..3 {
            let layer = Layer::new(SCALE).with_sinks(sinks.get(layer)?);
            for layer in [layer.clone(), layer.with_window_left(20)] {
                let got = paged_attention(&q, &k_cache, &v_cache, &step, &layer)?;
                let mut token = 0;
                for ((table, len), queries) in tables.iter().zip(lengths).zip(queries) {
                    let keys = |rows: &Tensor| rows.narrow(0, table[0] * BLOCK, len);
                    let part = |rows: &Tensor| rows.narrow(0, token, queries);
                    assert_plain_softmax(&part(&got)?, [&part(&q)?, &keys(k)?, &keys(v)?], &layer)?;
                    token += queries;
                }
            }
        }
        assert_eq!(step.plans(), 2);
    }
    Ok(())
}

#[test]
fn packed_sequences_have_sinks_too() -> Result<()> {
    let rows = |heads| randn(&[20, heads, DIM], DType::F32);
    let (q, k, v) = (rows(HEADS.0)?, rows(HEADS.1)?, rows(HEADS.1)?);
    let layer = Layer::new(SCALE).with_sinks(randn(&[HEADS.0], DType::F32)?);
    let step = Attention::new(&Device::Cpu)?.varlen(&[0, 20], &[0, 20])?;
    let got = varlen_attention(&q, &k, &v, &step, &layer)?;
    assert_plain_softmax(&got, [&q, &k, &v], &layer)
}

#[test]
fn sinks_that_do_not_match_the_queries_are_refused() -> Result<()> {
    let cache = randn(&[2, BLOCK, HEADS.1, DIM], DType::BF16)?;
    let q = randn(&[1, HEADS.0, DIM], DType::BF16)?;
    let step = Attention::new(&Device::Cpu)?.decode(&[vec![0_usize]], &[1_usize], BLOCK)?;
    for (sinks, words) in [
        (randn(&[HEADS.0], DType::BF16)?, "to_dtype(DType::F32)"),
        (randn(&[HEADS.0 + 1], DType::F32)?, "q has 8 heads"),
        (randn(&[1, HEADS.0], DType::F32)?, "q has 8 heads"),
        (
            randn(&[HEADS.0, 2], DType::F32)?
                .narrow(1, 0, 1)?
                .squeeze(1)?,
            "contiguous()",
        ),
    ] {
        let layer = Layer::new(SCALE).with_sinks(sinks);
        let refusal = paged_attention(&q, &cache, &cache, &step, &layer);
        let text = refusal.expect_err("it is refused").to_string();
        assert!(text.contains(words), "{text}");
    }
    assert_eq!(step.plans(), 0);
    Ok(())
}
