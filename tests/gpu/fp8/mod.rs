//! 8-bit keys and values on the GPU against naive attention in f64 on the same pool.

mod ampere;
mod append;
mod case;
mod converted;
mod hybrids;
#[path = "../../common/in_8_bits.rs"]
mod in_8_bits;
mod nan_scales;
mod needle;
mod prefixes;
mod refused;
mod wide;

use crate::common;
use common::{
    Memory, Rng, Stream, Tolerance, compare, gpu,
    problems::{Pools, Tensors, ancestors, cases, heads, kv_len, prefixed, sinks, variant},
};
use half::{bf16, f16};
use proptest::prelude::*;
use tandem_attn::{
    abi::KvStrides,
    exec::{
        Cpu,
        gpu::{self, Gpu, KvPool, LaunchSet, RunTensors, WorkspaceOptions},
    },
    kv::{AppendScales, KvScales, KvView, KvViewMut},
    plan::{
        BatchLimits, Bound, DeviceDescription, Kernel, MergeMode, Plan, PlanError, PlanOptions,
        Planner, SplitMode, TileGroup, WorkspaceLayout,
    },
    problem::{Batch, Compute, Dtype, KvLayout, PageTable, Spec},
    reference,
    tensor::{Element, F8E4M3, F8E5M2},
};

use case::*;

#[test]
fn decode_of_8_bit_pages_is_the_reference() {
    let Some(gpu) = gpu("decode_of_8_bit_pages_is_the_reference") else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(300));
    runner
        .run(&case(8, 4), |case| check_any(gpu, &case))
        .unwrap();
}

/// Decodes of up to 32 keys, 12 units for each SM, with 4 KV heads of so many query heads and of a head dimension.
fn many_units_of_one_chunk(
    gpu: &Gpu,
    [group, dim]: [u32; 2],
    granularity: u32,
    options: PlanOptions,
) -> Case {
    let kv_heads = 4;
    let requests = 12 * gpu.multiprocessors() / kv_heads;
    let mut table = PageTable::new(16, 2 * requests);
    for request in 0..requests {
        let keys = 1 + request % 32;
        let pages = 2 * request..2 * request + keys.div_ceil(16);
        table.push(&pages.collect::<Vec<_>>(), keys);
    }
    Case {
        spec: Spec::new(kv_heads * group, kv_heads, dim),
        batch: Batch::new((0..=requests).collect(), table),
        layout: KvLayout::Nhd,
        options,
        captured: true,
        granularity,
        powers: false,
        query_exponent: 0,
        seed: 1,
    }
}

/// A CTA has more units of one chunk than chunks that it claims ahead, and more of these than slots.
#[test]
fn graphs_decode_many_units_of_one_chunk() {
    let Some(gpu) = gpu("graphs_decode_many_units_of_one_chunk") else {
        return;
    };
    for (group, dim, granularity) in [
        (16, 128, 0),
        (16, 128, 4),
        (8, 128, 0),
        (16, 256, 0),
        (8, 256, 0),
        (16, 64, 0),
    ] {
        let case = many_units_of_one_chunk(gpu, [group, dim], granularity, PlanOptions::default());
        check::<bf16, F8E4M3>(gpu, &case).unwrap();
    }
}

/// Heads of 64 that lie side by side, and so many of them that they are read two at a time.
#[test]
fn decode_of_pairs_of_kv_heads_is_the_reference() {
    let Some(gpu) = gpu("decode_of_pairs_of_kv_heads_is_the_reference") else {
        return;
    };
    let groups = prop_oneof![Just(1_u32), Just(2), Just(3), Just(8)];
    let mut runner = proptest::test_runner::TestRunner::new(cases(60));
    runner
        .run(&(case(4, 4), groups), |(mut case, group)| {
            let kv_heads = 2 * gpu.multiprocessors();
            case.set_heads(Spec::new(kv_heads * group, kv_heads, 64));
            case.layout = KvLayout::Nhd;
            match case.seed % 3 {
                0 => check::<f16, F8E4M3>(gpu, &case),
                _ => check::<bf16, F8E4M3>(gpu, &case),
            }
        })
        .unwrap();
}

/// Heads between those of the kernels, which decodes copy row by row, prompts too.
#[test]
fn padded_heads_of_8_bits_are_the_reference() {
    let Some(gpu) = gpu("padded_heads_of_8_bits_are_the_reference") else {
        return;
    };
    let dims = prop::sample::select(&[16_u32, 48, 80, 96, 112, 144, 160, 176, 192, 208, 224, 240]);
    let mut runner = proptest::test_runner::TestRunner::new(cases(60));
    runner
        .run(&(case(30, 4), dims), |(mut case, dim)| {
            let Spec {
                q_heads, kv_heads, ..
            } = case.spec;
            case.set_heads(Spec::new(q_heads, kv_heads, dim));
            match case.seed % 3 {
                0 => check::<f16, F8E4M3>(gpu, &case),
                _ => check::<bf16, F8E4M3>(gpu, &case),
            }
        })
        .unwrap();
}

/// Against the same arithmetic in f64: queries and weights rounded to e4m3, everything else exact.
#[test]
fn prefill_in_8_bits_is_f64_of_the_same_operands() {
    let Some(gpu) = gpu("prefill_in_8_bits_is_f64_of_the_same_operands") else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(100));
    runner
        .run(&case(700, 3), |mut case| {
            let dim = [128, 256][case.seed as usize / 4 % 2];
            let spec = Spec::new(case.spec.q_heads, case.spec.kv_heads, dim);
            case.set_heads(spec.with_compute(Compute::F8));
            case.spec.variant.sinks = case.seed % 4 == 1;
            case.add_ancestors();
            match case.seed % 3 {
                0 => check::<f16, F8E4M3>(gpu, &case),
                _ => check::<bf16, F8E4M3>(gpu, &case),
            }
        })
        .unwrap();
}

/// Splits of one key: each is a block, and what they weigh beside each other is off by their logits.
#[test]
fn blocks_of_one_key_in_8_bits_are_f64_of_the_same_operands() {
    let Some(gpu) = gpu("blocks_of_one_key_in_8_bits_are_f64_of_the_same_operands") else {
        return;
    };
    for (seed, dim) in (0..8).zip([128, 256].into_iter().cycle()) {
        let batch = prefixed(&[(0, 0, 17), (0, 0, 33)], 1, false, seed);
        let mut spec = Spec::new(1, 1, dim).with_compute(Compute::F8);
        spec.variant.causal = false;
        let case = Case {
            spec,
            batch,
            layout: KvLayout::Nhd,
            options: PlanOptions::default().with_split(SplitMode::Fixed { tokens: 1 }),
            captured: false,
            granularity: 3,
            powers: false,
            query_exponent: 0,
            seed,
        };
        check::<bf16, F8E4M3>(gpu, &case).unwrap();
    }
}

#[test]
fn prefill_of_8_bit_pages_is_the_reference() {
    let Some(gpu) = gpu("prefill_of_8_bit_pages_is_the_reference") else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(100));
    runner
        .run(&case(700, 4), |case| check_any(gpu, &case))
        .unwrap();
}
