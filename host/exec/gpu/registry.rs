//! The kernels of a GPU: the rows of the [registry](kernels_gpu::registry) that it runs, loaded.

use kernels_gpu::{
    Hooks, HooksName,
    common::cache,
    registry::{Arch, Element, Family, KernelId, KernelInfo, Op},
    variants::BUILT_IN,
};

use super::{
    Gpu, GpuBuilder,
    module::{Kernel, Modules},
};
pub(super) use crate::plan::launched::{element, has_own_heads};
use crate::{
    Error,
    plan::dims,
    problem::{Dtype, Spec},
};

/// Every kernel that the GPU's architecture and memory allow.
pub(super) struct Kernels {
    /// By [`KernelId::index`].
    loaded: Vec<Option<Kernel>>,
    /// Kernels that are not attention.
    others: Vec<Kernel>,
    /// The variants, with their kernels and the rows of the registry that these replace.
    hooks: Vec<Hooks>,
    hooked: Vec<(HooksName, Kernel)>,
}

impl Kernels {
    /// The kernels of the modules' architecture, except those that need more shared memory than a CTA can have.
    /// # Errors
    /// [`Error::NoKernel`] where one is missing.
    pub(super) fn load(modules: &Modules, max_shared: u32) -> Result<Self, Error> {
        let load = |id: KernelId| match runs_on(modules, id.info()) {
            true => Ok(within(modules.kernel(id.info(), max_shared)?)),
            false => Ok::<_, Error>(None),
        };
        let loaded = KernelId::all().map(load).collect::<Result<Vec<_>, _>>()?;
        let others = loaded.iter().flatten().copied();
        let mut kernels = Self {
            others: others
                .filter(|kernel| !kernel.info.is_attention())
                .collect(),
            loaded,
            hooks: Vec::new(),
            hooked: Vec::new(),
        };
        for hooks in BUILT_IN {
            kernels.add(hooks, modules, Some(Family::Variants), max_shared)?;
        }
        Ok(kernels)
    }

    /// Adds the kernels of a variant: those of one family, or all.
    ///
    /// # Errors
    /// [`Error::NoKernel`] where one is missing.
    pub(super) fn add(
        &mut self,
        hooks: &Hooks,
        modules: &Modules,
        family: Option<Family>,
        max_shared: u32,
    ) -> Result<(), Error> {
        let rows = hooks.kernels().map(KernelId::info);
        for row in rows.filter(|row| runs_on(modules, row)) {
            let kernel = Kernel {
                variant: Some(hooks.name),
                ..modules.entry(row, family, &hooks.entry(row), max_shared)?
            };
            let kernel = within(kernel).map(|kernel| (hooks.name, kernel));
            self.hooked.extend(kernel);
        }
        self.hooks.push(*hooks);
        Ok(())
    }

    /// The variants that are not the library's.
    pub(super) fn own_variants(&self) -> Vec<Hooks> {
        let own = |hooks: &&Hooks| BUILT_IN.iter().all(|known| known.name != hooks.name);
        self.hooks.iter().filter(own).copied().collect()
    }

    pub(super) fn get(&self, id: KernelId) -> Option<&Kernel> {
        self.loaded.get(id.index())?.as_ref()
    }
}

impl GpuBuilder<'_> {
    /// Checks that no two variants have one name: kernels are found by it.
    pub(super) fn check_names(&self) -> Result<(), Error> {
        let mut known: Vec<HooksName> = BUILT_IN.iter().map(|hooks| hooks.name).collect();
        for (Hooks { name, .. }, _) in &self.variants {
            if known.contains(name) {
                return Err(Error::VariantTwice { name: *name });
            }
            known.push(*name);
        }
        Ok(())
    }
}

/// Whether the modules' architecture has the instructions of a kernel.
fn runs_on(modules: &Modules, row: &KernelInfo) -> bool {
    row.arch != Arch::Sm90a || modules.arch() == "sm_90a"
}

/// The kernel, unless it needs more shared memory than a CTA can have.
fn within(kernel: Kernel) -> Option<Kernel> {
    (kernel.info.shared_bytes <= kernel.max_dynamic_shared).then_some(kernel)
}

