//! The step around attention.

use half::{bf16, f16};
use tandem_attn::{
    abi::NO_SLOT,
    exec::gpu::{self, DeviceTensor, Gpu, KernelInfo, KvPool},
    kv::{AppendScales, KvScales, KvViewMut},
    problem::{Dtype, KvLayout, Spec},
    step::{
        Activation, AdjustToken, Draw, LOG_PROBS, LogProb, LogProbRow, Pairing, Penalties, RmsNorm,
        Rope, Sampling, cpu,
    },
    tensor::{Element, F8E4M3},
};

use super::{Output, compared, dtype_of};
use crate::common::{Memory, Rng, Stream};

fn random<T: Element>(rng: &mut Rng, count: usize, reach: f32) -> Vec<T> {
    let values = rng.floats(count, -reach, reach);
    values.into_iter().map(T::from_f32).collect()
}

/// A launch of such a type.
macro_rules! of_type {
    ($row:expr, $function:ident($($argument:expr),*)) => {
        match dtype_of($row) {
            Dtype::BF16 => $function::<bf16>($($argument),*),
            _ => $function::<f16>($($argument),*),
        }
    };
}

pub fn qkv(
    gpu: &Gpu,
    row: &KernelInfo,
    (heads, quantises): (u32, bool),
    seed: u64,
    checked: bool,
) -> Result<Vec<Output>, String> {
    match (dtype_of(row), quantises) {
        (Dtype::BF16, false) => qkv_into::<bf16, bf16>(gpu, heads, seed, checked),
        (Dtype::BF16, true) => qkv_into::<bf16, F8E4M3>(gpu, heads, seed, checked),
        (_, false) => qkv_into::<f16, f16>(gpu, heads, seed, checked),
        (_, true) => qkv_into::<f16, F8E4M3>(gpu, heads, seed, checked),
    }
}

/// Threads of an SM for each of which a head is enough; more get two each.
const FILLED: usize = 512;

