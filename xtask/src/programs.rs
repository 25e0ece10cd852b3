//! Runs test programs side by side. Cargo runs one after the other, and many keep only one processor busy: the emulated GPU
//! of a process runs one launch at a time, and the last test of a program runs alone.

use std::{
    env,
    io::{self, Write},
    path::PathBuf,
    process::{Command, Stdio},
    sync::Mutex,
    thread,
    time::Instant,
};

use serde_json::Value;

use crate::{
    Error,
    process::{cargo, output, target_dir},
};

/// Programs that take long, the longest first: the last one to start may run alone.
const LONG: [&str; 7] = [
    "emulated",
    "ptx",
    "kernels",
    "cpu",
    "build",
    "hostile_calls",
    "plan",
];

/// Each has several threads, and some need much memory.
const MOST_SIDE_BY_SIDE: usize = 4;

/// A program that cargo has compiled from a target's tests, or the tests in documentation.
struct Program {
    shown: String,
    /// Place among the programs that take long.
    rank: usize,
    command: Command,
}

/// Compiles what `cargo test` with these arguments would run, and runs it. The output of a program is shown when it ends.
pub fn run(test: &[&str]) -> Result<(), Error> {
    let mut programs = compile(test)?;
    let mut documented = cargo();
    documented.args(test).arg("--doc");
    // Before the others that are short: it takes longer than most.
    programs.insert(
        0,
        Program {
            shown: "tests in documentation".into(),
            rank: LONG.len(),
            command: documented,
        },
    );
    programs.sort_by_key(|program| program.rank);
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let ran = Mutex::new(Ran::default());
    let count = programs.len();
    let waiting = Mutex::new(programs.into_iter());
    let one_after_the_other = || {
        // The guard must not live while the program runs.
        let next = || waiting.lock().expect("no panic").next();
        while let Some(mut program) = next() {
            let result = program.run();
            let mut ran = ran.lock().expect("no panic");
            match result {
                Ok(text) => ran.count(&text),
                Err(error) => ran.failed.push(format!("{}: {error}", program.shown)),
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..processors.min(MOST_SIDE_BY_SIDE) {
            scope.spawn(one_after_the_other);
        }
    });
    let ran = ran.into_inner().expect("no panic");
    if !ran.failed.is_empty() {
        return Err(format!("tests failed:\n  {}", ran.failed.join("\n  ")).into());
    }
    let [passed, ignored] = [ran.passed, ran.ignored];
    println!("tests: {passed} passed, {ignored} ignored, in {count} programs");
    Ok(())
}

/// What came out of the programs that have ended.
#[derive(Default)]
struct Ran {
    failed: Vec<String>,
    passed: u32,
    ignored: u32,
}

impl Ran {
    /// Adds the numbers of lines such as `test result: ok. 3 passed; 0 failed; 1 ignored; ...`.
    fn count(&mut self, text: &str) {
        let results = text
            .lines()
            .filter(|line| line.starts_with("test result: "));
        for result in results {
            let number = |what| {
                let before = result.split_once(what)?.0;
                before.split_whitespace().next_back()?.parse::<u32>().ok()
            };
            self.passed += number(" passed").unwrap_or(0);
            self.ignored += number(" ignored").unwrap_or(0);
        }
    }
}

impl Program {
    /// Returns the output, which is also shown.
    fn run(&mut self) -> Result<String, Error> {
        let begin = Instant::now();
        println!("     Starting {}", self.shown);
        let run = self.command.stdin(Stdio::null()).output()?;
        let took = begin.elapsed().as_secs_f64();
        let text = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
        // One write, so that other programs' output does not come in between.
        let shown = format!("     Running {}, {took:.1} s\n{text}", self.shown);
        io::stdout().lock().write_all(shown.as_bytes())?;
        match run.status.success() {
            true => Ok(text.into_owned()),
            false => Err(run.status.to_string().into()),
        }
    }
}

/// Compiles the tests. Returns the programs, ready to run as cargo would run them.
fn compile(test: &[&str]) -> Result<Vec<Program>, Error> {
    let mut command = cargo();
    command
        .args(test)
        .args(["--no-run", "--message-format=json-render-diagnostics"]);
    let messages = output(&mut command)?;
    // Programs that link against the compiler's libraries, or against libraries of the workspace, find them there. As with cargo, the
    // caller's folders are behind these.
    let libraries = [
        target_dir()?.join("debug/deps"),
        target_dir()?.join("debug"),
        PathBuf::from(output(Command::new("rustc").arg("--print=target-libdir"))?.trim()),
    ];
    let given = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let given = env::split_paths(&given).filter(|folder| !folder.as_os_str().is_empty());
    let libraries = env::join_paths(libraries.into_iter().chain(given))?;
    let mut programs = Vec::new();
    for message in messages.lines() {
        let message: Value = serde_json::from_str(message)?;
        if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
            continue;
        }
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let (Some(executable), Some(manifest)) = (
            text(&message["executable"]),
            text(&message["manifest_path"]),
        ) else {
            continue;
        };
        let manifest = PathBuf::from(manifest);
        let folder = manifest.parent().ok_or("a manifest without a folder")?;
        let target = &message["target"];
        let source = text(&target["src_path"]).ok_or("a target without a source")?;
        let mut command = Command::new(&executable);
        command
            .current_dir(folder)
            .env("CARGO_MANIFEST_DIR", folder)
            .env("LD_LIBRARY_PATH", &libraries);
        programs.push(Program {
            shown: source,
            rank: LONG
                .iter()
                .position(|&long| target["name"] == long)
                .unwrap_or(LONG.len()),
            command,
        });
    }
    match programs.is_empty() {
        true => Err("cargo compiled no tests".into()),
        false => Ok(programs),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_all_programs_are_added() {
        let mut ran = Ran::default();
        ran.count("\nrunning 3 tests\ntest a ... ok\n\ntest result: ok. 2 passed; 0 failed; 1 ignored; 0 measured\n");
        ran.count("test result: ok. 40 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out\n\nall doctests ran in 1 s");
        assert_eq!((ran.passed, ran.ignored), (42, 1));
    }
}
