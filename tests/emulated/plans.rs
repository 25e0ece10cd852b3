//! Plans of generated batches, and of batches for kernels that generated ones rarely choose.

use half::{bf16, f16};
use proptest::{prelude::*, strategy::ValueTree};
use tandem_attn::{
    exec::emulated::{Emulated, Settings},
    plan::{DeviceDescription, MergeMode, PlanOptions, Planner, SplitMode, pod::PodMode},
    problem::{Batch, Dtype, KvLayout, Masks, PageTable, Spec},
    tensor::{Element, F8E4M3, F8E5M2},
};

use crate::{
    no_failure,
    numeric::{Rng, Tolerance, compare, to_f64},
    problems::{Tensors, cases, heads as of_heads, masks, prefixed, sinks, variant},
    settings,
};

/// A batch, its heads, and how it is planned and run.
#[derive(Clone, Debug)]
pub struct Case {
    pub spec: Spec,
    pub batch: Batch,
    pub options: PlanOptions,
    pub layout: KvLayout,
    /// 0: warps one after the other; 1: a random order; 2: copies as late as can be.
    pub schedule: u8,
    pub seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let heads = (1..3_u32, 1..9_u32);
    let dim = prop_oneof![Just(64_u32), Just(128)];
    let split = prop_oneof![
        Just(SplitMode::Makespan),
        Just(SplitMode::Fixed { tokens: 32 })
    ];
    let merge = prop_oneof![Just(MergeMode::Fused), Just(MergeMode::Kernel)];
    let pod = prop_oneof![
        Just(PodMode::Serial),
        Just(PodMode::Streams),
        Just(PodMode::Fused)
    ];
    let queries = prop_oneof![3 => Just(1_u32), 1 => 2..5_u32, 2 => 20..70_u32];
    let request = (1..120_u32, 0..4_usize, queries);
    let layout = prop_oneof![Just(KvLayout::Nhd), Just(KvLayout::Hnd)];
    (
        (heads, dim, variant(), any::<bool>()),
        prop::collection::vec(request, 1..5),
        prop_oneof![Just(16_u32), Just(8), Just(3)],
        (split, merge, pod),
        (layout, 0..3_u8, any::<u64>()),
    )
        .prop_map(
            |((heads, dim, variant, sinks), requests, page, options, rest)| {
                let ((kv_heads, group), (mut split, merge, pod)) = (heads, options);
                if let SplitMode::Fixed { tokens } = &mut split {
                    *tokens = tokens.next_multiple_of(page);
                }
                let mut spec = Spec::new(kv_heads * group, kv_heads, dim);
                spec.variant = variant;
                spec.variant.sinks = sinks;
                let (layout, schedule, seed) = rest;
                Case {
                    spec,
                    batch: prefixed(&requests, page, false, seed),
                    options: PlanOptions::default()
                        .with_split(split)
                        .with_merge_mode(merge)
                        .with_pod(pod),
                    layout,
                    schedule,
                    seed,
                }
            },
        )
}

pub fn check<T: Element, K: Element>(case: &Case) -> Result<(), TestCaseError> {
    check_on::<T, K>(case, settings(case.schedule, case.seed))
}

pub fn check_on<T: Element, K: Element>(
    case: &Case,
    settings: Settings,
) -> Result<(), TestCaseError> {
    let _others = no_failure();
    let emulated = Emulated::new(settings).expect("the emulator");
    let spec = case.spec.with_dtype(T::DTYPE).with_kv_dtype(K::DTYPE);
    let tensors = Tensors::<T, K>::random(&spec, &case.batch, case.layout, case.seed);
    let plan = Planner::new()
        .plan(&spec, &case.batch, &emulated.device(), &case.options)
        .expect("the case can be planned");
    let [tokens, q_heads] = [plan.total_q, spec.q_heads].map(|extent| extent as usize);
    let mut out = vec![T::from_f32(f32::NAN); tokens * q_heads * spec.head_dim_v as usize];
    let mut lse = vec![f32::NAN; tokens * q_heads];
    let sinks = sinks(&spec);
    emulated
        .run_heads(
            &plan,
            &tensors.q,
            &tensors.views(),
            &mut out,
            Some(&mut lse),
            &of_heads(&sinks),
        )
        .map_err(|error| TestCaseError::fail(error.to_string()))?;
    let right = tensors.reference(&spec, &case.batch);
    let mut tolerance = Tolerance::of(T::DTYPE);
    tolerance.absolute = match T::DTYPE {
        Dtype::BF16 => 1.0 / 256.0,
        _ => 1.0 / 2048.0,
    };
    let shape = [tokens, q_heads, spec.head_dim_v as usize];
    compare("out", &shape, &to_f64(&out), &right.out, tolerance).map_err(TestCaseError::fail)?;
    let tolerance = Tolerance {
        absolute: 2e-4,
        relative: 1e-5,
    };
    compare("lse", &shape[..2], &to_f64(&lse), &right.lse, tolerance).map_err(TestCaseError::fail)
}

