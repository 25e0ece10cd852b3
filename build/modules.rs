// Included by build.rs and by xtask, so that both build the kernels in the same way and the second
// finds everything done.

use std::path::Path;

use cuda_builder::{CudaBuilder, NvvmArch};

/// Set, it makes profilers show the source beside the machine code, and programs three times as large.
pub const LINE_INFO: &str = "TANDEM_LINE_INFO";

use NvvmArch::{Compute80, Compute90a};

/// A family of kernels, which is a feature of the crate `kernels-gpu`, and what it is built for.
pub type Family = (&'static str, &'static [NvvmArch]);

/// The families. Each is a module, so that they are compiled side by side and an edit of one leaves the others as
/// they are. Those that take longest come first.
pub const FAMILIES: [Family; 13] = [
    ("decode_wgmma", &[Compute90a]),
    ("prefill", &[Compute90a]),
    ("decode_mma", &[Compute90a]),
    ("variants", &[Compute90a, Compute80]),
    ("mla", &[Compute90a]),
    ("sm80_decode", &[Compute80, Compute90a]),
    ("pod", &[Compute90a, Compute80]),
    ("sm80_prefill", &[Compute80, Compute90a]),
    ("passes", &[Compute90a, Compute80]),
    ("step", &[Compute90a, Compute80]),
    ("prefill_f8", &[Compute90a]),
    ("quantise", &[Compute90a, Compute80]),
    ("measure", &[Compute80, Compute90a]),
];

/// Families of which the two modules have the same instructions: compiled once, for the A100.
const ALIKE: [&str; 3] = ["sm80_decode", "pod", "sm80_prefill"];

/// The optimisation level of ptxas for a family. At level 3 it moves the additions of 8-bit products behind the next
/// products, and keeps outputs in local memory for want of registers (docs/notes/fp8.md).
pub fn ptxas_level(family: &str) -> u8 {
    match family {
        "prefill_f8" => 1,
        _ => 3,
    }
}

/// The modules that a family is built as, one for each architecture.
pub fn of_family(
    workspace: &Path,
    (family, archs): Family,
) -> impl Iterator<Item = CudaBuilder> + use<> {
    let line_info = std::env::var_os(LINE_INFO).is_some();
    let kernels = workspace.join("kernels-gpu");
    archs.iter().map(move |&arch| {
        // `st.async` is of CUDA 12.1.
        let minor = u32::from(family == "step" && arch == Compute90a);
        let builder = match ALIKE.contains(&family) && arch != Compute80 {
            true => CudaBuilder::new(&kernels).compile_for(Compute80),
            false => CudaBuilder::new(&kernels),
        };
        builder
            .module(family)
            .features([family])
            .arch(arch)
            .ptx_version(8, minor)
            .ptxas_level(ptxas_level(family))
            .generate_line_info(line_info)
    })
}

/// The modules that the kernels are built as.
pub fn modules(workspace: &Path) -> Vec<CudaBuilder> {
    let of_family = |&family: &Family| of_family(workspace, family);
    FAMILIES.iter().flat_map(of_family).collect()
}
