//! Page lists by KV head, and in the same run requests whose heads read the same pages.

use half::bf16;
use proptest::prelude::*;
use tandem_attn::{
    exec::emulated::{Emulated, Settings},
    plan::{MergeMode, PlanOptions, Planner, SplitMode, pod::PodMode},
    tensor::{Element, F8E4M3},
};

use crate::{heads::Lists, no_failure, problems::cases, settings};

/// How a batch is planned and run.
fn options() -> impl Strategy<Value = (PlanOptions, u8, u64)> {
    let merge = prop_oneof![Just(MergeMode::Auto), Just(MergeMode::Kernel)];
    let pod = prop_oneof![
        Just(PodMode::Auto),
        Just(PodMode::Serial),
        Just(PodMode::Streams),
        Just(PodMode::Fused)
    ];
    (merge, pod, 0..3_u8, any::<u64>()).prop_map(|(merge, pod, schedule, seed)| {
        let options = PlanOptions::default().with_merge_mode(merge);
        (options.with_pod(pod), schedule, seed)
    })
}

fn check<T: Element>((options, schedule, seed): (PlanOptions, u8, u64)) -> Result<(), String> {
    let emulated = settings(schedule, seed);
    check_on(emulated, &options, &Lists::<T>::mixed(seed))
}

fn check_on<T: Element>(
    settings: Settings,
    options: &PlanOptions,
    lists: &Lists<T>,
) -> Result<(), String> {
    check_of::<T, bf16>(settings, options, lists)
}

/// With outputs of `O`.
fn check_of<T: Element, O: Element>(
    settings: Settings,
    options: &PlanOptions,
    lists: &Lists<T>,
) -> Result<(), String> {
    let _others = no_failure();
    let emulated = Emulated::new(settings).expect("the emulator");
    let by_head = lists.by_head();
    let batch = by_head.batch();
    let mut spec = *by_head.spec();
    spec.out_dtype = O::DTYPE;
    let plan = Planner::new()
        .plan(&spec, &batch, &emulated.device(), options)
        .expect("it can be planned");
    let views = [lists.view().by_head().expect("even heads"), lists.view()];
    let views = &views[..batch.parts.len()];
    let mut out = vec![O::from_f32(f32::NAN); lists.q.len()];
    let mut lse = vec![f32::NAN; out.len() / lists.spec.head_dim_qk as usize];
    let heads = lists.heads();
    emulated
        .run_heads(&plan, &lists.q, views, &mut out, Some(&mut lse), &heads)
        .map_err(|error| error.to_string())?;
    lists.check(&out, &lse, true)
}

proptest! {
    #![proptest_config(cases(24))]

    #[test]
    fn lists_run_beside_whole_requests(case in options()) {
        check::<bf16>(case).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn lists_of_8_bits_run_beside_whole_requests(case in options()) {
        check::<F8E4M3>(case).map_err(TestCaseError::fail)?;
    }
}

/// How rows are cut, whatever the merge: whole, as the planner thinks, and often.
fn splits() -> impl Strategy<Value = SplitMode> {
    let fixed = SplitMode::Fixed { tokens: 80 };
    prop_oneof![Just(SplitMode::Makespan), Just(SplitMode::Off), Just(fixed)]
}

proptest! {
    #![proptest_config(cases(24))]

    /// Groups that take some rows of the tiles of decodes, all of them, and more than the smallest tile has.
    #[test]
    fn sinks_of_lists_are_those_of_the_model(
        (options, schedule, seed) in options(),
        split in splits(),
        group in prop_oneof![Just(1_u32), Just(4), Just(7), Just(8), Just(12), Just(20)],
    ) {
        let options = options.with_split(split);
        let lists = Lists::<bf16>::mixed_groups(seed, group).with_sinks(seed);
        check_on(settings(schedule, seed), &options, &lists).map_err(TestCaseError::fail)?;
    }
}

#[test]
fn sinks_of_lists_are_those_of_the_model_in_other_kernels() {
    let fixed = SplitMode::Fixed { tokens: 80 };
    for seed in 0..6 {
        let on = || settings(seed as u8 % 3, seed);
        let options =
            PlanOptions::default().with_split([SplitMode::Makespan, fixed][seed as usize % 2]);
        let lists = Lists::<F8E4M3>::mixed(seed).with_sinks(seed);
        check_on(on(), &options, &lists).unwrap();
        let lists = Lists::<bf16>::mixed(seed).with_sinks(seed);
        check_of::<_, f32>(on(), &options, &lists).unwrap();
        // Without prompts, and without requests whose heads read the same pages.
        check_on(
            on(),
            &options,
            &Lists::<bf16>::random(seed).with_sinks(seed),
        )
        .unwrap();
        let ampere = Settings {
            compute: 80,
            ..on()
        };
        check_on(ampere, &options, &lists).unwrap();
    }
    // More query heads than a tile of decodes holds.
    for seed in 0..2 {
        let on = || settings(seed as u8 % 3, seed);
        let options = PlanOptions::default();
        let lists = Lists::<bf16>::mixed_groups(seed, 72).with_sinks(seed);
        check_on(on(), &options, &lists).unwrap();
    }
}

/// A GPU whose prefills and decodes can be in one kernel, if they are of one part.
#[test]
fn lists_run_beside_whole_requests_on_ampere() {
    for seed in 0..6 {
        let ampere = Settings {
            compute: 80,
            ..settings(seed as u8 % 3, seed)
        };
        let lists = Lists::<bf16>::mixed(seed);
        check_on(ampere, &PlanOptions::default(), &lists).unwrap();
    }
}

/// More query heads than a tile of decodes holds: lists run as prefills, and keys of both kinds of tables are converted.
#[test]
fn lists_that_run_as_prefills_have_converted_pages_of_their_own() {
    for seed in 0..4 {
        let lists = Lists::<F8E4M3>::mixed_groups(seed, 72);
        let options = PlanOptions::default();
        check_on(settings(seed as u8 % 3, seed), &options, &lists).unwrap();
    }
}
