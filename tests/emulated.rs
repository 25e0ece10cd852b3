//! Whole plans on the emulated GPU against naive attention in f64, and what it says of calls that are wrong.

#[path = "common/adversarial.rs"]
mod adversarial;
#[path = "common/latent_parts.rs"]
mod latent_parts;
#[path = "common/numeric.rs"]
mod numeric;
#[path = "common/problems.rs"]
mod problems;

use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use adversarial::{KINDS, allowed, make_hard};
use half::{bf16, f16};
use latent_parts::Parts;
use numeric::{Rng, Tolerance, compare, to_f64};
use problems::{Tensors, cases, heads as of_heads, prefixed, sinks, variant};
use proptest::{prelude::*, strategy::ValueTree};
use tandem_attn::{
    Error,
    exec::{
        Cpu,
        emulated::{Emulated, Schedule, Settings},
        gpu::{DeviceBuffer, KvPool, Stream, WorkspaceOptions},
    },
    kv::{KvScales, KvStrides, KvView},
    plan::{
        Bound, DeviceDescription, MergeMode, Plan, PlanOptions, Planner, SplitMode, pod::PodMode,
    },
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    tensor::{Element, F8E4M3},
};

/// The emulated driver is one of the process, and so is its failure: a test that provokes one writes, all others read.
static FAILURE: RwLock<()> = RwLock::new(());

fn no_failure() -> RwLockReadGuard<'static, ()> {
    FAILURE.read().unwrap_or_else(PoisonError::into_inner)
}