impl Gpu {
    /// Whether the kernel is loaded: of the GPU's architecture, and within its shared memory.
    #[cfg_attr(not(feature = "unstable"), doc(hidden))]
    #[must_use]
    pub fn has(&self, kernel: KernelId) -> bool {
        self.kernels.get(kernel).is_some()
    }

    pub(super) fn kernel(&self, id: KernelId) -> Result<&Kernel, Error> {
        self.kernels.get(id).ok_or_else(|| Error::NotOnDevice {
            what: format!("called {id}"),
            device: self.name.clone(),
            arch: self.arch(),
        })
    }

    /// The variant of this name.
    pub(super) fn hooks(&self, name: HooksName) -> Result<&Hooks, Error> {
        let known = &self.kernels.hooks;
        let found = known.iter().find(|hooks| hooks.name == name);
        found.ok_or_else(|| Error::NoVariant {
            asked: name,
            there: known.iter().map(|hooks| hooks.name).collect(),
        })
    }

    /// The kernel of a variant that replaces a kernel with a soft cap.
    pub(super) fn hooked(&self, name: HooksName, row: &KernelInfo) -> Result<Kernel, Error> {
        let tile = |row: &KernelInfo| {
            let dims = [row.head_dim, row.value_dim];
            (row.op, row.arch, row.element, dims, [row.rows, row.keys])
        };
        let stands =
            |&&(of, kernel): &&(HooksName, Kernel)| of == name && tile(kernel.info) == tile(row);
        let found = self.kernels.hooked.iter().find(stands);
        let kernel = found.map(|&(_, kernel)| kernel);
        kernel.ok_or_else(|| Error::NoInstance {
            kernel: "variant",
            asked: format!("what {} computes, with the logits of {name}", row.name),
            there: "the kernel families given to `variant_kernels!`",
        })
    }

    /// A kernel that is not attention.
    pub(super) fn pass(&self, op: Op, element: Element) -> Result<&Kernel, Error> {
        let is = |kernel: &&Kernel| (kernel.info.op, kernel.info.element) == (op, element);
        let found = self.kernels.others.iter().find(is);
        found.ok_or_else(|| Error::NotOnDevice {
            what: format!("for {op:?} in {element:?}"),
            device: self.name.clone(),
            arch: self.arch(),
        })
    }
}

/// The kernel's number for the element type of a pool.
pub(super) fn format(dtype: Dtype) -> Result<u32, Error> {
    match dtype {
        Dtype::F8E4M3 => Ok(cache::E4M3),
        Dtype::F8E5M2 => Ok(cache::E5M2),
        got => Err(Error::Dtype {
            tensor: "the KV pool",
            got,
            expected: "F8E4M3 or F8E5M2",
        }),
    }
}

/// Checks that an attention kernel was compiled for these heads and elements.
pub(super) fn check_serves(
    id: KernelId,
    op: Op,
    spec: &Spec,
    [dtype, of_pool]: [Dtype; 2],
) -> Result<(), Error> {
    let row = id.info();
    let capped = spec.variant.soft_cap.is_some() || spec.variant.hooks.is_some();
    let heads = (row.head_dim, row.value_dim) == (spec.head_dim_qk, spec.head_dim_v);
    let heads = heads && row.latent == spec.latent;
    let elements = row.element == element(dtype) && row.takes_cache(element(of_pool));
    let turns = spec.rotary.is_some();
    if row.op == op && heads && elements && row.cap == capped && row.turns == turns {
        return Ok(());
    }
    Err(Error::NoInstance {
        kernel: match op {
            Op::Prefill => "prefill",
            _ => "decode",
        },
        asked: format!(
            "head dimension {}, {dtype:?} with keys and values in {of_pool:?}{}{} in {id}",
            dims(spec.head_dim_qk, spec.head_dim_v),
            match spec.variant.hooks {
                Some(hooks) => format!(", variant {hooks}"),
                None if capped => ", soft cap".into(),
                None => String::new(),
            },
            match spec.rotary {
                Some(_) => ", a rotary embedding",
                None => "",
            },
        ),
        there: "the kernels in plans for this specification",
    })
}
