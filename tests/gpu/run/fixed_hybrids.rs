//! Hybrids with fixed splits: side by side on an SM or on SMs of their own, requests have the bits that they have alone.

use std::cell::Cell;

use half::bf16;
use proptest::{prelude::*, test_runner::TestRunner};
use tandem_attn::{
    exec::gpu::{Gpu, LaunchSet, WorkspaceOptions},
    plan::{Bound, MergeMode, Plan, PlanOptions, Planner, SplitMode, Tile, pod::PodMode},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    tensor::{Element, F8E4M3},
};

use super::{
    common::{
        Stream,
        problems::{Tensors, ancestors, cases},
    },
    hopper,
    problem::{OnDevice, Request, batch_of, check_results},
};

#[derive(Clone, Debug)]
struct Hybrid {
    spec: Spec,
    batch: Batch,
    options: PlanOptions,
    sms: u32,
    /// The batch runs by the launches of a graph of any batch, whose decodes merge as this says.
    in_graph: Option<MergeMode>,
    seed: u64,
}

/// One request of a batch, with its ancestors if any of its tokens has some.
fn only(batch: &Batch, request: usize) -> Batch {
    let table = &batch.parts[0].table;
    let mut own = PageTable::new(table.page_size, table.pool_pages);
    own.push(table.pages(request), table.kv_len(request));
    let alone = Batch::new(vec![0, batch.q_len(request)], own);
    let tokens = batch.qo_indptr[request] as usize..batch.qo_indptr[request + 1] as usize;
    match batch.ancestors.get(tokens) {
        Some(words) if words.iter().any(|&word| word != u64::MAX) => {
            alone.with_ancestors(words.to_vec())
        }
        _ => alone,
    }
}

impl Hybrid {
    fn plan(&self, gpu: &Gpu, batch: &Batch) -> Plan {
        let mut device = gpu.device();
        device.sms = self.sms;
        let plan = Planner::new().plan(&self.spec, batch, &device, &self.options);
        let plan = plan.expect("the case can be planned");
        plan.verify(batch).expect("the plan computes the batch");
        plan
    }

    /// Outputs and LSEs as bits.
    fn bits<K: Element>(
        &self,
        gpu: &Gpu,
        batch: &Batch,
        tensors: &Tensors<bf16, K>,
        in_graph: Option<MergeMode>,
    ) -> (Vec<u16>, Vec<u32>) {
        let plan = self.plan(gpu, batch);
        let mut options = WorkspaceOptions::default();
        if let Some(merge_mode) = in_graph {
            let launches = LaunchSet::all(&gpu.device(), &self.spec).unwrap();
            options.launches = Some(launches.with_merge_mode(merge_mode));
        }
        let mut workspace = gpu
            .workspace(&self.spec, &Bound::of(&plan), options)
            .expect("there is memory for it");
        let device = OnDevice::new(&self.spec, batch, tensors);
        let stream = Stream::new();
        // SAFETY: the stream is ours.
        unsafe { workspace.upload(&plan, stream.0) }.expect("the bound is the plan's");
        device.run(gpu, &mut workspace, &stream)
    }

    fn check<K: Element>(&self, gpu: &Gpu) -> Result<(), TestCaseError> {
        let Self { spec, batch, .. } = self;
        let tensors = Tensors::<bf16, K>::random(spec, batch, KvLayout::Nhd, self.seed);
        let (out, lse) = self.bits(gpu, batch, &tensors, self.in_graph);
        check_results(spec, batch, &tensors, &(out.clone(), lse.clone()))
            .map_err(TestCaseError::fail)?;
        // Merges by the CTAs of decodes round otherwise than the merging kernel's, which plans with fixed splits have.
        let alone_in_graph = self.in_graph.filter(|&mode| mode == MergeMode::Fused);
        for request in 0..batch.requests() {
            let rows = |width: u32| {
                let row = (spec.q_heads * width) as usize;
                let [first, end] = [request, request + 1].map(|at| batch.qo_indptr[at] as usize);
                first * row..end * row
            };
            let own = Tensors {
                q: tensors.q[rows(spec.head_dim_qk)].to_vec(),
                ..tensors.clone()
            };
            let (own_out, own_lse) = self.bits(gpu, &only(batch, request), &own, alone_in_graph);
            let queries = batch.q_len(request);
            prop_assert!(
                out[rows(spec.head_dim_v)] == own_out && lse[rows(1)] == own_lse,
                "request {request} of {queries} tokens differs"
            );
        }
        Ok(())
    }

