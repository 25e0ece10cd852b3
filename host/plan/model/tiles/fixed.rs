//! The kernels of plans whose splits are fixed.
//!
//! Results of a request are to be the same bits alone and in any batch, so its kernel follows from the request alone. A
//! kernel that runs alone and one that shares SMs add in another order: what may meet prefills, or decodes, on its SM takes
//! a kernel that shares SMs, also where nothing is beside it. That costs a few parts in a hundred there, and hybrid batches
//! run side by side.

use kernels_gpu::registry::{KernelId, Op};

use super::{Choice, PrefillTile, TileTable, serving};
use crate::{
    plan::{
        data::{Kernel, MergeMode, PlanError, PlanOptions, Tile},
        model::DeviceDescription,
    },
    problem::Spec,
};

/// Prefills of more new tokens than this take a kernel that shares SMs. Shorter ones are latency, and few.
const SHORT: u32 = 64;

/// Prefills of more new tokens than this run alone: they take long, and the kernel with the highest rate is worth more to
/// them than the decodes that could be hidden.
const LONG: u32 = 4096;

/// What a plan's options say about its kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::plan) struct KernelRule {
    /// One tile for all decodes.
    pub decode_tile: Option<Tile>,
    /// The kernel of a request follows from the request alone.
    pub fixed: bool,
    /// Decodes are merged by their own CTAs: those that share SMs leave that to others.
    merges: bool,
}

impl From<&PlanOptions> for KernelRule {
    fn from(options: &PlanOptions) -> Self {
        Self {
            decode_tile: options.decode_tile,
            fixed: options.split.is_fixed(),
            merges: options.merge_mode == MergeMode::Fused,
        }
    }
}

/// The kernels of a configuration in which two share SMs, for a plan whose splits are fixed.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::plan) struct SharedKernels {
    /// Which of the device's configurations.
    pub config: usize,
    /// What they take beside each other.
    pub beside: TileTable,
    /// What the prefill and the decode take alone, as the configuration says.
    pub prefill_slowdown: f64,
    pub decode_slowdown: f64,
}

impl TileTable {
    /// The kernels of plans with these options that have nothing beside them.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_options(
        device: &DeviceDescription,
        spec: &Spec,
        options: &PlanOptions,
    ) -> Result<Self, PlanError> {
        Self::by_rule(device, spec, options.into()).map(|(tiles, _)| tiles)
    }

    /// The kernels that have nothing beside them, and those among them that share SMs.
    pub(in crate::plan) fn by_rule(
        device: &DeviceDescription,
        spec: &Spec,
        rule: KernelRule,
    ) -> Result<(Self, Option<SharedKernels>), PlanError> {
        let alone = Self::new(device, spec, rule.decode_tile)?;
        let shares = rule.fixed && !rule.merges && rule.decode_tile.is_none();
        let shared = match shares {
            true => alone.with_shared(device, spec),
            false => None,
        };
        Ok(match shared {
            Some((tiles, shared)) => (tiles, Some(shared)),
            None => (alone, None),
        })
    }

    /// With kernels that share SMs in the place of those of the same requests; none where there are none for the heads.
    fn with_shared(
        &self,
        device: &DeviceDescription,
        spec: &Spec,
    ) -> Option<(Self, SharedKernels)> {
        // Of those that were measured the one that is best for prefills alone.
        let configs = device.pod.configs.iter();
        let measured = configs.filter(|config| config.shares_sms());
        let tables = measured.filter_map(|config| {
            let decode = config.decode?;
            Some((config, decode, Self::fused(device, spec, None, config)?))
        });
        let (config, tile, mut beside) =
            tables.min_by(|a, b| a.0.prefill_slowdown.total_cmp(&b.0.prefill_slowdown))?;
        let mut tiles = self.clone();

        // Tiles of a part of 128 tokens: chunks that begin at multiples of these have the tiles of the whole prompt.
        for step in &mut beside.prefill {
            step.pack = 1 << step.pack.trailing_zeros();
        }
        let prefill = *beside.prefill(LONG);
        tiles.prefill = self.with_prefill(prefill)?;

        // Alone there is room for most blocks of keys under way: their number changes no bit.
        let of_tile = |id: &KernelId| id.info().co_resident && Choice::of(*id).tile == tile;
        let deepest = serving(device, spec, Op::Decode).filter(of_tile);
        let decode = Choice::of(deepest.max_by_key(|id| id.info().stages)?);
        let same =
            |id: Option<KernelId>| id.zip(decode.kernel).is_some_and(|(a, b)| a.same_bits(b));
        let [of_beside] = beside.decodes() else {
            return None;
        };
        let replaced = tiles.decode.iter_mut().find(|own| own.tile.m == tile.m)?;
        if !same(of_beside.kernel) || beside.decode_pack != self.decode_pack {
            return None;
        }
        *replaced = decode;

        // With as many blocks it was measured beside the other prefill.
        let as_deep = device.pod.configs.iter().find(|config| {
            let table = Self::fused(device, spec, None, config);
            table.is_some_and(|table| matches!(table.decodes(), [only] if *only == decode))
        });
        let shared = SharedKernels {
            config: device.pod.configs.iter().position(|of| of == config)?,
            beside,
            prefill_slowdown: config.prefill_slowdown,
            decode_slowdown: as_deep.unwrap_or(config).decode_slowdown,
        };
        Some((tiles, shared))
    }

    /// The prefills, with this one for those that are neither short nor long. None where another has its tile, by which
    /// kernels are found, or has heads of their own dimension and it has not: padding costs more than is gained.
    fn with_prefill(&self, prefill: PrefillTile) -> Option<Vec<PrefillTile>> {
        let dim = |step: &PrefillTile| step.kernel.map(|id| id.info().head_dim);
        let fits = |step: &PrefillTile| step.tile != prefill.tile && dim(step) == dim(&prefill);
        if !self.prefill.iter().all(fits) {
            return None;
        }
        let mut steps = Vec::with_capacity(self.prefill.len() + 2);
        for step in &self.prefill {
            let up_to = step.up_to.min(SHORT);
            steps.push(PrefillTile { up_to, ..*step });
            if step.up_to >= SHORT {
                break;
            }
        }
        steps.push(PrefillTile {
            up_to: LONG,
            ..prefill
        });
        steps.extend(self.prefill.iter().filter(|step| step.up_to > LONG));
        Some(steps)
    }

    /// Whether a row block of so many query tokens computes the same bits by this table as by another: in one tile of a
    /// decode, or in tiles of a prefill.
    pub(in crate::plan) fn same_bits(&self, other: &Self, kernel: Kernel, tokens: u32) -> bool {
        let same = |a: Option<KernelId>, b: Option<KernelId>| match (a, b) {
            (Some(a), Some(b)) => a.same_bits(b),
            (a, b) => a == b,
        };
        match kernel {
            Kernel::Prefill => {
                let [a, b] = [self, other].map(|table| table.prefill(tokens));
                (a.tile, a.pack) == (b.tile, b.pack) && same(a.kernel, b.kernel)
            }
            Kernel::Decode => {
                let tile = |table: &Self| {
                    let holds = table.decode_tokens() >= tokens;
                    let choice = table.decode(table.row_tile(tokens)).filter(|_| holds)?;
                    Some((choice.kernel, choice.tile, table.decode_pack))
                };
                match (tile(self), tile(other)) {
                    (Some(a), Some(b)) => (a.1, a.2) == (b.1, b.2) && same(a.0, b.0),
                    _ => false,
                }
            }
        }
    }
}
