//! Builds the kernels and inspects the results, on a machine without a GPU.

use std::{collections::BTreeMap, fs};

use cuda_builder::{Cubin, CudaBuilder, CudaModule, build_all, ptx};
use kernels_gpu::registry::{Entry, entries};
use rayon::prelude::*;
use regex::Regex;

use crate::{
    Error,
    machine_code::{MachineCode, Word},
    modules,
    process::{command, output},
    ptx_code::{Barriers, data_in_memory},
    report::{COLUMNS, Figures, Report},
    setup, sources, unchanged, workspace,
};

pub const TABLE: &str = "kernels-gpu/static-report.txt";

/// What to do with the static report.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Print,
    /// Only what has changed is compiled and assembled.
    Check,
    /// ptxas assembles all modules.
    CheckAll,
    Bless,
}

impl Mode {
    pub fn from_flags(check: bool, assemble: bool, bless: bool) -> Self {
        match (check, assemble, bless) {
            (true, false, _) => Self::Check,
            (true, true, _) => Self::CheckAll,
            (_, _, true) => Self::Bless,
            _ => Self::Print,
        }
    }
}

/// Builds all modules, then prints, compares or writes the static report.
pub fn run(mode: Mode) -> Result<(), Error> {
    match mode {
        Mode::Print => {
            let modules = unchanged::build_and_assemble()?;
            print!("{}", whole_report(&modules, &Report::default())?);
        }
        Mode::Check => {
            let known = committed()?;
            check(&known, &unchanged::build(&known)?)?;
        }
        Mode::CheckAll => check(&committed()?, &unchanged::build_and_assemble()?)?,
        Mode::Bless => {
            let known = committed().unwrap_or_default();
            let report = whole_report(&unchanged::compile(&known)?, &known)?;
            fs::write(workspace().join(TABLE), report.to_string())?;
            println!(
                "kernels: {} kernels written to {TABLE}",
                report.kernels.len()
            );
        }
    }
    Ok(())
}

/// The static report as it is committed.
pub fn committed() -> Result<Report, Error> {
    let text = fs::read_to_string(workspace().join(TABLE))
        .map_err(|error| format!("cannot read {TABLE}: {error}"))?;
    let parsed = Report::parse(&text);
    Ok(parsed.map_err(|reason| format!("{TABLE}: {reason}; --bless rewrites it"))?)
}

/// What to show of some kernels, in addition to the report.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Code {
    None,
    Ptx,
    Sass,
}

impl Code {
    pub fn from_flags(ptx: bool, sass: bool) -> Self {
        match (ptx, sass) {
            (true, _) => Self::Ptx,
            (_, true) => Self::Sass,
            _ => Self::None,
        }
    }
}

/// Builds the kernels whose names match and shows the results: the inner loop of work on a kernel.
pub fn some(only: &str, code: Code) -> Result<(), Error> {
    let regex = Regex::new(only)?;
    let matching = |entry: &Entry| regex.is_match(&entry.name);
    let rows: Vec<_> = entries().filter(matching).collect();
    if rows.is_empty() {
        let names: Vec<_> = entries().map(|entry| entry.name).collect();
        return Err(format!("no kernel matches {only:?}: there are {}", names.join(", ")).into());
    }
    setup::run()?;
    let mut builders = Vec::new();
    for family in modules::FAMILIES {
        let names = || rows.iter().filter(|row| row.family.name() == family.0);
        if names().next().is_some() {
            let only = |module: CudaBuilder| module.only(names().map(|row| row.name.as_str()));
            builders.extend(modules::of_family(&workspace(), family).map(only));
        }
    }
    let modules = build_all(builders)?;
    for module in &modules {
        let arch = module.arch.sm();
        match code {
            Code::None => {}
            Code::Ptx => {
                for entry in ptx::entries(&module.ptx) {
                    println!("// {arch}\n{}{{{}}}", entry.name, &module.ptx[entry.body]);
                }
            }
            Code::Sass => println!("// {arch}\n{}", disassembled(module)?),
        }
    }
    print!("{}", examine(&modules, &Report::default())?);
    let files: Vec<_> = modules.iter().map(|m| m.ptx_path.display()).collect();
    files.iter().for_each(|path| println!("kernels: {path}"));
    Ok(())
}

