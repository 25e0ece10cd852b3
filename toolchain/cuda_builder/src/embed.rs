//! Embeds modules into a program.

use std::{env, fmt::Write as _, fs, io, path::PathBuf};

use crate::CudaModule;

/// Writes `modules.rs` into the output directory of a build script: an expression of type `&[Module]`, for
///
/// ```ignore
/// use tandem_attn::gpu::{Image, Module};
///
/// static MODULES: &[Module] = include!(concat!(env!("OUT_DIR"), "/modules.rs"));
/// ```
///
/// Without ptxas, it contains only PTX, and a warning is printed.
///
/// # Errors
/// If it is not called from a build script, if two modules for one architecture have the same name, or if a file cannot
/// be written.
pub fn embed(modules: &[CudaModule]) -> io::Result<()> {
    let out_dir = env::var_os("OUT_DIR").map(PathBuf::from);
    let out_dir = out_dir
        .ok_or_else(|| io::Error::other("OUT_DIR is not set: call this from a build script"))?;
    check_names(modules)?;
    if modules.iter().any(|module| module.cubin.is_none()) {
        println!(
            "cargo::warning=no ptxas of CUDA 12 or newer was found, so only PTX is embedded and `Gpu::new` refuses it; \
             `cargo xtask setup` of tandem-attn installs ptxas, and TANDEM_PTXAS names one"
        );
    }
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
        let _ = writeln!(
            table,
            "    Module {{ arch: {arch:?}, family: {family:?}, ptx: Image::raw(include_bytes!({ptx:?})), cubin: {cubin} }},"
        );
    }
    table.push(']');
    fs::write(out_dir.join("modules.rs"), table)
}

/// Modules of one name would overwrite each other's files.
fn check_names(modules: &[CudaModule]) -> io::Result<()> {
    for (index, module) in modules.iter().enumerate() {
        let (arch, name) = (module.arch, &module.name);
        let same = |other: &CudaModule| other.arch == arch && other.name == *name;
        if modules[..index].iter().any(same) {
            return Err(io::Error::other(format!(
                "two modules for {arch} are called {name:?}: give each a name with CudaBuilder::module"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NvvmArch;

    #[test]
    fn two_modules_of_one_name_are_refused() {
        let module = |arch| CudaModule {
            name: "all".into(),
            arch,
            ptx: String::new(),
            ptx_path: PathBuf::new(),
            cubin: None,
            compiler: String::new(),
            sources: Vec::new(),
            warnings: String::new(),
        };
        let (ampere, hopper) = (NvvmArch::Compute80, NvvmArch::Compute90a);
        check_names(&[module(ampere), module(hopper)]).unwrap();
        let error = check_names(&[module(hopper), module(hopper)]).unwrap_err();
        assert!(
            error.to_string().contains("two modules for sm_90a"),
            "{error}"
        );
    }
}
