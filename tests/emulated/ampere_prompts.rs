//! Prompts with Ampere's instructions: on 8-bit pages, which a launch before them widens, with heads of 256, and with heads
//! between those of the kernels.

use bytemuck::cast;
use half::{bf16, f16};
use tandem_attn::{
    Cpu,
    exec::gpu::{self, DeviceBuffer, KvPool},
    kv::{AppendScales, KvScales, KvView, KvViewMut},
    plan::{Kernel, PlanOptions, Planner, SplitMode},
    problem::{KvLayout, Spec},
    tensor::{Element, F8E4M3, F8E5M2},
};

use crate::{
    ampere::{ampere, check_on, run},
    no_failure,
    numeric::Rng,
    problems::{Asked, Scales, masks, prefixed},
};

/// Runs prompts, which must be prefills, twice: the same bits, and those of the reference.
fn check<T: Element, K: Element>(asked: &Asked, split: SplitMode, seed: u64) {
    let plan = check_on::<T, K>(asked, split, seed, None);
    let are_prefills = plan.groups.iter().all(|of| of.kernel == Kernel::Prefill);
    assert!(are_prefills, "{asked:?}");
}

/// Prompts of several requests, some with a common prefix, and heads, a window, sinks and masks by the seed.
fn asked(dim: u32, cap: bool, scales: Scales, seed: u64) -> (Asked, SplitMode) {
    let mut spec = match seed % 3 {
        0 => Spec::new(6, 2, dim),
        1 => Spec::new(2, 2, dim),
        _ => Spec::new(8, 1, dim),
    };
    spec.variant.soft_cap = cap.then_some(20.0);
    spec.variant.window_left = (seed % 5 == 4).then_some(40);
    spec.variant.sinks = seed % 4 == 1;
    let page = [16, 8, 3][seed as usize / 2 % 3];
    let mut batch = prefixed(&[(33, 0, 40), (45, 2, 70), (90, 0, 31)], page, false, seed);
    if seed % 4 == 2 {
        batch = batch.clone().with_masks(masks(&batch, seed));
    }
    let asked = Asked {
        spec,
        batch,
        layout: [KvLayout::Nhd, KvLayout::Hnd][seed as usize % 2],
        strides: None,
        scales,
    };
    let split = match seed % 2 {
        0 => SplitMode::Makespan,
        _ => SplitMode::Fixed { tokens: 16 * page },
    };
    (asked, split)
}

#[test]
fn prompts_of_8_bit_pages_are_the_reference() {
    let all = [
        Scales::One,
        Scales::Tensor,
        Scales::Head,
        Scales::Request,
        Scales::Token,
    ];
    let mut seed = 0;
    for dim in [64, 128, 256] {
        let plain = all.map(|scales| (scales, false, seed % 2 == 1));
        for (scales, cap, e5m2) in plain.into_iter().chain([
            (Scales::Head, true, false),
            (Scales::Request, true, true),
            (Scales::Request, false, true),
        ]) {
            seed += 1;
            let (asked, split) = asked(dim, cap, scales, seed);
            match (e5m2, seed % 3) {
                (false, 0) => check::<f16, F8E4M3>(&asked, split, seed),
                (false, _) => check::<bf16, F8E4M3>(&asked, split, seed),
                (true, 0) => check::<f16, F8E5M2>(&asked, split, seed),
                (true, _) => check::<bf16, F8E5M2>(&asked, split, seed),
            }
        }
    }
}

#[test]
fn prompts_of_large_heads_are_the_reference() {
    for seed in 0..8 {
        let (asked, split) = asked(256, seed % 4 > 1, Scales::One, seed);
        match seed % 2 {
            0 => check::<bf16, bf16>(&asked, split, seed),
            _ => check::<f16, f16>(&asked, split, seed),
        }
    }
}

