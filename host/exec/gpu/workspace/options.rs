//! How a workspace's plans run.

use crate::exec::gpu::{Arch, LaunchSet};

/// How a workspace's plans run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkspaceOptions {
    /// Runs all attention with the instructions of an architecture, whatever the plan says; none: as it says, and where
    /// tensor maps cannot describe a pool by the kernels of Ampere that do the same.
    pub arch: Option<Arch>,
    /// For CUDA graphs that serve one plan after the other: every [`Gpu::run`](crate::gpu::Gpu::run) makes these
    /// launches, whatever the plan, and what each of them has to do is read from the workspace. None: a run makes the
    /// launches that its plan needs, and a graph of it is good for that plan.
    pub launches: Option<LaunchSet>,
    /// Debug mode: every run first waits for the stream, reads the plan back from the device and checks page
    /// ids, lengths and indices, so that damage is reported by request and page instead of as an illegal
    /// access. Such runs cannot be captured.
    pub checks: bool,
}

impl WorkspaceOptions {
    /// With all attention by the instructions of an architecture, or by the kernels that plans name.
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
