//! Kernels of a folder in the place of those in the program.

use std::{
    fs,
    path::{Path, PathBuf},
};

use tandem_attn::exec::gpu::{Image, MODULES, Module};

/// Families without kernels that wait at random: they wait for nobody, or attention does not need them.
pub const AS_THEY_ARE: [&str; 3] = ["step", "measure", "quantise"];

/// Where a module's PTX or machine code lies in a folder.
pub fn place(folder: &Path, module: &Module, kind: &str) -> PathBuf {
    folder.join(format!("{}-{}.{kind}", module.arch, module.family))
}

/// The packed kernels, those of a folder in the place of their own.
///
/// # Errors
/// Where the folder has none.
pub fn read(folder: &Path) -> Result<Vec<Module>, String> {
    let mut replaced = 0;
    let mut of = |module: &Module| {
        let read = |kind| fs::read(place(folder, module, kind)).ok().map(Image::owned);
        let (ptx, cubin) = (read("ptx"), read("cubin"));
        replaced += usize::from(cubin.is_some() || ptx.is_some());
        Module {
            cubin: match ptx.is_some() || cubin.is_some() {
                true => cubin,
                false => module.cubin.clone(),
            },
            ptx: ptx.unwrap_or_else(|| module.ptx.clone()),
            ..module.clone()
        }
    };
    let modules = MODULES.iter().map(&mut of).collect();
    match replaced {
        0 => Err(format!("{}: no kernels in it", folder.display())),
        _ => Ok(modules),
    }
}
