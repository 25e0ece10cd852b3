//! Builds the modules, and spares the compiler and ptxas what they have made before.
//!
//! What ptxas makes depends on the PTX, its version and its options. The static report has a hash of these for each
//! module, together with what came out: the cubin in the package, the figures and remarks in the report. Where the hash
//! is still right, cubin, figures and remarks are too. So it is with the PTX in the package, the compiler's version and
//! the [hash of the sources](sources). One family is compiled and assembled in any case.

use std::{collections::BTreeMap, fmt::Write as _};

use cuda_builder::{Assembler, CudaModule, build_all, ptx};
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use crate::{Error, modules, package, report::Report, setup, sources, workspace};

/// A family that is built in every check: so each run shows that the compiler and ptxas still give these bytes, and that
/// messages and machine code are still read as before. It is a small module that has most of what the report counts.
const ALWAYS: &str = "mla";

/// All modules. Those that ptxas need not assemble again have no cubin. If the report was made from the same sources by the
/// same tools, only one family is compiled, and the PTX of others is that in the package.
pub fn build(report: &Report) -> Result<Vec<CudaModule>, Error> {
    setup::run()?;
    let is_known = report.sources == sources::hash(&workspace())?;
    if is_known && let Some(modules) = from_package(report)? {
        println!("kernels: the sources are those of the report, {ALWAYS} was built again");
        return Ok(modules);
    }
    compile(report)
}

/// The module of the family that is always built, and those in the package; `None` if other tools made the report, or
/// the package is not that of the report.
fn from_package(report: &Report) -> Result<Option<Vec<CudaModule>>, Error> {
    let of_family = |family: &modules::Family| modules::of_family(&workspace(), *family);
    let always = modules::FAMILIES.iter().find(|family| family.0 == ALWAYS);
    let built = build_all(always.into_iter().flat_map(of_family))?;
    let [built] = &built[..] else {
        panic!("the family {ALWAYS:?} is one module");
    };
    if report.tools != tools(built, &assembler()?) {
        return Ok(None);
    }
    let packaged = |&(family, archs): &modules::Family| {
        archs.iter().map(move |&arch| {
            let mut module = built.clone();
            if family != ALWAYS {
                (module.name, module.arch, module.cubin) = (family.into(), arch, None);
                module.ptx =
                    String::from_utf8(package::committed(&format!("{}.ptx", name(&module)))?)?;
            }
            Ok(module)
        })
    };
    let modules: Vec<CudaModule> = modules::FAMILIES
        .iter()
        .flat_map(packaged)
        .collect::<Result<_, Error>>()?;
    // The package may be older than the report.
    let is_known = |module: &CudaModule| {
        module.cubin.is_some() || is_known(&name(module), &module.ptx, report)
    };
    Ok(modules.par_iter().all(is_known).then_some(modules))
}

/// Compiles all modules. Those that ptxas need not assemble again have no cubin.
pub fn compile(report: &Report) -> Result<Vec<CudaModule>, Error> {
    setup::run()?;
    let builders = modules::modules(&workspace());
    // What is assembled in any case is so while others are compiled: after them, one processor would do all of it.
    let of_family = |&family: &modules::Family| {
        let builders = modules::of_family(&workspace(), family);
        builders.map(move |it| it.assemble(family.0 == ALWAYS))
    };
    let mut modules = build_all(modules::FAMILIES.iter().flat_map(of_family))?;
    assert!(
        modules.iter().any(|module| module.cubin.is_some()),
        "there is a family {ALWAYS:?}"
    );
    let tools = tools(&modules[0], &assembler()?);
    let changed = |module: &CudaModule| {
        let known = report.tools == tools && is_known(&name(module), &module.ptx, report);
        module.cubin.is_none() && !known
    };
    let changed: Vec<bool> = modules.par_iter().map(changed).collect();
    let places: Vec<usize> = (0..modules.len()).filter(|&at| changed[at]).collect();
    let assembled = build_all(places.iter().map(|&at| builders[at].clone()))?;
    for (at, module) in places.into_iter().zip(assembled) {
        modules[at] = module;
    }
    println!(
        "kernels: {} of {} modules assembled, the others are the PTX that the report and the package were made from",
        modules.iter().filter(|it| it.cubin.is_some()).count(),
        modules.len()
    );
    Ok(modules)
}

/// Compiles and assembles all modules.
pub fn build_and_assemble() -> Result<Vec<CudaModule>, Error> {
    setup::run()?;
    assembler()?;
    Ok(build_all(modules::modules(&workspace()))?)
}

