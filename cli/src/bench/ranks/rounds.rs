//! Runs all ranks concurrently, one thread each.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Instant,
};

use half::bf16;
use tandem_attn::{
    Error,
    exec::gpu::{
        DeviceBuffer, DeviceTensor, Gpu, NcclId, Rank, RunTensors, Stream, WorkspaceOptions,
    },
    plan::{Bound, Plan},
    problem::{Dtype, Spec},
    shard::Share,
};

use super::{
    super::Stats,
    device::{Device, Pools},
    gate::{Gate, all},
    groups::{patience, place, ranks_of_groups},
};
use crate::{
    Failure,
    backend::{Event, ok},
};

/// Minimum and maximum number of runs; their median is then steady.
const RUNS: [usize; 2] = [11, 300];

/// Layers of a captured graph, and the maximum number of its launches.
const LAYERS: usize = 8;
const LAUNCHES: usize = 31;

pub(super) struct Settings {
    pub(super) seconds: f64,
    /// Whether every rank merges all tokens, or each only its part.
    pub(super) merge_all: bool,
}

/// How the ranks exchange results.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// Without an exchange.
    Alone,
    Direct,
    Nccl,
}

/// Measurements of a sharding.
pub(super) struct Measured {
    pub(super) ranks: u32,
    pub(super) times: Stats,
    /// Time of the exchange with direct reads, and with NCCL if it is available.
    pub(super) exchange_us: [Option<f64>; 2],
    q_heads: usize,
    dim: usize,
    /// For each rank: the tokens that it has merged, its first head, its number of heads, and the results.
    outs: Vec<(Vec<u32>, usize, usize, Vec<bf16>)>,
}

impl Measured {
    /// Difference of the results from those of one GPU.
    pub(super) fn error(&self, one: &Self) -> f64 {
        let whole = &one.outs[0].3;
        let (mut difference, mut size) = (0.0, 0.0);
        for (tokens, first, heads, out) in &self.outs {
            let row = heads * self.dim;
            for (got, token) in out.chunks_exact(row).zip(tokens) {
                let at = (*token as usize * self.q_heads + first) * self.dim;
                for (got, right) in got.iter().zip(&whole[at..at + row]) {
                    let (got, right) = (f64::from(got.to_f32()), f64::from(right.to_f32()));
                    difference += (got - right) * (got - right);
                    size += right * right;
                }
            }
        }
        (difference / size).sqrt()
    }
}

/// State of a rank's thread.
struct Runner<'a> {
    device: &'a Device,
    rank: Rank,
    share: &'a Share,
    plan: &'a Plan,
    pools: &'a Pools,
    spec: &'a Spec,
    settings: &'a Settings,
    nccl: Option<NcclId>,
}

/// Results of a rank.
struct Found {
    times: Vec<f64>,
    /// Times of graphs without an exchange, with direct reads, and with NCCL.
    graphs: [Option<f64>; 3],
    out: (Vec<u32>, usize, usize, Vec<bf16>),
}

