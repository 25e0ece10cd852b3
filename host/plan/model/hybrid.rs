//! What a device does with hybrid batches, as data.

use serde::{Deserialize, Serialize};

use crate::plan::data::Tile;

/// What a device can do with hybrid batches, and what it costs there.
///
/// By default nothing overlaps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodDescription {
    /// The part of the shorter operation's time that two plain streams do not hide.
    pub streams_loss: f64,
    /// The same where the prefills leave half of the SMs to the decodes.
    #[serde(default = "one")]
    pub apart_loss: f64,
    /// What decodes take alone, in parts of what their bytes say: the configurations' times are in these parts, too.
    #[serde(default = "one")]
    pub decode_alone: f64,
    /// What a launch of prefills, all decodes, and both side by side take beside what their tiles and keys do: until they
    /// run, and from their last key on.
    #[serde(default)]
    pub prefill_ns: f64,
    /// See [`prefill_ns`](Self::prefill_ns).
    #[serde(default)]
    pub decode_ns: f64,
    /// See [`prefill_ns`](Self::prefill_ns).
    #[serde(default)]
    pub fused_ns: f64,
    /// What a tile of prefills takes beside its products.
    #[serde(default)]
    pub tile_ns: f64,
    /// Configurations of the fused form; none: it is not used on this device.
    pub configs: Vec<PodConfig>,
}

const fn one() -> f64 {
    1.0
}

/// One shape of the fused form.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodConfig {
    /// Short name.
    pub name: String,
    /// One kernel has both, whose CTAs take turns by tickets of their SM, as in the paper; else two kernels share
    /// the SMs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_tickets: bool,
    /// Tile of the prefills. One kernel with both has the tiles of its own, whatever is said here.
    pub prefill: Tile,
    /// Query heads of a KV head that it holds at most, as in [`QueryStep::pack`](crate::plan::QueryStep::pack).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_pack: Option<u32>,
    /// Tile of the decodes; none: both kernels are those that run alone, on SMs of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode: Option<Tile>,
    /// Only for keys and values of so many bits; none: of any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_bits: Option<u32>,
    /// Decode units that one CTA runs side by side.
    pub virtual_decodes: u32,
    /// What prefill alone takes in this shape, in parts of what it takes in its best.
    pub prefill_slowdown: f64,
    /// The same for decode, in parts of what its bytes say (see [`PodDescription::decode_alone`]).
    pub decode_slowdown: f64,
    /// The part of the shorter operation's time that is not hidden; where `shares` say nothing.
    #[serde(default)]
    pub overlap_loss: f64,
    /// How two persistent kernels slow each other down, from few prefill CTAs to one on every SM. Without them
    /// `overlap_loss` counts, and the CTAs are not divided: for one kernel, or where nothing was measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<Share>,
}

impl PodConfig {
    /// Whether two kernels share SMs, and how they slow each other down there is known.
    pub(crate) const fn shares_sms(&self) -> bool {
        !self.by_tickets && self.decode.is_some() && !self.shares.is_empty()
    }

    /// What prefills take while decodes run beside them on such a share, in parts of what they take alone in their best
    /// shape.
    pub(in crate::plan) const fn prefill_slower(&self, share: Share) -> f64 {
        self.prefill_slowdown * share.prefill
    }

    /// Whether prefills and decodes have SMs of their own, and the kernels that run alone.
    pub(in crate::plan) const fn is_apart(&self) -> bool {
        !self.by_tickets && self.decode.is_none()
    }
}

/// How prefills and decodes slow each other down while both run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Share {
    /// SMs with a prefill CTA, of all.
    pub part: f64,
    /// What a prefill takes, in parts of what it takes alone.
    pub prefill: f64,
    /// What decodes lose of their rate.
    pub decode: f64,
}

impl Share {
    /// Between two that were measured.
    pub(in crate::plan) fn between(self, other: Self, part: f64) -> Self {
        let way = ((part - self.part) / (other.part - self.part)).clamp(0.0, 1.0);
        let at = |from: f64, to: f64| from + way * (to - from);
        Self {
            part,
            prefill: at(self.prefill, other.prefill),
            decode: at(self.decode, other.decode),
        }
    }
}

impl Default for PodDescription {
    fn default() -> Self {
        Self {
            streams_loss: 1.0,
            apart_loss: 1.0,
            decode_alone: 1.0,
            prefill_ns: 0.0,
            decode_ns: 0.0,
            fused_ns: 0.0,
            tile_ns: 0.0,
            configs: Vec::new(),
        }
    }
}