/// A batch, its heads, and how it is planned and run.
#[derive(Clone, Debug)]
struct Case {
    spec: Spec,
    batch: Batch,
    options: PlanOptions,
    layout: KvLayout,
    /// 0: warps one after the other; 1: a random order; 2: copies as late as can be.
    schedule: u8,
    seed: u64,
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

fn settings(schedule: u8, seed: u64) -> Settings {
    let schedule = match schedule {
        0 => |_| Schedule::RoundRobin,
        1 => Schedule::Random,
        _ => Schedule::Late,
    };
    Settings {
        schedule,
        seed,
        ..Settings::default()
    }
}

fn check<T: Element, K: Element>(case: &Case) -> Result<(), TestCaseError> {
    let _others = no_failure();
    let emulated = Emulated::new(settings(case.schedule, case.seed)).expect("the emulator");
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

#[test]
fn plans_over_8_bit_pages_are_the_reference() {
    let mut runner = proptest::test_runner::TestRunner::new(cases(10));
    runner
        .run(&case(), |case| check::<bf16, F8E4M3>(&case))
        .unwrap();
}

/// Large, rising, falling, equal and infinite logits, in prefills, decodes and merges.
/// A prompt and decodes of 8-bit keys, each times a scale of its own: a power of two, so that the prompt's keys lose nothing
/// where they become 16 bits.
#[test]
fn scales_of_each_token_are_those_of_the_cpu() {
    let _others = no_failure();
    let emulated = Emulated::new(settings(2, 7)).expect("the emulator");
    let spec = Spec::new(8, 2, 128).with_kv_dtype(Dtype::F8E4M3);
    let batch = prefixed(&[(70, 0, 40), (50, 2, 1), (33, 0, 1)], 8, false, 5);
    let tensors = Tensors::<bf16, F8E4M3>::random(&spec, &batch, KvLayout::Nhd, 3);
    let table = &batch.parts[0].table;
    let strides = KvLayout::Nhd.strides(table.page_size, spec.kv_heads, 1);
    let scales = |step: usize| -> Vec<f32> {
        let count = (table.pool_pages * strides.page) as usize;
        let exponent = |i: usize| (i * step % 5) as f32 - 2.0;
        (0..count).map(|i| exponent(i).exp2()).collect()
    };
    let (k, v) = (scales(3), scales(7));
    let of_tokens = KvScales::Token {
        k: &k,
        v: &v,
        k_strides: strides,
        v_strides: strides,
    };
    let views = [tensors.parts[0].view().with_scales(of_tokens)];
    fn results(
        (spec, batch, device): (&Spec, &Batch, DeviceDescription),
        run: impl Fn(&Plan, &mut [bf16], &mut [f32]),
    ) -> (Vec<f64>, Vec<f64>) {
        let plan = Planner::new().plan(spec, batch, &device, &PlanOptions::default());
        let plan = plan.expect("it can be planned");
        let rows = (plan.total_q * spec.q_heads) as usize;
        let (mut out, mut lse) = (vec![bf16::NAN; rows * 128], vec![f32::NAN; rows]);
        run(&plan, &mut out, &mut lse);
        (to_f64(&out), to_f64(&lse))
    }
    let (q, cpu) = (&tensors.q, Cpu::new());
    let right = results((&spec, &batch, cpu.device()), |plan, out, lse| {
        cpu.run(plan, q, &views, out, Some(lse))
            .expect("it is right");
    });
    let got = results((&spec, &batch, emulated.device()), |plan, out, lse| {
        let run = emulated.run(plan, q, &views, out, Some(lse));
        run.expect("it is right");
    });
    let shape = [batch.total_q() as usize, 8, 128];
    let mut tolerance = Tolerance::of(Dtype::BF16);
    tolerance.absolute = 4.0 * 2.0 / 256.0;
    compare("out", &shape, &got.0, &right.0, tolerance).unwrap();
    tolerance.absolute = 2e-4;
    compare("lse", &shape[..2], &got.1, &right.1, tolerance).unwrap();
}

fn hard<T: Element>(large: bool) {
    let _others = no_failure();
    let emulated = Emulated::new(settings(1, 3)).expect("the emulator");
    let spec = Spec::new(4, 1, 64).with_dtype(T::DTYPE);
    let batch = prefixed(&[(90, 0, 20), (70, 0, 1), (33, 0, 1)], 16, false, 3);
    let options = PlanOptions::default()
        .with_split(SplitMode::Fixed { tokens: 48 })
        .with_pod(PodMode::Serial);
    let plan = Planner::new()
        .plan(&spec, &batch, &emulated.device(), &options)
        .expect("it can be planned");
    for (name, logit) in KINDS {
        let mut tensors = Tensors::<T, T>::random(&spec, &batch, KvLayout::Nhd, 5);
        make_hard(&mut tensors, &spec, &batch, *logit, large);
        let right = tensors.reference(&spec, &batch);
        let mut out = vec![T::from_f32(f32::NAN); right.out.len()];
        let mut lse = vec![f32::NAN; right.lse.len()];
        emulated
            .run(
                &plan,
                &tensors.q,
                &tensors.views(),
                &mut out,
                Some(&mut lse),
            )
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let largest = right.out.iter().fold(1.0_f64, |most, x| most.max(x.abs()));
        let mut of_out = Tolerance::of(T::DTYPE);
        of_out.absolute = if T::DTYPE == Dtype::BF16 {
            1.0 / 256.0
        } else {
            1.0 / 2048.0
        };
        let of_lse = Tolerance {
            absolute: 2e-4,
            relative: 1e-5,
        };
        let [of_out, of_lse] = allowed(&right, largest, of_out, of_lse);
        let wrong = compare(
            "out",
            &[out.len() / 64, 64],
            &to_f64(&out),
            &right.out,
            of_out,
        )
        .and_then(|()| compare("lse", &[lse.len()], &to_f64(&lse), &right.lse, of_lse));
        wrong.unwrap_or_else(|what| panic!("{name}: {what}"));
    }
}

#[test]
fn hard_logits_are_the_reference() {
    hard::<bf16>(false);
    hard::<f16>(true);
}

fn beside_rows_with_large_logits<T: Element>(dim: u32) {
    let _others = no_failure();
    let emulated = Emulated::new(settings(1, 3)).expect("the emulator");
    let spec = Spec::new(2, 1, dim).with_dtype(T::DTYPE);
    let batch = prefixed(&[(700, 0, 100)], 16, false, 3);
    let plan = Planner::new()
        .plan(&spec, &batch, &emulated.device(), &PlanOptions::default())
        .expect("it can be planned");
    let tensors = Tensors::<T, T>::random(&spec, &batch, KvLayout::Nhd, 5);
    let width = 2 * dim as usize;
    let run = |q: &[T]| {
        let mut out = vec![T::from_f32(f32::NAN); q.len()];
        let mut lse = vec![f32::NAN; q.len() / dim as usize];
        emulated
            .run(&plan, q, &tensors.views(), &mut out, Some(&mut lse))
            .expect("it runs");
        let of_even = |token: &usize| token.is_multiple_of(2);
        let tokens = (0..q.len() / width).filter(of_even);
        let bits = |token| {
            let out = to_f64(&out[token * width..][..width]);
            let lse = to_f64(&lse[token * 2..][..2]);
            [out, lse].concat().iter().map(|x| x.to_bits()).collect()
        };
        tokens.map(bits).collect::<Vec<Vec<u64>>>()
    };
    let alike = run(&tensors.q);
    let mut q = tensors.q.clone();
    for row in q.chunks_mut(width).skip(1).step_by(2) {
        row.iter_mut()
            .for_each(|x| *x = T::from_f32(x.to_f32() * 200.0));
    }
    assert!(alike == run(&q), "{:?}, {dim}", T::DTYPE);
}

/// Rows that outgrow their references make a warp look for maxima in every block. Its other rows have the bits that they
/// have without such neighbours.
#[test]
fn rows_beside_large_logits_are_computed_as_without() {
    for dim in [64, 128] {
        beside_rows_with_large_logits::<bf16>(dim);
        beside_rows_with_large_logits::<f16>(dim);
    }
}

/// Logits of two keys in blocks of their own that differ little: the one that is read first just fits the range of the
/// reference that all others gave, the second does not. What the first added must outlast the change of reference.
#[test]
fn a_new_reference_keeps_what_has_outgrown_the_one_before() {
    let _others = no_failure();
    let emulated = Emulated::new(settings(1, 3)).expect("the emulator");
    let kinds: [fn(&mut Rng, u32, u32) -> f32; 2] = [
        |_, at, keys| match at {
            3 => 123.5,
            _ if at == keys / 2 => 120.0,
            _ => 0.0,
        },
        |_, at, keys| match keys - at {
            // Seen by half of the queries.
            50 => 123.5,
            _ if at == keys / 2 => 120.0,
            _ => 0.0,
        },
    ];
    for dim in [64, 128, 256, 512] {
        let spec = Spec::new(2, 1, dim);
        let batch = prefixed(&[(400, 0, 100)], 16, false, 3);
        let plan = Planner::new()
            .plan(&spec, &batch, &emulated.device(), &PlanOptions::default())
            .expect("it can be planned");
        for logit in kinds {
            let mut tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 5);
            make_hard(&mut tensors, &spec, &batch, logit, false);
            let right = tensors.reference(&spec, &batch);
            let mut out = vec![bf16::NAN; right.out.len()];
            emulated
                .run(&plan, &tensors.q, &tensors.views(), &mut out, None)
                .expect("it runs");
            let of_out = Tolerance {
                absolute: 1.0 / 256.0,
                ..Tolerance::of(Dtype::BF16)
            };
            let [of_out, _] = allowed(&right, 1.0, of_out, of_out);
            let shape = [out.len() / dim as usize, dim as usize];
            compare("out", &shape, &to_f64(&out), &right.out, of_out)
                .unwrap_or_else(|what| panic!("{dim}: {what}"));
        }
    }
}

/// Keys with the heads of a token side by side, values with those of a page.
#[test]
fn values_may_lie_in_another_layout_than_keys() {
    let _others = no_failure();
    let emulated = Emulated::new(settings(1, 3)).expect("the emulator");
    for (dim_qk, dim_v) in [(64, 64), (128, 128), (192, 128), (256, 256)] {
        let spec = Spec::new(4, 2, dim_qk).with_head_dim_v(dim_v);
        let batch = prefixed(&[(70, 0, 40), (50, 2, 1)], 16, false, 3);
        let plan = Planner::new()
            .plan(&spec, &batch, &emulated.device(), &PlanOptions::default())
            .expect("it can be planned");
        let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 5);
        let mut mixed = tensors.views()[0];
        let [from, to] = [KvLayout::Nhd, KvLayout::Hnd].map(|layout| layout.strides(16, 2, dim_v));
        let mut v = vec![bf16::ZERO; mixed.v.len()];
        for index in 0..v.len() as u32 / dim_v {
            let (page, token, head) = (index / 32, index / 2 % 16, index % 2);
            let at = |strides: &KvStrides| {
                let first = page * strides.page + token * strides.token + head * strides.head;
                first as usize..(first + dim_v) as usize
            };
            v[at(&to)].copy_from_slice(&mixed.v[at(&from)]);
        }
        (mixed.v, mixed.v_strides) = (&v, to);
        let mut out = vec![bf16::NAN; (plan.total_q * 4 * dim_v) as usize];
        emulated
            .run(&plan, &tensors.q, &[mixed], &mut out, None)
            .expect("it runs");
        let right = tensors.reference(&spec, &batch);
        let shape = [plan.total_q, 4, dim_v].map(|extent| extent as usize);
        let mut tolerance = Tolerance::of(Dtype::BF16);
        tolerance.absolute = 1.0 / 256.0;
        let differs = compare("out", &shape, &to_f64(&out), &right.out, tolerance);
        assert_eq!(differs, Ok(()), "{dim_qk}, {dim_v}");
    }
}

