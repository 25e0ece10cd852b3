//! Layers with 8-bit keys and values of their own: each has scales of its own, on the workspace of the layer before.

use half::bf16;
use tandem_attn::{
    exec::{
        Cpu,
        emulated::{Emulated, Settings},
        gpu::{
            DeviceArray, DeviceBuffer, DeviceTensor, KvPool, KvScales as OnGpu, LaunchSet,
            WorkspaceOptions,
        },
    },
    kv::{KvScales, KvStrides, KvView},
    plan::{Bound, Plan, PlanOptions, Planner, pod::PodMode},
    problem::{Batch, Dtype, KvLayout, Spec},
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

/// A batch of 8 heads on 2, and its plan.
struct Problem {
    emulated: Emulated,
    spec: Spec,
    batch: Batch,
    plan: Plan,
    q: Vec<bf16>,
    /// The request of each token.
    of_token: Vec<u32>,
    /// Requests, pages and KV heads.
    extents: [usize; 3],
}

impl Problem {
    fn new(compute: i32, requests: &[(u32, usize, u32)], pod: PodMode) -> Self {
        let of_gpu = Settings {
            compute,
            ..settings(1, 3)
        };
        let emulated = Emulated::new(of_gpu).expect("the emulator");
        let spec = Spec::new(8, 2, 128).with_kv_dtype(Dtype::F8E4M3);
        let batch = prefixed(requests, PAGE, false, 7);
        let options = PlanOptions::default().with_pod(pod);
        let plan = Planner::new().plan(&spec, &batch, &emulated.device(), &options);
        let plan = plan.expect("it can be planned");
        let q = Rng(5).floats(plan.total_q as usize * 8 * 128, -1.0, 1.0);
        let of_request = |request| vec![request as u32; batch.q_len(request) as usize];
        Self {
            emulated,
            spec,
            q: q.into_iter().map(bf16::from_f32).collect(),
            of_token: (0..requests.len()).flat_map(of_request).collect(),
            extents: [requests.len(), batch.parts[0].table.pool_pages as usize, 2],
            batch,
            plan,
        }
    }

    fn layer(&self, kind: Kind, noise: &mut Rng) -> Layer {
        let table = &self.batch.parts[0].table;
        Layer {
            pools: Pools::random(&self.spec, table, KvLayout::Nhd, noise),
            scales: [(); 2].map(|()| {
                let power = |_| (noise.below(5) as f32 - 2.0).exp2();
                (0..kind.count(self.extents)).map(power).collect()
            }),
        }
    }

    fn shape(&self) -> [usize; 3] {
        [self.plan.total_q as usize, 8, 128]
    }

    /// Checks outputs of a layer by those of the CPU.
    fn compare(&self, kind: Kind, Layer { pools, scales }: &Layer, out: &[bf16], of: &str) {
        let strides = KvLayout::Nhd.strides(PAGE, 2, 1);
        let scales = scales.each_ref().map(|of| &of[..]);
        let view = KvView::new(&self.spec, KvLayout::Nhd, PAGE, &pools.k, &pools.v)
            .with_scales(kind.on_host(scales, &self.of_token, strides));
        let mut right = vec![bf16::NAN; self.q.len()];
        Cpu::new()
            .run(&self.plan, &self.q, &[view], &mut right, None)
            .expect("it is right");
        let mut tolerance = Tolerance::of(self.spec.out_dtype);
        tolerance.absolute = 1.0 / 64.0;
        let differs = compare(
            "out",
            &self.shape(),
            &to_f64(out),
            &to_f64(&right),
            tolerance,
        );
        assert_eq!(differs, Ok(()), "{kind:?}: {of}");
    }
}

/// Runs three layers on one workspace, and compares each with the CPU.
fn check(compute: i32, kind: Kind, requests: &[(u32, usize, u32)], pod: PodMode) {
    let _others = no_failure();
    let problem = Problem::new(compute, requests, pod);
    let Problem { spec, plan, .. } = &problem;
    let gpu = problem.emulated.gpu();
    let stream = gpu.stream().expect("a stream");
    let workspace = gpu.workspace(spec, &Bound::of(plan), WorkspaceOptions::default());
    let mut workspace = workspace.expect("memory");
    let mut noise = Rng(11);
    let layers = [(); 3].map(|()| problem.layer(kind, &mut noise));
    let memory = |values: &[f32]| DeviceBuffer::from_slice(gpu, values).expect("memory");
    let queries = DeviceBuffer::from_slice(gpu, &problem.q).expect("memory");
    let of_tokens = DeviceBuffer::from_slice(gpu, &problem.of_token).expect("memory");
    let (shape, pages) = (problem.shape(), problem.extents[1] as u32);
    let mut kept = Vec::new();
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(plan, *stream).expect("it fits") };
    for Layer { pools, scales } in &layers {
        let sides = [&pools.k, &pools.v].map(|side| DeviceBuffer::from_slice(gpu, side));
        let sides = sides.map(|side| side.expect("memory"));
        let of_keys = scales.each_ref().map(|of| memory(of));
        let out = DeviceBuffer::from_slice(gpu, &vec![bf16::NAN; problem.q.len()]);
        let out = out.expect("memory");
        let [k, v] = sides.each_ref().map(DeviceBuffer::address);
        let scales = of_keys.each_ref().map(DeviceBuffer::address);
        let on_gpu = kind.on_gpu(scales, of_tokens.array(), problem.extents);
        let pool = KvPool::new(spec, KvLayout::Nhd, PAGE, pages, k, v).with_scales(on_gpu);
        let (q, of_out) = (queries.tensor(shape), out.tensor(shape));
        // SAFETY: all memory lives until the stream was waited for.
        let ran = unsafe { gpu.run(&mut workspace, &q, &[pool], &of_out, None, *stream) };
        assert_eq!(ran, Ok(()));
        kept.push((sides, of_keys, out));
    }
    stream.synchronize().expect("it ran");
    for (number, (layer, (.., out))) in layers.iter().zip(&kept).enumerate() {
        let out = out.read().expect("it is there");
        let of = format!("{compute} {requests:?}, layer {number}");
        problem.compare(kind, layer, &out, &of);
    }
}

