use std::{
    env, fmt, fs,
    hash::{DefaultHasher, Hash, Hasher},
    num::NonZero,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::SystemTime,
};

use crate::{
    Assembler, Compiler, Cubin, CudaBuilderError,
    dependencies::Dependencies,
    nested::{Compilation, Compiled},
    ptx,
    record::Record,
};

/// An architecture to build for.
///
/// The name is rust-cuda's, but libNVVM is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum NvvmArch {
    /// Turing.
    Compute75,
    /// A100.
    Compute80,
    /// Other Ampere GPUs.
    Compute86,
    /// Ada.
    Compute89,
    /// Hopper, with portable instructions only.
    Compute90,
    /// Hopper with wgmma, setmaxnreg and its other architecture-specific instructions.
    Compute90a,
}

impl NvvmArch {
    /// The name for rustc and ptxas, such as `sm_90a`.
    #[must_use]
    pub const fn sm(self) -> &'static str {
        match self {
            Self::Compute75 => "sm_75",
            Self::Compute80 => "sm_80",
            Self::Compute86 => "sm_86",
            Self::Compute89 => "sm_89",
            Self::Compute90 => "sm_90",
            Self::Compute90a => "sm_90a",
        }
    }
}

impl fmt::Display for NvvmArch {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str(self.sm())
    }
}

/// Builds one GPU crate for one architecture; see the [crate's front page](crate).
#[derive(Debug, Clone)]
pub struct CudaBuilder {
    crate_path: PathBuf,
    arch: NvvmArch,
    compile_for: Option<NvvmArch>,
    ptx_version: (u32, u32),
    release: bool,
    line_info: bool,
    assemble: bool,
    ptxas_level: u8,
    module: String,
    entries: Option<Vec<String>>,
    cargo_arguments: Vec<String>,
    copy_to: Option<PathBuf>,
    target_dir: Option<PathBuf>,
}

impl CudaBuilder {
    /// A builder for the crate whose `Cargo.toml` is in `path_to_crate_root`.
    pub fn new(path_to_crate_root: impl AsRef<Path>) -> Self {
        Self {
            crate_path: path_to_crate_root.as_ref().into(),
            arch: NvvmArch::Compute80,
            compile_for: None,
            ptx_version: (8, 0),
            release: true,
            line_info: false,
            assemble: true,
            ptxas_level: 3,
            module: "all".into(),
            entries: None,
            cargo_arguments: Vec::new(),
            copy_to: None,
            target_dir: None,
        }
    }

    /// The architecture to build for; by default that of the A100.
    #[must_use]
    pub fn arch(mut self, arch: NvvmArch) -> Self {
        self.arch = arch;
        self
    }

    /// Compiles for another, older architecture, and only names this one in the PTX. A crate that is built for both, and
    /// is the same for both, is so compiled once.
    #[must_use]
    pub fn compile_for(mut self, arch: NvvmArch) -> Self {
        self.compile_for = Some(arch);
        self
    }

    /// Names the module, if a crate is built as several: [`CudaModule::name`].
    #[must_use]
    pub fn module(mut self, name: impl Into<String>) -> Self {
        self.module = name.into();
        self
    }

    /// Leaves out all other kernels. Use it to inspect some of them, because compiling all takes longer.
    #[must_use]
    pub fn only<I: IntoIterator<Item: Into<String>>>(mut self, kernels: I) -> Self {
        self.entries = Some(kernels.into_iter().map(Into::into).collect());
        self
    }

    /// `false` enables debug assertions and overflow checks in the GPU crate itself. The code is optimised in any case:
    /// without optimisation, arrays of registers would be arrays in memory.
    #[must_use]
    pub fn release(mut self, release: bool) -> Self {
        self.release = release;
        self
    }

    /// Whether profilers and `compute-sanitizer` can show source lines of the GPU crate. Code inlined from other crates
    /// is attributed to the line of the call. Does not affect speed.
    #[must_use]
    pub fn generate_line_info(mut self, line_info: bool) -> Self {
        self.line_info = line_info;
        self
    }

    /// Also copies the PTX to this file at the end.
    #[must_use]
    pub fn copy_to(mut self, path: impl AsRef<Path>) -> Self {
        self.copy_to = Some(path.as_ref().into());
        self
    }

    /// Version of the PTX language. The default, 8.0, is the oldest that supports Hopper; drivers since 525 compile it.
    #[must_use]
    pub fn ptx_version(mut self, major: u32, minor: u32) -> Self {
        self.ptx_version = (major, minor);
        self
    }

    /// Features of the GPU crate to enable.
    #[must_use]
    pub fn features<I: IntoIterator<Item: AsRef<str>>>(mut self, features: I) -> Self {
        self.cargo_arguments.extend(
            features
                .into_iter()
                .map(|feature| format!("--features={}", feature.as_ref())),
        );
        self
    }