fn disassembled(module: &CudaModule) -> Result<String, Error> {
    let nvdisasm = setup::tools_dir().join("nvdisasm");
    output(
        command(nvdisasm)
            .arg("--print-code")
            .arg(&assembled(module)?.path),
    )
}

fn assembled(module: &CudaModule) -> Result<&Cubin, Error> {
    let missing = "ptxas is missing; `cargo xtask setup` installs it";
    Ok(module.cubin.as_ref().ok_or(missing)?)
}

/// Checks that these modules are as the report says.
pub fn check(expected: &Report, modules: &[CudaModule]) -> Result<(), Error> {
    let report = whole_report(modules, expected)?;
    if expected.tools != report.tools {
        println!(
            "kernels: the table was made by {}, these by {}: registers, unrolling and code size are not compared",
            expected.tools, report.tools
        );
    } else if modules.iter().any(|module| !module.warnings.is_empty()) {
        // Another compiler version may have warnings that this one does not have.
        return Err("the compiler has warnings about device code, see above".into());
    }
    let differences = expected.differences(&report);
    if !differences.is_empty() {
        return Err(format!(
            "the kernels are not as {TABLE} says:\n  {}\nIf that is meant, `cargo xtask kernels --bless` writes it down.",
            differences.join("\n  ")
        )
        .into());
    }
    println!(
        "kernels: {} kernels are as {TABLE} says",
        report.kernels.len()
    );
    Ok(())
}

fn whole_report(modules: &[CudaModule], known: &Report) -> Result<Report, Error> {
    let mut report = examine(modules, known)?;
    report.modules = unchanged::hashes(modules, &report, known);
    report.sources = sources::hash(&workspace())?;
    Ok(report)
}

/// The report of these modules, without their hashes. What `known` says holds for those without a cubin.
fn examine(modules: &[CudaModule], known: &Report) -> Result<Report, Error> {
    let mut report = Report::default();
    // In parallel on all processors.
    let of_module = |module: &CudaModule| match module.cubin {
        Some(_) => figures(module),
        None => Ok(known_figures(module, known)),
    };
    let figures: Vec<_> = modules.par_iter().map(of_module).collect();
    let assembler = unchanged::assembler()?;
    for (module, figures) in modules.iter().zip(figures) {
        report.kernels.extend(figures?);
        report.tools = unchanged::tools(module, &assembler);
        let name = unchanged::name(module);
        match &module.cubin {
            Some(cubin) => report.notices.extend(remarks(&name, &cubin.notices)),
            None => report.notices.extend(known.notices_of(&name).cloned()),
        }
    }
    report.notices.sort();
    Ok(report)
}

/// The rows of a module's kernels in the report.
fn known_figures(module: &CudaModule, known: &Report) -> BTreeMap<(String, String), Figures> {
    let entries = ptx::entries(&module.ptx);
    let row = |entry: &ptx::Entry<'_>| {
        let key = (module.arch.sm().into(), entry.name.into());
        let figures = *known.kernels.get(&key)?;
        Some((key, figures))
    };
    entries.iter().filter_map(row).collect()
}

