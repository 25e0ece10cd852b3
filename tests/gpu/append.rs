//! `append_paged_kv` on the GPU against the CPU, to the bit.

use crate::common::{self, Memory, Rng, Stream};
use half::bf16;
use proptest::prelude::*;
use tandem_attn::{
    Error,
    abi::NO_SLOT,
    exec::{
        Cpu,
        gpu::{AppendScales, Gpu, KvPool},
    },
    kv::KvViewMut,
    problem::{Dtype, KvLayout, Spec},
    tensor::{Element, F8E4M3, TensorMut, TensorRef},
};

#[derive(Clone, Debug)]
struct Shape {
    kv_heads: u32,
    head_dim_qk: u32,
    head_dim_v: u32,
    dtype: Dtype,
    layout: KvLayout,
    page_size: u32,
    pages: u32,
    tokens: usize,
    /// Elements between source rows, beyond the row itself.
    gap: usize,
    /// Bytes that the source of the keys starts off a 16-byte boundary: 0 or 8.
    shift: usize,
    seed: u64,
}

fn shape() -> impl Strategy<Value = Shape> {
    let dims = || prop_oneof![(1..65_u32).prop_map(|eighth| eighth * 8), Just(128)];
    let dtype = prop_oneof![Just(Dtype::F8E4M3), Just(Dtype::BF16), Just(Dtype::F32)];
    let page_size = prop_oneof![1..129_u32, Just(1), Just(16), Just(128)];
    let layout = prop_oneof![Just(KvLayout::Nhd), Just(KvLayout::Hnd)];
    (
        prop_oneof![1..9_u32, Just(32)],
        (dims(), dims()),
        dtype,
        layout,
        (page_size, 1..20_u32),
        0..200_usize,
        (
            (0..3_usize).prop_map(|gap| gap * 8),
            prop_oneof![4 => Just(0_usize), 1 => Just(8)],
        ),
        any::<u64>(),
    )
        .prop_map(
            |(
                kv_heads,
                (head_dim_qk, head_dim_v),
                dtype,
                layout,
                (page_size, pages),
                tokens,
                (gap, shift),
                seed,
            )| Shape {
                kv_heads,
                head_dim_qk,
                head_dim_v,
                dtype,
                layout,
                page_size,
                pages,
                tokens,
                gap,
                shift,
                seed,
            },
        )
}

impl Shape {
    fn spec(&self) -> Spec {
        Spec::new(self.kv_heads, self.kv_heads, self.head_dim_qk)
            .with_head_dim_v(self.head_dim_v)
            .with_dtype(self.dtype)
    }

    /// Distinct slots in any order; some tokens are padding, some point outside the pool.
    fn slots(&self, rng: &mut Rng) -> Vec<u32> {
        let pool = self.pages * self.page_size;
        let mut order: Vec<u32> = (0..pool).collect();
        rng.shuffle(&mut order);
        let mut slots: Vec<u32> = order.into_iter().take(self.tokens).collect();
        slots.resize(self.tokens, NO_SLOT);
        for slot in &mut slots {
            match rng.below(20) {
                0 => *slot = NO_SLOT,
                1 => *slot = pool + rng.below(1000) as u32,
                _ => {}
            }
        }
        slots
    }
}

