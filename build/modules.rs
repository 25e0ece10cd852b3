// Included by build.rs and by xtask, so that both build the kernels in the same way and the second
// finds everything done.

use std::path::Path;

use cuda_builder::{CudaBuilder, CudaModule, NvvmArch};

/// Set, it makes profilers show the source beside the machine code, and programs three times as large.
pub const LINE_INFO: &str = "TANDEM_LINE_INFO";

/// The modules that the kernels are built as, the oldest architecture first.
pub fn modules(workspace: &Path) -> [CudaBuilder; 2] {
    let line_info = std::env::var_os(LINE_INFO).is_some();
    [NvvmArch::Compute80, NvvmArch::Compute90a].map(|arch| {
        CudaBuilder::new(workspace.join("kernels-gpu"))
            .arch(arch)
            .generate_line_info(line_info)
    })
}

/// The family of kernels that a module holds.
pub fn family(_: &CudaModule) -> &'static str {
    "all"
}