#[test]
fn prompts_of_padded_heads_are_the_reference() {
    for (dim, seed) in (16..256).step_by(16).zip(0..) {
        let cap = seed % 4 == 3;
        let (of_16_bits, split) = asked(dim, cap, Scales::One, seed);
        match (dim, seed % 2) {
            (64 | 128, _) => continue,
            (_, 0) => check::<bf16, bf16>(&of_16_bits, split, seed),
            _ => check::<f16, f16>(&of_16_bits, split, seed),
        }
        let scales = [Scales::Head, Scales::Token, Scales::Request][seed as usize % 3];
        let (of_8_bits, split) = asked(dim, cap, scales, seed + 1);
        match seed % 2 {
            0 => check::<f16, F8E4M3>(&of_8_bits, split, seed),
            _ => check::<bf16, F8E5M2>(&of_8_bits, split, seed),
        }
    }
}

/// Each of the 256 numbers as the value of a key that one token of a prompt sees, alone.
fn every_number<T: Element, K: Element>() {
    let _others = no_failure();
    let emulated = ampere(0, 1);
    let spec = Spec::new(1, 1, 64)
        .with_dtype(T::DTYPE)
        .with_kv_dtype(K::DTYPE)
        .with_window_left(0);
    let batch = prefixed(&[(256, 0, 256)], 16, false, 1);
    let plan = Planner::new().plan(&spec, &batch, &emulated.device(), &PlanOptions::default());
    let plan = plan.expect("it can be planned");
    let table = &batch.parts[0].table;
    let number = |code: u32| cast::<u8, K>(code as u8).to_f32();
    let first = table.kv_len(0) - 256;
    let q = vec![T::from_f32(1.0); 256 * 64];
    // Weights are 0 for the other tokens of a tile, and 0 times a number that is not finite is NaN.
    let outputs = |finite: bool| {
        let rows = (table.pool_pages * 16) as usize;
        let k = vec![cast::<u8, K>(0); rows * 64];
        let mut v = k.clone();
        for code in (0..256).filter(|&code| number(code).is_finite() == finite) {
            let key = first + code;
            let row = (table.pages(0)[(key / 16) as usize] * 16 + key % 16) as usize;
            v[row * 64..][..64].fill(cast(code as u8));
        }
        let view = KvView::new(&spec, KvLayout::Nhd, 16, &k, &v);
        run(&emulated, &plan, &q, view).0
    };
    for (code, out) in (0..).zip(outputs(true).chunks(64)) {
        let right = match number(code) {
            number if number.is_finite() => number,
            _ => 0.0,
        };
        assert!(out.iter().all(|x| x.to_f32() == right), "{code:#x}");
    }
    let others = outputs(false);
    for code in (0..256).filter(|&code| !number(code).is_finite()) {
        let out = &others[code as usize * 64..][..64];
        assert!(out.iter().all(|x| !x.to_f32().is_finite()), "{code:#x}");
    }
}

#[test]
fn every_number_of_8_bits_is_widened_exactly() {
    every_number::<bf16, F8E4M3>();
    every_number::<f16, F8E4M3>();
    every_number::<bf16, F8E5M2>();
    every_number::<f16, F8E5M2>();
}

