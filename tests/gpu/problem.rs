//! Random batches, and tensors for them on the device.

use std::rc::Rc;

use proptest::prelude::*;
use tandem_attn::{
    exec::gpu::{
        DeviceArray, DeviceTensor, Gpu, KvPool, KvScales, LaunchSet, RunTensors, Workspace,
        WorkspaceOptions,
    },
    plan::{Bound, DeviceDescription, Plan},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    tensor::Element,
};

use crate::common::{
    self, Memory, Stream, Tolerance, compare,
    problems::{Tensors, has_rows_656, own_bytes, sinks, slopes},
};

/// Where a request leaves the table of an earlier one, how many keys it has of its own, and its queries.
#[derive(Clone, Debug)]
pub struct Request {
    pub parent: u64,
    pub shared: usize,
    pub own: u32,
    pub queries: u32,
}

/// A workspace with a plan of decodes in it; `captured`: with launches for all such plans.
pub fn uploaded(
    gpu: &Gpu,
    spec: &Spec,
    device: &DeviceDescription,
    plan: &Plan,
    captured: bool,
    stream: &Stream,
) -> Workspace {
    let mut options = WorkspaceOptions::default();
    if captured {
        options.launches = Some(LaunchSet::decodes(device, spec).expect("there are kernels"));
    }
    let mut workspace = gpu
        .workspace(spec, &Bound::of(plan), options)
        .expect("there is memory");
    // SAFETY: the stream is the test's.
    unsafe { workspace.upload(plan, stream.0) }.expect("the plan fits");
    workspace
}

pub fn request() -> impl Strategy<Value = Request> {
    let own = prop_oneof![1 => Just(0_u32), 6 => 1..90_u32, 3 => 1..700_u32, 1 => 1..2500_u32];
    let queries = prop_oneof![
        1 => Just(0_u32),
        8 => Just(1),
        3 => 2..9_u32,
        3 => 9..80_u32,
        1 => 80..400_u32
    ];
    let shared = prop_oneof![2 => Just(0_usize), 3 => 1..30_usize];
    (any::<u64>(), shared, own, queries).prop_map(|(parent, shared, own, queries)| Request {
        parent,
        shared,
        own,
        queries,
    })
}

/// A batch of these requests on shuffled pages.
pub fn batch_of(requests: &[Request], page_size: u32, seed: u64) -> Batch {
    let (mut tables, mut used) = (Vec::<(Vec<u32>, u32)>::new(), 0);
    let mut qo_indptr = vec![0];
    for request in requests {
        let mut pages = Vec::new();
        if !tables.is_empty() {
            // Whole pages only: a shared page is full.
            let (parent, len) = &tables[request.parent as usize % tables.len()];
            let full = (len / page_size) as usize;
            pages.extend_from_slice(&parent[..request.shared.min(full)]);
        }
        let kv_len = (pages.len() as u32 * page_size + request.own).max(request.queries);
        let more = kv_len.div_ceil(page_size) - pages.len() as u32;
        pages.extend(used..used + more);
        used += more;
        tables.push((pages, kv_len));
        qo_indptr.push(qo_indptr[qo_indptr.len() - 1] + request.queries);
    }
    let mut shuffled: Vec<u32> = (0..used + 3).collect();
    common::Rng(seed).shuffle(&mut shuffled);
    let mut table = PageTable::new(page_size, used + 3);
    for (pages, kv_len) in &tables {
        let pages: Vec<u32> = pages.iter().map(|&page| shuffled[page as usize]).collect();
        table.push(&pages, *kv_len);
    }
    Batch::new(qo_indptr, table)
}

/// A problem's tensors on the device, with room for results.
#[derive(Clone)]
pub struct OnDevice {
    _parts: Rc<Vec<(Memory, Memory)>>,
    pub pools: Vec<KvPool>,
    _q: Rc<Memory>,
    pub q: DeviceTensor<3>,
    pub out: Rc<Memory>,
    dim_v: usize,
    out_dtype: Dtype,
    pub lse: Rc<Memory>,
    sinks: Option<Rc<Memory>>,
    own: Vec<u8>,
    _slopes: Rc<Memory>,
}

