//! Merges, appends, heads of other dimensions.

use std::ffi::c_void;

use half::{bf16, f16};
use kernels_gpu::{
    divisor::Divisor,
    passes::{merge, narrow, pad},
    registry::Op,
};
use tandem_attn::{
    abi::{MergeParams, MergeRow, NO_SLOT, NarrowParams, PadParams},
    exec::{
        Cpu, cpu,
        gpu::{self, Gpu, KernelInfo, KvPool, PartialStates},
    },
    kv::{AppendScales, KvScales, KvViewMut},
    problem::{Dtype, KvLayout, Spec},
    tensor::{Element, F8E4M3, TensorMut, TensorRef},
};

use super::{Output, compared, dtype_of, raw};
use crate::common::{Memory, Rng, Stream};

/// Rows and slots of partial states, many of them where the kernel is one for many rows.
pub fn merge(gpu: &Gpu, row: &KernelInfo, seed: u64, checked: bool) -> Result<Vec<Output>, String> {
    match row.name {
        name if name.ends_with("f32") => merge_into::<f32>(gpu, row, seed, checked),
        name if name.ends_with("bf16") => merge_into::<bf16>(gpu, row, seed, checked),
        _ => merge_into::<f16>(gpu, row, seed, checked),
    }
}

fn merge_into<T: Element>(
    gpu: &Gpu,
    row: &KernelInfo,
    seed: u64,
    checked: bool,
) -> Result<Vec<Output>, String> {
    let few = row.op == Op::Merge(merge::FEW);
    // Warps of the kernel for few rows that the machine has room for, each with 32 vectors of 8.
    let most = 65_536 / 128 * gpu.multiprocessors() as usize;
    // Rows of several blocks, and blocks of several rows.
    let (heads, dim, tokens) = match few {
        true => [(2, 256, 5), (1, 64, 11), (3, 24, 11)][seed as usize % 3],
        false => (2, 256, most * 8 / (2 * 256) + 1),
    };
    let mut rng = Rng(seed);
    let slots = 40;
    let partial_out = rng.floats(slots * heads * dim, -4.0, 4.0);
    let mut partial_lse = rng.floats(slots * heads, -20.0, 20.0);
    // A state that outweighs all others by more than a weight can be stands last in rows.
    let heaviest = (seed % 2 == 1).then_some(5);
    if let Some(slot) = heaviest {
        partial_lse[slot * heads..][..heads].fill(300.0);
    }
    partial_lse[3] = f32::NEG_INFINITY;
    let (mut rows, mut merge_slots) = (Vec::new(), Vec::new());
    for token in 0..tokens as u32 {
        // Where sections end, and rounds of all warps of a block.
        let edges = match row.op == Op::Merge(merge::MANY) {
            true => &[4, 5, 15, 16][..],
            false => &[0, 1, 15, 16, 17, 21, 32, 33, 64, 65, 128, 129, 150],
        };
        let count = match token % 7 == 3 || few && token % 2 == 0 {
            true => edges[rng.below(edges.len())],
            false => token % 3,
        };
        rows.push(MergeRow {
            token,
            slots_begin: merge_slots.len() as u32,
            slots: count,
            reserved: 0,
        });
        merge_slots.extend((0..count).map(|_| rng.below(slots) as u32));
        if let (Some(last), Some(slot)) = (merge_slots.last_mut().filter(|_| count > 0), heaviest) {
            *last = slot as u32;
        }
    }
    merge_slots.push(0);

    let stream = Stream::new();
    let (out_memory, lse_memory) = (Memory::new(&partial_out), Memory::new(&partial_lse));
    let (rows_memory, slots_memory) = (Memory::new(&rows), Memory::new(&merge_slots));
    let out = Memory::new(&vec![T::from_f32(f32::NAN); tokens * heads * dim]);
    let lse = Memory::new(&vec![f32::NAN; tokens * heads]);
    if row.op == Op::Merge(merge::MANY) {
        // Plans whose outputs have 16 bits alone know that all rows are short.
        let chunks_per_row = (heads * dim / merge::CHUNK) as u32;
        let mut params = MergeParams {
            partial_out: out_memory.address(),
            partial_lse: lse_memory.address(),
            rows: rows_memory.address(),
            merge_slots: slots_memory.address(),
            out: out.address(),
            lse: lse.address(),
            record: 0,
            sinks: 0,
            chunks: tokens as u32 * chunks_per_row,
            chunks_per_row: Divisor::new(chunks_per_row),
            chunks_per_head: Divisor::new((dim / merge::CHUNK) as u32),
            q_heads: heads as u32,
            out_token_stride: (heads * dim) as u32,
            add_up: 0,
            sink_count: Divisor::new(heads as u32),
            reserved: 0,
        };
        let entry = raw::Entry::of_program(gpu.arch(), row.family.name(), row.name)?;
        let mut parameters = [(&raw mut params).cast::<c_void>()];
        let grid = params.chunks.div_ceil(merge::THREADS);
        // SAFETY: memory is as the parameters say until the launch is done.
        unsafe { entry.launch(grid, merge::THREADS, 0, &mut parameters, &stream) }?;
    } else {
        let partials = PartialStates {
            out: out_memory.tensor(Dtype::F32, [slots, heads, dim]),
            lse: lse_memory.tensor(Dtype::F32, [slots, heads]),
        };
        // SAFETY: everything is there as described until the stream is done, rows and slots are in bounds.
        unsafe {
            gpu.merge_states(
                &partials,
                rows_memory.array(),
                slots_memory.array(),
                &out.tensor(T::DTYPE, [tokens, heads, dim]),
                Some(&lse.tensor(Dtype::F32, [tokens, heads])),
                stream.0,
            )
        }
        .map_err(|error| error.to_string())?;
        stream.wait();
    }
    let right = checked.then(|| {
        let partials = cpu::Partials {
            out: &partial_out,
            lse: &partial_lse,
            q_heads: heads,
            head_dim_v: dim,
        };
        let (mut out, mut lse) = (
            vec![T::from_f32(0.0); tokens * heads * dim],
            vec![0.0; tokens * heads],
        );
        cpu::merge_states(&partials, &rows, &merge_slots, &mut out, Some(&mut lse))
            .expect("a good call");
        merged_outputs(&out, &lse)
    });
    compared(merged_outputs::<T>(&out.read(), &lse.read()), right)
}

