//! Errors of subcommands and their exit codes.

use std::{io, path::PathBuf, process::ExitCode};

use tandem_attn::{
    Error, plan::PlanError, problem::ProblemError, shard::RankError, tensor::ShapeError,
};
use tandem_schedule::ScheduleError;
use thiserror::Error;

use crate::{backend::meter::MeterError, table::visible};

/// Why a subcommand failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Failure {
    /// The computed result is wrong.
    #[error("{0}")]
    Wrong(String),
    /// An invalid flag, file or tensor.
    #[error("{0}")]
    Input(String),
    /// The backend is not available.
    #[error("{0}")]
    Backend(String),
    /// A GPU has too little memory for what was asked.
    #[error("{0}")]
    GpuMemory(String),
    /// A file that cannot be read.
    #[error("cannot read {}: {error}", visible(&path.display().to_string(), false))]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
    /// A file that cannot be written.
    #[error("cannot write {}: {error}", visible(&path.display().to_string(), false))]
    Write {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: io::Error,
    },
}

impl Failure {
    /// The exit code of the process.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Wrong(_) | Self::Write { .. } => 1,
            Self::Input(_) | Self::Read { .. } => 2,
            Self::Backend(_) | Self::GpuMemory(_) => 3,
        })
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::Problem(_)
            | Error::Plan(_)
            | Error::Shape(_)
            | Error::Extent { .. }
            | Error::Dtype { .. }
            | Error::DtypesDiffer { .. }
            | Error::HeadDim { .. }
            | Error::IndexOutOfRange { .. }
            | Error::TensorMap { .. } => Self::Input(in_flags(&error.to_string())),
            // The input's heads or types are unsupported; the backend itself is fine.
            Error::NoInstance { .. } => Self::Input(error.to_string()),
            Error::NoModules { .. } => Self::Input(format!("TANDEM_MODULES: {error}")),
            Error::Rank(RankError::Group { .. }) => Self::Input(error.to_string()),
            Error::NoMachineCode { .. } => Self::Backend(in_flags(&error.to_string())),
            Error::NoDriver { .. }
            | Error::NoDevice { .. }
            | Error::UnsupportedArchitecture { .. }
            | Error::PtxTooNew { .. }
            | Error::ModuleRefused { .. }
            | Error::NoKernel { .. }
            | Error::NoVariant { .. }
            | Error::VariantArchitecture { .. }
            | Error::NotOnDevice { .. }
            | Error::DamagedKernels { .. }
            | Error::ForeignContext { .. }
            | Error::Rank(RankError::NoPeerAccess { .. } | RankError::NoNccl { .. })
            | Error::OldDriver { .. } => Self::Backend(error.to_string()),
            Error::OutOfMemory { bytes, free, total } => {
                too_little_memory([bytes, free, total], A_SMALLER_CASE)
            }
            // Memory of the host that the device reads.
            Error::Driver {
                code: OUT_OF_MEMORY,
                ..
            } => Self::GpuMemory(format!("{error}: give {A_SMALLER_CASE}")),
            _ => Self::Wrong(error.to_string()),
        }
    }
}

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;

/// What to give if a case does not fit.
pub(crate) const A_SMALLER_CASE: &str = "a smaller case, or free memory";

/// The failure of an allocation of so many bytes on a GPU with so many free ones of so many in all, and what to give instead.
pub(crate) fn too_little_memory([bytes, free, total]: [usize; 3], instead: &str) -> Failure {
    Failure::GpuMemory(format!(
        "{bytes} bytes do not fit in the GPU's memory: {free} of {total} are free; give {instead}"
    ))
}

/// The features with which the command serves models.
pub(crate) const OF_MODELS: &str = "cuda,engine";

/// How to install the command with other features.
pub(crate) fn install_with(features: &str) -> String {
    format!("`cargo install --path cli --features {features}` in a clone of tandem-attn")
}

/// The error for something that this build lacks, with the way to get it, and perhaps another way out.
pub(crate) fn built_without(what: &str, features: &str, otherwise: &str) -> Failure {
    Failure::Backend(format!(
        "this tandem was built without {what}: install it with {}{otherwise}",
        install_with(features)
    ))
}

/// A message of the library whose advice is a flag of the command.
pub(crate) fn in_flags(message: &str) -> String {
    message
        .replace(
            "allow it with Gpu::builder().compile_ptx(…)",
            "allow it with --compile-ptx",
        )
        .replace("use Compute::F16", "leave --compute f8 out")
        .replace(
            "use `KvScales::One`",
            "leave --token-scales out, or give --kv-dtype f8e4m3",
        )
}

impl From<MeterError> for Failure {
    fn from(error: MeterError) -> Self {
        Self::Backend(error.to_string())
    }
}

impl From<ScheduleError> for Failure {
    fn from(error: ScheduleError) -> Self {
        Self::Input(error.to_string())
    }
}

macro_rules! through_error {
    ($($part:ty),*) => {$(
        impl From<$part> for Failure {
            fn from(error: $part) -> Self {
                Error::from(error).into()
            }
        }
    )*};
}
through_error!(PlanError, ProblemError, ShapeError);

#[cfg(test)]
mod tests {
    use tandem_attn::problem::Dtype;

    use super::*;

    /// They were reported as wrong results.
    #[test]
    fn what_the_machine_lacks_is_not_a_wrong_result() {
        let driver = |code| Error::Driver {
            call: "cuMemAlloc_v2",
            code,
            name: "CUDA_ERROR".to_owned(),
            text: "as it was told".to_owned(),
        };
        let (from, to) = (0, 1);
        for error in [
            driver(OUT_OF_MEMORY),
            Error::OutOfMemory {
                bytes: 2,
                free: 1,
                total: 3,
            },
        ] {
            let failure = Failure::from(error);
            assert!(matches!(failure, Failure::GpuMemory(_)), "{failure:?}");
        }
        for error in [
            Error::ForeignContext { ordinal: 0 },
            RankError::NoPeerAccess { from, to }.into(),
        ] {
            assert!(
                matches!(error.clone().into(), Failure::Backend(_)),
                "{error}"
            );
        }
        assert!(matches!(driver(700).into(), Failure::Wrong(_)));
        let error = Error::NoMachineCode {
            device: "B200".to_owned(),
            compute: (10, 0),
            arch: "sm_80",
            family: "attention",
            refused: None,
        };
        let failure = Failure::from(error);
        assert!(matches!(failure, Failure::Backend(_)));
        assert!(
            failure.to_string().ends_with("allow it with --compile-ptx"),
            "{failure}"
        );
    }

    #[test]
    fn advice_names_flags() {
        let dtype = Dtype::BF16;
        let failure = Failure::from(ShapeError::Scaled { dtype });
        assert_eq!(
            failure.to_string(),
            "scales are given for keys and values in BF16, but only 8-bit types have scales: leave --token-scales out, or \
             give --kv-dtype f8e4m3"
        );
    }
}
