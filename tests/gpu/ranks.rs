//! Ranks of one process: shares of random batches on one GPU or on several, merged by direct reads, against attention
//! in f64; rounds of captured graphs; and what happens where a rank fails.

use std::{
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

use crate::common::problems::{Tensors, cases, heads as of_heads, prefixed, sinks, variant};
use crate::common::{Tolerance, compare, to_f64};
use half::bf16;
use proptest::prelude::*;
use tandem_attn::{
    Error,
    exec::gpu::{
        DeviceBuffer, Gpu, KvPool, NcclId, OwnedStream, Rank, RankOptions, RankTensors, RunTensors,
        Workspace, WorkspaceOptions,
    },
    plan::{Bound, PlanOptions, Planner},
    problem::{Batch, KvLayout, Spec},
    reference,
    shard::{Keys, RankError, ShardError, Sharding, Share},
    variants,
};

/// One test at a time: a group that ends waits for its GPUs as wholes, which breaks off what another captures there.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All GPUs that there are; none, and a line that says why.
fn gpus(test: &str) -> &'static [Gpu] {
    static GPUS: OnceLock<Result<Vec<Gpu>, Error>> = OnceLock::new();
    let load = |ordinal| {
        let gpu = Gpu::builder();
        gpu.compile_ptx(&mut |step| eprintln!("{step}"))
            .build(ordinal)
    };
    let all = GPUS.get_or_init(|| {
        let mut gpus = vec![load(0)?];
        loop {
            match load(gpus.len() as u32) {
                Ok(gpu) => gpus.push(gpu),
                Err(Error::NoDevice { .. }) => return Ok(gpus),
                Err(error) => return Err(error),
            }
        }
    });
    match all {
        Ok(gpus) => gpus,
        Err(error @ (Error::NoDriver { .. } | Error::NoDevice { .. })) => {
            assert!(
                std::env::var_os("TANDEM_REQUIRE_GPU").is_none(),
                "{test}: {error}"
            );
            eprintln!("skipped: {test}: {error}");
            &[]
        }
        Err(error) => panic!("{test}: {error}"),
    }
}

/// At least two of them.
fn two_gpus(test: &str) -> Option<[&'static Gpu; 2]> {
    match gpus(test) {
        [first, second, ..] => Some([first, second]),
        [_] => {
            eprintln!("skipped: {test}: one GPU");
            None
        }
        [] => None,
    }
}

#[derive(Clone, Debug)]
struct Case {
    spec: Spec,
    batch: Batch,
    sharding: Sharding,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let heads = (1..4_u32, prop_oneof![1..9_u32, Just(16)]);
    let dim = prop_oneof![Just(64_u32), Just(128)];
    let page = prop_oneof![3 => Just(16_u32), 1 => Just(8), 1 => Just(3), 1 => Just(64)];
    let queries = prop_oneof![3 => Just(1_u32), 1 => 2..9_u32, 1 => 1..200_u32];
    let request = (0..600_u32, 0..6_usize, queries);
    let deal = prop_oneof![
        3 => (1..5_u32).prop_map(|pages| Keys::RoundRobin { pages }),
        1 => Just(Keys::Contiguous),
        1 => Just(Keys::Folded),
    ];
    let requests = prop::collection::vec(request, 1..6);
    (
        heads,
        dim,
        variant(),
        page,
        requests,
        deal,
        1..4_u32,
        any::<u64>(),
    )
        .prop_map(
            |((kv_heads, group), dim, variant, page, requests, deal, ranks, seed)| {
                let mut spec = Spec::new(kv_heads * group, kv_heads, dim);
                spec.variant = variant;
                spec.variant.sinks = seed % 4 == 0;
                if !matches!(deal, Keys::Contiguous) {
                    spec.variant.window_left = None;
                }
                Case {
                    spec,
                    batch: prefixed(&requests, page, seed % 3 == 0, seed),
                    sharding: Sharding::one().over_keys(ranks, deal),
                    seed,
                }
            },
        )
}

/// A share on its GPU.
struct Loaded {
    gpu: &'static Gpu,
    stream: OwnedStream,
    spec: Spec,
    tokens: usize,
    workspace: Workspace,
    q: DeviceBuffer<bf16>,
    _memory: [DeviceBuffer<bf16>; 2],
    pool: KvPool,
    sinks: Option<DeviceBuffer<f32>>,
    out: DeviceBuffer<bf16>,
    lse: DeviceBuffer<f32>,
}

