//! Logits that are large, rise, fall, are all the same, or infinite, by the kernels of both architectures.

use half::{bf16, f16};
use tandem_attn::{
    exec::gpu::{Arch, Gpu},
    plan::{MergeMode, PlanOptions, SplitMode, pod::PodMode},
    problem::{Dtype, KvLayout, Spec},
    tensor::Element,
};

use super::{
    Case,
    common::{
        self, Stream, Tolerance,
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
    let plan = case.plan(gpu);
    let mut workspace = case.workspace(gpu, &plan);
    let stream = Stream::new();
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(&plan, stream.0) }.expect("the bound is the plan's");
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