/// What merges write.
fn merged_outputs<T: Element>(out: &[T], lse: &[f32]) -> Vec<Output> {
    vec![
        Output::rounded("out", T::DTYPE, 1e-5, out),
        Output::rounded("lse", Dtype::F32, 1e-5, lse),
    ]
}

/// One to eight results, some of which saw no key, with gaps between tokens.
pub fn merge_results(
    gpu: &Gpu,
    row: &KernelInfo,
    seed: u64,
    checked: bool,
) -> Result<Vec<Output>, String> {
    match row.name {
        name if name.ends_with("f32") => merge_results_of::<f32>(gpu, seed, checked),
        name if name.ends_with("bf16") => merge_results_of::<bf16>(gpu, seed, checked),
        _ => merge_results_of::<f16>(gpu, seed, checked),
    }
}

fn merge_results_of<T: Element>(
    gpu: &Gpu,
    seed: u64,
    checked: bool,
) -> Result<Vec<Output>, String> {
    let mut rng = Rng(seed);
    let (heads, dim) = [(1, 8), (3, 24), (5, 128), (2, 512)][seed as usize % 4];
    let (tokens, count) = (1 + rng.below(40), 1 + rng.below(8));
    let rows = tokens * heads;
    let results = (0..count).map(|_| {
        let mut out: Vec<T> = rng
            .floats(rows * dim, -4.0, 4.0)
            .into_iter()
            .map(T::from_f32)
            .collect();
        let mut lse = rng.floats(rows, -20.0, 20.0);
        for at in 0..rows {
            if rng.below(5) == 0 {
                lse[at] = f32::NEG_INFINITY;
                out[at * dim..][..dim].fill(T::from_f32(f32::NAN));
            }
        }
        (out, lse)
    });
    let results: Vec<(Vec<T>, Vec<f32>)> = results.collect();
    let shape = [tokens, heads, dim];
    let of_lse = [tokens, heads];
    let memory = results
        .iter()
        .map(|(out, lse)| (Memory::new(out), Memory::new(lse)));
    let memory: Vec<_> = memory.collect();
    let tensors = memory.iter().map(|(out, lse)| {
        let (out, lse) = (out.tensor(T::DTYPE, shape), lse.tensor(Dtype::F32, of_lse));
        (out, lse)
    });
    let tensors: Vec<_> = tensors.collect();
    let gap = 8 * rng.below(3);
    let out = Memory::new(&vec![T::from_f32(f32::NAN); tokens * (heads * dim + gap)]);
    let out_tensor = out
        .tensor(T::DTYPE, shape)
        .with_stride(0, heads * dim + gap);
    let lse = Memory::new(&vec![f32::NAN; rows]);
    let lse_tensor = lse.tensor(Dtype::F32, of_lse);
    let stream = Stream::new();
    // SAFETY: everything is there as described until the stream is done. The second call writes to the output of a result.
    unsafe {
        gpu.merge_results(&tensors, &out_tensor, Some(&lse_tensor), stream.0)
            .and_then(|()| gpu.merge_results(&tensors, &tensors[count - 1].0, None, stream.0))
    }
    .map_err(|error| error.to_string())?;
    stream.wait();
    let written: Vec<T> = out.read();
    let tokens_of = written.chunks(heads * dim + gap);
    let merged: Vec<T> = tokens_of
        .flat_map(|token| token[..heads * dim].to_vec())
        .collect();
    let in_place: Vec<T> = memory[count - 1].0.read();
    let bits = |values: &[T]| -> Vec<u32> { values.iter().map(|x| x.to_f32().to_bits()).collect() };
    if bits(&merged) != bits(&in_place) {
        return Err("other bits where the output is that of a result".into());
    }
    let right = checked.then(|| {
        let results = results.iter().map(|(out, lse)| (&out[..], &lse[..]));
        let results: Vec<_> = results.collect();
        let (mut out, mut lse) = (vec![T::from_f32(0.0); rows * dim], vec![0.0; rows]);
        Cpu::merge_results(&results, heads, dim, &mut out, Some(&mut lse)).expect("a good call");
        merged_outputs(&out, &lse)
    });
    compared(merged_outputs(&merged, &lse.read()), right)
}

