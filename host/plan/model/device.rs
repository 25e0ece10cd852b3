//! Descriptions of devices for the planner: limits and measured costs, as data.
//!
//! The known devices are in `known.rs`. For any other device, construct a [`DeviceDescription`], or read one
//! with serde, for example from JSON, and [check](DeviceDescription::check) it.

mod check;
mod known;
mod named_tiles;
mod support;

use kernels_gpu::{Hooks, registry::Sm};
use serde::{Deserialize, Serialize};

use super::PodDescription;
use crate::{
    plan::data::{Kernel, PlanError},
    problem::Compute,
};

/// A device: its limits, and the cost of work on it.
///
/// ```
/// use tandem_attn::plan::DeviceDescription;
///
/// let h200 = DeviceDescription::named("h200")?;
/// assert_eq!(h200.sms, 132);
/// // With another measured bandwidth:
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
    /// Time of one more kernel launch.
    pub launch_ns: f64,
    /// Minimum time of merging in a step.
    pub merge_ns: f64,
    /// Time from the end of a split row's last piece to the end of its merge. The planner compares ways to split with this and
    /// [`merge_state_ns`](Self::merge_state_ns).
    #[serde(default)]
    pub merge_last_ns: f64,
    /// Time that each partial state adds to the merge of a split row.
    #[serde(default)]
    pub merge_state_ns: f64,
    /// Row blocks of at most this many query tokens are decodes.
    pub decode_max_tokens: u32,
    /// If all row blocks of a batch have more tokens than that, but at most this many rows (query tokens × query heads of a KV
    /// head), they are decodes, too, except with fixed splits.
    #[serde(default)]
    pub decode_max_rows: u32,
    /// The same with 8-bit keys, which prefills convert first: the rows may fill this many of the widest tiles. With at most
    /// `decode_max_rows` rows, other row blocks may have fewer tokens. One if a description lacks it.
    #[serde(default = "one_tile")]
    pub decode_max_tiles: u32,
    /// Costs of decodes.
    pub decode: DecodeDescription,
    /// Costs of prefills.
    pub prefill: PrefillDescription,
    /// Hybrid batches.
    #[serde(default)]
    pub pod: PodDescription,
    /// The variants of the program whose kernels there are. Plans name no others of them. None: those of any name, each with all
    /// kernels that variants can replace. It is no part of JSON; that of a GPU has the variants that it was opened with.
    #[serde(skip)]
    pub variants: Option<Vec<Hooks>>,
}

/// Costs of decodes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecodeDescription {
    /// CTAs that stay resident on an SM.
    pub ctas_per_sm: u32,
    /// If not empty, only kernels with these numbers of rows are used; ascending.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<u32>,
    /// For devices that take tiles of any size: the keys of a tile, whose rows are chosen from `rows`. None: tiles are those of
    /// compiled kernels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<u32>,
    /// Time of a unit beyond its bytes and FLOPs: claiming, filling and draining the pipeline.
    pub unit_ns: f64,
    /// Speeds of single tile sizes that differ from those of the device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tiles: Vec<TileCost>,
    /// Tiles whose rows see different keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joint: Option<JointDescription>,
}

