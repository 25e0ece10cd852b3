//! Fused projections.

use proptest::prelude::*;
use tandem_attn::{
    abi::NO_SLOT,
    exec::gpu::{AppendScales, DeviceTensor, Gpu, KvPool, KvScales, QkNorm, QkvStep},
    problem::{Dtype, KvLayout, Spec},
    step::{RmsNorm, Rope},
    tensor::F8E4M3,
};

use super::{
    POISON, check,
    common::{self, Memory, Rng, Stream, problems::cases},
    is_scale_of, near_in_8_bits, random,
    steps::{self, Qkv},
    wide,
};

#[derive(Clone, Debug)]
pub struct Shape {
    pub heads: [u32; 2],
    pub dim: u32,
    pub tokens: usize,
    pub dtype: Dtype,
    /// Of the pages; `None`: that of the projection.
    pub scales: Option<Scales>,
    pub layout: KvLayout,
    pub page_size: u32,
    pub bias: bool,
    pub norm: Option<RmsNorm>,
    pub rope: Option<Rope>,
    /// Queries take the place of those of the projection.
    pub in_place: bool,
    /// Elements between tokens, beyond the tokens themselves.
    pub gap: usize,
    pub seed: u64,
}

#[derive(Clone, Copy, Debug)]
pub enum Scales {
    One,
    Head,
    Computed,
}

fn rope(dim: u32) -> impl Strategy<Value = Option<Rope>> {
    let part = prop_oneof![1..=dim / 16, Just(dim / 16)];
    let rope = steps::rope(part.prop_map(|part| 16 * part));
    prop_oneof![1 => Just(None), 5 => rope.prop_map(Some)]
}

fn shape() -> impl Strategy<Value = Shape> {
    let dim = prop_oneof![(1..33_u32).prop_map(|part| 16 * part), Just(64), Just(128)];
    let norm = steps::norm();
    let scales = prop_oneof![
        3 => Just(None),
        1 => Just(Some(Scales::One)),
        1 => Just(Some(Scales::Head)),
        1 => Just(Some(Scales::Computed))
    ];
    let types = (prop_oneof![Just(Dtype::BF16), Just(Dtype::F16)], scales);
    let layout = prop_oneof![Just(KvLayout::Nhd), Just(KvLayout::Hnd)];
    let sizes = (1..5_u32, 1..6_u32, 0..40_usize, layout, 1..33_u32);
    let flags = (
        any::<bool>(),
        any::<bool>(),
        (0..3_usize).prop_map(|gap| gap * 8),
    );
    dim.prop_flat_map(move |dim| {
        (
            sizes.clone(),
            types.clone(),
            flags.clone(),
            norm.clone(),
            rope(dim),
            any::<u64>(),
        )
            .prop_map(
                move |(sizes, (dtype, scales), (bias, in_place, gap), norm, rope, seed)| {
                    let (kv_heads, group, tokens, layout, page_size) = sizes;
                    Shape {
                        heads: [kv_heads * group, kv_heads],
                        dim,
                        tokens,
                        dtype,
                        scales,
                        layout,
                        page_size,
                        bias,
                        norm,
                        rope,
                        in_place,
                        gap,
                        seed,
                    }
                },
            )
    })
}

