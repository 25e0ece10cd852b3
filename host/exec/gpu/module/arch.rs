//! Architectures in numbers, and the modules that suit a GPU best.

use crate::{Error, exec::gpu::embedded::Module};

/// An architecture in numbers: `sm_90a` is 9.0 and *specific*, so that its code runs only on 9.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Arch {
    compute: (u32, u32),
    specific: bool,
}

impl Arch {
    pub(super) fn parse(name: &str) -> Option<Self> {
        let digits = name.strip_prefix("sm_")?;
        let specific = digits.ends_with('a');
        let number: u32 = digits.trim_end_matches('a').parse().ok()?;
        Some(Self {
            compute: (number / 10, number % 10),
            specific,
        })
    }

    /// Whether PTX for this architecture runs on a GPU: on its own and all later ones, unless it is specific.
    pub(super) fn ptx_runs_on(self, gpu: (u32, u32)) -> bool {
        self.compute == gpu || !self.specific && self.compute < gpu
    }

    /// Whether machine code for this architecture runs on a GPU: only within its generation.
    pub(super) fn cubin_runs_on(self, gpu: (u32, u32)) -> bool {
        self.ptx_runs_on(gpu) && self.compute.0 == gpu.0
    }
}

/// The modules that suit a GPU best: all those of the highest architecture that runs there.
pub(super) fn choose<'a>(
    modules: &'a [Module],
    device: &str,
    compute: (u32, u32),
) -> Result<(&'static str, Vec<&'a Module>), Error> {
    let arch_of = |module: &Module| Arch::parse(module.arch);
    let best = modules
        .iter()
        .filter(|module| arch_of(module).is_some_and(|arch| arch.ptx_runs_on(compute)))
        .max_by_key(|module| arch_of(module));
    let Some(best) = best else {
        let mut built_for: Vec<_> = modules.iter().map(|module| module.arch).collect();
        built_for.sort_unstable();
        built_for.dedup();
        return Err(Error::UnsupportedArchitecture {
            device: device.into(),
            compute,
            built_for,
        });
    };
    let chosen = modules.iter().filter(|module| module.arch == best.arch);
    Ok((best.arch, chosen.collect()))
}