/// Kernels read scales where they lie when they run: a captured graph sees new ones, of all kinds.
#[test]
fn graphs_see_new_scales() {
    let _others = no_failure();
    let mut noise = Rng(13);
    for requests in [&[(70, 0, 1), (200, 0, 1)][..], &[(70, 0, 1), (90, 0, 40)]] {
        let problem = Problem::new(90, requests, PodMode::Serial);
        let Problem { spec, plan, .. } = &problem;
        let gpu = problem.emulated.gpu();
        let stream = gpu.stream().expect("a stream");
        let (shape, pages) = (problem.shape(), problem.extents[1] as u32);
        let queries = DeviceBuffer::from_slice(gpu, &problem.q).expect("memory");
        let of_tokens = DeviceBuffer::from_slice(gpu, &problem.of_token).expect("memory");
        for kind in [Kind::Tensor, Kind::Head, Kind::Request, Kind::Token] {
            let options = WorkspaceOptions::default().with_launches(LaunchSet::new().and(plan));
            let workspace = gpu.workspace(spec, &Bound::of(plan), options);
            let mut workspace = workspace.expect("memory");
            let mut layer = problem.layer(kind, &mut noise);
            let sides = [&layer.pools.k, &layer.pools.v];
            let sides = sides.map(|side| DeviceBuffer::from_slice(gpu, side).expect("memory"));
            let count = kind.count(problem.extents);
            let nothing = || DeviceBuffer::from_slice(gpu, &vec![f32::NAN; count]);
            let mut of_keys = [(); 2].map(|()| nothing().expect("memory"));
            let out = DeviceBuffer::from_slice(gpu, &vec![bf16::NAN; problem.q.len()]);
            let out = out.expect("memory");
            let [k, v] = sides.each_ref().map(DeviceBuffer::address);
            let scales = of_keys.each_ref().map(DeviceBuffer::address);
            let on_gpu = kind.on_gpu(scales, of_tokens.array(), problem.extents);
            let pool = KvPool::new(spec, KvLayout::Nhd, PAGE, pages, k, v).with_scales(on_gpu);
            let (q, of_out) = (queries.tensor(shape), out.tensor(shape));
            // SAFETY: all memory lives as long as the graph, and the stream is ours.
            let graph = unsafe {
                workspace.upload(plan, *stream).expect("it fits");
                stream.capture(|stream| gpu.run(&mut workspace, &q, &[pool], &of_out, None, stream))
            };
            let graph = graph.expect("it can be captured");
            for replay in 0..2 {
                layer.scales = problem.layer(kind, &mut noise).scales;
                for (on_gpu, scales) in of_keys.iter_mut().zip(&layer.scales) {
                    on_gpu.write(0, scales).expect("they fit");
                }
                // SAFETY: as above.
                unsafe { graph.launch(*stream).expect("it runs") };
                stream.synchronize().expect("it ran");
                let got = out.read().expect("it is there");
                problem.compare(
                    kind,
                    &layer,
                    &got,
                    &format!("{requests:?}, replay {replay}"),
                );
            }
        }
    }
}

