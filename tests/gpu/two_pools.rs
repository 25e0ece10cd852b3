//! Latent keys in two pools on the GPU, against the same keys in one, to the bit.

use half::{bf16, f16};
use proptest::prelude::*;
use tandem_attn::{
    Error,
    exec::gpu::{
        AppendScales, DeviceArray, Gpu, KvPool, KvScales, LaunchSet, RopePart, Workspace,
        WorkspaceOptions,
    },
    kv::KvStrides,
    plan::{Bound, Plan, PlanOptions, Planner, SplitMode},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    tensor::{Element, ShapeError},
};

use crate::{
    common::{
        self, Memory, Stream,
        latent_parts::Parts,
        problems::{Tensors, cases},
    },
    mla::request_of,
    problem::{OnDevice, Request, batch_of, check_results, uploaded},
};

#[derive(Clone, Debug)]
struct Case {
    spec: Spec,
    requests: Vec<Request>,
    page: u32,
    /// Multiples of 8 elements between rows and between pages, of both pools.
    gaps: [[u32; 2]; 2],
    options: PlanOptions,
    captured: bool,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let own = prop_oneof![
        1 => Just(0_u32),
        4 => 1..200_u32,
        3 => (1..12_u32, 0..3_u32).prop_map(|(blocks, off)| blocks * 64 + off - 1),
        1 => 1..3000_u32,
    ];
    let queries = prop_oneof![12 => Just(1_u32), 6 => 2..9_u32, 2 => 9..40_u32, 1 => 40..200_u32];
    let request = request_of(own, queries);
    let heads = prop_oneof![
        2 => Just(16_u32),
        2 => Just(32),
        2 => Just(64),
        2 => Just(128),
        2 => 1..129_u32,
    ];
    let page = prop_oneof![
        3 => Just(64_u32),
        2 => Just(16),
        2 => Just(8),
        1 => Just(32),
        1 => Just(24),
        2 => Just(1),
        1 => prop_oneof![Just(2), Just(17), Just(128)],
    ];
    let gap = || prop_oneof![2 => Just(0_u32), 1 => 0..4_u32];
    let gaps = prop::array::uniform2((gap(), gap()).prop_map(|(row, page)| [8 * row, 8 * page]));
    let split = prop_oneof![3 => Just(None), 2 => (1..9_u32).prop_map(Some)];
    (
        (heads, prop::bool::weighted(0.9)),
        prop::collection::vec(request, 1..8),
        (page, gaps, split, any::<bool>()),
        any::<u64>(),
    )
        .prop_map(
            |((heads, causal), requests, (page, gaps, split, captured), seed)| {
                let mut spec = Spec::latent(heads, 512, 64);
                spec.variant.causal = causal;
                spec.variant.sinks = seed % 4 == 1;
                spec.variant.window_left = (seed % 5 == 2).then_some(seed as u32 % 300);
                let mut options = PlanOptions::default();
                if let Some(pages) = split {
                    let tokens = pages * page;
                    options.split = SplitMode::Fixed { tokens };
                }
                Case {
                    spec,
                    requests,
                    page,
                    gaps,
                    options,
                    captured,
                    seed,
                }
            },
        )
}

/// The pools of one part on the device.
struct TwoPools {
    latent: Memory,
    rope: Memory,
    strides: [KvStrides; 2],
}

impl TwoPools {
    fn new<T: Element>(parts: &Parts<T>) -> Self {
        Self {
            latent: Memory::new(&parts.latent),
            rope: Memory::new(&parts.rope),
            strides: parts.strides,
        }
    }

    fn pool(&self, spec: &Spec, pages: u32) -> KvPool {
        let [latent, rope] = self.strides;
        let (at, of_rope) = (self.latent.address(), self.rope.address());
        let mut pool = KvPool::latent_parts(spec, latent.page_size, pages, at, of_rope)
            .with_strides(latent, latent);
        pool.rope = Some(RopePart {
            pool: of_rope,
            strides: rope,
        });
        pool
    }
}

