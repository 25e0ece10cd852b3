//! The element type of KV caches.

use std::fmt;

use serde::{Deserialize, Serialize};
use tandem_attn::{
    plan::BatchLimits,
    problem::{Dtype, Spec},
};

/// How a KV cache stores keys and values.
///
/// ```
/// use tandem_attn::problem::Spec;
/// use tandem_schedule::CacheType;
///
/// let spec = Spec::new(32, 8, 128); // BF16
/// let bytes = CacheType::ALL.map(|cache_type| cache_type.bytes_per_token(&spec));
/// assert_eq!(bytes, [4096, 2048, 2112]);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum CacheType {
    /// In the type in which attention computes: BF16 on a GPU, F32 on the CPU.
    #[default]
    Auto,
    /// E4M3, 8 bits, without scales: numbers above 448 become 448. The step between two numbers is at least 2⁻⁹, so small
    /// keys and values lose bits.
    E4m3,
    /// E4M3, 8 bits, with an F32 scale for each token and KV head, which is computed when keys and values are written. The
    /// largest number of a row becomes 448, so none is cut off.
    E4m3Scaled,
}

impl CacheType {
    /// All types.
    pub const ALL: [Self; 3] = [Self::Auto, Self::E4m3, Self::E4m3Scaled];

    /// Name on the command line and in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::E4m3 => "e4m3",
            Self::E4m3Scaled => "e4m3-scaled",
        }
    }

    /// Whether a number has 8 bits.
    #[must_use]
    pub const fn is_8_bit(self) -> bool {
        !matches!(self, Self::Auto)
    }

    /// The most keys of all prompt chunks of a step ([`Limits::chunk_keys`](crate::Limits::chunk_keys)) for a workspace
    /// with these limits: kernels convert the keys of chunks from 8 bits to 16 in memory of the workspace.
    #[must_use]
    pub const fn chunk_keys(self, limits: &BatchLimits) -> u32 {
        if self.is_8_bit() {
            limits.prefill_keys
        } else {
            u32::MAX
        }
    }

    /// Whether each token and KV head has a scale.
    #[must_use]
    pub const fn is_scaled(self) -> bool {
        matches!(self, Self::E4m3Scaled)
    }

    /// The given heads with keys and values of this type.
    #[must_use]
    pub const fn spec(self, spec: Spec) -> Spec {
        match self {
            Self::Auto => spec,
            Self::E4m3 | Self::E4m3Scaled => spec.with_kv_dtype(Dtype::F8E4M3),
        }
    }

    /// Bytes of the scales of one token, for keys and values of all KV heads.
    #[must_use]
    pub const fn scale_bytes_per_token(self, spec: &Spec) -> u64 {
        match self {
            Self::Auto | Self::E4m3 => 0,
            Self::E4m3Scaled => 2 * spec.kv_heads as u64 * size_of::<f32>() as u64,
        }
    }

    /// Bytes of the keys and values of one token in one layer, with their scales. `spec` has the type of
    /// [`Auto`](Self::Auto).
    #[must_use]
    pub const fn bytes_per_token(self, spec: &Spec) -> u64 {
        self.spec(*spec).kv_bytes_per_token() + self.scale_bytes_per_token(spec)
    }
}

impl fmt::Display for CacheType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_files() {
        for cache_type in CacheType::ALL {
            let json = format!("\"{cache_type}\"");
            assert_eq!(serde_json::to_string(&cache_type).unwrap(), json);
            assert_eq!(
                serde_json::from_str::<CacheType>(&json).unwrap(),
                cache_type
            );
        }
    }
}
