use cuda_builder::{CudaBuilder, NvvmArch};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // For Hopper, and for all other GPUs from Ampere on.
    let build = |arch| CudaBuilder::new("kernels").arch(arch).build();
    let modules = [build(NvvmArch::Compute90a)?, build(NvvmArch::Compute80)?];
    Ok(cuda_builder::embed(&modules)?)
}