fn qkv_into<T: Element, K: Element>(
    gpu: &Gpu,
    of_thread: u32,
    seed: u64,
    checked: bool,
) -> Result<Vec<Output>, String> {
    let mut rng = Rng(seed);
    // A thread of two heads begins with queries, with keys or with values.
    let (q_heads, kv_heads) = [(5_u32, 2_u32), (2, 2), (1, 3)][rng.below(3)];
    let dim = 64 + 16 * rng.below(5) as u32;
    let all = (q_heads + 2 * kv_heads) as usize;
    let tokens = match of_thread {
        1 => 5 + rng.below(20),
        // The smallest head of the draw has four threads.
        _ => gpu.multiprocessors() as usize * FILLED / (all * 4) + 3,
    };
    let spec = Spec::new(q_heads, kv_heads, dim)
        .with_dtype(T::DTYPE)
        .with_kv_dtype(K::DTYPE);
    let row = all * dim as usize;
    let qkv = random::<T>(&mut rng, tokens * row, 2.0);
    let bias = random::<T>(&mut rng, row, 1.0);
    let weights = [(); 2].map(|()| random::<T>(&mut rng, dim as usize, 1.5));
    let positions: Vec<u32> = (0..tokens).map(|_| rng.below(131_072) as u32).collect();
    let page = 16;
    let pages = (tokens as u32 + 3).div_ceil(page);
    let mut slots: Vec<u32> = (0..pages * page).collect();
    rng.shuffle(&mut slots);
    slots.truncate(tokens);
    slots.iter_mut().step_by(7).for_each(|slot| *slot = NO_SLOT);
    let pairing = [Pairing::HalfSplit, Pairing::Interleaved][rng.below(2)];
    let rope = Rope::new(dim.min(64), 5e5).with_pairing(pairing);
    let table = rope.table().expect("a good embedding");
    let norm = RmsNorm::new(1e-6);
    let layout = [KvLayout::Nhd, KvLayout::Hnd][rng.below(2)];

    let zero = K::from_f32(0.0);
    let elements = (pages * page * kv_heads * dim) as usize;
    let pools = [(); 2].map(|()| Memory::new(&vec![zero; elements]));
    let pool = KvPool::new(
        &spec,
        layout,
        page,
        pages,
        pools[0].address(),
        pools[1].address(),
    );
    let device_rope = gpu.rope(&table).map_err(|error| error.to_string())?;
    let (qkv_memory, bias_memory) = (Memory::new(&qkv), Memory::new(&bias));
    let weight_memory = weights.each_ref().map(|weights| Memory::new(weights));
    let (slots_memory, positions_memory) = (Memory::new(&slots), Memory::new(&positions));
    let q_shape = [tokens, q_heads as usize, dim as usize];
    let q = Memory::new(&vec![T::from_f32(0.0); q_shape.iter().product()]);
    let step = gpu::QkvStep {
        qkv: qkv_memory.tensor(T::DTYPE, [tokens, row]),
        bias: Some(bias_memory.tensor(T::DTYPE, [row])),
        norm: Some(gpu::QkNorm {
            norm,
            q: weight_memory[0].tensor(T::DTYPE, [dim as usize]),
            k: weight_memory[1].tensor(T::DTYPE, [dim as usize]),
        }),
        rope: Some((&device_rope, positions_memory.array())),
    };
    let stream = Stream::new();
    // SAFETY: everything is there as described until the stream is done; slots are distinct.
    unsafe {
        gpu.qkv_step(
            &spec,
            &step,
            slots_memory.array(),
            &q.tensor(T::DTYPE, q_shape),
            &pool,
            gpu::AppendScales::Given,
            stream.0,
        )
    }
    .map_err(|error| error.to_string())?;
    stream.wait();
    let outputs = |q: &[T], pools: [&[K]; 2]| {
        // Sine and cosine have an absolute error; 8 bits are too few to show it but at the edge of two numbers.
        let cache = |name, values: &[K]| {
            let wide: Vec<f32> = values.iter().map(|x| x.to_f32()).collect();
            let mut output = Output::rounded(name, Dtype::F32, 0.0, &wide);
            output.absolute = if K::DTYPE == Dtype::F8E4M3 { 1.0 } else { 0.05 };
            output
        };
        vec![
            Output::rounded("queries", T::DTYPE, 1e-4, q),
            cache("keys", pools[0]),
            cache("values", pools[1]),
        ]
    };
    let right = checked.then(|| {
        let mut pools = [(); 2].map(|()| vec![zero; elements]);
        let [k, v] = &mut pools;
        let mut view = KvViewMut::new(&spec, layout, page, k, v);
        let step = cpu::QkvStep {
            qkv: &qkv,
            bias: Some(&bias),
            norm: Some(cpu::QkNorm {
                norm,
                q: &weights[0],
                k: &weights[1],
            }),
            rope: Some((&table, &positions)),
        };
        let mut q = vec![T::from_f32(0.0); q_shape.iter().product()];
        let given = AppendScales::Given(KvScales::One);
        cpu::qkv(&spec, &step, &slots, &mut q, &mut view, pages, given).expect("a good call");
        outputs(&q, [&pools[0], &pools[1]])
    });
    let got = pools.each_ref().map(Memory::read::<K>);
    compared(outputs(&q.read(), [&got[0], &got[1]]), right)
}

pub fn rms_norm(
    gpu: &Gpu,
    row: &KernelInfo,
    vectors: u32,
    seed: u64,
    checked: bool,
) -> Result<Vec<Output>, String> {
    of_type!(row, norm_of(gpu, vectors, seed, checked))
}