    fn any(&self, gpu: &Gpu) -> Result<(), TestCaseError> {
        match self.spec.kv_dtype {
            Dtype::F8E4M3 => self.check::<F8E4M3>(gpu),
            _ => self.check::<bf16>(gpu),
        }
    }
}

fn requests() -> impl Strategy<Value = Vec<Request>> {
    let prefill = prop_oneof![8 => 65..300_u32, 1 => 9..66_u32];
    let decode = prop_oneof![8 => Just(1_u32), 2 => Just(2), 1 => 3..9_u32];
    let of = |queries: BoxedStrategy<u32>, keys: std::ops::Range<u32>| {
        let request = |(queries, keys, parent, shared)| Request {
            parent,
            shared,
            own: queries + keys,
            queries,
        };
        (queries, keys, any::<u64>(), 0..8_usize).prop_map(request)
    };
    let prefills = prop::collection::vec(of(prefill.boxed(), 0..700), 1..3);
    let decodes = prop::collection::vec(of(decode.boxed(), 0..1500), 1..5);
    (prefills, decodes, any::<bool>()).prop_map(|(prefills, decodes, prefills_last)| {
        match prefills_last {
            true => [decodes, prefills].concat(),
            false => [prefills, decodes].concat(),
        }
    })
}

fn hybrid() -> impl Strategy<Value = Hybrid> {
    let heads = prop::sample::select(&[(8_u32, 2_u32), (4, 1), (2, 2), (8, 1), (6, 2), (16, 1)]);
    let dim = prop_oneof![5 => Just(128_u32), 1 => prop::sample::select(&[64, 96, 112])];
    let window = prop_oneof![3 => Just(None), 1 => (20..600_u32).prop_map(Some)];
    let pod = prop_oneof![
        4 => Just(PodMode::Fused),
        2 => Just(PodMode::Auto),
        1 => Just(PodMode::Streams),
    ];
    let in_graph = prop_oneof![
        4 => Just(None),
        1 => Just(Some(MergeMode::Kernel)),
        1 => Just(Some(MergeMode::Fused)),
    ];
    let page = prop_oneof![
        3 => Just(16_u32), 1 => Just(8), 1 => Just(64), 1 => Just(24), 2 => Just(1), 1 => Just(5)
    ];
    (
        (heads, dim, window, prop::bool::weighted(0.25)),
        (requests(), page, 1..20_u32, prop::bool::weighted(0.2)),
        (pod, in_graph, prop::sample::select(&[8_u32, 132])),
        any::<u64>(),
    )
        .prop_map(
            |((heads, dim, window, of_8_bits), (requests, page, pages, trees), rest, seed)| {
                let (pod, in_graph, sms) = rest;
                let mut spec = Spec::new(heads.0, heads.1, dim).with_dtype(Dtype::BF16);
                if of_8_bits && matches!(dim, 64 | 128) {
                    spec = spec.with_kv_dtype(Dtype::F8E4M3);
                }
                spec.variant.window_left = window;
                let mut batch = batch_of(&requests, page, seed);
                if trees {
                    batch = batch.clone().with_ancestors(ancestors(&batch, seed));
                }
                Hybrid {
                    spec,
                    batch,
                    options: PlanOptions::default()
                        .with_split(SplitMode::Fixed {
                            tokens: pages * page,
                        })
                        .with_pod(pod),
                    sms,
                    in_graph,
                    seed,
                }
            },
        )
}

#[test]
fn with_fixed_splits_hybrids_are_computed_as_their_requests_alone() {
    let test = "with_fixed_splits_hybrids_are_computed_as_their_requests_alone";
    let Some(gpu) = hopper(test) else {
        return;
    };
    let fused = Cell::new(0);
    let config = cases(80);
    let mut runner = TestRunner::new(config.clone());
    runner
        .run(&hybrid(), |hybrid| {
            let plan = hybrid.plan(gpu, &hybrid.batch);
            let mode = plan.pod.map(|pod| pod.mode);
            fused.set(fused.get() + u32::from(mode == Some(PodMode::Fused)));
            hybrid.any(gpu)
        })
        .unwrap();
    let shares = |config: &tandem_attn::plan::pod::PodConfig| !config.shares.is_empty();
    if gpu.device().pod.configs.iter().any(shares) {
        assert!(fused.get() >= config.cases / 8, "{} share SMs", fused.get());
    }
}

