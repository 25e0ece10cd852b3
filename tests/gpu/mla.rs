//! Latent attention on the GPU, as planned, against naive attention in f64.

use crate::common::{
    self, Memory, Rng, Stream,
    problems::{Tensors, cases},
};
use crate::problem::{OnDevice, Request, batch_of, check_results, check_results_off, uploaded};
use half::{bf16, f16};
use proptest::prelude::*;
use tandem_attn::{
    exec::gpu::{DeviceArray, Gpu, KvPool, RunTensors, WorkspaceOptions},
    plan::{Bound, PackRule, PlanOptions, Planner, SplitMode},
    problem::{Batch, Dtype, KvLayout, Spec},
    tensor::{Element, F8E4M3},
};

#[derive(Clone, Debug)]
struct Case {
    spec: Spec,
    requests: Vec<Request>,
    page: u32,
    options: PlanOptions,
    captured: bool,
    seed: u64,
}

fn request() -> impl Strategy<Value = Request> {
    let own = prop_oneof![
        1 => Just(0_u32),
        3 => 1..70_u32,
        4 => (1..12_u32, 0..3_u32).prop_map(|(blocks, off)| blocks * 64 + off - 1),
        2 => 1..1500_u32,
        1 => 1..9000_u32,
    ];
    let queries = prop_oneof![12 => Just(1_u32), 8 => 2..9_u32, 2 => 9..40_u32, 1 => 40..300_u32];
    request_of(own, queries)
}

/// A request of so many own keys and new tokens, perhaps behind pages of another.
pub fn request_of(
    own: impl Strategy<Value = u32>,
    queries: impl Strategy<Value = u32>,
) -> impl Strategy<Value = Request> {
    (any::<u64>(), 0..40_usize, own, queries).prop_map(|(parent, shared, own, queries)| {
        // Long chunks of few keys: the reference takes a second for a thousand million products.
        let (own, shared) = match queries {
            40.. => (own.min(500), shared.min(2)),
            _ => (own, shared),
        };
        Request {
            parent,
            shared,
            own,
            queries,
        }
    })
}

fn case() -> impl Strategy<Value = Case> {
    let heads = prop_oneof![
        3 => Just(16_u32),
        2 => Just(64),
        2 => Just(128),
        1 => Just(1),
        3 => 1..129_u32,
    ];
    let window = prop_oneof![4 => Just(None), 1 => (0..300_u32).prop_map(Some)];
    let page = prop_oneof![
        4 => Just(64_u32),
        2 => Just(16),
        1 => Just(8),
        1 => Just(24),
        1 => Just(1),
        1 => prop_oneof![Just(2), Just(4), Just(12), Just(17)],
        1 => Just(128),
    ];
    let split = prop_oneof![3 => Just(None), 2 => (1..9_u32).prop_map(Some)];
    let packing = prop_oneof![2 => Just(PackRule::Fastest), 1 => Just(PackRule::Exact), 1 => Just(PackRule::Off)];
    (
        (heads, window, prop::bool::weighted(0.9)),
        prop::collection::vec(request(), 1..12),
        (page, split, packing, any::<bool>()),
        any::<u64>(),
    )
        .prop_map(|((heads, window, causal), requests, rest, seed)| {
            let (page, split, packing, captured) = rest;
            let mut spec = Spec::latent(heads, 512, 64);
            spec.variant.causal = causal;
            spec.variant.window_left = window;
            let mut options = PlanOptions::default().with_packing(packing);
            if let Some(pages) = split {
                let tokens = pages * page;
                options.split = SplitMode::Fixed { tokens };
            }
            Case {
                spec,
                requests,
                page,
                options,
                captured,
                seed,
            }
        })
}

fn check<T: Element, K: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
    check_with::<T, K>(gpu, case, |_, _| [0.0; 2])
}