fn norm_of<T: Element>(
    gpu: &Gpu,
    vectors: u32,
    seed: u64,
    checked: bool,
) -> Result<Vec<Output>, String> {
    let mut rng = Rng(seed);
    let (tokens, width) = match vectors {
        1 => (1 + rng.below(2), 8 * (1 + rng.below(300))),
        2 => (gpu.multiprocessors() as usize + 1, 8 * (1 + rng.below(84))),
        _ => (1, 16_392 + 8 * rng.below(100)),
    };
    let norm = RmsNorm::gemma(1e-5);
    let x = random::<T>(&mut rng, tokens * width, 3.0);
    let weight = random::<T>(&mut rng, width, 1.5);
    let mut residual = random::<T>(&mut rng, tokens * width, 30.0);
    let memory = [&x, &residual].map(|values| Memory::new(values));
    let (weight_memory, out) = (
        Memory::new(&weight),
        Memory::new(&vec![T::from_f32(0.0); tokens * width]),
    );
    let tensor = |memory: &Memory| -> DeviceTensor<2> { memory.tensor(T::DTYPE, [tokens, width]) };
    let stream = Stream::new();
    // SAFETY: everything is there as described until the stream is done.
    unsafe {
        gpu.rms_norm(
            norm,
            &tensor(&memory[0]),
            &weight_memory.tensor(T::DTYPE, [width]),
            Some(&tensor(&memory[1])),
            &tensor(&out),
            stream.0,
        )
    }
    .map_err(|error| error.to_string())?;
    stream.wait();
    let outputs = |out: &[T], residual: &[T]| {
        vec![
            Output::rounded("out", T::DTYPE, 0.0, out),
            Output::exact("the residual", residual),
        ]
    };
    let right = checked.then(|| {
        let mut out = vec![T::from_f32(0.0); tokens * width];
        cpu::rms_norm(norm, &x, &weight, Some(&mut residual), &mut out).expect("a good call");
        outputs(&out, &residual)
    });
    compared(outputs(&out.read(), &memory[1].read()), right)
}

pub fn gate(gpu: &Gpu, row: &KernelInfo, seed: u64, checked: bool) -> Result<Vec<Output>, String> {
    of_type!(row, gate_of(gpu, seed, checked))
}

fn gate_of<T: Element>(gpu: &Gpu, seed: u64, checked: bool) -> Result<Vec<Output>, String> {
    let mut rng = Rng(seed);
    let (tokens, width) = (1 + rng.below(9), 8 * (1 + rng.below(60)));
    let activation = [Activation::Silu, Activation::GeluTanh][rng.below(2)];
    let both = random::<T>(&mut rng, tokens * 2 * width, 9.0);
    let (memory, stream) = (Memory::new(&both), Stream::new());
    let out = Memory::new(&vec![T::from_f32(0.0); tokens * width]);
    // SAFETY: everything is there as described until the stream is done.
    unsafe {
        gpu.gate(
            activation,
            &memory.tensor(T::DTYPE, [tokens, 2 * width]),
            &out.tensor(T::DTYPE, [tokens, width]),
            stream.0,
        )
    }
    .map_err(|error| error.to_string())?;
    stream.wait();
    let outputs = |out: &[T]| vec![Output::rounded("out", T::DTYPE, 1e-4, out)];
    let right = checked.then(|| {
        let mut out = vec![T::from_f32(0.0); tokens * width];
        cpu::gate(activation, &both, width, &mut out).expect("a good call");
        outputs(&out)
    });
    compared(outputs(&out.read()), right)
}

pub fn embed(gpu: &Gpu, row: &KernelInfo, seed: u64, checked: bool) -> Result<Vec<Output>, String> {
    of_type!(row, embed_of(gpu, seed, checked))
}

