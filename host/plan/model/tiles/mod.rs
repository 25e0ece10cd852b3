//! Which kernels a device has for some heads, and which of them an item takes.
//!
//! The kernels are the rows of the [registry](kernels_gpu::registry) that the device can run and that were compiled
//! for the heads. An item takes the one with the fewest rows that covers it. An executor that takes tiles of any
//! size (the CPU's) has no rows: its sizes are in the device description.

mod fixed;

pub(in crate::plan) use fixed::{KernelRule, SharedKernels};
use kernels_gpu::{
    Hooks, HooksName,
    registry::{Arch, Element, KernelId, KernelInfo, Loads, Op},
    variants::BUILT_IN,
};

use super::{DeviceDescription, PodConfig, QueryStep};
use crate::{
    plan::data::{Kernel, PlanError, Tile},
    problem::{Compute, Dtype, Padding, Spec},
};

/// The kernels that a plan for one specification on one device chooses from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TileTable {
    group: u32,
    /// Query heads of a KV head in a tile of decodes: all of them, but for latent heads that are more than a tile's
    /// rows.
    decode_pack: u32,
    /// By rows, ascending. Empty where only prefill was compiled for the heads.
    decode: Vec<Choice>,
    prefill: Vec<PrefillTile>,
}

/// A kernel that can be chosen, and its tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The kernel; none: the executor takes tiles of any size.
    pub kernel: Option<KernelId>,
    /// Its tile.
    pub tile: Tile,
    /// Whether rows of a tile may have page tables of their own.
    pub multi_table: bool,
}

/// What prefills of some length take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillTile {
    /// Up to this many query tokens.
    pub up_to: u32,
    /// The kernel; none: the executor takes tiles of any size.
    pub kernel: Option<KernelId>,
    /// The tile.
    pub tile: Tile,
    /// Query heads that it holds, a divisor of the group.
    pub pack: u32,
}

/// Whether a kernel was compiled for these heads.
pub(in crate::plan) fn serves(row: &KernelInfo, spec: &Spec) -> bool {
    let dtype = |element| match element {
        Element::Bf16 => Some(Dtype::BF16),
        Element::F16 => Some(Dtype::F16),
        Element::E4m3 => Some(Dtype::F8E4M3),
        Element::E5m2 => Some(Dtype::F8E5M2),
        Element::F32 | Element::Any => None,
    };
    let of_rows = dtype(row.element);
    let on = spec.on_kernels();
    // Prefills of Hopper convert 8-bit keys to the type of their rows.
    let converts = row.op == Op::Prefill && row.arch == Arch::Sm90a && spec.converts();
    let cache = match converts {
        true if Padding::of(spec).is_some() => false,
        true => match spec.compute {
            Compute::F16 => row.cache.is_none(),
            Compute::F8 => {
                row.products_of_8_bits && row.cache.and_then(dtype) == Some(spec.kv_dtype)
            }
        },
        false => Some(spec.kv_dtype) == row.cache.map_or(of_rows, dtype),
    };
    let hooks = spec.variant.hooks.filter(|_| row.products_of_8_bits);
    // Decodes turn queries and keys themselves; prefills of Hopper read what was turned.
    let turns = match (spec.rotary.is_some(), row.op) {
        (true, Op::Prefill) => row.arch == Arch::Sm90a,
        (turned, _) => row.turns == turned,
    };
    // Executors choose by the pool where each token has scales.
    turns && !row.by_token
        && hooks.is_none()
        && [on.q_dtype, on.out_dtype].map(Some) == [of_rows; 2]
        && cache
        && row.latent == spec.latent
        && (has_heads(row, &on) || has_heads(row, spec))
        // Tensor maps pad heads of 16 bits; what is loaded row by row has the kernel's dimension.
        && (Padding::of(spec).is_none() || row.loads != Loads::Rows && row.cache.is_none())
        && row.cap == (spec.variant.soft_cap.is_some() || spec.variant.hooks.is_some())
        && spec.variant.hooks.is_none_or(|name| has_hooks(name, row))
}

fn has_heads(row: &KernelInfo, spec: &Spec) -> bool {
    (row.head_dim, row.value_dim) == (spec.head_dim_qk, spec.head_dim_v)
}

/// Whether there may be a kernel of the variant in the place of this one: of the library's own it is known.
pub(in crate::plan) fn has_hooks(name: HooksName, row: &KernelInfo) -> bool {
    match BUILT_IN.iter().find(|hooks| hooks.name == name) {
        Some(hooks) => hooks.replaces(row),
        None => Hooks::replaceable(row),
    }
}

