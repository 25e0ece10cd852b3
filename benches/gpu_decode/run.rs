//! Steps on the GPU and their times.
// Each program uses its own part of this.
#![allow(dead_code)]

use std::{cell::RefCell, ffi::c_void, ptr, time::Duration};

use cust::sys;
use half::f16;
use tandem_attn::{
    exec::gpu::{DeviceTensor, Gpu, KvPool, Stream as Handle, Workspace, WorkspaceOptions},
    plan::{Bound, DeviceDescription, Kernel, Plan, PlanOptions, Planner},
    problem::{Batch, Dtype, KvLayout, PageTable, Part, Spec},
};

use super::common::{Memory, Rng, Stream, encode};

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// Memory for any pool of pages, keys and values.
pub struct Pool {
    k: Memory,
    v: Memory,
    bytes: usize,
}

impl Pool {
    /// Of so many bytes each, full of random numbers.
    pub fn random(bytes: usize, dtype: Dtype) -> Self {
        let block = encode(dtype, &Rng(7).floats(32 << 20, -1.0, 1.0));
        let (block, at_once) = (Memory::new(&block), block.len());
        let [k, v] = [(); 2].map(|()| Memory::of_bytes(bytes));
        for target in [&k, &v] {
            for at in (0..bytes).step_by(at_once) {
                let count = at_once.min(bytes - at);
                // SAFETY: inside both.
                ok(unsafe {
                    sys::cuMemcpyDtoD_v2(target.address() + at as u64, block.address(), count)
                });
            }
        }
        Self { k, v, bytes }
    }

    pub const fn bytes(&self) -> usize {
        2 * self.bytes
    }

    /// The pages of a layer, for each part of a batch. Layers follow one another in memory.
    pub fn of_layer(
        &self,
        spec: &Spec,
        batch: &Batch,
        layout: KvLayout,
        layer: u64,
    ) -> Vec<KvPool> {
        let of_part = |part: &Part| {
            let PageTable {
                page_size,
                pool_pages,
                ..
            } = part.table;
            let row = spec.kv_heads * spec.head_dim_qk * spec.kv_dtype.bytes();
            let bytes = u64::from(page_size * row) * u64::from(pool_pages);
            assert!(
                (layer + 1) * bytes <= self.bytes as u64,
                "the pool is too small"
            );
            let [k, v] = [&self.k, &self.v].map(|memory| memory.address() + layer * bytes);
            KvPool::new(spec, layout, page_size, pool_pages, k, v)
        };
        batch.parts.iter().map(of_part).collect()
    }

    /// Reads so many bytes of the keys as fast as that can be done.
    pub fn read(&self, gpu: &Gpu, bytes: usize, stream: Handle) {
        assert!(bytes <= self.bytes);
        // SAFETY: inside the pool; of the values, four bytes may become others.
        unsafe { gpu.read_all(self.k.address(), bytes, self.v.address(), stream) }
            .expect("can be launched");
    }
}

/// Random queries for a plan's heads.
pub fn queries(spec: &Spec, tokens: u32) -> Memory {
    let count = tokens * spec.q_heads * spec.head_dim_qk;
    Memory::new(&encode(
        spec.q_dtype,
        &Rng(3).floats(count as usize, -1.0, 1.0),
    ))
}

/// A plan in a workspace.
pub struct Step<'a> {
    gpu: &'a Gpu,
    pub plan: Plan,
    workspace: RefCell<Workspace>,
    /// One for each part of the batch, all the same memory.
    pools: Vec<KvPool>,
    q: DeviceTensor<3>,
    out: DeviceTensor<3>,
    result: Memory,
}

fn event(timing: bool) -> sys::CUevent {
    let mut event = ptr::null_mut();
    // SAFETY: writes one handle. 2 is CU_EVENT_DISABLE_TIMING.
    ok(unsafe { sys::cuEventCreate(&mut event, if timing { 0 } else { 2 }) });
    event
}

impl<'a> Step<'a> {
    /// As planned for a device, in a workspace with the default options.
    pub fn planned(
        gpu: &'a Gpu,
        (spec, batch): (&Spec, &Batch),
        (device, options): (&DeviceDescription, &PlanOptions),
        pool: &Pool,
        q: &Memory,
        layout: KvLayout,
    ) -> Self {
        let plan = Planner::new().plan(spec, batch, device, options);
        let plan = plan.expect("can be planned");
        let options = WorkspaceOptions::default();
        Self::new(gpu, plan, batch, pool, q, layout, options)
    }