fn embed_of<T: Element>(gpu: &Gpu, seed: u64, checked: bool) -> Result<Vec<Output>, String> {
    let mut rng = Rng(seed);
    let width = 8 * (1 + rng.below(200));
    let table = random::<T>(&mut rng, 13 * width, 1.0);
    let ids: Vec<u32> = (0..7).map(|_| rng.below(13) as u32).collect();
    let scale = rng.between(0.5, 40.0);
    let (table_memory, ids_memory) = (Memory::new(&table), Memory::new(&ids));
    let out = Memory::new(&vec![T::from_f32(0.0); ids.len() * width]);
    let stream = Stream::new();
    // SAFETY: everything is there as described until the stream is done.
    unsafe {
        gpu.embed(
            &table_memory.tensor(T::DTYPE, [13, width]),
            ids_memory.array(),
            scale,
            &out.tensor(T::DTYPE, [ids.len(), width]),
            stream.0,
        )
    }
    .map_err(|error| error.to_string())?;
    stream.wait();
    let outputs = |out: &[T]| vec![Output::exact("out", out)];
    let right = checked.then(|| {
        let mut out = vec![T::from_f32(0.0); ids.len() * width];
        cpu::embed(&table, width, &ids, scale, &mut out).expect("a good call");
        outputs(&out)
    });
    compared(outputs(&out.read()), right)
}

pub fn sample(
    gpu: &Gpu,
    row: &KernelInfo,
    seed: u64,
    checked: bool,
) -> Result<Vec<Output>, String> {
    if row.name.ends_with("f32") {
        return sample_of::<f32>(gpu, seed, checked);
    }
    of_type!(row, sample_of(gpu, seed, checked))
}

fn sample_of<T: Element>(gpu: &Gpu, seed: u64, checked: bool) -> Result<Vec<Output>, String> {
    let mut rng = Rng(seed + 1);
    let vocabulary = 8 * (5 + rng.below(200));
    let hot = Sampling {
        temperature: 0.8,
        seed,
        ..Sampling::GREEDY
    };
    let samplings = [
        Sampling::GREEDY,
        hot,
        Sampling { top_k: 20, ..hot },
        Sampling { top_p: 0.8, ..hot },
    ];
    let logits = random::<T>(&mut rng, samplings.len() * vocabulary, 4.0);
    let draws: Vec<Draw> = samplings
        .iter()
        .map(|sampling| sampling.draw(3).expect("a good rule"))
        .collect();
    let (logits_memory, draws_memory) = (Memory::new(&logits), Memory::new(&draws));
    let (ids, stream) = (Memory::new(&vec![u32::MAX; draws.len()]), Stream::new());
    // SAFETY: everything is there as described until the stream is done.
    unsafe {
        gpu.sample(
            &logits_memory.tensor(T::DTYPE, [draws.len(), vocabulary]),
            draws_memory.array(),
            ids.array(),
            stream.0,
        )
    }
    .map_err(|error| error.to_string())?;
    stream.wait();
    let outputs = |ids: &[u32]| vec![Output::exact("ids", ids)];
    let right = checked.then(|| {
        let mut ids = vec![u32::MAX; draws.len()];
        cpu::sample(&logits, vocabulary, &draws, &mut ids).expect("a good call");
        outputs(&ids)
    });
    compared(outputs(&ids.read()), right)
}

