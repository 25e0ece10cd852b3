//! Makes small changes to what kernels compute, one at a time: a comparison that is off by one, a sign, a shift, a
//! minimum instead of a maximum. A seed draws a sample with the same number of changes per kernel. Nearly every change
//! that is executed must show in results or in a report, or be one that is proved to have no effect.

use tandem_attn::exec::gpu::{Gpu, KernelInfo};

use crate::{
    child,
    common::Rng,
    faults::{Outcome, TARGETS, body, module_with, outcome},
    launches,
    scenarios::{self, Scenario, emulated, scenarios},
};

/// Kernels without a scenario, launched directly on problems that seeds draw.
const ALONE: [&str; 11] = [
    "merge_few_bf16",
    "merge_long_bf16",
    "merge_states_bf16",
    "mla_64x48_bf16",
    "mla_rows_64x32_bf16",
    "append_paged_kv_16",
    "append_quantised_bf16",
    "append_latent_656_bf16",
    "qkv_step_2_bf16_e4m3",
    "rms_norm_2_bf16",
    "gate_bf16",
];

/// What a change is tested on.
#[derive(Debug)]
enum Trial {
    Plan(Scenario),
    Alone(&'static KernelInfo, u64),
    Claims(Scenario),
}

impl Trial {
    fn run(&self, gpu: &Gpu) -> Result<(), String> {
        match self {
            Self::Plan(scenario) => scenarios::run(gpu, scenario),
            Self::Alone(row, seed) => launches::run(gpu, row, *seed, true).map(|_| ()),
            Self::Claims(scenario) => scenarios::leaves_to_others(gpu, scenario),
        }
    }
}

/// The kernels that are changed, each with its trials.
fn targets(gpu: &Gpu) -> Vec<(&'static str, Vec<Trial>)> {
    let in_plans = TARGETS.into_iter().map(|(name, entry)| {
        let mut all = scenarios().into_iter();
        let scenario = all.find(|one| one.name == name).expect("a scenario");
        let others = (0..OTHERS).map(|seed| scenario.another(seed));
        let all = std::iter::once(scenario.clone()).chain(others);
        (entry, all.map(Trial::Plan).collect())
    });
    let alone = ALONE.into_iter().map(|entry| {
        let row = launches::entries(gpu).find(|row| row.name == entry);
        let row = row.unwrap_or_else(|| panic!("no kernel is called {entry}"));
        (
            entry,
            (0..OTHERS).map(|seed| Trial::Alone(row, seed)).collect(),
        )
    });
    let mut all: Vec<(_, Vec<Trial>)> = in_plans.chain(alone).collect();
    for (entry, trials) in &mut all {
        let claims = scenarios::claims().into_iter();
        let of_entry = claims.filter(|(of, _)| of == entry);
        trials.extend(of_entry.map(|(_, scenario)| Trial::Claims(scenario)));
    }
    all
}

/// Patterns of lines and their changes.
const CHANGES: [(&str, &str, &str); 16] = [
    ("setp.lt.s32", "setp.lt", "setp.le"),
    ("setp.gt.s32", "setp.gt", "setp.ge"),
    ("setp.ge.s32", "setp.ge", "setp.gt"),
    ("setp.le.s32", "setp.le", "setp.lt"),
    ("setp.lt.u32", "setp.lt", "setp.le"),
    ("setp.gt.u32", "setp.gt", "setp.ge"),
    ("setp.ge.u32", "setp.ge", "setp.gt"),
    ("setp.eq.b32", "setp.eq", "setp.ne"),
    ("setp.ne.b32", "setp.ne", "setp.eq"),
    ("max.f32", "max", "min"),
    ("max.s32", "max", "min"),
    ("min.s32", "min", "max"),
    ("sub.f32", "sub", "add"),
    ("sub.s32", "sub", "add"),
    ("lg2.approx", "lg2", "ex2"),
    ("neg.f32", "neg", "abs"),
];

/// Number of further batches on which a change is tested, besides the scenario's own.
const OTHERS: u64 = 60;

/// Results of a sample.
#[derive(Default)]
struct Found {
    /// Number of changes in lines that are executed.
    executed: usize,
    /// Number of these that showed.
    shown: usize,
    /// Those that did not show and are not proved to have no effect.
    missed: Vec<String>,
}

/// Changes `count` executed lines of each kernel.
fn seeded(count: usize, seed: u64) -> Found {
    let mut found = Found::default();
    let only = std::env::var("PTX_DRIVER_KERNELS").unwrap_or_default();
    let gpu = emulated();
    let targets = targets(&gpu).into_iter();
    for (entry, trials) in targets.filter(|(entry, _)| entry.contains(&only)) {
        let mut rng = Rng(seed);
        let (module, text) = module_with(entry);
        let lines: Vec<&str> = text.lines().collect();
        for trial in &trials {
            let right = trial.run(&gpu);
            right.unwrap_or_else(|wrong| panic!("{trial:?} as it is: {wrong}"));
        }
        let tried = |text: String| {
            outcome(module, text, |gpu| {
                trials.iter().try_for_each(|one| one.run(gpu))
            })
        };
        let (begin, end) = body(&lines, entry);
        let proved = equivalents(&lines, entry);
        let of = |at: usize, needle: &str| {
            let line = lines[at].trim_start().trim_start_matches("@%p");
            line.contains(needle)
        };
        // The kinds of change that apply to the kernel.
        let mut kinds: Vec<_> = CHANGES
            .iter()
            .map(|&(needle, from, to)| {
                let places: Vec<usize> = (begin..end).filter(|&at| of(at, needle)).collect();
                (places, from, to)
            })
            .filter(|(places, ..)| !places.is_empty())
            .collect();
        let mut executed = 0;
        while executed < count && !kinds.is_empty() {
            let kind = rng.below(kinds.len());
            let (places, from, to) = &mut kinds[kind];
            let at = places.swap_remove(rng.below(places.len()));
            let (from, to) = (*from, *to);
            if places.is_empty() {
                kinds.swap_remove(kind);
            }
            let with = |line: String| {
                let mut changed = lines.clone();
                changed[at] = &line;
                changed.join("\n")
            };
            let what = format!("{entry} line {} `{}`: {to}", at + 1, lines[at].trim());
            let shown = match tried(with(lines[at].replacen(from, to, 1))) {
                Outcome::Wrong => "wrong results".to_owned(),
                Outcome::Reported(report) => report.chars().take(120).collect(),
                Outcome::Right => {
                    // Check that the line is executed at all.
                    let trap = tried(with(format!("trap; {}", lines[at])));
                    if matches!(trap, Outcome::Right) {
                        continue;
                    }
                    executed += 1;
                    match proved.iter().find(|one| one.0 == at) {
                        Some((_, reason)) => eprintln!("change of nothing: {what}: {reason}"),
                        None => {
                            eprintln!("change not seen: {what}");
                            found.missed.push(what);
                        }
                    }
                    continue;
                }
            };
            (executed, found.shown) = (executed + 1, found.shown + 1);
            eprintln!("change seen: {what}: {}", shown.replace('\n', " "));
        }
        found.executed += executed;
    }
    found
}

/// Changes that have no effect, with the reason: a kernel, and some of its lines, of which the one after `>` is
/// changed. Registers and labels without a number match any, so that most proofs still match after a new compilation. A
/// proof that matches no place or several is not used and must be checked again.
const PROVED: [(&str, &[&str], &str); 13] = [
    (
        "decode_8x32_d64_bf16",
        &[
            "> setp.gt.u32 %p, %r, 15;",
            "add.s32 %r, %r, -15;",
            "selp.b32 %r, %r, %r, %p;",
            "add.s32 %r, %r, -1;",
            "setp.ne.b32 %p, %r, 0;",
        ],
        "the first units are announced from slot 1, and a run has four at most: the next slot is never 15",
    ),
    (
        "decode_64x128_d64_bf16",
        &["> setp.ge.u32 %p600, %r1115, %r1144;"],
        "without a window keys begin at a multiple of 8, and never with the second of a pair",
    ),
    (
        "decode_64x128_d64_bf16",
        &["> setp.gt.u32 %p360, %r792, %r23;"],
        "rows of a run with a window or a mask are all the tile has: the one behind them is nobody's",
    ),
    (
        "mla_64x32_bf16",
        &["> setp.eq.b32 %p, %r, -1;", "setp.eq.b32 %p, %r, -1;"],
        "of items whose rows are not listed: decodes list theirs",
    ),
    (
        "sm80_decode_16x32_d64_bf16",
        &["> setp.ge.u32 %p88, %r697, %r371;"],
        "keys that the loop loads ahead lie two blocks behind the unit's first",
    ),
    (
        "sm80_pod_128x128_d64_bf16",
        &["add.s32 %r, %r, 1;", "> setp.lt.s32 %p, %r, %r;"],
        "x + 1 < x says that the sum wrapped, and so does x + 1 ≤ x",
    ),
    (
        "merge_few_bf16",
        &["> setp.gt.u32 %p, %r, %r;", "and.pred %p, %p, %p;"],
        "a lane whose slots end where its section begins has loaded none, and no group of none is pushed",
    ),
    (
        "merge_few_bf16",
        &["> sub.s32 %r, %r, %r;", "setp.lt.u32 %p, %r, 5;"],
        "groups without a slot are pushed: states that saw no key, which add zeros",
    ),
    (
        "append_paged_kv_16",
        &["> setp.eq.b32 %p, %r, 0;"],
        "blocks of the one row take the keys, those of the other the values: whichever it is",
    ),
    (
        "append_quantised_bf16",
        &["mov.u32 %r, %ctaid.y;", "> setp.eq.b32 %p, %r, 0;"],
        "blocks of the one row take the keys, those of the other the values: whichever it is",
    ),
    (
        "append_quantised_bf16",
        &["> setp.lt.u32 %p, %r, 8388607;"],
        "a number that is not normal counts as itself, and so does the least that is",
    ),
    (
        "rms_norm_2_bf16",
        &["> setp.ne.b32 %p, %r, 0;"],
        "all lanes of a warp have its sum: any of them may store it",
    ),
    (
        "rms_norm_2_bf16",
        &["> setp.lt.u32 %p, %r, 33;"],
        "blocks are whole warps: never 33 threads",
    ),
];

/// A line with single spaces, and the same with any registers and labels.
fn nameless(line: &str) -> (String, String) {
    let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut any = String::new();
    let mut rest = line.as_str();
    while let Some(at) = rest.find(['%', '$']) {
        let (before, name) = rest.split_at(at);
        let end = name[1..].find(|c: char| !c.is_alphanumeric() && c != '_');
        let (name, behind) = name.split_at(end.map_or(name.len(), |end| end + 1));
        let kind = match name.starts_with('$') {
            true => "$L",
            false => name.trim_end_matches(|c: char| c.is_ascii_digit()),
        };
        any = any + before + kind;
        rest = behind;
    }
    any += rest;
    (line, any)
}

/// Positions in the module of the changed line of a proof.
fn places(lines: &[&str], entry: &str, proof: &[&str]) -> Vec<usize> {
    let (begin, end) = body(lines, entry);
    let is_code = |at: &usize| {
        let line = lines[*at].trim_start();
        !line.is_empty() && !line.starts_with("//")
    };
    let code: Vec<usize> = (begin..end).filter(is_code).collect();
    let forms: Vec<(String, String)> = code.iter().map(|&at| nameless(lines[at])).collect();
    let changed = proof.iter().position(|line| line.starts_with("> "));
    let changed = changed.expect("a proof says which line is changed");
    let is = |(line, any): &(String, String), of: &&str| {
        let of = of.trim_start_matches("> ");
        of == line || of == any
    };
    let found = |at: &usize| {
        forms[*at..]
            .iter()
            .zip(proof)
            .all(|(form, of)| is(form, of))
    };
    let starts = 0..(code.len() + 1).saturating_sub(proof.len());
    starts.filter(found).map(|at| code[at + changed]).collect()
}

/// Lines of a kernel whose change is proved to have no effect, with the reason. Prints the proofs that no longer match.
fn equivalents(lines: &[&str], entry: &str) -> Vec<(usize, &'static str)> {
    let proofs = PROVED.iter().filter(|proof| proof.0 == entry);
    let place = |proof: &(&str, &[&str], &'static str)| match places(lines, entry, proof.1)[..] {
        [at] => Some((at, proof.2)),
        ref other => {
            let count = other.len();
            eprintln!(
                "change unproved: {entry} has {count} places of {:?}",
                proof.1
            );
            None
        }
    };
    proofs.filter_map(place).collect()
}

#[test]
fn a_proof_is_found_under_other_registers() {
    let text = ".visible .entry one(\n)\n{\n\tsetp.gt.u32 \t%p7, %r1, 15;\n\t// begin\n\t@%p7 bra \t$L__BB0_3;\n\tsetp.gt.u32 \t%p8, %r2, 15;\n}\n";
    let lines: Vec<&str> = text.lines().collect();
    let at = |proof: &[&str]| places(&lines, "one", proof);
    assert_eq!(at(&["> setp.gt.u32 %p, %r, 15;", "@%p bra $L;"]), [3]);
    assert_eq!(at(&["> setp.gt.u32 %p8, %r2, 15;"]), [6]);
    assert_eq!(at(&["@%p bra $L;", "> setp.gt.u32 %p, %r, 15;"]), [6]);
    assert_eq!(at(&["> setp.gt.u32 %p, %r, 15;"]), [3, 6]);
    assert_eq!(at(&["> setp.gt.u32 %p, %r, 16;"]), [] as [usize; 0]);
}

/// The full test takes minutes and is not in CI; this one checks that its kernels exist.
#[test]
fn kernels_that_are_changed_are_there() {
    let text = include_str!("../../../../kernels-gpu/static-report.txt");
    let proved = PROVED.iter().map(|proof| proof.0);
    for kernel in ALONE.into_iter().chain(proved) {
        let is = |line: &str| line.split_whitespace().nth(1) == Some(kernel);
        assert!(text.lines().any(is), "no kernel is called {kernel}");
    }
}

#[test]
#[ignore = "takes minutes: each change is a module of its own"]
fn changes_of_the_kernels_show() {
    let number = |name| std::env::var(name).ok()?.parse().ok();
    let count = number("TANDEM_MUTANTS").unwrap_or(3);
    let seed = number("TANDEM_SEED").unwrap_or(1);
    let test = "mutants::changes_of_the_kernels_show";
    let Some(text) = child(test, "schedule=late seed=1 limit=20") else {
        let found = seeded(count as usize, seed);
        eprintln!("changes: {} of {} show", found.shown, found.executed);
        assert!(found.executed >= count as usize, "{}", found.executed);
        // Not all remaining changes are proved to have no effect: see the guide.
        let missed = found.missed.len();
        assert!(missed * 10 <= found.executed * 3, "{:#?}", found.missed);
        return;
    };
    for line in text.lines().filter(|line| line.starts_with("change")) {
        println!("{line}");
    }
}