/// Decodes, prefills, hybrids, splits, merges and shared prefixes, under all schedules.
#[test]
fn plans_on_the_emulator_are_the_reference() {
    let mut runner = proptest::test_runner::TestRunner::new(cases(40));
    let small = |case: Case| match case.seed % 3 {
        0 => check::<f16, f16>(&case),
        _ => check::<bf16, bf16>(&case),
    };
    runner.run(&case(), small).unwrap();
}

/// Chunks of a latent prompt, which are longer than those of speculative decodes.
#[test]
fn long_chunks_of_latent_prompts_are_the_reference() {
    for (seed, heads) in (0..).zip([16, 32, 64, 128]) {
        let mut spec = Spec::latent(heads, 512, 64);
        spec.variant.sinks = seed % 2 == 1;
        let case = Case {
            spec,
            batch: prefixed(&[(70, 0, 44), (20, 0, 1)], 16, false, seed),
            options: PlanOptions::default(),
            layout: KvLayout::Nhd,
            schedule: (seed % 3) as u8,
            seed,
        };
        check::<bf16, bf16>(&case).unwrap_or_else(|error| panic!("{heads} heads: {error}"));
    }
}

/// Bits hide any keys of prompts, decodes and both.
#[test]
fn plans_with_masks_of_any_keys_are_the_reference() {
    let mut runner = proptest::test_runner::TestRunner::new(cases(40));
    let masked = |mut case: Case| {
        case.batch = case.batch.clone().with_masks(masks(&case.batch, case.seed));
        match case.seed % 5 {
            0 => check::<f16, f16>(&case),
            1 => check::<bf16, F8E4M3>(&case),
            _ => check::<bf16, bf16>(&case),
        }
    };
    runner.run(&case(), masked).unwrap();
}

/// Prompts and decodes of several tiles and blocks of keys; masks that reach back a part of the keys; and rows without keys.
#[test]
fn masks_that_reach_back_some_words_are_the_reference() {
    for (seed, causal) in (0..8).zip([true, false].into_iter().cycle()) {
        let mut spec = Spec::new(4, 1, 128);
        spec.variant.causal = causal;
        spec.variant.soft_cap = (seed == 3).then_some(10.0);
        spec.variant.window_left = (seed == 4).then_some(190);
        let requests = [
            (320, 0, 1),
            (450, 0, 3),
            (300, 0, 210),
            (90, 2, 1),
            (330, 0, 40),
        ];
        let batch = prefixed(&requests, 16, false, seed);
        let mut masks = Masks::default();
        let mut noise = Rng(seed);
        for request in 0..batch.requests() {
            let each = noise.below(4) as u32;
            // Some rows see none of the keys that their bits describe, which may be all.
            let words = (0..batch.q_len(request) * each).map(|_| match noise.below(3) {
                0 => 0,
                _ => noise.bits() & noise.bits(),
            });
            let words: Vec<_> = words.collect();
            masks.push_words(batch.q_len(request), &words).unwrap();
        }
        let case = Case {
            spec,
            batch: batch.with_masks(masks),
            options: PlanOptions::default().with_split(match seed % 3 {
                0 => SplitMode::Fixed { tokens: 64 },
                _ => SplitMode::Makespan,
            }),
            layout: KvLayout::Nhd,
            schedule: (seed % 3) as u8,
            seed,
        };
        check::<bf16, bf16>(&case).unwrap();
        if seed < 2 {
            check::<bf16, F8E4M3>(&case).unwrap();
        }
        let ampere = Settings {
            compute: 80,
            ..settings(case.schedule, case.seed)
        };
        check_on::<bf16, bf16>(&case, ampere).unwrap();
    }
}

#[test]
fn plans_over_8_bit_pages_are_the_reference() {
    let mut runner = proptest::test_runner::TestRunner::new(cases(10));
    runner
        .run(&case(), |case| check::<bf16, F8E4M3>(&case))
        .unwrap();
}

/// Each of two threads has turns of its own.
#[test]
fn threads_share_the_emulated_gpu() {
    std::thread::scope(|scope| {
        for schedule in 0..3 {
            scope.spawn(move || {
                let mut runner = proptest::test_runner::TestRunner::deterministic();
                let mut one = case().new_tree(&mut runner).expect("a case").current();
                one.schedule = schedule;
                check::<bf16, bf16>(&one).expect("right");
            });
        }
    });
}

/// Decodes, perhaps beside a prompt, in units enough for the kernels that read two KV heads at a time. Six query heads of a KV head leave
/// two of a tile's eight rows empty.
fn pairs(head_dim: u32, split: SplitMode, prompt: bool) -> Case {
    let mut table = PageTable::new(16, 20);
    let mut indptr = vec![0];
    if prompt {
        table.push(&[4, 1], 20);
        indptr.push(20);
    }
    for keys in [105, 250, 17, 64] {
        let pages: Vec<u32> = (0..16).map(|page| (page * 7 + keys) % 20).collect();
        table.push(&pages[..keys.div_ceil(16) as usize], keys);
        indptr.push(indptr[indptr.len() - 1] + 1);
    }
    let mut spec = Spec::new(12, 2, head_dim);
    spec.variant.causal = false;
    Case {
        spec,
        batch: Batch::new(indptr, table),
        options: PlanOptions::default()
            .with_split(split)
            .with_merge_mode(MergeMode::Fused)
            .with_pod(PodMode::Serial),
        layout: KvLayout::Nhd,
        schedule: 0,
        seed: 0,
    }
}

