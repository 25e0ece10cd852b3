//! Which kernels a device has for some heads, and which of them an item takes.
//!
//! The kernels are the rows of the [registry](kernels_gpu::registry) that the device can run and that were compiled
//! for the heads. An item takes the one with the fewest rows that covers it. An executor that takes tiles of any
//! size (the CPU's) has no rows: its sizes are in the device description.

mod choice;
mod fixed;
mod hybrid;
mod serving;

pub use choice::{Choice, PrefillTile};
pub(in crate::plan) use choice::{MOST_OF_TILE, decode_of_tile};
pub(in crate::plan) use fixed::{KernelRule, SharedKernels};
use kernels_gpu::registry::{KernelId, Op};
pub(in crate::plan) use serving::{alone, has_hooks, runnable, serves, serves_heads};

use self::{
    choice::{decodes, larger_decode, prefill_tile, prefills},
    hybrid::{co_resident_kernels, kernels_apart, ticket_kernels},
    serving::serving,
};
use super::{CostModel, DeviceDescription, PodConfig};
use crate::{
    plan::data::{Kernel, MergeMode, PlanError, PlanOptions, Tile},
    problem::{Compute, Padding, Spec},
};

/// The kernels that a plan for one specification on one device chooses from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TileTable {
    group: u32,
    /// Query heads of a KV head in a tile of decodes: all of them, except for latent heads that are more than a tile's
    /// rows.
    decode_pack: u32,
    /// Ascending by rows. Empty if only prefill kernels were compiled for the heads, or if no tile of decodes holds the query
    /// heads of a KV head.
    decode: Vec<Choice>,
    prefill: Vec<PrefillTile>,
}

impl TileTable {
    /// The kernels for a specification on a device. `decode` is a tile that replaces the choice of decode tiles.
    ///
    /// # Errors
    /// [`PlanError::NoTile`] where an operation has none.
    pub fn new(
        device: &DeviceDescription,
        spec: &Spec,
        decode: Option<Tile>,
    ) -> Result<Self, PlanError> {
        let prefill = prefills(device, spec).unwrap_or_default();
        let decodes = match decode {
            Some(tile) => decode_of_tile(device, spec, tile).into_iter().collect(),
            None => decodes(device, spec, false),
        };
        // If only prefill kernels were compiled for the heads, or no tile of decodes holds a token with its heads, prefills run
        // decodes, too. A tile that was asked for is not replaced.
        let prefill_only = decode.is_none() || alone(device, spec, Op::Decode).is_empty();
        Self {
            group: spec.group(),
            decode_pack: spec.group(),
            decode: decodes,
            prefill,
        }
        .checked(device, spec, prefill_only)
    }

    /// The kernels of a configuration of hybrid batches. `decode` is a tile that replaces the configuration's decode
    /// tile. None if the configuration has no kernels for the heads.
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
                // The decode in one kernel with the prefill cannot be replaced by another.
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

    /// Keeps the decode tiles that hold a token with its packed heads: a gathered token brings all of them. If none is left and
    /// `prefill_only` allows it, prefills run decodes.
    fn checked(
        mut self,
        device: &DeviceDescription,
        spec: &Spec,
        prefill_only: bool,
    ) -> Result<Self, PlanError> {
        let widest = self.decode.iter().map(|choice| choice.tile.m).max();
        let no_tile = |kernel| PlanError::NoTile {
            kernel,
            head_dim_qk: spec.head_dim_qk,
            head_dim_v: spec.head_dim_v,
            group: spec.group(),
            largest: widest.unwrap_or(0),
            device: device.name.clone(),
        };
        if let (true, Some(rows)) = (spec.latent && device.decode.keys.is_none(), widest) {
            // Equal tiles, as few as can hold all heads.
            self.decode_pack = self.group.div_ceil(self.group.div_ceil(rows));
        }
        self.decode
            .retain(|choice| choice.tile.m >= self.decode_pack);
        let prefill_only = prefill_only && !self.prefill.is_empty();
        if self.decode.is_empty() && widest.is_some() && !prefill_only {
            return Err(no_tile(Kernel::Decode));
        }
        // If only decode kernels were compiled for the heads or the cache, they run prefills, too.
        let takes_prompts =
            |choice: &Choice| choice.kernel.is_some_and(|id| id.info().takes_prompts);
        let (converts, pads) = (
            spec.kv_dtype != spec.on_kernels().q_dtype,
            Padding::of(spec).is_some(),
        );
        let decode_only =
            (converts || pads) && !self.decode.is_empty() || self.decode.iter().any(takes_prompts);
        if self.prefill.is_empty() && !spec.latent && !decode_only {
            return Err(no_tile(Kernel::Prefill));
        }
        if self.decode.is_empty() && !prefill_only {
            return Err(no_tile(Kernel::Decode));
        }
        Ok(self)
    }

    /// The table with the prefill tile of the longest prompts for all. None if no prompt has another kernel.
    #[must_use]
    pub fn wide(&self) -> Option<Self> {
        let last = *self.prefill.last()?;
        let differs = self.prefill.iter().any(|step| step.kernel != last.kernel);
        differs.then(|| Self {
            prefill: vec![last],
            ..self.clone()
        })
    }

