use cuda_builder::{CudaBuilder, NvvmArch};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let module = CudaBuilder::new("kernels")
        .arch(NvvmArch::Compute90a)
        .build()?;
    Ok(cuda_builder::embed(&[module])?)
}