    /// Further arguments for the nested `cargo rustc`.
    #[must_use]
    pub fn build_args<I: IntoIterator<Item: AsRef<str>>>(mut self, arguments: I) -> Self {
        self.cargo_arguments.extend(
            arguments
                .into_iter()
                .map(|argument| argument.as_ref().to_owned()),
        );
        self
    }

    /// The optimisation level of ptxas, 0 to 3; 3 if it is not set. At lower levels ptxas moves instructions less far,
    /// which can need fewer registers.
    #[must_use]
    pub fn ptxas_level(mut self, level: u8) -> Self {
        self.ptxas_level = level;
        self
    }

    /// `false` stops after the PTX even if ptxas is available.
    #[must_use]
    pub fn assemble(mut self, assemble: bool) -> Self {
        self.assemble = assemble;
        self
    }

    /// Directory for build results that are kept between runs. By default, `cuda-builder` in the target directory of
    /// the calling build.
    #[must_use]
    pub fn target_dir(mut self, path: impl AsRef<Path>) -> Self {
        self.target_dir = Some(path.as_ref().into());
        self
    }

    /// Compiles the crate, writes launch bounds into the PTX, and assembles it if ptxas is found.
    ///
    /// Unchanged steps are skipped. In a build script, it also tells cargo which files and variables to watch.
    ///
    /// # Errors
    /// A missing compiler, code that does not compile or assemble, invalid markers, or files that cannot be written:
    /// see [`CudaBuilderError`].
    pub fn build(self) -> Result<CudaModule, CudaBuilderError> {
        self.build_beside(&Dependencies::default())
    }

    /// Like [`build`](Self::build), with the dependencies that other modules have compiled already.
    fn build_beside(self, dependencies: &Dependencies) -> Result<CudaModule, CudaBuilderError> {
        let crate_path = fs::canonicalize(&self.crate_path)
            .ok()
            .filter(|path| path.join("Cargo.toml").is_file())
            .ok_or_else(|| CudaBuilderError::CratePathDoesntExist(self.crate_path.clone()))?;
        let compiler = Compiler::find()?;
        let assembler = if self.assemble {
            Assembler::find(&crate_path)?
        } else {
            None
        };

        let target_dir = self
            .target_dir
            .clone()
            .unwrap_or_else(|| default_target_dir(&crate_path));
        let module_name = self.module_name(&crate_path, &compiler);
        let product = self.product_name(&module_name);
        let product_dir = create_dir(&target_dir.join(self.arch.sm()).join(product))?;
        let target_dir = create_dir(&target_dir.join(self.compiled_arch().sm()))?;
        let module_dir = create_dir(&target_dir.join(&module_name))?;
        let _lock = lock(&module_dir.join(".lock"))?;

        let assembly = module_dir.join("module.s");
        let own_dir = module_dir.join("cargo");
        // In its own target directory, modules can be compiled in parallel.
        let compilation = Compilation {
            compiler: &compiler,
            crate_path: &crate_path,
            arch: self.compiled_arch(),
            ptx_version: self.ptx_version,
            checks: !self.release,
            line_info: self.line_info,
            silent: false,
            entries: self.entries.as_deref(),
            cargo_arguments: &self.cargo_arguments,
            target_dir: &own_dir,
            assembly: &assembly,
        };
        let recipe = self.recipe(&module_name, &compilation);
        let record_path = module_dir.join("made-from.json");
        let kept = Record::read(&record_path)
            .filter(|record| assembly.is_file() && record.is_current(&recipe));
        let compiled = match kept {
            Some(record) => {
                eprint!("{}", record.warnings);
                Compiled {
                    sources: record.source_paths(),
                    warnings: record.warnings,
                }
            }
            None => {
                // The record goes first: after an interruption or a failure it would describe another module.
                let _ = fs::remove_file(&record_path);
                let begun = SystemTime::now();
                dependencies.copy_to(&compilation, &target_dir.join("dependencies"))?;
                let (compiled, _) = compilation.run()?;
                Record::new(recipe, &compiled, begun).write(&record_path)?;
                compiled
            }
        };
        report_to_cargo(
            &crate_path,
            &compiled.sources,
            &compiler,
            assembler.as_ref(),
        );

        let assembly_text = fs::read_to_string(&assembly)
            .map_err(CudaBuilderError::io(format!("read {}", assembly.display())))?;
        let mut text = ptx::apply_markers(&assembly_text)?;
        if let Some(compiled) = self.compile_for {
            let target = |arch: NvvmArch| format!("\n.target {arch}\n");
            text = text.replacen(&target(compiled), &target(self.arch), 1);
        }
        let ptx_path = product_dir.join("module.ptx");
        if fs::read_to_string(&ptx_path).ok().as_deref() != Some(text.as_str()) {
            fs::write(&ptx_path, &text).map_err(CudaBuilderError::io(format!(
                "write {}",
                ptx_path.display()
            )))?;
        }
        if let Some(path) = &self.copy_to {
            fs::copy(&ptx_path, path).map_err(|source| CudaBuilderError::FailedToCopyPtxFile {
                path: path.clone(),
                source,
            })?;
        }
        let cubin = assembler
            .map(|assembler| {
                assembler.assemble(
                    &ptx_path,
                    &text,
                    &product_dir.join("module.cubin"),
                    self.arch.sm(),
                    self.ptxas_level,
                    self.line_info,
                )
            })
            .transpose()?;
        Ok(CudaModule {
            name: self.module,
            arch: self.arch,
            ptx: text,
            ptx_path,
            cubin,
            compiler: compiler.version,
            sources: compiled.sources,
            warnings: compiled.warnings,
        })
    }

