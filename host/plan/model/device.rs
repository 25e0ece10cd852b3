//! What the planner knows of a device: limits and measured costs, as data.
//!
//! What comes with the crate is in `known.rs`. Any other device is a [`DeviceDescription`] of the caller's, or one read
//! by serde, from JSON for example, and [checked](DeviceDescription::check).

mod check;
mod known;
mod support;

use kernels_gpu::registry::Sm;
use serde::{Deserialize, Serialize};

use super::PodDescription;
use crate::plan::data::{Kernel, PlanError};

/// A device: its limits, and what work costs on it.
///
/// ```
/// use tandem_attn::plan::DeviceDescription;
///
/// let h200 = DeviceDescription::named("h200")?;
/// assert_eq!(h200.sms, 132);
/// // Where a measurement found another bandwidth:
/// let slower = DeviceDescription { read_bytes_per_ns: 4300.0, ..h200 };
/// # assert!(slower.check().is_ok());
/// # Ok::<(), tandem_attn::plan::PlanError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object that describes a device")]
pub struct DeviceDescription {
    /// Short name.
    pub name: String,
    /// Major and minor compute capability.
    pub compute_capability: (u32, u32),
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Shared memory of an SM, in bytes.
    pub shared_bytes_per_sm: u32,
    /// Shared memory that one CTA can have, in bytes.
    pub shared_bytes_per_cta: u32,
    /// 32-bit registers of an SM.
    pub registers_per_sm: u32,
    /// L2 cache, in bytes.
    pub l2_bytes: u64,
    /// Read bandwidth of the whole device, measured.
    pub read_bytes_per_ns: f64,
    /// 16-bit attention throughput of the whole device, measured.
    pub flops_per_ns: f64,
    /// One more kernel launch.
    pub launch_ns: f64,
    /// What merging costs a step at least, whatever its size.
    pub merge_ns: f64,
    /// How much later than its last piece a row that is cut is done, and what each of its states adds: what decides
    /// between ways to cut.
    #[serde(default)]
    pub merge_last_ns: f64,
    /// See [`merge_last_ns`](Self::merge_last_ns).
    #[serde(default)]
    pub merge_state_ns: f64,
    /// Row blocks of at most this many query tokens are decodes.
    pub decode_max_tokens: u32,
    /// The decode kernel.
    pub decode: DecodeDescription,
    /// The prefill kernel.
    pub prefill: PrefillDescription,
    /// Hybrid batches.
    #[serde(default)]
    pub pod: PodDescription,
}

/// Costs of decodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeDescription {
    /// CTAs that stay resident on an SM.
    pub ctas_per_sm: u32,
    /// Only kernels with so many rows, ascending; empty: all there are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<u32>,
    /// Takes tiles of any size, of so many keys: `rows` are those to choose from. None: there are kernels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<u32>,
    /// Time of a unit beyond its bytes and FLOPs: claiming, filling and draining the pipeline.
    pub unit_ns: f64,
    /// What single row tiles reach, where that is not what the device does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tiles: Vec<TileCost>,
    /// Tiles whose rows see different keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joint: Option<JointDescription>,
}

/// What the kernel of a row tile reaches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TileCost {
    /// Rows.
    pub m: u32,
    /// Of QK, if it is not the same for all; the first that fits counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<u32>,
    /// CTAs of it that share what one CTA of the device has, where a step runs nothing else.
    #[serde(default = "one_cta")]
    pub share: u32,
    /// How many times its part of the bandwidth a CTA takes where others have nothing to do.
    #[serde(default = "one")]
    pub alone: f64,
    /// The part of the device's read bandwidth that it streams keys with.
    pub read: f64,
    /// Throughput on keys that need not be waited for, of the whole device.
    pub flops_per_ns: f64,
    /// Time of a unit beyond its keys.
    pub unit_ns: f64,
    /// What of that is left where others of its CTA are under way; all of it if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queued_ns: Option<f64>,
    /// What each state of a row that is cut adds to its merge, where it is not
    /// [`merge_state_ns`](DeviceDescription::merge_state_ns).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_ns: Option<f64>,
}

