//! `tandem compare`: two files of results, case by case.

use std::{collections::HashMap, path::PathBuf};

use crate::{
    Failure,
    bench::{CaseResult, ResultFile, Stats},
    output,
    table::{Table, counted, digits},
};

const EXAMPLES: &str = "\
Examples:
  tandem compare before.json after.json
  tandem compare tandem.json peers.json           # each peer beside tandem-attn
  tandem compare --base tandem both.json both.json
  tandem compare --check before.json after.json   # exit code 1 where something became slower";

/// Compare two runs of the benchmark, and mark differences that are not noise.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The first run
    #[arg(value_name = "A.json")]
    a: PathBuf,
    /// The second run
    #[arg(value_name = "B.json")]
    b: PathBuf,
    /// Take this implementation alone from A
    #[arg(long, value_name = "IMPLEMENTATION")]
    base: Option<String>,
    /// Fail where B is significantly slower than A
    #[arg(long)]
    check: bool,
}

/// Smaller differences are not called significant, however small the noise: clocks drift.
const LEAST: f64 = 0.01;

/// Runs it.
///
/// # Errors
/// Wrong input; with `--check`, [`Failure::Wrong`] where B is slower.
pub fn run(args: &Args) -> Result<(), Failure> {
    let (mut a, b) = (ResultFile::load(&args.a)?, ResultFile::load(&args.b)?);
    if let Some(base) = &args.base {
        a.results.retain(|result| result.implementation == *base);
        if a.results.is_empty() {
            let file = args.a.display();
            return Err(Failure::Input(format!("{file} has no results of {base:?}")));
        }
    }
    let (text, slower) = compare(&a, &b)?;
    output::print(&text);
    if args.check && slower > 0 {
        return Err(Failure::Wrong(format!(
            "{} significantly slower in {}",
            counted(slower, "case"),
            args.b.display()
        )));
    }
    Ok(())
}

/// The report, and how many cases are significantly slower in `b`.
///
/// # Errors
/// [`Failure::Input`] where the files have no case in common.
pub fn compare(a: &ResultFile, b: &ResultFile) -> Result<(String, usize), Failure> {
    let mut text = String::new();
    for (name, file) in [("A", a), ("B", b)] {
        text += &format!(
            "{name}: {}, {} ({}), {}",
            file.program, file.machine.name, file.machine.details, file.date
        );
        if !file.options.is_empty() {
            text += &format!(", {}", file.options.join(" "));
        }
        text.push('\n');
    }
    let machine = |file: &ResultFile| (file.machine.backend.clone(), file.machine.name.clone());
    if machine(a) != machine(b) {
        text += "These are different machines: the ratios say nothing about the programs alone.\n";
    }
    let mut table = Table::new(["case", "A µs", "±%", "B µs", "±%", "B/A", ""]);
    let (mut log_sum, mut common, mut faster, mut slower) = (0.0, 0, 0, 0);
    for pair in pairs(a, b) {
        let (Some(from), Some(to)) = (pair.a.times(), pair.b.times()) else {
            continue;
        };
        let ratio = to.median_us / from.median_us;
        let mark = match differ(from, to) {
            false => "",
            true if ratio < 1.0 => {
                faster += 1;
                "faster"
            }
            true => {
                slower += 1;
                "SLOWER"
            }
        };
        log_sum += ratio.ln();
        common += 1;
        table.push([
            pair.name,
            digits(from.median_us),
            digits(100.0 * from.spread()),
            digits(to.median_us),
            digits(100.0 * to.spread()),
            format!("{ratio:.3}"),
            mark.to_owned(),
        ]);
    }
    if common == 0 {
        return Err(Failure::Input(
            "the files have no measured case in common: cases are matched by name".to_owned(),
        ));
    }
    text += &format!("\n{}", table.render());
    text += &format!(
        "\n{} in common: geometric mean of B/A {:.3}; {faster} faster, {slower} slower, {} within noise\n",
        counted(common, "case"),
        (log_sum / common as f64).exp(),
        common - faster - slower
    );
    Ok((text, slower))
}

/// The same case in both files.
struct Pair<'a> {
    name: String,
    a: &'a CaseResult,
    b: &'a CaseResult,
}

/// Matches by case and implementation; where `a` has one implementation alone, with all those of the case.
/// Where a file has several results of one name, the first is matched with the first, and so on.
fn pairs<'a>(a: &'a ResultFile, b: &'a ResultFile) -> Vec<Pair<'a>> {
    let single = |file: &ResultFile| {
        let mut results = file.results.iter().map(|result| &result.implementation);
        let first = results.next();
        results.all(|other| Some(other) == first)
    };
    let by_case = single(a);
    let key = |(repeat, result): (usize, &'a CaseResult)| {
        let implementation = if by_case { "" } else { &result.implementation };
        (result.case.as_str(), implementation, repeat)
    };
    let mut of_b: HashMap<_, Vec<_>> = HashMap::new();
    for result in repeats(b) {
        of_b.entry(key(result)).or_default().push(result.1);
    }
    let unnamed = by_case && single(b);
    let pairs = repeats(a).into_iter().flat_map(|(repeat, a)| {
        let others = of_b.get(&key((repeat, a))).into_iter().flatten();
        others.map(move |b| Pair {
            name: if unnamed {
                a.case.clone()
            } else {
                format!("{} [{}]", a.case, b.implementation)
            },
            a,
            b,
        })
    });
    pairs.collect()
}

/// Each result, and how many of the same name and implementation come before it.
fn repeats(file: &ResultFile) -> Vec<(usize, &CaseResult)> {
    let mut seen: HashMap<(&str, &str), usize> = HashMap::new();
    let results = file.results.iter();
    results
        .map(|result| {
            let of_name = seen
                .entry((&result.case, &result.implementation))
                .or_default();
            *of_name += 1;
            (*of_name - 1, result)
        })
        .collect()
}

/// Whether two medians differ by more than noise: their notches do not touch.
fn differ(a: &Stats, b: &Stats) -> bool {
    let difference = (a.median_us - b.median_us).abs();
    difference > a.notch_us() + b.notch_us() && difference > LEAST * a.median_us
}