/// Heads of 80 elements to those of 128, and back: what plans do on Hopper alone.
pub fn pad(gpu: &Gpu, row: &KernelInfo, seed: u64) -> Result<Vec<Output>, String> {
    const DIM: u32 = 80;
    const PADDED: u32 = 128;
    const STEP: u32 = 16;
    let (tokens, heads) = (3 + seed as u32 % 5, 3);
    let mut rng = Rng(seed);
    let rows = (tokens * heads) as usize;
    let values: Vec<u16> = (0..rows * DIM as usize)
        .map(|_| rng.bits() as u16)
        .collect();
    let memory = [
        Memory::new(&values),
        Memory::new(&vec![u16::MAX; rows * PADDED as usize]),
        Memory::new(&vec![u16::MAX; values.len()]),
    ];
    let entry = raw::Entry::of_program(gpu.arch(), row.family.name(), row.name)?;
    let stream = Stream::new();
    for (back, [from, to]) in [[DIM, PADDED], [PADDED, DIM]].into_iter().enumerate() {
        let mut params = PadParams {
            from: memory[back].address(),
            to: memory[back + 1].address(),
            chunks: rows as u32 * to / pad::CHUNK,
            chunks_per_head: Divisor::new(to / pad::CHUNK),
            heads: Divisor::new(heads),
            from_token: heads * from,
            from_head: from,
            to_token: heads * to,
            to_head: to,
            dim: DIM,
            step: STEP,
            back: back as u32,
        };
        let mut parameters = [(&raw mut params).cast::<c_void>()];
        let grid = params.chunks.div_ceil(pad::THREADS);
        // SAFETY: memory is as the parameters say until the launch is done.
        unsafe { entry.launch(grid, pad::THREADS, 0, &mut parameters, &stream) }?;
    }
    let element = |row: usize, at: u32| {
        let from = pad::source(at / pad::CHUNK * pad::CHUNK, DIM, STEP);
        from.map_or(0, |from| {
            values[row * DIM as usize + (from + at % pad::CHUNK) as usize]
        })
    };
    let padded: Vec<u16> = (0..rows)
        .flat_map(|row| (0..PADDED).map(move |at| (row, at)))
        .map(|(row, at)| element(row, at))
        .collect();
    let outputs = |padded: &[u16], back: &[u16]| {
        vec![Output::exact("padded", padded), Output::exact("back", back)]
    };
    compared(
        outputs(&memory[1].read(), &memory[2].read()),
        Some(outputs(&padded, &values)),
    )
}