    /// The table with smaller tiles for few decodes: without the widest or, of latent heads, with shorter blocks of keys. None
    /// if there are no others, or if these hold no token.
    #[must_use]
    fn smaller(&self, device: &DeviceDescription, spec: &Spec) -> Option<Self> {
        let widest = self.decode.last()?.tile;
        let others = match spec.latent {
            true => {
                let mut others = decodes(device, spec, true);
                others.retain(|choice| choice.tile.m >= self.decode_pack);
                others
            }
            false => self.decode[..self.decode.len() - 1].to_vec(),
        };
        (others.last()?.tile < widest).then(|| Self {
            decode: others,
            ..self.clone()
        })
    }

    /// The table with the deepest kernel that shares SMs for decodes of the fewest rows. None if decodes of these heads never take
    /// it, or have to merge in their own CTAs, which it does not.
    #[must_use]
    fn for_few_keys(
        &self,
        device: &DeviceDescription,
        spec: &Spec,
        options: &PlanOptions,
    ) -> Option<Self> {
        CostModel::new(device, spec).few_keys(self.narrowest())?;
        if options.merge_mode == MergeMode::Fused {
            return None;
        }
        let own = self.decode.first()?.kernel?.info();
        let is_like = |id: &KernelId| {
            let row = id.info();
            row.co_resident && (row.rows, row.head_dim) == (own.rows, own.head_dim)
        };
        let kernels = serving(device, spec, Op::Decode).filter(is_like);
        let deepest = kernels.max_by_key(|id| id.info().stages)?;
        let mut table = self.clone();
        table.decode[0] = Choice::of(deepest);
        Some(table)
    }

    /// The table with one tile for all decodes, larger than its own, if they have 8-bit keys. None if there is no such tile.
    #[must_use]
    fn larger(&self, device: &DeviceDescription, spec: &Spec) -> Option<Self> {
        let choice = larger_decode(device, spec)?;
        (self.has_decodes() && choice.tile.m > self.widest()).then(|| Self {
            decode: vec![choice],
            ..self.clone()
        })
    }

    /// Rows of the narrowest tile of decodes.
    #[must_use]
    pub fn narrowest(&self) -> u32 {
        self.decode.first().map_or(0, |choice| choice.tile.m)
    }

    /// Rows of the widest tile of decodes.
    #[must_use]
    pub fn widest(&self) -> u32 {
        self.decode.last().map_or(0, |choice| choice.tile.m)
    }

    /// Tiles of decodes that hold the query heads of a KV head for one token.
    #[must_use]
    pub const fn tiles_of_token(&self) -> u32 {
        self.group.div_ceil(self.decode_pack)
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

    /// The most query tokens of decodes in a batch that has no shorter ones, or has 8-bit keys. Their rows fit a tile and are at
    /// most the device's `decode_max_rows`. With 8-bit keys, which prefills would convert, they may fill several tiles, at most
    /// `decode_max_tiles`; with products of 8 bits not more than `decode_max_rows`.
    #[must_use]
    pub fn most_tokens_of_decodes(&self, device: &DeviceDescription, spec: &Spec) -> u32 {
        match (spec.kv_dtype.bytes(), self.decode.last()) {
            (1, Some(widest)) => {
                let rows = device.decode_max_tiles.saturating_mul(widest.tile.m);
                let most = match spec.compute {
                    Compute::F16 => rows,
                    Compute::F8 => rows.min(device.decode_max_rows),
                };
                most / self.group
            }
            _ => (device.decode_max_rows / self.group).min(self.decode_tokens()),
        }
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

    /// Query tokens of the tile that holds the fewest, at least 1: of the widest decode tile and all prefill tiles.
    #[must_use]
    pub fn fewest_tokens(&self) -> u32 {
        let decode = self.has_decodes().then(|| self.decode_tokens());
        let prefill = (!self.prefill.is_empty()).then(|| self.fewest_tokens_of_prefills());
        prefill.into_iter().chain(decode).min().unwrap_or(1).max(1)
    }

    /// The same of all prefill tiles.
    #[must_use]
    pub fn fewest_tokens_of_prefills(&self) -> u32 {
        let prefill = self.prefill.iter().map(|step| step.tile.m / step.pack);
        prefill.min().unwrap_or(1).max(1)
    }

    /// Rows of the smallest decode tile that holds this number of query tokens, or of the largest if none does.
    #[must_use]
    pub fn row_tile(&self, tokens: u32) -> u32 {
        let rows = tokens * self.decode_pack;
        let mut tiles = self.decode.iter().map(|choice| choice.tile.m);
        let largest = self.decode.last().map_or(0, |last| last.tile.m);
        tiles.find(|m| *m >= rows).unwrap_or(largest)
    }

    /// The kernel for decodes in tiles of `m` rows.
    #[must_use]
    pub fn decode(&self, m: u32) -> Option<&Choice> {
        self.decode.iter().find(|choice| choice.tile.m == m)
    }

    /// The kernels for decodes, by rows.
    #[must_use]
    pub fn decodes(&self) -> &[Choice] {
        &self.decode
    }

    /// The kernel and tile for a prefill of this number of query tokens.
    #[must_use]
    pub fn prefill(&self, tokens: u32) -> &PrefillTile {
        let step = self.prefill.iter().find(|step| tokens <= step.up_to);
        step.unwrap_or(&self.prefill[self.prefill.len() - 1])
    }

    /// The kernels and tiles for prefills, by their query tokens.
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
