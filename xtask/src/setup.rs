//! Installs what is missing: a compiler for GPU code, and NVIDIA's assembler and disassemblers.

use std::{
    fs,
    path::{Path, PathBuf},
};

use cuda_builder::{Compiler, CudaBuilderError};

use crate::{
    Error,
    process::{command, output, run as run_command},
    workspace,
};

const PROGRAMS: [&str; 3] = ["ptxas", "nvdisasm", "cuobjdump"];

/// The oldest suitable Debian package, as a prefix of its version; the same as `Compiler` requires.
const DEBIAN_MINIMUM: (u32, u32) = (1, 96);

/// The nightly of the checkers, and of kernels where there is no package of 1.96; it has the same LLVM as that. It is
/// pinned, because nightlies change daily.
pub const NIGHTLY: &str = "nightly-2026-05-20";

/// If nothing is missing, only prints a message.
pub fn run() -> Result<(), Error> {
    // Of several setups in one checkout, one installs and the others find everything done.
    let tools = workspace().join(".tools");
    fs::create_dir_all(&tools)?;
    let lock = fs::File::create(tools.join("setup.lock"))?;
    lock.lock()?;
    compiler()?;
    cuda_tools()
}

/// Folder of the programs that [`cuda_tools`] installs.
pub fn tools_dir() -> PathBuf {
    workspace().join(".tools/bin")
}

fn compiler() -> Result<(), Error> {
    let found = match Compiler::find() {
        Err(CudaBuilderError::NoCompiler { .. }) => {
            install_compiler()?;
            Compiler::find()
        }
        found => found,
    }?;
    println!(
        "setup: compiler for the GPU: {} at {}",
        found.version,
        found.rustc.display()
    );
    Ok(())
}

/// Installs Debian's packages if we may and they are new enough, else a toolchain of rustup.
fn install_compiler() -> Result<(), Error> {
    println!("setup: no compiler for the GPU yet");
    if is_root() && Path::new("/usr/bin/apt-get").exists() {
        let apt = |arguments: &[&str]| {
            run_command(
                command("apt-get")
                    .env("DEBIAN_FRONTEND", "noninteractive")
                    // Another installation may be running, for example one that started with the machine.
                    .arg("--option=DPkg::Lock::Timeout=300")
                    .args(arguments),
            )
        };
        // An index that is outdated or partly unreachable may still have the packages.
        if let Err(error) = apt(&["update", "-qq"]) {
            println!("setup: {error}");
        }
        if debian_package_is_new_enough() {
            match apt(&[
                "install",
                "-qq",
                "-y",
                "--no-install-recommends",
                "rustc-web",
                "rust-web-src",
            ]) {
                Ok(()) => return Ok(()),
                Err(error) => println!("setup: {error}"),
            }
        }
    }
    run_command(command("rustup").args([
        "toolchain",
        "install",
        NIGHTLY,
        "--profile",
        "minimal",
        "-c",
        "rust-src",
    ]))
}

fn debian_package_is_new_enough() -> bool {
    let policy = output(command("apt-cache").args(["policy", "rustc-web"])).unwrap_or_default();
    candidate_version(&policy).is_some_and(|version| version >= DEBIAN_MINIMUM)
}

/// The candidate's version in the output of `apt-cache policy`, without the epoch and everything after the minor
/// version.
fn candidate_version(policy: &str) -> Option<(u32, u32)> {
    let candidate = policy
        .lines()
        .find_map(|line| line.trim().strip_prefix("Candidate: "))?;
    let version = candidate.rsplit(':').next()?;
    let mut parts = version.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn is_root() -> bool {
    output(command("id").arg("-u")).is_ok_and(|id| id.trim() == "0")
}

/// Unpacks the programs from PyPI's wheels, with pinned versions and hashes that pip checks.
fn cuda_tools() -> Result<(), Error> {
    let requirements = workspace().join("xtask/cuda-tools.txt");
    let wanted = fs::read_to_string(&requirements)?;
    let bin = tools_dir();
    let stamp = bin.join("made-from.txt");
    let there = PROGRAMS.iter().all(|program| bin.join(program).is_file());
    if !there || fs::read_to_string(&stamp).ok().as_deref() != Some(wanted.as_str()) {
        let wheels = workspace().join(".tools/wheels");
        fs::create_dir_all(&bin)?;
        // Wheels of other versions have the same programs.
        let _ = fs::remove_dir_all(&wheels);
        run_command(
            command("python3")
                .args([
                    "-m",
                    "pip",
                    "download",
                    "--quiet",
                    "--disable-pip-version-check",
                    "--no-deps",
                ])
                .args(["--only-binary=:all:", "--require-hashes", "--dest"])
                .arg(&wheels)
                .arg("--requirement")
                .arg(&requirements),
        )
        .map_err(|error| {
            format!("{error}\nThis takes python3 with pip, and a connection to a package index.")
        })?;
        run_command(
            command("python3")
                .arg("xtask/unpack_wheels.py")
                .arg(&wheels)
                .arg(&bin)
                .args(PROGRAMS),
        )?;
        fs::remove_dir_all(&wheels)?;
        fs::write(&stamp, wanted)?;
    }
    println!("setup: {} in {}", PROGRAMS.join(", "), bin.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_debian_packages() {
        let policy = "rustc-web:\n  Installed: (none)\n  Candidate: 1.96.0+dfsg1-1~deb12u2\n";
        assert_eq!(candidate_version(policy), Some((1, 96)));
        assert_eq!(candidate_version("  Candidate: 2:1.85.0"), Some((1, 85)));
        assert_eq!(candidate_version("  Candidate: (none)"), None);
        assert_eq!(candidate_version(""), None);
    }
}