    pub fn new(
        gpu: &'a Gpu,
        plan: Plan,
        batch: &Batch,
        pool: &Pool,
        q: &Memory,
        layout: KvLayout,
        options: WorkspaceOptions,
    ) -> Self {
        let spec = &plan.spec;
        let shape = [plan.total_q, spec.q_heads, spec.head_dim_v].map(|x| x as usize);
        let pools = pool.of_layer(spec, batch, layout, 0);
        let result = Memory::new(&vec![f16::NAN; shape.iter().product()]);
        // With a launch set, graphs have the merging kernel only if the bound has room for a merge.
        let bound = Bound::of(&plan);
        let bound = Bound {
            merges: bound.merges.max(1),
            slots: bound.slots.max(1),
            ..bound
        };
        let mut workspace = gpu
            .workspace(spec, &bound, options)
            .expect("there is memory");
        let stream = Stream::new();
        // SAFETY: nothing else runs.
        unsafe { workspace.upload(&plan, stream.0) }.expect("the plan fits");
        stream.wait();
        Self {
            gpu,
            workspace: workspace.into(),
            pools,
            q: q.tensor(spec.q_dtype, shape),
            out: result.tensor(spec.out_dtype, shape),
            result,
            plan,
        }
    }

    /// Leaves out the launches of its launch set that have no work.
    pub fn launch_only_needed(&self) {
        self.workspace.borrow_mut().launch_only_needed();
    }

    /// Queues everything on `stream`.
    pub fn enqueue(&self, stream: Handle) {
        self.enqueue_on(&self.pools, stream);
    }

    /// Queues everything on `stream`, with the pages of a layer.
    pub fn enqueue_on(&self, pools: &[KvPool], stream: Handle) {
        let workspace = &mut *self.workspace.borrow_mut();
        // SAFETY: everything lives until the stream was waited for.
        unsafe {
            self.gpu
                .run(workspace, &self.q, pools, &self.out, None, stream)
                .expect("the run is right");
        }
    }

    /// Runs it once.
    pub fn run(&self) {
        let stream = Stream::new();
        self.enqueue(stream.0);
        stream.wait();
    }

    pub fn output(&self) -> Vec<f16> {
        self.result.read()
    }

    /// Fills the output with NaN.
    pub fn clear(&self) {
        let [tokens, heads, dim] = self.out.shape;
        self.result
            .write_at(0, &vec![f16::NAN; tokens * heads * dim]);
    }
}

/// What a step launches: rows × units of each group, states, bytes.
pub fn launches(step: &Step<'_>) -> String {
    let plan = &step.plan;
    let groups = plan.groups.iter().map(|group| {
        let joint = plan.items_of(group).iter().any(|item| item.is_joint());
        let joint = if joint { " joint" } else { "" };
        let kernel = match group.kernel {
            Kernel::Prefill => "prefill ",
            _ => "",
        };
        format!("{kernel}{} × {}{joint}", group.tile.m, plan.units_of(group))
    });
    let groups: Vec<String> = groups.collect();
    let megabytes = plan.traffic().bytes() as f64 / 1e6;
    format!("{} s{} {megabytes:.0} MB", groups.join(" + "), plan.slots)
}

/// The largest difference; NaN where one is.
pub fn difference(a: &[f16], b: &[f16]) -> f32 {
    a.iter().zip(b).fold(0.0, |most: f32, (a, b)| {
        let apart = (a.to_f32() - b.to_f32()).abs();
        if apart.is_nan() {
            f32::INFINITY
        } else {
            most.max(apart)
        }
    })
}

/// A stream, two events and something to flush the L2 cache with.
pub struct Timer {
    stream: Stream,
    begin: sys::CUevent,
    end: sys::CUevent,
    order: sys::CUevent,
    flush: Memory,
}

const FLUSH: usize = 512 << 20;

/// Medians of so many times of each way, the ways in turn; the first rounds do not count.
fn in_turn<W: Copy>(
    ways: &[W],
    uncounted: usize,
    times: usize,
    time: impl Fn(W) -> f64,
) -> Vec<f64> {
    let mut all = vec![Vec::new(); ways.len()];
    for round in 0..uncounted + times {
        for (way, times) in ways.iter().zip(&mut all) {
            let time = time(*way);
            if round >= uncounted {
                times.push(time);
            }
        }
    }
    all.into_iter().map(middle).collect()
}

