use std::{
    env, fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
};

use crate::CudaBuilderError;

/// Environment variable with the path of ptxas.
const EXPLICIT: &str = "TANDEM_PTXAS";

/// Where `cargo xtask setup` puts programs, in some directory above the GPU crate.
const WORKSPACE_TOOLS: &str = ".tools/bin";

/// The first CUDA version of PTX 8.0.
const OLDEST: u32 = 12;

/// ptxas, NVIDIA's assembler from PTX to machine code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assembler {
    /// The program.
    pub ptxas: PathBuf,
    /// For example `ptxas 13.0.88`.
    pub version: String,
}

/// Machine code of a module, and ptxas's messages about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cubin {
    /// The file.
    pub path: PathBuf,
    /// Its contents.
    pub bytes: Vec<u8>,
    /// The assembler's version, for example `ptxas 13.0.88`.
    pub assembler: String,
    /// Resources of each kernel, sorted by name.
    pub resources: Vec<EntryResources>,
    /// All messages of ptxas except resources: warnings, and remarks with a code such as C7510 (wgmma serialised).
    pub notices: Vec<String>,
}

/// Resources that a kernel needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EntryResources {
    /// The kernel.
    pub name: String,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of stack per thread.
    pub stack: u32,
    /// Bytes stored to spill registers, per thread.
    pub spill_stores: u32,
    /// Bytes loaded to restore spilled registers, per thread.
    pub spill_loads: u32,
    /// Bytes of static shared memory per block.
    pub shared: u32,
    /// Hardware barriers.
    pub barriers: u32,
}

impl Assembler {
    /// The options that a module is assembled with, for an optimisation level.
    #[must_use]
    pub fn options(level: u8) -> [String; 2] {
        ["--verbose".into(), format!("-O{level}")]
    }

    /// Finds ptxas: the one named by the environment variable `TANDEM_PTXAS`, else in `.tools/bin` of the directory
    /// `near` or one above it, `PATH`, or `/usr/local/cuda/bin`. `None` if there is none of CUDA 12.0 or newer; older ones
    /// do not know the PTX that is compiled.
    ///
    /// # Errors
    /// [`CudaBuilderError::NotAnAssembler`] if `TANDEM_PTXAS` names something else.
    pub fn find(near: &Path) -> Result<Option<Self>, CudaBuilderError> {
        let explicit = env::var_os(EXPLICIT).filter(|path| !path.is_empty());
        if let Some(explicit) = explicit.map(PathBuf::from) {
            return match Self::examine(&explicit) {
                Ok(assembler) => Ok(Some(assembler)),
                Err(reason) => Err(CudaBuilderError::NotAnAssembler {
                    path: explicit,
                    reason,
                }),
            };
        }
        let path = env::var_os("PATH").unwrap_or_default();
        let found = near
            .ancestors()
            .map(|directory| directory.join(WORKSPACE_TOOLS))
            .chain(env::split_paths(&path))
            .chain([PathBuf::from("/usr/local/cuda/bin")])
            .map(|directory| directory.join("ptxas"))
            .filter(|ptxas| ptxas.is_file())
            .filter_map(|ptxas| Self::examine(&ptxas).ok())
            .find(Self::is_new_enough);
        Ok(found)
    }

    fn is_new_enough(&self) -> bool {
        let number = self.version.strip_prefix("ptxas ");
        let major = number.and_then(|number| number.split('.').next());
        major.and_then(|major| major.parse().ok()) >= Some(OLDEST)
    }

    fn examine(ptxas: &Path) -> Result<Self, String> {
        let output = Command::new(ptxas)
            .arg("--version")
            .output()
            .map_err(|error| error.to_string())?;
        let text = String::from_utf8_lossy(&output.stdout);
        // The last word of "Cuda compilation tools, release 13.0, V13.0.88".
        let version = text
            .lines()
            .find_map(|line| line.rsplit_once(", V"))
            .map(|(_, version)| format!("ptxas {}", version.trim()))
            .ok_or_else(|| {
                format!(
                    "it calls itself {:?}",
                    text.lines().next().unwrap_or_default()
                )
            })?;
        Ok(Self {
            ptxas: ptxas.into(),
            version,
        })
    }

    /// Assembles the file `ptx`, whose contents are `text`, unless `cubin` was already made from the same text in the
    /// same way.
    pub(crate) fn assemble(
        &self,
        ptx: &Path,
        text: &str,
        cubin: &Path,
        arch: &str,
        level: u8,
        line_info: bool,
    ) -> Result<Cubin, CudaBuilderError> {
        let mut hasher = DefaultHasher::new();
        (text, arch, level, line_info, &self.ptxas).hash(&mut hasher);
        let recipe = format!("{} {:016x}\n", self.version, hasher.finish());
        let log_path = cubin.with_extension("ptxas.log");
        let kept = fs::read_to_string(&log_path)
            .ok()
            .filter(|_| cubin.is_file());
        let log = match kept
            .as_deref()
            .and_then(|log| log.strip_prefix(recipe.as_str()))
        {
            Some(log) => log.to_owned(),
            None => {
                let log = self.run(ptx, cubin, arch, level, line_info)?;
                fs::write(&log_path, recipe + &log).map_err(CudaBuilderError::io(format!(
                    "write {}",
                    log_path.display()
                )))?;
                log
            }
        };
        let (resources, notices) = read_log(&log);
        let bytes =
            fs::read(cubin).map_err(CudaBuilderError::io(format!("read {}", cubin.display())))?;
        Ok(Cubin {
            path: cubin.into(),
            bytes,
            assembler: self.version.clone(),
            resources,
            notices,
        })
    }