impl OnDevice {
    pub fn new<T: Element, K: Element>(
        spec: &Spec,
        batch: &Batch,
        tensors: &Tensors<T, K>,
    ) -> Self {
        let parts: Vec<_> = tensors
            .parts
            .iter()
            .map(|part| (at_least_one(&part.k), at_least_one(&part.v)))
            .collect();
        let pools = parts.iter().zip(&tensors.parts).zip(&batch.parts);
        let pools = pools.map(|(((k, v), pool), part)| {
            let PageTable {
                page_size,
                pool_pages,
                ..
            } = part.table;
            KvPool::new(
                spec,
                KvLayout::Nhd,
                page_size,
                pool_pages,
                k.address(),
                if spec.latent {
                    k.address()
                } else {
                    v.address()
                },
            )
            .with_strides(pool.k_strides, pool.v_strides)
            .with_scales(match has_rows_656(spec) {
                true => KvScales::InRow,
                false => KvScales::One,
            })
        });
        let pools = pools.collect();
        let (tokens, heads) = (batch.total_q() as usize, spec.q_heads as usize);
        let slopes = Memory::new(&slopes(spec));
        let q = at_least_one(&tensors.q);
        Self {
            pools,
            q: q.tensor(T::DTYPE, [tokens, heads, spec.head_dim_qk as usize]),
            _q: q.into(),
            dim_v: spec.head_dim_v as usize,
            out_dtype: spec.out_dtype,
            out: Memory::of_bytes(
                (tokens * heads * spec.head_dim_v as usize * spec.out_dtype.bytes() as usize)
                    .max(16),
            )
            .into(),
            lse: Memory::of_bytes((tokens * heads * 4).max(16)).into(),
            sinks: sinks(spec).map(|sinks| Memory::new(&sinks).into()),
            own: own_bytes(spec, slopes.address()),
            _slopes: slopes.into(),
            _parts: parts.into(),
        }
    }

    /// The same with the first query tokens only.
    pub fn first(&self, tokens: usize) -> Self {
        let mut first = self.clone();
        first.q.shape[0] = tokens;
        first
    }

    /// The same with other sinks.
    pub fn with_sinks(mut self, sinks: &[f32]) -> Self {
        self.sinks = Some(Memory::new(sinks).into());
        self
    }

