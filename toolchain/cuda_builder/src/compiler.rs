use std::{
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::CudaBuilderError;

/// Environment variable with the path of the compiler.
const EXPLICIT: &str = "TANDEM_RUSTC";

/// The first release with LLVM 22, whose barrier intrinsics the device code uses.
const MINIMUM: (u32, u32) = (1, 96);
const MINIMUM_TEXT: &str = "1.96";

/// The newest release with which the device code was built. Nightlies rename and remove unstable features.
const TESTED: (u32, u32) = (1, 101);

/// A rustc that can build for the GPU, and the cargo to run it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compiler {
    /// The rustc program.
    pub rustc: PathBuf,
    /// The cargo program.
    pub cargo: PathBuf,
    /// Release and LLVM version, for example `rustc 1.96.0 (LLVM 22.1.8)`.
    pub version: String,
    /// The release's major and minor number.
    pub release: (u32, u32),
    /// Directory of the standard library's sources.
    pub library: PathBuf,
}

impl Compiler {
    /// Finds a compiler: the first of the following that is new enough and has the sources of its library. Releases
    /// after 1.101, with which this version was not tested, come last.
    ///
    /// 1. the one named by the environment variable `TANDEM_RUSTC` (if set, the only candidate);
    /// 2. a nightly toolchain of rustup, the undated one first, then the latest date;
    /// 3. a `rustc` on `PATH` or in `/usr/bin` that does not belong to rustup, such as Debian's;
    /// 4. any other toolchain of rustup.
    ///
    /// `RUSTC_BOOTSTRAP` unlocks unstable features, so it need not be a nightly.
    ///
    /// # Errors
    /// [`CudaBuilderError::NoCompiler`] lists the candidates and what each lacks.
    pub fn find() -> Result<Self, CudaBuilderError> {
        let explicit = env::var_os(EXPLICIT).filter(|path| !path.is_empty());
        let candidates = match explicit {
            // The nested cargo runs in another directory. A name without a directory is looked for on `PATH`.
            Some(explicit) if Path::new(&explicit).components().count() > 1 => {
                let path = std::path::absolute(&explicit);
                vec![path.unwrap_or_else(|_| explicit.into())]
            }
            Some(name) => vec![name.into()],
            None => {
                let (nightly, other): (Vec<_>, Vec<_>) = rustup_toolchains()
                    .into_iter()
                    .partition(|(name, _)| name.starts_with("nightly"));
                let paths = |toolchains: Vec<(String, PathBuf)>| {
                    toolchains.into_iter().map(|(_, path)| path)
                };
                paths(nightly)
                    .chain(system_compilers())
                    .chain(paths(other))
                    .collect()
            }
        };
        let examined = candidates.iter().map(|rustc| {
            Self::examine(rustc).map_err(|reason| format!("{}: {reason}", rustc.display()))
        });
        Self::first(examined).map_err(|rejected| CudaBuilderError::NoCompiler {
            minimum: MINIMUM_TEXT,
            rejected,
        })
    }

    /// The first compiler that is not newer than what was tested, or the first of the newer ones, or all reasons.
    fn first(examined: impl Iterator<Item = Result<Self, String>>) -> Result<Self, Vec<String>> {
        let mut rejected = Vec::new();
        let mut newer = None;
        for compiler in examined {
            match compiler {
                Ok(compiler) if compiler.release <= TESTED => return Ok(compiler),
                Ok(compiler) => newer = newer.or(Some(compiler)),
                Err(reason) => rejected.push(reason),
            }
        }
        newer.ok_or(rejected)
    }

    /// The compiler at `rustc`, or the reason why it is unsuitable.
    fn examine(rustc: &Path) -> Result<Self, String> {
        let described = ask(rustc, &["-vV"])?;
        let field = |name: &str| {
            described
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .map(str::trim)
                .unwrap_or_default()
        };
        let release = field("release:");
        let number = parse_release(release).filter(|&number| number >= MINIMUM);
        let number =
            number.ok_or_else(|| format!("rustc {release} is older than {MINIMUM_TEXT}"))?;
        let sysroot = PathBuf::from(ask(rustc, &["--print", "sysroot"])?.trim());
        let library = sysroot.join("lib/rustlib/src/rust/library");
        if !library.join("core/Cargo.toml").is_file() {
            return Err("it lacks the sources of its library".into());
        }
        Ok(Self {
            cargo: cargo_for(rustc, &sysroot),
            rustc: rustc.into(),
            version: version(release, field("LLVM version:"), field("commit-hash:")),
            release: number,
            library,
        })
    }
}

/// The toolchain's own cargo if it has one, because only that surely understands its library sources. A distribution's
/// cargo may be years older than its rustc; then the calling cargo is better.
fn cargo_for(rustc: &Path, sysroot: &Path) -> PathBuf {
    let own = rustc.with_file_name("cargo");
    if sysroot != Path::new("/usr") && own.is_file() {
        return own;
    }
    env::var_os("CARGO").map_or_else(|| "cargo".into(), PathBuf::from)
}

