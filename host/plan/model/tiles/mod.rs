//! Which tiles a device can run, and which of them an item takes.
//!
//! The solver derives the feasible `(m, n)` from a device description: shared memory, registers, bytes in
//! flight against latency × bandwidth, and the smallest matrix instruction. What the compiler really used
//! is checked against it by [`check_report`]. The selector then takes the smallest `m` that covers the rows
//! and the `n` that the description's decision tree gives for the number of keys.

mod report;
mod solve;

pub use report::{Disagreement, KernelReport, check_report};
pub use solve::{Infeasible, MAX_STAGES, Resources, solve};

use super::{DeviceDescription, QueryStep};
use crate::{
    plan::data::{Kernel, PlanError, Tile},
    problem::Spec,
};

/// The tiles that a plan for one specification on one device chooses from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TileTable {
    group: u32,
    /// The bounds of the decision tree for the key tile of decodes.
    key_steps: Vec<u32>,
    /// Row tiles of decodes, ascending, each with its key tile for every step.
    decode: Vec<(u32, Vec<u32>)>,
    prefill: Vec<PrefillTile>,
}

/// What prefills of some length take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillTile {
    /// Up to this many query tokens.
    pub up_to: u32,
    /// The tile.
    pub tile: Tile,
    /// Query heads that it holds, a divisor of the group.
    pub pack: u32,
}

/// The key tile that goes with `m` rows and is no larger than `n` if there is one: among what was compiled
/// for the heads, or where nothing was, by the solver.
fn key_tile(
    device: &DeviceDescription,
    spec: &Spec,
    kernel: Kernel,
    Tile { m, n }: Tile,
) -> Option<u32> {
    let serving = || device.compiled(kernel).iter().filter(|i| i.serves(spec));
    if serving().next().is_some() {
        let keys = || serving().filter(|instance| instance.m == m).map(|i| i.n);
        return keys().filter(|&keys| keys <= n).max().or(keys().min());
    }
    // A key tile that does not fit is halved, so that the tree holds for every head dimension.
    std::iter::successors(Some(n), |n| (*n >= 32).then_some(n / 32 * 16))
        .find(|&n| solve(device, spec, kernel, Tile { m, n }).is_ok())
}

/// The tile of a step of the tree; where its rows are not to be had, the most below, or the fewest above.
fn prefill_tile(device: &DeviceDescription, spec: &Spec, step: &QueryStep) -> Option<PrefillTile> {
    let compiled = device.prefill.compiled.iter().map(|instance| instance.m);
    let rows: Vec<u32> = compiled.chain((16..=step.m).step_by(16)).collect();
    let with = |m: u32| {
        let n = key_tile(device, spec, Kernel::Prefill, Tile { m, n: step.n })?;
        Some(Tile { m, n })
    };
    let below = || {
        rows.iter()
            .copied()
            .filter(|&m| m <= step.m)
            .filter_map(with)
    };
    let above = || {
        rows.iter()
            .copied()
            .filter(|&m| m > step.m)
            .filter_map(with)
    };
    let tile = below()
        .max_by_key(|tile| tile.m)
        .or_else(|| above().min_by_key(|tile| tile.m))?;
    Some(PrefillTile {
        up_to: step.up_to.unwrap_or(u32::MAX),
        tile,
        pack: packed_heads(spec, tile.m, step.pack),
    })
}

/// As many query heads of a KV head as a tile of `m` rows may hold: a divisor of their number.
fn packed_heads(spec: &Spec, m: u32, most: Option<u32>) -> u32 {
    let (group, most) = (spec.group(), most.unwrap_or(u32::MAX).min(m));
    let mut fitting = (1..=group.min(most)).rev();
    fitting
        .find(|&pack| group.is_multiple_of(pack))
        .unwrap_or(1)
}

