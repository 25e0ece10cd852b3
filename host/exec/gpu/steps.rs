//! The launches of a run: what each takes, in which order they come, and on which streams.

use std::{ffi::c_void, ptr};

use kernels_gpu::{
    abi::{
        AttentionParams, DecodeParams, GatherDecodeParams, GatherPrefillParams, LatentParams,
        MergeParams, PodParams, PrefillParams, RotaryParams, TurnParams, WidenParams,
    },
    registry::{Arch, KernelId},
    variant::OwnDefect,
};

use super::{
    DeviceArray, DeviceTensor, Gpu, KvPool, Stream, Workspace,
    latent::{LatentShapes, check_latent},
    launch::Launch,
    maps::{Maps, ShapeId},
    module::Kernel,
    prefill::{Shapes, Source},
    tensor::{COUNTED, VECTOR_BYTES, check_address, fits},
};
use crate::{
    Error,
    plan::pod::PodMode,
    problem::{Padding, Spec},
    tensor::{ShapeError, check_softmax},
};

/// What a run computes from and to: see [`Gpu::run`].
///
/// ```
/// use tandem_attn::{gpu::{DeviceArray, DeviceTensor, RunTensors}, problem::Dtype};
///
/// let q = DeviceTensor::new(0x7f00_0000_0000, Dtype::BF16, [17, 64, 64]);
/// let out = DeviceTensor::new(0x7f00_1000_0000, Dtype::BF16, [17, 64, 64]);
/// let sinks = DeviceArray::<f32>::new(0x7f00_2000_0000, 64);
/// let tensors = RunTensors::new(&q, &[], &out).with_sinks(sinks);
/// assert_eq!(tensors.lse, None);
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RunTensors<'a> {
    /// `[total_q, q_heads, head_dim_qk]`, any token stride that is a multiple of 8.
    pub q: &'a DeviceTensor<3>,
    /// One for each part of the batch.
    pub pools: &'a [KvPool],
    /// `[total_q, q_heads, head_dim_v]`, likewise.
    pub out: &'a DeviceTensor<3>,
    /// `[total_q, q_heads]` F32, natural log, where it is wanted.
    pub lse: Option<&'a DeviceTensor<2>>,
    /// `[q_heads]`: the [sinks](crate::problem::Variant::sinks) of the spec's variant. They may lie elsewhere in every
    /// run, as each layer has its own.
    pub sinks: Option<DeviceArray<f32>>,
    /// The keys of each query token, of a batch [of so many](crate::problem::Batch::of_top_k): an index of the pool's
    /// tokens each, `page × page_size + offset`; what is no token of the pool, such as −1, is none. They may be others in
    /// every run, as each layer has its own. Latent keys in rows of 656 bytes are read so.
    pub indices: Option<DeviceArray<i32>>,
    /// The bytes of what the [hooks](crate::problem::Variant::hooks) of the spec's variant are given. A captured graph
    /// keeps them: what is to change lies behind an address among them.
    pub own: &'a [u8],
    /// Where merges write, if that is not `out`: what 16 bits the kernels of attention would write is nowhere then.
    pub(super) merged: Option<&'a DeviceTensor<3>>,
    /// Where `q` and `out` have padded heads: for kernels that were compiled for the heads as they are.
    pub(super) unpadded: Option<Unpadded>,
}

/// Queries as a run was given them, and outputs if kernels may write these: where they may not, they write padded ones
/// beside the others'.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unpadded {
    pub(super) q: DeviceTensor<3>,
    pub(super) out: Option<DeviceTensor<3>>,
}

impl<'a> RunTensors<'a> {
    /// Queries and outputs of a launch, as they were given if it takes them so.
    pub(super) fn of_launch(&self, unpadded: bool) -> [&DeviceTensor<3>; 2] {
        match &self.unpadded {
            Some(Unpadded { q, out }) if unpadded => [q, out.as_ref().unwrap_or(self.out)],
            _ => [self.q, self.out],
        }
    }

