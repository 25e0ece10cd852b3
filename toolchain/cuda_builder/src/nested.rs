//! The cargo that compiles the GPU crate: its command line, its environment, its messages.

use std::{
    env, fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use serde_json::Value;

use crate::{Compiler, CudaBuilderError, NvvmArch};

const TARGET: &str = "nvptx64-nvidia-cuda";
const PROFILE: &str = "device";

/// Settings of the profile. They do not depend on the caller, so that all builds for an architecture share one `core`,
/// which takes longer to compile than most kernels. With fat LTO, LLVM optimises before and after linking: the family
/// `decode_mma` takes 92 s. Without it, that takes 59 s, but unreachable panic calls remain, which ptxas rejects, and the
/// PTX of prefills is 5 % longer.
const SETTINGS: [&str; 10] = [
    "inherits = \"release\"",
    "opt-level = 3",
    "lto = \"fat\"",
    "codegen-units = 1",
    "panic = \"abort\"",
    "incremental = false",
    "strip = false",
    "debug = false",
    "debug-assertions = false",
    "overflow-checks = false",
];

/// Environment variable with a comma-separated list of the kernels that `#[kernel]` must keep.
const ENTRIES: &str = "CUDA_BUILDER_ENTRIES";

/// Variables of the outer build that the nested one keeps: download sources and settings.
const KEPT_CARGO_VARIABLES: [&str; 5] = [
    "CARGO_HOME",
    "CARGO_HTTP_",
    "CARGO_NET_",
    "CARGO_REGISTR",
    "CARGO_SOURCE_",
];

/// Variables of the outer build that must not affect the nested one.
const DROPPED_VARIABLES: [&str; 14] = [
    "RUSTFLAGS",
    "RUSTDOCFLAGS",
    "RUSTDOC",
    "RUSTC_LINKER",
    "RUSTUP_TOOLCHAIN",
    "MAKEFLAGS",
    "MFLAGS",
    "OUT_DIR",
    "TARGET",
    "HOST",
    "OPT_LEVEL",
    "PROFILE",
    "DEBUG",
    "NUM_JOBS",
];

/// The first release that calls the ABI of LLVM's intrinsics "llvm-intrinsic", not "unadjusted".
const LLVM_INTRINSIC_ABI: (u32, u32) = (1, 100);

/// Results of a compilation besides the PTX.
pub(crate) struct Compiled {
    /// The source files of the PTX.
    pub sources: Vec<PathBuf>,
    /// The warnings as the compiler shows them.
    pub warnings: String,
}

/// What to compile and how.
#[derive(Clone, Copy)]
pub(crate) struct Compilation<'a> {
    pub compiler: &'a Compiler,
    pub crate_path: &'a Path,
    pub arch: NvvmArch,
    pub ptx_version: (u32, u32),
    pub checks: bool,
    pub line_info: bool,
    /// Suppresses warnings about unused code, when the crate is compiled only for its dependencies.
    pub silent: bool,
    /// Compile only these kernels.
    pub entries: Option<&'a [String]>,
    pub cargo_arguments: &'a [String],
    /// A separate directory, because the outer cargo holds the lock of its own.
    pub target_dir: &'a Path,
    /// Path for the PTX.
    pub assembly: &'a Path,
}

