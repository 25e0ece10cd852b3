//! The launches of a run, their order and their streams. [`tensors`] and [`extras`] are the arguments of a run,
//! [`step`] is one launch.

mod extras;
mod step;
mod tensors;

use kernels_gpu::{
    abi::{DecodeParams, LatentParams},
    registry::Op,
};

pub use self::{extras::Extras, tensors::RunTensors};
pub(super) use self::{
    extras::{check_own, check_sinks},
    step::{DecodeShapes, LatentShapes, Parameters, PrefillShapes, Source, Step},
    tensors::Unpadded,
};
use super::{
    DeviceTensor, Gpu, KvPool, launch::Launch, launch_plan::LaunchPlan, maps::Maps, module::Kernel,
    tensor::VECTOR_BYTES,
};
use crate::{Error, plan::pod::PodMode, problem::Spec};

/// The launches of a workspace's runs, kept from layer to layer: only addresses change there.
#[derive(Debug, Default)]
pub(super) struct Run {
    /// In launch order; merging comes last.
    pub(super) steps: Vec<Step>,
    /// The first `before` steps run on the caller's stream. Of those after them, `first` steps run there, too, and the next
    /// `aside` steps on a second stream. The rest is launched after both.
    pub(super) before: usize,
    pub(super) first: usize,
    pub(super) aside: usize,
    /// The tensors that the steps were made for. None if there are no steps.
    tensors: Option<OwnedTensors>,
    /// The data of the variant's hooks.
    pub(super) own: Vec<u8>,
    /// The number of the [`Gpu`] whose kernels the steps launch.
    gpu: u64,
}

/// [`RunTensors`] that outlive a call. Of sinks and indices, only the number is kept.
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

fn pools_alike(a: &KvPool, b: &KvPool) -> bool {
    (a.dtype, a.pages, a.k_strides, a.v_strides) == (b.dtype, b.pages, b.k_strides, b.v_strides)
        && a.heads == b.heads
        && a.rope.map(|rope| rope.strides) == b.rope.map(|rope| rope.strides)
        && a.scales.alike(&b.scales)
}

impl Run {
    /// Forgets launches of another GPU's kernels, which may be gone.
    pub(super) fn is_of(&mut self, gpu: u64) {
        if self.gpu != gpu {
            self.forget();
            self.gpu = gpu;
        }
    }

    /// Forgets the launches, for another plan or other tensors.
    pub(super) fn forget(&mut self) {
        self.tensors = None;
        self.steps.clear();
    }