    /// What every run has.
    #[must_use]
    pub const fn new(
        q: &'a DeviceTensor<3>,
        pools: &'a [KvPool],
        out: &'a DeviceTensor<3>,
    ) -> Self {
        Self {
            q,
            pools,
            out,
            lse: None,
            sinks: None,
            indices: None,
            own: &[],
            merged: None,
            unpadded: None,
        }
    }

    /// With the log-sums.
    #[must_use]
    pub const fn with_lse(mut self, lse: &'a DeviceTensor<2>) -> Self {
        self.lse = Some(lse);
        self
    }

    /// With what the hooks of the variant are given: their [`FromLaunch::Own`](crate::variant::FromLaunch::Own).
    #[cfg(feature = "unstable")]
    #[must_use]
    pub fn with_own<T: bytemuck::Pod>(mut self, own: &'a T) -> Self {
        self.own = bytemuck::bytes_of(own);
        self
    }

    /// With the keys of each query token. The pool is given with pages of one token.
    #[must_use]
    pub const fn with_indices(mut self, indices: DeviceArray<i32>) -> Self {
        self.indices = Some(indices);
        self
    }

    /// With sinks.
    #[must_use]
    pub const fn with_sinks(mut self, sinks: DeviceArray<f32>) -> Self {
        self.sinks = Some(sinks);
        self
    }
}

/// What some variants and batches have beside queries, keys and values.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Extras {
    /// As [`RunTensors::sinks`].
    pub sinks: Option<DeviceArray<f32>>,
    /// `[tokens]`: as [`Batch::ancestors`](crate::problem::Batch::ancestors).
    pub ancestors: Option<DeviceArray<u64>>,
    /// Heads of the pool are smaller than the spec says, and padded.
    pub(super) padding: Option<Padding>,
    /// Columns between the 64th of an output's head, or a partial state's, and the next: heads of the launch are not
    /// padded, those of others are.
    pub(super) gap: u32,
    /// As [`TileGroup::kv_heads_together`](crate::plan::TileGroup::kv_heads_together).
    pub(super) kv_heads_together: u32,
    /// A prefill multiplies by scales of 8-bit keys and values.
    pub(super) scaled: bool,
    /// How decodes turn queries and keys, and prefills queries.
    pub(super) rotary: RotaryParams,
    /// Where values are, if not in the pool of the keys: keys are in pages that were made of those of the pool.
    pub(super) values: Option<KvPool>,
}

impl Extras {
    /// Whether there is what the spec asks for, of so many query tokens.
    pub(super) fn check(&self, spec: &Spec, tokens: usize) -> Result<(), Error> {
        check_sinks(spec, self.sinks)?;
        let Some(ancestors) = self.ancestors else {
            return Ok(());
        };
        ancestors.check_address("ancestors", 8)?;
        if ancestors.len < tokens {
            return Err(Error::Extent {
                tensor: "ancestors",
                dimension: "tokens",
                got: ancestors.len,
                rule: format!("at least {tokens}, as in q"),
            });
        }
        Ok(())
    }

    /// What runs in the place of a prefill's kernel: itself, or one that takes sinks, masks and scales and turns queries where
    /// there are any.
    pub(super) fn kernel(&self, kernel: KernelId) -> Result<KernelId, Error> {
        let row = kernel.info();
        let scaled = self.scaled && !row.co_resident;
        let turns = self.rotary.turns != 0;
        if turns && row.co_resident {
            return Err(Error::NoInstance {
                kernel: "prefill",
                asked: format!("queries that are turned by their positions, and {kernel}"),
                there: "those that do not share SMs with decodes",
            });
        }
        if row.extras || !(scaled || turns || self.sinks.is_some() || self.ancestors.is_some()) {
            return Ok(kernel);
        }
        let there = kernel.with_extras().or_else(|| kernel.on(Arch::Sm80));
        there.ok_or_else(|| Error::NoInstance {
            kernel: "prefill",
            asked: format!("sinks or masks, and what {kernel} does"),
            there: "those of one tile of queries or two, with a soft cap or without",
        })
    }

