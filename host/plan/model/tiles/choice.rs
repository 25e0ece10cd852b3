//! The kernels and tiles of decodes by rows, and of prefills by query tokens.

use kernels_gpu::registry::{KernelId, Op};

use super::serving::{alone, serving};
use crate::{
    plan::{
        data::Tile,
        model::{DeviceDescription, QueryStep},
    },
    problem::Spec,
};

/// A kernel that can be chosen, and its tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The kernel. None: the executor takes tiles of any size.
    pub kernel: Option<KernelId>,
    /// Its tile.
    pub tile: Tile,
    /// Whether rows of a tile may have page tables of their own.
    pub multi_table: bool,
}

/// The kernel and tile for prefills of some length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillTile {
    /// Up to this many query tokens.
    pub up_to: u32,
    /// The kernel. None: the executor takes tiles of any size.
    pub kernel: Option<KernelId>,
    /// The tile.
    pub tile: Tile,
    /// Query heads per tile, a divisor of the group.
    pub pack: u32,
}

impl Choice {
    pub(in crate::plan::model) fn of(kernel: KernelId) -> Self {
        let row = kernel.info();
        Self {
            kernel: Some(kernel),
            tile: Tile {
                m: row.rows,
                n: row.keys,
            },
            multi_table: row.multi_table,
        }
    }

    pub(super) const fn any(m: u32, n: u32) -> Self {
        Self {
            kernel: None,
            tile: Tile { m, n },
            multi_table: true,
        }
    }
}

/// Tiles of more rows of 8-bit keys take an SM alone. They are slower beside tiles of few rows, and so for decodes that share
/// prefixes; only [`larger_decode`] has them, and tokens that fit no other.
const SHARED_ROWS: u32 = 64;

/// The kernel of decodes of 8-bit keys that all have more rows than the other tiles.
pub(super) fn larger_decode(device: &DeviceDescription, spec: &Spec) -> Option<Choice> {
    if spec.kv_dtype.bytes() != 1 || spec.latent || device.decode.keys.is_some() {
        return None;
    }
    let rows = &device.decode.rows;
    let wanted = |m| m > SHARED_ROWS && (rows.is_empty() || rows.contains(&m));
    let mut kernels = alone(device, spec, Op::Decode).into_iter().map(Choice::of);
    kernels.find(|choice| wanted(choice.tile.m))
}

/// The kernels of decodes, by rows. The widest tiles of latent attention have two sizes of blocks. If a token takes
/// several of them, arithmetic is the limit, and long blocks read the queries less often; few keys (`are_few`) take short
/// blocks all the same, of which the first arrives sooner.
pub(super) fn decodes(device: &DeviceDescription, spec: &Spec, are_few: bool) -> Vec<Choice> {
    let rows = &device.decode.rows;
    let mut choices: Vec<_> = match device.decode.keys {
        Some(keys) => rows.iter().map(|&m| Choice::any(m, keys)).collect(),
        None => {
            let kernels = alone(device, spec, Op::Decode).into_iter();
            let wanted = |choice: &Choice| rows.is_empty() || rows.contains(&choice.tile.m);
            kernels.map(Choice::of).filter(wanted).collect()
        }
    };
    choices.sort_unstable_by_key(|choice| choice.tile);
    if spec.kv_dtype.bytes() == 1 && spec.group() <= SHARED_ROWS {
        choices.retain(|choice| choice.tile.m <= SHARED_ROWS);
    }
    if spec.latent && device.decode.keys.is_none() {
        let widest = choices.iter().map(|choice| choice.tile.m).max();
        let is_widest = |choice: &Choice| Some(choice.tile.m) == widest;
        let of_widest = || choices.iter().filter(|choice| is_widest(choice));
        let longest = of_widest().map(|choice| choice.tile.n).max();
        let is_long = |choice: &Choice| Some(choice.tile.n) == longest;
        if of_widest().any(|choice| !is_long(choice)) {
            let long = !are_few && spec.q_heads > widest.unwrap_or(0);
            choices.retain(|choice| !is_widest(choice) || is_long(choice) == long);
        }
    }
    choices
}

/// The most rows, and the most keys, of a tile for executors that take tiles of any size.
pub(in crate::plan) const MOST_OF_TILE: u32 = 1 << 16;

/// The decode kernel with the tile that was asked for: one that runs alone, else one that runs beside a prefill.
pub(in crate::plan) fn decode_of_tile(
    device: &DeviceDescription,
    spec: &Spec,
    tile: Tile,
) -> Option<Choice> {
    if device.decode.keys.is_some() {
        let sizes = 1..=MOST_OF_TILE;
        let fits = sizes.contains(&tile.m) && sizes.contains(&tile.n);
        return fits.then(|| Choice::any(tile.m, tile.n));
    }
    let of_tile = serving(device, spec, Op::Decode).filter(|id| Choice::of(*id).tile == tile);
    // Of those that run alone (or of all), the newest architecture, then the most stages.
    let best = |id: &KernelId| (!id.info().co_resident, id.info().arch, id.info().stages);
    of_tile.max_by_key(best).map(Choice::of)
}

/// The kernel of a step of the decision tree: the one with the most rows up to `rows`, else the one with the fewest.
pub(super) fn prefill_kernel(kernels: &[KernelId], rows: u32) -> Option<KernelId> {
    let of = |id: &&KernelId| id.info().rows;
    let below = kernels.iter().filter(|id| of(id) <= rows).max_by_key(of);
    below.or_else(|| kernels.iter().min_by_key(of)).copied()
}

/// The kernel and tile of each step of the decision tree.
pub(super) fn prefills(device: &DeviceDescription, spec: &Spec) -> Option<Vec<PrefillTile>> {
    let kernels = alone(device, spec, Op::Prefill);
    let tile = |step: &QueryStep| {
        let choice = match device.prefill.keys {
            Some(keys) => Choice::any(step.rows, keys),
            None => Choice::of(prefill_kernel(&kernels, step.rows)?),
        };
        Some(prefill_tile(spec, choice, step.up_to, step.pack))
    };
    let for_spec = |step: &&QueryStep| {
        let of_heads = |dim| dim == spec.on_kernels().head_dim_qk;
        step.head_dim.is_none_or(of_heads) && step.compute.is_none_or(|of| of == spec.compute)
    };
    let steps = device.prefill.by_q_len.iter().filter(for_spec);
    steps.map(tile).collect()
}

pub(super) fn prefill_tile(
    spec: &Spec,
    choice: Choice,
    up_to: Option<u32>,
    pack: Option<u32>,
) -> PrefillTile {
    PrefillTile {
        up_to: up_to.unwrap_or(u32::MAX),
        kernel: choice.kernel,
        tile: choice.tile,
        pack: packed_heads(spec, choice.tile.m, pack),
    }
}

/// The most query heads of a KV head that a tile of `m` rows may hold: a divisor of their number.
fn packed_heads(spec: &Spec, m: u32, most: Option<u32>) -> u32 {
    let (group, most) = (spec.group(), most.unwrap_or(u32::MAX).min(m));
    let mut fitting = (1..=group.min(most)).rev();
    fitting
        .find(|&pack| group.is_multiple_of(pack))
        .unwrap_or(1)
}