/// The same with tensors that are changed; logits and values may then be off by so much.
fn check_with<T: Element, K: Element>(
    gpu: &Gpu,
    case: &Case,
    change: impl Fn(&Spec, &mut Tensors<T, K>) -> [f64; 2],
) -> Result<(), TestCaseError> {
    let spec = case.spec.with_dtype(T::DTYPE).with_kv_dtype(K::DTYPE);
    let batch = batch_of(&case.requests, case.page, case.seed);
    let device = gpu.device();
    let plan = Planner::new()
        .plan(&spec, &batch, &device, &case.options)
        .expect("the case can be planned");
    plan.verify(&batch).expect("the plan computes the batch");
    let mut tensors = Tensors::<T, K>::random(&spec, &batch, KvLayout::Nhd, case.seed);
    let off = change(&spec, &mut tensors);
    let on_device = OnDevice::new(&spec, &batch, &tensors);
    let stream = Stream::new();
    let mut workspace = uploaded(gpu, &spec, &device, &plan, case.captured, &stream);
    let first = on_device.run(gpu, &mut workspace, &stream);
    check_results_off(&spec, &batch, &tensors, &first, off).map_err(TestCaseError::fail)?;
    let again = on_device.run(gpu, &mut workspace, &stream);
    prop_assert!(first == again, "two runs differ");
    Ok(())
}

#[test]
fn latent_attention_is_the_reference() {
    let Some(gpu) = common::gpu("latent_attention_is_the_reference") else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(200));
    runner
        .run(&case(), |mut case| {
            case.spec.variant.sinks = case.seed % 8 < 2;
            match case.seed % 2 {
                0 => check::<bf16, bf16>(gpu, &case),
                _ => check::<f16, f16>(gpu, &case),
            }
        })
        .unwrap();
}

#[test]
fn keys_of_656_bytes_are_the_reference() {
    let Some(gpu) = common::gpu("keys_of_656_bytes_are_the_reference") else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(200));
    runner
        .run(&case(), |mut case| {
            case.spec.variant.sinks = case.seed % 4 == 1;
            // The reference widens each key once more for each row.
            for request in &mut case.requests {
                (request.own, request.queries) = (request.own.min(3000), request.queries.min(8));
            }
            check_with(gpu, &case, |spec, tensors: &mut Tensors<bf16, _>| {
                if case.seed.is_multiple_of(3) {
                    // The reference rounds products of numbers and scales to bf16, kernels to f16 or not at all.
                    let off = tensors.spoil_scales(spec, &mut Rng(case.seed));
                    return [off, 1.0 / 256.0];
                }
                [0.0; 2]
            })
        })
        .unwrap();
}

/// Query tokens with keys that were chosen for each, of a pool of so many tokens.
#[derive(Clone, Debug)]
struct Sparse {
    heads: u32,
    sinks: bool,
    /// The keys of a query token, and how many in a hundred are none.
    k: u32,
    none: u32,
    tokens: u32,
    pool: u32,
    split: SplitMode,
    seed: u64,
}

fn sparse() -> impl Strategy<Value = Sparse> {
    let heads = prop_oneof![2 => Just(16_u32), 1 => Just(64), 1 => Just(128), 2 => 1..129_u32];
    let k = prop_oneof![3 => 1..70_u32, 2 => 70..700_u32, 1 => Just(2048)];
    let none = prop_oneof![2 => Just(0_u32), 2 => 1..60_u32, 1 => Just(100), 1 => Just(97)];
    let split = prop_oneof![
        2 => Just(SplitMode::Makespan),
        1 => (1..200_u32).prop_map(|tokens| SplitMode::Fixed { tokens }),
    ];
    let sizes = (k, none, 1..9_u32, 1..900_u32);
    (heads, any::<bool>(), sizes, split, any::<u64>()).prop_map(
        |(heads, sinks, (k, none, tokens, pool), split, seed)| Sparse {
            heads,
            sinks,
            k,
            none,
            tokens,
            pool,
            split,
            seed,
        },
    )
}

impl Sparse {
    fn spec(&self) -> Spec {
        let mut spec = Spec::latent(self.heads, 512, 64).with_kv_dtype(Dtype::F8E4M3);
        spec.variant.sinks = self.sinks;
        spec
    }

    fn indices(&self) -> Vec<i32> {
        let mut rng = Rng(self.seed);
        let index = |_| match rng.below(100) < self.none as usize {
            true => -1,
            false => rng.below(self.pool as usize) as i32,
        };
        (0..self.tokens * self.k).map(index).collect()
    }
}

