//! Small changes of what kernels compute, one at a time: a comparison that is off by one, a sign, a shift, a maximum that
//! is a minimum. Nearly all that are executed must show, in results or in a report.

use crate::{
    child,
    faults::{Outcome, TARGETS, body, module_with, outcome},
    scenarios::scenarios,
};

/// Which lines, and what becomes of them.
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

/// Counts of changes that were executed, and of those that showed.
fn seeded() -> (usize, usize) {
    let (mut executed, mut shown) = (0, 0);
    for (name, entry) in TARGETS {
        let (module, text) = module_with(entry);
        let lines: Vec<&str> = text.lines().collect();
        let mut all = scenarios().into_iter();
        let scenario = all.find(|one| one.name == name).expect("a scenario");
        let (begin, end) = body(&lines, entry);
        for (needle, from, to) in CHANGES {
            let of = |line: &str| line.trim_start().trim_start_matches("@%p").contains(needle);
            let places: Vec<usize> = (begin..end).filter(|&at| of(lines[at])).collect();
            let mut chosen: Vec<usize> = [1, 3, 5]
                .into_iter()
                .filter_map(|sixth| places.get(places.len() * sixth / 6).copied())
                .collect();
            chosen.dedup();
            for at in chosen {
                let with = |line: String| {
                    let mut changed = lines.clone();
                    changed[at] = &line;
                    changed.join("\n")
                };
                let what = format!("{entry} line {} `{}`", at + 1, lines[at].trim());
                let changed = outcome(module, with(lines[at].replacen(from, to, 1)), &scenario);
                match changed {
                    Outcome::Wrong | Outcome::Reported(_) => {
                        (executed, shown) = (executed + 1, shown + 1);
                    }
                    Outcome::Right => {
                        // Was it executed at all?
                        let trap = outcome(module, with(format!("trap; {}", lines[at])), &scenario);
                        if !matches!(trap, Outcome::Right) {
                            executed += 1;
                            eprintln!("change not seen: {what}: {to}");
                        }
                    }
                }
            }
        }
    }
    (executed, shown)
}

#[test]
#[ignore = "takes minutes: each change is a module of its own"]
fn changes_of_the_kernels_show() {
    let Some(text) = child(
        "mutants::changes_of_the_kernels_show",
        "schedule=late seed=1 limit=20",
    ) else {
        let (executed, shown) = seeded();
        eprintln!("changes: {shown} of {executed} show");
        assert!(executed >= 60, "{executed}");
        assert!(shown * 100 >= executed * 75, "{shown} of {executed}");
        return;
    };
    for line in text.lines().filter(|line| line.starts_with("change")) {
        println!("{line}");
    }
}
