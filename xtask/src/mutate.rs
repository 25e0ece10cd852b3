//! Whether tests find small faults: each is put into a copy of the workspace, and one of its tests has to fail.

use std::{fs, path::Path};

use crate::{
    Error,
    process::{cargo, command, output, run as run_command},
    workspace,
};

const FAULTS: &str = include_str!("../mutations.txt");

/// A fault, and the tests that are to find it.
#[derive(Debug)]
struct Fault {
    what: String,
    file: String,
    tests: Vec<String>,
    old: String,
    new: String,
}

/// The faults of the file.
fn faults() -> Result<Vec<Fault>, Error> {
    let blocks = FAULTS.split("\n\n").map(str::trim);
    let blocks = blocks.filter(|block| !block.is_empty() && !block.starts_with('#'));
    let fault = |block: &str| {
        let lines: Vec<&str> = block.lines().collect();
        let [what, file, tests, old, new] = lines[..] else {
            return Err(format!("not five lines:\n{block}"));
        };
        let text = |line: &str, mark| {
            let text = line.strip_prefix(mark);
            text.map(str::to_owned)
                .ok_or(format!("{line}: no {mark:?}"))
        };
        Ok(Fault {
            what: what.into(),
            file: file.into(),
            tests: tests.split_whitespace().map(Into::into).collect(),
            old: text(old, "- ")?,
            new: text(new, "+ ")?,
        })
    };
    Ok(blocks.map(fault).collect::<Result<_, _>>()?)
}

/// Puts each fault whose text has `only` in it into a copy of the last commit, and runs its tests there.
pub fn run(only: &str) -> Result<(), Error> {
    let copy = workspace().join("target/mutants");
    if copy.exists() {
        let mut checkout = command("git");
        checkout
            .arg("-C")
            .arg(&copy)
            .args(["checkout", "--quiet", "--force", "--detach"]);
        let head = output(command("git").args(["rev-parse", "HEAD"]))?;
        run_command(checkout.arg(head.trim()))?;
    } else {
        let mut add = command("git");
        run_command(
            add.args(["worktree", "add", "--quiet", "--detach"])
                .arg(&copy),
        )?;
    }
    let (mut caught, mut missed) = (0, Vec::new());
    for fault in faults()? {
        if !fault.what.contains(only) && !fault.file.contains(only) {
            continue;
        }
        let found = is_found(&copy, &fault)?;
        println!("{}: {}", if found { "found" } else { "MISSED" }, fault.what);
        match found {
            true => caught += 1,
            false => missed.push(fault.what),
        }
    }
    println!("{caught} of {} faults found", caught + missed.len());
    match missed.is_empty() {
        true => Ok(()),
        false => Err(format!("no test finds: {}", missed.join("; ")).into()),
    }
}

/// Whether a test fails with the fault in the copy. What does not compile is no fault.
fn is_found(copy: &Path, fault: &Fault) -> Result<bool, Error> {
    let file = copy.join(&fault.file);
    let text = fs::read_to_string(&file)?;
    let places = text.matches(&fault.old).count();
    if places != 1 {
        return Err(format!("{}: {places} places have the old text", fault.what).into());
    }
    let test = |extra: &[&str]| {
        let mut test = cargo();
        test.current_dir(copy)
            .args(["test", "--quiet", "--package", "tandem-attn"]);
        test.args(["--package", "tandem-fuzz", "--features"]);
        test.arg("tandem-attn/cust,tandem-attn/cudarc,tandem-attn/emulator");
        // Of the tests that are named, those of the package by their targets.
        let named = fault
            .tests
            .iter()
            .filter(|name| !["--package", "tandem-fuzz"].contains(&name.as_str()));
        test.args(named);
        if fault.tests.iter().any(|name| name == "tandem-fuzz") {
            test.args(["--bin", "tandem-fuzz"]);
        }
        test.args(extra);
        test
    };
    fs::write(&file, text.replace(&fault.old, &fault.new))?;
    let built = test(&["--no-run"]).status();
    let passed = test(&[])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status();
    fs::write(&file, text)?;
    match built?.success() {
        true => Ok(!passed?.success()),
        false => Err(format!("{} does not compile", fault.what).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fault_has_its_place() {
        let faults = faults().unwrap();
        assert!(faults.len() >= 30, "{}", faults.len());
        for fault in faults {
            let text = fs::read_to_string(workspace().join(&fault.file)).unwrap();
            assert_eq!(text.matches(&fault.old).count(), 1, "{}", fault.what);
        }
    }
}
