//! Steps on the GPU and their times.

use std::ptr;

use cust::sys;
use half::f16;
use tandem_attn::{
    exec::gpu::{
        CUstream, DecodeArrays, DecodeTile, DeviceArray, DeviceTensor, Gpu, KvPool, PartialStates,
    },
    plan::{MergeMode, Plan},
    problem::{Batch, Dtype, KvLayout},
};

use super::common::{Memory, Rng, Stream};

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
    pub fn random(bytes: usize) -> Self {
        let mut noise = Rng(7);
        let block: Vec<f16> = (0..32 << 20)
            .map(|_| f16::from_f32(noise.between(-1.0, 1.0)))
            .collect();
        let block = Memory::new(&block);
        let [k, v] = [(); 2].map(|()| Memory::of_bytes(bytes));
        for target in [&k, &v] {
            for at in (0..bytes).step_by(64 << 20) {
                let count = (64 << 20).min(bytes - at);
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
}

/// One stream after the other, or all tile groups at once.
#[derive(Clone, Copy)]
pub struct How {
    pub streams: bool,
}

/// A plan with its arrays on the GPU.
pub struct Step<'a> {
    gpu: &'a Gpu,
    pub plan: Plan,
    kv: KvPool,
    arrays: Vec<(DecodeTile, DecodeArrays)>,
    partials: PartialStates,
    merges: DeviceArray<tandem_attn::abi::MergeRow>,
    merge_slots: DeviceArray<u32>,
    q: DeviceTensor<3>,
    out: DeviceTensor<3>,
    result: Memory,
    streams: Vec<Stream>,
    events: Vec<sys::CUevent>,
    _memory: Vec<Memory>,
}

fn event(timing: bool) -> sys::CUevent {
    let mut event = ptr::null_mut();
    // SAFETY: writes one handle. 2 is CU_EVENT_DISABLE_TIMING.
    ok(unsafe { sys::cuEventCreate(&mut event, if timing { 0 } else { 2 }) });
    event
}

impl<'a> Step<'a> {
    pub fn new(gpu: &'a Gpu, plan: Plan, batch: &Batch, pool: &Pool) -> Self {
        let spec = &plan.spec;
        let [tokens, heads, dim] =
            [plan.total_q, spec.q_heads, spec.head_dim_v].map(|x| x as usize);
        let slots = plan.slots.max(1) as usize;
        let mut noise = Rng(3);
        let q: Vec<f16> = (0..tokens * heads * dim)
            .map(|_| f16::from_f32(noise.between(-1.0, 1.0)))
            .collect();
        let padded = |values: &[u32]| Memory::new(&[values, &[0; 4]].concat());
        let table = &batch.parts[0].table;
        let kv = KvPool::new(
            spec,
            KvLayout::Nhd,
            table.page_size,
            table.pool_pages,
            pool.k.address(),
            pool.v.address(),
        );
        let q_memory = Memory::new(&q);
        let result = Memory::new(&vec![f16::NAN; tokens * heads * dim]);
        let items = Memory::new(&plan.items);
        let rows = padded(bytemuck::cast_slice(&plan.rows));
        let page_ids = padded(&plan.page_ids);
        let merges = padded(bytemuck::cast_slice(&plan.merges));
        let merge_slots = padded(&plan.merge_slots);
        let partial_out = Memory::of_bytes(slots * heads * dim * 4);
        let partial_lse = Memory::of_bytes(slots * heads * 4);
        let arrivals = Memory::new(&vec![
            0_u32;
            (plan.merges.len() + 1) * spec.kv_heads as usize
        ]);
        let tickets = Memory::new(&vec![0_u32; 8 * plan.groups.len()]);
        let partials = PartialStates {
            out: partial_out.tensor(Dtype::F32, [slots, heads, dim]),
            lse: partial_lse.tensor(Dtype::F32, [slots, heads]),
        };
        let fused = plan.merge_mode == MergeMode::Fused;
        let merge_array = DeviceArray::new(merges.address(), plan.merges.len());
        let arrays = plan
            .groups
            .iter()
            .enumerate()
            .map(|(index, group)| {
                let first = items.address() + u64::from(group.items.start) * 40;
                let keys: u64 = plan
                    .items_of(group)
                    .iter()
                    .map(|item| u64::from(item.kv_len()))
                    .sum();
                let mean = keys / group.items.len() as u64;
                let tile = DecodeTile {
                    rows: group.tile.m,
                    run: if mean <= 64 { 8 } else { 1 },
                };
                let arrays = DecodeArrays {
                    items: DeviceArray::new(first, group.items.len()),
                    rows: rows.array(),
                    page_ids: page_ids.array(),
                    merges: merge_array,
                    merge_slots: merge_slots.array(),
                    partials,
                    arrivals: fused.then(|| arrivals.array()),
                    ticket: DeviceArray::new(tickets.address() + 32 * index as u64, 1),
                    record: None,
                };
                (tile, arrays)
            })
            .collect();
        Self {
            gpu,
            kv,
            arrays,
            partials,
            merges: merge_array,
            merge_slots: merge_slots.array(),
            q: q_memory.tensor(Dtype::F16, [tokens, heads, dim]),
            out: result.tensor(Dtype::F16, [tokens, heads, dim]),
            result,
            streams: plan.groups.iter().map(|_| Stream::new()).collect(),
            events: (0..=plan.groups.len()).map(|_| event(false)).collect(),
            _memory: vec![
                q_memory,
                items,
                rows,
                page_ids,
                merges,
                merge_slots,
                partial_out,
                partial_lse,
                arrivals,
                tickets,
            ],
            plan,
        }
    }

    /// Queues everything on `stream`.
    pub fn enqueue(&self, how: How, stream: CUstream) {
        let (last, others) = self.events.split_last().expect("at least one");
        let apart = how.streams && self.arrays.len() > 1;
        if apart {
            // SAFETY: all handles live.
            ok(unsafe { sys::cuEventRecord(*last, stream) });
        }
        for (index, (tile, arrays)) in self.arrays.iter().enumerate() {
            let own = if apart && index > 0 {
                self.streams[index].0
            } else {
                stream
            };
            // SAFETY: all handles and arrays live until the stream was waited for.
            unsafe {
                if own != stream {
                    ok(sys::cuStreamWaitEvent(own, *last, 0));
                }
                self.gpu
                    .decode(
                        &self.plan.spec,
                        *tile,
                        arrays,
                        &self.kv,
                        &self.q,
                        &self.out,
                        None,
                        own,
                    )
                    .expect("the launch is right");
                if own != stream {
                    ok(sys::cuEventRecord(others[index], own));
                    ok(sys::cuStreamWaitEvent(stream, others[index], 0));
                }
            }
        }
        if self.plan.merge_mode == MergeMode::Kernel && self.merges.len > 0 {
            // SAFETY: as above.
            unsafe {
                self.gpu
                    .merge_states(
                        &self.partials,
                        self.merges,
                        self.merge_slots,
                        &self.out,
                        None,
                        stream,
                    )
                    .expect("the launch is right");
            }
        }
    }

    /// Runs it once.
    pub fn run(&self, how: How) {
        let stream = Stream::new();
        self.enqueue(how, stream.0);
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

impl Drop for Step<'_> {
    fn drop(&mut self) {
        for &event in &self.events {
            // SAFETY: made by us.
            let _ = unsafe { sys::cuEventDestroy_v2(event) };
        }
    }
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
    flush: Memory,
}

const FLUSH: usize = 512 << 20;

impl Timer {
    pub fn new() -> Self {
        Self {
            stream: Stream::new(),
            begin: event(true),
            end: event(true),
            flush: Memory::of_bytes(FLUSH),
        }
    }

    /// Microseconds of what `enqueue` queues, behind a flush.
    fn once(&self, flush: bool, enqueue: impl FnOnce(CUstream)) -> f64 {
        let mut milliseconds = 0.0;
        // SAFETY: all handles live.
        unsafe {
            if flush {
                ok(sys::cuMemsetD32Async(
                    self.flush.address(),
                    1,
                    FLUSH / 4,
                    self.stream.0,
                ));
            }
            ok(sys::cuEventRecord(self.begin, self.stream.0));
            enqueue(self.stream.0);
            ok(sys::cuEventRecord(self.end, self.stream.0));
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
    pub fn medians(&self, ways: &[(&Step<'_>, How)], times: usize) -> Vec<f64> {
        let mut all = vec![Vec::new(); ways.len()];
        for round in 0..times + 2 {
            for ((step, how), times) in ways.iter().zip(&mut all) {
                let time = self.once(true, |stream| step.enqueue(*how, stream));
                if round >= 2 {
                    times.push(time);
                }
            }
        }
        all.into_iter()
            .map(|mut times| {
                times.sort_by(f64::total_cmp);
                times[times.len() / 2]
            })
            .collect()
    }

    /// Microseconds of a step among 40 in a graph, not flushed.
    pub fn graph(&self, step: &Step<'_>) -> f64 {
        const STEPS: u32 = 40;
        let (mut graph, mut executable) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: all handles live; the capture sees launches alone.
        unsafe {
            ok(sys::cuStreamBeginCapture_v2(
                self.stream.0,
                sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
            ));
            for _ in 0..STEPS {
                step.enqueue(How { streams: true }, self.stream.0);
            }
            ok(sys::cuStreamEndCapture(self.stream.0, &mut graph));
            ok(sys::cuGraphInstantiate_v2(
                &mut executable,
                graph,
                ptr::null_mut(),
                ptr::null_mut(),
                0,
            ));
            let mut times: Vec<f64> = (0..9)
                .map(|_| {
                    self.once(false, |stream| ok(sys::cuGraphLaunch(executable, stream)))
                        / f64::from(STEPS)
                })
                .collect();
            times.sort_by(f64::total_cmp);
            let _ = sys::cuGraphExecDestroy(executable);
            let _ = sys::cuGraphDestroy(graph);
            times[times.len() / 2]
        }
    }
}
