//! Injects faults into the kernels' PTX, one at a time: a fence, an arrival, a wait, a count, a parity. Each fault that
//! is executed must show, by a report or by wrong results.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tandem_attn::exec::gpu::{Gpu, Image, MODULES, Module};

use crate::{
    child_with,
    scenarios::{run, scenarios},
};

/// A scenario, and the kernel in it that is changed.
pub const TARGETS: [(&str, &str); 8] = [
    ("decode, many units", "decode_8x32_d64_bf16"),
    ("decode, many units of 64 rows", "decode_64x128_d64_bf16"),
    ("latent, many units", "mla_64x32_bf16"),
    ("latent, many units of few heads", "mla_16x64_bf16"),
    ("prefill, many tiles", "prefill_192x112_d64_bf16"),
    (
        "decode, many units on odd pages",
        "sm80_decode_16x32_d64_bf16",
    ),
    (
        "prefill, many tiles, Ampere",
        "sm80_prefill_128x128_d64_bf16",
    ),
    ("hybrid, one kernel", "sm80_pod_128x128_d64_bf16"),
];

/// A fault that does not show under one schedule is tried under the next.
const SCHEDULES: [&str; 4] = [
    "schedule=late seed=1",
    "schedule=random seed=1",
    "schedule=round",
    "schedule=random seed=2",
];

/// Environment variable with texts, one per line: only faults that have one of them in their name are tried. If unset, all.
const ONLY: &str = "PTX_DRIVER_FAULTS";

/// Whether these texts choose a fault.
fn chooses(only: &str, what: &str) -> bool {
    only.is_empty() || only.lines().any(|text| what.contains(text))
}

#[test]
fn texts_choose_faults_by_parts_of_their_names() {
    let what = "decode_8x32_d64_bf16 line 7 `bar.sync 0;` Remove";
    for only in ["", what, "bar.sync", "wgmma\nd64_bf16 line 7"] {
        assert!(chooses(only, what), "{only}");
    }
    assert!(!chooses("wgmma\nParity", what));
}