pub fn run(gpu: &Gpu, shape: &Shape) {
    let [q_heads, kv_heads] = shape.heads;
    let (dim, dtype) = (shape.dim as usize, shape.dtype);
    let of_pool = shape.scales.map_or(dtype, |_| Dtype::F8E4M3);
    let spec = Spec::new(q_heads, kv_heads, shape.dim)
        .with_dtype(dtype)
        .with_kv_dtype(of_pool);
    let row = (q_heads + 2 * kv_heads) as usize * dim;
    let stride = row + shape.gap;
    let mut rng = Rng(shape.seed);
    let source = random(&mut rng, dtype, shape.tokens * stride, 2.0);
    let bias = random(&mut rng, dtype, row, 1.0);
    let weights = [(); 2].map(|()| random(&mut rng, dtype, dim, 1.5));
    let positions: Vec<u32> = (0..shape.tokens)
        .map(|_| rng.below(131_072) as u32)
        .collect();
    let pages = (shape.tokens as u32 + 3).div_ceil(shape.page_size);
    let mut slots: Vec<u32> = (0..pages * shape.page_size).collect();
    rng.shuffle(&mut slots);
    slots.truncate(shape.tokens);
    for (token, slot) in slots.iter_mut().enumerate() {
        match token % 7 {
            2 => *slot = NO_SLOT,
            5 => *slot += pages * shape.page_size,
            _ => {}
        }
    }

    let stream = Stream::new();
    let qkv_memory = Memory::new(&source);
    let q_row = q_heads as usize * dim;
    let q_stride = if shape.in_place {
        stride
    } else {
        q_row + shape.gap
    };
    let q_memory = Memory::new(&vec![POISON; shape.tokens * q_stride]);
    let elements = (pages * shape.page_size * kv_heads) as usize * dim;
    let marker = vec![0x7F_u8; elements * of_pool.bytes() as usize];
    let pools = [(); 2].map(|()| Memory::new(&marker));
    let scale_count = (pages * shape.page_size * kv_heads) as usize;
    let of_heads = [0.5, 1.0, 2.0, 0.25_f32];
    let scale_memory = [(); 2].map(|()| match shape.scales {
        Some(Scales::Head) => Memory::new(&of_heads),
        _ => Memory::new(&vec![-1.0_f32; scale_count.max(4)]),
    });
    let of_tokens = shape.layout.strides(shape.page_size, kv_heads, 1);
    let token_scales = |memory: &Memory| {
        let sizes = [pages, shape.page_size, kv_heads].map(|size| size as usize);
        let mut tensor: DeviceTensor<3> = memory.tensor(Dtype::F32, sizes);
        tensor.strides = [of_tokens.page, of_tokens.token, of_tokens.head].map(|x| x as usize);
        tensor
    };
    let head_scales = |memory: &Memory| memory.tensor(Dtype::F32, [kv_heads as usize]);
    let [k_scales, v_scales] = &scale_memory;
    let (scales, from) = match shape.scales {
        None | Some(Scales::One) => (KvScales::One, AppendScales::Given),
        Some(Scales::Head) => {
            let (k, v) = (head_scales(k_scales), head_scales(v_scales));
            (KvScales::Head { k, v }, AppendScales::Given)
        }
        Some(Scales::Computed) => {
            let (k, v) = (token_scales(k_scales), token_scales(v_scales));
            (KvScales::Token { k, v }, AppendScales::Computed)
        }
    };
    let [k, v] = [&pools[0], &pools[1]].map(Memory::address);
    let pool = KvPool::new(&spec, shape.layout, shape.page_size, pages, k, v).with_scales(scales);

    let rope = shape.rope.map(|rope| {
        let table = rope.table().expect("a good embedding");
        gpu.rope(&table).expect("its elements are a multiple of 16")
    });
    let (bias_memory, positions_memory) = (Memory::new(&bias), Memory::new(&positions));
    let weight_memory = weights.each_ref().map(|weights| Memory::new(weights));
    let slots_memory = Memory::new(&slots);
    let step = QkvStep {
        qkv: qkv_memory
            .tensor(dtype, [shape.tokens, row])
            .with_stride(0, stride),
        bias: shape.bias.then(|| bias_memory.tensor(dtype, [row])),
        norm: shape.norm.map(|norm| QkNorm {
            norm,
            q: weight_memory[0].tensor(dtype, [dim]),
            k: weight_memory[1].tensor(dtype, [dim]),
        }),
        rope: rope.as_ref().map(|rope| (rope, positions_memory.array())),
    };
    let q_target = if shape.in_place {
        &qkv_memory
    } else {
        &q_memory
    };
    let q = q_target
        .tensor(dtype, [shape.tokens, q_heads as usize, dim])
        .with_stride(0, q_stride);
    // SAFETY: everything is there as described until the stream is done; slots are distinct.
    unsafe {
        gpu.qkv_step(
            &spec,
            &step,
            slots_memory.array(),
            &q,
            &pool,
            from,
            stream.0,
        )
    }
    .expect("a good call");
    stream.wait();

    let dense: Vec<f64> = source
        .chunks(stride)
        .flat_map(|token| wide(dtype, &token[..row]))
        .collect();
    let (bias, weights) = (
        wide(dtype, &bias),
        weights.each_ref().map(|w| wide(dtype, w)),
    );
    let right = Qkv {
        heads: shape.heads.map(|heads| heads as usize),
        dim,
        qkv: &dense,
        bias: shape.bias.then_some(&bias),
        norm: shape
            .norm
            .map(|norm| (norm, [&weights[0], &weights[1]].map(|w| &w[..]))),
        rope: shape.rope.map(|rope| (rope, &positions[..])),
    };
    let [right_q, right_k, right_v] = right.parts();
    let got = q_target.read::<u16>();
    if shape.in_place {
        for (token, right) in right_q.chunks(q_row).enumerate() {
            let (got, was) = (
                &got[token * stride..][..stride],
                &source[token * stride..][..stride],
            );
            check(
                "queries in place",
                dtype,
                &got[..q_row],
                right,
                q_row,
                q_row,
            );
            assert_eq!(
                got[q_row..],
                was[q_row..],
                "behind the queries of token {token}"
            );
        }
    } else {
        check("queries", dtype, &got, &right_q, q_row, q_stride);
    }

    let strides = shape.layout.strides(shape.page_size, kv_heads, shape.dim);
    for (index, right) in [right_k, right_v].iter().enumerate() {
        let name = ["keys", "values"][index];
        let (mut bytes, scales) = (pools[index].read::<u8>(), scale_memory[index].read::<f32>());
        let tokens = slots.iter().enumerate();
        for (token, &slot) in tokens.filter(|&(_, &slot)| slot < pages * shape.page_size) {
            let (page, offset) = (slot / shape.page_size, slot % shape.page_size);
            for head in 0..kv_heads {
                let at = page * strides.page + offset * strides.token + head * strides.head;
                let right = &right[(token * kv_heads as usize + head as usize) * dim..][..dim];
                let size = of_pool.bytes() as usize;
                let row = &mut bytes[at as usize * size..][..dim * size];
                let scale = match shape.scales {
                    Some(Scales::Head) => of_heads[head as usize],
                    Some(Scales::Computed) => {
                        let of = page * of_tokens.page + offset * of_tokens.token;
                        let scale = scales[(of + head * of_tokens.head) as usize];
                        let fits = is_scale_of(scale, right);
                        assert!(
                            fits,
                            "{name}: a scale of {scale}, token {token}, head {head}"
                        );
                        scale
                    }
                    _ => 1.0,
                };
                if size == 2 {
                    let bits: Vec<u16> = row
                        .as_chunks()
                        .0
                        .iter()
                        .map(|&two| u16::from_le_bytes(two))
                        .collect();
                    check(name, dtype, &bits, right, dim, dim);
                } else {
                    for (&got, &right) in row.iter().zip(right) {
                        let near = near_in_8_bits(F8E4M3(got), scale, right);
                        assert!(near, "{name}: {got:#x} times {scale} instead of {right}");
                    }
                }
                row.fill(0x7F);
            }
        }
        assert!(bytes == marker, "{name} are written where no token goes");
    }
}

