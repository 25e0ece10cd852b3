//! The definition at cases that can be computed by hand.

use super::*;
use crate::problem::{Dtype, KvLayout, PageTable};

/// One head of dimension 16 of which only the first element is used: logits are `q · k`, outputs `v`.
fn attend(spec: &Spec, batch: &Batch, q: &[f32], kv: &[(f32, f32)]) -> Output {
    let row = |x: f32| std::iter::once(x).chain(std::iter::repeat_n(0.0, 15));
    let q: Vec<f32> = q.iter().copied().flat_map(row).collect();
    let k: Vec<f32> = kv.iter().flat_map(|&(k, _)| row(k)).collect();
    let v: Vec<f32> = kv.iter().flat_map(|&(_, v)| row(v)).collect();
    let view = KvView::new(spec, KvLayout::Nhd, 1, &k, &v);
    attention(spec, batch, &q, &vec![view; batch.parts.len()]).unwrap()
}

fn spec() -> Spec {
    Spec::new(1, 1, 16).with_dtype(Dtype::F32).with_scale(1.0)
}

fn table(pages: &[u32]) -> PageTable {
    let mut table = PageTable::new(1, 8);
    table.push(pages, pages.len() as u32);
    table
}

const KV: [(f32, f32); 8] = [
    (0.0, 1.0),
    (1.0, 2.0),
    (2.0, 3.0),
    (9.0, 9.0),
    (9.0, 9.0),
    (9.0, 9.0),
    (9.0, 9.0),
    (9.0, 9.0),
];

fn close(got: f64, right: f64) {
    assert!((got - right).abs() < 1e-6, "{got} is not {right}");
}

#[test]
fn weights_are_a_softmax() {
    let batch = Batch::new(vec![0, 1], table(&[2, 0]));
    let Output { out, lse } = attend(&spec(), &batch, &[1.0], &KV);
    let sum = 1.0 + 2f64.exp();
    close(out[0], (1.0 + 3.0 * 2f64.exp()) / sum);
    close(lse[0], sum.ln());
}

#[test]
fn causal_and_window_hide_keys() {
    let batch = Batch::new(vec![0, 2], table(&[0, 1, 2]));
    let first = |spec: &Spec| attend(spec, &batch, &[0.0, 0.0], &KV).out;
    let causal = first(&spec());
    close(causal[0], 1.5);
    close(causal[16], 2.0);
    let window = first(&spec().with_window_left(0));
    close(window[0], 2.0);
    close(window[16], 3.0);
    close(first(&spec().non_causal())[0], 2.0);
}

#[test]
fn the_cap_flattens() {
    let batch = Batch::new(vec![0, 1], table(&[0, 2]));
    let capped = attend(&spec().with_soft_cap(1.0), &batch, &[1.0], &KV);
    let weight = 2f64.tanh().exp();
    close(capped.out[0], (1.0 + 3.0 * weight) / (1.0 + weight));
}

#[test]
fn parts_are_one_softmax() {
    let prefix = Part::new(vec![0, 1], table(&[2])).with_keys_after(vec![2]);
    let suffix = Part::new(vec![0, 1], table(&[0, 1]));
    let parts = Batch::composed(vec![0, 1], vec![prefix, suffix]);
    let whole = Batch::new(vec![0, 1], table(&[2, 0, 1]));
    for spec in [
        spec(),
        spec().with_window_left(1),
        spec().with_window_left(2),
    ] {
        let (parts, whole) = (
            attend(&spec, &parts, &[0.7], &KV),
            attend(&spec, &whole, &[0.7], &KV),
        );
        close(parts.out[0], whole.out[0]);
        close(parts.lse[0], whole.lse[0]);
    }
}

#[test]
fn no_key_gives_zero() {
    let mut keyless = table(&[0]);
    keyless.push(&[], 0);
    let batch = Batch::new(vec![0, 0, 1], keyless);
    let Output { out, lse } = attend(&spec(), &batch, &[5.0], &KV);
    assert_eq!((out, lse), (vec![0.0; 16], vec![f64::NEG_INFINITY]));
}

#[test]
fn wrong_shapes_are_named() {
    let batch = Batch::new(vec![0, 1], table(&[2, 0]));
    let (q, pool) = ([0.0f32; 16], [0.0f32; 8 * 16]);
    let view = KvView::new(&spec(), KvLayout::Nhd, 1, &pool, &pool[..100]);
    let shape = "[total_q, q_heads, head_dim_qk]";
    let error = |q: &[f32], kv: &[KvView<'_, f32>]| attention(&spec(), &batch, q, kv).unwrap_err();
    assert_eq!(
        error(&q[1..], &[view]),
        ShapeError::Length {
            name: "q",
            got: 15,
            shape,
            expected: 16
        }
    );
    assert_eq!(
        error(&q, &[]),
        ShapeError::Parts {
            got: 0,
            expected: 1
        }
    );
    let small = ShapeError::PoolTooSmall {
        part: 0,
        tensor: "v",
        got: 100,
        needed: 128,
        pool_pages: 8,
    };
    assert_eq!(error(&q, &[view]), small);
    let coarse = KvView::new(&spec(), KvLayout::Nhd, 4, &pool, &pool);
    assert_eq!(
        error(&q, &[coarse]),
        ShapeError::PageSize {
            part: 0,
            got: 4,
            expected: 1
        }
    );
}

/// A logit of −∞ is a hidden key, also if there is no other: there is no weight to divide by.
#[test]
fn rows_whose_logits_are_all_hidden_see_nothing() {
    let mut kv = KV;
    kv[4].0 = f32::NEG_INFINITY;
    kv[5].0 = f32::NEG_INFINITY;
    let batch = Batch::new(vec![0, 1, 2], {
        let mut table = table(&[4, 5]);
        table.push(&[4, 1], 2);
        table
    });
    let Output { out, lse } = attend(&spec(), &batch, &[1.0, 1.0], &kv);
    assert_eq!((out[0], lse[0]), (0.0, f64::NEG_INFINITY));
    close(out[16], 2.0);
    close(lse[1], 1.0);
}
