//! Layers with 8-bit keys and values of their own: each has scales of its own, on the workspace of the layer before.

use half::bf16;
use tandem_attn::{
    exec::{
        Cpu,
        emulated::{Emulated, Settings},
        gpu::{
            DeviceArray, DeviceBuffer, DeviceTensor, KvPool, KvScales as OnGpu, WorkspaceOptions,
        },
    },
    kv::{KvScales, KvStrides, KvView},
    plan::{Bound, PlanOptions, Planner, pod::PodMode},
    problem::{Dtype, KvLayout, Spec},
    tensor::F8E4M3,
};

use crate::{
    no_failure,
    numeric::{Rng, Tolerance, compare, to_f64},
    problems::{Pools, prefixed},
    settings,
};

const PAGE: u32 = 16;

/// A layer's numbers, on the host.
struct Layer {
    pools: Pools<F8E4M3>,
    scales: [Vec<f32>; 2],
}

/// How many numbers each scale of a layer is for.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Tensor,
    Head,
    Request,
    Token,
}

impl Kind {
    fn on_host<'a>(
        self,
        [k, v]: [&'a [f32]; 2],
        of_token: &'a [u32],
        strides: KvStrides,
    ) -> KvScales<'a> {
        match self {
            Self::Tensor => KvScales::Tensor { k: k[0], v: v[0] },
            Self::Head => KvScales::Head { k, v },
            Self::Request => KvScales::Request { k, v, of_token },
            Self::Token => KvScales::Token {
                k,
                v,
                k_strides: strides,
                v_strides: strides,
            },
        }
    }

    fn on_gpu(self, [k, v]: [u64; 2], of_token: DeviceArray<u32>, extents: [usize; 3]) -> OnGpu {
        let [requests, pages, heads] = extents;
        match self {
            Self::Tensor => {
                let [k, v] = [k, v].map(|at| DeviceTensor::new(at, Dtype::F32, [1]));
                OnGpu::Tensor { k, v }
            }
            Self::Head => {
                let [k, v] = [k, v].map(|at| DeviceTensor::new(at, Dtype::F32, [heads]));
                OnGpu::Head { k, v }
            }
            Self::Request => {
                let [k, v] = [k, v].map(|at| DeviceTensor::new(at, Dtype::F32, [requests, heads]));
                OnGpu::Request { k, v, of_token }
            }
            Self::Token => {
                let shape = [pages, PAGE as usize, heads];
                let [k, v] = [k, v].map(|at| DeviceTensor::new(at, Dtype::F32, shape));
                OnGpu::Token { k, v }
            }
        }
    }

    fn count(self, [requests, pages, heads]: [usize; 3]) -> usize {
        match self {
            Self::Tensor => 1,
            Self::Head => heads,
            Self::Request => requests * heads,
            Self::Token => pages * PAGE as usize * heads,
        }
    }
}

