//! Options of a workspace.

use crate::exec::gpu::{Arch, LaunchSet};

/// Options of a workspace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkspaceOptions {
    /// If given, all attention runs with kernels of this architecture, whatever the plan says. None: with the kernels of the plan.
    #[cfg_attr(not(feature = "unstable"), doc(hidden))]
    pub arch: Option<Arch>,
    /// For CUDA graphs that run several plans, one after the other. Every [`Gpu::run`](crate::gpu::Gpu::run) then makes these
    /// launches, and each launch reads from the workspace which work it has. None: a run makes the
    /// launches that its plan needs, and a graph of it is valid for that plan only.
    pub launches: Option<LaunchSet>,
    /// Debug mode: every run first waits for the stream, reads the plan back from the device and checks page
    /// ids, lengths and indices. Damage is then reported with its request and page, instead of as an illegal
    /// access. Such runs cannot be captured.
    pub checks: bool,
}

impl WorkspaceOptions {
    /// With all attention by kernels of one architecture, or by the kernels that plans name.
    #[cfg_attr(not(feature = "unstable"), doc(hidden))]
    #[must_use]
    pub fn with_arch(mut self, arch: impl Into<Option<Arch>>) -> Self {
        self.arch = arch.into();
        self
    }

    /// With these launches in every run.
    #[must_use]
    pub fn with_launches(mut self, launches: impl Into<Option<LaunchSet>>) -> Self {
        self.launches = launches.into();
        self
    }

    /// With the debug mode on or off.
    #[must_use]
    pub const fn with_checks(mut self, checks: bool) -> Self {
        self.checks = checks;
        self
    }
}