/// What happens to a line.
#[derive(Clone, Copy, Debug)]
enum Change {
    Remove,
    /// The next line leaves a loop when a barrier is ready; make it leave in any case.
    DoNotWait,
    Parity,
    /// Replace the last operand.
    Last(&'static str),
    Replace(&'static str, &'static str),
}

/// Patterns of lines and their changes.
const CHANGES: [(&str, Change); 17] = [
    ("bar.warp.sync", Change::Remove),
    ("bar.sync", Change::Remove),
    ("mbarrier.arrive.shared", Change::Remove),
    ("mbarrier.arrive.expect_tx", Change::Last("16")),
    ("mbarrier.init", Change::Last("31")),
    ("mbarrier.try_wait", Change::DoNotWait),
    ("mbarrier.try_wait", Change::Parity),
    ("fence.proxy.async", Change::Remove),
    ("fence.mbarrier_init", Change::Remove),
    ("wgmma.fence", Change::Remove),
    ("wgmma.commit_group", Change::Remove),
    ("wgmma.wait_group", Change::Remove),
    ("cp.async.wait_group", Change::Remove),
    ("cp.async.wait_all", Change::Remove),
    ("cp.async.mbarrier.arrive", Change::Remove),
    ("cp.async.bulk.wait_group", Change::Remove),
    ("atom.acq_rel.gpu", Change::Replace("acq_rel", "relaxed")),
];

/// The reason why a change at this place is harmless, if it is.
fn harmless(lines: &[&str], at: usize, change: Change) -> Option<&'static str> {
    let is_code = |line: &&&str| {
        let line = line.trim_start();
        !line.is_empty() && !line.starts_with("//") && !line.starts_with('$')
    };
    let starts = |line: &str, with: &str| line.trim_start().starts_with(with);
    let before: Vec<&str> = lines[..at]
        .iter()
        .rev()
        .filter(is_code)
        .copied()
        .take(12)
        .collect();
    let after: Vec<&str> = lines[at + 1..]
        .iter()
        .filter(is_code)
        .copied()
        .take(4)
        .collect();
    let (line, [last, ..], [next, ..]) = (lines[at], &before[..], &after[..]) else {
        return None;
    };
    let declared = lines[..at]
        .iter()
        .rev()
        .find_map(|line| line.strip_prefix(".visible .entry "));
    let entry = declared.unwrap_or_default();
    let waits_next = after
        .last()
        .is_some_and(|line| starts(line, "{ .reg .pred p;"));
    if matches!(change, Change::DoNotWait) && entry.starts_with("mla_64x32") && waits_next {
        return Some(
            "the loader asks for queries when all its lanes have listed rows, and queries are waited for next",
        );
    }
    let is = |at: usize, with: &str| before.get(at).is_some_and(|line| starts(line, with));
    let waits_for_the_end = is(2, "xor.b32") && is(5, "setp.gt.u32");
    if matches!(change, Change::DoNotWait | Change::Parity)
        && entry.starts_with("mla_16x64")
        && waits_for_the_end
    {
        return Some(
            "the next unit is claimed too early: busy_ctas_leave_units_to_others shows it",
        );
    }
    if !matches!(change, Change::Remove) {
        return None;
    }
    if starts(line, "bar.warp.sync") {
        if starts(lines[at - 1], "bar.sync") {
            return Some("the warp's lanes come from a barrier that all of them were at");
        }
        // Without an arrival of its own, the lane that announces the bytes arrives after its copies.
        let announces = ["mbarrier.arrive.expect_tx", "mbarrier.expect_tx"];
        let announced = |line: &&str| announces.iter().any(|how| starts(line, how));
        if before.iter().any(announced) {
            return Some(
                "copies may come before their bytes are announced: the phase lacks the arrival",
            );
        }
        if after
            .iter()
            .any(|line| starts(line, "cp.async.mbarrier.arrive"))
        {
            return Some("each lane arrives for what it stored itself");
        }
        if after.iter().any(|line| starts(line, "{ .reg .pred p;")) {
            return Some("all lanes wait at an mbarrier next");
        }
        if all_arrive_next(lines, at) {
            return Some(
                "each lane arrives for what it stored itself, and the warp reads none of it",
            );
        }
    }
    if starts(line, "bar.sync") && next.trim() == line.trim() {
        return Some("the same barrier follows at once");
    }
    if starts(line, "fence.proxy.async") && starts(last, "cp.async.wait_all") {
        return Some("what cp.async wrote is there for products once it is complete");
    }
    if starts(line, "fence.proxy.async") {
        let stores = |line: &&str| starts(line, "st.shared") || starts(line, "stmatrix");
        let near = lines[..at].iter().rev().filter(is_code).take(60);
        if !near.copied().any(|line| stores(&line)) {
            return Some("nothing was written: what was read is in registers");
        }
    }
    if starts(line, "fence.mbarrier_init") {
        let mut rest = lines[at + 1..].iter();
        let next = rest.find(|line| starts(line, "bar.sync") || starts(line, "fence.proxy.async"));
        if next.is_some_and(|line| starts(line, "fence.proxy.async")) {
            return Some("a proxy fence before the block's barrier covers it");
        }
    }
    if starts(line, "wgmma.wait_group") {
        let since = lines[..at].iter().rev();
        let mut since =
            since.take_while(|line| !line.starts_with('$') && !line.contains("wgmma.mma"));
        if since.any(|line| starts(line, "wgmma.wait_group.sync.aligned \t0;")) {
            return Some("no product was begun since all were waited for");
        }
    }
    if starts(line, "cp.async.wait_all") && !starts(next, "fence.proxy.async") {
        return Some("the loop before has waited for each of its blocks");
    }
    if starts(line, "wgmma.fence") {
        let since = lines[..at].iter().rev();
        let mut since = since.take_while(|line| !starts(line, "wgmma.fence"));
        let writes =
            |line: &&str| line.contains(".f32 \t") || starts(line, "cvt.rn.") || starts(line, "$");
        if !since.any(writes) {
            return Some("no register was written since the last one");
        }
    }
    if starts(line, "mbarrier.arrive") && after.iter().any(|line| starts(line, "ret;")) {
        return Some("nobody waits for the last arrival");
    }
    None
}

