// Included by build.rs and by xtask, so that both build the kernels in the same way and the second
// finds everything done.

use std::path::Path;

use cuda_builder::{CudaBuilder, NvvmArch};

/// The modules that the kernels are built as, the oldest architecture first.
pub fn modules(workspace: &Path) -> [CudaBuilder; 2] {
    [NvvmArch::Compute80, NvvmArch::Compute90a].map(|arch| {
        CudaBuilder::new(workspace.join("kernels-gpu"))
            .arch(arch)
            .generate_line_info(true)
    })
}
