//! Bundles what a GPU host needs for tests and measurements: programs that contain their device code.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};

use crate::{
    Error, package,
    process::{cargo, command, output, target_dir},
    workspace,
};

/// Without `tandem-candle`, whose GPU test needs a CUDA toolkit to build: candle compiles kernels with nvcc.
const PACKAGES: [&str; 2] = ["tandem-attn", "tandem-papers"];

/// The tests that need a GPU: `tests/gpu/`.
const GPU_TEST: &str = "gpu";

/// A program with kernels of its own, outside the workspace: it compares their results with f64.
const OWN_VARIANT: &str = "own-variant";

/// Builds the GPU tests and all benchmarks and puts them into `dist/`, with a script to run them.
pub fn run() -> Result<(), Error> {
    package::run(false)?;
    let dist = workspace().join("dist");
    let _ = fs::remove_dir_all(&dist);
    fs::create_dir_all(&dist)?;

    let targets = targets()?;
    let mut programs = Vec::new();
    for (kind, cargo_command, flag) in [("test", "test", "--test"), ("bench", "bench", "--bench")] {
        let names: Vec<&str> = targets
            .iter()
            .filter(|(of, _)| of == kind)
            .map(|(_, name)| name.as_str())
            .collect();
        if names.is_empty() {
            continue;
        }
        let mut build = cargo();
        build.args([
            cargo_command,
            "--no-run",
            "--features=cuda,cust",
            "--message-format=json-render-diagnostics",
        ]);
        PACKAGES.iter().for_each(|package| {
            build.args(["--package", package]);
        });
        if kind == "test" {
            build.arg("--release");
        }
        names.iter().for_each(|name| {
            build.args([flag, name]);
        });
        for (name, executable) in executables(&output(&mut build)?) {
            programs.push(pack(&dist, kind, &name, &executable)?);
        }
    }
    programs.push(pack(&dist, "test", OWN_VARIANT, &own_variant()?)?);
    let total: u64 = programs
        .iter()
        .filter_map(|program| program["bytes"].as_u64())
        .sum();
    let manifest = json!({
        "packages": PACKAGES,
        "version": env!("CARGO_PKG_VERSION"),
        "commit": output(command("git").args(["describe", "--always", "--dirty"])).unwrap_or_default().trim(),
        "programs": programs,
    });
    fs::write(
        dist.join("manifest.json"),
        serde_json::to_string_pretty(&manifest)? + "\n",
    )?;
    let script = dist.join("run.sh");
    fs::copy(workspace().join("xtask/run_bundle.sh"), &script)?;
    println!(
        "bundle: {} programs, {:.1} MiB in dist/; start dist/run.sh on the GPU host",
        programs.len(),
        total as f64 / 1048576.0
    );
    Ok(())
}

/// Builds the example with its own kernels. Returns its path.
fn own_variant() -> Result<PathBuf, Error> {
    let mut build = cargo();
    build
        .args(["build", "--release", "--manifest-path"])
        .arg("examples/own_variant/Cargo.toml")
        .arg("--message-format=json-render-diagnostics")
        .env("CARGO_TARGET_DIR", target_dir()?);
    let built = executables(&output(&mut build)?);
    let found = built.into_iter().find(|(name, _)| name == OWN_VARIANT);
    Ok(found.ok_or("cargo did not build own-variant")?.1)
}

/// Kind and name of the targets in the bundle.
fn targets() -> Result<Vec<(String, String)>, Error> {
    let metadata: Value = serde_json::from_str(&output(cargo().args([
        "metadata",
        "--no-deps",
        "--format-version=1",
    ]))?)?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let ours = packages.filter(|package| PACKAGES.iter().any(|name| package["name"] == *name));
    let mut targets = Vec::new();
    for target in ours.flat_map(|package| package["targets"].as_array().into_iter().flatten()) {
        let (Some(kind), Some(name)) = (target["kind"][0].as_str(), target["name"].as_str()) else {
            continue;
        };
        if kind == "bench" || kind == "test" && name == GPU_TEST {
            targets.push((kind.to_owned(), name.to_owned()));
        }
    }
    Ok(targets)
}

/// Name and path of each program that cargo reports as built.
fn executables(messages: &str) -> Vec<(String, PathBuf)> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter_map(|message| {
            let name = message["target"]["name"].as_str()?.to_owned();
            Some((name, PathBuf::from(message["executable"].as_str()?)))
        })
        .collect()
}

/// Copies and strips one program. Returns its entry in the bundle's list.
fn pack(dist: &Path, kind: &str, name: &str, executable: &Path) -> Result<Value, Error> {
    let file = format!("{kind}-{name}");
    let packed = dist.join(&file);
    fs::copy(executable, &packed)?;
    output(command("strip").arg(&packed))?;
    let bytes = fs::metadata(&packed)?.len();
    println!("bundle: {file}, {:.1} MiB", bytes as f64 / 1048576.0);
    Ok(json!({ "file": file, "kind": kind, "name": name, "bytes": bytes }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_are_taken_from_messages_that_have_one() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"gpu"},"executable":"/t/gpu-1"}
{"reason":"compiler-artifact","target":{"name":"tandem_attn"},"executable":null}
not json
{"reason":"build-finished","success":true}"#;
        assert_eq!(
            executables(messages),
            [("gpu".to_owned(), PathBuf::from("/t/gpu-1"))]
        );
    }
}