/// The kernels of an operation that the device can run.
pub(in crate::plan) fn runnable(
    device: &DeviceDescription,
    op: Op,
) -> impl Iterator<Item = KernelId> + Clone + '_ {
    KernelId::all().filter(move |id| {
        let row = id.info();
        row.op == op
            && !row.stands_in
            && row.arch.runs_on(device.compute_capability)
            && row.shared_bytes <= device.shared_bytes_per_cta
    })
}

/// Those that were compiled for these heads.
fn serving<'a>(
    device: &'a DeviceDescription,
    spec: &'a Spec,
    op: Op,
) -> impl Iterator<Item = KernelId> + Clone + 'a {
    runnable(device, op).filter(|id| serves(id.info(), spec))
}

/// Those of the newest architecture that has any: its instructions are there to be used.
fn newest(kernels: impl Iterator<Item = KernelId> + Clone) -> Vec<KernelId> {
    let arch = kernels.clone().map(|id| id.info().arch).max();
    kernels.filter(|id| Some(id.info().arch) == arch).collect()
}

impl Choice {
    fn of(kernel: KernelId) -> Self {
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

    const fn any(m: u32, n: u32) -> Self {
        Self {
            kernel: None,
            tile: Tile { m, n },
            multi_table: true,
        }
    }
}

/// The kernels of an operation that run alone.
pub(in crate::plan) fn alone(device: &DeviceDescription, spec: &Spec, op: Op) -> Vec<KernelId> {
    let mut kernels = newest(serving(device, spec, op).filter(|id| !id.info().co_resident));
    // Those of the heads' own dimension, if there are any: padding costs time.
    let own = |id: &KernelId| has_heads(id.info(), spec);
    if kernels.iter().any(own) {
        kernels.retain(own);
    }
    kernels
}

/// The kernels of decodes, by rows. Latent attention has two sizes of blocks: where a token takes several tiles,
/// arithmetic is the limit, and long blocks read the queries less often.
fn decodes(device: &DeviceDescription, spec: &Spec) -> Vec<Choice> {
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
    if spec.latent && device.decode.keys.is_none() {
        let longest = choices.iter().map(|choice| choice.tile.n).max();
        let is_long = |choice: &Choice| Some(choice.tile.n) == longest;
        if choices.iter().any(|choice| !is_long(choice)) {
            choices.retain(|choice| is_long(choice) == (spec.q_heads > choice.tile.m));
        }
    }
    choices
}

/// The one kernel of decodes that was asked for by its tile: among those that run alone, else beside a prefill.
pub(in crate::plan) fn decode_of_tile(
    device: &DeviceDescription,
    spec: &Spec,
    tile: Tile,
) -> Option<Choice> {
    if device.decode.keys.is_some() {
        return Some(Choice::any(tile.m, tile.n));
    }
    let of_tile = serving(device, spec, Op::Decode).filter(|id| Choice::of(*id).tile == tile);
    // The deepest, if there are several.
    let best = |id: &KernelId| (!id.info().co_resident, id.info().arch, id.info().stages);
    of_tile.max_by_key(best).map(Choice::of)
}

/// The kernel of a step of the tree; where its rows are not to be had, the most below, or the fewest above.
fn prefill_kernel(kernels: &[KernelId], rows: u32) -> Option<KernelId> {
    let of = |id: &&KernelId| id.info().rows;
    let below = kernels.iter().filter(|id| of(id) <= rows).max_by_key(of);
    below.or_else(|| kernels.iter().min_by_key(of)).copied()
}

/// What each step of the tree takes.
fn prefills(device: &DeviceDescription, spec: &Spec) -> Option<Vec<PrefillTile>> {
    let kernels = alone(device, spec, Op::Prefill);
    let tile = |step: &QueryStep| {
        let choice = match device.prefill.keys {
            Some(keys) => Choice::any(step.rows, keys),
            None => Choice::of(prefill_kernel(&kernels, step.rows)?),
        };
        Some(prefill_tile(spec, choice, step.up_to, step.pack))
    };
    let of_heads = |step: &&QueryStep| {
        step.head_dim
            .is_none_or(|dim| dim == spec.on_kernels().head_dim_qk)
    };
    let steps = device.prefill.by_q_len.iter().filter(of_heads);
    steps.map(tile).collect()
}

fn prefill_tile(spec: &Spec, choice: Choice, up_to: Option<u32>, pack: Option<u32>) -> PrefillTile {
    PrefillTile {
        up_to: up_to.unwrap_or(u32::MAX),
        kernel: choice.kernel,
        tile: choice.tile,
        pack: packed_heads(spec, choice.tile.m, pack),
    }
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
    /// The kernels there are; `decode` is a tile that replaces the choice among those of decodes.
    ///
    /// # Errors
    /// [`PlanError::NoTile`] where an operation has none.
    pub fn new(
        device: &DeviceDescription,
        spec: &Spec,
        decode: Option<Tile>,
    ) -> Result<Self, PlanError> {
        let prefill = prefills(device, spec).unwrap_or_default();
        let decode = match decode {
            Some(tile) => decode_of_tile(device, spec, tile).into_iter().collect(),
            None => decodes(device, spec),
        };
        // Where only prefill was compiled for the heads it takes decodes, too.
        let none = decode.is_empty() && alone(device, spec, Op::Decode).is_empty();
        Self {
            group: spec.group(),
            decode_pack: spec.group(),
            decode,
            prefill,
        }
        .checked(device, spec, none)
    }

    /// The kernels that share SMs in a configuration of the hybrid form; `decode` is a tile that replaces that of
    /// the configuration. None where there are none for the heads.
    #[must_use]
    pub fn fused(
        device: &DeviceDescription,
        spec: &Spec,
        decode: Option<Tile>,
        config: &PodConfig,
    ) -> Option<Self> {
        let bits = 8 * spec.kv_dtype.bytes();
        if config.kv_bits.is_some_and(|of| of != bits) {
            return None;
        }
        let (prefill, decodes) = match config.decode {
            _ if config.by_tickets => ticket_kernels(device, spec)?,
            None => kernels_apart(device, spec, config)?,
            Some(decode) => co_resident_kernels(device, spec, [config.prefill, decode])?,
        };
        let prefill = Choice::of(prefill);
        let table = Self {
            group: spec.group(),
            decode_pack: spec.group(),
            decode: match decode {
                // What is in one kernel with the prefill cannot be another.
                Some(tile) if config.by_tickets => decodes
                    .into_iter()
                    .filter(|choice| choice.tile == tile)
                    .collect(),
                Some(tile) => vec![decode_of_tile(device, spec, tile)?],
                None => decodes,
            },
            prefill: vec![prefill_tile(spec, prefill, None, config.prefill_pack)],
        };
        table.checked(device, spec, false).ok()
    }

    /// With the tiles that hold a token: a gathered one brings all its heads.
    fn checked(
        mut self,
        device: &DeviceDescription,
        spec: &Spec,
        prefill_only: bool,
    ) -> Result<Self, PlanError> {
        let no_tile = |kernel| PlanError::NoTile {
            kernel,
            head_dim_qk: spec.head_dim_qk,
            head_dim_v: spec.head_dim_v,
            group: spec.group(),
            device: device.name.clone(),
        };
        let widest = self.decode.iter().map(|choice| choice.tile.m).max();
        if let (true, Some(rows)) = (spec.latent && device.decode.keys.is_none(), widest) {
            // Equal tiles, as few as hold all heads.
            self.decode_pack = self.group.div_ceil(self.group.div_ceil(rows));
        }
        self.decode
            .retain(|choice| choice.tile.m >= self.decode_pack);
        // Where only decode was compiled for the heads or the cache it takes prefills, too.
        let takes_prompts =
            |choice: &Choice| choice.kernel.is_some_and(|id| id.info().takes_prompts);
        let decode_only = spec.kv_dtype != spec.on_kernels().q_dtype && !self.decode.is_empty()
            || self.decode.iter().any(takes_prompts);
        if self.prefill.is_empty() && !spec.latent && !decode_only {
            return Err(no_tile(Kernel::Prefill));
        }
        if self.decode.is_empty() && !prefill_only {
            return Err(no_tile(Kernel::Decode));
        }
        Ok(self)
    }

    /// The same with the prefills of the longest prompts for all, where others have other kernels.
    #[must_use]
    pub fn wide(&self) -> Option<Self> {
        let last = *self.prefill.last()?;
        let differs = self.prefill.iter().any(|step| step.kernel != last.kernel);
        differs.then(|| Self {
            prefill: vec![last],
            ..self.clone()
        })
    }

    /// The most query tokens that a tile of decodes holds.
    #[must_use]
    pub fn decode_tokens(&self) -> u32 {
        let tokens = |last: &Choice| match self.decode_pack < self.group {
            true => 1,
            false => last.tile.m / self.group,
        };
        self.decode.last().map_or(0, tokens)
    }

    /// Query heads of a KV head that a tile of decodes holds.
    #[must_use]
    pub const fn decode_pack(&self) -> u32 {
        self.decode_pack
    }

    /// Whether there are kernels for decodes; else prefill takes them.
    #[must_use]
    pub fn has_decodes(&self) -> bool {
        !self.decode.is_empty()
    }

    /// Whether there are kernels for prefills; else decode takes them.
    #[must_use]
    pub fn has_prefills(&self) -> bool {
        !self.prefill.is_empty()
    }

    /// The most query tokens that the tile holds which holds the fewest, at least 1: of the widest of decodes
    /// and all of prefills.
    #[must_use]
    pub fn fewest_tokens(&self) -> u32 {
        let prefill = self.prefill.iter().map(|step| step.tile.m / step.pack);
        let decode = self.has_decodes().then(|| self.decode_tokens());
        prefill.chain(decode).min().unwrap_or(1).max(1)
    }

    /// The smallest tile that covers so many query tokens of decodes; the largest where none does.
    #[must_use]
    pub fn row_tile(&self, tokens: u32) -> u32 {
        let rows = tokens * self.decode_pack;
        let mut tiles = self.decode.iter().map(|choice| choice.tile.m);
        let largest = self.decode.last().map_or(0, |last| last.tile.m);
        tiles.find(|m| *m >= rows).unwrap_or(largest)
    }

    /// What decodes in tiles of `m` rows take.
    #[must_use]
    pub fn decode(&self, m: u32) -> Option<&Choice> {
        self.decode.iter().find(|choice| choice.tile.m == m)
    }

    /// What decodes take, by rows.
    #[must_use]
    pub fn decodes(&self) -> &[Choice] {
        &self.decode
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

    /// The kernel that has this tile.
    pub(in crate::plan) fn kernel(&self, kernel: Kernel, tile: Tile) -> Option<KernelId> {
        match kernel {
            Kernel::Decode => self.decode(tile.m)?.kernel,
            Kernel::Prefill => self.prefill.iter().find(|step| step.tile == tile)?.kernel,
        }
    }
}

/// The prefill and the decodes of the kernel that has both.
fn ticket_kernels(device: &DeviceDescription, spec: &Spec) -> Option<(KernelId, Vec<Choice>)> {
    serving(device, spec, Op::Pod).next()?;
    let ampere = |op| serving(device, spec, op).find(|id| id.info().arch == Arch::Sm80);
    Some((ampere(Op::Prefill)?, vec![Choice::of(ampere(Op::Decode)?)]))
}

/// Those that run alone, on SMs of their own: for heads and keys whose decodes find no room beside a prefill.
fn kernels_apart(
    device: &DeviceDescription,
    spec: &Spec,
    config: &PodConfig,
) -> Option<(KernelId, Vec<Choice>)> {
    let prefill = prefill_kernel(&alone(device, spec, Op::Prefill), config.prefill.m)?;
    let decodes = decodes(device, spec);
    let share = |op| serving(device, spec, op).any(|id| id.info().co_resident);
    let shares = share(Op::Prefill) && share(Op::Decode);
    // What is turned for prefills is made by a launch in front of them, for which decodes would wait.
    let may = !shares && spec.rotary.is_none() && !decodes.is_empty();
    may.then_some((prefill, decodes))
}

/// The prefill of a tile, and of the decodes of a tile that find room beside it those with most bytes under way.
fn co_resident_kernels(
    device: &DeviceDescription,
    spec: &Spec,
    [prefill, decode]: [Tile; 2],
) -> Option<(KernelId, Vec<Choice>)> {
    let sm = device.sm();
    let of_tile = |op, tile| {
        let of_tile = move |id: &KernelId| id.info().co_resident && Choice::of(*id).tile == tile;
        serving(device, spec, op).filter(of_tile)
    };
    let prefill = of_tile(Op::Prefill, prefill).next()?;
    let fits = |id: &KernelId| id.info().fits_beside(prefill.info(), &sm);
    let decode = of_tile(Op::Decode, decode).filter(fits);
    let decode = decode.max_by_key(|id| id.info().stages)?;
    Some((prefill, vec![Choice::of(decode)]))
}
