//! What a unit of work costs on a device: the model for splits, launch orders and forecasts.
//!
//! Times are integer picoseconds, so that sums do not depend on their order and plans repeat bit for bit.

use super::{Contention, DeviceDescription, TileCost, WiderTile};
use crate::{
    plan::data::{Kernel, Tile},
    problem::{Compute, Spec},
};

/// Speed of prefills with 8-bit products, relative to 16 bits. 1 × 8192 and 1 × 16384, TFLOP/s: heads of 128 839 and 892
/// against 811 and 751, of 256 894 and 927 against 776 and 749.
fn f8_over_f16(head_dim: u32) -> f64 {
    if head_dim > 128 { 1.18 } else { 1.08 }
}

/// A row tile gets its own launch if its units take at least this many times as long as a launch: SMs are idle for a
/// while when they change kernels.
const WORTH_A_LAUNCH: f64 = 3.0;

/// Number of tiles that are assumed to read the same keys at about the same time: those of a prompt. All but the first find
/// them in L2.
const fn readers(kernel: Kernel) -> f64 {
    match kernel {
        Kernel::Prefill => 2.0,
        Kernel::Decode => 1.0,
    }
}

/// The cost of units, for one specification on one device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CostModel {
    decode: KernelCost,
    /// The device's descriptions of decode tiles, and their costs. Of those with the same rows the first counts.
    tiles: Vec<(TileCost, KernelCost)>,
    prefill: KernelCost,
    q_heads: u32,
    merge_ps: u64,
    merge_last_ps: u64,
    merge_state_ps: u64,
    apart_ps: u64,
    behind_ps: u64,
    cut_ps: u64,
    launch_ps: u64,
}

/// The cost of one kernel's units, from its share of the device: an SM's bandwidth and FLOPs divided by the CTAs that
/// are resident there.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct KernelCost {
    resident_ctas: u32,
    /// Time to claim a unit, and to fill and drain its pipeline; and what remains of this time behind other units.
    unit_ps: u64,
    queued_ps: u64,
    /// Time to read one key and its value: the share of one query head.
    read_ps_per_key: f64,
    /// Time to compute one row of the tile with one key.
    compute_ps_per_pair: f64,
    /// Time to write and read back one query token's partial state: the share of one query head.
    partial_ps_per_token: f64,
    /// See [`TileCost::spread_states`].
    spread_states: Option<f64>,
    contention: Contention,
}

impl KernelCost {
    /// Time of the partial states of a unit of `pack` query heads.
    fn of_states(&self, pack: u32, partial_tokens: u32) -> f64 {
        f64::from(partial_tokens) * f64::from(pack) * self.partial_ps_per_token
    }
}

impl CostModel {
    /// The model for a specification on a device.
    #[must_use]
    pub fn new(device: &DeviceDescription, spec: &Spec) -> Self {
        let reaching = |kernel: Kernel, tile: &TileCost| {
            let resident_ctas = device.resident_ctas(kernel);
            let bytes_per_ps = device.read_bytes_per_ns / 1e3 / f64::from(resident_ctas);
            let flops_per_ps = tile.flops_per_ns / 1e3 / f64::from(resident_ctas);
            let q_heads = f64::from(spec.q_heads);
            KernelCost {
                resident_ctas,
                unit_ps: (tile.unit_ns * 1e3) as u64,
                queued_ps: (tile.queued_ns.unwrap_or(tile.unit_ns) * 1e3) as u64,
                // If several units read a KV head, all but the first find it in L2: each bears its share.
                read_ps_per_key: spec.kv_bytes_per_token() as f64
                    / q_heads
                    / (bytes_per_ps * tile.read),
                compute_ps_per_pair: spec.flops_per_pair() as f64 / q_heads / flops_per_ps,
                partial_ps_per_token: 2.0 * spec.partial_bytes_per_token() as f64
                    / q_heads
                    / bytes_per_ps,
                spread_states: tile.spread_states,
                contention: Contention {
                    ctas_sharing: tile.share,
                    solo_speedup: (tile.alone * 1e3) as u32,
                },
            }
        };
        let kernel = |kernel: Kernel| {
            let tile = TileCost {
                m: 0,
                head_dim: None,
                kv_bits: None,
                share: 1,
                alone: 1.0,
                read: readers(kernel),
                flops_per_ns: match (kernel, spec.compute) {
                    (Kernel::Prefill, Compute::F8) => {
                        device.flops_per_ns * f8_over_f16(spec.head_dim_qk)
                    }
                    _ => device.flops_per_ns,
                },
                unit_ns: device.unit_ns(kernel),
                queued_ns: None,
                state_ns: None,
                spread_states: None,
                cut_ns: None,
                wider: None,
                few_keys: None,
                smaller: None,
                joined: None,
            };
            reaching(kernel, &tile)
        };
        let joint = device.decode.joint.as_ref();
        let kv_bits = 8 * spec.kv_dtype.bytes();
        let largest = spec.head_dim_qk.max(spec.head_dim_v);
        let of_spec = |tile: &&TileCost| {
            tile.head_dim.is_none_or(|dim| dim == largest)
                && tile.kv_bits.is_none_or(|bits| bits == kv_bits)
        };
        let tiles = device.decode.tiles.iter().filter(of_spec);
        let state_ns = tiles.clone().find_map(|tile| tile.state_ns);
        Self {
            decode: kernel(Kernel::Decode),
            tiles: tiles
                .map(|tile| (*tile, reaching(Kernel::Decode, tile)))
                .collect(),
            prefill: kernel(Kernel::Prefill),
            q_heads: spec.q_heads,
            merge_ps: (device.merge_ns * 1e3) as u64,
            merge_last_ps: (device.merge_last_ns * 1e3) as u64,
            merge_state_ps: (state_ns.unwrap_or(device.merge_state_ns) * 1e3) as u64,
            apart_ps: joint.map_or(0, |joint| (joint.apart_ns * 1e3) as u64),
            behind_ps: joint.map_or(0, |joint| (joint.behind_ns * 1e3) as u64),
            cut_ps: joint.map_or(0, |joint| (joint.cut_ns * 1e3) as u64),
            launch_ps: (device.launch_ns * 1e3) as u64,
        }
    }