    /// Updates the launches for tensors that differ only in addresses. Returns false if they differ in more. Then, and
    /// after an error, the launches must be made again.
    pub(super) fn follow(
        &mut self,
        spec: &Spec,
        tensors: &RunTensors<'_>,
        maps: &mut Maps,
    ) -> Result<bool, Error> {
        let fits = |known: &OwnedTensors| {
            let mut pools = known.pools.iter().zip(tensors.pools);
            let unpadded = |of: &Unpadded| {
                let out = of.out.as_ref().map(DeviceTensor::layout);
                (of.q.layout(), of.given.layout(), out)
            };
            known.q.layout() == tensors.q.layout()
                && known.out.layout() == tensors.out.layout()
                && known.sinks == tensors.sinks.map(|sinks| sinks.len)
                && known.indices == tensors.indices.map(|indices| indices.len)
                && self.own.len() == tensors.own.len()
                && known.pools.len() == tensors.pools.len()
                && pools.all(|(known, pool)| pools_alike(known, pool))
                && known.merged.as_ref().map(DeviceTensor::layout)
                    == tensors.merged.map(DeviceTensor::layout)
                && known.unpadded.as_ref().map(unpadded) == tensors.unpadded.as_ref().map(unpadded)
                && known.lse.as_ref().map(DeviceTensor::layout)
                    == tensors.lse.map(DeviceTensor::layout)
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

    /// Whether a decode reads two KV heads at a time.
    pub(super) fn reads_pairs(&self) -> bool {
        let infos = self.steps.iter().map(|step| step.kernel.info);
        infos
            .filter(|info| info.op == Op::Decode)
            .any(|info| info.kv_heads > 1)
    }

    /// Whether a launch reads queries whose heads are padded, if any are.
    pub(super) fn reads_padded(&self) -> bool {
        self.steps.iter().any(Step::reads_padded)
    }

    /// Whether a launch writes outputs whose heads are padded, if any are.
    pub(super) fn writes_padded(&self) -> bool {
        self.steps.iter().any(Step::writes_padded)
    }

    /// Whether there are launches, and all of them are on the caller's stream.
    pub(super) fn is_in_line(&self) -> bool {
        self.aside == 0 && !self.steps.is_empty()
    }

    /// Whether the last launch is a decode or a merge, and all launches are on the caller's stream. Decodes and merges
    /// wait for the launches before them, so waiting for the last one means waiting for all.
    pub(super) fn ends_decodes(&self) -> bool {
        let last = self.steps.last();
        self.aside == 0 && last.is_some_and(|step| step.is_decode() || step.is_merge())
    }

    /// Orders the steps, which were made for these tensors, and divides them between the streams.
    pub(super) fn arrange(
        &mut self,
        gpu: &Gpu,
        launch_plan: &LaunchPlan,
        captured: bool,
        tensors: &RunTensors<'_>,
    ) {
        let concurrent =
            |step: &Step| step.is_co_resident_decode() || step.is_decode() && !captured;
        // Prefills and decodes overlap if the plan says so; in a captured graph, if the decode kernels are made for it.
        let apart = !captured && launch_plan.pod == PodMode::Serial;
        let overlap =
            !apart && self.steps.iter().any(concurrent) && self.steps.iter().any(Step::is_prefill);
        if overlap {
            // The prefills stay on the caller's stream and are launched first: their CTAs find every SM empty, and the
            // CTAs of the decodes take the remaining room. Where they share SMs, a launch that widens keys comes before both: beside
            // decodes, which fill all SMs, it would end with them.
            let shares = |step: &Step| step.is_prefill() && step.kernel.info.co_resident;
            let first = self.steps.iter().any(shares);
            let before = |step: &Step| first && step.widens_keys();
            let turn = |step: &Step| match before(step) {
                true => 0,
                false => 1 + u32::from(concurrent(step)) + 2 * u32::from(step.is_merge()),
            };
            self.steps.sort_by_key(turn);
            self.before = self.steps.iter().filter(|step| before(step)).count();
            self.aside = self.steps.iter().filter(|step| concurrent(step)).count();
            let merging = self.steps.last_mut().filter(|step| step.is_merge());
            let merges = usize::from(merging.is_some());
            // If only decodes leave states, the merge follows the decodes on their stream: the prefills may take
            // longer.
            if let Some(merge) =
                merging.filter(|_| !captured && !launch_plan.merging.prefill_merges)
            {
                merge.launch.overlap = gpu.overlaps();
                self.aside += 1;
                self.first = self.steps.len() - self.before - self.aside;
            } else {
                self.first = self.steps.len() - self.before - self.aside - merges;
            }
        } else {
            self.before = 0;
            self.first = self.steps.len();
            self.aside = 0;
            self.chain(gpu, tensors.indices.is_some());
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

    /// Chains steps on one stream by dependent launches. A decode after a decode takes over SMs as that one leaves
    /// them, and waits for it at its end; those that share SMs with prefills do not. Any other decode begins early, whatever
    /// is before it on the stream, and waits for that before it reads queries and keys. A merge waits for its states on the
    /// device. A prefill may follow the launch that widens or rotates its keys.
    fn chain(&mut self, gpu: &Gpu, chosen_keys: bool) {
        let mut behind_decode = false;
        let mut behind_pages = false;
        for step in &mut self.steps {
            let waits_at_end = !step.kernel.info.co_resident;
            let makes_pages = matches!(step.parameters, Parameters::Widen(_) | Parameters::Turn(_));
            let early = match &mut step.parameters {
                Parameters::Decode(DecodeParams { early, .. }, _)
                | Parameters::Latent(LatentParams { early, .. }, _) => Some(early),
                _ => None,
            };
            if let Some(early) = early {
                let joins = behind_decode && waits_at_end;
                // Kernels read the list of chosen keys as memory that nobody writes, but the launch before may write it.
                let follows = gpu.overlaps() && !joins && !chosen_keys;
                *early = follows.into();
                step.launch.overlap = follows || joins && gpu.overlaps();
            } else if let Parameters::Prefill(_, shapes) = &step.parameters {
                step.launch.overlap = behind_pages && shapes.pages.is_some() && gpu.overlaps();
            } else if let Parameters::Merge(_) = step.parameters {
                step.launch.overlap = behind_decode && gpu.overlaps();
            }
            let decodes = step.is_decode() && !matches!(step.parameters, Parameters::DecodeRows(_));
            behind_decode = decodes || behind_decode && step.is_merge();
            behind_pages = makes_pages;
        }
    }
}

impl Gpu {
    /// A launch of `ctas` CTAs, but at most as many as are resident at the same time: a further CTA would begin its
    /// first unit only when the others have done the rest. It is for part 0, until the caller says otherwise.
    pub(super) fn step(&self, kernel: &Kernel, ctas: u32, parameters: Parameters) -> Step {
        let most = self.multiprocessors * kernel.ctas_per_sm;
        let mut launch = Launch::new(ctas.min(most), kernel.info.threads);
        launch.shared = kernel.info.shared_bytes;
        Step {
            kernel: *kernel,
            launch,
            part: 0,
            heads: 1,
            parameters,
        }
    }

    /// Whether the kernels support dependent launches: they signal when others may start, and wait for those before
    /// them.
    pub(super) fn overlaps(&self) -> bool {
        self.arch() == "sm_90a"
    }
}