    /// What every attention kernel takes: the heads, the tensors and these.
    pub(super) fn parameters(
        &self,
        spec: &Spec,
        q: &DeviceTensor<3>,
        pool: &KvPool,
        out: &DeviceTensor<3>,
        lse: Option<&DeviceTensor<2>>,
    ) -> Result<AttentionParams, Error> {
        Ok(AttentionParams {
            q: q.address,
            k: pool.k,
            v: pool.v,
            out: out.address,
            lse: lse.map_or(0, |lse| lse.address),
            q_heads: spec.q_heads,
            kv_heads: spec.kv_heads,
            group: spec.group(),
            k_strides: pool.k_strides,
            v_strides: pool.v_strides,
            q_token_stride: fits("the token stride of q", q.strides[0], COUNTED)?,
            out_token_stride: fits("the token stride of out", out.strides[0], COUNTED)?,
            variant: spec.variant_params(),
            scales: pool.scales.parameters(spec, pool, q.shape[0])?,
            sinks: self.sinks.map_or(0, |sinks| sinks.address),
            ancestors: self.ancestors.map_or(0, |ancestors| ancestors.address),
            ..AttentionParams::default()
        })
    }
}

/// Whether there are sinks if the spec has any.
pub(super) fn check_sinks(spec: &Spec, sinks: Option<DeviceArray<f32>>) -> Result<(), Error> {
    let (name, expected) = ("sinks", spec.q_heads as usize);
    match (spec.variant.sinks, sinks) {
        (true, None) => Err(ShapeError::Missing { name }.into()),
        (false, Some(_)) => Err(ShapeError::Surplus { name }.into()),
        (true, Some(sinks)) => {
            ShapeError::length(name, sinks.len, "[q_heads]", expected)?;
            sinks.check_address(name, 4)
        }
        (false, None) => Ok(()),
    }
}

/// Whether the hooks of the spec's variant, if it has any, are as the spec says and are given what is theirs.
pub(super) fn check_own(gpu: &Gpu, spec: &Spec, own: &[u8]) -> Result<(), Error> {
    let hooks = spec.variant.hooks.map(|name| gpu.hooks(name)).transpose()?;
    let expected = hooks.map_or(0, |hooks| hooks.own_bytes);
    let given = "what the variant is given";
    ShapeError::length(given, own.len(), "its size in bytes", expected)?;
    let Some(hooks) = hooks else {
        return Ok(());
    };
    check_softmax(spec, hooks.softmax)?;
    let wrong = |OwnDefect { name, got, rule }| ShapeError::Own {
        hooks: hooks.name,
        name,
        got,
        rule,
    };
    Ok((hooks.check.0)(own, spec.q_heads).map_err(wrong)?)
}

/// A launch that was checked and waits for its turn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) kernel: Kernel,
    pub(super) launch: Launch,
    /// The part of the batch, which has a pool of its own.
    pub(super) part: usize,
    pub(super) parameters: Parameters,
}

/// What a kernel takes, and by which shapes the tensor maps in it were made.
#[derive(Clone, Copy, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "steps lie one after the other, and the largest are the usual ones"
)]
pub(super) enum Parameters {
    Decode(DecodeParams, [ShapeId; 2]),
    Latent(LatentParams, LatentShapes),
    DecodeRows(GatherDecodeParams),
    Prefill(PrefillParams, Shapes),
    PrefillRows(GatherPrefillParams),
    /// What widens the keys of the prefill behind it.
    Widen(WidenParams),
    /// What turns keys for the prefill behind it.
    Turn(TurnParams),
    /// A prefill and a decode in one.
    Pod(PodParams),
    Merge(MergeParams),
}

