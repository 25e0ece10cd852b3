//! Normalisation, gates, embeddings.

use tandem_attn::{
    problem::Dtype,
    step::{Activation, RmsNorm},
};

use super::{
    POISON, check,
    common::{self, Memory, Rng, Stream},
    random, steps, wide,
};

#[test]
fn norms_are_those_of_the_formula() {
    let Some(gpu) = common::gpu("norms_are_those_of_the_formula") else {
        return;
    };
    let many = gpu.multiprocessors() as usize + 1;
    let mut rng = Rng(1);
    for (tokens, width, gap) in [
        (0, 64, 0),
        (1, 8, 0),
        (5, 248, 8),
        (3, 4096, 0),
        (2, 8192, 16),
        (1, 16_376, 0),
        (2, 32_768, 0),
        (many, 1024, 8),
        (many, 2056, 0),
    ] {
        for (dtype, norm) in [
            (Dtype::BF16, RmsNorm::new(1e-6)),
            (Dtype::F16, RmsNorm::gemma(1e-5)),
        ] {
            let stride = width + gap;
            let (x, weight) = (
                random(&mut rng, dtype, tokens * stride, 3.0),
                random(&mut rng, dtype, width, 1.5),
            );
            let residual = random(&mut rng, dtype, tokens * width, 30.0);
            let [x_memory, weight_memory, residual_memory] =
                [&x, &weight, &residual].map(|values| Memory::new(values));
            let stream = Stream::new();
            for with_residual in [false, true] {
                let out = Memory::new(&vec![POISON; tokens * stride]);
                let of_residual = residual_memory.tensor(dtype, [tokens, width]);
                // SAFETY: everything is there as described until the stream is done.
                unsafe {
                    gpu.rms_norm(
                        norm,
                        &x_memory
                            .tensor(dtype, [tokens, width])
                            .with_stride(0, stride),
                        &weight_memory.tensor(dtype, [width]),
                        with_residual.then_some(&of_residual),
                        &out.tensor(dtype, [tokens, width]).with_stride(0, stride),
                        stream.0,
                    )
                }
                .expect("a good call");
                stream.wait();
                let mut input: Vec<f64> = x
                    .chunks(stride)
                    .flat_map(|row| wide(dtype, &row[..width]))
                    .collect();
                if with_residual {
                    let sums = wide(dtype, &residual).into_iter().zip(&input);
                    let sums: Vec<f64> = sums.map(|(a, b)| a + b).collect();
                    let got = residual_memory.read::<u16>();
                    check("the residual", dtype, &got, &sums, width, width);
                    input = wide(dtype, &got);
                }
                let right = steps::rms_norm(norm, &input, &wide(dtype, &weight));
                check("out", dtype, &out.read::<u16>(), &right, width, stride);
            }
        }
    }
}

#[test]
fn norms_may_take_the_place_of_what_they_are_of() {
    let Some(gpu) = common::gpu("norms_may_take_the_place_of_what_they_are_of") else {
        return;
    };
    let (tokens, width, dtype) = (7, 512, Dtype::BF16);
    let x = random(&mut Rng(2), dtype, tokens * width, 3.0);
    let (memory, ones) = (Memory::new(&x), Memory::new(&vec![0x3F80_u16; width]));
    let (tensor, stream) = (memory.tensor(dtype, [tokens, width]), Stream::new());
    let (norm, weight) = (RmsNorm::new(1e-6), ones.tensor(dtype, [width]));
    // SAFETY: everything is there as described until the stream is done.
    unsafe { gpu.rms_norm(norm, &tensor, &weight, None, &tensor, stream.0) }.expect("a good call");
    stream.wait();
    let right = steps::rms_norm(norm, &wide(dtype, &x), &vec![1.0; width]);
    check("out", dtype, &memory.read::<u16>(), &right, width, width);
}

#[test]
fn gates_are_those_of_the_formulas() {
    let Some(gpu) = common::gpu("gates_are_those_of_the_formulas") else {
        return;
    };
    let mut rng = Rng(3);
    for (tokens, width, gap) in [(0, 8, 0), (1, 8, 0), (9, 264, 8), (3, 14_336, 0)] {
        for activation in [Activation::Silu, Activation::GeluTanh] {
            for dtype in [Dtype::BF16, Dtype::F16] {
                let mut both = random(&mut rng, dtype, tokens * (2 * width + gap), 9.0);
                if let Some(first) = both.first_mut() {
                    // The most negative number of the type: its gate is 0, not NaN.
                    *first = if dtype == Dtype::BF16 { 0xFF7F } else { 0xFBFF };
                }
                let memory = Memory::new(&both);
                let out = Memory::new(&vec![POISON; tokens * (width + gap)]);
                let stream = Stream::new();
                // SAFETY: everything is there as described until the stream is done.
                unsafe {
                    gpu.gate(
                        activation,
                        &memory
                            .tensor(dtype, [tokens, 2 * width])
                            .with_stride(0, 2 * width + gap),
                        &out.tensor(dtype, [tokens, width])
                            .with_stride(0, width + gap),
                        stream.0,
                    )
                }
                .expect("a good call");
                stream.wait();
                let right: Vec<f64> = both
                    .chunks(2 * width + gap)
                    .flat_map(|row| {
                        let row = wide(dtype, row);
                        let one = |i: usize| steps::activate(activation, row[i]) * row[width + i];
                        (0..width).map(one).collect::<Vec<_>>()
                    })
                    .map(|x| if x.is_nan() { 0.0 } else { x })
                    .collect();
                check("out", dtype, &out.read::<u16>(), &right, width, width + gap);
            }
        }
    }
}

#[test]
fn embeddings_are_rows_times_the_scale() {
    let Some(gpu) = common::gpu("embeddings_are_rows_times_the_scale") else {
        return;
    };
    let mut rng = Rng(4);
    for (width, gap, dtype) in [
        (8, 0, Dtype::F16),
        (520, 8, Dtype::BF16),
        (4096, 0, Dtype::BF16),
    ] {
        let table = random(&mut rng, dtype, 13 * width, 1.0);
        // The last two are not in the table.
        let ids = [12, 0, 3, 3, 7, 13, u32::MAX];
        let (table_memory, ids_memory) = (Memory::new(&table), Memory::new(&ids));
        for scale in [1.0, 33.5] {
            let out = Memory::new(&vec![POISON; ids.len() * (width + gap)]);
            let stream = Stream::new();
            // SAFETY: everything is there as described until the stream is done.
            unsafe {
                gpu.embed(
                    &table_memory.tensor(dtype, [13, width]),
                    ids_memory.array(),
                    scale,
                    &out.tensor(dtype, [ids.len(), width])
                        .with_stride(0, width + gap),
                    stream.0,
                )
            }
            .expect("a good call");
            stream.wait();
            let right: Vec<f64> = ids
                .iter()
                .flat_map(|&id| match table.chunks(width).nth(id as usize) {
                    Some(row) => wide(dtype, row)
                        .iter()
                        .map(|x| x * f64::from(scale))
                        .collect(),
                    None => vec![0.0; width],
                })
                .collect();
            check("out", dtype, &out.read::<u16>(), &right, width, width + gap);
        }
    }
}