pub(super) fn measure(
    devices: &[Device],
    pools: &[Pools],
    spec: &Spec,
    work: &[(Share, Plan)],
    settings: &Settings,
) -> Result<Measured, Failure> {
    let gpus: Vec<&Gpu> = devices.iter().map(|device| &device.gpu).collect();
    let tokens = work
        .iter()
        .map(|(_, plan)| plan.total_q as usize)
        .max()
        .unwrap_or(0);
    let ranks = ranks_of_groups(&gpus, work, tokens)?;
    let runs = AtomicUsize::new(0);
    let together = Gate::new(work.len());
    let runners = ranks.into_iter().zip(devices).zip(pools).zip(work);
    let runners = runners.map(|((((rank, nccl), device), pools), (share, plan))| Runner {
        device,
        rank,
        share,
        plan,
        pools,
        spec,
        settings,
        nccl,
    });
    let found: Vec<Result<Found, Failure>> = std::thread::scope(|scope| {
        let threads: Vec<_> = runners
            .map(|mut runner| {
                let (together, runs) = (&together, &runs);
                scope.spawn(move || {
                    let _passing = together.enter();
                    let found = runner.run(together, runs);
                    if let Err(failure) = &found {
                        together.fail();
                        runner.rank.stop(&failure.to_string());
                    }
                    found
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(Failure::Wrong("a rank panicked".into())))
            })
            .collect()
    });
    let found = all(found)?;
    let slowest = |run: usize| {
        found
            .iter()
            .map(|found| found.times[run])
            .fold(0.0, f64::max)
    };
    let exchange = |how: usize| {
        let of = |found: &Found| Some((found.graphs[how]? - found.graphs[0]?) / LAYERS as f64);
        found.iter().filter_map(of).reduce(f64::max)
    };
    let exchange_us = [exchange(1), exchange(2)];
    Ok(Measured {
        ranks: work.len() as u32,
        times: Stats::of((0..found[0].times.len()).map(slowest).collect()),
        exchange_us,
        q_heads: spec.q_heads as usize,
        dim: spec.head_dim_v as usize,
        outs: found.into_iter().map(|found| found.out).collect(),
    })
}

impl Runner<'_> {
    /// # Errors
    /// If this rank or another one fails.
    fn run(&mut self, together: &Gate, runs: &AtomicUsize) -> Result<Found, Failure> {
        let Device { gpu, stream, .. } = self.device;
        gpu.make_current()?;
        let (share, stream) = (self.share, **stream);
        let tokens = self.plan.total_q as usize;
        let own = &share.spec;
        let mut workspace =
            gpu.workspace(own, &Bound::of(self.plan), WorkspaceOptions::default())?;
        // SAFETY: we own the stream.
        unsafe { workspace.upload(self.plan, stream) }?;
        let all_heads = self.spec.q_heads as usize;
        let dim = own.head_dim_qk as usize;
        let row = all_heads * dim;
        // The rank's own queries, gathered.
        let gathered = DeviceBuffer::<bf16>::zeroed(gpu, tokens * row)?;
        let mut at = 0;
        for run in &share.tokens {
            let (from, bytes) = (run.start as usize * row, run.len() * row * 2);
            let (to, from) = (
                gathered.address() + 2 * at as u64,
                self.pools.q.address() + 2 * from as u64,
            );
            // SAFETY: both ranges are in their buffers.
            let code = unsafe { libcuda::cuMemcpyDtoDAsync(to, from, bytes, stream) };
            ok("cuMemcpyDtoDAsync", code)?;
            at += run.len() * row;
        }
        let heads = own.q_heads as usize;
        let skipped = 2 * (share.q_heads.start as usize * dim) as u64;
        let q = DeviceTensor::new(
            gathered.address() + skipped,
            Dtype::BF16,
            [tokens, heads, dim],
        )
        .with_stride(0, row);
        let result = DeviceBuffer::<bf16>::zeroed(gpu, tokens * heads * dim)?;
        let out = result.tensor([tokens, heads, dim]);
        let pools = [self.pools.of(share)];
        let tensors = RunTensors::new(&q, &pools, &out);
        let exchanges = share.group.len() > 1;
        let rows = match self.settings.merge_all || !exchanges {
            true => 0..tokens,
            false => {
                let [index, of] = place(share).map(|number| number as usize);
                tokens * index / of..tokens * (index + 1) / of
            }
        };
        self.rank.announce(tokens)?;
        let mut nccl = match &self.nccl {
            None => None,
            Some(id) => {
                let mut nccl = gpu.nccl_rank(id, place(share), own, tokens, &patience())?;
                nccl.announce(tokens)?;
                Some(nccl)
            }
        };
        let with_nccl = nccl.is_some();
        let mut layer = |rank: &mut Rank, stream: Stream, how: How| -> Result<(), Error> {
            // SAFETY: all memory lives until the stream is done, and the plan comes from the planner.
            unsafe {
                match (how, &mut nccl) {
                    _ if !exchanges => gpu.run_with(&mut workspace, &tensors, stream),
                    (How::Nccl, Some(nccl)) => {
                        nccl.run(gpu, &mut workspace, &tensors, rows.clone(), stream)
                    }
                    (How::Alone, _) => {
                        let state = rank.results(tokens)?;
                        let own = RunTensors::new(&q, &pools, &state.out).with_lse(&state.lse);
                        gpu.run_with(&mut workspace, &own, stream)
                    }
                    _ => rank.run(gpu, &mut workspace, &tensors, rows.clone(), stream),
                }
            }
        };
        let [begin, end] = [Event::new()?, Event::new()?];
        let timed = |rank: &mut Rank,
                     work: &mut dyn FnMut(&mut Rank) -> Result<(), Error>|
         -> Result<f64, Failure> {
            // SAFETY: the stream is the device's and lives.
            unsafe { rank.barrier(gpu, stream) }?;
            begin.record(stream)?;
            work(rank)?;
            end.record(stream)?;
            self.device.stream.synchronize()?;
            begin.microseconds_to(&end)
        };
        // Two runs are not counted: the first loads kernels. Their mean time decides how many runs fit.
        let mut times = Vec::new();
        let started = Instant::now();
        for run in 0.. {
            if run == 2 {
                let each = started.elapsed().as_secs_f64() / 2.0;
                runs.fetch_max(
                    ((self.settings.seconds / each) as usize).clamp(RUNS[0], RUNS[1]),
                    Ordering::SeqCst,
                );
            }
            together.wait()?;
            if run > 2 && run >= runs.load(Ordering::SeqCst) {
                break;
            }
            self.device.flush()?;
            let time = timed(&mut self.rank, &mut |rank| layer(rank, stream, How::Direct))?;
            if run >= 2 {
                times.push(time);
            }
        }
        self.rank.check()?;
        let whole: Vec<u32> = share.whole_tokens().collect();
        let merged = result.read()?[rows.start * heads * dim..rows.end * heads * dim].to_vec();
        // The same number on all ranks, and few launches if runs are long.
        let launches = times.len().min(LAUNCHES);
        let mut graphs = [None; 3];
        let ways = [How::Alone, How::Direct, How::Nccl];
        for (found, how) in graphs.iter_mut().zip(ways) {
            if !exchanges || how == How::Nccl && !with_nccl {
                continue;
            }
            let work = |rank: &mut Rank, stream: Stream| {
                (0..LAYERS).try_for_each(|_| layer(rank, stream, how))
            };
            let graph = self.rank.capture(gpu, &self.device.stream, work)?;
            let mut times = Vec::new();
            for _ in 0..launches {
                together.wait()?;
                // SAFETY: as above.
                times.push(timed(&mut self.rank, &mut |_| unsafe {
                    graph.launch(stream)
                })?);
                // SAFETY: as above.
                unsafe { self.rank.settle(gpu, stream) }?;
            }
            *found = Some(Stats::of(times).median_us);
        }
        self.device.stream.synchronize()?;
        self.rank.check()?;
        Ok(Found {
            times,
            graphs,
            out: (
                whole[rows].to_vec(),
                share.q_heads.start as usize,
                heads,
                merged,
            ),
        })
    }
}