/// Tiles whose rows see different keys, and what is saved by them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JointDescription {
    /// What a step pays for cutting such a tile.
    pub cut_ns: f64,
    /// What a step pays for having prefixes in items of their own: merging.
    pub apart_ns: f64,
    /// What each of its launches behind the first adds to that: units of several kinds fill the device less evenly, and
    /// merging waits for the last of them.
    #[serde(default)]
    pub behind_ns: f64,
    /// They move at most so many times the bytes of the packing that moves the fewest; and where one tile could
    /// hold all rows, they read at most 1.05 times as many times the unique keys.
    #[serde(default = "one")]
    pub bytes: f64,
}

const fn one() -> f64 {
    1.0
}

const fn one_cta() -> u32 {
    1
}

/// Costs of prefills, and which length takes how many rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefillDescription {
    /// CTAs that stay resident on an SM.
    pub ctas_per_sm: u32,
    /// Takes tiles of any size, of so many keys. None: there are kernels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<u32>,
    /// Rows by the query tokens of a row block: the first step that reaches them decides.
    pub by_q_len: Vec<QueryStep>,
    /// Heads whose throughput is not [`flops_per_ns`](DeviceDescription::flops_per_ns).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub of_heads: Vec<HeadRate>,
    /// Time of a unit beyond its bytes and FLOPs.
    pub unit_ns: f64,
}

/// What prefills of some heads reach.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadRate {
    /// Of QK.
    pub head_dim: u32,
    /// In parts of the device's throughput.
    pub part: f64,
}

impl PrefillDescription {
    /// The part of the device's throughput that heads reach.
    pub(in crate::plan) fn part_of(&self, head_dim: u32) -> f64 {
        let mut rates = self.of_heads.iter();
        let rate = rates.find(|rate| rate.head_dim == head_dim);
        rate.map_or(1.0, |rate| rate.part)
    }
}

/// A leaf of the decision tree for the tile of a prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueryStep {
    /// Only for queries and keys of this head dimension; none: any. Such leaves come first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<u32>,
    /// Up to this many query tokens; none: any number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub up_to: Option<u32>,
    /// Rows; those of the kernel that has the most of no more, else the fewest.
    pub rows: u32,
    /// Query heads of a KV head that share the tile, at most: taken is the largest divisor of their number;
    /// none: all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pack: Option<u32>,
}

impl DeviceDescription {
    /// The description of a known device.
    ///
    /// # Errors
    /// [`PlanError::UnknownDevice`].
    pub fn named(name: &str) -> Result<Self, PlanError> {
        let unknown = || PlanError::UnknownDevice {
            got: name.to_owned(),
            known: Self::names().collect::<Vec<_>>().join(", "),
        };
        let known = known::KNOWN.iter().find(|(known, _)| *known == name);
        known.map(|(_, describe)| describe()).ok_or_else(unknown)
    }

    /// Names of the known devices.
    pub fn names() -> impl Iterator<Item = &'static str> {
        known::KNOWN.iter().map(|(name, _)| *name)
    }

    /// CTAs of a kernel that stay resident on an SM.
    #[must_use]
    pub const fn ctas_per_sm(&self, kernel: Kernel) -> u32 {
        match kernel {
            Kernel::Decode => self.decode.ctas_per_sm,
            Kernel::Prefill => self.prefill.ctas_per_sm,
        }
    }

    /// Time of a unit of a kernel beyond its bytes and FLOPs.
    #[must_use]
    pub const fn unit_ns(&self, kernel: Kernel) -> f64 {
        match kernel {
            Kernel::Decode => self.decode.unit_ns,
            Kernel::Prefill => self.prefill.unit_ns,
        }
    }

    /// What CTAs share.
    #[must_use]
    pub const fn sm(&self) -> Sm {
        Sm {
            shared_bytes: self.shared_bytes_per_sm,
            registers: self.registers_per_sm,
        }
    }

    /// CTAs of a kernel that run at the same time.
    #[must_use]
    pub const fn resident_ctas(&self, kernel: Kernel) -> u32 {
        self.sms * self.ctas_per_sm(kernel)
    }

    /// Whether it is a CPU: only GPUs have a compute capability.
    #[must_use]
    pub const fn is_cpu(&self) -> bool {
        self.compute_capability.0 == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_device_is_described_soundly() {
        for name in DeviceDescription::names() {
            let device = DeviceDescription::named(name).unwrap();
            assert_eq!(device.name, name);
            device.check().unwrap();
            let json = serde_json::to_string(&device).unwrap();
            let read: DeviceDescription = serde_json::from_str(&json).unwrap();
            assert_eq!(read, device);
        }
    }
}
