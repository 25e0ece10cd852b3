use std::{io, path::PathBuf};

use crate::ptx::MarkerError;

/// Why a GPU crate could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaBuilderError {
    /// The path passed to [`CudaBuilder::new`](crate::CudaBuilder::new) has no crate.
    #[error("there is no GPU crate at {}: it has no Cargo.toml", .0.display())]
    CratePathDoesntExist(PathBuf),

    /// No suitable rustc that can build for the GPU.
    #[error(
        "no compiler for GPU code was found. It takes rustc {minimum} or newer with the sources of \
         its library; install one by\n    \
         apt-get install --no-install-recommends rustc-web rust-web-src   (Debian 12), or\n    \
         rustup toolchain install nightly -c rust-src\n\
         or name one in TANDEM_RUSTC. Looked at:{}", list(.rejected)
    )]
    NoCompiler {
        /// The oldest suitable release.
        minimum: &'static str,
        /// Each candidate and the reason why it is unsuitable.
        rejected: Vec<String>,
    },

    /// The GPU crate does not compile.
    #[error("{} does not compile for {arch}:\n{diagnostics}", .path.display())]
    BuildFailed {
        /// The crate.
        path: PathBuf,
        /// For example `sm_90a`.
        arch: &'static str,
        /// Output of rustc and cargo.
        diagnostics: String,
    },

    /// A kernel's launch bounds could not be written into the PTX.
    #[error(transparent)]
    Marker(#[from] MarkerError),

    /// ptxas rejected the PTX.
    #[error("ptxas refuses {}:\n{log}", .ptx.display())]
    AssemblyFailed {
        /// The PTX, kept so that the line named by ptxas can be inspected.
        ptx: PathBuf,
        /// The output of ptxas.
        log: String,
    },

    /// `TANDEM_PTXAS` names something that is not ptxas.
    #[error("TANDEM_PTXAS names {}, which does not answer as ptxas: {reason}", .path.display())]
    NotAnAssembler {
        /// The value of the variable.
        path: PathBuf,
        /// The result of asking it for its version.
        reason: String,
    },

    /// The PTX could not be copied to the file given to [`copy_to`](crate::CudaBuilder::copy_to).
    #[error("cannot copy the PTX to {}: {source}", .path.display())]
    FailedToCopyPtxFile {
        /// The destination.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },

    /// A file or program that the build needs is not usable.
    #[error("cannot {action}: {source}")]
    Io {
        /// The attempted action, with the path.
        action: String,
        /// The system's error.
        source: io::Error,
    },
}

impl CudaBuilderError {
    /// For `map_err`: an [`Io`](Self::Io) error with the attempted action.
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