impl Step {
    /// The same launch for tensors that lie elsewhere and are otherwise as those it was made for.
    fn follow(
        &mut self,
        spec: &Spec,
        tensors: &RunTensors<'_>,
        maps: &mut Maps,
    ) -> Result<(), Error> {
        let pool = &tensors.pools[self.part];
        let scales = pool.scales.parameters(spec, pool, tensors.q.shape[0])?;
        match &mut self.parameters {
            Parameters::Decode(params, [k, v]) => {
                params.attention.scales = scales;
                let known = &params.attention;
                if (known.k, known.v) != (pool.k, pool.v) {
                    params.k_map = maps.at("the key pool", pool.k, *k)?;
                    params.v_map = maps.at("the value pool", pool.v, *v)?;
                }
                point(&mut params.attention, tensors, pool);
            }
            Parameters::Latent(params, shapes) => {
                check_latent(pool)?;
                let known = &params.attention;
                if known.q != tensors.q.address {
                    params.q_map = maps.at("q", tensors.q.address, shapes.q)?;
                }
                match shapes.halves {
                    Some([left, right]) if known.k != pool.k => {
                        params.left_map = maps.at("the pool", pool.k, left)?;
                        params.right_map = maps.at("the pool", pool.k, right)?;
                    }
                    Some(_) => (),
                    None => check_pool(pool)?,
                }
                if let Some(indices) = tensors.indices {
                    params.attention.page_ids = indices.address;
                }
                point(&mut params.attention, tensors, pool);
            }
            Parameters::Prefill(params, shapes) => {
                let known = &params.attention;
                let [q, out] = tensors.of_launch(shapes.unpadded);
                let (q, out) = (q.address, out.address);
                if known.q != q {
                    params.q_map = maps.at("q", q, shapes.q)?;
                }
                if known.out != out {
                    params.out_map = maps.at("out", out, shapes.out)?;
                }
                let read = (known.k, known.v);
                point(&mut params.attention, tensors, pool);
                (params.attention.q, params.attention.out) = (q, out);
                match shapes.source {
                    Source::Pool => {
                        params.attention.scales = scales;
                        match shapes.pages {
                            Some([k, v]) if read != (pool.k, pool.v) => {
                                params.k_map = maps.at("the key pool", pool.k, k)?;
                                params.v_map = maps.at("the value pool", pool.v, v)?;
                            }
                            Some(_) => (),
                            None => check_pool(pool)?,
                        }
                    }
                    Source::Converted => {
                        check_pool(pool)?;
                        params.attention.scales = scales;
                        (params.convert.k, params.convert.v) = (pool.k, pool.v);
                        (params.attention.k, params.attention.v) = read;
                    }
                    Source::Widened | Source::Turned { values: true } => {
                        (params.attention.k, params.attention.v) = read
                    }
                    Source::Turned { values: false } => {
                        if let (Some([_, v]), true) = (shapes.pages, read.1 != pool.v) {
                            params.v_map = maps.at("v pool", pool.v, v)?;
                        }
                        params.attention.k = read.0;
                    }
                }
            }
            Parameters::Widen(params) => {
                check_pool(pool)?;
                params.scales = scales;
                (params.convert.k, params.convert.v) = (pool.k, pool.v);
            }
            Parameters::Turn(params) => {
                check_pool(pool)?;
                (params.convert.k, params.convert.v) = (pool.k, pool.v);
            }
            Parameters::DecodeRows(params) => {
                check_pool(pool)?;
                point(&mut params.attention, tensors, pool);
            }
            Parameters::PrefillRows(params) => {
                check_pool(pool)?;
                point(&mut params.attention, tensors, pool);
            }
            Parameters::Pod(params) => {
                check_pool(pool)?;
                point(&mut params.prefill.attention, tensors, pool);
                point(&mut params.decode.attention, tensors, pool);
            }
            Parameters::Merge(params) => {
                params.out = tensors.merged.unwrap_or(tensors.out).address;
                params.lse = tensors.lse.map_or(0, |lse| lse.address);
                params.sinks = tensors.sinks.map_or(0, |sinks| sinks.address);
            }
        }
        Ok(())
    }

    const fn parameters(&self) -> *const c_void {
        match &self.parameters {
            Parameters::Decode(params, _) => (&raw const *params).cast(),
            Parameters::Latent(params, _) => (&raw const *params).cast(),
            Parameters::DecodeRows(params) => (&raw const *params).cast(),
            Parameters::Prefill(params, _) => (&raw const *params).cast(),
            Parameters::PrefillRows(params) => (&raw const *params).cast(),
            Parameters::Widen(params) => (&raw const *params).cast(),
            Parameters::Turn(params) => (&raw const *params).cast(),
            Parameters::Pod(params) => (&raw const *params).cast(),
            Parameters::Merge(params) => (&raw const *params).cast(),
        }
    }