fn check<T: Element>(gpu: &Gpu, shape: &Shape) {
    let spec = shape.spec();
    let mut rng = Rng(shape.seed);
    let slots = shape.slots(&mut rng);
    let heads = shape.kv_heads as usize;
    let mut random = |count: usize| -> Vec<T> {
        let mut values = vec![T::zeroed(); count];
        for byte in bytemuck::cast_slice_mut::<T, u8>(&mut values) {
            *byte = rng.bits() as u8;
        }
        values
    };
    let pool_of = |dim: u32| (shape.pages * shape.page_size * shape.kv_heads * dim) as usize;
    let (mut k_pool, mut v_pool) = (
        random(pool_of(spec.head_dim_qk)),
        random(pool_of(spec.head_dim_v)),
    );
    let row = |dim: u32| heads * dim as usize;
    let k_rows = random(shape.tokens * (row(spec.head_dim_qk) + shape.gap));
    let v_rows = random(shape.tokens * (row(spec.head_dim_v) + shape.gap));

    let stream = Stream::new();
    let (k_device, v_device) = (Memory::new(&k_pool), Memory::new(&v_pool));
    let shifted: Vec<u8> = [
        &vec![0; shape.shift],
        bytemuck::cast_slice::<T, u8>(&k_rows),
    ]
    .concat();
    let (k_source, v_source, slots_device) = (
        Memory::new(&shifted),
        Memory::new(&v_rows),
        Memory::new(&slots),
    );
    let pool = KvPool::new(
        &spec,
        shape.layout,
        shape.page_size,
        shape.pages,
        k_device.address(),
        v_device.address(),
    );
    let mut k = k_source
        .tensor(
            shape.dtype,
            [shape.tokens, heads, spec.head_dim_qk as usize],
        )
        .with_stride(0, row(spec.head_dim_qk) + shape.gap);
    k.address += shape.shift as u64;
    let v = v_source
        .tensor(shape.dtype, [shape.tokens, heads, spec.head_dim_v as usize])
        .with_stride(0, row(spec.head_dim_v) + shape.gap);
    // SAFETY: everything is there as described until the stream is done; slots are distinct.
    unsafe { gpu.append_paged_kv(&spec, &pool, slots_device.array(), &k, &v, stream.0) }
        .expect("a good call");
    stream.wait();

    // The CPU takes dense rows, and no slots outside the pool.
    let dense = |rows: &[T], width: usize| -> Vec<T> {
        rows.chunks(width + shape.gap)
            .flat_map(|row| row[..width].to_vec())
            .collect()
    };
    let inside: Vec<u32> = slots
        .iter()
        .map(|&slot| {
            if slot < shape.pages * shape.page_size {
                slot
            } else {
                NO_SLOT
            }
        })
        .collect();
    let mut view = KvViewMut::new(
        &spec,
        shape.layout,
        shape.page_size,
        &mut k_pool,
        &mut v_pool,
    );
    Cpu::append_paged_kv(
        &spec,
        shape.pages,
        &inside,
        &dense(&k_rows, row(spec.head_dim_qk)),
        &dense(&v_rows, row(spec.head_dim_v)),
        &mut view,
    )
    .expect("a good call");
    for (name, got, right) in [
        ("k", k_device.read::<T>(), &k_pool),
        ("v", v_device.read::<T>(), &v_pool),
    ] {
        let (got, right): (&[u8], &[u8]) =
            (bytemuck::cast_slice(&got), bytemuck::cast_slice(right));
        let first = got.iter().zip(right).position(|(got, right)| got != right);
        assert_eq!(
            first, None,
            "first byte of the {name} pool that differs, {shape:?}"
        );
    }
}

fn check_any(gpu: &Gpu, shape: &Shape) {
    match shape.dtype {
        Dtype::BF16 => check::<bf16>(gpu, shape),
        Dtype::F32 => check::<f32>(gpu, shape),
        _ => check::<F8E4M3>(gpu, shape),
    }
}

