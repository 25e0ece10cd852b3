//! With the feature `build-kernels`: compiles the kernels and writes a table of them to embed. Without it there is
//! nothing to build; the kernels come from `tandem-kernels-bin`.

#[cfg(not(feature = "build-kernels"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}

#[cfg(feature = "build-kernels")]
fn main() -> std::process::ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build/modules.rs");
    println!("cargo::rerun-if-env-changed={}", modules::LINE_INFO);
    match device_code::embed() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}

#[cfg(feature = "build-kernels")]
#[path = "build/modules.rs"]
mod modules;

#[cfg(feature = "build-kernels")]
mod device_code {
    use std::{env, error::Error, path::PathBuf};

    use cuda_builder::build_all;

    use crate::modules;

    pub fn embed() -> Result<(), Box<dyn Error>> {
        // docs.rs has neither the compiler nor a network to fetch one.
        if env::var_os("DOCS_RS").is_some() {
            return Ok(cuda_builder::embed(&[])?);
        }
        let workspace = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
        if !workspace.join("kernels-gpu/Cargo.toml").is_file() {
            return Err("the feature `build-kernels` compiles kernels-gpu/, which is in the repository and not in the \
                        published package: depend on the repository by path or git, or leave the feature out and take \
                        the kernels of tandem-kernels-bin"
                .into());
        }
        Ok(cuda_builder::embed(&build_all(modules::modules(
            &workspace,
        ))?)?)
    }
}