    const fn is_prefill(&self) -> bool {
        let parameters = &self.parameters;
        matches!(
            parameters,
            Parameters::Prefill(..) | Parameters::PrefillRows(_)
        )
    }

    const fn is_decode(&self) -> bool {
        let parameters = &self.parameters;
        matches!(
            parameters,
            Parameters::Decode(..) | Parameters::Latent(..) | Parameters::DecodeRows(_)
        )
    }

    const fn is_merge(&self) -> bool {
        matches!(self.parameters, Parameters::Merge(_))
    }

    /// Decodes that leave most of each SM to a prefill.
    const fn is_co_resident_decode(&self) -> bool {
        self.is_decode() && self.kernel.info.co_resident
    }
}

fn point(params: &mut AttentionParams, tensors: &RunTensors<'_>, pool: &KvPool) {
    params.q = tensors.q.address;
    params.k = pool.k;
    params.v = pool.v;
    params.out = tensors.out.address;
    params.lse = tensors.lse.map_or(0, |lse| lse.address);
    params.sinks = tensors.sinks.map_or(0, |sinks| sinks.address);
}

/// What a tensor map would have checked.
pub(super) fn check_pool(pool: &KvPool) -> Result<(), Error> {
    check_address("the key pool", pool.k, pool.pages == 0, VECTOR_BYTES)?;
    check_address("the value pool", pool.v, pool.pages == 0, VECTOR_BYTES)
}

/// The launches of a workspace's runs, kept from layer to layer: only addresses change there.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// Merging last.
    pub(super) steps: Vec<Step>,
    /// So many on the caller's stream, then so many on one beside it; what is left comes behind both.
    first: usize,
    aside: usize,
    /// What they were made for; none: there are none.
    tensors: Option<OwnedTensors>,
    /// What hooks of the variant are given.
    own: Vec<u8>,
    /// Whose kernels they are, as [`Gpu`] counts.
    gpu: u64,
}

/// [`RunTensors`] that outlive a call; of sinks and indices their number.
#[derive(Debug)]
struct OwnedTensors {
    q: DeviceTensor<3>,
    pools: Vec<KvPool>,
    out: DeviceTensor<3>,
    merged: Option<DeviceTensor<3>>,
    unpadded: Option<Unpadded>,
    lse: Option<DeviceTensor<2>>,
    sinks: Option<usize>,
    indices: Option<usize>,
}

/// Whether they differ in nothing but the address.
fn alike<const RANK: usize>(a: &DeviceTensor<RANK>, b: &DeviceTensor<RANK>) -> bool {
    (a.dtype, a.shape, a.strides) == (b.dtype, b.shape, b.strides)
}

fn pools_alike(a: &KvPool, b: &KvPool) -> bool {
    (a.dtype, a.pages, a.k_strides, a.v_strides) == (b.dtype, b.pages, b.k_strides, b.v_strides)
        && a.scales.alike(&b.scales)
}

impl Run {
    /// Launches of another GPU's kernels, which may be gone, are none of this one's.
    pub(super) fn is_of(&mut self, gpu: u64) {
        if self.gpu != gpu {
            self.forget();
            self.gpu = gpu;
        }
    }

    /// Another plan, or other tensors: nothing of the launches is known.
    pub(super) fn forget(&mut self) {
        self.tensors = None;
        self.steps.clear();
    }

