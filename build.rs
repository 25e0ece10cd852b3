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
    use std::{env, error::Error, fmt::Write as _, fs, path::PathBuf};

    use cuda_builder::{CudaModule, build_all};

    use crate::modules;

    pub fn embed() -> Result<(), Box<dyn Error>> {
        // docs.rs has neither the compiler nor a network to fetch one.
        if env::var_os("DOCS_RS").is_some() {
            return write_table(&[]);
        }
        let workspace = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
        if !workspace.join("kernels-gpu/Cargo.toml").is_file() {
            return Err("the feature `build-kernels` compiles kernels-gpu/, which is in the repository and not in the \
                        published package: depend on the repository by path or git, or leave the feature out and take \
                        the kernels of tandem-kernels-bin"
                .into());
        }
        let modules = build_all(modules::modules(&workspace))?;
        if modules.iter().any(|module| module.cubin.is_none()) {
            println!(
                "cargo::warning=no ptxas was found, so only PTX is embedded and `Gpu::new` refuses it; \
                 `cargo xtask setup` installs ptxas"
            );
        }
        write_table(&modules)
    }

    /// Beside the code, `modules.rs`: an expression of type `&[Module]`.
    fn write_table(modules: &[CudaModule]) -> Result<(), Box<dyn Error>> {
        let out_dir = PathBuf::from(env::var("OUT_DIR")?);
        let mut table = String::from("&[\n");
        for module in modules {
            let (arch, family) = (module.arch.sm(), &module.name);
            let name = format!("{arch}.{family}");
            let ptx = out_dir.join(format!("{name}.ptx"));
            fs::write(&ptx, &module.ptx)?;
            let cubin = match &module.cubin {
                Some(cubin) => {
                    let path = out_dir.join(format!("{name}.cubin"));
                    fs::write(&path, &cubin.bytes)?;
                    format!("Some(Image::raw(include_bytes!({path:?})))")
                }
                None => "None".into(),
            };
            writeln!(
                table,
                "    Module {{ arch: {arch:?}, family: {family:?}, ptx: Image::raw(include_bytes!({ptx:?})), cubin: {cubin} }},"
            )?;
        }
        table.push(']');
        fs::write(out_dir.join("modules.rs"), table)?;
        Ok(())
    }
}
