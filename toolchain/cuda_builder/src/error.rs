use std::{io, path::PathBuf};

use crate::ptx::MarkerError;

/// Why a GPU crate was not built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaBuilderError {
    /// The path handed to [`CudaBuilder::new`](crate::CudaBuilder::new) holds no crate.
    #[error("there is no GPU crate at {}: it has no Cargo.toml", .0.display())]
    CratePathDoesntExist(PathBuf),

    /// No rustc that can build for the GPU.
    #[error(
        "no compiler for GPU code was found. It takes rustc {minimum} or newer with the sources of \
         its library; install one by\n    \
         apt-get install --no-install-recommends rustc-web rust-web-src   (Debian 12), or\n    \
         rustup toolchain install nightly -c rust-src\n\
         or name one in TANDEM_RUSTC. Looked at:{}", list(.rejected)
    )]
    NoCompiler {
        /// The oldest release that will do.
        minimum: &'static str,
        /// Each candidate, and what it lacks.
        rejected: Vec<String>,
    },

    /// The GPU crate does not compile. Its diagnostics have gone to standard error as they came.
    #[error("{} does not compile for {arch}:\n{diagnostics}", .path.display())]
    BuildFailed {
        /// The crate.
        path: PathBuf,
        /// As in `sm_90a`.
        arch: &'static str,
        /// What rustc and cargo said.
        diagnostics: String,
    },

    /// A kernel's launch bounds could not be written into the PTX.
    #[error(transparent)]
    Marker(#[from] MarkerError),

    /// ptxas turned the PTX down.
    #[error("ptxas refuses {}:\n{log}", .ptx.display())]
    AssemblyFailed {
        /// The PTX, kept for a look at the line that ptxas names.
        ptx: PathBuf,
        /// What ptxas said.
        log: String,
    },

    /// `TANDEM_PTXAS` names something that is not ptxas.
    #[error("TANDEM_PTXAS names {}, which does not answer as ptxas: {reason}", .path.display())]
    NotAnAssembler {
        /// The value of the variable.
        path: PathBuf,
        /// What happened when it was asked for its version.
        reason: String,
    },

    /// The PTX could not be copied to where [`copy_to`](crate::CudaBuilder::copy_to) said.
    #[error("cannot copy the PTX to {}: {source}", .path.display())]
    FailedToCopyPtxFile {
        /// The destination.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },

    /// A file or program that the build needs could not be used.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was being done, with the path.
        action: String,
        /// What the system said.
        source: io::Error,
    },
}

impl CudaBuilderError {
    /// For `map_err`: an [`Io`](Self::Io) that says what was being done.
    pub(crate) fn io(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Io { action, source }
    }
}

fn list(lines: &[String]) -> String {
    if lines.is_empty() {
        return " nothing, there is no rustc on this machine".into();
    }
    lines.iter().map(|line| format!("\n    {line}")).collect()
}