    fn compiled_arch(&self) -> NvvmArch {
        self.compile_for.unwrap_or(self.arch)
    }

    /// A name that depends on everything that changes the PTX, except the list of kernels, so that different builds do
    /// not overwrite each other.
    fn module_name(&self, crate_path: &Path, compiler: &Compiler) -> String {
        let mut hasher = DefaultHasher::new();
        (crate_path, compiler.rustc.as_path(), &compiler.version).hash(&mut hasher);
        (
            self.ptx_version,
            self.release,
            self.line_info,
            &self.cargo_arguments,
        )
            .hash(&mut hasher);
        let name = crate_path.file_name().unwrap_or_default().to_string_lossy();
        let part = if self.entries.is_some() { "-part" } else { "" };
        format!("{name}-{}{part}-{:016x}", self.module, hasher.finish())
    }

    /// A name that also depends on what changes the PTX or the machine code after the compilation.
    fn product_name(&self, module_name: &str) -> String {
        let of = self.compile_for.map(|arch| format!("-of-{arch}"));
        let level = (self.ptxas_level != 3).then(|| format!("-O{}", self.ptxas_level));
        let [of, level] = [of, level].map(Option::unwrap_or_default);
        format!("{module_name}{of}{level}")
    }

    /// A text that depends on everything that changes the PTX, except the sources.
    fn recipe(&self, module_name: &str, compilation: &Compilation<'_>) -> String {
        let kernels = self
            .entries
            .as_ref()
            .map_or("all kernels".into(), |entries| entries.join(","));
        format!("{module_name} {kernels} {}", compilation.settings())
    }
}

/// Builds several modules in the given order, as many in parallel as there are processors. Put the longest builds
/// first. Modules of one architecture and target directory share their dependencies.
///
/// # Errors
/// The first error in the order of the builders.
pub fn build_all(
    builders: impl IntoIterator<Item = CudaBuilder>,
) -> Result<Vec<CudaModule>, CudaBuilderError> {
    let builders: Vec<CudaBuilder> = builders.into_iter().collect();
    let built: Vec<_> = builders.iter().map(|_| Mutex::new(None)).collect();
    let order = order(&builders);
    let (next, dependencies) = (AtomicUsize::new(0), Dependencies::default());
    let workers = thread::available_parallelism().map_or(1, NonZero::get);
    thread::scope(|scope| {
        for _ in 0..workers.min(builders.len()) {
            scope.spawn(|| {
                while let Some(&index) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let module = builders[index].clone().build_beside(&dependencies);
                    *built[index].lock().unwrap_or_else(PoisonError::into_inner) = Some(module);
                }
            });
        }
    });
    let done = |place: Mutex<Option<_>>| {
        let module = place.into_inner().unwrap_or_else(PoisonError::into_inner);
        module.expect("a worker took every builder")
    };
    built.into_iter().map(done).collect()
}

/// The order in which to start: as given, but with one builder of each architecture first. While one worker compiles
/// the dependencies for one architecture, the next worker compiles those for another instead of waiting. Those that take
/// what another compiles come last, for the same reason.
fn order(builders: &[CudaBuilder]) -> Vec<usize> {
    let place = |&index: &usize| {
        let arch = builders[index].arch;
        let is_first = builders[..index].iter().all(|before| before.arch != arch);
        (builders[index].compile_for.is_some(), !is_first)
    };
    let mut order: Vec<usize> = (0..builders.len()).collect();
    order.sort_by_key(place);
    order
}

