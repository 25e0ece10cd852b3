//! Some 240 calls that a newcomer, a script or an attacker makes, under limits of memory and time: no panic, no abort,
//! no failure without a word, no input lost, nothing temporary left behind.
#![cfg(unix)]

mod common;
#[path = "hostile/files.rs"]
mod inputs;

use std::{
    collections::BTreeMap,
    path::Path,
    process::{Command, Output, Stdio},
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

/// A line each: the exit code, and what follows the name of the command, as a shell takes it.
const CALLS: &str = include_str!("hostile/calls.txt");

/// Address space, in kilobytes; time of the processor and by the clock, in seconds.
const MEMORY_KB: u64 = 3_000_000;
const CPU_S: u64 = 60;
const CLOCK: Duration = Duration::from_secs(90);

/// Runs a line under the limits.
fn call(directory: &Path, line: &str) -> Output {
    let script =
        format!("ulimit -v {MEMORY_KB}; ulimit -t {CPU_S}; ulimit -c 0; exec \"$TANDEM\" {line}");
    let child = Command::new("sh")
        .args(["-c", &script])
        .current_dir(directory)
        .env("TANDEM", env!("CARGO_BIN_EXE_tandem"))
        // Each thread reserves address space, of which machines of many cores would need more than the limit.
        .env("RAYON_NUM_THREADS", "2")
        .env_remove("RUST_BACKTRACE")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("sh starts");
    let id = child.id().to_string();
    let (done, ended) = mpsc::channel();
    thread::spawn(move || done.send(child.wait_with_output()));
    match ended.recv_timeout(CLOCK) {
        Ok(output) => output.expect("it can be waited for"),
        Err(_) => {
            let _ = Command::new("kill").args(["-KILL", &id]).status();
            panic!("{line}: still running after {CLOCK:?}");
        }
    }
}

/// All files and what is in them.
fn contents(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let names = common::files(directory).into_iter();
    let files = names.filter(|name| directory.join(name).is_file());
    files
        .map(|name| {
            let content = std::fs::read(directory.join(&name)).expect("readable");
            (name, content)
        })
        .collect()
}

fn check(directory: &Path, expected: i32, line: &str) -> Result<(), String> {
    let before = contents(directory);
    let Output {
        status,
        stdout,
        stderr,
    } = call(directory, line);
    let (said, wrong) = (
        String::from_utf8_lossy(&stdout),
        String::from_utf8_lossy(&stderr),
    );
    let fail = |reason: &str| Err(format!("{reason}: tandem {line}\n{wrong}"));
    if status.code() != Some(expected) {
        return fail(&format!("{status} in place of {expected}"));
    }
    for word in [
        "panicked",
        "memory allocation",
        "attempt to",
        "RUST_BACKTRACE",
        "unreachable",
    ] {
        if wrong.contains(word) {
            return fail(word);
        }
    }
    if expected != 0 && wrong.trim().is_empty() {
        return fail("nothing is said");
    }
    if said.contains('\x1b') || wrong.contains('\x1b') {
        return fail("control characters reach the terminal");
    }
    if wrong.len() > 4000 {
        return fail("thousands of letters");
    }
    let after = contents(directory);
    for (name, content) in &before {
        let output = name.starts_with("out");
        if after.get(name) != Some(content) && !output {
            return fail(&format!("{name} was lost"));
        }
    }
    let left: Vec<_> = after
        .keys()
        .filter(|name| !before.contains_key(*name))
        .collect();
    for name in left {
        if name.starts_with('.') || expected == 2 {
            return fail(&format!("{name} was left behind"));
        }
        std::fs::remove_file(directory.join(name)).expect("ours");
    }
    Ok(())
}

#[test]
fn no_call_falls_is_silent_or_loses_a_file() {
    let lines = CALLS.lines().map(str::trim);
    let calls: Vec<_> = lines
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| {
            let (code, call) = line.split_once(' ').expect("a code and a call");
            let code = match call.starts_with("trace ") && !cfg!(feature = "emulator") {
                true => 3,
                false => code.parse().expect("a code"),
            };
            (code, call)
        })
        .collect();
    assert!(calls.len() >= 240, "{} calls", calls.len());
    // Each worker has a directory of its own, in which it compares what is there before and after.
    let next = AtomicUsize::new(0);
    let work = || {
        let directory = tempfile::tempdir().expect("a temporary directory");
        inputs::write(directory.path());
        let calls = std::iter::from_fn(|| calls.get(next.fetch_add(1, Ordering::Relaxed)));
        let failed = calls.filter_map(|&(code, call)| check(directory.path(), code, call).err());
        failed.collect::<Vec<String>>()
    };
    let failures: Vec<String> = thread::scope(|scope| {
        let workers = [0, 1].map(|_| scope.spawn(work));
        let failed = workers.map(|worker| worker.join().expect("no call panics here"));
        failed.concat()
    });
    assert!(
        failures.is_empty(),
        "{} of {} calls:\n{}",
        failures.len(),
        calls.len(),
        failures.join("\n")
    );
}
