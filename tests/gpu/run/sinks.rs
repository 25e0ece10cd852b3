//! Sinks in each place where kernels add them, by the kernels of both architectures.

use half::{bf16, f16};
use tandem_attn::{
    exec::gpu::Arch,
    plan::PlanOptions,
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
};

use super::{
    Case,
    common::{
        gpu,
        problems::Tensors,
        sinks::{batch, check, options, sinks, specs},
    },
    problem::OnDevice,
};

#[test]
fn large_and_small_sinks_are_the_reference() {
    let Some(gpu) = gpu("large_and_small_sinks_are_the_reference") else {
        return;
    };
    let ampere = Some(Arch::Sm80);
    for (dim, arch) in [
        (64, None),
        (128, None),
        (256, None),
        (64, ampere),
        (128, ampere),
    ] {
        for (spec, options) in specs(dim).flat_map(|spec| options().map(|options| (spec, options)))
        {
            let case = Case {
                spec,
                batch: batch(),
                layout: KvLayout::Nhd,
                options,
                arch,
                sms: 132,
                in_set: false,
                seed: 3,
            };
            let (mut workspace, stream) = case.uploaded(gpu);
            let tensors = Tensors::<bf16, bf16>::random(&spec, &case.batch, case.layout, 5);
            let device = OnDevice::new(&spec, &case.batch, &tensors).with_sinks(&sinks(&spec));
            let (out, lse) = device.run(gpu, &mut workspace, &stream);
            let results = (bytemuck::cast_slice(&out), bytemuck::cast_slice(&lse));
            check(&spec, &case.batch, &tensors, results);
            let again = device.run(gpu, &mut workspace, &stream);
            assert_eq!((out, lse), again, "{spec:?}: bits of a second run");
        }
    }
}

/// A prompt of so many new tokens behind others, 4,600 in all.
fn prompt(spec: Spec, new: u32) -> Case {
    let mut table = PageTable::new(16, 290);
    table.push(&(0..290).rev().collect::<Vec<_>>(), 4600);
    Case {
        spec,
        batch: Batch::new(vec![0, new], table),
        layout: KvLayout::Nhd,
        options: PlanOptions::default(),
        arch: None,
        sms: 132,
        in_set: false,
        seed: 3,
    }
}

/// Long prompts have tiles of 192 rows. The window leaves few keys to compute; some rows see none of a tile's first block.
#[test]
fn sinks_of_long_prompts_are_the_reference() {
    let Some(gpu) = gpu("sinks_of_long_prompts_are_the_reference") else {
        return;
    };
    for dim in [64, 128] {
        let case = prompt(
            Spec::new(3, 1, dim).with_sinks().with_window_left(100),
            4500,
        );
        let (mut workspace, stream) = case.uploaded(gpu);
        let tensors = Tensors::<bf16, bf16>::random(&case.spec, &case.batch, case.layout, 5);
        let device =
            OnDevice::new(&case.spec, &case.batch, &tensors).with_sinks(&sinks(&case.spec));
        let (out, lse) = device.run(gpu, &mut workspace, &stream);
        let results = (bytemuck::cast_slice(&out), bytemuck::cast_slice(&lse));
        check(&case.spec, &case.batch, &tensors, results);
    }
}

/// Weights are relative to those of other keys, and not to the sink: far below it they would lose their bits in f16, and outputs
/// of large values would be 0.
#[test]
fn keys_far_below_their_sink_count_in_f16() {
    let Some(gpu) = gpu("keys_far_below_their_sink_count_in_f16") else {
        return;
    };
    for dim in [64, 128] {
        let case = prompt(
            Spec::new(3, 1, dim).with_dtype(Dtype::F16).with_sinks(),
            600,
        );
        let (mut workspace, stream) = case.uploaded(gpu);
        let mut tensors = Tensors::<f16, f16>::random(&case.spec, &case.batch, case.layout, 5);
        // Equal logits: the weights are those of a sink alone.
        tensors.q.fill(f16::ZERO);
        tensors.parts[0].v.fill(f16::from_f32(1000.0));
        let sinks = [17.0_f32, 12.0, 20.0];
        let device = OnDevice::new(&case.spec, &case.batch, &tensors).with_sinks(&sinks);
        let (out, _) = device.run(gpu, &mut workspace, &stream);
        let out: &[f16] = bytemuck::cast_slice(&out);
        // The last token sees all 4,600 keys.
        let last = &out[out.len() - 3 * dim as usize..];
        for (head, sink) in last.chunks(dim as usize).zip(sinks) {
            let right = 1000.0 * 4600.0 / (4600.0 + f64::from(sink).exp());
            let near = |x: &f16| (x.to_f64() - right).abs() < 5e-3 * right;
            assert!(head.iter().all(near), "{} instead of {right}", head[0]);
        }
    }
}
