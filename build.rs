//! With the feature `cuda`: device code for every architecture, and a table of it to embed.

#[cfg(not(feature = "cuda"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}

#[cfg(feature = "cuda")]
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

#[cfg(feature = "cuda")]
#[path = "build/modules.rs"]
mod modules;

#[cfg(feature = "cuda")]
mod device_code {
    use std::{env, error::Error, fmt::Write as _, fs, path::PathBuf};

    use cuda_builder::{CudaModule, build_all};

    use crate::modules;

    pub fn embed() -> Result<(), Box<dyn Error>> {
        let workspace = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?);
        let modules = build_all(modules::modules(&workspace))?;
        if modules.iter().any(|module| module.cubin.is_none()) {
            println!(
                "cargo::warning=no ptxas was found, so only PTX is embedded and the driver compiles it \
                 when a program starts; `cargo xtask setup` installs ptxas"
            );
        }
        write_table(&modules)
    }

    /// Beside the code, `modules.rs`: an expression of type `&[EmbeddedModule]`.
    fn write_table(modules: &[CudaModule]) -> Result<(), Box<dyn Error>> {
        let out_dir = PathBuf::from(env::var("OUT_DIR")?);
        let mut table = String::from("&[\n");
        for module in modules {
            let arch = module.arch.sm();
            let ptx = out_dir.join(format!("{arch}.ptx"));
            fs::write(&ptx, &module.ptx)?;
            let cubin = match &module.cubin {
                Some(cubin) => {
                    let path = out_dir.join(format!("{arch}.cubin"));
                    fs::write(&path, &cubin.bytes)?;
                    format!("Some(include_bytes!({path:?}))")
                }
                None => "None".into(),
            };
            writeln!(
                table,
                "    EmbeddedModule {{ arch: {arch:?}, ptx: include_str!({ptx:?}), cubin: {cubin} }},"
            )?;
        }
        table.push(']');
        fs::write(out_dir.join("modules.rs"), table)?;
        Ok(())
    }
}