    const fn kernel(&self, kernel: Kernel) -> &KernelCost {
        match kernel {
            Kernel::Decode => &self.decode,
            Kernel::Prefill => &self.prefill,
        }
    }

    fn tile(&self, kernel: Kernel, m: u32) -> &KernelCost {
        match kernel {
            Kernel::Decode => self.of_rows(m).map_or(&self.decode, |tile| &tile.1),
            Kernel::Prefill => &self.prefill,
        }
    }

    /// The description and the cost of the decode tile of `m` rows.
    fn of_rows(&self, m: u32) -> Option<&(TileCost, KernelCost)> {
        self.tiles.iter().find(|(tile, _)| tile.m == m)
    }

    /// The wider tile that many decodes take instead of one of `m` rows.
    pub fn wider(&self, m: u32) -> Option<&WiderTile> {
        self.of_rows(m)?.0.wider.as_ref()
    }

    /// The most keys for each SM with which decodes in tiles of `m` rows take a kernel that shares SMs.
    pub fn few_keys(&self, m: u32) -> Option<f64> {
        self.of_rows(m)?.0.few_keys
    }

    /// The most units for each SM, and their keys, with which decodes take smaller tiles than the one of `m` rows.
    pub fn smaller(&self, m: u32) -> Option<[f64; 2]> {
        self.of_rows(m)?.0.smaller
    }

    /// Decodes join a tile of `m` rows if their units take less than this in smaller tiles, all CTAs together.
    pub fn joined_ps(&self, m: u32) -> u64 {
        let launches = self.of_rows(m).and_then(|tile| tile.0.joined);
        let ctas = self.resident_ctas(Kernel::Decode);
        (launches.unwrap_or(WORTH_A_LAUNCH) * self.launch_ps as f64 * f64::from(ctas)) as u64
    }

    /// How CTAs of a tile slow each other down.
    pub fn contention(&self, kernel: Kernel, m: u32) -> Contention {
        self.tile(kernel, m).contention
    }

    /// The same for units of `pack` query heads. Where states are spread, CTAs are no faster than their products allow while
    /// others are idle.
    pub fn contention_of(&self, kernel: Kernel, tile: Tile, pack: u32) -> Contention {
        let cost = self.tile(kernel, tile.m);
        let mut contention = cost.contention;
        if cost.spread_states.is_some() {
            let products = self.cached_key_ps(kernel, tile).max(1);
            let most = self.key_ps(kernel, tile, pack) * 1000 / products;
            let most = u32::try_from(most).unwrap_or(u32::MAX);
            contention.solo_speedup = contention.solo_speedup.min(most);
        }
        contention
    }

    /// Whether fewer units may be worth more time of their own: states are spread over all CTAs.
    pub fn spreads_states(&self, kernel: Kernel, m: u32) -> bool {
        self.tile(kernel, m).spread_states.is_some()
    }

