//! Decodes of several layers, one behind the other on a stream. Each begins before the launch in front of it ends, which
//! writes its new keys: the emulator reports what is read too early.

use half::bf16;
use tandem_attn::{
    exec::{
        Cpu,
        emulated::Emulated,
        gpu::{DeviceBuffer, KvPool, WorkspaceOptions},
    },
    kv::KvView,
    plan::{Bound, Plan, PlanOptions, Planner},
    problem::{Batch, KvLayout, PageTable, Spec},
};

use crate::{
    no_failure,
    numeric::{Rng, Tolerance, compare, to_f64},
    replaced, settings,
};

const LAYERS: usize = 3;
const PAGE: u32 = 16;
const KEYS: u32 = 70;

fn numbers(count: usize, seed: u64) -> Vec<bf16> {
    let numbers = Rng(seed).floats(count, -1.0, 1.0);
    numbers.into_iter().map(bf16::from_f32).collect()
}

fn planned(spec: &Spec, emulated: &Emulated, options: &PlanOptions) -> Plan {
    let mut table = PageTable::new(PAGE, 6);
    table.push(&[5, 1, 4, 0, 2], KEYS);
    let batch = Batch::new(vec![0, 1], table);
    Planner::new()
        .plan(spec, &batch, &emulated.device(), options)
        .expect("it can be planned")
}

/// By kernels for few rows, for few keys and for many rows, and with a merge at the end of each layer.
#[test]
fn decodes_of_layers_read_the_keys_that_were_just_appended() {
    let _others = no_failure();
    for (q_heads, kv_heads, dim) in [(4, 2, 128), (16, 8, 64), (64, 1, 128)] {
        let spec = Spec::new(q_heads, kv_heads, dim);
        let emulated = Emulated::new(settings(2, 9)).expect("the emulator");
        let replaced = replaced();
        let gpu = replaced.as_ref().unwrap_or_else(|| emulated.gpu());
        let stream = gpu.stream().expect("a stream");
        let plan = planned(&spec, &emulated, &PlanOptions::default());
        let bound = Bound::of(&plan);
        let workspace = gpu.workspace(&spec, &bound, WorkspaceOptions::default());
        let mut workspace = workspace.expect("memory");

        // The new token is the last one of the last page. Its place has other keys before.
        let slot = 2 * PAGE + (KEYS - 1) % PAGE;
        let row = (kv_heads * dim) as usize;
        let place = slot as usize * row..(slot as usize + 1) * row;
        let q = numbers((q_heads * dim) as usize, 1);
        let pools: Vec<[Vec<bf16>; 2]> = (0..LAYERS as u64)
            .map(|layer| [2, 3].map(|side| numbers((6 * PAGE) as usize * row, 10 * layer + side)))
            .collect();
        let memory = |values: &[bf16]| DeviceBuffer::from_slice(gpu, values).expect("memory");
        let before: Vec<_> = pools
            .iter()
            .map(|sides| {
                sides.each_ref().map(|side| {
                    let mut stale = side.clone();
                    stale[place.clone()].fill(bf16::from_f32(50.0));
                    memory(&stale)
                })
            })
            .collect();
        let new: Vec<_> = pools
            .iter()
            .map(|sides| sides.each_ref().map(|side| memory(&side[place.clone()])))
            .collect();
        let outs: Vec<_> = (0..LAYERS)
            .map(|_| memory(&vec![bf16::NAN; q.len()]))
            .collect();
        let (queries, slots) = (
            memory(&q),
            DeviceBuffer::from_slice(gpu, &[slot]).expect("memory"),
        );
        let shape = [1, q_heads as usize, dim as usize];
        let new_shape = [1, kv_heads as usize, dim as usize];
        // SAFETY: all memory lives until the stream was waited for.
        unsafe {
            workspace.upload(&plan, *stream).expect("it fits");
            for layer in 0..LAYERS {
                let [keys, values] = before[layer].each_ref().map(DeviceBuffer::address);
                let pool = KvPool::new(&spec, KvLayout::Nhd, PAGE, 6, keys, values);
                let [k, v] = new[layer].each_ref().map(|side| side.tensor(new_shape));
                gpu.append_paged_kv(&spec, &pool, slots.array(), &k, &v, *stream)
                    .expect("it is right");
                let out = outs[layer].tensor(shape);
                gpu.run(
                    &mut workspace,
                    &queries.tensor(shape),
                    &[pool],
                    &out,
                    None,
                    *stream,
                )
                .expect("it is right");
            }
        }
        stream.synchronize().expect("it ran");
        let cpu = Cpu::new();
        for (layer, (out, [k, v])) in outs.iter().zip(&pools).enumerate() {
            let mut right = vec![bf16::NAN; q.len()];
            let view = KvView::new(&spec, KvLayout::Nhd, PAGE, k, v);
            cpu.run(&plan, &q, &[view], &mut right, None)
                .expect("it is right");
            let mut tolerance = Tolerance::of(spec.out_dtype);
            tolerance.absolute = 1.0 / 256.0;
            let out = to_f64(&out.read().expect("it is there"));
            let differs = compare("out", &shape, &out, &to_f64(&right), tolerance);
            assert_eq!(
                differs,
                Ok(()),
                "{q_heads}/{kv_heads} d{dim}, layer {layer}"
            );
        }
    }
}
