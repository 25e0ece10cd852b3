//! Appending rows of 16 bits to pages of 8 bits.

use super::*;

/// A pool of a head dimension in some layout, and new tokens for it, on host and device.
fn appended<T: Element, K: Element>(
    gpu: &Gpu,
    dim: u32,
    layout: KvLayout,
    granularity: u32,
    seed: u64,
) {
    const HEADS: u32 = 3;
    const PAGES: u32 = 5;
    const PAGE: u32 = 8;
    const TOKENS: usize = 23;
    let spec = Spec::new(6, HEADS, dim)
        .with_dtype(T::DTYPE)
        .with_kv_dtype(K::DTYPE);
    let largest = if K::DTYPE == Dtype::F8E4M3 {
        600.0
    } else {
        60_000.0
    };
    let mut noise = Rng(seed);
    // Some beyond the largest number, a NaN, an infinity, a row of zeros.
    let mut rows = || -> Vec<T> {
        let row = TOKENS * (HEADS * dim) as usize;
        let mut rows: Vec<T> = (0..row)
            .map(|_| T::from_f32(noise.between(-largest, largest)))
            .collect();
        rows[5] = T::from_f32(f32::NAN);
        rows[dim as usize + 3] = T::from_f32(f32::NEG_INFINITY);
        rows[2 * dim as usize..3 * dim as usize].fill(T::from_f32(0.0));
        rows
    };
    let (k, v) = (rows(), rows());
    let mut slots: Vec<u32> = (0..PAGES * PAGE).collect();
    noise.shuffle(&mut slots);
    slots.truncate(TOKENS);
    slots[4] = u32::MAX;
    let of_token: Vec<u32> = (0..TOKENS as u32).map(|token| token % REQUESTS).collect();
    let scales: Vec<f32> = (0..PAGES * PAGE * HEADS)
        .map(|_| noise.between(0.3, 4.0))
        .collect();
    let pool = vec![bytemuck::cast::<u8, K>(0x55); (PAGES * PAGE * HEADS * dim) as usize];
    let by_token = KvLayout::Hnd.strides(PAGE, HEADS, 1);

    // On the host.
    let (mut k_pool, mut v_pool) = (pool.clone(), pool.clone());
    let (mut k_scales, mut v_scales) = (scales.clone(), scales.clone());
    let mut view = KvViewMut::new(&spec, layout, PAGE, &mut k_pool, &mut v_pool);
    let of_heads = &scales[..HEADS as usize];
    let of_requests = &scales[..(REQUESTS * HEADS) as usize];
    let given = match granularity {
        0 => AppendScales::Given(KvScales::One),
        1 => AppendScales::Given(KvScales::Head {
            k: of_heads,
            v: of_heads,
        }),
        2 => AppendScales::Given(KvScales::Request {
            k: of_requests,
            v: of_requests,
            of_token: &of_token,
        }),
        3 => AppendScales::Given(KvScales::Token {
            k: &scales,
            v: &scales,
            k_strides: by_token,
            v_strides: by_token,
        }),
        _ => AppendScales::Computed {
            k: &mut k_scales,
            v: &mut v_scales,
            k_strides: by_token,
            v_strides: by_token,
        },
    };
    Cpu::append_quantised(&spec, PAGES, &slots, &k, &v, &mut view, given).expect("it fits");

    // On the device.
    let memory = [Memory::new(&pool), Memory::new(&pool)];
    let on_device = [Memory::new(&scales), Memory::new(&scales)];
    let (k, v, slots, of_token) = (
        Memory::new(&k),
        Memory::new(&v),
        Memory::new(&slots),
        Memory::new(&of_token),
    );
    let heads = HEADS as usize;
    let side = |memory: &Memory, shape: [usize; 2]| memory.tensor(Dtype::F32, shape);
    let by_token = |memory: &Memory| {
        let page = (PAGE * HEADS) as usize;
        memory
            .tensor(Dtype::F32, [PAGES as usize, PAGE as usize, heads])
            .with_stride(0, page)
            .with_stride(1, 1)
            .with_stride(2, PAGE as usize)
    };
    let scales_of_pool = match granularity {
        0 => gpu::KvScales::One,
        1 => gpu::KvScales::Head {
            k: on_device[0].tensor(Dtype::F32, [heads]),
            v: on_device[1].tensor(Dtype::F32, [heads]),
        },
        2 => gpu::KvScales::Request {
            k: side(&on_device[0], [REQUESTS as usize, heads]),
            v: side(&on_device[1], [REQUESTS as usize, heads]),
            of_token: of_token.array(),
        },
        _ => gpu::KvScales::Token {
            k: by_token(&on_device[0]),
            v: by_token(&on_device[1]),
        },
    };
    let kv = KvPool::new(
        &spec,
        layout,
        PAGE,
        PAGES,
        memory[0].address(),
        memory[1].address(),
    )
    .with_scales(scales_of_pool);
    let from = match granularity {
        4 => gpu::AppendScales::Computed,
        _ => gpu::AppendScales::Given,
    };
    let shape = [TOKENS, heads, dim as usize];
    let stream = Stream::new();
    let [k, v] = [&k, &v].map(|rows| rows.tensor(T::DTYPE, shape));
    // SAFETY: everything lives until the stream was waited for; slots differ.
    unsafe { gpu.append_quantised(&spec, &kv, from, slots.array(), &k, &v, stream.0) }
        .expect("the launch is right");
    stream.wait();
    // Any NaN is as good as another.
    let bits = |pool: &[K]| -> Vec<u8> {
        pool.iter()
            .map(|x| {
                if x.to_f32().is_nan() {
                    0x7F
                } else {
                    bytemuck::cast(*x)
                }
            })
            .collect()
    };
    assert_eq!(
        bits(&memory[0].read()),
        bits(&k_pool),
        "keys, {dim} {layout:?} {granularity}"
    );
    assert_eq!(
        bits(&memory[1].read()),
        bits(&v_pool),
        "values, {dim} {layout:?} {granularity}"
    );
    assert_eq!(on_device[0].read::<f32>(), k_scales);
    assert_eq!(on_device[1].read::<f32>(), v_scales);
}

#[test]
fn appending_quantises_as_the_cpu_does() {
    let Some(gpu) = gpu("appending_quantises_as_the_cpu_does") else {
        return;
    };
    for seed in 0..120 {
        let dim = [64, 80, 128, 256][seed as usize % 4];
        let layout = [KvLayout::Nhd, KvLayout::Hnd][seed as usize / 4 % 2];
        match (seed % 3, seed < 60) {
            (0, true) => appended::<f16, F8E4M3>(gpu, dim, layout, seed as u32 % 5, seed),
            (_, true) => appended::<bf16, F8E4M3>(gpu, dim, layout, seed as u32 % 5, seed),
            (0, _) => appended::<f16, F8E5M2>(gpu, dim, layout, seed as u32 % 5, seed),
            _ => appended::<bf16, F8E5M2>(gpu, dim, layout, seed as u32 % 5, seed),
        }
    }
}