#[test]
fn heads_are_those_of_the_formulas() {
    let Some(gpu) = common::gpu("heads_are_those_of_the_formulas") else {
        return;
    };
    let hopper = gpu.compute_capability().0 == 9;
    let config = cases(160);
    proptest!(config, |(shape in shape().prop_filter("8 bits on Hopper", |s| hopper || s.scales.is_none()))| {
        run(gpu, &shape);
    });
}

/// Threads have two heads each where there is much to do.
#[test]
fn prompts_fill_the_machine() {
    let Some(gpu) = common::gpu("prompts_fill_the_machine") else {
        return;
    };
    let hopper = gpu.compute_capability().0 == 9;
    let shape = Shape {
        heads: [8, 2],
        dim: 128,
        tokens: gpu.multiprocessors() as usize * 10 + 3,
        dtype: Dtype::BF16,
        scales: None,
        layout: KvLayout::Hnd,
        page_size: 16,
        bias: true,
        norm: Some(RmsNorm::new(1e-6)),
        rope: Some(Rope::new(128, 5e5)),
        in_place: true,
        gap: 8,
        seed: 5,
    };
    run(gpu, &shape);
    // As many heads as no pair of them has: the last thread of a token has one.
    let odd = Shape {
        heads: [3, 3],
        rope: Some(Rope::new(64, 1e4)),
        ..shape.clone()
    };
    run(
        gpu,
        &Shape {
            tokens: odd.tokens * 2,
            in_place: false,
            ..odd
        },
    );
    if hopper {
        run(
            gpu,
            &Shape {
                scales: Some(Scales::Computed),
                ..shape
            },
        );
    }
}

/// Not all threads of a warp have a part of a head, if its dimension / 16 is not a power of two.
#[test]
fn scales_are_of_the_numbers_of_their_heads() {
    let Some(gpu) = common::gpu("scales_are_of_the_numbers_of_their_heads") else {
        return;
    };
    if gpu.compute_capability().0 != 9 {
        return;
    }
    for dim in [48, 80, 96, 112, 144, 160, 304] {
        // With one head for each thread, and with two.
        for tokens in [9, gpu.multiprocessors() as usize * 24] {
            let shape = Shape {
                heads: [2, 2],
                dim,
                tokens,
                dtype: Dtype::BF16,
                scales: Some(Scales::Computed),
                layout: KvLayout::Nhd,
                page_size: 16,
                bias: false,
                norm: None,
                rope: None,
                in_place: false,
                gap: 0,
                seed: dim.into(),
            };
            run(gpu, &shape);
        }
    }
}