impl Loaded {
    /// All pages lie on every GPU; the share says which it reads.
    fn new(gpu: &'static Gpu, share: &Share, tensors: &Tensors<bf16, bf16>) -> Self {
        let spec = share.spec;
        let plan = Planner::new()
            .plan(&spec, &share.batch, &gpu.device(), &PlanOptions::default())
            .expect("a share can be planned");
        plan.verify(&share.batch)
            .expect("the plan computes the share");
        let stream = gpu.stream().expect("a stream");
        let mut workspace = gpu
            .workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default())
            .expect("memory");
        // SAFETY: the stream is ours.
        unsafe { workspace.upload(&plan, *stream) }.expect("the bound is the plan's");
        let buffer = |values: &[bf16]| DeviceBuffer::from_slice(gpu, values).expect("memory");
        let pools = &tensors.parts[0];
        let memory = [buffer(&pools.k), buffer(&pools.v)];
        let table = &share.batch.parts[0].table;
        let [k, v] = memory.each_ref().map(DeviceBuffer::address);
        let (page, pages) = (table.page_size, table.pool_pages);
        let rows = (plan.total_q * spec.q_heads) as usize;
        let nan = vec![bf16::NAN; rows * spec.head_dim_v as usize];
        Self {
            gpu,
            stream,
            spec,
            tokens: plan.total_q as usize,
            workspace,
            q: buffer(&tensors.q),
            _memory: memory,
            pool: KvPool::new(&spec, KvLayout::Nhd, page, pages, k, v),
            sinks: sinks(&spec).map(|sinks| DeviceBuffer::from_slice(gpu, &sinks).expect("memory")),
            out: buffer(&nan),
            lse: DeviceBuffer::from_slice(gpu, &vec![f32::NAN; rows]).expect("memory"),
        }
    }

    /// Runs a layer.
    fn with<R>(&mut self, run: impl FnOnce(&Gpu, &mut Workspace, &RunTensors<'_>) -> R) -> R {
        let Spec {
            q_heads,
            head_dim_qk,
            head_dim_v,
            ..
        } = self.spec;
        let shape = |dim: u32| [self.tokens, q_heads as usize, dim as usize];
        let (q, out) = (
            self.q.tensor(shape(head_dim_qk)),
            self.out.tensor(shape(head_dim_v)),
        );
        let lse = self.lse.tensor([self.tokens, q_heads as usize]);
        let pools = [self.pool];
        let mut tensors = RunTensors::new(&q, &pools, &out).with_lse(&lse);
        if let Some(sinks) = &self.sinks {
            tensors = tensors.with_sinks(sinks.array());
        }
        run(self.gpu, &mut self.workspace, &tensors)
    }

    fn results(&self) -> (Vec<bf16>, Vec<f32>) {
        self.stream.synchronize().expect("the work is done");
        (
            self.out.read().expect("readable"),
            self.lse.read().expect("readable"),
        )
    }
}

/// The same with results where ranks merge them from.
fn into<'a>(tensors: &RunTensors<'a>, state: &'a RankTensors) -> RunTensors<'a> {
    let own = RunTensors::new(tensors.q, tensors.pools, &state.out).with_lse(&state.lse);
    match tensors.sinks {
        Some(sinks) => own.with_sinks(sinks),
        None => own,
    }
}

/// Groups on these GPUs in turn, each share loaded.
fn load(
    gpus: &'static [Gpu],
    case: &Case,
    tensors: &Tensors<bf16, bf16>,
) -> Option<Vec<(Rank, Loaded)>> {
    let shares = match case.sharding.shares(&case.spec, &case.batch) {
        Ok(shares) => shares,
        Err(ShardError::Positions { .. }) => return None,
        Err(error) => panic!("{error}"),
    };
    let own: Vec<&'static Gpu> = (0..shares.len())
        .map(|rank| &gpus[rank % gpus.len()])
        .collect();
    let tokens = case.batch.total_q() as usize;
    let ranks = Gpu::ranks(&own, &case.spec, tokens, &RankOptions::default()).expect("a group");
    let loaded = own.iter().zip(&shares);
    let loaded = loaded.map(|(gpu, share)| Loaded::new(gpu, share, tensors));
    Some(ranks.into_iter().zip(loaded).collect())
}

