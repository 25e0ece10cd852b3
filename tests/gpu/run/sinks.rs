//! Sinks in each place where kernels add them, by the kernels of both architectures.

use half::bf16;
use tandem_attn::{
    exec::gpu::Arch,
    plan::PlanOptions,
    problem::{Batch, KvLayout, PageTable, Spec},
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

/// Long prompts have tiles of 192 rows. The window leaves few keys to compute; some rows see none of a tile's first block.
#[test]
fn sinks_of_long_prompts_are_the_reference() {
    let Some(gpu) = gpu("sinks_of_long_prompts_are_the_reference") else {
        return;
    };
    let mut table = PageTable::new(16, 290);
    table.push(&(0..290).rev().collect::<Vec<_>>(), 4600);
    for dim in [64, 128] {
        let case = Case {
            spec: Spec::new(3, 1, dim).with_sinks().with_window_left(100),
            batch: Batch::new(vec![0, 4500], table.clone()),
            layout: KvLayout::Nhd,
            options: PlanOptions::default(),
            arch: None,
            sms: 132,
            in_set: false,
            seed: 3,
        };
        let (mut workspace, stream) = case.uploaded(gpu);
        let tensors = Tensors::<bf16, bf16>::random(&case.spec, &case.batch, case.layout, 5);
        let device =
            OnDevice::new(&case.spec, &case.batch, &tensors).with_sinks(&sinks(&case.spec));
        let (out, lse) = device.run(gpu, &mut workspace, &stream);
        let results = (bytemuck::cast_slice(&out), bytemuck::cast_slice(&lse));
        check(&case.spec, &case.batch, &tensors, results);
    }
}