impl Compilation<'_> {
    /// Compiles if anything has changed. Also returns the files of the compiled dependencies.
    pub(crate) fn run(&self) -> Result<(Compiled, Vec<PathBuf>), CudaBuilderError> {
        let mut messages = self.invoke()?;
        if !self.assembly.is_file() {
            // The PTX was deleted, but cargo does not track it and did nothing. Force a new compilation.
            for placeholder in self.placeholders(&messages.artifacts.library) {
                let _ = fs::remove_file(placeholder);
            }
            messages = self.invoke()?;
        }
        let Messages {
            artifacts,
            diagnostics,
        } = messages;
        eprint!("{diagnostics}");
        self.put_placeholders(&artifacts.library)?;
        let mut sources = artifacts.manifests;
        sources.extend(self.read_dep_info(&artifacts.library)?);
        for file in self.settings_files() {
            if !sources.contains(&file) {
                sources.push(file);
            }
        }
        let compiled = Compiled {
            sources,
            warnings: diagnostics,
        };
        Ok((compiled, artifacts.dependencies))
    }

    /// Files above the crate that change what is compiled: the workspace's lock file and manifest, with its
    /// dependencies, patches and profiles, and cargo's settings.
    fn settings_files(&self) -> Vec<PathBuf> {
        let above = || self.crate_path.ancestors();
        let root = above().find(|folder| folder.join("Cargo.lock").is_file());
        let of_root = |root: &Path| ["Cargo.lock", "Cargo.toml"].map(|file| root.join(file));
        root.into_iter()
            .flat_map(of_root)
            .chain(above().map(|folder| folder.join(".cargo/config.toml")))
            .filter(|file| file.is_file())
            .collect()
    }

    fn invoke(&self) -> Result<Messages, CudaBuilderError> {
        let mut command = self.command();
        let output = command
            .stdin(Stdio::null())
            .output()
            .map_err(CudaBuilderError::io(format!(
                "run {}",
                self.compiler.cargo.display()
            )))?;
        let messages = Messages::read(&String::from_utf8_lossy(&output.stdout), self.compiler);
        if !output.status.success() {
            let cargo_says = String::from_utf8_lossy(&output.stderr);
            return Err(CudaBuilderError::BuildFailed {
                path: self.crate_path.into(),
                arch: self.arch.sm(),
                diagnostics: messages.diagnostics + &cargo_says,
            });
        }
        Ok(messages)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.compiler.cargo);
        clean_environment(&mut command);
        command
            .current_dir(self.crate_path)
            .env_remove(ENTRIES)
            .env("RUSTC", &self.compiler.rustc)
            // An empty value disables wrappers of configuration files.
            .envs([
                ("RUSTC_WRAPPER", ""),
                ("RUSTC_WORKSPACE_WRAPPER", ""),
                ("RUSTC_BOOTSTRAP", "1"),
            ])
            .env("CARGO_TARGET_DIR", self.target_dir)
            // Configuration files can move what is compiled out of the module's own directory.
            .env("CARGO_BUILD_BUILD_DIR", self.target_dir)
            .env("CARGO_ENCODED_RUSTFLAGS", self.rustc_flags().join("\x1f"))
            .args([
                "rustc",
                "--lib",
                "--crate-type=cdylib",
                "--message-format=json",
                "-Zbuild-std=core",
            ])
            .args(["--target", TARGET, "--profile", PROFILE]);
        for setting in SETTINGS {
            command
                .arg("--config")
                .arg(format!("profile.{PROFILE}.{setting}"));
        }
        command.args(self.cargo_arguments).arg("--");
        if self.silent {
            command.arg("-Awarnings");
        }
        if let Some(entries) = self.entries {
            // `#[kernel]` reads a variable that cargo does not track; the flag triggers a new compilation.
            let entries = entries.join(",");
            let mut hasher = DefaultHasher::new();
            entries.hash(&mut hasher);
            command.env(ENTRIES, entries).args([
                format!("--cfg=entries_{:016x}", hasher.finish()),
                "-Adead_code".into(),
                "-Aunused".into(),
            ]);
        }
        if self.line_info {
            // "line-tables-only" and higher levels put DWARF into the PTX that ptxas 13.0 cannot parse.
            command.arg("-Cdebuginfo=line-directives-only");
        }
        if self.checks {
            command.args(["-Cdebug-assertions=yes", "-Coverflow-checks=yes"]);
        }
        command.arg(format!("--emit=asm={}", self.assembly.display()));
        command
    }

    /// What this version of the builder adds to a build, as text.
    pub(crate) fn settings(&self) -> String {
        format!("{} {}", self.rustc_flags().join(" "), SETTINGS.join(", "))
    }

    fn rustc_flags(&self) -> Vec<String> {
        let (major, minor) = self.ptx_version;
        let mut flags = vec![
            format!("-Ctarget-cpu={}", self.arch.sm()),
            format!("-Ctarget-feature=+ptx{major}{minor}"),
            // Jump threading would copy barriers into divergent branches (rust-lang/rust#137086).
            "-Zmir-enable-passes=-JumpThreading".into(),
            // Loops over register arrays must be fully unrolled, or the arrays go to local memory.
            "-Cllvm-args=-unroll-threshold=20000".into(),
            // The PTX is the product; nothing needs linking.
            "-Clinker=true".into(),
        ];
        if self.compiler.release >= LLVM_INTRINSIC_ABI {
            flags.push("--cfg=llvm_intrinsic_abi".into());
        }
        flags
    }

    fn profile_dir(&self) -> PathBuf {
        self.target_dir.join(TARGET).join(PROFILE)
    }

    /// The files that cargo takes for the linked library: beside its list of sources, which is in `deps` or, since
    /// cargo 1.101, in a folder of each build.
    fn placeholders(&self, library: &str) -> Vec<PathBuf> {
        let folders = |folder: PathBuf| fs::read_dir(folder).into_iter().flatten().flatten();
        let builds = folders(self.profile_dir().join("build"))
            .flat_map(|package| folders(package.path()))
            .map(|build| build.path().join("out"));
        let deps = self.profile_dir().join("deps");
        let has_sources = |folder: &PathBuf| folder.join(format!("{library}.d")).is_file();
        builds
            .chain([deps])
            .filter(has_sources)
            .map(|folder| folder.join(format!("{library}.ptx")))
            .collect()
    }

    /// While the linker's output is missing, cargo compiles anew each time.
    fn put_placeholders(&self, library: &str) -> Result<(), CudaBuilderError> {
        for path in self.placeholders(library) {
            if !path.exists() {
                fs::write(&path, "")
                    .map_err(CudaBuilderError::io(format!("write {}", path.display())))?;
            }
        }
        Ok(())
    }

    fn read_dep_info(&self, library: &str) -> Result<Vec<PathBuf>, CudaBuilderError> {
        let path = self.profile_dir().join(format!("{library}.d"));
        let text = fs::read_to_string(&path)
            .map_err(CudaBuilderError::io(format!("read {}", path.display())))?;
        Ok(parse_dep_info(&text))
    }
}