    /// Takes over tensors that differ from those it was made for in nothing but addresses. False where they differ in
    /// more; then, as after an error, it has to be made.
    pub(super) fn follow(
        &mut self,
        spec: &Spec,
        tensors: &RunTensors<'_>,
        maps: &mut Maps,
    ) -> Result<bool, Error> {
        let fits = |known: &OwnedTensors| {
            let pools = known.pools.iter().zip(tensors.pools);
            alike(&known.q, tensors.q)
                && alike(&known.out, tensors.out)
                && known.sinks == tensors.sinks.map(|sinks| sinks.len)
                && known.indices == tensors.indices.map(|indices| indices.len)
                && self.own.len() == tensors.own.len()
                && known.pools.len() == tensors.pools.len()
                && pools
                    .into_iter()
                    .all(|(known, pool)| pools_alike(known, pool))
                && match (&known.merged, tensors.merged) {
                    (None, None) => true,
                    (Some(known), Some(merged)) => alike(known, merged),
                    _ => false,
                }
                && match (&known.unpadded, &tensors.unpadded) {
                    (None, None) => true,
                    (Some(known), Some(unpadded)) => {
                        alike(&known.q, &unpadded.q)
                            && match (&known.out, &unpadded.out) {
                                (None, None) => true,
                                (Some(known), Some(out)) => alike(known, out),
                                _ => false,
                            }
                    }
                    _ => false,
                }
                && match (&known.lse, tensors.lse) {
                    (None, None) => true,
                    (Some(known), Some(lse)) => alike(known, lse),
                    _ => false,
                }
        };
        let Some(known) = self.tensors.take_if(|known| fits(known)) else {
            return Ok(false);
        };
        tensors.q.check_address("q", VECTOR_BYTES)?;
        tensors.out.check_address("out", VECTOR_BYTES)?;
        if let Some(merged) = tensors.merged {
            merged.check_address("out", VECTOR_BYTES)?;
        }
        if let Some(unpadded) = tensors.unpadded {
            unpadded.q.check_address("q", VECTOR_BYTES)?;
            if let Some(out) = unpadded.out {
                out.check_address("out", VECTOR_BYTES)?;
            }
        }
        if let Some(lse) = tensors.lse {
            lse.check_address("lse", 4)?;
        }
        if let Some(sinks) = tensors.sinks {
            sinks.check_address("sinks", 4)?;
        }
        if let Some(indices) = tensors.indices {
            indices.check_address("the indices", 4)?;
        }
        for step in &mut self.steps {
            step.follow(spec, tensors, maps)?;
        }
        self.own.copy_from_slice(tensors.own);
        self.tensors = Some(known);
        Ok(true)
    }

    /// Whether all of it is on the caller's stream, and something is.
    pub(super) fn is_in_line(&self) -> bool {
        self.aside == 0 && !self.steps.is_empty()
    }

    /// Whether the last launch is one of decodes or their merges, and on the caller's stream: such wait for those in front
    /// of them, so that whoever waits for the last waits for all.
    pub(super) fn ends_decodes(&self) -> bool {
        let last = self.steps.last();
        self.aside == 0 && last.is_some_and(|step| step.is_decode() || step.is_merge())
    }

    /// Puts the steps, which were made for these tensors, in order.
    pub(super) fn arrange(&mut self, gpu: &Gpu, workspace: &Workspace, tensors: &RunTensors<'_>) {
        let (captured, launch_plan) = (workspace.captured(), &workspace.launch_plan);
        let concurrent =
            |step: &Step| step.is_co_resident_decode() || step.is_decode() && !captured;
        // Prefills and decodes run at the same time as the plan says, or in a captured graph those that are made for
        // it.
        let apart = !captured && launch_plan.pod == PodMode::Serial;
        let overlap =
            !apart && self.steps.iter().any(concurrent) && self.steps.iter().any(Step::is_prefill);
        if overlap {
            // The prefills stay on the caller's stream, and are launched first: their CTAs then find every SM empty,
            // and those of the decodes what they leave.
            let turn = |step: &Step| u32::from(concurrent(step)) + 2 * u32::from(step.is_merge());
            self.steps.sort_by_key(turn);
            self.aside = self.steps.iter().filter(|step| concurrent(step)).count();
            let merging = self.steps.last_mut().filter(|step| step.is_merge());
            let merges = usize::from(merging.is_some());
            // States of decodes alone are merged behind the decodes: the prefills may go on for longer.
            if let Some(merge) = merging.filter(|_| !captured && !launch_plan.prefill_merges) {
                merge.launch.overlap = gpu.overlaps();
                self.aside += 1;
                self.first = self.steps.len() - self.aside;
            } else {
                self.first = self.steps.len() - self.aside - merges;
            }
        } else {
            self.first = self.steps.len();
            self.aside = 0;
            self.chain(gpu);
        }
        self.own.clear();
        self.own.extend_from_slice(tensors.own);
        self.tensors = Some(OwnedTensors {
            q: *tensors.q,
            pools: tensors.pools.to_vec(),
            out: *tensors.out,
            merged: tensors.merged.copied(),
            unpadded: tensors.unpadded,
            lse: tensors.lse.copied(),
            sinks: tensors.sinks.map(|sinks| sinks.len),
            indices: tensors.indices.map(|indices| indices.len),
        });
    }