fn middle(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

impl Timer {
    pub fn new() -> Self {
        Self {
            stream: Stream::new(),
            begin: event(true),
            end: event(true),
            order: event(false),
            flush: Memory::of_bytes(FLUSH),
        }
    }

    /// Microseconds of what `enqueue` queues, behind a flush.
    fn once(&self, flush: bool, enqueue: impl FnOnce(Handle)) -> f64 {
        let mut milliseconds = 0.0;
        // SAFETY: all handles live.
        unsafe {
            if flush {
                ok(sys::cuMemsetD32Async(
                    self.flush.address(),
                    1,
                    FLUSH / 4,
                    self.stream.0.as_raw().cast(),
                ));
            }
            ok(sys::cuEventRecord(
                self.begin,
                self.stream.0.as_raw().cast(),
            ));
            enqueue(self.stream.0);
            ok(sys::cuEventRecord(self.end, self.stream.0.as_raw().cast()));
            ok(sys::cuEventSynchronize(self.end));
            ok(sys::cuEventElapsedTime(
                &mut milliseconds,
                self.begin,
                self.end,
            ));
        }
        f64::from(milliseconds) * 1e3
    }

    /// Medians of steps that take turns, L2 flushed.
    pub fn medians(&self, ways: &[&Step<'_>], times: usize) -> Vec<f64> {
        let steps: Vec<_> = ways
            .iter()
            .map(|step| |stream| step.enqueue(stream))
            .collect();
        let ways: Vec<&dyn Fn(Handle)> = steps.iter().map(|step| step as _).collect();
        self.medians_of(&ways, times)
    }

    /// Medians of what `ways` queue, in turn, L2 flushed. Each runs once before, uncounted: a kernel that another one
    /// drove out of the instruction caches is up to 5 µs slower, and peers are timed one after the other.
    pub fn medians_of(&self, ways: &[&dyn Fn(Handle)], times: usize) -> Vec<f64> {
        in_turn(ways, 2, times, |way| {
            way(self.stream.0);
            self.once(true, way)
        })
    }

    /// Median of what `enqueue` queues, not flushed.
    pub fn median(&self, times: usize, enqueue: &dyn Fn(Handle)) -> f64 {
        in_turn(&[enqueue], 1, times, |way| self.once(false, way))[0]
    }

    /// What comes on `other` waits for what is on `stream`.
    pub fn fork(&self, stream: Handle, other: &Stream) {
        self.after(other.0, stream);
    }

    /// What comes on `stream` waits for what is on `other`.
    pub fn join(&self, stream: Handle, other: &Stream) {
        self.after(stream, other.0);
    }

    fn after(&self, later: Handle, earlier: Handle) {
        // SAFETY: all handles live.
        unsafe {
            ok(sys::cuEventRecord(self.order, earlier.as_raw().cast()));
            ok(sys::cuStreamWaitEvent(later.as_raw().cast(), self.order, 0));
        }
    }

    /// Medians of steps that take turns, L2 full of what else was read. Each waits behind a pause, which hides the
    /// host and lets the GPU cool.
    pub fn rested_medians(&self, ways: &[&Step<'_>], times: usize) -> Vec<f64> {
        extern "C" fn pause(_: *mut c_void) {
            std::thread::sleep(Duration::from_micros(500));
        }
        in_turn(ways, 1, times, |step| {
            let other = self.flush.address();
            // SAFETY: all of it is read; nobody needs the four bytes that may be written.
            unsafe { step.gpu.read_all(other, FLUSH, other, self.stream.0) }
                .expect("can be launched");
            // SAFETY: the function touches nothing.
            ok(unsafe {
                sys::cuLaunchHostFunc(self.stream.0.as_raw().cast(), Some(pause), ptr::null_mut())
            });
            self.once(false, |stream| step.enqueue(stream))
        })
    }

    /// Median of a step behind itself: what fits L2 is there.
    pub fn warm(&self, step: &Step<'_>, times: usize) -> f64 {
        in_turn(&[step], 0, times, |step| {
            step.enqueue(self.stream.0);
            self.once(false, |stream| step.enqueue(stream))
        })[0]
    }

    /// Microseconds of a step among 40 in a graph, not flushed.
    pub fn graph(&self, step: &Step<'_>) -> f64 {
        self.graph_of(40, |_, stream| step.enqueue(stream))
    }

    /// Microseconds of a launch of each of `count` layers in a graph, not flushed.
    pub fn graph_of(&self, count: u32, enqueue: impl Fn(u32, Handle)) -> f64 {
        let (mut graph, mut executable) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: all handles live; the capture sees launches alone.
        unsafe {
            ok(sys::cuStreamBeginCapture_v2(
                self.stream.0.as_raw().cast(),
                sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
            ));
            for layer in 0..count {
                enqueue(layer, self.stream.0);
            }
            ok(sys::cuStreamEndCapture(
                self.stream.0.as_raw().cast(),
                &mut graph,
            ));
            ok(sys::cuGraphInstantiate_v2(
                &mut executable,
                graph,
                ptr::null_mut(),
                ptr::null_mut(),
                0,
            ));
            let times = (0..9)
                .map(|_| {
                    self.once(false, |stream| {
                        ok(sys::cuGraphLaunch(executable, stream.as_raw().cast()))
                    }) / f64::from(count)
                })
                .collect();
            let _ = sys::cuGraphExecDestroy(executable);
            let _ = sys::cuGraphDestroy(graph);
            middle(times)
        }
    }
}