/// The prerequisites of the first rule of a makefile, in which backslashes escape spaces.
fn parse_dep_info(text: &str) -> Vec<PathBuf> {
    let Some((_, prerequisites)) = text.lines().next().and_then(|line| line.split_once(": "))
    else {
        return Vec::new();
    };
    let mut paths = vec![String::new()];
    let mut letters = prerequisites.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => paths
                .last_mut()
                .expect("starts with one")
                .extend(letters.next()),
            ' ' => paths.push(String::new()),
            _ => paths.last_mut().expect("starts with one").push(letter),
        }
    }
    paths
        .into_iter()
        .filter(|path| !path.is_empty())
        .map(PathBuf::from)
        .collect()
}

fn clean_environment(command: &mut Command) {
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        let of_cargo = text.starts_with("CARGO")
            && !KEPT_CARGO_VARIABLES
                .iter()
                .any(|kept| text.starts_with(kept));
        if of_cargo || text.starts_with("DEP_") || DROPPED_VARIABLES.contains(&text.as_ref()) {
            command.env_remove(&name);
        }
    }
}

/// The relevant contents of cargo's messages.
#[derive(Default)]
struct Messages {
    diagnostics: String,
    artifacts: Artifacts,
}

#[derive(Default)]
struct Artifacts {
    /// Name of the GPU crate's own library.
    library: String,
    /// Manifests of the local packages under development.
    manifests: Vec<PathBuf>,
    /// Compiled files of all other packages.
    dependencies: Vec<PathBuf>,
}

impl Messages {
    fn read(stream: &str, compiler: &Compiler) -> Self {
        let mut read = Self::default();
        for message in stream
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        {
            match message["reason"].as_str() {
                Some("compiler-message") => read.take_diagnostic(&message["message"]),
                Some("compiler-artifact") => read.take_artifact(&message, compiler),
                _ => {}
            }
        }
        read
    }

    fn take_diagnostic(&mut self, diagnostic: &Value) {
        let text = diagnostic["message"].as_str().unwrap_or_default();
        let about_our_flags = text.starts_with("unstable feature specified for `-Ctarget-feature`");
        let sum = text.ends_with("warnings emitted") || text.ends_with("warning emitted");
        if !about_our_flags && !sum {
            self.diagnostics
                .push_str(diagnostic["rendered"].as_str().unwrap_or_default());
        }
    }

    fn take_artifact(&mut self, artifact: &Value, compiler: &Compiler) {
        let manifest = PathBuf::from(artifact["manifest_path"].as_str().unwrap_or_default());
        let local = artifact["package_id"]
            .as_str()
            .is_some_and(|id| id.starts_with("path+"));
        if local
            && !manifest.starts_with(&compiler.library)
            && !self.artifacts.manifests.contains(&manifest)
        {
            self.artifacts.manifests.push(manifest);
        }
        let is_product = artifact["target"]["crate_types"]
            .as_array()
            .is_some_and(|types| types.iter().any(|kind| kind == "cdylib"));
        if is_product {
            self.artifacts.library = artifact["target"]["name"]
                .as_str()
                .unwrap_or_default()
                .replace('-', "_");
        } else {
            let files = artifact["filenames"].as_array().into_iter().flatten();
            let paths = files.filter_map(|file| file.as_str().map(PathBuf::from));
            self.artifacts.dependencies.extend(paths);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dep_info_is_read_with_escaped_spaces() {
        let text = "/t/dev.ptx: /a/src/lib.rs /my\\ code/src/x.rs\n\n/a/src/lib.rs:\n";
        assert_eq!(
            parse_dep_info(text),
            [
                PathBuf::from("/a/src/lib.rs"),
                PathBuf::from("/my code/src/x.rs")
            ]
        );
        assert!(parse_dep_info("").is_empty());
    }
}
