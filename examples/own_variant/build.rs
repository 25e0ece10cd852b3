use cuda_builder::{CudaBuilder, NvvmArch};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // For Hopper, and for all other GPUs from Ampere on.
    let archs = [NvvmArch::Compute90a, NvvmArch::Compute80];
    let modules = archs.map(|arch| CudaBuilder::new("kernels").arch(arch));
    Ok(cuda_builder::embed(&cuda_builder::build_all(modules)?)?)
}
