//! Programmatic dependent launch (sm_90): a kernel may start before the previous one ends.
//!
//! Without the launch attribute both are no-ops.

unsafe extern "C" {
    #[link_name = "llvm.nvvm.griddepcontrol.wait"]
    safe fn griddepcontrol_wait();
    #[link_name = "llvm.nvvm.griddepcontrol.launch.dependents"]
    safe fn griddepcontrol_launch();
}

/// Waits until the grids that this one depends on are complete and their writes are visible.
///
/// # PTX
/// `griddepcontrol.wait` (sm_90)
#[inline(always)]
pub fn wait() {
    griddepcontrol_wait();
}

/// Allows dependent grids to start once all blocks have called this or ended. They see the writes of
/// this grid only after their [`wait`].
///
/// # PTX
/// `griddepcontrol.launch_dependents` (sm_90)
#[inline(always)]
pub fn launch_dependents() {
    griddepcontrol_launch();
}
