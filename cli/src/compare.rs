//! `tandem compare`: compares two result files, case by case.

use std::{
    collections::{BTreeSet, HashMap},
    path::PathBuf,
};

use serde::Serialize;

use crate::{
    Failure,
    bench::{CaseResult, ResultFile, Stats},
    output::{self, Files, Force},
    table::{Table, WIDTH, counted, digits, shorten, visible},
};

const EXAMPLES: &str = "\
Examples:
  tandem compare before.json after.json
  tandem compare tandem.json peers.json           # each peer beside tandem-attn
  tandem compare --base tandem both.json both.json
  tandem compare --check before.json after.json   # exit code 1 where something became slower";

/// Compare two runs of the benchmark and mark differences that are not noise.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The first run
    #[arg(value_name = "A.json")]
    a: PathBuf,
    /// The second run
    #[arg(value_name = "B.json")]
    b: PathBuf,
    /// Use only this implementation of A
    #[arg(long, value_name = "IMPLEMENTATION")]
    base: Option<String>,
    /// Fail if B is significantly slower than A, has no times of a case that A has, or a case has too few runs to tell
    #[arg(long)]
    check: bool,
    /// Write the comparison as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    force: Force,
}

/// Smaller differences are not significant, however small the noise, because clock frequencies drift.
const LEAST: f64 = 0.01;

/// Runs the subcommand.
///
/// # Errors
/// Wrong input; with `--check`, [`Failure::Wrong`] if B is slower, or cases are missing or have too few runs.
pub fn run(args: &Args) -> Result<(), Failure> {
    let files = Files::new().reads([&args.a, &args.b]).writes(&args.json);
    files.check(args.force)?;
    let (mut a, b) = (ResultFile::load(&args.a)?, ResultFile::load(&args.b)?);
    if let Some(base) = &args.base {
        let there: BTreeSet<String> = a
            .results
            .iter()
            .map(|result| result.implementation.clone())
            .collect();
        a.results.retain(|result| result.implementation == *base);
        if a.results.is_empty() {
            return Err(Failure::Input(format!(
                "{} has no results of {base:?}: there are {}",
                args.a.display(),
                there.into_iter().collect::<Vec<_>>().join(", ")
            )));
        }
    }
    let comparison = compare(&a, &b)?;
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&comparison).expect("plain data") + "\n";
        output::write_file(path, json.as_bytes())?;
    }
    output::print(&render(&comparison, &a, &b));
    let slower = comparison.count(Verdict::Slower);
    let unknown = comparison.count(Verdict::TooFewRuns);
    match (args.check, slower, unknown) {
        (true, 1.., _) => Err(Failure::Wrong(format!(
            "{} significantly slower in {}",
            counted(slower, "case"),
            args.b.display()
        ))),
        // A check that could not compare everything has not passed.
        (true, 0, _) if !comparison.lost.is_empty() => Err(Failure::Wrong(format!(
            "{} of {} without times in {}: measure again",
            counted(comparison.lost.len(), "case"),
            args.a.display(),
            args.b.display()
        ))),
        (true, 0, 1..) => Err(Failure::Wrong(format!(
            "{} of {} {} fewer than {} runs: measure again with more --seconds",
            counted(unknown, "case"),
            comparison.cases.len(),
            if unknown == 1 { "has" } else { "have" },
            Stats::TELLING
        ))),
        _ => Ok(()),
    }
}

/// Result of comparing the times of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Significantly less in B.
    Faster,
    /// Significantly more in B.
    Slower,
    /// A difference that noise may explain.
    WithinNoise,
    /// Too few runs to decide.
    TooFewRuns,
}

/// A case in both files.
#[derive(Clone, Debug, Serialize)]
pub struct ComparedCase {
    /// Name of the case, with the implementation if several are compared.
    pub name: String,
    /// The times in A.
    pub a: Stats,
    /// The times in B.
    pub b: Stats,
    /// Median in B divided by that in A.
    pub ratio: f64,
    /// Result of the comparison.
    pub verdict: Verdict,
}

/// Comparison of two files, case by case.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// `tandem-comparison-1`.
    pub format: &'static str,
    /// Cases that are in both files, in the order of A.
    pub cases: Vec<ComparedCase>,
    /// Names of the cases with times in A for which B has none that were measured in the same way.
    pub lost: Vec<String>,
    /// Geometric mean of the ratios.
    pub geometric_mean: f64,
}

impl Comparison {
    /// Number of cases with a verdict.
    #[must_use]
    pub fn count(&self, verdict: Verdict) -> usize {
        let cases = self.cases.iter();
        cases.filter(|case| case.verdict == verdict).count()
    }
}

