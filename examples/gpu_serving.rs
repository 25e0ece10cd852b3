//! A serving loop on a GPU: a prompt, a chunk of a second prompt together with decodes, then decodes from captured CUDA graphs.
//!
//! Run it with `cargo run --release --features cuda --example gpu_serving`. It needs neither a CUDA toolkit nor another CUDA crate.
//! Without a GPU it prints what is missing and ends. It also runs on the emulated driver of docs/guide/without-a-gpu.md.
//!
//! To use this code in a program of your own, add the features `cuda` and `unstable` (the latter only for the comparison with
//! f64), and the crates `half` and `fastrand`.

use std::{
    collections::{HashMap, hash_map::Entry},
    error::Error as StdError,
};

use half::bf16;
use tandem_attn::{
    Error,
    gpu::{DeviceBuffer, Gpu, KvPool, LaunchSet, Stream, Workspace, WorkspaceOptions},
    kv::{PagePool, PrefixCache, Sequence},
    plan::{BatchLimits, Bound, Plan, PlanOptions, Planner},
    problem::{Batch, KvLayout, PageTable, Spec},
    reference,
};

const LAYERS: usize = 2;
const PAGE_SIZE: u32 = 16;
const PAGES: u32 = 256;
const MAX_TOKENS: u32 = 512;

/// GPU memory of the model: a page pool for each layer, and queries and outputs of a step.
struct Model {
    spec: Spec,
    caches: Vec<[DeviceBuffer<bf16>; 2]>,
    q: DeviceBuffer<bf16>,
    out: DeviceBuffer<bf16>,
}

impl Model {
    fn pool(&self, layer: usize) -> KvPool {
        let [k, v] = &self.caches[layer];
        KvPool::new(
            &self.spec,
            KvLayout::Nhd,
            PAGE_SIZE,
            PAGES,
            k.address(),
            v.address(),
        )
    }

    /// The attention of all layers. A real model computes queries, keys and values between the layers, and appends keys and
    /// values to their pages (`Gpu::append_paged_kv`).
    fn layers(
        &self,
        gpu: &Gpu,
        workspace: &mut Workspace,
        tokens: usize,
        stream: Stream,
    ) -> Result<(), Error> {
        let shape = [
            tokens,
            self.spec.q_heads as usize,
            self.spec.head_dim_qk as usize,
        ];
        let (q, out) = (self.q.tensor(shape), self.out.tensor(shape));
        for layer in 0..LAYERS {
            // SAFETY: all buffers live in `self` until the stream was waited for, and the plan is the planner's.
            unsafe { gpu.run(workspace, &q, &[self.pool(layer)], &out, None, stream) }?;
        }
        Ok(())
    }
}

