//! The step around attention, against the CPU.

use half::bf16;
use tandem_attn::{
    exec::{
        emulated::{Emulated, Settings},
        gpu::{self, DeviceBuffer, Gpu, KvPool},
    },
    kv::{AppendScales, KvViewMut},
    problem::{Dtype, KvLayout, Spec},
    step::cpu,
    tensor::F8E4M3,
};

use crate::{no_failure, numeric::Rng, replaced, settings};

/// The scales of keys and of values: those of the CPU, and those that the emulated GPU computes.
fn scales(gpu: &Gpu, dim: u32, tokens: usize) -> [Vec<f32>; 4] {
    let spec = Spec::new(2, 2, dim).with_kv_dtype(Dtype::F8E4M3);
    let (page_size, width) = (16, dim as usize);
    let pages = (tokens as u32).div_ceil(page_size);
    let mut rng = Rng(dim.into());
    let mut qkv: Vec<bf16> = rng
        .floats(tokens * 6 * width, -2.0, 2.0)
        .into_iter()
        .map(bf16::from_f32)
        .collect();
    // The first key head of the first token has the largest numbers.
    qkv[2 * width..3 * width].fill(bf16::from_f32(99.0));
    let slots: Vec<u32> = (0..tokens as u32).collect();
    let rows = (pages * page_size * 2) as usize;
    let strides = KvLayout::Nhd.strides(page_size, 2, 1);

    let (mut k, mut v) = (vec![F8E4M3(0); rows * width], vec![F8E4M3(0); rows * width]);
    let (mut k_scales, mut v_scales) = (vec![0.0; rows], vec![0.0; rows]);
    let mut pool = KvViewMut::new(&spec, KvLayout::Nhd, page_size, &mut k, &mut v);
    let computed = AppendScales::Computed {
        k: &mut k_scales,
        v: &mut v_scales,
        k_strides: strides,
        v_strides: strides,
    };
    let step = cpu::QkvStep {
        qkv: &qkv,
        bias: None,
        norm: None,
        rope: None,
    };
    let mut q = vec![bf16::ZERO; tokens * 2 * width];
    cpu::qkv(&spec, &step, &slots, &mut q, &mut pool, pages, computed).expect("a good call");

    let stream = gpu.stream().expect("a stream");
    let source = DeviceBuffer::from_slice(gpu, &qkv).expect("memory");
    let queries = DeviceBuffer::from_slice(gpu, &q).expect("memory");
    let on_slots = DeviceBuffer::from_slice(gpu, &slots).expect("memory");
    let pools = [&k, &v].map(|pool| DeviceBuffer::from_slice(gpu, pool).expect("memory"));
    let zeros = vec![0.0_f32; rows];
    let of_pools = [(); 2].map(|()| DeviceBuffer::from_slice(gpu, &zeros).expect("memory"));
    let sizes = [pages as usize, page_size as usize, 2];
    let [k, v] = of_pools.each_ref().map(|scales| scales.tensor(sizes));
    let [keys, values] = pools.each_ref().map(DeviceBuffer::address);
    let pool = KvPool::new(&spec, KvLayout::Nhd, page_size, pages, keys, values)
        .with_scales(gpu::KvScales::Token { k, v });
    let step = gpu::QkvStep {
        qkv: source.tensor([tokens, 6 * width]),
        bias: None,
        norm: None,
        rope: None,
    };
    // SAFETY: everything is there as described until the stream is done; slots are distinct.
    unsafe {
        gpu.qkv_step(
            &spec,
            &step,
            on_slots.array(),
            &queries.tensor([tokens, 2, width]),
            &pool,
            gpu::AppendScales::Computed,
            *stream,
        )
    }
    .expect("a good call");
    stream.synchronize().expect("it ends");
    let [k, v] = of_pools.map(|scales| scales.read().expect("they are there"));
    [k_scales, v_scales, k, v]
}

/// Not all threads of a warp have a part of a head, if its dimension / 16 is not a power of two. With the instructions of Hopper
/// and of Ampere.
#[test]
fn computed_scales_are_those_of_the_cpu() {
    let _others = no_failure();
    for compute in [90, 80] {
        let of = Settings {
            compute,
            ..settings(1, 3)
        };
        let emulated = Emulated::new(of).expect("the emulator");
        let replaced = replaced();
        let gpu = replaced.as_ref().unwrap_or_else(|| emulated.gpu());
        for dim in [48, 96, 128, 144] {
            // With one head for each thread, and with two.
            for tokens in [3, 60] {
                let [k, v, got_k, got_v] = scales(gpu, dim, tokens);
                assert_eq!(
                    (got_k, got_v),
                    (k, v),
                    "{tokens} tokens of {dim}, compute {compute}"
                );
            }
        }
    }
}
