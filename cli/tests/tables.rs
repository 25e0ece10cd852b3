//! Tables, letter by letter.

mod common;
#[path = "common/results.rs"]
mod results;

use expect_test::expect_file;
use tandem_cli::{
    bench,
    compare::{self, Verdict},
};

#[test]
fn results_as_a_table() {
    let mut file = results::results(4);
    file.options = vec!["--packing off".to_owned()];
    let last = &mut file.results[3];
    (last.flushed, last.warm) = (None, None);
    last.skipped = Some("needs 12.0 GB of 4.0".to_owned());
    last.case = "a case".to_owned();
    let text = bench::render(&file);
    assert!(
        text.lines().all(|line| line.chars().count() < 100),
        "{text}"
    );
    expect_file!["snapshots/bench.txt"].assert_eq(&text);
}

#[test]
fn a_comparison_marks_what_is_not_noise() {
    let a = results::results(4);
    let mut b = a.clone();
    b.program = "tandem 0.2.0".to_owned();
    // Faster, slower, the same within noise, and gone.
    for (index, factor) in [(0, 0.8), (1, 1.3), (2, 1.005)] {
        let times = b.results[index].flushed.as_mut().unwrap();
        times.median_us *= factor;
    }
    b.results.truncate(3);
    let comparison = compare::compare(&a, &b).unwrap();
    let text = compare::render(&comparison, &a, &b);
    assert_eq!(comparison.count(Verdict::Slower), 1);
    assert_eq!(comparison.lost.len(), 1, "{:?}", comparison.lost);
    assert!(
        text.lines().all(|line| line.chars().count() < 100),
        "{text}"
    );
    expect_file!["snapshots/compare.txt"].assert_eq(&text);

    b.results.clear();
    assert!(compare::compare(&a, &b).is_err(), "nothing in common");
}

/// Times with flushed caches say nothing beside times with warm ones.
#[test]
fn like_is_compared_with_like() {
    let a = results::results(3);
    let mut b = a.clone();
    b.results[0].flushed = None;
    b.results[1].warm = None;
    (b.results[2].flushed, b.results[2].warm) = (None, None);
    let comparison = compare::compare(&a, &b).unwrap();
    assert_eq!(comparison.lost.len(), 1, "{:?}", comparison.lost);
    assert_eq!(comparison.cases.len(), 2);
    assert_eq!(comparison.count(Verdict::WithinNoise), 2);
}

#[test]
fn peers_are_compared_with_one_implementation() {
    let mut a = results::results(2);
    let mut b = a.clone();
    a.results.remove(0);
    // Both peers ran the case that is left, and one that is not.
    b.results[0].case = b.results[1].case.clone();
    b.results.push(results::results(3).results.remove(2));
    let text = compare::render(&compare::compare(&a, &b).unwrap(), &a, &b);
    assert!(text.contains("2 cases in common"), "{text}");
    assert!(
        text.contains("[peer]") && text.contains("[tandem]"),
        "{text}"
    );
}

#[test]
fn cases_of_one_name_are_compared_in_their_order() {
    let mut a = results::results(3);
    a.results.remove(0);
    a.results[1].case = a.results[0].case.clone();
    let text = compare::render(&compare::compare(&a, &a).unwrap(), &a, &a);
    assert!(
        text.contains("2 cases in common: geometric mean of B/A 1.000; 0 faster"),
        "{text}"
    );
}

#[test]
fn files_come_back_as_they_went() {
    let file = results::results(5);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("results.json");
    std::fs::write(&path, file.to_json()).unwrap();
    assert_eq!(bench::ResultFile::load(&path).unwrap(), file);
    let zero = file
        .to_json()
        .replacen("\"median_us\": 9.0", "\"median_us\": 0", 1);
    std::fs::write(&path, zero).unwrap();
    let error = bench::ResultFile::load(&path).unwrap_err().to_string();
    assert!(
        error.contains("results[1].plan.median_us: 0 is not a positive number"),
        "{error}"
    );
    std::fs::write(&path, file.to_json().replace("tandem-results-1", "other")).unwrap();
    let error = bench::ResultFile::load(&path).unwrap_err().to_string();
    assert!(error.contains("the format is \"other\""), "{error}");
}

#[test]
fn few_runs_tell_nothing() {
    let a = results::results(2);
    let mut b = a.clone();
    for result in &mut b.results {
        let times = result.flushed.as_mut().unwrap();
        (times.median_us, times.runs) = (3.0 * times.median_us, 6);
    }
    let comparison = compare::compare(&a, &b).unwrap();
    assert_eq!(comparison.count(Verdict::TooFewRuns), 2);
    let text = compare::render(&comparison, &a, &b);
    assert!(
        text.contains("3.000  6 runs")
            && text.contains("0 slower")
            && text.contains("2 cases with too few runs"),
        "{text}"
    );
    b.results[0].flushed.as_mut().unwrap().runs = 7;
    let comparison = compare::compare(&a, &b).unwrap();
    assert_eq!(comparison.count(Verdict::Slower), 1);
}

/// A check that could not judge every case has not passed.
#[test]
fn a_check_fails_if_a_case_has_too_few_runs() {
    let directory = tempfile::tempdir().unwrap();
    let a = results::results(2);
    let mut b = a.clone();
    b.results[0].flushed.as_mut().unwrap().runs = 6;
    for (name, file) in [("a.json", &a), ("b.json", &b)] {
        std::fs::write(directory.path().join(name), file.to_json()).unwrap();
    }
    let compared = |arguments: &[&str]| common::run(directory.path(), arguments);
    let said = compared(&["compare", "--check", "a.json", "b.json"]);
    assert_eq!(said.code, 1, "{}", said.stdout);
    assert!(
        said.stderr.contains("1 case of 2 has fewer than 7 runs")
            && said.stderr.contains("--seconds"),
        "{}",
        said.stderr
    );
    assert_eq!(compared(&["compare", "a.json", "b.json"]).code, 0);
    let same = compared(&["compare", "--check", "a.json", "a.json"]);
    assert_eq!(same.code, 0, "{}", same.stderr);
}