/// Compares the cases that are in both files.
///
/// # Errors
/// [`Failure::Input`] if they have no measured case in common.
pub fn compare(a: &ResultFile, b: &ResultFile) -> Result<Comparison, Failure> {
    let pairs = pairs(a, b);
    let kept: Vec<&CaseResult> = pairs
        .iter()
        .filter(|pair| pair.times().is_some())
        .map(|pair| pair.a)
        .collect();
    let measured = |result: &CaseResult| result.flushed.is_some() || result.warm.is_some();
    let is_lost = |a: &&CaseResult| {
        let mut kept = kept.iter();
        measured(a) && !kept.any(|kept| std::ptr::eq(*kept, *a))
    };
    let lost = a.results.iter().filter(is_lost);
    let lost = lost.map(|result| match by_case(a) {
        true => result.case.clone(),
        false => format!("{} [{}]", result.case, result.implementation),
    });
    let lost = lost.collect();
    let cases: Vec<ComparedCase> = pairs
        .into_iter()
        .filter_map(|pair| {
            let (from, to) = pair.times()?;
            let ratio = to.median_us / from.median_us;
            Some(ComparedCase {
                name: pair.name,
                a: *from,
                b: *to,
                ratio,
                verdict: verdict(from, to),
            })
        })
        .collect();
    if cases.is_empty() {
        return Err(Failure::Input(
            "the files have no measured case in common: cases are matched by name".to_owned(),
        ));
    }
    let logs: f64 = cases.iter().map(|case| case.ratio.ln()).sum();
    Ok(Comparison {
        format: "tandem-comparison-1",
        geometric_mean: (logs / cases.len() as f64).exp(),
        cases,
        lost,
    })
}

/// The comparison as a table, below a heading that names the two runs.
#[must_use]
pub fn render(comparison: &Comparison, a: &ResultFile, b: &ResultFile) -> String {
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
    for case in &comparison.cases {
        let mark = match case.verdict {
            Verdict::Faster => "faster".to_owned(),
            Verdict::Slower => "SLOWER".to_owned(),
            Verdict::WithinNoise => String::new(),
            Verdict::TooFewRuns => counted(case.a.runs.min(case.b.runs) as usize, "run"),
        };
        table.push([
            case.name.clone(),
            digits(case.a.median_us),
            digits(100.0 * case.a.spread()),
            digits(case.b.median_us),
            digits(100.0 * case.b.spread()),
            format!("{:.3}", case.ratio),
            mark,
        ]);
    }
    text += &format!("\n{}", table.render());
    text += &format!(
        "\n{} in common: geometric mean of B/A {:.3}; {} faster, {} slower, {} within noise\n",
        counted(comparison.cases.len(), "case"),
        comparison.geometric_mean,
        comparison.count(Verdict::Faster),
        comparison.count(Verdict::Slower),
        comparison.count(Verdict::WithinNoise),
    );
    let few = comparison.count(Verdict::TooFewRuns);
    if few > 0 {
        text += &format!(
            "{} with too few runs to tell: {} are needed on both sides, more --seconds give more\n",
            counted(few, "case"),
            Stats::TELLING
        );
    }
    if !comparison.lost.is_empty() {
        let lost = counted(comparison.lost.len(), "case");
        text += &format!("{lost} of A without times in B:\n");
        for name in &comparison.lost {
            text += &format!("  {}\n", shorten(&visible(name, false), WIDTH - 2));
        }
    }
    text
}

/// The same case in both files.
struct Pair<'a> {
    name: String,
    a: &'a CaseResult,
    b: &'a CaseResult,
}

impl<'a> Pair<'a> {
    /// Times measured in the same way in both files: with flushed caches if possible, else with warm ones.
    fn times(&self) -> Option<(&'a Stats, &'a Stats)> {
        let both = |of: fn(&CaseResult) -> Option<&Stats>| Some((of(self.a)?, of(self.b)?));
        both(|result| result.flushed.as_ref()).or_else(|| both(|result| result.warm.as_ref()))
    }
}

/// Whether a file has results of one implementation only.
fn by_case(file: &ResultFile) -> bool {
    let mut results = file.results.iter().map(|result| &result.implementation);
    let first = results.next();
    results.all(|other| Some(other) == first)
}

/// Pairs results by case and implementation. If `a` has only one implementation, it is paired with all implementations
/// in `b`. Several results of one name are paired in their order.
fn pairs<'a>(a: &'a ResultFile, b: &'a ResultFile) -> Vec<Pair<'a>> {
    let of_one = by_case(a);
    let key = |(repeat, result): (usize, &'a CaseResult)| {
        let implementation = if of_one { "" } else { &result.implementation };
        (result.case.as_str(), implementation, repeat)
    };
    let mut of_b: HashMap<_, Vec<_>> = HashMap::new();
    for result in repeats(b) {
        of_b.entry(key(result)).or_default().push(result.1);
    }
    let unnamed = of_one && by_case(b);
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

/// Each result, with the number of earlier results of the same name and implementation.
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

/// Decides whether two medians differ by more than noise, which is the case if their notches do not overlap.
fn verdict(a: &Stats, b: &Stats) -> Verdict {
    if a.runs.min(b.runs) < Stats::TELLING {
        return Verdict::TooFewRuns;
    }
    let difference = (a.median_us - b.median_us).abs();
    match difference > a.notch_us() + b.notch_us() && difference > LEAST * a.median_us {
        false => Verdict::WithinNoise,
        true if b.median_us < a.median_us => Verdict::Faster,
        true => Verdict::Slower,
    }
}