/// The speed of kernels with one tile size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TileCost {
    /// Rows.
    pub m: u32,
    /// Head dimension of keys or of values, the larger of them, if the speed depends on it. The first matching entry counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<u32>,
    /// Bits of an element of keys, if the speed depends on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_bits: Option<u32>,
    /// The number of its CTAs that share the part of one CTA of the device, if a step runs nothing else.
    #[serde(default = "one_cta")]
    pub share: u32,
    /// How many times its part of the bandwidth a CTA gets while other CTAs are idle.
    #[serde(default = "one")]
    pub alone: f64,
    /// The part of the device's read bandwidth at which it streams keys.
    pub read: f64,
    /// Throughput of the whole device on keys that are already loaded.
    pub flops_per_ns: f64,
    /// Time of a unit beyond its keys.
    pub unit_ns: f64,
    /// The part of this time that remains if other units of the same CTA are in progress. None: all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queued_ns: Option<f64>,
    /// Time that each partial state of a split row adds to its merge, if it differs from
    /// [`merge_state_ns`](DeviceDescription::merge_state_ns).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_ns: Option<f64>,
    /// Partial states take so many times as long as their bytes at the device's bandwidth, and all CTAs bear that together,
    /// those without a unit too: a few CTAs write at many times their part of the bandwidth. None: each unit takes as long
    /// as its states' bytes at its part of the bandwidth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spread_states: Option<f64>,
    /// Time that cutting such decodes adds to a step that merges nothing otherwise, if it differs from
    /// [`merge_ns`](DeviceDescription::merge_ns).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cut_ns: Option<f64>,
    /// When all decodes of a step take a wider tile instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wider: Option<WiderTile>,
    /// The most keys of all units, for each SM, with which decodes take the kernel that otherwise shares SMs with a prefill: it has
    /// less shared memory, and starts sooner. None: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub few_keys: Option<f64>,
    /// `[units, keys]` for each SM: decodes take smaller tiles instead, of fewer rows or with shorter blocks of keys, if these
    /// are at most so many units with at most so many keys in all. None: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub smaller: Option<[f64; 2]>,
    /// Decodes that fit a tile of fewer rows join this one if their units together take less than so many launches: SMs are idle for
    /// a while when they change kernels. None: 3.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joined: Option<f64>,
}

/// A wider tile for decodes that would fit a smaller one, and when it is faster.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WiderTile {
    /// Its rows.
    pub rows: u32,
    /// The fewest units for each resident CTA.
    pub units: f64,
    /// The fewest and the most keys of a unit, in the mean.
    pub keys: [u32; 2],
}

/// Costs of joint tiles, whose rows see different keys.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JointDescription {
    /// Time that splitting such a tile adds to a step.
    pub cut_ns: f64,
    /// Time that separate items for prefixes add to a step, by their merges.
    pub apart_ns: f64,
    /// Time that each launch after the first adds to it: units of several kinds fill the device less evenly, and
    /// merging waits for the last of them.
    #[serde(default)]
    pub behind_ns: f64,
    /// Joint tiles may move at most this many times the bytes of the packing that moves the fewest. If one tile could
    /// hold all rows, they may also read at most this number times 1.05 times the unique keys.
    #[serde(default = "one")]
    pub bytes: f64,
}

const fn one() -> f64 {
    1.0
}

const fn one_tile() -> u32 {
    1
}

const fn one_cta() -> u32 {
    1
}

/// Costs of prefills, and the rows of their tiles by prompt length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefillDescription {
    /// CTAs that stay resident on an SM.
    pub ctas_per_sm: u32,
    /// For devices that take tiles of any size: the keys of a tile. None: tiles are those of compiled kernels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<u32>,
    /// Rows of a tile by the query tokens of a row block. The first step that includes the number decides.
    pub by_q_len: Vec<QueryStep>,
    /// Head dimensions whose throughput differs from [`flops_per_ns`](DeviceDescription::flops_per_ns).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub of_heads: Vec<HeadRate>,
    /// Time of a unit beyond its bytes and FLOPs.
    pub unit_ns: f64,
}

/// Throughput of prefills with one head dimension.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeadRate {
    /// Head dimension of QK.
    pub head_dim: u32,
    /// Throughput as a part of the device's.
    pub part: f64,
}

impl PrefillDescription {
    /// Time that cutting prefills adds to a step of any device in addition to the merge: partial states are written and read.
    pub const CUT_NS: u32 = 3500;

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
    /// Only for products of this kind; none: any. Such leaves come first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute: Option<Compute>,
    /// Up to this many query tokens; none: any number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub up_to: Option<u32>,
    /// Maximum number of rows. The kernel with the most rows up to this number is used, or the one with the fewest rows.
    pub rows: u32,
    /// Maximum number of query heads of a KV head that share a tile. The largest divisor of the group size up to this number is
    /// used. None: all of them.
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

    /// The resources that CTAs share.
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