    /// One step after the other. A decode behind a decode takes over SMs as that one leaves them, and a merge
    /// waits for its states on the device. Those that share SMs with prefills do not wait themselves. A prefill waits for
    /// what turns its keys.
    fn chain(&mut self, gpu: &Gpu) {
        let mut behind_decode = false;
        let mut behind_turn = false;
        for step in &mut self.steps {
            let turns = matches!(step.parameters, Parameters::Turn(_));
            match step.parameters {
                Parameters::Prefill(..) => {
                    step.launch.overlap = behind_turn && gpu.overlaps();
                    behind_decode = false;
                }
                Parameters::Decode(..) | Parameters::Latent(..) => {
                    let waits = !step.kernel.info.co_resident;
                    step.launch.overlap = waits && behind_decode && gpu.overlaps();
                    behind_decode = true;
                }
                Parameters::Merge(_) => step.launch.overlap = behind_decode && gpu.overlaps(),
                _ => behind_decode = false,
            }
            behind_turn = turns;
        }
    }
}

impl Gpu {
    /// Launches a run: on the caller's stream, or also on one that forks from it and joins it again.
    ///
    /// # Safety
    /// - The memory of the workspace's run is valid, and stays so until the work on the stream is done.
    /// - The stream is one of this context, which is current.
    pub(super) unsafe fn launch_run(
        &self,
        workspace: &Workspace,
        stream: Stream,
    ) -> Result<(), Error> {
        let run = &workspace.run;
        let (first, rest) = run.steps.split_at(run.first);
        let (aside, behind) = rest.split_at(run.aside);
        let own = run.own.as_ptr().cast();
        let launch = |steps: &[Step], stream| {
            let mut steps = steps.iter();
            // SAFETY: the caller's promises; parameters are those of the step's kernel, and its variant has as many bytes
            // of its own.
            steps.try_for_each(|step| unsafe {
                step.launch
                    .make(&step.kernel, [step.parameters(), own], stream)
            })
        };
        if aside.is_empty() {
            return launch(run.steps.as_slice(), stream);
        }
        let (lane, done) = (workspace.lane.raw(), &workspace.done);
        // SAFETY: the caller's promises.
        unsafe {
            workspace.fork.record(stream)?;
            workspace.fork.hold(lane)?;
        }
        let launched = launch(first, stream).and_then(|()| launch(aside, lane));
        // Also after an error: what the caller puts on the stream next waits for what the lane has.
        // SAFETY: as above.
        let joined = unsafe { done.record(lane).and_then(|()| done.hold(stream)) };
        launched.and(joined)?;
        launch(behind, stream)
    }

    /// Whether the kernels say when others may start, and wait for those before them.
    pub(super) fn overlaps(&self) -> bool {
        self.arch() == "sm_90a"
    }

    /// A single launch, in the current context, which is this GPU's.
    ///
    /// # Safety
    /// As [`launch`](Self::launch).
    pub(super) unsafe fn launch_step(&self, step: &Step, stream: Stream) -> Result<(), Error> {
        // SAFETY: the caller's promises; parameters are those of the step's kernel.
        unsafe {
            step.launch
                .make(&step.kernel, [step.parameters(), ptr::null()], stream)
        }
    }
}