fn check<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
    let spec = case.spec.with_dtype(T::DTYPE);
    let batch = batch_of(&case.requests, case.page, case.seed);
    let device = gpu.device();
    let plan = Planner::new()
        .plan(&spec, &batch, &device, &case.options)
        .expect("the case can be planned");
    let tensors = Tensors::<T, T>::random(&spec, &batch, KvLayout::Nhd, case.seed);
    let one = OnDevice::new(&spec, &batch, &tensors);
    let parts = Parts::of(&spec, &tensors.parts[0], case.gaps);
    let pages = batch.parts[0].table.pool_pages;
    let [first, second] = [(); 2].map(|()| TwoPools::new(&parts));
    let two = |pool: KvPool| one.with_pool(pool);
    let stream = Stream::new();
    let mut workspace = uploaded(gpu, &spec, &device, &plan, case.captured, &stream);
    let right = one.run(gpu, &mut workspace, &stream);
    check_results(&spec, &batch, &tensors, &right).map_err(TestCaseError::fail)?;
    let [at_first, at_second] = [&first, &second].map(|pools| pools.pool(&spec, pages));
    let got = two(at_first).run(gpu, &mut workspace, &stream);
    prop_assert!(got == right, "two pools differ from one");

    // Only addresses change: of one pool, of the other, of both.
    let nan = |memory: &Memory, elements: usize| {
        memory.write_at(0, &vec![T::from_f32(f32::NAN); elements]);
    };
    nan(&first.rope, parts.rope.len());
    let mut moved = at_first;
    moved.rope = at_second.rope;
    let got = two(moved).run(gpu, &mut workspace, &stream);
    prop_assert!(got == right, "another rope pool is not read");
    nan(&first.latent, parts.latent.len());
    let got = two(at_second).run(gpu, &mut workspace, &stream);
    prop_assert!(got == right, "another latent pool is not read");
    first.latent.write_at(0, &parts.latent);
    let mut moved = at_second;
    (moved.k, moved.v) = (at_first.k, at_first.v);
    let got = two(moved).run(gpu, &mut workspace, &stream);
    prop_assert!(got == right, "the first latent pool is not read");
    let got = one.run(gpu, &mut workspace, &stream);
    prop_assert!(got == right, "one pool after two differs");
    Ok(())
}

#[test]
fn keys_in_two_pools_are_those_of_one() {
    let Some(gpu) = common::gpu("keys_in_two_pools_are_those_of_one") else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(200));
    runner
        .run(&case(), |case| match case.seed % 2 {
            0 => check::<bf16>(gpu, &case),
            _ => check::<f16>(gpu, &case),
        })
        .unwrap();
}

/// A batch of requests with so many keys, each on pages of its own for 704 keys, and its plan.
fn planned(gpu: &Gpu, spec: &Spec, page: u32, lens: &[u32]) -> (Batch, Plan) {
    let own = 704 / page;
    let mut table = PageTable::new(page, own * lens.len() as u32);
    for (request, &len) in lens.iter().enumerate() {
        let first = request as u32 * own;
        let pages: Vec<u32> = (first..first + len.div_ceil(page)).rev().collect();
        table.push(&pages, len);
    }
    let batch = Batch::new((0..=lens.len() as u32).collect(), table);
    let plan = Planner::new()
        .plan(spec, &batch, &gpu.device(), &PlanOptions::default())
        .unwrap();
    (batch, plan)
}