/// Name and rustc of rustup's toolchains, sorted by name in descending order, undated ones first.
fn rustup_toolchains() -> Vec<(String, PathBuf)> {
    let home = env::var_os("RUSTUP_HOME")
        .map(PathBuf::from)
        .or_else(|| env::home_dir().map(|home| home.join(".rustup")));
    let Some(entries) = home.and_then(|home| fs::read_dir(home.join("toolchains")).ok()) else {
        return Vec::new();
    };
    let mut toolchains: Vec<_> = entries
        .flatten()
        .map(|entry| {
            (
                entry.file_name().to_string_lossy().into_owned(),
                entry.path().join("bin/rustc"),
            )
        })
        .filter(|(_, rustc)| rustc.is_file())
        .collect();
    let dated = |name: &str| {
        name.split('-')
            .nth(1)
            .is_some_and(|part| part.starts_with("20"))
    };
    toolchains.sort_by(|(a, _), (b, _)| dated(a).cmp(&dated(b)).then(b.cmp(a)));
    toolchains
}

fn system_compilers() -> Vec<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut compilers: Vec<PathBuf> = Vec::new();
    for directory in env::split_paths(&path).chain([PathBuf::from("/usr/bin")]) {
        let rustc = directory.join("rustc");
        let Ok(real) = rustc.canonicalize() else {
            continue;
        };
        if real.file_stem() == Some(OsStr::new("rustup")) || real.starts_with("/proc") {
            continue;
        }
        let seen = compilers
            .iter()
            .any(|known| known.canonicalize().is_ok_and(|known| known == real));
        if real.is_file() && !seen {
            compilers.push(rustc);
        }
    }
    compilers
}

/// All nightlies between two releases have the same number, so that only the commit tells them apart.
fn version(release: &str, llvm: &str, commit: &str) -> String {
    let commit = match release.contains('-') {
        true => format!(", {}", commit.get(..9).unwrap_or(commit)),
        false => String::new(),
    };
    format!("rustc {release} (LLVM {llvm}{commit})")
}

fn parse_release(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(['.', '-']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn ask(program: &Path, arguments: &[&str]) -> Result<String, String> {
    // In a build script, rustup's proxies and rustc would see the toolchain choice of the outer build.
    let output = Command::new(program)
        .args(arguments)
        .env_remove("RUSTUP_TOOLCHAIN")
        .output()
        .map_err(|error| format!("it does not run: {error}"))?;
    if !output.status.success() {
        return Err(format!(
            "it fails: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        ));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_compare_by_number() {
        assert_eq!(parse_release("1.97.0-nightly"), Some((1, 97)));
        assert!(parse_release("1.100.0") > parse_release("1.96.1"));
        assert_eq!(parse_release(""), None);
    }

    #[test]
    fn nightlies_of_a_release_differ() {
        let of = |release, commit| version(release, "22.1.8", commit);
        let (one, two) = ("ac68faa20c58cbcc", "0123456789abcdef");
        assert_eq!(of("1.96.0", one), "rustc 1.96.0 (LLVM 22.1.8)");
        assert_eq!(of("1.96.0", one), of("1.96.0", two));
        assert_ne!(of("1.97.0-nightly", one), of("1.97.0-nightly", two));
    }

    #[test]
    fn untested_releases_come_last() {
        let of = |release| {
            Ok(Compiler {
                rustc: "rustc".into(),
                cargo: "cargo".into(),
                version: String::new(),
                release,
                library: PathBuf::new(),
            })
        };
        let (newer, tested) = ((TESTED.0, TESTED.1 + 1), TESTED);
        let chosen = |examined: Vec<Result<_, String>>| {
            Compiler::first(examined.into_iter()).map(|compiler| compiler.release)
        };
        let old = || Err("old".to_string());
        assert_eq!(chosen(vec![of(newer), old(), of(tested)]), Ok(tested));
        assert_eq!(chosen(vec![old(), of(newer)]), Ok(newer));
        assert_eq!(chosen(vec![old()]), Err(vec!["old".to_string()]));
    }

    #[test]
    fn a_program_that_is_not_there_is_a_reason_not_a_panic() {
        let reason = Compiler::examine(Path::new("/nowhere/rustc")).unwrap_err();
        assert!(reason.contains("does not run"), "{reason}");
    }

    #[test]
    fn the_error_names_both_ways_to_install() {
        let error = CudaBuilderError::NoCompiler {
            minimum: MINIMUM_TEXT,
            rejected: vec!["/usr/bin/rustc: rustc 1.63.0 is older than 1.96".into()],
        };
        let text = error.to_string();
        for needed in [
            "rustc-web rust-web-src",
            "rustup toolchain install nightly -c rust-src",
            "1.63.0",
        ] {
            assert!(text.contains(needed), "{text}");
        }
    }
}