/// Nothing is read in the place of rows without a query that a copy may be writing.
#[test]
fn rows_without_a_query_of_pairs_of_kv_heads_read_nothing_behind_the_queries() {
    check::<bf16, F8E4M3>(&pairs(64, SplitMode::Off, true)).unwrap();
}

/// Heads of 80 and 96 have kernels for pairs of KV heads alone. Their partial states have the columns of heads of 128.
#[test]
fn decodes_of_pairs_of_heads_that_others_pad_are_the_reference() {
    for head_dim in [80, 96] {
        for (split, schedule, prompt) in [
            (SplitMode::Off, 0, true),
            (SplitMode::Makespan, 1, false),
            (SplitMode::Makespan, 2, false),
        ] {
            let case = Case {
                schedule,
                seed: 5,
                ..pairs(head_dim, split, prompt)
            };
            check::<bf16, bf16>(&case).unwrap();
        }
        check::<f16, f16>(&pairs(head_dim, SplitMode::Off, false)).unwrap();
    }
}

/// Decodes beside a prompt, all of which run as prefills because no tile of decodes holds the query heads of a KV head.
fn large_group(q_heads: u32, head_dim: u32, schedule: u8) -> Case {
    Case {
        spec: Spec::new(q_heads, 1, head_dim),
        batch: prefixed(&[(45, 0, 1), (9, 1, 1), (20, 0, 3)], 16, false, 3),
        options: PlanOptions::default(),
        layout: KvLayout::Nhd,
        schedule,
        seed: 11,
    }
}

#[test]
fn groups_that_no_tile_of_decodes_holds_are_the_reference() {
    check::<bf16, bf16>(&large_group(160, 64, 0)).unwrap();
    check::<f16, f16>(&large_group(131, 64, 1)).unwrap();
    check::<bf16, F8E4M3>(&large_group(71, 64, 2)).unwrap();
    check::<bf16, F8E5M2>(&large_group(32, 64, 0)).unwrap();
    let mut bytes = large_group(32, 128, 1);
    bytes.spec = bytes.spec.with_sinks().with_window_left(30);
    check::<bf16, F8E5M2>(&bytes).unwrap();
}

/// Decodes of 9 to 16 query heads of a KV head share SMs with prefills in tiles of 16 rows, which are full or not.
#[test]
fn decodes_of_16_rows_that_share_sms_with_prefills_are_the_reference() {
    for (q_heads, kv_heads, schedule) in [(16, 1, 0), (24, 2, 1), (9, 1, 2)] {
        let mut spec = Spec::new(q_heads, kv_heads, 128);
        spec.variant.window_left = (schedule == 1).then_some(150);
        let requests = [(150, 0, 40), (333, 0, 1), (64, 0, 1), (1, 0, 1), (90, 2, 1)];
        let case = Case {
            spec,
            batch: prefixed(&requests, 16, false, 3),
            options: PlanOptions::default().with_pod(PodMode::Fused),
            layout: KvLayout::Nhd,
            schedule,
            seed: 13,
        };
        let device = DeviceDescription::named("h200").unwrap();
        let plan = Planner::new().plan(&spec, &case.batch, &device, &case.options);
        let plan = plan.unwrap();
        let kernels: Vec<_> = plan.groups.iter().flat_map(|group| group.id).collect();
        assert!(
            kernels
                .iter()
                .any(|id| id.info().name == "decode_16x64_d128_bf16_co_resident"),
            "{kernels:?}"
        );
        check::<bf16, bf16>(&case).unwrap();
        check::<f16, f16>(&case).unwrap();
    }
}

/// An A100 has no prefills of heads of 256, and its decodes take the prompts.
#[test]
fn prompts_of_heads_of_256_on_ampere_are_the_reference() {
    for (schedule, cap, kv_heads) in [(0, None, 2), (1, Some(20.0), 1), (2, None, 1)] {
        let mut spec = Spec::new(4, kv_heads, 256);
        spec.variant.soft_cap = cap;
        let case = Case {
            spec,
            batch: prefixed(&[(45, 0, 30), (9, 1, 1), (20, 0, 7)], 3, false, 3),
            options: PlanOptions::default(),
            layout: KvLayout::Hnd,
            schedule,
            seed: 12,
        };
        let ampere = Settings {
            compute: 80,
            ..settings(schedule, case.seed)
        };
        check_on::<bf16, bf16>(&case, ampere).unwrap();
    }
}
