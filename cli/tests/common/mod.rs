//! Starting the command, as a shell would.
// Each program uses its own part of this.
#![allow(dead_code)]

use std::{
    path::Path,
    process::{Command, Output},
};

/// The command, in a directory.
pub fn tandem(directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tandem"));
    command.current_dir(directory);
    command
}

/// The folder of a small model of a family.
pub fn model(family: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/fixtures");
    root.join(family).display().to_string()
}

/// What a run said, and its exit code.
pub struct Said {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

pub fn run(directory: &Path, arguments: &[&str]) -> Said {
    let Output {
        status,
        stdout,
        stderr,
    } = tandem(directory)
        .args(arguments)
        .output()
        .expect("the command starts");
    let said = Said {
        code: status.code().expect("not killed"),
        stdout: String::from_utf8(stdout).expect("UTF-8"),
        stderr: String::from_utf8(stderr).expect("UTF-8"),
    };
    assert!(
        !said.stdout.contains('\x1b') && !said.stderr.contains('\x1b'),
        "colours only on a terminal: {arguments:?}"
    );
    for line in said.stdout.lines() {
        assert!(line.chars().count() < 100, "{arguments:?} prints {line}");
    }
    said
}

/// Names of the files in a directory.
pub fn files(directory: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(directory)
        .expect("it is there")
        .map(|entry| {
            entry
                .expect("readable")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    names.sort();
    names
}