/// Runs the example.
pub fn main() -> Result<(), Box<dyn StdError>> {
    // `Gpu::new` is enough for GPUs for which the library has machine code. Other GPUs, and the emulated one, compile PTX.
    let mut progress = |module| eprintln!("{module}");
    let gpu = match Gpu::builder().compile_ptx(&mut progress).build(0) {
        Ok(gpu) => gpu,
        Err(missing @ (Error::NoDriver { .. } | Error::NoDevice { .. })) => {
            println!("{missing}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let stream = gpu.stream()?;
    let device = gpu.device();
    let spec = Spec::new(8, 2, 128);

    let mut random = fastrand::Rng::with_seed(1);
    let mut numbers = |count: u32| -> Vec<bf16> {
        (0..count)
            .map(|_| bf16::from_f64(2.0 * random.f64() - 1.0))
            .collect()
    };
    let elements = PAGES * PAGE_SIZE * spec.kv_heads * spec.head_dim_qk;
    let host_caches: Vec<[Vec<bf16>; 2]> = (0..LAYERS)
        .map(|_| [numbers(elements), numbers(elements)])
        .collect();
    let host_q = numbers(MAX_TOKENS * spec.q_heads * spec.head_dim_qk);
    let caches = host_caches.iter().map(|[k, v]| {
        Ok([
            DeviceBuffer::from_slice(&gpu, k)?,
            DeviceBuffer::from_slice(&gpu, v)?,
        ])
    });
    let model = Model {
        spec,
        caches: caches.collect::<Result<_, Error>>()?,
        q: DeviceBuffer::from_slice(&gpu, &host_q)?,
        out: DeviceBuffer::zeroed(&gpu, host_q.len())?,
    };

    // The memory is allocated before any batch is known. Plans stay within these limits.
    let limits =
        BatchLimits::decodes(64, 16 * PAGE_SIZE * 4, PAGE_SIZE).with_query_tokens(MAX_TOKENS);
    let mut options = PlanOptions::default();
    let bound = Bound::new(&spec, &device, &options, &limits)?;
    options.bound = Some(bound);
    let mut workspace = gpu.workspace(&spec, &bound, WorkspaceOptions::default())?;
    let mut planner = Planner::new();

    // A prompt of 200 tokens, alone.
    let (mut pool, mut cache) = (PagePool::new(PAGES, PAGE_SIZE), PrefixCache::new(PAGE_SIZE));
    let prompt: Vec<u32> = (0..200).collect();
    let mut first = Sequence::default();
    let _ = first.append(&mut pool, 200)?;
    let batch = batch_of(&[(&first, 200)]);
    let mut plan = planner.plan(&spec, &batch, &device, &options)?;
    step(&gpu, &model, &mut workspace, &plan, &stream)?;
    check(&model, &host_caches, &host_q, &batch)?;

    // Seven requests begin with the same prompt and decode. A chunk of another prompt is in the same batch. The planner
    // finds the common pages, which are read once, and runs both kernels side by side if that is faster.
    cache.insert(&mut pool, &prompt, &mut first);
    let mut decodes = vec![first];
    for _ in 0..6 {
        decodes.push(cache.acquire(&mut pool, &prompt));
    }
    // `append` returns no page copy here, since the requests share full pages only. After `Sequence::fork` they may also share the
    // last page.
    for request in &mut decodes {
        assert_eq!(request.append(&mut pool, 9)?, None);
    }
    let mut other = Sequence::default();
    let _ = other.append(&mut pool, 300)?;
    let mut hybrid: Vec<_> = decodes.iter().map(|request| (request, 1)).collect();
    hybrid.push((&other, 120));
    let batch = batch_of(&hybrid);
    planner.plan_into(&spec, &batch, &device, &options, &mut plan)?;
    step(&gpu, &model, &mut workspace, &plan, &stream)?;
    check(&model, &host_caches, &host_q, &batch)?;
    println!("{plan}");

    // Decodes from CUDA graphs, which contain all layers. There is one for each choice of kernels that plans need; other plans
    // that need the same kernels are launched with it.
    let mut captured = WorkspaceOptions::default();
    captured.launches = Some(LaunchSet::decodes(&device, &spec)?);
    let mut workspace = gpu.workspace(&spec, &bound, captured)?;
    decodes.push(other);
    let mut graphs = HashMap::new();
    for _ in 0..8 {
        for request in &mut decodes {
            let _ = request.append(&mut pool, 1)?;
        }
        let batch = batch_of(
            &decodes
                .iter()
                .map(|request| (request, 1))
                .collect::<Vec<_>>(),
        );
        planner.update(&spec, &batch, &device, &options, &mut plan)?;
        // SAFETY: the stream is ours, and everything on it so far ran there.
        unsafe { workspace.upload(&plan, *stream) }?;
        let graph = match graphs.entry(workspace.needed_launches()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                workspace.launch_only_needed();
                let layers = |on| model.layers(&gpu, &mut workspace, decodes.len(), on);
                place.insert(stream.capture(layers)?)
            }
        };
        // SAFETY: what was captured lives, and the upload came before.
        unsafe { graph.launch(*stream) }?;
        stream.synchronize()?;
        check(&model, &host_caches, &host_q, &batch)?;
    }
    println!(
        "a prompt, a hybrid step and 8 decode steps from {} graph{} on {}: all as in f64",
        graphs.len(),
        if graphs.len() == 1 { "" } else { "s" },
        gpu.name()
    );
    Ok(())
}

/// Requests with their new tokens.
fn batch_of(requests: &[(&Sequence, u32)]) -> Batch {
    let mut table = PageTable::new(PAGE_SIZE, PAGES);
    let mut qo_indptr = vec![0];
    for (request, tokens) in requests {
        request.push_to(&mut table);
        qo_indptr.push(qo_indptr[qo_indptr.len() - 1] + tokens);
    }
    Batch::new(qo_indptr, table)
}

/// One step: the plan once, all layers with it.
fn step(
    gpu: &Gpu,
    model: &Model,
    workspace: &mut Workspace,
    plan: &Plan,
    stream: &tandem_attn::gpu::OwnedStream,
) -> Result<(), Error> {
    // SAFETY: the stream is ours, and everything on it so far ran there.
    unsafe { workspace.upload(plan, **stream) }?;
    model.layers(gpu, workspace, plan.total_q as usize, **stream)?;
    stream.synchronize()
}

/// Compares the last layer's output with reference attention in f64.
fn check(
    model: &Model,
    caches: &[[Vec<bf16>; 2]],
    q: &[bf16],
    batch: &Batch,
) -> Result<(), Box<dyn StdError>> {
    let [k, v] = &caches[LAYERS - 1];
    let kv = tandem_attn::kv::KvView::new(&model.spec, KvLayout::Nhd, PAGE_SIZE, k, v);
    let elements = (batch.total_q() * model.spec.q_heads * model.spec.head_dim_qk) as usize;
    let exact = reference::attention(&model.spec, batch, &q[..elements], &[kv])?;
    let out = model.out.read()?;
    let errors = out
        .iter()
        .zip(&exact.out)
        .map(|(x, right)| (x.to_f64() - right).abs());
    let largest = errors.fold(0.0, f64::max);
    if largest > 1e-2 {
        return Err(format!("an error of {largest:.1e}").into());
    }
    Ok(())
}