/// A page holds the keys and values of several layers. What a layer has of the last page ends before the page's stride does.
#[test]
fn pools_may_be_one_layer_of_many() {
    let _others = no_failure();
    let emulated = Emulated::new(settings(1, 4)).expect("the emulator");
    let (spec, page) = (Spec::new(4, 2, 64), 8);
    // The last page of the pool is in use.
    let mut table = PageTable::new(page, 3);
    table.push(&[1, 2], 13);
    let batch = Batch::new(vec![0, 1], table);
    let plan = Planner::new()
        .plan(&spec, &batch, &emulated.device(), &PlanOptions::default())
        .expect("it can be planned");
    let dense = KvLayout::Nhd.strides(page, 2, 64);
    let strides = KvStrides {
        page: 4 * dense.page,
        ..dense
    };
    let memory: Vec<bf16> = (0..3 * strides.page)
        .map(|index| bf16::from_f32((index.wrapping_mul(0x9E37_79B1) >> 24) as f32 / 128.0 - 1.0))
        .collect();
    let q = &memory[..4 * 64];
    for layer in [0, 1] {
        let [k, v] = [2 * layer, 2 * layer + 1].map(|at| &memory[at * dense.page as usize..]);
        let mut kv = KvView::new(&spec, KvLayout::Nhd, page, k, v);
        (kv.k_strides, kv.v_strides) = (strides, strides);
        let [mut out, mut right] = [[bf16::NAN; 4 * 64]; 2];
        let cpu = Cpu::new().run(&plan, q, &[kv], &mut right, None);
        assert_eq!(cpu, Ok(()), "layer {layer}");
        let ran = emulated.run(&plan, q, &[kv], &mut out, None);
        assert_eq!(ran, Ok(()), "layer {layer}");
        let mut tolerance = Tolerance::of(Dtype::BF16);
        tolerance.absolute = 1.0 / 256.0;
        let differs = compare(
            "out",
            &[1, 4, 64],
            &to_f64(&out),
            &to_f64(&right),
            tolerance,
        );
        assert_eq!(differs, Ok(()), "layer {layer}");
    }
}