/// A page has the numbers of its tokens, and behind them their scales.
#[test]
fn scales_of_tokens_may_lie_in_their_pages() {
    let _others = no_failure();
    let dense = KvLayout::Nhd.strides(PAGE, 2, 128);
    let (numbers, scales) = (dense.page as usize, (PAGE * 2) as usize);
    let page = numbers + 4 * scales;
    let strides = KvStrides {
        page: page as u32,
        ..dense
    };
    for (compute, requests) in [
        (90, [(70, 0, 1), (200, 0, 1)]),
        (90, [(70, 0, 1), (90, 0, 40)]),
        (80, [(70, 0, 1), (90, 0, 40)]),
    ] {
        let problem = Problem::new(compute, &requests, PodMode::Serial);
        let (gpu, spec) = (problem.emulated.gpu(), &problem.spec);
        let layer = problem.layer(Kind::Token, &mut Rng(17));
        let pages = problem.extents[1];
        let side = |of: &[F8E4M3], scales_of: &[f32]| {
            let in_page = |at: usize| {
                let numbers = &of[at * numbers..][..numbers];
                let scales = &scales_of[at * scales..][..scales];
                [
                    bytemuck::cast_slice::<_, u8>(numbers),
                    bytemuck::cast_slice(scales),
                ]
                .concat()
            };
            let bytes: Vec<u8> = (0..pages).flat_map(in_page).collect();
            DeviceBuffer::from_slice(gpu, &bytes).expect("memory")
        };
        let sides = [
            side(&layer.pools.k, &layer.scales[0]),
            side(&layer.pools.v, &layer.scales[1]),
        ];
        let [k, v] = sides.each_ref().map(DeviceBuffer::address);
        let [k_scales, v_scales] = [k, v].map(|pool| DeviceTensor {
            address: pool + numbers as u64,
            dtype: Dtype::F32,
            shape: [pages, PAGE as usize, 2],
            strides: [page / 4, 2, 1],
        });
        let pool = KvPool::new(spec, KvLayout::Nhd, PAGE, pages as u32, k, v)
            .with_strides(strides, strides)
            .with_scales(OnGpu::Token {
                k: k_scales,
                v: v_scales,
            });
        let queries = DeviceBuffer::from_slice(gpu, &problem.q).expect("memory");
        let out = DeviceBuffer::from_slice(gpu, &vec![bf16::NAN; problem.q.len()]);
        let (out, shape) = (out.expect("memory"), problem.shape());
        let stream = gpu.stream().expect("a stream");
        let bound = Bound::of(&problem.plan);
        let workspace = gpu.workspace(spec, &bound, WorkspaceOptions::default());
        let mut workspace = workspace.expect("memory");
        let (q, of_out) = (queries.tensor(shape), out.tensor(shape));
        // SAFETY: all memory lives until the stream was waited for.
        let ran = unsafe {
            workspace.upload(&problem.plan, *stream).expect("it fits");
            gpu.run(&mut workspace, &q, &[pool], &of_out, None, *stream)
        };
        assert_eq!(ran, Ok(()));
        stream.synchronize().expect("it ran");
        let got = out.read().expect("it is there");
        problem.compare(
            Kind::Token,
            &layer,
            &got,
            &format!("{compute} {requests:?}"),
        );
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
