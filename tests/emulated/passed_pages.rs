//! Pages that every window has passed: no kernel reads them.

use half::bf16;
use tandem_attn::{
    exec::emulated::Emulated,
    plan::{Plan, Planner},
    problem::{KvLayout, Spec},
    tensor::{Element, F8E4M3},
};

use crate::{
    no_failure,
    passed::{DECODES, PROMPTS, batches, options, specs, spoil},
    problems::{Tensors, heads, sinks},
    settings,
};

/// Outputs and LSEs, with sinks if the specification has them.
pub fn run<T: Element>(
    emulated: &Emulated,
    plan: &Plan,
    tensors: &Tensors<bf16, T>,
) -> (Vec<bf16>, Vec<f32>) {
    let spec = &plan.spec;
    let rows = (plan.total_q * spec.q_heads) as usize;
    let mut out = vec![bf16::ZERO; rows * spec.head_dim_v as usize];
    let mut lse = vec![0.0; rows];
    let sinks = sinks(spec);
    let (views, heads) = (tensors.views(), heads(&sinks));
    emulated
        .run_heads(plan, &tensors.q, &views, &mut out, Some(&mut lse), &heads)
        .unwrap_or_else(|error| panic!("{spec:?}: {error}"));
    (out, lse)
}

fn check<T: Element>(specs: &[Spec], requests: &[(u32, usize, u32)]) {
    let _others = no_failure();
    let emulated = Emulated::new(settings(1, 3)).expect("the emulator");
    let mut wrong = Vec::new();
    for spec in specs {
        for (index, batch) in batches(requests).enumerate() {
            // Not both for all: they take long.
            let options = options(&batch);
            for options in &options[index.min(1)..] {
                let plan = Planner::new().plan(spec, &batch, &emulated.device(), options);
                let Ok(plan) = plan else {
                    continue; // heads of 512 have no kernel for pages of 3
                };
                assert_eq!(plan.verify(&batch), Ok(()));
                let mut tensors = Tensors::<bf16, T>::random(spec, &batch, KvLayout::Nhd, 5);
                let (out, lse) = run(&emulated, &plan, &tensors);
                assert!(out.iter().all(|x| x.is_finite()));
                spoil(&mut tensors, spec, &batch);
                let with_nan = run(&emulated, &plan, &tensors);
                if out != with_nan.0 || lse != with_nan.1 {
                    let kernels = plan.groups.iter().map(|group| group.id);
                    let kernels: Vec<_> = kernels.flatten().map(|id| id.to_string()).collect();
                    let page = batch.parts[0].table.page_size;
                    wrong.push(format!("{kernels:?}, pages of {page}, {:?}", options.split));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Values before all windows were multiplied by weights of 0, and 0 · NaN is NaN.
#[test]
fn decodes_read_no_page_that_all_windows_passed() {
    let [wide, narrow] = specs();
    check::<bf16>(&wide, DECODES);
    check::<F8E4M3>(&narrow, DECODES);
}

#[test]
fn prompts_read_no_page_that_all_windows_passed() {
    let [wide, narrow] = specs();
    check::<bf16>(&wide, PROMPTS);
    check::<F8E4M3>(&narrow, PROMPTS);
}
