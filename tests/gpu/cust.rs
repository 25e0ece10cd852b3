//! Streams, contexts and device memory of the crate `cust`, through the safe calls for them.

use crate::common::{self, problems::Tensors};
use cust::{
    context::Context,
    device::Device,
    memory::{CopyDestination, DeviceBuffer},
    stream::{Stream, StreamFlags},
};
use half::bf16;
use tandem_attn::{
    Error,
    exec::{
        Cpu,
        gpu::{DeviceTensor, Gpu, KvPool, WorkspaceOptions, cust::Pool, cust::stream},
    },
    kv::KvView,
    plan::{Bound, PlanOptions, Planner},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
};

fn address(memory: &DeviceBuffer<u16>) -> u64 {
    memory.as_device_ptr().as_raw()
}

#[test]
fn a_hybrid_batch_runs_in_memory_of_cust_as_on_the_cpu() {
    if common::gpu("a_hybrid_batch_runs_in_memory_of_cust_as_on_the_cpu").is_none() {
        return;
    }
    let context = Context::new(Device::get_device(0).unwrap()).unwrap();
    let gpu = Gpu::builder().build_in_cust(&context).unwrap();

    let spec = Spec::new(8, 2, 128);
    let mut table = PageTable::new(16, 12);
    table.push(&[7, 3, 9], 40);
    table.push(&[1, 4, 2, 8], 60);
    let batch = Batch::new(vec![0, 1, 31], table);
    let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 5);
    let part = &tensors.parts[0];

    let plan = Planner::new()
        .plan(&spec, &batch, &gpu.device(), &PlanOptions::default())
        .unwrap();
    let mut workspace = gpu
        .workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default())
        .unwrap();
    let on = Stream::new(StreamFlags::DEFAULT, None).unwrap();
    // SAFETY: the planner's plan; the stream lives.
    unsafe { workspace.upload(&plan, stream(&on)) }.unwrap();

    let copy =
        |values: &[bf16]| DeviceBuffer::from_slice(bytemuck::cast_slice::<_, u16>(values)).unwrap();
    let (q, k, v) = (copy(&tensors.q), copy(&part.k), copy(&part.v));
    let mut out = DeviceBuffer::<u16>::zeroed(tensors.q.len()).unwrap();
    let mut lse = DeviceBuffer::<f32>::zeroed(31 * 8).unwrap();
    let pool = Pool {
        layout: KvLayout::Nhd,
        page_size: 16,
        k: &k,
        v: &v,
    };
    gpu.run_and_wait(
        &mut workspace,
        31,
        &q,
        &[pool],
        &mut out,
        Some(&mut lse),
        &on,
    )
    .unwrap();
    let mut on_gpu = vec![0_u16; tensors.q.len()];
    out.copy_to(&mut on_gpu[..]).unwrap();

    let cpu = Cpu::new();
    let plan = Planner::new()
        .plan(&spec, &batch, &cpu.device(), &PlanOptions::default())
        .unwrap();
    let view = KvView::new(&spec, KvLayout::Nhd, 16, &part.k, &part.v);
    let mut on_cpu = vec![bf16::ZERO; tensors.q.len()];
    cpu.run(&plan, &tensors.q, &[view], &mut on_cpu, None)
        .unwrap();
    for (gpu, cpu) in on_gpu.iter().zip(&on_cpu) {
        let (gpu, cpu) = (bf16::from_bits(*gpu).to_f32(), cpu.to_f32());
        assert!(
            (gpu - cpu).abs() <= 0.02,
            "{gpu} on the GPU, {cpu} on the CPU"
        );
    }

    // The same from a graph that was captured on the stream of `cust`.
    let tensor = |address: u64| DeviceTensor::new(address, Dtype::BF16, [31, 8, 128]);
    let pages = KvPool::new(&spec, KvLayout::Nhd, 16, 12, address(&k), address(&v));
    let (from, to) = (
        tensor(address(&q)),
        DeviceBuffer::<u16>::zeroed(on_gpu.len()).unwrap(),
    );
    let written = tensor(address(&to));
    // SAFETY: the memory lives until the stream was waited for; the stream is of the primary context.
    unsafe {
        let run = |on| gpu.run(&mut workspace, &from, &[pages], &written, None, on);
        let graph = gpu.capture(stream(&on), run).unwrap();
        graph.launch(stream(&on)).unwrap();
        on.synchronize().unwrap();
    }
    let mut by_graph = vec![0_u16; on_gpu.len()];
    to.copy_to(&mut by_graph[..]).unwrap();
    assert!(by_graph == on_gpu, "a graph computes something else");

    // Memory that is too short is refused before anything is launched.
    let short = DeviceBuffer::<u16>::zeroed(tensors.q.len() - 1).unwrap();
    let pool = Pool {
        layout: KvLayout::Nhd,
        page_size: 16,
        k: &k,
        v: &v,
    };
    let error = gpu
        .run_and_wait(&mut workspace, 31, &short, &[pool], &mut out, None, &on)
        .unwrap_err();
    assert!(
        matches!(
            error,
            Error::Extent {
                dimension: "bytes",
                ..
            }
        ),
        "{error:?}"
    );
}
