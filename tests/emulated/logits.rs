//! Hard logits, and rows whose logits exceed the references of their weights.

use half::{bf16, f16};
use tandem_attn::{
    exec::emulated::Emulated,
    plan::{PlanOptions, Planner, SplitMode, pod::PodMode},
    problem::{Dtype, KvLayout, Spec},
    tensor::Element,
};

use crate::{
    adversarial::{KINDS, allowed, make_hard},
    no_failure,
    numeric::{Rng, Tolerance, compare, to_f64},
    problems::{Tensors, prefixed},
    settings,
};

fn hard<T: Element>(large: bool) {
    let _others = no_failure();
    let emulated = Emulated::new(settings(1, 3)).expect("the emulator");
    let spec = Spec::new(4, 1, 64).with_dtype(T::DTYPE);
    let batch = prefixed(&[(90, 0, 20), (70, 0, 1), (33, 0, 1)], 16, false, 3);
    let options = PlanOptions::default()
        .with_split(SplitMode::Fixed { tokens: 48 })
        .with_pod(PodMode::Serial);
    let plan = Planner::new()
        .plan(&spec, &batch, &emulated.device(), &options)
        .expect("it can be planned");
    for (name, logit) in KINDS {
        let mut tensors = Tensors::<T, T>::random(&spec, &batch, KvLayout::Nhd, 5);
        make_hard(&mut tensors, &spec, &batch, *logit, large);
        let right = tensors.reference(&spec, &batch);
        let mut out = vec![T::from_f32(f32::NAN); right.out.len()];
        let mut lse = vec![f32::NAN; right.lse.len()];
        emulated
            .run(
                &plan,
                &tensors.q,
                &tensors.views(),
                &mut out,
                Some(&mut lse),
            )
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let largest = right.out.iter().fold(1.0_f64, |most, x| most.max(x.abs()));
        let mut of_out = Tolerance::of(T::DTYPE);
        of_out.absolute = if T::DTYPE == Dtype::BF16 {
            1.0 / 256.0
        } else {
            1.0 / 2048.0
        };
        let of_lse = Tolerance {
            absolute: 2e-4,
            relative: 1e-5,
        };
        let [of_out, of_lse] = allowed(&right, largest, of_out, of_lse);
        let wrong = compare(
            "out",
            &[out.len() / 64, 64],
            &to_f64(&out),
            &right.out,
            of_out,
        )
        .and_then(|()| compare("lse", &[lse.len()], &to_f64(&lse), &right.lse, of_lse));
        wrong.unwrap_or_else(|what| panic!("{name}: {what}"));
    }
}

/// Large, rising, falling, equal and infinite logits, in prefills, decodes and merges.
#[test]
fn hard_logits_are_the_reference() {
    hard::<bf16>(false);
    hard::<f16>(true);
}

fn beside_rows_with_large_logits<T: Element>(dim: u32) {
    let _others = no_failure();
    let emulated = Emulated::new(settings(1, 3)).expect("the emulator");
    let spec = Spec::new(2, 1, dim).with_dtype(T::DTYPE);
    let batch = prefixed(&[(700, 0, 100)], 16, false, 3);
    let plan = Planner::new()
        .plan(&spec, &batch, &emulated.device(), &PlanOptions::default())
        .expect("it can be planned");
    let tensors = Tensors::<T, T>::random(&spec, &batch, KvLayout::Nhd, 5);
    let width = 2 * dim as usize;
    let run = |q: &[T]| {
        let mut out = vec![T::from_f32(f32::NAN); q.len()];
        let mut lse = vec![f32::NAN; q.len() / dim as usize];
        emulated
            .run(&plan, q, &tensors.views(), &mut out, Some(&mut lse))
            .expect("it runs");
        let of_even = |token: &usize| token.is_multiple_of(2);
        let tokens = (0..q.len() / width).filter(of_even);
        let bits = |token| {
            let out = to_f64(&out[token * width..][..width]);
            let lse = to_f64(&lse[token * 2..][..2]);
            [out, lse].concat().iter().map(|x| x.to_bits()).collect()
        };
        tokens.map(bits).collect::<Vec<Vec<u64>>>()
    };
    let alike = run(&tensors.q);
    let mut q = tensors.q.clone();
    for row in q.chunks_mut(width).skip(1).step_by(2) {
        row.iter_mut()
            .for_each(|x| *x = T::from_f32(x.to_f32() * 200.0));
    }
    assert!(alike == run(&q), "{:?}, {dim}", T::DTYPE);
}

/// Rows whose logits exceed their references make a warp look for maxima in every block. Its other rows have the bits that they
/// have without such neighbours.
#[test]
fn rows_beside_large_logits_are_computed_as_without() {
    for dim in [64, 128] {
        beside_rows_with_large_logits::<bf16>(dim);
        beside_rows_with_large_logits::<f16>(dim);
    }
}

/// Logits of two keys in blocks of their own that differ little: the one that is read first just fits the range of the
/// reference that all others gave, the second does not. What the first added must outlast the change of reference.
#[test]
fn a_new_reference_keeps_what_has_outgrown_the_one_before() {
    let _others = no_failure();
    let emulated = Emulated::new(settings(1, 3)).expect("the emulator");
    let kinds: [fn(&mut Rng, u32, u32) -> f32; 2] = [
        |_, at, keys| match at {
            3 => 123.5,
            _ if at == keys / 2 => 120.0,
            _ => 0.0,
        },
        |_, at, keys| match keys - at {
            // Seen by half of the queries.
            50 => 123.5,
            _ if at == keys / 2 => 120.0,
            _ => 0.0,
        },
    ];
    for (dim_qk, dim) in [(64, 64), (128, 128), (256, 256), (512, 512), (64, 512)] {
        let spec = Spec::new(2, 1, dim_qk).with_head_dim_v(dim);
        let batch = prefixed(&[(400, 0, 100)], 16, false, 3);
        let plan = Planner::new()
            .plan(&spec, &batch, &emulated.device(), &PlanOptions::default())
            .expect("it can be planned");
        for logit in kinds {
            let mut tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 5);
            make_hard(&mut tensors, &spec, &batch, logit, false);
            let right = tensors.reference(&spec, &batch);
            let mut out = vec![bf16::NAN; right.out.len()];
            emulated
                .run(&plan, &tensors.q, &tensors.views(), &mut out, None)
                .expect("it runs");
            let of_out = Tolerance {
                absolute: 1.0 / 256.0,
                ..Tolerance::of(Dtype::BF16)
            };
            let [of_out, _] = allowed(&right, 1.0, of_out, of_out);
            let shape = [out.len() / dim as usize, dim as usize];
            compare("out", &shape, &to_f64(&out), &right.out, of_out)
                .unwrap_or_else(|what| panic!("{dim_qk}/{dim}: {what}"));
        }
    }
}