/// Two layers in one graph, each with two pools of its own, and two plans.
#[test]
fn a_graph_reads_the_two_pools_of_each_layer() {
    let Some(gpu) = common::gpu("a_graph_reads_the_two_pools_of_each_layer") else {
        return;
    };
    for (heads, page) in [(16, 64), (16, 1), (32, 8), (64, 16), (64, 1), (128, 64)] {
        let spec = Spec::latent(heads, 512, 64);
        let (batch, plan) = planned(gpu, &spec, page, &[300, 40, 700]);
        // The same pages, of fewer keys.
        let (_, shorter) = planned(gpu, &spec, page, &[300, 35, 690]);
        let mut options = WorkspaceOptions::default();
        options.launches = Some(LaunchSet::decodes(&gpu.device(), &spec).unwrap());
        let bound = Bound::of(&plan);
        let mut workspace = gpu.workspace(&spec, &bound, options).unwrap();
        let pages = batch.parts[0].table.pool_pages;
        let stream = gpu.stream().unwrap();
        let layers = [1, 2].map(|seed| {
            let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, seed);
            let pools = TwoPools::new(&Parts::of(&spec, &tensors.parts[0], [[0, 8], [64, 0]]));
            (OnDevice::new(&spec, &batch, &tensors), pools)
        });
        // SAFETY: the stream is ours, and everything lives until it was waited for.
        unsafe { workspace.upload(&plan, *stream) }.unwrap();
        let words = 3 * heads as usize * 512;
        let results = |layer: &OnDevice| layer.out.read_at::<u16>(0, words);
        let graph = stream
            .capture(|stream| {
                for (layer, pools) in &layers {
                    let two = layer.with_pool(pools.pool(&spec, pages));
                    let (out, lse) = two.results();
                    let tensors = two.tensors(&out, &lse);
                    // SAFETY: as above.
                    unsafe { gpu.run_with(&mut workspace, &tensors, stream) }?;
                }
                Ok(())
            })
            .unwrap();
        for plan in [&plan, &shorter] {
            // SAFETY: as above.
            unsafe {
                workspace.upload(plan, *stream).unwrap();
                graph.launch(*stream).unwrap();
            }
            stream.synchronize().unwrap();
            let got = layers.each_ref().map(|(layer, _)| results(layer));
            for ((layer, _), got) in layers.iter().zip(got) {
                let (out, lse) = layer.results();
                let tensors = layer.tensors(&out, &lse);
                // SAFETY: as above.
                unsafe { gpu.run_with(&mut workspace, &tensors, *stream) }.unwrap();
                stream.synchronize().unwrap();
                assert!(results(layer) == got, "{heads} heads, pages of {page}");
            }
        }
    }
}