/// Whether all lanes take part in the next mbarrier arrival, with no load from shared memory before it. Lanes that skip
/// the code before it jump to its label.
fn all_arrive_next(lines: &[&str], at: usize) -> bool {
    let is = |line: &str, what: &str| line.trim_start().starts_with(what);
    let rest = &lines[at + 1..];
    let arrival = rest.iter().position(|line| is(line, "mbarrier.arrive."));
    let before = &rest[..arrival.unwrap_or_default()];
    let label = before.iter().rev().find(|line| line.starts_with('$'));
    let Some(label) = label.map(|label| label.trim_end_matches(':')) else {
        return false;
    };
    let jump = format!("bra.uni \t{label};");
    before.iter().any(|line| is(line, &jump))
        && !before.iter().any(|line| is(line, "ld") || is(line, "bar."))
}

/// Line numbers of an entry's body in the text: the first, and one past the last.
pub fn body(lines: &[&str], entry: &str) -> (usize, usize) {
    let declaration = format!(".visible .entry {entry}(");
    let begin = lines
        .iter()
        .position(|line| line.starts_with(&declaration))
        .expect("the kernel is there");
    let end = begin
        + lines[begin..]
            .iter()
            .position(|line| *line == "}")
            .expect("its end");
    (begin, end)
}

fn changed(lines: &[&str], at: usize, change: Change) -> String {
    let line = lines[at];
    let mut damaged: Vec<String> = lines.iter().map(|&line| line.to_owned()).collect();
    match change {
        Change::Remove => damaged[at] = String::new(),
        Change::DoNotWait => damaged[at + 1] = damaged[at + 1].replace("@p ", ""),
        Change::Parity => {
            let (before, parity) = line.rsplit_once(", ").expect("operands");
            let parity = parity.trim_end_matches(';');
            damaged[at] =
                format!("{{ .reg .b32 other; xor.b32 other, {parity}, 1; {before}, other; }}");
        }
        Change::Last(value) => {
            let (before, _) = line.rsplit_once(", ").expect("operands");
            damaged[at] = format!("{before}, {value};");
        }
        Change::Replace(from, to) => damaged[at] = line.replace(from, to),
    }
    damaged.join("\n")
}

/// Outcome of a run.
pub enum Outcome {
    Right,
    /// Results that differ from the reference.
    Wrong,
    /// The emulator's report.
    Reported(String),
}

/// Launches with this PTX in place of a module's, up to the first outcome that is not right.
pub fn outcome(
    damaged: &Module,
    text: String,
    launches: impl Fn(&Gpu) -> Result<(), String>,
) -> Outcome {
    let image = Image::owned(text.into_bytes());
    let modules: Vec<Module> = MODULES
        .iter()
        .map(
            |module| match (module.arch, module.family) == (damaged.arch, damaged.family) {
                true => Module {
                    ptx: image.clone(),
                    cubin: None,
                    ..module.clone()
                },
                false => module.clone(),
            },
        )
        .collect();
    std::panic::set_hook(Box::new(|_| {}));
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let gpu = Gpu::builder()
            .modules(&modules)
            .compile_ptx(&mut |_| {})
            .build(0)
            .expect("the modules are read");
        gpu.make_current().unwrap();
        launches(&gpu)
    }));
    let _ = std::panic::take_hook();
    let forget = libcuda::symbol(c"ptx_driver_forget_failure").expect("the emulated driver");
    // SAFETY: the function in the emulated driver has this type.
    let forget: extern "C" fn() = unsafe { std::mem::transmute(forget) };
    forget();
    match outcome {
        Ok(Ok(())) => Outcome::Right,
        Ok(Err(_)) => Outcome::Wrong,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned().unwrap_or_default();
            let report = text.split_once("text: ");
            report.map_or(Outcome::Wrong, |(_, report)| {
                Outcome::Reported(report.to_owned())
            })
        }
    }
}

/// The Hopper module that has a kernel, and its PTX.
pub fn module_with(entry: &str) -> (&'static Module, String) {
    let declaration = format!(".visible .entry {entry}(");
    MODULES
        .iter()
        .filter(|module| module.arch == "sm_90a")
        .map(|module| {
            let ptx = module.ptx.unpack().expect("an image that is whole");
            (module, String::from_utf8(ptx.into_owned()).expect("text"))
        })
        .find(|(_, text)| text.contains(&declaration))
        .expect("a module with the kernel")
}

