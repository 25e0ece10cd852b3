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
    report::{COLUMNS, Figures, Report},
    setup, workspace,
};

const TABLE: &str = "kernels-gpu/static-report.txt";

/// What to do with the static report.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Print,
    Check,
    Bless,
}

impl Mode {
    pub fn from_flags(check: bool, bless: bool) -> Self {
        match (check, bless) {
            (true, _) => Self::Check,
            (_, true) => Self::Bless,
            _ => Self::Print,
        }
    }
}

/// Builds all modules, then prints, compares or writes the static report.
pub fn run(mode: Mode) -> Result<(), Error> {
    setup::run()?;
    let modules = build_all(modules::modules(&workspace()))?;
    let report = examine(&modules)?;
    let path = workspace().join(TABLE);
    match mode {
        Mode::Print => print!("{report}"),
        Mode::Bless => {
            fs::write(&path, report.to_string())?;
            println!(
                "kernels: {} kernels written to {TABLE}",
                report.kernels.len()
            );
        }
        Mode::Check => {
            let text = fs::read_to_string(&path)
                .map_err(|error| format!("cannot read {TABLE}: {error}"))?;
            let expected = Report::parse(&text)
                .map_err(|reason| format!("{TABLE}: {reason}; --bless rewrites it"))?;
            check(&expected, &report, &modules)?;
        }
    }
    Ok(())
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
    print!("{}", examine(&modules)?);
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

fn check(expected: &Report, report: &Report, modules: &[CudaModule]) -> Result<(), Error> {
    if expected.tools != report.tools {
        println!(
            "kernels: the table was made by {}, these by {}: registers, unrolling and code size are not compared",
            expected.tools, report.tools
        );
    } else if modules.iter().any(|module| !module.warnings.is_empty()) {
        // Another compiler version may have warnings that this one does not have.
        return Err("the compiler has warnings about device code, see above".into());
    }
    let differences = expected.differences(report);
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

fn examine(modules: &[CudaModule]) -> Result<Report, Error> {
    let mut report = Report::default();
    let mut notices: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    // In parallel on all processors.
    let figures: Vec<_> = modules.par_iter().map(figures).collect();
    for (module, figures) in modules.iter().zip(figures) {
        report.kernels.extend(figures?);
        let cubin = assembled(module)?;
        report.tools = format!("{}, {}", module.compiler, cubin.assembler);
        notices
            .entry(module.arch.sm())
            .or_default()
            .extend(cubin.notices.clone());
    }
    for (arch, notices) in notices {
        report.notices.extend(remarks(arch, &notices));
    }
    Ok(report)
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

/// The first variable of a module, in global or constant memory: LLVM makes tables of `match`.
fn data_in_memory(ptx: &str) -> Option<&str> {
    let is_variable = |line: &&str| {
        let mut words = line.split_whitespace();
        let first = words.find(|word| ![".visible", ".weak", ".extern"].contains(word));
        matches!(first, Some(".global" | ".const"))
    };
    ptx.lines().find(is_variable)
}

/// Numbers of barrier instructions in a kernel's PTX.
#[derive(Debug, Default, PartialEq, Eq)]
struct Barriers {
    /// `bar.sync 0`, named barriers, and newer names of these.
    block: u32,
    warp: u32,
    cluster: u32,
    mbarrier: u32,
}

impl Barriers {
    fn of(body: &str) -> Self {
        let mut found = Self::default();
        for opcode in ptx::opcodes(body) {
            if opcode.starts_with("bar.warp") {
                found.warp += 1;
            } else if opcode.starts_with("barrier.cluster") {
                found.cluster += 1;
            } else if opcode.starts_with("bar.") || opcode.starts_with("barrier.") {
                found.block += 1;
            } else if opcode.starts_with("mbarrier.") {
                found.mbarrier += 1;
            }
        }
        found
    }
}

/// The remarks of ptxas, sorted, each once with its number of occurrences.
fn remarks(arch: &str, notices: &[String]) -> Vec<String> {
    let mut times: BTreeMap<String, u32> = BTreeMap::new();
    for notice in notices {
        *times.entry(without_place(notice)).or_default() += 1;
    }
    let shown = |(remark, times): (String, u32)| match times {
        1 => format!("{arch} {remark}"),
        _ => format!("{arch} {remark} ({times} times)"),
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
    fn tables_in_memory_are_found() {
        let ptx = ".version 8.0\n.visible .entry kernel()\n{\n\tld.global.b32 %r1, [%rd1];\n}\n";
        assert_eq!(data_in_memory(ptx), None);
        let table = ".visible .global .align 4 .b8 switch_table[8] = {32, 0, 0, 0, 1};";
        assert_eq!(data_in_memory(&format!("{ptx}{table}\n")), Some(table));
    }

    #[test]
    fn barriers_of_a_block_are_not_those_of_a_warp_or_cluster() {
        let opcodes = [
            "bar.sync",
            "barrier.sync",
            "barrier.cta.sync.aligned",
            "bar.warp.sync",
            "barrier.cluster.arrive.aligned",
            "mbarrier.arrive.shared.b64",
            "add.s32",
        ];
        let expected = Barriers {
            block: 3,
            warp: 1,
            cluster: 1,
            mbarrier: 1,
        };
        assert_eq!(Barriers::of(&opcodes.join(" 0;\n")), expected);
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
            remarks("sm_90a", &notices),
            [
                "sm_90a (C7517) warpgroup.wait is injected in around line _ by compiler (2 times)",
                "sm_90a warning : odd",
            ]
        );
    }
}