pub fn narrow(gpu: &Gpu, row: &KernelInfo, seed: u64) -> Result<Vec<Output>, String> {
    match dtype_of(row) {
        Dtype::BF16 => narrow_to::<bf16>(gpu, row, seed),
        _ => narrow_to::<f16>(gpu, row, seed),
    }
}

fn narrow_to<T: Element>(gpu: &Gpu, row: &KernelInfo, seed: u64) -> Result<Vec<Output>, String> {
    let (tokens, elements, apart) = (3 + seed as u32 % 5, 3 * 80, 3 * 80 + 8);
    let mut values = Rng(seed).floats((tokens * apart) as usize, -100.0, 100.0);
    values[7] = f32::INFINITY;
    values[9] = 1e-30;
    let rows = values.chunks(apart as usize);
    let right: Vec<T> = rows
        .flat_map(|row| row[..elements as usize].iter().map(|&x| T::from_f32(x)))
        .collect();
    let (from, to) = (
        Memory::new(&values),
        Memory::new(&vec![u16::MAX; right.len()]),
    );
    let mut params = NarrowParams {
        from: from.address(),
        to: to.address(),
        chunks: tokens * elements / narrow::CHUNK,
        chunks_per_token: Divisor::new(elements / narrow::CHUNK),
        from_token: apart,
        reserved: 0,
    };
    let entry = raw::Entry::of_program(gpu.arch(), row.family.name(), row.name)?;
    let mut parameters = [(&raw mut params).cast::<c_void>()];
    let grid = params.chunks.div_ceil(narrow::THREADS);
    // SAFETY: memory is as the parameters say until the launch is done.
    unsafe { entry.launch(grid, narrow::THREADS, 0, &mut parameters, &Stream::new()) }?;
    compared(
        vec![Output::exact("rows", &to.read::<T>())],
        Some(vec![Output::exact("rows", &right)]),
    )
}

const HEADS: u32 = 3;
const PAGES: u32 = 5;
const PAGE: u32 = 8;
const TOKENS: usize = 23;

/// Distinct slots in any order, one of which is none.
fn slots(rng: &mut Rng) -> Vec<u32> {
    let mut slots: Vec<u32> = (0..PAGES * PAGE).collect();
    rng.shuffle(&mut slots);
    slots.truncate(TOKENS);
    slots[4] = NO_SLOT;
    slots
}

fn layout(seed: u64) -> KvLayout {
    [KvLayout::Nhd, KvLayout::Hnd][seed as usize % 2]
}

/// Rows of bytes whose length asks for vectors of so many bytes.
pub fn append(
    gpu: &Gpu,
    vector_bytes: u32,
    seed: u64,
    checked: bool,
) -> Result<Vec<Output>, String> {
    let dim = match vector_bytes {
        16 => 16 * (1 + seed as u32 % 9),
        _ => 8 + 16 * (seed as u32 % 9),
    };
    let spec = Spec::new(HEADS, HEADS, dim).with_dtype(Dtype::F8E4M3);
    let mut rng = Rng(seed);
    let slots = slots(&mut rng);
    let mut random = |rows: usize| -> Vec<F8E4M3> {
        (0..rows * dim as usize)
            .map(|_| F8E4M3(rng.bits() as u8))
            .collect()
    };
    let pool_rows = (PAGES * PAGE * HEADS) as usize;
    let [mut k_pool, mut v_pool] = [(); 2].map(|()| random(pool_rows));
    let [k, v] = [(); 2].map(|()| random(TOKENS * HEADS as usize));
    let memory = [&k_pool, &v_pool, &k, &v].map(|values| Memory::new(values));
    let slots_memory = Memory::new(&slots);
    let pool = KvPool::new(
        &spec,
        layout(seed),
        PAGE,
        PAGES,
        memory[0].address(),
        memory[1].address(),
    );
    let shape = [TOKENS, HEADS as usize, dim as usize];
    let stream = Stream::new();
    let [from_k, from_v] = [&memory[2], &memory[3]].map(|rows| rows.tensor(Dtype::F8E4M3, shape));
    // SAFETY: everything is there as described until the stream is done; slots are distinct.
    unsafe {
        gpu.append_paged_kv(
            &spec,
            &pool,
            slots_memory.array(),
            &from_k,
            &from_v,
            stream.0,
        )
    }
    .map_err(|error| error.to_string())?;
    stream.wait();
    let outputs =
        |k: &[F8E4M3], v: &[F8E4M3]| vec![Output::exact("keys", k), Output::exact("values", v)];
    let right = checked.then(|| {
        let mut view = KvViewMut::new(&spec, layout(seed), PAGE, &mut k_pool, &mut v_pool);
        Cpu::append_paged_kv(&spec, PAGES, &slots, &k, &v, &mut view).expect("a good call");
        outputs(&k_pool, &v_pool)
    });
    compared(outputs(&memory[0].read(), &memory[1].read()), right)
}