#[test]
fn pools_that_are_no_pair_of_latent_parts_are_refused() {
    let Some(gpu) = common::gpu("pools_that_are_no_pair_of_latent_parts_are_refused") else {
        return;
    };
    let spec = Spec::latent(16, 512, 64);
    let memory = Memory::new(&vec![0_u8; 1 << 20]);
    let at = memory.address();
    let stream = Stream::new();
    let pool = KvPool::latent_parts(&spec, 8, 16, at, at + (1 << 19));
    let prepared = |spec: &Spec, page: u32| {
        let (_, plan) = planned(gpu, spec, page, &[20]);
        uploaded(gpu, spec, &gpu.device(), &plan, false, &stream)
    };
    let run_in = |workspace: &mut Workspace, spec: &Spec, pool: KvPool| {
        let q = memory.tensor(Dtype::BF16, [1, 16, spec.head_dim_qk as usize]);
        let out = memory.tensor(Dtype::BF16, [1, 16, spec.head_dim_v as usize]);
        let pools = [pool];
        let tensors = tandem_attn::gpu::RunTensors::new(&q, &pools, &out);
        // SAFETY: everything lives until the stream was waited for.
        let result = unsafe { gpu.run_with(workspace, &tensors, stream.0) };
        stream.wait();
        result
    };
    let run = |spec: &Spec, pool: KvPool| run_in(&mut prepared(spec, 8), spec, pool);
    assert_eq!(run(&spec, pool), Ok(()));
    let mut alone = pool;
    alone.rope = None;
    assert!(matches!(
        run(&spec, alone),
        Err(Error::Stride {
            tensor: "the pool",
            got: 512,
            ..
        })
    ));
    let mut odd = pool;
    odd.rope = pool.rope.map(|rope| RopePart {
        pool: rope.pool + 8,
        ..rope
    });
    assert!(matches!(
        run(&spec, odd),
        Err(Error::TensorMap {
            tensor: "the rope pool",
            ..
        })
    ));
    let mut other_pages = pool;
    other_pages.rope = pool.rope.map(|rope| RopePart {
        strides: KvLayout::Nhd.strides(16, 1, 64),
        ..rope
    });
    assert!(matches!(
        run(&spec, other_pages),
        Err(Error::Extent {
            tensor: "the rope pool",
            got: 16,
            ..
        })
    ));
    // Row loaders, when only the address of the rope pool changes.
    let mut rows = prepared(&spec, 1);
    let by_rows = KvPool::latent_parts(&spec, 1, 704, at, at + (1 << 19));
    let with_rope_at = |address| {
        let mut pool = by_rows;
        pool.rope = by_rows.rope.map(|rope| RopePart {
            pool: address,
            ..rope
        });
        pool
    };
    assert_eq!(run_in(&mut rows, &spec, by_rows), Ok(()));
    let null = run_in(&mut rows, &spec, with_rope_at(0));
    assert!(matches!(null, Err(Error::NullPointer { .. })), "{null:?}");
    let odd = run_in(&mut rows, &spec, with_rope_at(at + 8));
    assert!(matches!(odd, Err(Error::Misaligned { .. })), "{odd:?}");
    assert_eq!(run_in(&mut rows, &spec, by_rows), Ok(()));

    let mut in_row = KvPool::latent_656(8, 16, at);
    in_row.rope = pool.rope;
    assert_eq!(
        run(&spec.with_kv_dtype(Dtype::F8E4M3), in_row),
        Err(ShapeError::NotInParts {
            part: 0,
            latent: true
        }
        .into())
    );
    let plain = Spec::new(16, 1, 128);
    let mut with_rope = KvPool::new(&plain, KvLayout::Nhd, 8, 16, at, at + (1 << 19));
    with_rope.rope = pool.rope;
    assert_eq!(
        run(&plain, with_rope),
        Err(ShapeError::NotInParts {
            part: 0,
            latent: false
        }
        .into())
    );

    // Appends write to each pool by itself.
    let (k, v) = (
        memory.tensor(Dtype::BF16, [1, 1, 576]),
        memory.tensor(Dtype::BF16, [1, 1, 512]),
    );
    let slots = DeviceArray::<u32>::new(at, 1);
    let says = |result: Result<(), Error>| {
        let error = result.expect_err("it is refused").to_string();
        assert!(error.contains("append_rows"), "{error}");
    };
    let of_8_bits = spec.with_kv_dtype(Dtype::F8E4M3);
    let eight = KvPool::latent_parts(&of_8_bits, 8, 16, at, at + (1 << 19));
    let token = memory.tensor(Dtype::BF16, [1, 576]);
    // SAFETY: nothing is launched.
    unsafe {
        says(gpu.append_paged_kv(&spec, &pool, slots, &k, &v, stream.0));
        let scales = AppendScales::Given;
        says(gpu.append_quantised(&of_8_bits, &eight, scales, slots, &k, &v, stream.0));
        let in_row = eight.with_scales(KvScales::InRow);
        says(gpu.append_latent_656(&in_row, slots, &token, stream.0));
    }
}

/// New keys, appended by one call for each pool, are those of the CPU.
#[test]
fn keys_are_appended_to_each_pool() {
    let Some(gpu) = common::gpu("keys_are_appended_to_each_pool") else {
        return;
    };
    let (page, pages) = (16, 3);
    let keys: Vec<u16> = (0..4 * 576).collect();
    let (source, slots) = (Memory::new(&keys), Memory::new(&[17_u32, 3, 40, 0]));
    let [latent, rope] = [512, 64].map(|dim| Memory::new(&vec![0_u16; pages * page * dim]));
    let stream = Stream::new();
    for (memory, first, dim) in [(&latent, 0, 512), (&rope, 512, 64)] {
        let at = source.address() + 2 * first as u64;
        let rows =
            tandem_attn::gpu::DeviceTensor::new(at, Dtype::BF16, [4, 1, dim]).with_stride(0, 576);
        let pool = memory.tensor(Dtype::BF16, [pages, page, 1, dim]);
        // SAFETY: everything lives until the stream was waited for.
        unsafe { gpu.append_rows(&rows, slots.array(), &pool, stream.0) }.unwrap();
        stream.wait();
        let got: Vec<u16> = memory.read();
        for (token, slot) in [17, 3, 40, 0].into_iter().enumerate() {
            let key = &keys[token * 576 + first..][..dim];
            assert_eq!(&got[slot * dim..][..dim], key);
        }
    }
}