fn check_sparse(gpu: &Gpu, case: &Sparse) -> Result<(), TestCaseError> {
    let (spec, indices) = (case.spec(), case.indices());
    let chosen = Batch::of_indices(case.k, &indices, case.pool).unwrap();
    let batch = Batch::of_top_k(case.tokens, case.k).unwrap();
    let options = PlanOptions::default().with_split(case.split);
    let plan = Planner::new()
        .plan(&spec, &batch, &gpu.device(), &options)
        .expect("the case can be planned");
    plan.verify(&batch).expect("the plan computes the batch");
    let mut options = WorkspaceOptions::default();
    options.checks = case.seed.is_multiple_of(2);
    let mut workspace = gpu
        .workspace(&spec, &Bound::of(&plan), options)
        .expect("there is memory");
    let tensors = Tensors::<bf16, F8E4M3>::random(&spec, &chosen, KvLayout::Nhd, case.seed);
    let on_device = OnDevice::new(&spec, &chosen, &tensors);
    // The first call makes the launch, the second follows to other addresses.
    let places = [Memory::new(&indices), Memory::new(&indices)];
    let stream = Stream::new();
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(&plan, stream.0) }.expect("the plan fits");
    let results = places
        .each_ref()
        .map(|place| on_device.run_indexed(gpu, &mut workspace, &stream, Some(place.array())));
    check_results(&spec, &chosen, &tensors, &results[0]).map_err(TestCaseError::fail)?;
    prop_assert!(results[0] == results[1], "two runs differ");
    Ok(())
}

#[test]
fn chosen_keys_are_those_that_are_attended_to() {
    let Some(gpu) = common::gpu("chosen_keys_are_those_that_are_attended_to") else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(200));
    runner
        .run(&sparse(), |case| check_sparse(gpu, &case))
        .unwrap();
}

#[test]
fn indices_that_no_kernel_reads_by_are_refused() {
    let Some(gpu) = common::gpu("indices_that_no_kernel_reads_by_are_refused") else {
        return;
    };
    let case = Sparse {
        heads: 16,
        sinks: false,
        k: 40,
        none: 10,
        tokens: 2,
        pool: 100,
        split: SplitMode::Makespan,
        seed: 1,
    };
    let indices = Memory::new(&case.indices());
    let refused = |spec: &Spec, batch: &Batch, len: Option<usize>, captured: bool| {
        let device = gpu.device();
        let plan = Planner::new()
            .plan(spec, batch, &device, &PlanOptions::default())
            .unwrap();
        let stream = Stream::new();
        let mut workspace = uploaded(gpu, spec, &device, &plan, captured, &stream);
        let zeros = vec![0_u8; 100 * 576 * 2];
        let [q, out, pool] = [(); 3].map(|()| Memory::new(&zeros));
        let tensor = |memory: &Memory, dim| memory.tensor(Dtype::BF16, [2, 16, dim]);
        let (q, out) = (tensor(&q, 576), tensor(&out, 512));
        let pools = match spec.kv_dtype {
            Dtype::F8E4M3 => [KvPool::latent_656(1, 100, pool.address())],
            _ => [KvPool::latent(spec, 1, 100, pool.address())],
        };
        let mut tensors = RunTensors::new(&q, &pools, &out);
        if let Some(len) = len {
            tensors = tensors.with_indices(DeviceArray::new(indices.address(), len));
        }
        // SAFETY: everything lives until the stream was waited for.
        let result = unsafe { gpu.run_with(&mut workspace, &tensors, stream.0) };
        stream.wait();
        result.map_err(|error| error.to_string())
    };
    let (spec, batch) = (case.spec(), Batch::of_top_k(2, 40).unwrap());
    assert_eq!(refused(&spec, &batch, Some(80), false), Ok(()));
    let says = |result: Result<(), String>, what: &str| {
        let error = result.expect_err("it is refused");
        assert!(error.contains(what), "{error}");
    };
    says(refused(&spec, &batch, None, false), "no indices");
    says(
        refused(&spec, &batch, Some(79), false),
        "80, as the plan has keys",
    );
    says(refused(&spec, &batch, Some(80), true), "a launch set");
    says(
        refused(&spec.with_window_left(3), &batch, Some(80), false),
        "a window of 3",
    );
    let of_16_bits = spec.with_kv_dtype(Dtype::BF16);
    says(
        refused(&of_16_bits, &batch, Some(80), false),
        "mla_16x64_bf16",
    );
    let named = Batch::of_indices(40, &case.indices(), 100).unwrap();
    says(
        refused(&spec, &named, Some(80), false),
        "a plan that names its keys",
    );
}
