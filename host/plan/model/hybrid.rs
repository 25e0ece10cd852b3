//! What a device does with hybrid batches, as data.

use serde::{Deserialize, Serialize};

use crate::plan::data::Tile;

/// What a device can do with hybrid batches, and what it costs there.
///
/// By default nothing overlaps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PodDescription {
    /// The part of the time of busy SMs for which decodes wait on a second stream.
    pub streams_loss: f64,
    /// The same of the time for which prefills leave SMs idle.
    #[serde(default = "one")]
    pub idle_loss: f64,
    /// Time of decodes alone, relative to the time that their bytes need. The configurations' times are relative to
    /// this as well.
    #[serde(default = "one")]
    pub decode_alone: f64,
    /// Fixed times, in addition to those of tiles and keys: of a launch of prefills, of all decodes, and of both side
    /// by side. They pass before the kernels run and after their last key.
    #[serde(default)]
    pub prefill_ns: f64,
    /// See [`prefill_ns`](Self::prefill_ns).
    #[serde(default)]
    pub decode_ns: f64,
    /// See [`prefill_ns`](Self::prefill_ns).
    #[serde(default)]
    pub fused_ns: f64,
    /// Time between the prefills and the decodes behind them on the same stream, in addition to the times of both alone.
    #[serde(default)]
    pub behind_ns: f64,
    /// Time of a prefill tile in addition to its products.
    #[serde(default)]
    pub tile_ns: f64,
    /// Configurations of the fused form. If empty, it is not used on this device.
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
    /// One kernel has both operations, and its CTAs alternate by tickets of their SM, as in the paper. Otherwise two
    /// kernels share the SMs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub by_tickets: bool,
    /// Tile of the prefills. With `by_tickets` it is ignored: the kernel has its own tiles.
    pub prefill: Tile,
    /// Maximum number of query heads of a KV head in the tile, as in [`QueryStep::pack`](crate::plan::QueryStep::pack).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_pack: Option<u32>,
    /// Tile of the decodes. None: both operations use the kernels that run alone, on SMs of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode: Option<Tile>,
    /// Only for keys and values of this number of bits. None: of any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_bits: Option<u32>,
    /// Decode units that one CTA runs side by side.
    pub virtual_decodes: u32,
    /// Time of prefills alone in this shape, relative to their best shape.
    pub prefill_slowdown: f64,
    /// The same for decodes, relative to the time that their bytes need (see [`PodDescription::decode_alone`]).
    pub decode_slowdown: f64,
    /// The part of the shorter operation's time that is not hidden. Used if `shares` is empty.
    #[serde(default)]
    pub overlap_loss: f64,
    /// How two persistent kernels slow each other down, from few prefill CTAs to one on every SM. If empty,
    /// `overlap_loss` is used, and the CTAs are not divided: for one kernel, or if nothing was measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shares: Vec<Share>,
}

impl PodConfig {
    /// Whether two kernels share SMs, with measured shares.
    pub(crate) const fn shares_sms(&self) -> bool {
        !self.by_tickets && self.decode.is_some() && !self.shares.is_empty()
    }

    /// Whether the same prefill shares SMs with decodes in tiles of other rows, too.
    pub(in crate::plan) fn differs_in_decodes(&self, other: &Self) -> bool {
        let rows = |config: &Self| config.decode.map(|tile| tile.m);
        self.shares_sms()
            && other.shares_sms()
            && (self.prefill, self.kv_bits) == (other.prefill, other.kv_bits)
            && rows(self) != rows(other)
    }

    /// Time of prefills while decodes run beside them on such a share, relative to prefills alone in their best shape.
    pub(in crate::plan) const fn prefill_slower(&self, share: Share) -> f64 {
        self.prefill_slowdown * share.prefill
    }

    /// Whether prefills and decodes use the kernels that run alone, on SMs of their own.
    pub(in crate::plan) const fn is_apart(&self) -> bool {
        !self.by_tickets && self.decode.is_none()
    }
}

/// How prefills and decodes slow each other down while both run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Share {
    /// The part of all SMs that has a prefill CTA.
    pub part: f64,
    /// Time of a prefill, relative to its time alone.
    pub prefill: f64,
    /// The part of their speed that decodes lose.
    pub decode: f64,
}

impl Share {
    /// Interpolates between two measured shares.
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
            idle_loss: 1.0,
            decode_alone: 1.0,
            prefill_ns: 0.0,
            decode_ns: 0.0,
            fused_ns: 0.0,
            behind_ns: 0.0,
            tile_ns: 0.0,
            configs: Vec::new(),
        }
    }
}