    /// CTAs of a kernel that run at the same time.
    #[must_use]
    pub const fn resident_ctas(&self, kernel: Kernel) -> u32 {
        self.kernel(kernel).resident_ctas
    }

    /// Units of an item whose tiles hold `pack` query heads.
    #[must_use]
    pub const fn units_per_item(&self, pack: u32) -> u32 {
        self.q_heads.div_ceil(pack)
    }

    /// Fixed cost of a unit of `pack` query heads, in picoseconds. `partial_tokens` of its query tokens leave a partial
    /// state.
    #[must_use]
    pub fn fixed_ps(&self, kernel: Kernel, tile: Tile, pack: u32, partial_tokens: u32) -> u64 {
        self.own_ps(kernel, tile, pack, partial_tokens)
            + self.states_ps(kernel, tile, pack, partial_tokens)
    }

    /// The part of [`fixed_ps`](Self::fixed_ps) that the unit's CTA bears.
    #[must_use]
    pub fn own_ps(&self, kernel: Kernel, tile: Tile, pack: u32, partial_tokens: u32) -> u64 {
        let cost = self.tile(kernel, tile.m);
        let states = cost.of_states(pack, partial_tokens);
        cost.unit_ps
            + match cost.spread_states {
                Some(_) => 0,
                None => states as u64,
            }
    }

    /// The part of [`fixed_ps`](Self::fixed_ps) that all CTAs of the step bear together.
    #[must_use]
    pub fn states_ps(&self, kernel: Kernel, tile: Tile, pack: u32, partial_tokens: u32) -> u64 {
        let cost = self.tile(kernel, tile.m);
        let times = cost.spread_states.unwrap_or(0.0);
        (cost.of_states(pack, partial_tokens) * times) as u64
    }

    /// Fixed cost of a unit without partial states behind other units of its CTA, in picoseconds.
    pub fn queued_ps(&self, kernel: Kernel, tile: Tile) -> u64 {
        self.tile(kernel, tile.m).queued_ps
    }

    /// Time that one more launch adds to a step, in picoseconds.
    #[must_use]
    pub const fn launch_ps(&self) -> u64 {
        self.launch_ps
    }

    /// Time that separate items for prefixes, instead of joint tiles, add to a step.
    #[must_use]
    pub const fn apart_ps(&self) -> u64 {
        self.apart_ps
    }

    /// Time that each launch after the first adds to such a step, in addition to the launch itself.
    #[must_use]
    pub const fn behind_ps(&self) -> u64 {
        self.behind_ps
    }

    /// Time that cutting a joint tile adds to a step.
    #[must_use]
    pub const fn cut_ps(&self) -> u64 {
        self.cut_ps
    }

    /// The least time that merging adds to a step whose cut decodes have tiles of `m` rows.
    #[must_use]
    pub fn merge_ps(&self, m: u32) -> u64 {
        let cut_ns = self.of_rows(m).and_then(|(tile, _)| tile.cut_ns);
        cut_ns.map_or(self.merge_ps, |ns| (ns * 1e3) as u64)
    }

    /// Time from the end of a row's last piece to the end of its merge, for a row of `pieces` pieces.
    #[must_use]
    pub const fn merged_after_ps(&self, pieces: u64) -> u64 {
        self.merge_last_ps + pieces * self.merge_state_ps
    }

    /// What each key adds to a unit, in picoseconds: the larger of reading it and computing with it.
    #[must_use]
    pub fn key_ps(&self, kernel: Kernel, tile: Tile, pack: u32) -> u64 {
        self.key_of(kernel, tile, pack, 1.0)
    }

    /// The same if no other unit reads the key at about the same time. [`key_ps`](Self::key_ps) assumes that another tile of
    /// a prompt does.
    #[must_use]
    pub fn key_apart_ps(&self, kernel: Kernel, tile: Tile, pack: u32) -> u64 {
        self.key_of(kernel, tile, pack, readers(kernel))
    }

    /// What a key adds that takes so many times as long to read as the model says.
    fn key_of(&self, kernel: Kernel, tile: Tile, pack: u32, times: f64) -> u64 {
        let cost = self.tile(kernel, tile.m);
        let read = f64::from(pack) * cost.read_ps_per_key * times;
        read.ceil().max(self.cached_key_ps(kernel, tile) as f64) as u64
    }

    /// What each key adds to a unit if another unit has already read it.
    #[must_use]
    pub fn cached_key_ps(&self, kernel: Kernel, tile: Tile) -> u64 {
        let cost = self.tile(kernel, tile.m);
        (f64::from(tile.m) * cost.compute_ps_per_pair).ceil() as u64
    }
}