/// Where ranks share a GPU, a merge that waits may take the room of the attention that it waits for.
fn settle(ranks: &[(Rank, Loaded)], gpus: &[Gpu]) {
    if ranks.len() > gpus.len() {
        for (_, loaded) in ranks {
            loaded.stream.synchronize().expect("the work is done");
        }
    }
}

fn close(
    case: &Case,
    right: &reference::Output,
    got: &(Vec<bf16>, Vec<f32>),
) -> Result<(), String> {
    let heads = case.spec.q_heads as usize;
    let tokens = case.batch.total_q() as usize;
    let shape = [tokens, heads, case.spec.head_dim_v as usize];
    // The results of ranks were rounded before they were merged.
    let tolerance = Tolerance {
        absolute: 1.0 / 128.0,
        relative: 1.0 / 100.0,
    };
    compare("out", &shape, &to_f64(&got.0), &right.out, tolerance)?;
    let tolerance = Tolerance {
        absolute: 1e-3,
        relative: 1e-4,
    };
    compare("lse", &shape[..2], &to_f64(&got.1), &right.lse, tolerance)
}

fn random(case: &Case) -> (Tensors<bf16, bf16>, reference::Output) {
    let tensors = Tensors::random(&case.spec, &case.batch, KvLayout::Nhd, case.seed);
    let sinks = sinks(&case.spec);
    let right = reference::attention_heads(
        &case.spec,
        &case.batch,
        &tensors.q,
        &tensors.views(),
        &of_heads(&sinks),
    );
    (tensors, right.expect("the tensors fit the batch"))
}

proptest! {
    #![proptest_config(cases(12))]

    /// Attention of all ranks, then what each signals, then the merges: one thread, and as few GPUs as there are.
    #[test]
    fn merged_ranks_are_the_reference(case in case()) {
        let _alone = alone();
        let gpus = gpus("merged_ranks_are_the_reference");
        if gpus.is_empty() || case.batch.total_q() == 0 {
            return Ok(());
        }
        let (tensors, right) = random(&case);
        let Some(mut ranks) = load(gpus, &case, &tensors) else { return Ok(()) };
        let mut first: Option<Vec<_>> = None;
        for _ in 0..3 {
            for (rank, loaded) in &mut ranks {
                let (stream, tokens) = (*loaded.stream, loaded.tokens);
                rank.announce(tokens).unwrap();
                // SAFETY: all memory lives until the streams were waited for.
                loaded.with(|gpu, workspace, tensors| unsafe {
                    let state = rank.results(tokens)?;
                    let own = into(tensors, &state);
                    gpu.run_with(workspace, &own, stream)?;
                    rank.signal(gpu, stream)
                }).unwrap();
            }
            settle(&ranks, gpus);
            for (rank, loaded) in &mut ranks {
                let (stream, tokens) = (*loaded.stream, loaded.tokens);
                // SAFETY: as above.
                loaded.with(|gpu, _, tensors| unsafe {
                    rank.merge(gpu, 0..tokens, tensors.out, tensors.lse, stream)
                }).unwrap();
            }
            let results: Vec<_> = ranks.iter().map(|(rank, loaded)| {
                let results = loaded.results();
                rank.check().unwrap();
                results
            }).collect();
            for got in &results {
                close(&case, &right, got).map_err(TestCaseError::fail)?;
                prop_assert!(got == &results[0], "ranks have other bits");
            }
            match &first {
                None => first = Some(results),
                Some(first) => prop_assert!(first == &results, "a run has other bits"),
            }
        }
    }
}

/// Some of each: decodes, short queries and a prompt.
fn plain(ranks: u32) -> Case {
    let requests = [
        (900, 0, 1),
        (4000, 2, 1),
        (33, 0, 5),
        (700, 1, 300),
        (17, 0, 1),
    ];
    Case {
        spec: Spec::new(8, 2, 128),
        batch: prefixed(&requests, 16, false, 5),
        sharding: Sharding::one().over_keys(ranks, Keys::RoundRobin { pages: 4 }),
        seed: 5,
    }
}