/// By kernels for few rows and for many, with keys loaded by pages and row by row.
#[test]
fn latent_keys_in_two_pools_are_those_of_one() {
    let _no_failure = no_failure();
    for (heads, page) in [(16, 8), (32, 32), (64, 16), (128, 16), (16, 1), (64, 1)] {
        let spec = Spec::latent(heads, 512, 64);
        let batch = prefixed(&[(70, 0, 1)], page, true, 5);
        let emulated = Emulated::new(settings(2, 5)).unwrap();
        let plan = Planner::new()
            .plan(&spec, &batch, &emulated.device(), &PlanOptions::default())
            .unwrap();
        let tensors: Tensors<bf16, bf16> = Tensors::random(&spec, &batch, KvLayout::Nhd, 5);
        let parts = Parts::of(&spec, &tensors.parts[0], [[8, 0], [0, 16]]);
        let run = |view| {
            let mut out = vec![bf16::NAN; (heads * 512) as usize];
            emulated
                .run(&plan, &tensors.q, &[view], &mut out, None)
                .unwrap();
            out.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let one = run(tensors.parts[0].view());
        assert!(
            run(parts.view(&spec)) == one,
            "{heads} heads, pages of {page}"
        );
    }
}

/// A page beyond the pool is an error of the run that names address and instruction, and the next run is as ever.
#[test]
fn pages_outside_the_pool_are_reported() {
    let _alone = FAILURE.write().unwrap_or_else(PoisonError::into_inner);
    let emulated = Emulated::new(settings(1, 5)).expect("the emulator");
    let spec = Spec::new(4, 1, 64);
    // Pages of 3 tokens are loaded row by row: the accelerator reads zeroes outside of its tensor.
    let mut table = PageTable::new(3, 9);
    table.push(&[1, 8], 5);
    let batch = Batch::new(vec![0, 1], table);
    let plan = Planner::new()
        .plan(&spec, &batch, &emulated.device(), &PlanOptions::default())
        .expect("it can be planned");
    let (gpu, stream) = (emulated.gpu(), emulated.gpu().stream().expect("a stream"));
    let pool = DeviceBuffer::from_slice(gpu, &[bf16::ONE; 2 * 3 * 64]).expect("memory");
    let q = DeviceBuffer::from_slice(gpu, &[bf16::ONE; 4 * 64]).expect("memory");
    let address = pool.address();
    // What the caller says of the pool is not true: it has two pages.
    let kv = KvPool::new(&spec, KvLayout::Nhd, 3, 9, address, address);
    let mut workspace = gpu
        .workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default())
        .expect("there is memory for it");
    let q_tensor = q.tensor([1, 4, 64]);
    let run = |workspace: &mut _, stream: Stream| {
        // SAFETY: nothing but the emulator's own memory can be touched.
        unsafe { gpu.run(workspace, &q_tensor, &[kv], &q_tensor, None, stream) }
    };
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(&plan, *stream) }.expect("the bound is the plan's");
    let failed = run(&mut workspace, *stream).and_then(|()| stream.synchronize());
    let Err(Error::Driver { text, .. }) = failed else {
        panic!("{failed:?}");
    };
    assert!(
        text.contains("lie outside") && text.contains("line "),
        "{text}"
    );
    emulated.forget_failure();
    assert_eq!(stream.synchronize(), Ok(()));
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