pub fn adjust(gpu: &Gpu, seed: u64, checked: bool) -> Result<Vec<Output>, String> {
    let mut rng = Rng(seed + 1);
    let vocabulary = 8 * (40 + rng.below(200));
    let mut logits = random::<f32>(&mut rng, 2 * vocabulary, 9.0);
    let penalties = Penalties {
        presence: 0.5,
        frequency: 0.25,
        repetition: 1.5,
    };
    let ids = [rng.below(vocabulary) as u32; 1];
    let (mut rows, mut tokens) = (Vec::new(), Vec::new());
    let none = AdjustToken {
        token: 0,
        bias: 0.0,
        seen: 0,
        logit: 0.0,
    };
    for row in [1, 0] {
        let first = tokens.len() as u32;
        // The last row does not list its newest token.
        for token in (0..vocabulary as u32).filter(|&token| row == 1 || token != ids[0]) {
            let seen = [0, 1, 9, AdjustToken::IN_PROMPT][rng.below(4)];
            let bias = [0.0, rng.between(-9.0, 9.0), f32::NEG_INFINITY][rng.below(3)];
            tokens.push(AdjustToken {
                token,
                bias,
                seen,
                logit: 0.0,
            });
        }
        rows.push(penalties.row(row, first..tokens.len() as u32, Some(0)));
        tokens.push(none);
    }
    let (memory, on_rows) = (Memory::new(&logits), Memory::new(&rows));
    let (on_tokens, on_ids) = (Memory::new(&tokens), Memory::new(&ids));
    let (tensor, stream) = (memory.tensor(Dtype::F32, [2, vocabulary]), Stream::new());
    let (of_rows, of_tokens) = (on_rows.array(), on_tokens.array());
    // SAFETY: everything is there as described until the stream is done; tokens of a row are distinct.
    let adjusted = unsafe {
        gpu.adjust(&tensor, of_rows, of_tokens, on_ids.array(), stream.0)
            .map_err(|error| error.to_string())?;
        stream.wait();
        let adjusted = memory.read::<f32>();
        gpu.restore(&tensor, of_rows, of_tokens, stream.0)
            .map_err(|error| error.to_string())?;
        adjusted
    };
    stream.wait();
    let outputs = |adjusted: &[f32], restored: &[f32], tokens: &[AdjustToken]| {
        vec![
            Output::exact("adjusted", adjusted),
            Output::exact("restored", restored),
            Output::exact("tokens", tokens),
        ]
    };
    let got = outputs(&adjusted, &memory.read(), &on_tokens.read());
    let right = checked.then(|| {
        let before = logits.clone();
        cpu::adjust(&mut logits, vocabulary, &rows, &mut tokens, &ids).expect("a good call");
        outputs(&logits, &before, &tokens)
    });
    compared(got, right)
}

pub fn log_probs(gpu: &Gpu, seed: u64, checked: bool) -> Result<Vec<Output>, String> {
    let mut rng = Rng(seed + 1);
    let vocabulary = 1 + rng.below(9000);
    let (rows, stride) = (3, vocabulary.next_multiple_of(8));
    let logits = random::<f32>(&mut rng, rows * stride, 5.0);
    let ids = [(); 3].map(|()| rng.below(vocabulary) as u32);
    let asked = [(2, 20), (0, 3)].map(|(row, top)| LogProbRow { row, top });
    let none = vec![LogProb::default(); asked.len() * LOG_PROBS as usize];
    let (memory, on_asked) = (Memory::new(&logits), Memory::new(&asked));
    let (on_ids, out, stream) = (Memory::new(&ids), Memory::new(&none), Stream::new());
    let tensor = memory.tensor(Dtype::F32, [rows, vocabulary]);
    let tensor = tensor.with_stride(0, stride);
    // SAFETY: everything is there as described until the stream is done.
    unsafe {
        gpu.log_probs(
            &tensor,
            on_asked.array(),
            on_ids.array(),
            out.array(),
            stream.0,
        )
    }
    .map_err(|error| error.to_string())?;
    stream.wait();
    let outputs = |out: &[LogProb]| {
        let tokens: Vec<u32> = out.iter().map(|one| one.token).collect();
        let values: Vec<f32> = out.iter().map(|one| one.value).collect();
        vec![
            Output::exact("tokens", &tokens),
            Output::rounded("values", Dtype::F32, 1e-5, &values),
        ]
    };
    let right = checked.then(|| {
        let dense: Vec<_> = logits
            .chunks(stride)
            .map(|row| &row[..vocabulary])
            .collect();
        let mut out = none.clone();
        cpu::log_probs(&dense.concat(), vocabulary, &asked, &ids, &mut out).expect("a good call");
        outputs(&out)
    });
    compared(outputs(&out.read()), right)
}
