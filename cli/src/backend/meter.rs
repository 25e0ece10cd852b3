//! Reads what a GPU consumes.

use thiserror::Error;

/// Why energy could not be measured.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum MeterError {
    /// The library that knows the energy of NVIDIA GPUs is not there.
    #[error(
        "no NVML: {file} does not open ({reason}): install the management library of the NVIDIA driver, or leave --energy out"
    )]
    Missing {
        /// The file.
        file: &'static str,
        /// What the loader says.
        reason: String,
    },
    /// The library or the driver is too old.
    #[error("{function} is not in {file}: install a newer NVIDIA driver, or leave --energy out")]
    NoFunction {
        /// The file.
        file: &'static str,
        /// The function.
        function: &'static str,
    },
    /// A call failed.
    #[error(
        "{call} failed with code {code} ({text}): leave --energy out if the GPU does not report it"
    )]
    Call {
        /// The function.
        call: &'static str,
        /// Its result.
        code: i32,
        /// The library's words for it.
        text: String,
    },
    /// The counter of a busy GPU stayed the same.
    #[error(
        "the energy counter stayed at {millijoules} mJ for {seconds:.1} s of runs: leave --energy out on this GPU"
    )]
    Still {
        /// The counter.
        millijoules: u64,
        /// Time of the runs.
        seconds: f64,
    },
}

/// What a GPU consumes, all of the board.
pub trait Meter {
    /// Energy since the driver was loaded, in millijoules; none if the GPU has no such counter.
    ///
    /// # Errors
    /// [`MeterError::Call`].
    fn millijoules(&mut self) -> Result<Option<u64>, MeterError>;

    /// Power in milliwatts, as an average of up to a second.
    ///
    /// # Errors
    /// [`MeterError::Call`].
    fn milliwatts(&mut self) -> Result<u32, MeterError>;
}
