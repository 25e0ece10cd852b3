//! Builds the kernels and inspects the results, on a machine without a GPU.

use std::{collections::BTreeMap, fs};

use cuda_builder::{CudaBuilder, CudaModule, build_all, ptx};
use kernels_gpu::registry::{Entry, entries};
use rayon::prelude::*;
use regex::Regex;

use crate::{
    Error,
    machine_code::MachineCode,
    modules,
    process::{command, output},
    report::{COLUMNS, Report},
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
    let cubin = module
        .cubin
        .as_ref()
        .ok_or("ptxas is missing; `cargo xtask setup` installs it")?;
    let nvdisasm = setup::tools_dir().join("nvdisasm");
    output(command(nvdisasm).arg("--print-code").arg(&cubin.path))
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
    // In parallel on all processors; this takes a tenth of the compile time.
    let machine_code = |module| disassembled(module).map(|text| MachineCode::parse(&text));
    let codes: Vec<_> = modules.par_iter().map(machine_code).collect();
    for (module, machine_code) in modules.iter().zip(codes) {
        let machine_code = machine_code?;
        let cubin = module.cubin.as_ref().expect("it was disassembled");
        report.tools = format!("{}, {}", module.compiler, cubin.assembler);
        let arch = module.arch.sm();
        if let Some(data) = data_in_memory(&module.ptx) {
            return Err(format!(
                "a kernel for {arch} has data in memory, and waits for them at its start: {data}\n\
                 Usually this is a `match` that gives numbers. Compare instead, as `sm90::arrivals` does."
            )
            .into());
        }
        for entry in ptx::entries(&module.ptx) {
            let resources = cubin
                .resources
                .iter()
                .find(|resources| resources.name == entry.name)
                .ok_or_else(|| format!("ptxas said nothing about {}", entry.name))?;
            let body = &module.ptx[entry.body];
            let figures = COLUMNS.map(|column| match column.title {
                "regs" => resources.registers,
                "stack" => resources.stack,
                "spills" => resources.spill_stores + resources.spill_loads,
                "smem" => resources.shared,
                "barriers" => resources.barriers,
                "bar" => count(body, is_block_barrier),
                "bar.warp" => count(body, |opcode| opcode.starts_with("bar.warp")),
                "cluster" => count(body, |opcode| opcode.starts_with("barrier.cluster")),
                "mbarrier" => count(body, |opcode| opcode.starts_with("mbarrier.")),
                "code" => machine_code.instructions(entry.name),
                opcode => machine_code.count(entry.name, opcode),
            });
            report
                .kernels
                .insert((arch.into(), entry.name.into()), figures);
        }
        notices
            .entry(arch)
            .or_default()
            .extend(cubin.notices.clone());
    }
    for (arch, notices) in notices {
        report.notices.extend(remarks(arch, &notices));
    }
    Ok(report)
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

fn count(body: &str, counts: impl Fn(&str) -> bool) -> u32 {
    u32::try_from(ptx::count_instructions(body, counts)).unwrap_or(u32::MAX)
}

/// Whether an opcode is `bar.sync 0`, a named barrier, or a newer name of these.
fn is_block_barrier(opcode: &str) -> bool {
    let of_bar = opcode.starts_with("bar.") && !opcode.starts_with("bar.warp");
    of_bar || opcode.starts_with("barrier.") && !opcode.starts_with("barrier.cluster")
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
        for (opcode, expected) in [
            ("bar.sync", true),
            ("barrier.sync", true),
            ("barrier.cta.sync.aligned", true),
            ("bar.warp.sync", false),
            ("barrier.cluster.arrive.aligned", false),
            ("mbarrier.arrive.shared.b64", false),
        ] {
            assert_eq!(is_block_barrier(opcode), expected, "{opcode}");
        }
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