/// Tries the faults and prints the outcome of each that was executed.
fn seeded() {
    let only = std::env::var(ONLY).unwrap_or_default();
    for (name, entry) in TARGETS {
        let (module, text) = module_with(entry);
        let lines: Vec<&str> = text.lines().collect();
        let scenario = scenarios()
            .into_iter()
            .find(|one| one.name == name)
            .expect("a scenario");
        let (begin, end) = body(&lines, entry);
        let mut executed = 0;
        for (needle, change) in CHANGES {
            let places: Vec<usize> = (begin..end)
                .filter(|&at| lines[at].trim_start().starts_with(needle))
                .collect();
            let count = places.len();
            let mut chosen: Vec<usize> = [0, count / 2, count.saturating_sub(1)]
                .into_iter()
                .filter_map(|at| places.get(at).copied())
                .collect();
            chosen.dedup();
            for at in chosen {
                let line = lines[at].trim();
                let what = format!("{entry} line {} `{line}` {change:?}", at + 1);
                if !chooses(&only, &what) {
                    continue;
                }
                if let Some(reason) = harmless(&lines, at, change) {
                    eprintln!("no fault: {what}: {reason}");
                    continue;
                }
                let tried = |text: String| outcome(module, text, |gpu| run(gpu, &scenario));
                match tried(changed(&lines, at, change)) {
                    Outcome::Reported(found) => {
                        assert!(
                            found.contains(&format!("kernel {entry}")),
                            "{what}: another kernel is named: {found}"
                        );
                        let named = lines_named(&found);
                        assert!(
                            !named.is_empty()
                                && named.iter().all(|line| (begin..end).contains(line)),
                            "{what}: another place is named: {found}"
                        );
                        let found: String = found.chars().take(200).collect();
                        eprintln!("fault reported: {what}: {found}");
                    }
                    Outcome::Wrong => eprintln!("fault shown by wrong results: {what}"),
                    Outcome::Right => {
                        // Check that the line is executed at all.
                        let mut trap: Vec<String> =
                            lines.iter().map(|&line| line.to_owned()).collect();
                        trap[at] = format!("trap; {}", lines[at]);
                        if matches!(tried(trap.join("\n")), Outcome::Right) {
                            continue;
                        }
                        eprintln!("{MISSED}{what}");
                    }
                }
                executed += 1;
            }
        }
        assert!(
            executed > 0 || !only.is_empty(),
            "{entry} is not launched by its scenario"
        );
    }
}

/// Line numbers of the module that a report names.
fn lines_named(report: &str) -> Vec<usize> {
    let numbers = report.split("line ").skip(1);
    numbers
        .filter_map(|rest| {
            rest.split(|c: char| !c.is_ascii_digit())
                .next()?
                .parse()
                .ok()
        })
        .collect()
}

const MISSED: &str = "fault missed: ";

#[test]
#[ignore = "takes minutes: each fault is a module of its own"]
fn faults_in_the_kernels_show() {
    let test = "faults::faults_in_the_kernels_show";
    let only = std::env::var(ONLY).unwrap_or_default();
    let (mut shown, mut missed) = (0, only.clone());
    for schedule in SCHEDULES {
        let settings = format!("{schedule} limit=20");
        let Some(text) = child_with(test, &settings, &[(ONLY, &missed)]) else {
            return seeded();
        };
        let of = |what| text.lines().filter(move |line| line.starts_with(what));
        for line in text.lines().filter(|line| line.contains("fault")) {
            println!("{schedule}: {line}");
        }
        let show: Vec<&str> = of("fault reported").chain(of("fault shown")).collect();
        let rest = of(MISSED).filter_map(|line| line.strip_prefix(MISSED));
        shown += show.len();
        missed = rest.collect::<Vec<_>>().join("\n");
        if missed.is_empty() {
            break;
        }
    }
    println!("faults: {shown} shown, missed:\n{missed}");
    assert!(shown >= 100 || !only.is_empty(), "{shown}");
    assert!(missed.is_empty(), "{missed}");
}