/// A built GPU crate.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CudaModule {
    /// The name given to [`CudaBuilder::module`].
    pub name: String,
    /// The architecture it was built for.
    pub arch: NvvmArch,
    /// The PTX, launch bounds included.
    pub ptx: String,
    /// The file with the PTX.
    pub ptx_path: PathBuf,
    /// Machine code, if ptxas was found.
    pub cubin: Option<Cubin>,
    /// The compiler's version, for example `rustc 1.96.0 (LLVM 22.1.8)`.
    pub compiler: String,
    /// The source files, without those of the standard library and of crates.io.
    pub sources: Vec<PathBuf>,
    /// The compiler's warnings about the crate and the local crates it uses, as shown; empty if there are none.
    /// They were also written to standard error.
    pub warnings: String,
}

/// Creates the directory if necessary. Returns an absolute path, because the nested cargo runs in another directory.
fn create_dir(path: &Path) -> Result<PathBuf, CudaBuilderError> {
    fs::create_dir_all(path)
        .and_then(|()| path.canonicalize())
        .map_err(CudaBuilderError::io(format!("create {}", path.display())))
}

/// A lock held until it is dropped, because a build script and a tool may build the same crate concurrently.
pub(crate) fn lock(path: &Path) -> Result<fs::File, CudaBuilderError> {
    fs::File::create(path)
        .and_then(|file| file.lock().map(|()| file))
        .map_err(CudaBuilderError::io(format!("lock {}", path.display())))
}

/// `cuda-builder` in the target directory of the calling build: the one above a build script's `OUT_DIR`, the one that
/// cargo was given, or that of the GPU crate's workspace.
fn default_target_dir(crate_path: &Path) -> PathBuf {
    let above_out_dir = env::var_os("OUT_DIR").and_then(|out_dir| {
        let tagged = |directory: &&Path| directory.join("CACHEDIR.TAG").is_file();
        Path::new(&out_dir)
            .ancestors()
            .find(tagged)
            .map(Path::to_owned)
    });
    let of_environment = || env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let of_workspace = || {
        let root = crate_path
            .ancestors()
            .find(|directory| directory.join("Cargo.lock").is_file());
        root.unwrap_or(crate_path).join("target")
    };
    above_out_dir
        .or_else(of_environment)
        .unwrap_or_else(of_workspace)
        .join("cuda-builder")
}

/// Only build scripts have both variables.
fn report_to_cargo(
    crate_path: &Path,
    sources: &[PathBuf],
    compiler: &Compiler,
    assembler: Option<&Assembler>,
) {
    if env::var_os("OUT_DIR").is_none() || env::var_os("HOST").is_none() {
        return;
    }
    for variable in ["TANDEM_RUSTC", "TANDEM_PTXAS"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    if assembler.is_none() {
        println!("cargo::rerun-if-env-changed=PATH");
    }
    // Installing a program later changes this directory. Watching the missing file itself would make cargo rerun the
    // script every time. Toolchains beside it are large, and cargo would look at every file.
    let tools = crate_path
        .ancestors()
        .flat_map(|directory| [".tools/bin", ".tools"].map(|tools| directory.join(tools)))
        .find(|tools| tools.is_dir());
    let programs = [Some(&compiler.rustc), assembler.map(|found| &found.ptxas)];
    let programs = programs.into_iter().flatten().filter(|path| path.is_file());
    for path in sources.iter().chain(&tools).chain(programs) {
        println!("cargo::rerun-if-changed={}", path.display());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_without_a_crate_is_refused() {
        let error = CudaBuilder::new("/nowhere/kernels").build().unwrap_err();
        assert!(
            matches!(error, CudaBuilderError::CratePathDoesntExist(path) if path == Path::new("/nowhere/kernels"))
        );
    }

    #[test]
    fn builds_that_differ_have_names_that_differ() {
        let compiler = Compiler {
            rustc: "/usr/bin/rustc".into(),
            cargo: "cargo".into(),
            version: "rustc 1.96.0 (LLVM 22.1.8)".into(),
            release: (1, 96),
            library: "/usr/lib/rustlib/src/rust/library".into(),
        };
        let builder = CudaBuilder::new("/kernels");
        let name = |builder: &CudaBuilder| builder.module_name(Path::new("/kernels"), &compiler);
        let plain = name(&builder);
        assert_eq!(plain, name(&builder.clone()));
        for other in [
            builder.clone().features(["fp8"]),
            builder.clone().release(false),
            builder.clone().generate_line_info(true),
            builder.clone().ptx_version(8, 7),
            builder.clone().module("decode"),
            builder.clone().only(["copy"]),
        ] {
            assert_ne!(plain, name(&other), "{other:?}");
        }
        let products = [builder.clone(), builder.ptxas_level(1)].map(|it| it.product_name(&plain));
        assert_ne!(products[0], products[1], "machine code of two levels");
    }
}