/// The rows of a module's kernels, by architecture and name.
fn figures(module: &CudaModule) -> Result<BTreeMap<(String, String), Figures>, Error> {
    let cubin = assembled(module)?;
    let machine_code = MachineCode::read(&cubin.bytes, |words| named(words, module, cubin))?;
    let arch = module.arch.sm();
    if let Some(data) = data_in_memory(&module.ptx) {
        return Err(format!(
            "a kernel for {arch} has data in memory, and waits for them at its start: {data}\n\
             Usually this is a `match` that gives numbers. Compare instead, as `sm90::arrivals` does."
        )
        .into());
    }
    let row = |entry: &ptx::Entry| {
        let resources = cubin
            .resources
            .iter()
            .find(|resources| resources.name == entry.name)
            .ok_or_else(|| format!("ptxas said nothing about {}", entry.name))?;
        let barriers = Barriers::of(&module.ptx[entry.body.clone()]);
        let figures = COLUMNS.map(|column| match column.title {
            "regs" => resources.registers,
            "stack" => resources.stack,
            "spills" => resources.spill_stores + resources.spill_loads,
            "smem" => resources.shared,
            "barriers" => resources.barriers,
            "bar" => barriers.block,
            "bar.warp" => barriers.warp,
            "cluster" => barriers.cluster,
            "mbarrier" => barriers.mbarrier,
            "code" => machine_code.instructions(entry.name),
            opcode => machine_code.count(entry.name, opcode),
        });
        Ok(((arch.into(), entry.name.into()), figures))
    };
    ptx::entries(&module.ptx).par_iter().map(row).collect()
}

/// The names of instructions, as `nvdisasm` prints them.
fn named(words: &[Word], module: &CudaModule, cubin: &Cubin) -> Result<String, Error> {
    // A module with none of the chosen kernels: nvdisasm refuses an empty file.
    if words.is_empty() {
        return Ok(String::new());
    }
    let path = cubin.path.with_extension("words");
    fs::write(&path, words.as_flattened())?;
    let text = output(
        command(setup::tools_dir().join("nvdisasm"))
            .args(["--binary", &module.arch.sm().replace("sm_", "SM")])
            // The words are in no order that makes sense; do not look for one.
            .arg("--no-dataflow")
            .arg(&path),
    )?;
    fs::remove_file(path)?;
    Ok(text)
}

/// The remarks of ptxas about a module, sorted, each once with its number of occurrences.
fn remarks(module: &str, notices: &[String]) -> Vec<String> {
    let mut times: BTreeMap<String, u32> = BTreeMap::new();
    for notice in notices {
        *times.entry(without_place(notice)).or_default() += 1;
    }
    let shown = |(remark, times): (String, u32)| match times {
        1 => format!("{module} {remark}"),
        _ => format!("{module} {remark} ({times} times)"),
    };
    times.into_iter().map(shown).collect()
}

/// A remark without the PTX file and line, which move with every change.
fn without_place(notice: &str) -> String {
    let in_file = notice.starts_with("ptxas /");
    let remark = notice
        .split_once("; ")
        .filter(|_| in_file)
        .map_or(notice, |(_, remark)| remark);
    let mut words: Vec<&str> = remark.split(' ').collect();
    for at in 1..words.len() {
        if words[at - 1] == "line" && words[at].chars().all(|letter| letter.is_ascii_digit()) {
            words[at] = "_";
        }
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use kernels_gpu::registry::Arch;

    use super::*;

    /// A family's kernels are in a module for each supported architecture, and in no other module.
    #[test]
    fn modules_are_the_families_of_the_registry() {
        let modules = modules::FAMILIES.iter().flat_map(|(family, archs)| {
            let archs = archs.iter().map(|arch| arch.sm());
            archs.map(move |arch| (*family, arch))
        });
        let families = entries().flat_map(|entry| {
            let archs = match entry.kernel.info().arch {
                Arch::Sm80 => vec!["sm_80", "sm_90a"],
                Arch::Sm90a => vec!["sm_90a"],
            };
            let family = entry.family.name();
            archs.into_iter().map(move |arch| (family, arch))
        });
        assert_eq!(
            modules.collect::<BTreeSet<_>>(),
            families.collect::<BTreeSet<_>>()
        );
    }

    #[test]
    fn remarks_lose_their_place_and_are_counted() {
        let wait = |line: u32| {
            format!("(C7517) warpgroup.wait is injected in around line {line} by compiler")
        };
        let notices = [
            wait(12),
            "ptxas /tmp/x.ptx, line 12; warning : odd".into(),
            wait(40),
        ];
        assert_eq!(
            remarks("sm_90a.pod", &notices),
            [
                "sm_90a.pod (C7517) warpgroup.wait is injected in around line _ by compiler (2 times)",
                "sm_90a.pod warning : odd",
            ]
        );
    }
}
