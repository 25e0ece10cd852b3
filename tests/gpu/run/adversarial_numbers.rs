//! Logits that are large, rise, fall, are all the same, or infinite, by the kernels of both architectures; and a key that
//! is NaN.

use half::{bf16, f16};
use tandem_attn::{
    exec::gpu::{Arch, Gpu},
    plan::{MergeMode, PlanOptions, SplitMode, pod::PodMode},
    problem::{Batch, Compute, Dtype, KvLayout, PageTable, Spec},
    tensor::{Element, F8E4M3},
};

use super::{
    Case,
    common::{
        self, Tolerance,
        adversarial::{KINDS, allowed, make_hard},
        compare,
        problems::{Tensors, prefixed},
    },
    hopper,
    problem::OnDevice,
};

fn check<T: Element>(gpu: &Gpu, dim: u32, arch: Option<Arch>, pod: PodMode, large: bool) {
    let spec = Spec::new(8, 2, dim).with_dtype(T::DTYPE);
    // A prompt, a chunk, decodes with a prefix in common, and one of many pieces.
    let requests = [
        (70, 0, 40),
        (500, 2, 1),
        (150, 0, 9),
        (33, 1, 1),
        (900, 0, 200),
    ];
    let options = PlanOptions::default()
        .with_split(SplitMode::Fixed { tokens: 128 })
        .with_merge_mode(MergeMode::Kernel)
        .with_pod(pod);
    let case = Case {
        spec,
        batch: prefixed(&requests, 16, false, 3),
        layout: KvLayout::Nhd,
        options,
        arch,
        sms: 132,
        in_set: false,
        seed: 3,
    };
    let (mut workspace, stream) = case.uploaded(gpu);
    for (name, logit) in KINDS {
        let mut tensors = Tensors::<T, T>::random(&spec, &case.batch, case.layout, 5);
        make_hard(&mut tensors, &spec, &case.batch, *logit, large);
        let device = OnDevice::new(&spec, &case.batch, &tensors);
        let (out, lse) = device.run(gpu, &mut workspace, &stream);
        let right = tensors.reference(&spec, &case.batch);
        let largest = right.out.iter().fold(1.0_f64, |most, x| most.max(x.abs()));
        let mut of_out = Tolerance::of(T::DTYPE);
        of_out.absolute = match T::DTYPE {
            Dtype::BF16 => 1.0 / 256.0,
            _ => 1.0 / 2048.0,
        };
        let of_lse = Tolerance {
            absolute: 2e-4,
            relative: 1e-5,
        };
        let [of_out, of_lse] = allowed(&right, largest, of_out, of_lse);
        let out = common::decode(T::DTYPE, bytemuck::cast_slice(&out));
        let lse = common::decode(Dtype::F32, bytemuck::cast_slice(&lse));
        let rows = [out.len() / dim as usize, dim as usize];
        let wrong = compare("out", &rows, &out, &right.out, of_out)
            .and_then(|()| compare("lse", &[lse.len()], &lse, &right.lse, of_lse));
        wrong.unwrap_or_else(|what| panic!("{name}, {dim}, {arch:?}, {pod:?}: {what}"));
    }
}

#[test]
fn hard_logits_are_the_reference() {
    let Some(gpu) = hopper("hard_logits_are_the_reference") else {
        return;
    };
    for dim in [64, 128] {
        for arch in [None, Some(Arch::Sm80)] {
            for pod in [PodMode::Serial, PodMode::Fused] {
                check::<bf16>(gpu, dim, arch, pod, false);
                check::<f16>(gpu, dim, arch, pod, true);
            }
        }
    }
}

