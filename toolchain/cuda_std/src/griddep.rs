//! Programmatic dependent launch (sm_90): a kernel starts before the one in front of it ends.
//!
//! Without the launch attribute both are no-ops.

unsafe extern "C" {
    #[link_name = "llvm.nvvm.griddepcontrol.wait"]
    safe fn griddepcontrol_wait();
    #[link_name = "llvm.nvvm.griddepcontrol.launch.dependents"]
    safe fn griddepcontrol_launch();
}

/// Waits until the grids this one depends on are complete and what they wrote is visible.
///
/// # PTX
/// `griddepcontrol.wait` (sm_90)
#[inline(always)]
pub fn wait() {
    griddepcontrol_wait();
}

/// Tells that dependent grids may start once all blocks said so (or ended). What this grid writes
/// is still only visible to them behind their [`wait`].
///
/// # PTX
/// `griddepcontrol.launch_dependents` (sm_90)
#[inline(always)]
pub fn launch_dependents() {
    griddepcontrol_launch();
}
