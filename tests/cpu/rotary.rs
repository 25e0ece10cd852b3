//! Queries and keys that attention turns by their positions.

use proptest::prelude::*;
use tandem_attn::{
    exec::Cpu,
    kv::{BlockSparse, MaskedHeads, PagesByHead},
    problem::{Batch, Dtype, KvLayout, PageTable, Part, ProblemError, Spec},
    reference,
    shard::{Keys, ShardError, Sharding},
    step::{Pairing, Rope, StepError},
};

use crate::{
    agree,
    numeric::Tolerance,
    plan_of,
    problems::{Tensors, cases, problem, rotary},
    run, widen,
};

proptest! {
    #![proptest_config(cases(200))]

    #[test]
    fn the_executor_turns_as_the_reference_does(mut problem in problem()) {
        problem.spec = problem.spec.with_dtype(Dtype::F32);
        problem.spec.latent = false;
        problem.spec.rotary = Some(rotary(problem.spec.head_dim_qk, problem.seed));
        let (spec, batch) = (problem.spec, &problem.batch);
        // Shared row blocks have no positions.
        prop_assume!(batch.check(&spec).is_ok());
        let tensors: Tensors<f32, f32> =
            Tensors::random(&spec, batch, problem.layout, problem.seed);
        let right = tensors.reference(&spec, batch);
        let got = widen(&run::<_, _, f32>(&Cpu::new(), &plan_of(&problem), &tensors));
        let tolerance = Tolerance { absolute: 2e-5, relative: 2e-5 };
        agree(&spec, &got, &(right.out, right.lse), tolerance)?;
    }
}

/// One request: attention turns as one would who turns queries and keys before it.
#[test]
fn turned_by_attention_or_before_it_is_the_same() {
    let (queries, keys, dim) = (3_u32, 40_u32, 64_usize);
    let mut table = PageTable::new(8, 5);
    table.push(&[3, 0, 4, 1, 2], keys);
    let batch = Batch::new(vec![0, queries], table.clone());
    for seed in 0..16 {
        let rope = rotary(dim as u32, seed);
        let spec = Spec::new(2, 1, dim as u32).with_dtype(Dtype::F32);
        let tensors: Tensors<f32, f32> = Tensors::random(&spec, &batch, KvLayout::Nhd, seed);
        let right = tensors.reference(&spec.with_rotary(rope), &batch);

        let frequencies = rope.inverse_frequencies().unwrap();
        let turn = |row: &mut [f32], position: u32| {
            let magnitude = rope.magnitude();
            for (i, frequency) in frequencies.iter().enumerate() {
                let [a, b] = match rope.pairing {
                    Pairing::HalfSplit => [i, i + rope.dim as usize / 2],
                    Pairing::Interleaved => [2 * i, 2 * i + 1],
                };
                let (sine, cosine) = (f64::from(position) * frequency).sin_cos();
                let (x, y) = (f64::from(row[a]), f64::from(row[b]));
                row[a] = ((x * cosine - y * sine) * magnitude) as f32;
                row[b] = ((y * cosine + x * sine) * magnitude) as f32;
            }
        };
        let mut before = tensors.clone();
        for (row, q) in before.q.chunks_exact_mut(dim).enumerate() {
            turn(q, keys - queries + row as u32 / 2);
        }
        for key in 0..keys {
            let slot = table.pages(0)[key as usize / 8] * 8 + key % 8;
            turn(&mut before.parts[0].k[slot as usize * dim..][..dim], key);
        }
        let before = before.reference(&spec, &batch);
        for (a, b) in right.out.iter().zip(&before.out) {
            assert!((a - b).abs() < 1e-5, "{a} {b} with {rope:?}");
        }
    }
}

/// Only distances count: a table that begins later, with its keys where they were, gives the same.
#[test]
fn parts_with_keys_behind_them_are_the_whole() {
    let spec = Spec::new(2, 1, 64)
        .with_dtype(Dtype::F32)
        .with_rotary(Rope::new(64, 10_000.0));
    let table = |pages: &[u32], keys| {
        let mut table = PageTable::new(8, 5);
        table.push(pages, keys);
        table
    };
    let whole = Batch::new(vec![0, 2], table(&[3, 0, 4], 21));
    let prefix = Part::new(vec![0, 2], table(&[3], 8)).with_keys_after(vec![13]);
    let parts = Batch::composed(
        vec![0, 2],
        vec![prefix, Part::new(vec![0, 2], table(&[0, 4], 13))],
    );
    let tensors: Tensors<f32, f32> = Tensors::random(&spec, &whole, KvLayout::Nhd, 3);
    let views = [tensors.views()[0]; 2];
    let right = tensors.reference(&spec, &whole);
    let got = reference::attention(&spec, &parts, &tensors.q, &views).unwrap();
    for (a, b) in got.out.iter().zip(&right.out) {
        assert!((a - b).abs() < 1e-9, "{a} {b}");
    }
}

#[test]
fn rotary_embeddings_where_positions_are_not_known_are_refused() {
    let spec = Spec::new(8, 2, 64).with_rotary(Rope::new(64, 10_000.0));
    let wide = spec.with_rotary(Rope::new(66, 10_000.0));
    let dims = StepError::RopeDim {
        got: 66,
        head_dim: 64,
    };
    assert_eq!(wide.check(), Err(ProblemError::Rotary(dims)));
    assert!(matches!(
        spec.with_rotary(Rope::new(63, 10_000.0)).check(),
        Err(ProblemError::Rotary(StepError::Rope { .. }))
    ));
    let latent = Spec::latent(16, 512, 64).with_rotary(Rope::new(64, 10_000.0));
    assert_eq!(latent.check(), Err(ProblemError::LatentRotary));

    let strides = KvLayout::Hnd.strides(16, 2, 64);
    let what = "a rotary embedding";
    let by_head = PagesByHead::new(&spec, strides, 8).err();
    assert_eq!(by_head, Some(ProblemError::ByHead { what }));
    let blocks = BlockSparse::new(&spec, strides, 8, MaskedHeads::All).err();
    assert_eq!(blocks, Some(ProblemError::Blocks { what }));

    // Keys that are distributed by page have other distances on their rank.
    let mut table = PageTable::new(16, 8);
    table.push(&[0, 1, 2, 3, 4, 5, 6, 7], 128);
    let batch = Batch::new(vec![0, 1], table);
    let sharding = Sharding::one().over_keys(2, Keys::Folded);
    assert!(matches!(
        sharding.shares(&spec, &batch),
        Err(ShardError::Positions { .. })
    ));

    // A row block of two requests.
    let mut own = PageTable::new(16, 8);
    own.push(&[1], 3);
    own.push(&[2], 5);
    let mut shared = PageTable::new(16, 8);
    shared.push(&[0], 16);
    let part = Part::new(vec![0, 2], shared).with_keys_after(vec![5]);
    let batch = Batch::composed(vec![0, 1, 2], vec![part, Part::new(vec![0, 1, 2], own)]);
    assert!(batch.check(&Spec::new(8, 2, 64)).is_ok());
    assert!(matches!(
        batch.check(&spec),
        Err(ProblemError::MaskedSharedBlock { part: 0, .. })
    ));
}