/// Runs three layers on one workspace, and compares each with the CPU.
fn check(compute: i32, kind: Kind, requests: &[(u32, usize, u32)], pod: PodMode) {
    let _others = no_failure();
    let of_gpu = Settings {
        compute,
        ..settings(1, 3)
    };
    let emulated = Emulated::new(of_gpu).expect("the emulator");
    let gpu = emulated.gpu();
    let stream = gpu.stream().expect("a stream");
    let spec = Spec::new(8, 2, 128).with_kv_dtype(Dtype::F8E4M3);
    let batch = prefixed(requests, PAGE, false, 7);
    let table = &batch.parts[0].table;
    let extents = [requests.len(), table.pool_pages as usize, 2];
    let options = PlanOptions::default().with_pod(pod);
    let plan = Planner::new()
        .plan(&spec, &batch, &emulated.device(), &options)
        .expect("it can be planned");
    let workspace = gpu.workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default());
    let mut workspace = workspace.expect("memory");

    let mut noise = Rng(11);
    let mut layer = || Layer {
        pools: Pools::random(&spec, table, KvLayout::Nhd, &mut noise),
        scales: [(); 2].map(|()| {
            let power = |_| (noise.below(5) as f32 - 2.0).exp2();
            (0..kind.count(extents)).map(power).collect()
        }),
    };
    let layers = [layer(), layer(), layer()];
    let tokens = plan.total_q as usize;
    let shape = [tokens, 8, 128];
    let q: Vec<bf16> = (noise.floats(tokens * 8 * 128, -1.0, 1.0).into_iter())
        .map(bf16::from_f32)
        .collect();
    let of_token: Vec<u32> = (0..requests.len())
        .flat_map(|request| vec![request as u32; batch.q_len(request) as usize])
        .collect();

    let (queries, of_tokens) = (
        DeviceBuffer::from_slice(gpu, &q).expect("memory"),
        DeviceBuffer::from_slice(gpu, &of_token).expect("memory"),
    );
    let mut kept = Vec::new();
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(&plan, *stream).expect("it fits") };
    for Layer { pools, scales } in &layers {
        let sides = [&pools.k, &pools.v].map(|side| DeviceBuffer::from_slice(gpu, side));
        let sides = sides.map(|side| side.expect("memory"));
        let of_keys = scales
            .each_ref()
            .map(|of| DeviceBuffer::from_slice(gpu, of));
        let of_keys = of_keys.map(|of| of.expect("memory"));
        let out = DeviceBuffer::from_slice(gpu, &vec![bf16::NAN; q.len()]).expect("memory");
        let [k, v] = sides.each_ref().map(DeviceBuffer::address);
        let on_gpu = kind.on_gpu(
            of_keys.each_ref().map(DeviceBuffer::address),
            of_tokens.array(),
            extents,
        );
        let pool = KvPool::new(&spec, KvLayout::Nhd, PAGE, table.pool_pages, k, v);
        let pool = pool.with_scales(on_gpu);
        // SAFETY: all memory lives until the stream was waited for.
        let ran = unsafe {
            gpu.run(
                &mut workspace,
                &queries.tensor(shape),
                &[pool],
                &out.tensor(shape),
                None,
                *stream,
            )
        };
        assert_eq!(ran, Ok(()));
        kept.push((sides, of_keys, out));
    }
    stream.synchronize().expect("it ran");

    let cpu = Cpu::new();
    let strides = KvLayout::Nhd.strides(PAGE, 2, 1);
    for (number, (layer, (.., out))) in layers.iter().zip(&kept).enumerate() {
        let Layer { pools, scales } = layer;
        let scales = scales.each_ref().map(|of| &of[..]);
        let view = KvView::new(&spec, KvLayout::Nhd, PAGE, &pools.k, &pools.v)
            .with_scales(kind.on_host(scales, &of_token, strides));
        let mut right = vec![bf16::NAN; q.len()];
        cpu.run(&plan, &q, &[view], &mut right, None)
            .expect("it is right");
        let mut tolerance = Tolerance::of(spec.out_dtype);
        tolerance.absolute = 1.0 / 64.0;
        let out = to_f64(&out.read().expect("it is there"));
        let differs = compare("out", &shape, &out, &to_f64(&right), tolerance);
        let of = format!("{compute} {kind:?} {requests:?}, layer {number}");
        assert_eq!(differs, Ok(()), "{of}");
    }
}

#[test]
fn layers_of_8_bits_have_scales_of_their_own() {
    let decodes = [(70, 0, 1), (200, 0, 1)];
    let hybrid = [(70, 0, 1), (90, 0, 40), (20, 1, 3)];
    for compute in [90, 80] {
        for kind in [Kind::Tensor, Kind::Head, Kind::Request, Kind::Token] {
            check(compute, kind, &decodes, PodMode::Serial);
            check(compute, kind, &hybrid, PodMode::Serial);
        }
        check(compute, Kind::Head, &hybrid, PodMode::Fused);
        check(compute, Kind::Head, &hybrid, PodMode::Streams);
    }
}
