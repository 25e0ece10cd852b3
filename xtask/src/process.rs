//! Runs other programs.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::Value;

use crate::{Error, workspace};

/// A command that runs in the root of the workspace.
pub fn command(program: impl AsRef<Path>) -> Command {
    let mut command = Command::new(program.as_ref());
    command.current_dir(workspace());
    command
}

/// The cargo that started this program.
pub fn cargo() -> Command {
    command(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Where that cargo puts what it builds: `CARGO_TARGET_DIR` and settings may name another folder than `target`.
pub fn target_dir() -> Result<PathBuf, Error> {
    let mut metadata = cargo();
    metadata.args(["metadata", "--no-deps", "--format-version=1"]);
    let metadata: Value = serde_json::from_str(&output(&mut metadata)?)?;
    let folder = metadata["target_directory"].as_str();
    Ok(folder
        .ok_or("cargo metadata names no target directory")?
        .into())
}

/// This machine's target, as rustc calls it.
pub fn host() -> Result<String, Error> {
    let version = output(command("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.ok_or("rustc -vV names no host")?.into())
}

/// Shows the command and runs it; it shares our output.
pub fn run(command: &mut Command) -> Result<(), Error> {
    println!("$ {}", shown(command));
    let status = command
        .status()
        .map_err(|error| format!("{} does not start: {error}", shown(command)))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{} failed: {status}", shown(command)).into())
    }
}

/// Runs the command and returns its standard output.
pub fn output(command: &mut Command) -> Result<String, Error> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("{} does not start: {error}", shown(command)))?;
    if !output.status.success() {
        return Err(format!("{} failed: {}", shown(command), output.status).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}

fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut text = program
        .file_name()
        .unwrap_or(program.as_os_str())
        .to_string_lossy()
        .into_owned();
    for argument in command.get_args() {
        text.push(' ');
        text.push_str(&argument.to_string_lossy());
    }
    text
}