impl TileTable {
    /// The tiles there are; `decode` and `prefill` (with the most query heads that it is to hold) replace the
    /// choice.
    ///
    /// # Errors
    /// [`PlanError::NoTile`] where a kernel has none.
    pub fn new(
        device: &DeviceDescription,
        spec: &Spec,
        decode: Option<Tile>,
        prefill: Option<(Tile, Option<u32>)>,
    ) -> Result<Self, PlanError> {
        let no_tile = |kernel| PlanError::NoTile {
            kernel,
            head_dim_qk: spec.head_dim_qk,
            head_dim_v: spec.head_dim_v,
            group: spec.group(),
            device: device.name.clone(),
        };
        let key_steps = &device.decode.n_by_kv_len;
        let keys = |m: u32| {
            let steps = key_steps.iter();
            let keys =
                steps.map(|step| key_tile(device, spec, Kernel::Decode, Tile { m, n: step.n }));
            Some((m, keys.collect::<Option<Vec<_>>>()?))
        };
        let mut row_tiles: Vec<_> = match decode {
            Some(tile) => vec![(tile.m, vec![tile.n; key_steps.len()])],
            None => device.decode.m.iter().filter_map(|&m| keys(m)).collect(),
        };
        // A gathered token brings all its heads.
        row_tiles.retain(|(m, _)| *m >= spec.group());
        if row_tiles.is_empty() {
            return Err(no_tile(Kernel::Decode));
        }
        let prefill = match prefill {
            Some((tile, most)) => Some(vec![PrefillTile {
                up_to: u32::MAX,
                tile,
                pack: packed_heads(spec, tile.m, most),
            }]),
            None => {
                let steps = device.prefill.by_q_len.iter();
                let fits = |step: &&QueryStep| step.head_dim.is_none_or(|d| d == spec.head_dim_qk);
                let tiles = steps
                    .filter(fits)
                    .map(|step| prefill_tile(device, spec, step));
                tiles.collect()
            }
        };
        Ok(Self {
            group: spec.group(),
            key_steps: key_steps
                .iter()
                .map(|step| step.up_to.unwrap_or(u32::MAX))
                .collect(),
            decode: row_tiles,
            prefill: prefill.ok_or_else(|| no_tile(Kernel::Prefill))?,
        })
    }

    /// The most query tokens that a tile of decodes holds.
    #[must_use]
    pub fn decode_tokens(&self) -> u32 {
        self.decode.last().map_or(0, |(m, _)| m / self.group)
    }

    /// The most query tokens that the tile holds which holds the fewest, at least 1: of the widest of decodes
    /// and all of prefills.
    #[must_use]
    pub fn fewest_tokens(&self) -> u32 {
        let prefill = self.prefill.iter().map(|step| step.tile.m / step.pack);
        prefill
            .chain([self.decode_tokens()])
            .min()
            .unwrap_or(1)
            .max(1)
    }

    /// The smallest row tile that covers so many query tokens of decodes; the largest where none does.
    #[must_use]
    pub fn row_tile(&self, tokens: u32) -> u32 {
        let rows = tokens * self.group;
        let mut tiles = self.decode.iter().map(|(m, _)| *m);
        let largest = self.decode.last().map_or(0, |(m, _)| *m);
        tiles.find(|m| *m >= rows).unwrap_or(largest)
    }

    /// The key tile of decodes with `m` rows, for so many keys.
    #[must_use]
    pub fn key_tile(&self, m: u32, kv_len: u32) -> u32 {
        let step = self.step(kv_len);
        let tile = self.decode.iter().find(|(other, _)| *other == m);
        tile.map_or(0, |(_, n)| n[step])
    }

    /// The key tile for so many keys that decodes with any number of rows can have.
    #[must_use]
    pub fn common_key_tile(&self, kv_len: u32) -> u32 {
        let step = self.step(kv_len);
        let keys = self.decode.iter().map(|(_, n)| n[step]);
        keys.min().unwrap_or(0)
    }

    fn step(&self, kv_len: u32) -> usize {
        let step = self.key_steps.iter().position(|&up_to| kv_len <= up_to);
        step.unwrap_or(self.key_steps.len() - 1)
    }

    /// What a prefill of so many query tokens takes.
    #[must_use]
    pub fn prefill(&self, tokens: u32) -> &PrefillTile {
        let step = self.prefill.iter().find(|step| tokens <= step.up_to);
        step.unwrap_or(&self.prefill[self.prefill.len() - 1])
    }

    /// What prefills take, by their query tokens.
    #[must_use]
    pub fn prefills(&self) -> &[PrefillTile] {
        &self.prefill
    }

    /// Every tile of a kernel that can be chosen, ascending.
    #[must_use]
    pub fn all(&self, kernel: Kernel) -> Vec<Tile> {
        let mut all: Vec<_> = match kernel {
            Kernel::Decode => {
                let tiles = self.decode.iter();
                tiles
                    .flat_map(|(m, n)| n.iter().map(|&n| Tile { m: *m, n }))
                    .collect()
            }
            Kernel::Prefill => self.prefill.iter().map(|step| step.tile).collect(),
        };
        all.sort_unstable();
        all.dedup();
        all
    }
}
