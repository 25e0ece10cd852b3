//! The element type of KV caches.

use std::fmt;

use serde::{Deserialize, Serialize};
use tandem_attn::{
    plan::{BatchLimits, DeviceDescription, PlanOptions, pod::PodMode, tiles::TileTable},
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

    /// What a device lacks to serve the given heads, which have the type of [`Auto`](Self::Auto), on caches of this type. It
    /// may still have kernels that compute them, slowly.
    #[must_use]
    pub fn missing(self, device: &DeviceDescription, spec: &Spec) -> Option<String> {
        if !self.is_8_bit() {
            return device.supports(spec).err().map(|error| error.to_string());
        }
        let spec = self.spec(*spec);
        if let Err(error) = device.supports(&spec) {
            return Some(error.to_string());
        }
        // The engine plans decodes so. The planner does not know the scales of a pool: at the launch, kernels for scales of
        // each token take the place of those of the plan.
        let planning = PlanOptions::default().with_pod(PodMode::Serial);
        let tiles = match TileTable::of_options(device, &spec, &planning) {
            Ok(tiles) => tiles,
            Err(error) => return Some(error.to_string()),
        };
        // On Hopper, decode kernels take prompts of other heads: each tile converts the keys again.
        if device.compute_capability.0 == 9 && !tiles.has_prefills() {
            return Some(format!(
                "prompts with heads of {} in 8 bits would be several times as slow as in 16",
                spec.head_dim_qk
            ));
        }
        let others = tiles.others(device, &spec, &planning);
        let tables = || std::iter::once(&tiles).chain(others.iter().flatten());
        // Prefills run decodes of larger groups, and convert all their keys first. Workspaces of graphs have no room for these.
        if tables().any(|tiles| !tiles.has_decodes()) {
            return Some(format!(
                "no decode kernel holds the {} query heads of a KV head",
                spec.group()
            ));
        }
        let kernels = tables().flat_map(TileTable::decodes);
        let mut kernels = kernels.filter_map(|choice| choice.kernel);
        let without = kernels.find(|kernel| self.is_scaled() && kernel.by_token().is_none());
        without.map(|kernel| {
            format!("there is no kernel that does the same as {kernel} with scales of each token")
        })
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

    /// Kernels with scales of each token have no soft cap.
    #[test]
    fn scales_of_each_token_need_kernels_of_their_own() {
        let h200 = DeviceDescription::named("h200").unwrap();
        let mut spec = Spec::new(32, 8, 128);
        let missing = |spec: &Spec| CacheType::ALL.map(|of| of.missing(&h200, spec));
        assert_eq!(missing(&spec), [None, None, None]);
        spec.variant.soft_cap = Some(30.0);
        let [auto, plain, scaled] = missing(&spec);
        assert_eq!((auto, plain), (None, None));
        assert!(scaled.is_some_and(|reason| reason.contains("with scales of each token")));
    }

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
