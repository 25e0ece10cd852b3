//! Pools with scales, in mixed layouts, of several layers, and in two parts.

use half::bf16;
use tandem_attn::{
    Error,
    exec::{
        Cpu,
        emulated::Emulated,
        gpu::{self, DeviceBuffer, KvPool},
    },
    kv::{KvScales, KvStrides, KvView, PageCopy},
    plan::{DeviceDescription, Plan, PlanOptions, Planner},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    tensor::{F8E4M3, TensorMut},
};

use crate::{
    latent_parts::Parts,
    layouts::{layouts, uneven},
    no_failure,
    numeric::{Tolerance, compare, to_f64},
    problems::{Tensors, prefixed},
    settings,
};

/// A prompt and decodes of 8-bit keys, each times a scale of its own: a power of two, so that the prompt's keys lose nothing
/// where they become 16 bits.
#[test]
fn scales_of_each_token_are_those_of_the_cpu() {
    let _others = no_failure();
    let emulated = Emulated::new(settings(2, 7)).expect("the emulator");
    let spec = Spec::new(8, 2, 128).with_kv_dtype(Dtype::F8E4M3);
    let batch = prefixed(&[(70, 0, 40), (50, 2, 1), (33, 0, 1)], 8, false, 5);
    let tensors = Tensors::<bf16, F8E4M3>::random(&spec, &batch, KvLayout::Nhd, 3);
    let table = &batch.parts[0].table;
    let strides = KvLayout::Nhd.strides(table.page_size, spec.kv_heads, 1);
    let scales = |step: usize| -> Vec<f32> {
        let count = (table.pool_pages * strides.page) as usize;
        let exponent = |i: usize| (i * step % 5) as f32 - 2.0;
        (0..count).map(|i| exponent(i).exp2()).collect()
    };
    let (k, v) = (scales(3), scales(7));
    let of_tokens = KvScales::Token {
        k: &k,
        v: &v,
        k_strides: strides,
        v_strides: strides,
    };
    let views = [tensors.parts[0].view().with_scales(of_tokens)];
    fn results(
        (spec, batch, device): (&Spec, &Batch, DeviceDescription),
        run: impl Fn(&Plan, &mut [bf16], &mut [f32]),
    ) -> (Vec<f64>, Vec<f64>) {
        let plan = Planner::new().plan(spec, batch, &device, &PlanOptions::default());
        let plan = plan.expect("it can be planned");
        let rows = (plan.total_q * spec.q_heads) as usize;
        let (mut out, mut lse) = (vec![bf16::NAN; rows * 128], vec![f32::NAN; rows]);
        run(&plan, &mut out, &mut lse);
        (to_f64(&out), to_f64(&lse))
    }
    let (q, cpu) = (&tensors.q, Cpu::new());
    let right = results((&spec, &batch, cpu.device()), |plan, out, lse| {
        cpu.run(plan, q, &views, out, Some(lse))
            .expect("it is right");
    });
    let got = results((&spec, &batch, emulated.device()), |plan, out, lse| {
        let run = emulated.run(plan, q, &views, out, Some(lse));
        run.expect("it is right");
    });
    let shape = [batch.total_q() as usize, 8, 128];
    let mut tolerance = Tolerance::of(Dtype::BF16);
    tolerance.absolute = 4.0 * 2.0 / 256.0;
    compare("out", &shape, &got.0, &right.0, tolerance).unwrap();
    tolerance.absolute = 2e-4;
    compare("lse", &shape[..2], &got.1, &right.1, tolerance).unwrap();
}

