//! Logits that are large, rise, fall, are all the same, or infinite.

use half::{bf16, f16};
use tandem_attn::{
    exec::Cpu,
    plan::{PlanOptions, SplitMode},
    problem::{KvLayout, Spec},
    tensor::Element,
};

use crate::{
    adversarial::{KINDS, allowed, make_hard},
    numeric::{Tolerance, compare},
    plan_of,
    problems::{Problem, Tensors, prefixed},
    run, tiny, widen,
};

fn check<T: Element>(large: bool) {
    // A prompt, a chunk, decodes; pieces of several lengths.
    let requests = [(70, 0, 40), (300, 2, 1), (150, 0, 9), (33, 1, 1)];
    for (name, logit) in KINDS {
        for split in [SplitMode::Off, SplitMode::Fixed { tokens: 48 }] {
            let spec = Spec::new(4, 2, 64).with_dtype(T::DTYPE);
            let problem = Problem {
                batch: prefixed(&requests, 16, false, 3),
                options: PlanOptions::default().with_split(split),
                ..tiny(&spec)
            };
            let mut tensors = Tensors::<T, T>::random(&spec, &problem.batch, KvLayout::Nhd, 5);
            make_hard(&mut tensors, &spec, &problem.batch, *logit, large);
            let right = tensors.reference(&spec, &problem.batch);
            let largest = right.out.iter().fold(1.0_f64, |most, x| most.max(x.abs()));
            let lse = Tolerance {
                absolute: 1e-5,
                relative: 1e-5,
            };
            let [of_out, of_lse] = allowed(&right, largest, Tolerance::of(T::DTYPE), lse);
            for cpu in [Cpu::new(), Cpu::portable()] {
                let (out, lse) = widen(&run::<T, T, T>(&cpu, &plan_of(&problem), &tensors));
                let at = format!("{name}, {split:?}, {}", cpu.instruction_set());
                let right_or =
                    |what: Result<(), String>| what.unwrap_or_else(|e| panic!("{at}: {e}"));
                right_or(compare(
                    "out",
                    &[out.len() / 64, 64],
                    &out,
                    &right.out,
                    of_out,
                ));
                right_or(compare("lse", &[lse.len()], &lse, &right.lse, of_lse));
            }
        }
    }
}

#[test]
fn hard_logits_are_the_reference() {
    check::<f32>(false);
    check::<bf16>(false);
    check::<f16>(false);
}

#[test]
fn values_near_the_limit_of_16_bits_do_not_overflow() {
    check::<f16>(true);
}