    /// What a run is given, with results elsewhere.
    pub fn tensors<'a>(
        &'a self,
        out: &'a DeviceTensor<3>,
        lse: &'a DeviceTensor<2>,
    ) -> RunTensors<'a> {
        let mut tensors = RunTensors::new(&self.q, &self.pools, out).with_lse(lse);
        tensors.own = &self.own;
        match &self.sinks {
            Some(sinks) => tensors.with_sinks(sinks.array()),
            None => tensors,
        }
    }

    /// The same with another pool of the first part, the only one.
    pub fn with_pool(&self, pool: KvPool) -> Self {
        let mut other = self.clone();
        other.pools = vec![pool];
        other
    }

    /// Where a run puts outputs and log-sums.
    pub fn results(&self) -> (DeviceTensor<3>, DeviceTensor<2>) {
        let [tokens, heads, _] = self.q.shape;
        let out = self.out.tensor(self.out_dtype, [tokens, heads, self.dim_v]);
        (out, self.lse.tensor(Dtype::F32, [tokens, heads]))
    }

    /// Puts what is in the workspace on the stream.
    pub fn launch(&self, gpu: &Gpu, workspace: &mut Workspace, stream: &Stream) {
        let (out, lse) = self.results();
        let tensors = self.tensors(&out, &lse);
        // SAFETY: everything lives until the stream was waited for.
        unsafe { gpu.run_with(workspace, &tensors, stream.0) }.expect("the run is right");
    }

    /// Runs what is in the workspace; results as bits, of wider outputs two words each.
    pub fn run(
        &self,
        gpu: &Gpu,
        workspace: &mut Workspace,
        stream: &Stream,
    ) -> (Vec<u16>, Vec<u32>) {
        self.run_indexed(gpu, workspace, stream, None)
    }

    /// The same with keys by indices.
    pub fn run_indexed(
        &self,
        gpu: &Gpu,
        workspace: &mut Workspace,
        stream: &Stream,
        indices: Option<DeviceArray<i32>>,
    ) -> (Vec<u16>, Vec<u32>) {
        let ([tokens, heads, _], dim) = (self.q.shape, self.dim_v);
        let words = tokens * heads * dim * self.out_dtype.bytes() as usize / 2;
        self.out.write_at(0, &vec![u16::MAX; words]);
        self.lse.write_at(0, &vec![u32::MAX; tokens * heads]);
        let out = self.out.tensor(self.out_dtype, [tokens, heads, dim]);
        let lse = self.lse.tensor(Dtype::F32, [tokens, heads]);
        let mut tensors = self.tensors(&out, &lse);
        tensors.indices = indices;
        // SAFETY: everything lives until the stream was waited for.
        unsafe { gpu.run_with(workspace, &tensors, stream.0) }.expect("the run is right");
        stream.wait();
        let out = self.out.read_at(0, words);
        (out, self.lse.read_at(0, tokens * heads))
    }
}

pub fn at_least_one<T: bytemuck::Pod>(values: &[T]) -> Memory {
    match values {
        [] => Memory::of_bytes(16),
        _ => Memory::new(values),
    }
}

pub fn check_results<T: Element, K: Element>(
    spec: &Spec,
    batch: &Batch,
    tensors: &Tensors<T, K>,
    results: &(Vec<u16>, Vec<u32>),
) -> Result<(), String> {
    check_results_off(spec, batch, tensors, results, [0.0; 2])
}

/// The same where logits may be off by so much more, and values.
pub fn check_results_off<T: Element, K: Element>(
    spec: &Spec,
    batch: &Batch,
    tensors: &Tensors<T, K>,
    (out, lse): &(Vec<u16>, Vec<u32>),
    [logits, values]: [f64; 2],
) -> Result<(), String> {
    let right = tensors.reference(spec, batch);
    let shape = [
        batch.total_q() as usize,
        spec.q_heads as usize,
        spec.head_dim_v as usize,
    ];
    // Weights are rounded to 16 bits before they meet the values, whose sum may cancel.
    let mut tolerance = Tolerance::of(T::DTYPE);
    tolerance.absolute = match T::DTYPE {
        Dtype::BF16 => 1.0 / 256.0,
        _ => 1.0 / 2048.0,
    };
    if spec.variant.adds_up {
        // Weights that are not normalised: several of them may be near 1.
        tolerance.absolute *= 4.0;
    }
    let mut of_lse = Tolerance {
        absolute: 2e-4,
        relative: 1e-5,
    };
    if spec.rotary.is_some() {
        // Queries and keys are rounded when they were turned, as those of a pool are that were turned before.
        let step = match T::DTYPE {
            Dtype::BF16 => 1.0 / 256.0,
            _ => 1.0 / 2048.0,
        };
        tolerance.absolute += 3.0 * step;
        of_lse.absolute = 5.0 * step;
    }
    // A weight is off by twice what its logit and the log of the sum are, and the values are at most 1.
    tolerance.absolute += values + (2.0 * logits).exp_m1();
    of_lse.absolute += logits;
    let got = common::decode(spec.out_dtype, bytemuck::cast_slice(out));
    compare("out", &shape, &got, &right.out, tolerance)?;
    let got: Vec<f64> = lse.iter().map(|&x| f32::from_bits(x).into()).collect();
    compare("lse", &[shape[0], shape[1], 1], &got, &right.lse, of_lse)
}
