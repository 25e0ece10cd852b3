//! Checks that tests find small faults: each is put into a copy of the workspace, where one of its tests must fail.

use std::{
    collections::BTreeSet,
    fs,
    io::Read,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{
    Error,
    process::{cargo, command, output, run as run_command},
    workspace,
};

const FAULTS: &str = include_str!("../mutations.txt");

/// Tests that take longer than this are considered to hang.
const HANGS: Duration = Duration::from_secs(300);

/// A fault, and the tests that should find it.
#[derive(Debug)]
struct Fault {
    what: String,
    file: String,
    tests: Vec<String>,
    old: String,
    new: String,
}

/// Reads the faults from their file.
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

/// Puts each fault whose text contains `only` into a copy of the last commit, and runs its tests there.
pub fn run(only: &str) -> Result<(), Error> {
    let mut chosen = faults()?;
    chosen.retain(|fault| fault.what.contains(only) || fault.file.contains(only));
    if chosen.is_empty() {
        return Err(format!("no fault has {only:?} in its name or its file").into());
    }
    let copy = checkout()?;
    // A test that fails without a fault proves nothing.
    let all: BTreeSet<&String> = chosen.iter().flat_map(|fault| &fault.tests).collect();
    let all: Vec<String> = all.into_iter().cloned().collect();
    if let Some(failed) = verdict(&build(&copy, &all)?)? {
        return Err(format!("without a fault: {failed}").into());
    }
    let (mut caught, mut missed) = (0, Vec::new());
    for fault in chosen {
        match found_by(&copy, &fault)? {
            Some(test) => {
                println!("found: {}: {test}", fault.what);
                caught += 1;
            }
            None => {
                println!("MISSED: {}", fault.what);
                missed.push(fault.what);
            }
        }
    }
    println!("{caught} of {} faults found", caught + missed.len());
    match missed.is_empty() {
        true => Ok(()),
        false => Err(format!("no test finds: {}", missed.join("; ")).into()),
    }
}

/// The last commit in its own folder, which keeps build results.
fn checkout() -> Result<PathBuf, Error> {
    let copy = workspace().join("target/mutants");
    if copy.exists() {
        let head = output(command("git").args(["rev-parse", "HEAD"]))?;
        let mut checkout = command("git");
        checkout.arg("-C").arg(&copy);
        checkout.args(["checkout", "--quiet", "--force", "--detach", head.trim()]);
        run_command(&mut checkout)?;
    } else {
        let mut add = command("git");
        // Forced: after `cargo clean` the copy is missing and still registered.
        add.args(["worktree", "add", "--quiet", "--detach", "--force"]);
        run_command(add.arg(&copy))?;
    }
    Ok(copy)
}

/// The first test that fails with the fault in the copy. A fault that does not compile is an error.
fn found_by(copy: &Path, fault: &Fault) -> Result<Option<String>, Error> {
    let file = copy.join(&fault.file);
    let text = fs::read_to_string(&file)?;
    let places = text.matches(&fault.old).count();
    if places != 1 {
        return Err(format!("{}: {places} places have the old text", fault.what).into());
    }
    fs::write(&file, text.replace(&fault.old, &fault.new))?;
    let built = build(copy, &fault.tests);
    let found = built.and_then(|programs| verdict(&programs));
    fs::write(&file, text)?;
    found.map_err(|error| format!("{}: {error}", fault.what).into())
}

/// A test program, and the folder to run it in.
struct Program {
    path: PathBuf,
    folder: PathBuf,
}

/// Builds the tests with as little work as possible.
fn build(copy: &Path, tests: &[String]) -> Result<Vec<Program>, Error> {
    let mut build = cargo();
    build.current_dir(copy);
    build.args(["test", "--no-run", "--quiet", "--message-format=json"]);
    build.args(["--package", "tandem-attn", "--package", "tandem-fuzz"]);
    build.args(tests);
    // Faults change one line, so incremental compilation avoids compiling most of the library again.
    build.env("CARGO_INCREMENTAL", "1");
    build.env("CARGO_PROFILE_TEST_DEBUG", "0");
    build.env("CARGO_PROFILE_DEV_DEBUG", "0");
    build.env_remove("CARGO_TARGET_DIR");
    build.env_remove("CARGO_BUILD_TARGET_DIR");
    let built = output(&mut build)?;
    let messages = built.lines().map(serde_json::from_str::<Value>);
    let mut programs = Vec::new();
    for message in messages {
        let message = message?;
        let is_test = message["profile"]["test"] == true;
        let [path, manifest] = ["executable", "manifest_path"].map(|key| message[key].as_str());
        if let (true, Some(path), Some(manifest)) = (is_test, path, manifest) {
            let folder = Path::new(manifest).parent().unwrap_or(copy);
            programs.push(Program {
                path: path.into(),
                folder: folder.into(),
            });
        }
    }
    match programs.is_empty() {
        true => Err(format!("no tests are called {tests:?}").into()),
        false => Ok(programs),
    }
}

/// The output of the first program that fails.
fn verdict(programs: &[Program]) -> Result<Option<String>, Error> {
    for program in programs {
        let name = program.path.file_stem().unwrap_or_default();
        let name = name.to_string_lossy().into_owned();
        let name = name.rsplit_once('-').map_or(&name[..], |(name, _)| name);
        let mut child = Command::new(&program.path)
            .current_dir(&program.folder)
            // Failing inputs need not be shrunk.
            .env("PROPTEST_MAX_SHRINK_ITERS", "0")
            .env("RUST_BACKTRACE", "0")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut said = child.stdout.take().expect("a pipe");
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = said.read_to_end(&mut bytes);
            String::from_utf8_lossy(&bytes).into_owned()
        });
        let start = Instant::now();
        let status = loop {
            match child.try_wait()? {
                Some(status) => break Some(status),
                None if start.elapsed() > HANGS => break None,
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let Some(status) = status else {
            child.kill()?;
            child.wait()?;
            return Ok(Some(format!("{name} hangs")));
        };
        let text = reader.join().expect("it only reads");
        if !status.success() {
            let failed = text.lines().find_map(|line| {
                line.strip_prefix("test ")?
                    .strip_suffix(" ... FAILED")
                    .map(|test| format!("{name}: {test}"))
            });
            return Ok(Some(
                failed.unwrap_or_else(|| format!("{name} ends with {status}")),
            ));
        }
    }
    Ok(None)
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