#[test]
fn threads_and_graphs_give_the_same_bits() {
    let _alone = alone();
    let Some(_) = two_gpus("threads_and_graphs_give_the_same_bits") else {
        return;
    };
    let gpus = gpus("threads_and_graphs_give_the_same_bits");
    let case = plain(gpus.len().min(8) as u32);
    let (tensors, right) = random(&case);
    let ranks = load(gpus, &case, &tensors).unwrap();
    let rounds = 10_000;
    let run = |(mut rank, mut loaded): (Rank, Loaded)| {
        let (stream, tokens, gpu) = (*loaded.stream, loaded.tokens, loaded.gpu);
        rank.announce(tokens).unwrap();
        // SAFETY: all memory lives until the streams were waited for.
        let layer = |rank: &mut Rank, loaded: &mut Loaded, stream| {
            loaded.with(|gpu, workspace, tensors| unsafe {
                rank.run(gpu, workspace, tensors, 0..tokens, stream)
            })
        };
        for _ in 0..3 {
            layer(&mut rank, &mut loaded, stream).unwrap();
        }
        let eager = loaded.results();
        rank.check().unwrap();
        let own = gpu.stream().unwrap();
        let captured = |rank: &mut Rank, loaded: &mut Loaded, layers: usize| {
            let work =
                |rank: &mut Rank, stream| (0..layers).try_for_each(|_| layer(rank, loaded, stream));
            rank.capture(gpu, &own, work).unwrap()
        };
        let graphs = [1, 2, 3].map(|layers| captured(&mut rank, &mut loaded, layers));
        for round in 0..rounds {
            // SAFETY: as above.
            unsafe { graphs[round % 3].launch(*own) }.unwrap();
        }
        own.synchronize().unwrap();
        rank.check().unwrap();
        assert!(loaded.results() == eager, "graphs have other bits");
        eager
    };
    let results: Vec<_> = std::thread::scope(|threads| {
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|rank| threads.spawn(|| run(rank)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    for got in &results {
        close(&case, &right, got).unwrap();
        assert!(got == &results[0], "ranks have other bits");
    }
}

#[test]
fn nccl_gives_the_bits_of_direct_reads() {
    let _alone = alone();
    let Some(_) = two_gpus("nccl_gives_the_bits_of_direct_reads") else {
        return;
    };
    let gpus = gpus("nccl_gives_the_bits_of_direct_reads");
    let id = match NcclId::new() {
        Ok(id) => id,
        Err(missing @ Error::Rank(RankError::NoNccl { .. })) => {
            eprintln!("skipped: {missing}");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let case = plain(2);
    let (tensors, right) = random(&case);
    let ranks = load(&gpus[..2], &case, &tensors).unwrap();
    let options = RankOptions::default().with_timeout(Duration::from_secs(20));
    let run = |(mut rank, mut loaded): (Rank, Loaded)| {
        let (stream, tokens, gpu) = (*loaded.stream, loaded.tokens, loaded.gpu);
        let place = [rank.number(), 2];
        let mut nccl = gpu
            .nccl_rank(&id, place, &case.spec, tokens, &options)
            .unwrap();
        rank.announce(tokens).unwrap();
        nccl.announce(tokens).unwrap();
        // SAFETY: all memory lives until the stream was waited for.
        let ran = loaded.with(|gpu, workspace, tensors| unsafe {
            rank.run(gpu, workspace, tensors, 0..tokens, stream)
        });
        ran.unwrap();
        let direct = loaded.results();
        rank.check().unwrap();
        for _ in 0..20 {
            // SAFETY: as above.
            let ran = loaded.with(|gpu, workspace, tensors| unsafe {
                nccl.run(gpu, workspace, tensors, 0..tokens, stream)
            });
            ran.unwrap();
        }
        // SAFETY: the stream lives.
        unsafe { nccl.wait(stream) }.unwrap();
        assert!(loaded.results() == direct, "NCCL has other bits");
        // One rank has another size: both hear of it, before anything runs.
        let said = nccl.announce(tokens - place[0] as usize).unwrap_err();
        assert!(
            matches!(said, Error::Rank(RankError::Disagree { .. })),
            "{said}"
        );
        direct
    };
    let results: Vec<_> = std::thread::scope(|threads| {
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|rank| threads.spawn(|| run(rank)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    close(&case, &right, &results[0]).unwrap();
}

#[test]
fn nccl_without_its_other_rank_is_an_error_in_time() {
    let _alone = alone();
    let gpus = gpus("nccl_without_its_other_rank_is_an_error_in_time");
    let (Some(gpu), Ok(id)) = (gpus.first(), NcclId::new()) else {
        return;
    };
    let options = RankOptions::default().with_start(Duration::from_millis(300));
    let begin = Instant::now();
    let said = gpu
        .nccl_rank(&id, [0, 2], &Spec::new(8, 2, 128), 4, &options)
        .unwrap_err();
    assert!(
        matches!(said, Error::Rank(RankError::Collective { rank: 0, .. })),
        "{said}"
    );
    assert!(
        begin.elapsed() < Duration::from_secs(10),
        "{:?}",
        begin.elapsed()
    );
}

/// Where the library is missing the error says which file was tried.
#[test]
fn missing_nccl_is_named() {
    if let Err(error) = NcclId::new() {
        let said = error.to_string();
        assert!(
            matches!(error, Error::Rank(RankError::NoNccl { .. })),
            "{said}"
        );
        assert!(said.contains("libnccl"), "{said}");
    }
}

#[test]
fn a_thread_without_a_context_runs_on_any_gpu() {
    let _alone = alone();
    for gpu in gpus("a_thread_without_a_context_runs_on_any_gpu") {
        let case = plain(1);
        let (tensors, right) = random(&case);
        let mut shares = case.sharding.shares(&case.spec, &case.batch).unwrap();
        let mut loaded = Loaded::new(gpu, &shares.remove(0), &tensors);
        let got = std::thread::scope(|threads| {
            let run = || {
                let stream = *loaded.stream;
                // SAFETY: all memory lives until the stream was waited for.
                let ran = loaded.with(|gpu, workspace, tensors| unsafe {
                    gpu.run_with(workspace, tensors, stream)
                });
                ran.unwrap();
                loaded.results()
            };
            threads.spawn(run).join().unwrap()
        });
        close(&case, &right, &got).unwrap();
    }
}

#[test]
fn each_rank_may_merge_rows_of_its_own() {
    let _alone = alone();
    let gpus = gpus("each_rank_may_merge_rows_of_its_own");
    if gpus.is_empty() {
        return;
    }
    let case = plain(2);
    let (tensors, right) = random(&case);
    let mut ranks = load(gpus, &case, &tensors).unwrap();
    let row = (case.spec.q_heads * case.spec.head_dim_v) as usize;
    let half = case.batch.total_q() as usize / 2;
    for (rank, loaded) in &mut ranks {
        let (stream, tokens) = (*loaded.stream, loaded.tokens);
        rank.announce(tokens).unwrap();
        // SAFETY: all memory lives until the streams were waited for.
        let ran = loaded.with(|gpu, workspace, tensors| unsafe {
            let state = rank.results(tokens)?;
            let own = into(tensors, &state);
            gpu.run_with(workspace, &own, stream)?;
            rank.signal(gpu, stream)
        });
        ran.unwrap();
    }
    settle(&ranks, gpus);
    let mut whole = (Vec::new(), Vec::new());
    for (index, (rank, loaded)) in ranks.iter_mut().enumerate() {
        let (stream, tokens) = (*loaded.stream, loaded.tokens);
        let rows = [0..half, half..tokens][index].clone();
        // SAFETY: as above.
        let merged = loaded.with(|gpu, _, tensors| unsafe {
            rank.merge(gpu, rows.clone(), tensors.out, tensors.lse, stream)
        });
        merged.unwrap();
        let (out, lse) = loaded.results();
        let (first, last) = (rows.start, rows.end);
        let outside = (0..tokens).filter(|token| !rows.contains(token));
        assert!(
            outside.into_iter().all(|token| out[token * row].is_nan()),
            "rows of others"
        );
        whole.0.extend_from_slice(&out[first * row..last * row]);
        let heads = case.spec.q_heads as usize;
        whole.1.extend_from_slice(&lse[first * heads..last * heads]);
    }
    close(&case, &right, &whole).unwrap();
}

/// The error of a run of all tokens that launches nothing.
fn refused_run(rank: &mut Rank, loaded: &mut Loaded) -> Error {
    let (tokens, stream) = (loaded.tokens, *loaded.stream);
    // SAFETY: nothing is launched.
    let ran = loaded.with(|gpu, workspace, tensors| unsafe {
        rank.run(gpu, workspace, tensors, 0..tokens, stream)
    });
    ran.unwrap_err()
}

#[test]
fn sizes_that_differ_are_refused_on_all_ranks() {
    let _alone = alone();
    let gpus = gpus("sizes_that_differ_are_refused_on_all_ranks");
    if gpus.is_empty() {
        return;
    }
    let case = plain(2);
    let (tensors, _) = random(&case);
    let mut ranks = load(gpus, &case, &tensors).unwrap();
    let tokens = ranks[0].1.tokens;
    let (rank, loaded) = &mut ranks[0];
    let error = refused_run(rank, loaded);
    assert!(
        matches!(error, Error::Rank(RankError::NotAnnounced { .. })),
        "{error}"
    );
    assert!(matches!(
        rank.announce(tokens + 1),
        Err(Error::Extent { .. })
    ));
    // The memory ends there.
    let behind = rank.results(tokens + 1);
    assert!(matches!(behind, Err(Error::Extent { .. })));
    assert!(rank.results(tokens).is_ok());
    ranks[0].0.announce(tokens).unwrap();
    ranks[1].0.announce(tokens - 1).unwrap();
    for (index, (rank, loaded)) in ranks.iter_mut().enumerate() {
        let error = refused_run(rank, loaded);
        let disagrees = matches!(error, Error::Rank(RankError::Disagree { .. }));
        let unannounced = matches!(error, Error::Rank(RankError::NotAnnounced { .. }));
        assert!([disagrees, unannounced][index], "{error}");
        assert!(
            loaded.results().0.iter().all(|x| x.is_nan()),
            "something was launched"
        );
    }
}

#[test]
fn a_rank_that_announced_nothing_ends_the_wait_of_the_others() {
    let _alone = alone();
    let gpus = gpus("a_rank_that_announced_nothing_ends_the_wait_of_the_others");
    if gpus.is_empty() {
        return;
    }
    let case = plain(2);
    let (tensors, _) = random(&case);
    let mut ranks = load(gpus, &case, &tensors).unwrap();
    let tokens = ranks[0].1.tokens;
    ranks[1].0.announce(tokens).unwrap();
    let begin = Instant::now();
    let errors = [0, 1].map(|index| {
        let (rank, loaded) = &mut ranks[index];
        refused_run(rank, loaded)
    });
    let [
        Error::Rank(RankError::NotAnnounced { rank: 0, .. }),
        Error::Rank(failed),
    ] = &errors
    else {
        panic!("{errors:?}");
    };
    assert!(
        matches!(
            failed,
            RankError::Failed {
                rank: 1,
                failed: 0,
                ..
            }
        ),
        "{failed}"
    );
    assert!(
        begin.elapsed() < RankOptions::default().timeout,
        "it waited"
    );
}

#[test]
fn a_rank_that_does_not_come_is_an_error_in_time() {
    let _alone = alone();
    let gpus = gpus("a_rank_that_does_not_come_is_an_error_in_time");
    let Some(gpu) = gpus.first() else { return };
    let spec = Spec::new(8, 2, 128);
    // The emulated GPU counts instructions, and takes its time.
    let emulated = gpu.name().starts_with("Emulated");
    let waited_ms = if emulated { 1 } else { 100 };
    let options = RankOptions::default().with_timeout(Duration::from_millis(waited_ms));
    let stream = gpu.stream().unwrap();
    // It is never launched.
    let mut ranks = Gpu::ranks(&[gpu, gpu], &spec, 4, &options).unwrap();
    let begin = Instant::now();
    // SAFETY: the stream lives, here and below.
    unsafe { ranks[0].barrier(gpu, *stream) }.unwrap();
    // What comes behind does not wait again.
    for _ in 0..50 {
        unsafe { ranks[0].barrier(gpu, *stream) }.unwrap();
    }
    stream.synchronize().unwrap();
    let late = Error::Rank(RankError::Late {
        rank: 0,
        missing: 1,
        waited_ms,
    });
    assert_eq!(ranks[0].check(), Err(late));
    assert!(
        emulated || begin.elapsed() < Duration::from_secs(1),
        "{:?}",
        begin.elapsed()
    );

    // It never announces.
    let mut ranks = Gpu::ranks(&[gpu, gpu], &spec, 4, &options).unwrap();
    ranks[0].announce(4).unwrap();
    let buffer = DeviceBuffer::<bf16>::zeroed(gpu, 4 * 8 * 128).unwrap();
    let out = buffer.tensor([4, 8, 128]);
    // SAFETY: nothing is launched.
    let said = unsafe { ranks[0].merge(gpu, 0..4, &out, None, *stream) }.unwrap_err();
    assert!(
        matches!(said, Error::Rank(RankError::Silent { missing: 1, .. })),
        "{said}"
    );
}

#[test]
fn a_rank_that_fails_ends_the_wait_of_the_others() {
    let _alone = alone();
    let gpus = gpus("a_rank_that_fails_ends_the_wait_of_the_others");
    let Some(gpu) = gpus.first() else { return };
    if gpu.name().starts_with("Emulated") {
        eprintln!("skipped: launches of the emulated GPU end before the host goes on");
        return;
    }
    let options = RankOptions::default().with_timeout(Duration::from_secs(20));
    let mut ranks = Gpu::ranks(&[gpu, gpu], &Spec::new(8, 2, 128), 4, &options).unwrap();
    let stream = gpu.stream().unwrap();
    let begin = Instant::now();
    // SAFETY: the stream lives.
    unsafe { ranks[0].barrier(gpu, *stream) }.unwrap();
    ranks[1].stop("out of pages");
    stream.synchronize().unwrap();
    let said = ranks[0].check().unwrap_err();
    assert!(
        said.to_string().contains("rank 1 failed (out of pages)"),
        "{said}"
    );
    assert!(
        begin.elapsed() < Duration::from_secs(1),
        "{:?}",
        begin.elapsed()
    );
}

#[test]
fn groups_that_cannot_be_are_refused() {
    let _alone = alone();
    let gpus = gpus("groups_that_cannot_be_are_refused");
    let Some(gpu) = gpus.first() else { return };
    let (spec, options) = (Spec::new(8, 2, 128), RankOptions::default());
    let refused = |gpus: &[&Gpu], spec: &Spec| Gpu::ranks(gpus, spec, 4, &options).unwrap_err();
    let error = refused(&[], &spec);
    assert!(
        matches!(error, Error::Rank(RankError::Group { got: 0, .. })),
        "{error}"
    );
    let error = refused(&[gpu; 9], &spec);
    assert!(
        matches!(error, Error::Rank(RankError::Group { got: 9, .. })),
        "{error}"
    );
    let mut wide = spec;
    wide.out_dtype = tandem_attn::problem::Dtype::F32;
    let error = refused(&[gpu; 2], &wide);
    assert!(matches!(error, Error::Dtype { .. }), "{error}");
    // Their LSEs are 0: a merge would be the mean.
    let sums = spec.with_hooks(&variants::SIGMOID);
    let error = refused(&[gpu; 2], &sums);
    assert!(
        matches!(error, Error::Shard(ShardError::NoSoftmax { keys: 2 })),
        "{error}"
    );
    assert!(Gpu::ranks(&[gpu], &sums, 4, &options).is_ok());
}

#[test]
fn a_capture_that_fails_changes_no_buffer() {
    let _alone = alone();
    let gpus = gpus("a_capture_that_fails_changes_no_buffer");
    let Some(gpu) = gpus.first() else { return };
    let case = plain(1);
    let (tensors, right) = random(&case);
    let mut ranks = load(&gpus[..1], &case, &tensors).unwrap();
    let (rank, loaded) = &mut ranks[0];
    let tokens = loaded.tokens;
    rank.announce(tokens).unwrap();
    let before = rank.results(tokens).unwrap();
    let stream = gpu.stream().unwrap();
    let failed = rank.capture(gpu, &stream, |rank, stream| {
        // SAFETY: all memory lives until the stream was waited for; this graph is never launched.
        loaded.with(|gpu, workspace, tensors| unsafe {
            rank.run(gpu, workspace, tensors, 0..tokens, stream)
        })?;
        Err(RankError::NotAnnounced {
            rank: 0,
            tokens: 0,
            announced: 1,
        }
        .into())
    });
    assert!(matches!(
        failed,
        Err(Error::Rank(RankError::NotAnnounced { announced: 1, .. }))
    ));
    let after = rank.results(tokens).unwrap();
    assert_eq!(
        after.out, before.out,
        "the other ranks use the other buffer"
    );
    let own = *loaded.stream;
    // SAFETY: as above.
    let ran = loaded.with(|gpu, workspace, tensors| unsafe {
        rank.run(gpu, workspace, tensors, 0..tokens, own)
    });
    ran.unwrap();
    loaded.stream.synchronize().unwrap();
    rank.check().unwrap();
    close(&case, &right, &loaded.results()).unwrap();
}