/// Alone, too, and whoever is asked to merge.
#[test]
fn decodes_in_a_tile_that_shares_sms_are_merged() {
    let Some(gpu) = hopper("decodes_in_a_tile_that_shares_sms_are_merged") else {
        return;
    };
    let request = Request {
        parent: 0,
        shared: 0,
        own: 6000,
        queries: 1,
    };
    let spec = Spec::new(4, 1, 128).with_dtype(Dtype::BF16);
    let batch = batch_of(&[request], 16, 3);
    for merge_mode in [MergeMode::Auto, MergeMode::Fused] {
        let options = PlanOptions::default()
            .with_decode_tile(Tile { m: 8, n: 64 })
            .with_merge_mode(merge_mode);
        let hybrid = Hybrid {
            spec,
            batch: batch.clone(),
            options,
            sms: 132,
            in_graph: None,
            seed: 3,
        };
        assert!(hybrid.plan(gpu, &batch).merges.len() == 1, "it is cut");
        hybrid.any(gpu).unwrap();
    }
}

/// Other kernels compute batches of which some tokens have ancestors: the same bits for requests that have none.
#[test]
fn ancestors_of_a_request_change_no_bit_of_others() {
    let Some(gpu) = hopper("ancestors_of_a_request_change_no_bit_of_others") else {
        return;
    };
    let requests = [2, 200, 30, 1].map(|queries| Request {
        parent: 0,
        shared: 0,
        own: queries + 400,
        queries,
    });
    for (requests, pod) in [
        (&requests[..2], PodMode::Fused),
        (&requests[..], PodMode::Serial),
    ] {
        let batch = batch_of(requests, 16, 3);
        let mut words = vec![u64::MAX; batch.total_q() as usize];
        words[1] = !2;
        let hybrid = Hybrid {
            spec: Spec::new(4, 1, 128).with_dtype(Dtype::BF16),
            batch: batch.with_ancestors(words),
            options: PlanOptions::default()
                .with_split(SplitMode::Fixed { tokens: 128 })
                .with_pod(pod),
            sms: 132,
            in_graph: None,
            seed: 3,
        };
        hybrid.any(gpu).unwrap();
    }
}

/// Where kernels of prefills change, with decodes of few tokens beside them.
#[test]
fn with_fixed_splits_hybrids_are_their_requests_at_the_edges() {
    let test = "with_fixed_splits_hybrids_are_their_requests_at_the_edges";
    let Some(gpu) = hopper(test) else {
        return;
    };
    // Long prompts take an emulated GPU minutes.
    let long = cases(80).cases >= 80;
    let short = [[64, 1], [65, 1], [65, 2], [65, 3], [128, 8]];
    let edges = [[4096_u32, 1_u32], [4097, 1]];
    for [prefill, decode] in short.into_iter().chain(edges.into_iter().filter(|_| long)) {
        for kv_dtype in [Dtype::BF16, Dtype::F8E4M3] {
            let request = |queries, keys| Request {
                parent: 0,
                shared: 0,
                own: queries + keys,
                queries,
            };
            let requests = [request(decode, 900), request(prefill, 100), request(1, 300)];
            let hybrid = Hybrid {
                spec: Spec::new(4, 1, 128)
                    .with_dtype(Dtype::BF16)
                    .with_kv_dtype(kv_dtype),
                batch: batch_of(&requests, 16, 3),
                options: PlanOptions::default()
                    .with_split(SplitMode::Fixed { tokens: 256 })
                    .with_pod(PodMode::Fused),
                sms: gpu.device().sms,
                in_graph: None,
                seed: 3,
            };
            hybrid
                .any(gpu)
                .unwrap_or_else(|error| panic!("{prefill}, {decode}: {error}"));
        }
    }
}