pub fn quantise(
    gpu: &Gpu,
    row: &KernelInfo,
    seed: u64,
    checked: bool,
) -> Result<Vec<Output>, String> {
    match dtype_of(row) {
        Dtype::BF16 => quantise_from::<bf16>(gpu, seed, checked),
        _ => quantise_from::<f16>(gpu, seed, checked),
    }
}

/// Any NaN is as good as another.
fn bits(pool: &[F8E4M3]) -> Vec<u8> {
    let bits = |x: &F8E4M3| if x.to_f32().is_nan() { 0x7F } else { x.0 };
    pool.iter().map(bits).collect()
}

fn quantise_from<T: Element>(gpu: &Gpu, seed: u64, checked: bool) -> Result<Vec<Output>, String> {
    let dim = [64, 80, 128, 256][seed as usize % 4];
    let spec = Spec::new(HEADS, HEADS, dim)
        .with_dtype(T::DTYPE)
        .with_kv_dtype(Dtype::F8E4M3);
    let mut rng = Rng(seed);
    let slots = slots(&mut rng);
    let mut rows = || -> Vec<T> {
        let values = rng.floats(TOKENS * (HEADS * dim) as usize, -600.0, 600.0);
        let mut rows: Vec<T> = values.into_iter().map(T::from_f32).collect();
        rows[5] = T::from_f32(f32::NAN);
        rows[dim as usize + 3] = T::from_f32(f32::NEG_INFINITY);
        // The first of a vector.
        rows[2 * dim as usize + 8] = T::from_f32(f32::INFINITY);
        rows
    };
    let (k, v) = (rows(), rows());
    let computed = seed.is_multiple_of(2);
    let by_token = KvLayout::Hnd.strides(PAGE, HEADS, 1);
    let mut scales = [(); 2].map(|()| rng.floats((PAGES * PAGE * HEADS) as usize, 0.3, 4.0));
    let mut pools = [(); 2].map(|()| vec![F8E4M3(0x55); (PAGES * PAGE * HEADS * dim) as usize]);
    let pools_memory = pools.each_ref().map(|pool| Memory::new(pool));
    let scales_memory = scales.each_ref().map(|scales| Memory::new(scales));
    let [k_tensor, v_tensor] = scales_memory
        .each_ref()
        .map(|memory| memory.scales_of_tokens(PAGES, HEADS, by_token));
    let pool = KvPool::new(
        &spec,
        layout(seed),
        PAGE,
        PAGES,
        pools_memory[0].address(),
        pools_memory[1].address(),
    )
    .with_scales(gpu::KvScales::Token {
        k: k_tensor,
        v: v_tensor,
    });
    let from = match computed {
        true => gpu::AppendScales::Computed,
        false => gpu::AppendScales::Given,
    };
    let (k_memory, v_memory, slots_memory) =
        (Memory::new(&k), Memory::new(&v), Memory::new(&slots));
    let shape = [TOKENS, HEADS as usize, dim as usize];
    let stream = Stream::new();
    let [from_k, from_v] = [&k_memory, &v_memory].map(|rows| rows.tensor(T::DTYPE, shape));
    // SAFETY: everything is there as described until the stream is done; slots are distinct.
    unsafe {
        gpu.append_quantised(
            &spec,
            &pool,
            from,
            slots_memory.array(),
            &from_k,
            &from_v,
            stream.0,
        )
    }
    .map_err(|error| error.to_string())?;
    stream.wait();
    let outputs = |pools: [&[F8E4M3]; 2], scales: [&[f32]; 2]| {
        vec![
            Output::exact("keys", &bits(pools[0])),
            Output::exact("values", &bits(pools[1])),
            Output::exact("scales of keys", scales[0]),
            Output::exact("scales of values", scales[1]),
        ]
    };
    let right = checked.then(|| {
        let ([k_pool, v_pool], [k_scales, v_scales]) = (&mut pools, &mut scales);
        let mut view = KvViewMut::new(&spec, layout(seed), PAGE, k_pool, v_pool);
        let from = match computed {
            true => AppendScales::Computed {
                k: k_scales,
                v: v_scales,
                k_strides: by_token,
                v_strides: by_token,
            },
            false => AppendScales::Given(KvScales::Token {
                k: k_scales,
                v: v_scales,
                k_strides: by_token,
                v_strides: by_token,
            }),
        };
        Cpu::append_quantised(&spec, PAGES, &slots, &k, &v, &mut view, from).expect("it fits");
        outputs([&pools[0], &pools[1]], [&scales[0], &scales[1]])
    });
    let (got, got_scales) = (
        pools_memory.each_ref().map(Memory::read::<F8E4M3>),
        scales_memory.each_ref().map(Memory::read::<f32>),
    );
    compared(
        outputs([&got[0], &got[1]], [&got_scales[0], &got_scales[1]]),
        right,
    )
}