#[test]
fn the_gpu_appends_as_the_cpu() {
    let Some(gpu) = common::gpu("the_gpu_appends_as_the_cpu") else {
        return;
    };
    let config = ProptestConfig {
        cases: 256,
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    proptest!(config, |(shape in shape())| check_any(gpu, &shape));
}

#[test]
fn long_prompts_fill_the_machine() {
    let Some(gpu) = common::gpu("long_prompts_fill_the_machine") else {
        return;
    };
    for layout in [KvLayout::Nhd, KvLayout::Hnd] {
        check_any(
            gpu,
            &Shape {
                kv_heads: 8,
                head_dim_qk: 128,
                head_dim_v: 128,
                dtype: Dtype::BF16,
                layout,
                page_size: 16,
                pages: 640,
                tokens: 10_000,
                gap: 2048,
                shift: 0,
                seed: 3,
            },
        );
    }
}

#[test]
fn pools_and_sources_beyond_4_gib() {
    const TEST: &str = "pools_and_sources_beyond_4_gib";
    let Some(gpu) = common::gpu(TEST) else { return };
    let spec = Spec::new(8, 8, 128);
    let token = 8 * 128;
    let pages = 160_000; // of 32 KiB
    let pool_bytes = pages * 16 * token * 2;
    let pools = (
        Memory::try_of_bytes(pool_bytes),
        Memory::try_of_bytes(pool_bytes),
    );
    let (Some(k_pool), Some(v_pool)) = pools else {
        eprintln!("skipped: {TEST}: the GPU has too little memory");
        return;
    };
    let pool = KvPool::new(
        &spec,
        KvLayout::Hnd,
        16,
        pages as u32,
        k_pool.address(),
        v_pool.address(),
    );
    // So far apart that the last row starts beyond 4 GiB.
    let rows = 3;
    let stride = 1_200_000_000;
    let mut rng = Rng(5);
    let values: Vec<u16> = (0..token).map(|_| rng.bits() as u16).collect();
    let source = Memory::of_bytes((stride * (rows - 1) + token) * 2);
    for row in 0..rows {
        source.write_at(row * stride * 2, &values);
    }
    let new = source
        .tensor(Dtype::BF16, [rows, 8, 128])
        .with_stride(0, stride);
    let slots: Vec<u32> = [0, pages / 2 * 16 + 7, pages * 16 - 1]
        .map(|slot| slot as u32)
        .to_vec();
    let slots_device = Memory::new(&slots);
    let stream = Stream::new();
    // SAFETY: everything is there as described until the stream is done; slots are distinct.
    unsafe { gpu.append_paged_kv(&spec, &pool, slots_device.array(), &new, &new, stream.0) }
        .expect("a good call");
    stream.wait();
    for slot in slots {
        let (page, offset) = (slot as usize / 16, slot as usize % 16);
        for head in 0..8 {
            let at = (page * 16 * token + head * 16 * 128 + offset * 128) * 2;
            for pool in [&k_pool, &v_pool] {
                assert_eq!(
                    pool.read_at::<u16>(at, 128),
                    values[head * 128..][..128],
                    "slot {slot}, head {head}"
                );
            }
        }
    }
}

#[test]
fn rows_of_one_tensor_are_quantised_as_on_the_cpu() {
    let Some(gpu) = common::gpu("rows_of_one_tensor_are_quantised_as_on_the_cpu") else {
        return;
    };
    let (tokens, heads, dim, page_size, pages) = (37, 3, 64, 16, 5);
    let mut rng = Rng(3);
    let rows: Vec<bf16> = (0..tokens * heads * dim)
        .map(|_| bf16::from_f32((rng.bits() % 2000) as f32 - 1000.0))
        .collect();
    let scales = [0.5_f32, 2.0, 3.0];
    let mut slots: Vec<u32> = (0..(pages * page_size) as u32).collect();
    rng.shuffle(&mut slots);
    slots.truncate(tokens);
    slots[4] = NO_SLOT;
    for (layout, scales) in [
        (KvLayout::Nhd, &scales[..]),
        (KvLayout::Hnd, &scales),
        (KvLayout::Nhd, &scales[1..2]),
        (KvLayout::Hnd, &[]),
    ] {
        let mut right = vec![F8E4M3(0x7F); pages * page_size * heads * dim];
        let shape = match layout {
            KvLayout::Nhd => [pages, page_size, heads, dim],
            KvLayout::Hnd => [pages, heads, page_size, dim],
        };
        let device = Memory::new(&right);
        let (source, of_slots) = (Memory::new(&rows), Memory::new(&slots));
        let of_scales = (!scales.is_empty()).then(|| Memory::new(scales));
        let of_scales = of_scales
            .as_ref()
            .map(|memory| memory.tensor(Dtype::F32, [scales.len()]));
        let mut pool = device.tensor(Dtype::F8E4M3, shape);
        let mut to = TensorMut::new(&mut right, shape).unwrap();
        if layout == KvLayout::Hnd {
            pool.shape.swap(1, 2);
            pool.strides.swap(1, 2);
            to = to.swap_axes(1, 2);
        }
        let source = source.tensor(Dtype::BF16, [tokens, heads, dim]);
        let stream = Stream::new();
        // SAFETY: everything is there as described until the stream is done; slots are distinct.
        unsafe {
            gpu.append_rows_quantised(
                &source,
                of_scales.as_ref(),
                of_slots.array(),
                &pool,
                stream.0,
            )
        }
        .expect("a good call");
        stream.wait();
        let rows = TensorRef::new(&rows, [tokens, heads, dim]).unwrap();
        Cpu::append_rows_quantised(&rows, scales, &slots, to).expect("a good call");
        assert_eq!(device.read::<F8E4M3>(), right, "{layout:?}, {scales:?}");

        let wrong = pool.with_stride(3, 2);
        // SAFETY: nothing is launched.
        let refused =
            unsafe { gpu.append_rows_quantised(&source, None, of_slots.array(), &wrong, stream.0) };
        assert!(refused.is_err(), "a pool whose rows are not dense");

        // The call has no specification.
        let mut wrong = source;
        wrong.shape[1] += 1;
        // SAFETY: nothing is launched.
        let refused =
            unsafe { gpu.append_rows_quantised(&wrong, None, of_slots.array(), &pool, stream.0) };
        let said = refused.unwrap_err().to_string();
        assert!(said.contains("in the pool"), "{said}");
    }
}

#[test]
fn latent_rows_of_656_bytes_are_appended_as_on_the_cpu() {
    let Some(gpu) = common::gpu("latent_rows_of_656_bytes_are_appended_as_on_the_cpu") else {
        return;
    };
    if gpu.arch() != "sm_90a" {
        return;
    }
    let (tokens, stride, page_size, pages) = (37, 584, 5, 11);
    let mut rng = Rng(3);
    let mut slots: Vec<u32> = (0..(pages * page_size) as u32).collect();
    rng.shuffle(&mut slots);
    slots.truncate(tokens);
    slots[4] = NO_SLOT;
    let mut rows = vec![bf16::ZERO; tokens * stride];
    for (tile, numbers) in rows.chunks_mut(73).enumerate() {
        let largest = [0.0, 3e-38, 1e-4, 2.0, 450.0, 1e30][tile % 6];
        let of_size = rng.floats(numbers.len(), -largest, largest);
        let pairs = numbers.iter_mut().zip(of_size);
        pairs.for_each(|(to, x)| *to = bf16::from_f32(x));
    }
    (rows[3], rows[stride + 200]) = (bf16::INFINITY, bf16::NEG_INFINITY);
    let mut right = vec![F8E4M3(0x55); pages * page_size * 656];
    let device = Memory::new(&right);
    let (source, of_slots) = (Memory::new(&rows), Memory::new(&slots));
    let from = source
        .tensor(Dtype::BF16, [tokens, 576])
        .with_stride(0, stride);
    let pool = KvPool::latent_656(page_size as u32, pages as u32, device.address());
    let stream = Stream::new();
    // SAFETY: everything is there as described until the stream is done; slots are distinct.
    unsafe { gpu.append_latent_656(&pool, of_slots.array(), &from, stream.0) }
        .expect("a good call");
    stream.wait();
    let rows = TensorRef::strided(&rows, [tokens, 576], [stride, 1]).unwrap();
    let to = TensorMut::new(&mut right, [pages, page_size, 656]).unwrap();
    Cpu::append_latent_656(&rows, &slots, to).expect("a good call");
    let got = device.read::<F8E4M3>();
    let place = got.iter().zip(&right).position(|(got, right)| got != right);
    assert_eq!(place.map(|at| (at / 656, at % 656)), None);

    // Other pools, and other appends to this one.
    let spec = Spec::latent(16, 512, 64).with_kv_dtype(Dtype::F8E4M3);
    let plain = KvPool::latent(&spec, 5, 11, device.address());
    let key = source.tensor(Dtype::F8E4M3, [tokens, 1, 576]);
    let value = source.tensor(Dtype::F8E4M3, [tokens, 1, 512]);
    let (wide_key, wide_value) = (
        source.tensor(Dtype::BF16, [tokens, 1, 576]),
        source.tensor(Dtype::BF16, [tokens, 1, 512]),
    );
    let slots = of_slots.array();
    // SAFETY: nothing is launched.
    let refused = unsafe {
        [
            gpu.append_latent_656(&plain, slots, &from, stream.0),
            gpu.append_paged_kv(&spec, &pool, slots, &key, &value, stream.0),
            gpu.append_quantised(
                &spec,
                &pool,
                AppendScales::Given,
                slots,
                &wide_key,
                &wide_value,
                stream.0,
            ),
        ]
    };
    for result in refused {
        assert!(
            matches!(
                result,
                Err(Error::NoInstance {
                    kernel: "append",
                    ..
                })
            ),
            "{result:?}"
        );
    }
}