/// Keys with the heads of a token side by side, values with those of a page.
#[test]
fn values_may_lie_in_another_layout_than_keys() {
    let _others = no_failure();
    let emulated = Emulated::new(settings(1, 3)).expect("the emulator");
    for (dim_qk, dim_v) in [(64, 64), (128, 128), (192, 128), (256, 256)] {
        let spec = Spec::new(4, 2, dim_qk).with_head_dim_v(dim_v);
        let batch = prefixed(&[(70, 0, 40), (50, 2, 1)], 16, false, 3);
        let plan = Planner::new()
            .plan(&spec, &batch, &emulated.device(), &PlanOptions::default())
            .expect("it can be planned");
        let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 5);
        let mut mixed = tensors.views()[0];
        let [from, to] = [KvLayout::Nhd, KvLayout::Hnd].map(|layout| layout.strides(16, 2, dim_v));
        let mut v = vec![bf16::ZERO; mixed.v.len()];
        for index in 0..v.len() as u32 / dim_v {
            let (page, token, head) = (index / 32, index / 2 % 16, index % 2);
            let at = |strides: &KvStrides| {
                let first = page * strides.page + token * strides.token + head * strides.head;
                first as usize..(first + dim_v) as usize
            };
            v[at(&to)].copy_from_slice(&mixed.v[at(&from)]);
        }
        (mixed.v, mixed.v_strides) = (&v, to);
        let mut out = vec![bf16::NAN; (plan.total_q * 4 * dim_v) as usize];
        emulated
            .run(&plan, &tensors.q, &[mixed], &mut out, None)
            .expect("it runs");
        let right = tensors.reference(&spec, &batch);
        let shape = [plan.total_q, 4, dim_v].map(|extent| extent as usize);
        let mut tolerance = Tolerance::of(Dtype::BF16);
        tolerance.absolute = 1.0 / 256.0;
        let differs = compare("out", &shape, &to_f64(&out), &right.out, tolerance);
        assert_eq!(differs, Ok(()), "{dim_qk}, {dim_v}");
    }
}

/// In all ways that tensor maps describe: `driver_errors` counts these maps.
#[test]
fn keys_and_values_are_found_wherever_tensor_maps_describe_them() {
    let _others = no_failure();
    let emulated = Emulated::new(settings(1, 3)).expect("the emulator");
    let (page, heads) = (16, 4);
    for dims in [
        [64, 64],
        [128, 128],
        [112, 112],
        [96, 96],
        [192, 128],
        [512, 512],
        [64, 512],
    ] {
        let spec = Spec::new(8, heads, dims[0]).with_head_dim_v(dims[1]);
        let batch = prefixed(&[(70, 0, 40), (50, 2, 1), (30, 0, 1)], page, false, 3);
        let plan = Planner::new()
            .plan(&spec, &batch, &emulated.device(), &PlanOptions::default())
            .expect("it can be planned");
        let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 5);
        let right = tensors.reference(&spec, &batch);
        let mut ways = layouts(page, heads, dims);
        // What kernels pad is found by heads alone.
        if dims[0] % 64 == 0 {
            ways.extend(uneven(page, heads, dims));
        }
        for (way, sides) in ways {
            let pages = batch.parts[0].table.pool_pages;
            let relaid = tensors.parts[0].relaid(&spec, pages, sides);
            let mut out = vec![bf16::NAN; right.out.len()];
            emulated
                .run(&plan, &tensors.q, &[relaid.view()], &mut out, None)
                .unwrap_or_else(|error| panic!("{dims:?}, {way}: {error}"));
            let shape = [plan.total_q, 8, dims[1]].map(|extent| extent as usize);
            let mut tolerance = Tolerance::of(Dtype::BF16);
            tolerance.absolute = 1.0 / 256.0;
            let differs = compare("out", &shape, &to_f64(&out), &right.out, tolerance);
            assert_eq!(differs, Ok(()), "{dims:?}, {way}");
        }
    }
}