    fn run(
        &self,
        ptx: &Path,
        cubin: &Path,
        arch: &str,
        level: u8,
        line_info: bool,
    ) -> Result<String, CudaBuilderError> {
        // The log is written last. Without it, a later run does not take the cubin of an interrupted run for complete.
        let _ = fs::remove_file(cubin.with_extension("ptxas.log"));
        let mut command = Command::new(&self.ptxas);
        command
            .args(Self::options(level))
            .args(["--gpu-name", arch, "--output-file"])
            .arg(cubin)
            .arg(ptx);
        if line_info {
            command.arg("--generate-line-info");
        }
        let output = command.output().map_err(CudaBuilderError::io(format!(
            "run {}",
            self.ptxas.display()
        )))?;
        let log = String::from_utf8_lossy(&output.stderr).into_owned()
            + &String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            return Err(CudaBuilderError::AssemblyFailed {
                ptx: ptx.into(),
                log,
            });
        }
        Ok(log)
    }
}

/// Splits the output of `ptxas --verbose` into the resources of each entry and everything else.
fn read_log(log: &str) -> (Vec<EntryResources>, Vec<String>) {
    let mut resources: Vec<EntryResources> = Vec::new();
    let mut notices = Vec::new();
    // Properties of functions that entries call follow those of the entry, under the function's name.
    let mut properties_of = "";
    for line in log.lines().map(str::trim) {
        let message = line.strip_prefix("ptxas info    : ").unwrap_or(line);
        if let Some(rest) = message.strip_prefix("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            resources.push(EntryResources {
                name,
                ..Default::default()
            });
        } else if let Some(name) = message.strip_prefix("Function properties for ") {
            properties_of = name.trim();
        } else if message.contains("bytes stack frame") {
            if let Some(entry) = resources
                .last_mut()
                .filter(|entry| entry.name == properties_of)
            {
                entry.stack = number_before(message, " bytes stack frame");
                entry.spill_stores = number_before(message, " bytes spill stores");
                entry.spill_loads = number_before(message, " bytes spill loads");
            }
        } else if message.starts_with("Used ") {
            if let Some(entry) = resources.last_mut() {
                entry.registers = number_before(message, " registers");
                entry.barriers = number_before(message, " barriers");
                entry.shared = number_before(message, " bytes smem");
            }
        } else if !is_routine(message) {
            notices.push(message.to_owned());
        }
    }
    resources.sort_by(|a, b| a.name.cmp(&b.name));
    (resources, notices)
}

fn is_routine(message: &str) -> bool {
    message.is_empty()
        || message.ends_with("bytes gmem")
        || message.starts_with("Compile time = ")
        || message.contains(" bytes gmem, ")
}

/// The number right before `unit`; 0 if the unit does not occur.
fn number_before(text: &str, unit: &str) -> u32 {
    let Some(end) = text.find(unit) else { return 0 };
    let digits = text[..end]
        .rsplit(|letter: char| !letter.is_ascii_digit())
        .next()
        .unwrap_or_default();
    digits.parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 24 bytes gmem, 8 bytes cmem[4]
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x in function 'b'
ptxas info    : Compiling entry function 'b' for 'sm_90a'
ptxas info    : Function properties for b
    640 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 640 bytes cumulative stack size, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 12.300 ms
ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for a_helper
    32 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers
ptxas info    : Compile time = 1.823 ms
ptxas warning : setmaxnreg ignored to maintain minimum register requirements.
";

    #[test]
    fn resources_are_read_per_entry_and_sorted() {
        let (resources, _) = read_log(LOG);
        assert_eq!(
            resources,
            [
                EntryResources {
                    name: "a".into(),
                    registers: 10,
                    ..Default::default()
                },
                EntryResources {
                    name: "b".into(),
                    registers: 168,
                    stack: 640,
                    spill_stores: 12,
                    spill_loads: 16,
                    shared: 1024,
                    barriers: 2,
                },
            ]
        );
    }

    #[test]
    fn everything_else_is_a_notice() {
        let (_, notices) = read_log(LOG);
        assert_eq!(notices.len(), 2, "{notices:?}");
        assert!(notices[0].starts_with("(C7510)"));
        assert!(notices[1].starts_with("ptxas warning"));
    }

    #[test]
    fn assemblers_before_cuda_12_are_passed_over() {
        let of = |version: &str| Assembler {
            ptxas: "ptxas".into(),
            version: version.into(),
        };
        let new_enough = |version| of(version).is_new_enough();
        assert!(new_enough("ptxas 12.0.76") && new_enough("ptxas 13.0.88"));
        assert!(!new_enough("ptxas 11.8.89") && !new_enough("ptxas 9.2") && !new_enough("?"));
    }

    #[test]
    fn a_program_that_is_no_assembler_says_so() {
        let reason = Assembler::examine(Path::new("/bin/echo")).unwrap_err();
        assert!(reason.contains("calls itself"), "{reason}");
    }
}