/// One element of the key of one head is NaN, in the first of two prompts: rows that see it are NaN, and all others are
/// what they are without it, bit for bit.
fn check_nan<T: Element>(gpu: &Gpu, spec: &Spec, arch: Option<Arch>, at: u32) {
    const PAGE: u32 = 16;
    let (queries, keys) = ([150, 70], [150_u32, 300]);
    let mut table = PageTable::new(PAGE, 40);
    table.push(&(0..10).collect::<Vec<_>>(), keys[0]);
    table.push(&(20..39).collect::<Vec<_>>(), keys[1]);
    let case = Case {
        spec: spec.with_dtype(T::DTYPE),
        batch: Batch::new(vec![0, queries[0], queries[0] + queries[1]], table),
        layout: KvLayout::Nhd,
        options: PlanOptions::default(),
        arch,
        sms: 132,
        in_set: false,
        seed: 3,
    };
    let (spec, batch) = (&case.spec, &case.batch);
    let (mut workspace, stream) = case.uploaded(gpu);
    let mut tensors = Tensors::<T, T>::random(spec, batch, case.layout, 5);
    let mut run = |tensors: &Tensors<T, T>| {
        OnDevice::new(spec, batch, tensors).run(gpu, &mut workspace, &stream)
    };
    let (out, lse) = run(&tensors);
    let of_kv_head = 1;
    let dim = spec.head_dim_qk as usize;
    // Pages of the first prompt are in order.
    let key = (at * spec.kv_heads + of_kv_head) as usize * dim;
    tensors.parts[0].k[key + 3] = T::from_f32(f32::NAN);
    let (with_out, with_lse) = run(&tensors);
    let what = format!("{spec:?}, {arch:?}, key {at}");
    for (row, (&with, &without)) in with_lse.iter().zip(&lse).enumerate() {
        let (token, head) = (row as u32 / spec.q_heads, row as u32 % spec.q_heads);
        let [with_out, out] = [&with_out, &out].map(|out| &out[row * dim..][..dim]);
        let sees = token < queries[0]
            && (at..=at + spec.variant.window_left.unwrap_or(u32::MAX - at)).contains(&token)
            && head / (spec.q_heads / spec.kv_heads) == of_kv_head;
        if sees {
            let numbers = common::decode(T::DTYPE, bytemuck::cast_slice(with_out));
            assert!(
                f32::from_bits(with).is_nan() && numbers.iter().all(|x| x.is_nan()),
                "{what}: token {token}, head {head} sees it"
            );
        } else {
            assert!(
                with == without && with_out == out,
                "{what}: token {token}, head {head} does not see it"
            );
        }
    }
}

#[test]
fn nan_keys_stay_in_rows_that_see_them() {
    let Some(gpu) = hopper("nan_keys_stay_in_rows_that_see_them") else {
        return;
    };
    for dim in [64, 128, 256] {
        let spec = Spec::new(8, 2, dim);
        for spec in [
            spec,
            spec.with_soft_cap(20.0),
            spec.with_soft_cap(20.0).with_window_left(40),
        ] {
            for at in [96, 101, 102] {
                check_nan::<bf16>(gpu, &spec, None, at);
                check_nan::<f16>(gpu, &spec, None, at);
            }
        }
    }
}

/// A run of prompts by a kernel of Hopper: outputs, and LSEs.
fn prompts<K: Element>(
    gpu: &Gpu,
    spec: &Spec,
    change: impl FnOnce(&mut Tensors<bf16, K>),
) -> (Vec<f64>, Vec<f64>) {
    let case = Case {
        spec: *spec,
        batch: prefixed(&[(90, 0, 70), (70, 0, 20)], 16, false, 3),
        layout: KvLayout::Nhd,
        options: PlanOptions::default(),
        arch: None,
        sms: 132,
        in_set: false,
        seed: 3,
    };
    let (mut workspace, stream) = case.uploaded(gpu);
    let mut tensors = Tensors::random(spec, &case.batch, case.layout, 5);
    change(&mut tensors);
    let device = OnDevice::new(spec, &case.batch, &tensors);
    let (out, lse) = device.run(gpu, &mut workspace, &stream);
    let out = common::decode(Dtype::BF16, bytemuck::cast_slice(&out));
    (out, common::decode(Dtype::F32, bytemuck::cast_slice(&lse)))
}

#[test]
fn rows_of_nan_with_sinks_are_nan() {
    let Some(gpu) = hopper("rows_of_nan_with_sinks_are_nan") else {
        return;
    };
    for dim in [64, 128, 256] {
        let spec = Spec::new(6, 2, dim).with_sinks();
        let (out, lse) = prompts::<bf16>(gpu, &spec, |tensors| tensors.q.fill(bf16::NAN));
        assert!(out.iter().chain(&lse).all(|x| x.is_nan()), "{dim}");
    }
}

#[test]
fn an_infinite_query_makes_rows_of_8_bit_products_nan() {
    let Some(gpu) = hopper("an_infinite_query_makes_rows_of_8_bit_products_nan") else {
        return;
    };
    for dim in [128, 256] {
        let spec = Spec::new(4, 2, dim)
            .with_kv_dtype(Dtype::F8E4M3)
            .with_compute(Compute::F8);
        let dim = dim as usize;
        let (out, lse) = prompts::<F8E4M3>(gpu, &spec, |tensors| {
            for row in tensors.q.chunks_mut(dim).step_by(3) {
                row[5] = bf16::INFINITY;
            }
        });
        for (row, (out, lse)) in out.chunks(dim).zip(lse).enumerate() {
            let is_nan = row.is_multiple_of(3);
            assert!(
                out.iter().chain([&lse]).all(|x| x.is_nan() == is_nan),
                "{row}"
            );
        }
    }
}