/// Keys of 64 elements and values of 512: a kernel steps through both pools alike. They may be in one memory, with all keys of
/// a token before its values, or each value behind its key. Keys in the order of heads and values in that of tokens are refused.
#[test]
fn keys_and_values_of_other_sizes_lie_in_one_layout() {
    let _others = no_failure();
    let emulated = Emulated::new(settings(1, 3)).expect("the emulator");
    let (heads, page) = (2, 16);
    let spec = Spec::new(8, heads, 64).with_head_dim_v(512);
    let batch = prefixed(&[(70, 0, 40), (50, 2, 1)], page, false, 3);
    let plan = Planner::new()
        .plan(&spec, &batch, &emulated.device(), &PlanOptions::default())
        .expect("it can be planned");
    let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 5);
    let right = tensors.reference(&spec, &batch);
    let dense = tensors.views()[0];
    let pages = batch.parts[0].table.pool_pages;
    // Everything else is NaN.
    let laid = |sides: [(KvStrides, u32); 2], elements: u32| {
        let mut memory = vec![bf16::NAN; elements as usize];
        let of = [
            (dense.k, dense.k_strides, 64),
            (dense.v, dense.v_strides, 512),
        ];
        for ((values, from, dim), (to, first)) in of.into_iter().zip(sides) {
            for index in 0..pages * page * heads {
                let (page_id, token, head) =
                    (index / (page * heads), index / heads % page, index % heads);
                let at = |s: &KvStrides, first| {
                    let at = first + page_id * s.page + token * s.token + head * s.head;
                    at as usize..(at + dim) as usize
                };
                memory[at(&to, first)].copy_from_slice(&values[at(&from, 0)]);
            }
        }
        memory
    };
    let run = |sides: [(KvStrides, u32); 2], elements| {
        let memory = laid(sides, elements);
        let [(k_strides, k), (v_strides, v)] = sides;
        let mut view = dense;
        (view.k, view.v) = (&memory[k as usize..], &memory[v as usize..]);
        (view.k_strides, view.v_strides) = (k_strides, v_strides);
        let mut out = vec![bf16::NAN; right.out.len()];
        let ran = emulated.run(&plan, &tensors.q, &[view], &mut out, None);
        ran.map(|()| to_f64(&out))
    };
    let strides = |token: u32, head: u32| KvStrides {
        page: page * token,
        token,
        head,
        page_size: page,
    };
    let all = pages * page * heads * (64 + 512);
    let behind = pages * page * heads * 64;
    let hnd = |dim| KvLayout::Hnd.strides(page, heads, dim);
    let token = heads * (64 + 512);
    for sides in [
        [(strides(token, 64), 0), (strides(token, 512), heads * 64)],
        [(strides(token, 576), 0), (strides(token, 576), 64)],
        [(hnd(64), 0), (hnd(512), behind)],
    ] {
        let out = run(sides, all).expect("it runs");
        let shape = [plan.total_q, 8, 512].map(|extent| extent as usize);
        let mut tolerance = Tolerance::of(Dtype::BF16);
        tolerance.absolute = 1.0 / 256.0;
        let differs = compare("out", &shape, &out, &right.out, tolerance);
        assert_eq!(differs, Ok(()), "{sides:?}");
    }
    let nhd = |dim| KvLayout::Nhd.strides(page, heads, dim);
    for sides in [
        [(nhd(64), 0), (hnd(512), behind)],
        [(hnd(64), 0), (nhd(512), behind)],
    ] {
        let error = run(sides, all).expect_err("the layouts differ");
        assert!(
            matches!(
                error,
                Error::Stride {
                    tensor: "the value pool",
                    ..
                }
            ),
            "{error:?}"
        );
        let error = error.to_string();
        assert!(error.contains("heads of 512 elements"), "{error}");
    }
}

/// A page holds the keys and values of several layers. What a layer has of the last page ends before the page's stride does.
#[test]
fn pools_may_be_one_layer_of_many() {
    let _others = no_failure();
    let emulated = Emulated::new(settings(1, 4)).expect("the emulator");
    let (spec, page) = (Spec::new(4, 2, 64), 8);
    // The last page of the pool is in use.
    let mut table = PageTable::new(page, 3);
    table.push(&[1, 2], 13);
    let batch = Batch::new(vec![0, 1], table);
    let plan = Planner::new()
        .plan(&spec, &batch, &emulated.device(), &PlanOptions::default())
        .expect("it can be planned");
    let dense = KvLayout::Nhd.strides(page, 2, 64);
    let strides = KvStrides {
        page: 4 * dense.page,
        ..dense
    };
    let memory: Vec<bf16> = (0..3 * strides.page)
        .map(|index| bf16::from_f32((index.wrapping_mul(0x9E37_79B1) >> 24) as f32 / 128.0 - 1.0))
        .collect();
    let q = &memory[..4 * 64];
    for layer in [0, 1] {
        let [k, v] = [2 * layer, 2 * layer + 1].map(|at| &memory[at * dense.page as usize..]);
        let mut kv = KvView::new(&spec, KvLayout::Nhd, page, k, v);
        (kv.k_strides, kv.v_strides) = (strides, strides);
        let [mut out, mut right] = [[bf16::NAN; 4 * 64]; 2];
        let cpu = Cpu::new().run(&plan, q, &[kv], &mut right, None);
        assert_eq!(cpu, Ok(()), "layer {layer}");
        let ran = emulated.run(&plan, q, &[kv], &mut out, None);
        assert_eq!(ran, Ok(()), "layer {layer}");
        let mut tolerance = Tolerance::of(Dtype::BF16);
        tolerance.absolute = 1.0 / 256.0;
        let differs = compare(
            "out",
            &[1, 4, 64],
            &to_f64(&out),
            &to_f64(&right),
            tolerance,
        );
        assert_eq!(differs, Ok(()), "layer {layer}");
    }
}