/// Appends rows with numbers of all magnitudes, and compares the pool with the CPU's.
fn appended<T: Element, K: Element>(computed: bool, seed: u64) {
    let _others = no_failure();
    let emulated = ampere(0, seed);
    let gpu = emulated.gpu();
    let (tokens, page_size, pages, dim) = (19_usize, 8, 3, 48);
    let spec = Spec::new(2, 2, dim)
        .with_dtype(T::DTYPE)
        .with_kv_dtype(K::DTYPE);
    let mut rng = Rng(seed);
    let mut rows = || -> Vec<T> {
        let exponents = rng.floats(tokens * 2 * dim as usize, -16.0, 16.0);
        let signs = rng.floats(exponents.len(), -1.0, 1.0);
        let numbers = exponents.iter().zip(&signs);
        let mut rows: Vec<T> = numbers
            .map(|(exponent, sign)| T::from_f32(sign.signum() * exponent.exp2()))
            .collect();
        rows[5] = T::from_f32(f32::NAN);
        rows[7] = T::from_f32(f32::NEG_INFINITY);
        rows
    };
    let (k, v) = (rows(), rows());
    let slots: Vec<u32> = (0..tokens as u32).rev().collect();
    let all = (pages * page_size * 2) as usize;
    let pool = vec![cast::<u8, K>(0x55); all * dim as usize];
    let strides = KvLayout::Nhd.strides(page_size, 2, 1);
    let (mut k_pool, mut v_pool) = (pool.clone(), pool.clone());
    let (mut k_scales, mut v_scales) = (vec![0.0; all], vec![0.0; all]);
    let mut view = KvViewMut::new(&spec, KvLayout::Nhd, page_size, &mut k_pool, &mut v_pool);
    let scales = match computed {
        true => AppendScales::Computed {
            k: &mut k_scales,
            v: &mut v_scales,
            k_strides: strides,
            v_strides: strides,
        },
        false => AppendScales::Given(KvScales::One),
    };
    Cpu::append_quantised(&spec, pages, &slots, &k, &v, &mut view, scales).expect("it fits");

    let sources = [&k, &v].map(|rows| DeviceBuffer::from_slice(gpu, rows).expect("memory"));
    let pools = [(); 2].map(|()| DeviceBuffer::from_slice(gpu, &pool).expect("memory"));
    let zeros = vec![0.0_f32; all];
    let of_pools = [(); 2].map(|()| DeviceBuffer::from_slice(gpu, &zeros).expect("memory"));
    let on_slots = DeviceBuffer::from_slice(gpu, &slots).expect("memory");
    let sizes = [pages as usize, page_size as usize, 2];
    let [of_k, of_v] = of_pools.each_ref().map(|scales| scales.tensor(sizes));
    let [keys, values] = pools.each_ref().map(DeviceBuffer::address);
    let mut kv = KvPool::new(&spec, KvLayout::Nhd, page_size, pages, keys, values);
    let mut from = gpu::AppendScales::Given;
    if computed {
        kv = kv.with_scales(gpu::KvScales::Token { k: of_k, v: of_v });
        from = gpu::AppendScales::Computed;
    }
    let shape = [tokens, 2, dim as usize];
    let [k, v] = sources.each_ref().map(|rows| rows.tensor(shape));
    let stream = gpu.stream().expect("a stream");
    // SAFETY: everything lives until the stream was waited for; slots differ.
    unsafe { gpu.append_quantised(&spec, &kv, from, on_slots.array(), &k, &v, *stream) }
        .expect("the launch is right");
    stream.synchronize().expect("it ends");
    let bits = |pool: &[K]| -> Vec<u8> {
        let bits = |x: &K| match x.to_f32().is_nan() {
            true => 0x7F,
            false => cast(*x),
        };
        pool.iter().map(bits).collect()
    };
    for (got, right) in pools.iter().zip([&k_pool, &v_pool]) {
        let got: Vec<K> = got.read().expect("a copy");
        assert_eq!(bits(&got), bits(right), "{spec:?}");
    }
    if computed {
        for (got, right) in of_pools.iter().zip([&k_scales, &v_scales]) {
            let got: Vec<f32> = got.read().expect("a copy");
            assert_eq!(&got, right);
        }
    }
}

#[test]
fn rows_are_quantised_without_instructions_for_it_as_on_the_cpu() {
    for seed in 0..4 {
        appended::<bf16, F8E4M3>(seed % 2 == 1, seed);
        appended::<f16, F8E4M3>(seed % 2 == 1, seed);
        appended::<bf16, F8E5M2>(seed % 2 == 1, seed);
        appended::<f16, F8E5M2>(seed % 2 == 1, seed);
    }
}
