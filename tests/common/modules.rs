//! Families of kernels that tests with random waits leave as they are.

/// Families without kernels that wait at random: they wait for nobody, or attention does not need them.
pub const AS_THEY_ARE: [&str; 3] = ["step", "measure", "quantise"];