/// By kernels for few rows and for many, with keys loaded by pages and row by row.
#[test]
fn latent_keys_in_two_pools_are_those_of_one() {
    let _no_failure = no_failure();
    for (heads, page) in [(16, 8), (32, 32), (64, 16), (128, 16), (16, 1), (64, 1)] {
        let spec = Spec::latent(heads, 512, 64);
        let batch = prefixed(&[(70, 0, 1)], page, true, 5);
        let emulated = Emulated::new(settings(2, 5)).unwrap();
        let plan = Planner::new()
            .plan(&spec, &batch, &emulated.device(), &PlanOptions::default())
            .unwrap();
        let tensors: Tensors<bf16, bf16> = Tensors::random(&spec, &batch, KvLayout::Nhd, 5);
        let parts = Parts::of(&spec, &tensors.parts[0], [[8, 0], [0, 16]]);
        let run = |view| {
            let mut out = vec![bf16::NAN; (heads * 512) as usize];
            emulated
                .run(&plan, &tensors.q, &[view], &mut out, None)
                .unwrap();
            out.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let one = run(tensors.parts[0].view());
        assert!(
            run(parts.view(&spec)) == one,
            "{heads} heads, pages of {page}"
        );
    }
}

/// Pages of a pool on the device: those of the CPU, for each way in which keys and values lie there.
#[test]
fn pages_are_copied_as_on_the_cpu() {
    let _others = no_failure();
    let emulated = Emulated::new(settings(2, 7)).expect("the emulator");
    let (gpu, stream) = (emulated.gpu(), emulated.gpu().stream().expect("a stream"));
    let copies = [(4, 1), (0, 2), (2, 3), (1, 1)].map(|(from, to)| PageCopy { from, to });
    const PAGES: u32 = 5;
    let bytes: Vec<u8> = (0..40_000_u32).map(|i| (i * 37 % 251) as u8).collect();
    /// Where an array of the pool begins, bytes of an element, strides, heads and elements of a row.
    type Array = (usize, usize, KvStrides, u32, u32);
    let check = |spec: &Spec, pool: &dyn Fn(u64) -> KvPool, arrays: &[Array]| {
        let memory = DeviceBuffer::from_slice(gpu, &bytes).expect("memory");
        let pool = pool(memory.address());
        // SAFETY: the memory lives until the stream was waited for.
        unsafe { gpu.copy_pages(spec, &pool, &copies, *stream) }.expect("the pages are there");
        stream.synchronize().expect("it ran");
        let mut right = bytes.clone();
        for &(begin, size, strides, heads, dim) in arrays {
            let shape = [PAGES, strides.page_size, heads, dim * size as u32].map(|x| x as usize);
            let wide = [strides.page, strides.token, strides.head].map(|x| x as usize * size);
            let strides = [wide[0], wide[1], wide[2], 1];
            let elements: &mut [F8E4M3] = bytemuck::cast_slice_mut(&mut right[begin..]);
            let pool = TensorMut::strided(elements, shape, strides).expect("it fits");
            Cpu::copy_pages(pool, &copies).expect("the pages are there");
        }
        assert_eq!(memory.read().expect("it is there"), right, "{pool:?}");
        let far = [PageCopy { from: 0, to: 5 }];
        // SAFETY: refused.
        let refused = unsafe { gpu.copy_pages(spec, &pool, &far, *stream) };
        let text = refused.unwrap_err().to_string();
        assert!(text.contains("copies[0] is 5"), "{text}");
    };
    let spec = Spec::new(4, 2, 32);
    for layout in [KvLayout::Nhd, KvLayout::Hnd] {
        let strides = layout.strides(4, 2, 32);
        let apart = |at| KvPool::new(&spec, layout, 4, PAGES, at, at + 8000);
        check(
            &spec,
            &apart,
            &[(0, 2, strides, 2, 32), (8000, 2, strides, 2, 32)],
        );
        // A page of values behind each of keys, and gaps between the tokens.
        let mut paired = layout.strides(4, 2, 40);
        paired.page *= 2;
        let pool = |at| apart(at).with_strides(paired, paired);
        let values = u64::from(paired.page);
        let pool = |at| {
            let mut pool = pool(at);
            pool.v = at + values;
            pool
        };
        check(
            &spec,
            &pool,
            &[(0, 2, paired, 2, 32), (values as usize, 2, paired, 2, 32)],
        );
    }
    // 8 bits with a scale for each token.
    let spec = Spec::new(4, 2, 64).with_kv_dtype(Dtype::F8E4M3);
    let strides = KvLayout::Nhd.strides(4, 2, 64);
    let of_scales = KvLayout::Hnd.strides(4, 2, 1);
    let pool = |at: u64| {
        let scales = |at| gpu::DeviceTensor {
            address: at,
            dtype: Dtype::F32,
            shape: [PAGES as usize, 4, 2],
            strides: [8, 1, 4],
        };
        KvPool::new(&spec, KvLayout::Nhd, 4, PAGES, at, at + 4000).with_scales(
            gpu::KvScales::Token {
                k: scales(at + 8000),
                v: scales(at + 9000),
            },
        )
    };
    check(
        &spec,
        &pool,
        &[
            (0, 1, strides, 2, 64),
            (4000, 1, strides, 2, 64),
            (8000, 4, of_scales, 2, 1),
            (9000, 4, of_scales, 2, 1),
        ],
    );
    // Latent keys in one pool, in two, and in rows that carry their scales.
    let spec = Spec::latent(16, 512, 64);
    let one = KvLayout::Nhd.strides(2, 1, 576);
    let pool = |at| KvPool::latent(&spec, 2, PAGES, at);
    check(&spec, &pool, &[(0, 2, one, 1, 576)]);
    let [latent, rope] = [512, 64].map(|dim| KvLayout::Nhd.strides(2, 1, dim));
    let pool = |at| KvPool::latent_parts(&spec, 2, PAGES, at, at + 20_000);
    check(
        &spec,
        &pool,
        &[(0, 2, latent, 1, 512), (20_000, 2, rope, 1, 64)],
    );
    let in_rows = KvLayout::Nhd.strides(2, 1, 656);
    let pool = |at| KvPool::latent_656(2, PAGES, at);
    check(
        &spec.with_kv_dtype(Dtype::F8E4M3),
        &pool,
        &[(0, 1, in_rows, 1, 656)],
    );
}

/// Outputs of another type than the queries, as the CPU takes them.
#[test]
fn outputs_may_have_another_type_than_queries() {
    let _others = no_failure();
    let emulated = Emulated::new(settings(2, 7)).expect("the emulator");
    let mut spec = Spec::new(4, 2, 64);
    spec.out_dtype = Dtype::F32;
    let batch = prefixed(&[(30, 0, 1), (20, 0, 3)], 16, false, 5);
    let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 3);
    let views = [tensors.parts[0].view()];
    let plan = Planner::new().plan(&spec, &batch, &emulated.device(), &PlanOptions::default());
    let plan = plan.expect("it can be planned");
    let mut out = vec![f32::NAN; tensors.q.len()];
    emulated
        .run(&plan, &tensors.q, &views, &mut out, None)
        .expect("it is right");
    let right = tensors.reference(&spec, &batch).out;
    // Weights are rounded to the type of the values.
    let tolerance = Tolerance {
        absolute: 4e-3,
        relative: 1.0 / 128.0,
    };
    compare("out", &[tensors.q.len()], &to_f64(&out), &right, tolerance).expect("it is right");
}
