//! Pages that every window has passed: no kernel reads them.

use half::bf16;
use tandem_attn::{
    exec::gpu::Gpu,
    plan::Planner,
    problem::{KvLayout, Spec},
    tensor::{Element, F8E4M3},
};

use super::{
    Case,
    common::{
        passed::{DECODES, PROMPTS, batches, options, specs, spoil},
        problems::Tensors,
    },
    hopper,
    problem::OnDevice,
};

fn check<T: Element>(gpu: &Gpu, spec: &Spec, requests: &[(u32, usize, u32)]) {
    for batch in batches(requests) {
        for options in options(&batch) {
            let case = Case {
                spec: *spec,
                batch: batch.clone(),
                layout: KvLayout::Nhd,
                options,
                arch: None,
                sms: 132,
                in_set: false,
                seed: 3,
            };
            // Heads of 512 have no kernel for pages of 3 keys.
            let device = gpu.device();
            if Planner::new()
                .plan(spec, &batch, &device, &options)
                .is_err()
            {
                continue;
            }
            let (mut workspace, stream) = case.uploaded(gpu);
            let mut tensors = Tensors::<bf16, T>::random(spec, &batch, case.layout, 5);
            let mut run = |tensors: &Tensors<bf16, T>| {
                OnDevice::new(spec, &batch, tensors).run(gpu, &mut workspace, &stream)
            };
            let without = run(&tensors);
            spoil(&mut tensors, spec, &batch);
            let page = batch.parts[0].table.page_size;
            assert!(
                run(&tensors) == without,
                "{spec:?}, {options:?}, pages of {page}"
            );
        }
    }
}

#[test]
fn pages_that_all_windows_passed_are_not_read() {
    let Some(gpu) = hopper("pages_that_all_windows_passed_are_not_read") else {
        return;
    };
    let [wide, narrow] = specs();
    for requests in [DECODES, PROMPTS] {
        for spec in &wide {
            check::<bf16>(gpu, spec, requests);
        }
        for spec in &narrow {
            check::<F8E4M3>(gpu, spec, requests);
        }
    }
}