/// Keys of latent attention into rows of 656 bytes, as the CPU appends them.
pub fn latent_656(
    gpu: &Gpu,
    row: &KernelInfo,
    seed: u64,
    checked: bool,
) -> Result<Vec<Output>, String> {
    match dtype_of(row) {
        Dtype::F16 => latent_656_from::<f16>(gpu, seed, checked),
        _ => latent_656_from::<bf16>(gpu, seed, checked),
    }
}

fn latent_656_from<T: Element>(gpu: &Gpu, seed: u64, checked: bool) -> Result<Vec<Output>, String> {
    let mut rng = Rng(seed);
    let slots = slots(&mut rng);
    // Rows with gaps; numbers of each scale of another size, and some that are not finite.
    let stride = 576 + 8 * (seed as usize % 3);
    let mut rows = vec![T::from_f32(0.0); TOKENS * stride];
    for row in rows.chunks_mut(stride) {
        for tile in 0..5 {
            let largest = [0.0, 1e-4, 1.0, 500.0, 6e4][rng.below(5)];
            let numbers = rng.floats(128, -largest, largest);
            let to = row[tile * 128..].iter_mut();
            to.zip(numbers).for_each(|(to, x)| *to = T::from_f32(x));
        }
    }
    rows[5] = T::from_f32(f32::NAN);
    rows[stride + 130] = T::from_f32(f32::NEG_INFINITY);
    // The first of a vector.
    rows[2 * stride + 8] = T::from_f32(f32::INFINITY);
    let [pages, page] = [PAGES, PAGE].map(|extent| extent as usize);
    let mut pool = vec![F8E4M3(0x55); pages * page * 656];
    let [rows_memory, slots_memory] = [Memory::new(&rows), Memory::new(&slots)];
    let memory = Memory::new(&pool);
    let from = rows_memory
        .tensor(T::DTYPE, [TOKENS, 576])
        .with_stride(0, stride);
    let to = KvPool::latent_656(PAGE, PAGES, memory.address());
    let stream = Stream::new();
    // SAFETY: everything is there as described until the stream is done; slots are distinct.
    unsafe { gpu.append_latent_656(&to, slots_memory.array(), &from, stream.0) }
        .map_err(|error| error.to_string())?;
    stream.wait();
    let outputs = |pool: &[F8E4M3]| {
        // A NaN is any.
        let mut bytes: Vec<u8> = pool.iter().map(|byte| byte.0).collect();
        for row in bytes.chunks_mut(656) {
            let nan = |byte: &&mut u8| **byte & 0x7f == 0x7f;
            row[..512]
                .iter_mut()
                .filter(nan)
                .for_each(|byte| *byte = 0x7f);
        }
        vec![Output::exact("rows", &bytes)]
    };
    let right = checked.then(|| {
        let rows = TensorRef::strided(&rows, [TOKENS, 576], [stride, 1]).expect("it fits");
        let to = TensorMut::new(&mut pool, [pages, page, 656]).expect("it fits");
        Cpu::append_latent_656(&rows, &slots, to).expect("it fits");
        outputs(&pool)
    });
    compared(outputs(&memory.read::<F8E4M3>()), right)
}