/// A hash of each module. That of a module without a cubin is the known one.
pub fn hashes(modules: &[CudaModule], report: &Report, known: &Report) -> BTreeMap<String, String> {
    let of_module = |module: &CudaModule| {
        let name = name(module);
        let hash = match &module.cubin {
            Some(cubin) => hash(&name, &module.ptx, &cubin.bytes, report),
            None => known.modules.get(&name)?.clone(),
        };
        Some((name, hash))
    };
    modules.par_iter().filter_map(of_module).collect()
}

/// The version of ptxas.
pub fn assembler() -> Result<String, Error> {
    let found = Assembler::find(&workspace())?;
    Ok(found
        .ok_or("ptxas is missing; `cargo xtask setup` installs it")?
        .version)
}

/// What made a module, as the report says it.
pub fn tools(module: &CudaModule, assembler: &str) -> String {
    format!("{}, {assembler}", module.compiler)
}

/// For example `sm_90a.prefill`.
pub fn name(module: &CudaModule) -> String {
    format!("{}.{}", module.arch.sm(), module.name)
}

/// Whether the report's hash of this module is that of this PTX, the packaged cubin, and the report's own figures.
fn is_known(name: &str, ptx: &str, report: &Report) -> bool {
    let cubin = package::committed(&format!("{name}.cubin"));
    cubin.is_ok_and(|cubin| report.modules.get(name) == Some(&hash(name, ptx, &cubin, report)))
}

/// Hash of what ptxas is given for a module, and of what comes out.
pub fn hash(name: &str, ptx: &str, cubin: &[u8], report: &Report) -> String {
    let (arch, family) = name.split_once('.').unwrap_or_default();
    let ptx = package::without_comments(ptx);
    let mut text = format!(
        "{name}\n{}\n{}\n{:x}\n{:x}\n",
        report.tools,
        Assembler::options(modules::ptxas_level(family)).join(" "),
        Sha256::digest(&ptx),
        Sha256::digest(cubin)
    );
    for entry in ptx::entries(&ptx) {
        let figures = report.kernels.get(&(arch.into(), entry.name.into()));
        writeln!(text, "{} {figures:?}", entry.name).expect("a string takes all");
    }
    for remark in report.notices_of(name) {
        writeln!(text, "{remark}").expect("a string takes all");
    }
    format!("{:x}", Sha256::digest(text))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::kernels::TABLE;

    const NAME: &str = "sm_90a.measure";

    fn committed() -> (Report, String, Vec<u8>) {
        let text = fs::read_to_string(workspace().join(TABLE)).unwrap();
        let ptx = package::committed(&format!("{NAME}.ptx")).unwrap();
        let cubin = package::committed(&format!("{NAME}.cubin")).unwrap();
        let ptx = String::from_utf8(ptx).unwrap();
        (Report::parse(&text).unwrap(), ptx, cubin)
    }

    #[test]
    fn what_is_committed_is_known() {
        let (report, ptx, _) = committed();
        assert!(is_known(NAME, &ptx, &report));
        assert!(is_known(NAME, &format!("{ptx}// a comment\n"), &report));
        assert!(!is_known("sm_80.measure", &ptx, &report));
        assert!(!is_known("sm_90a.absent", &ptx, &report));
    }

    #[test]
    fn one_other_byte_of_ptx_or_cubin_is_noticed() {
        let (report, ptx, cubin) = committed();
        let known = &report.modules[NAME];
        assert_eq!(&hash(NAME, &ptx, &cubin, &report), known);
        let at = ptx.rfind("ret;").unwrap();
        let mut other = ptx.clone();
        other.replace_range(at..at + 1, "s");
        assert!(!is_known(NAME, &other, &report));
        for at in [0, cubin.len() / 2, cubin.len() - 1] {
            let mut other = cubin.clone();
            other[at] ^= 1;
            assert_ne!(&hash(NAME, &ptx, &other, &report), known, "byte {at}");
        }
    }

    #[test]
    fn other_figures_remarks_or_tools_are_noticed() {
        let (report, ptx, _) = committed();
        let changed = |change: &dyn Fn(&mut Report)| {
            let mut other = report.clone();
            change(&mut other);
            assert!(!is_known(NAME, &ptx, &other));
        };
        let kernel = ptx::entries(&ptx)[0].name;
        let key = ("sm_90a".to_owned(), kernel.to_owned());
        changed(&|report| report.kernels.get_mut(&key).unwrap()[0] += 1);
        changed(&|report| _ = report.kernels.remove(&key));
        changed(&|report| report.notices.push(format!("{NAME} a remark")));
        changed(&|report| report.tools.push('1'));
        changed(&|report| _ = report.modules.remove(NAME));
    }
}
