//! The kernels of plans whose splits are fixed.
//!
//! The results of a request must have the same bits alone and in any batch, so only the request decides its kernel.
//! Kernels that run alone and kernels that share SMs add in different orders. Requests that may run beside others on an
//! SM therefore always take a kernel that shares SMs. That costs a few percent if nothing runs beside it, and allows
//! hybrid batches to run side by side.

use kernels_gpu::registry::{KernelId, Op};

use super::{Choice, PrefillTile, TileTable, serving};
use crate::{
    plan::{
        data::{Kernel, MergeMode, PlanError, PlanOptions, Tile},
        model::DeviceDescription,
    },
    problem::Spec,
};

/// Prefills of more new tokens than this take a kernel that shares SMs. Shorter ones are rare, and limited by latency.
const SHORT: u32 = 64;

/// Rows of the tiles for which chunks may begin at multiples of as many tokens.
const CHUNK: u32 = 128;

/// Prefills of more new tokens than this run alone: they take long, and gain more from the fastest kernel than from
/// hiding decodes.
const LONG: u32 = 4096;

/// What a plan's options say about its kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::plan) struct KernelRule {
    /// One tile for all decodes.
    pub decode_tile: Option<Tile>,
    /// Whether only the request decides its kernel.
    pub fixed: bool,
    /// Whether decodes merge in their own CTAs. Kernels that share SMs do not.
    merges: bool,
}

impl KernelRule {
    /// Whether the batch may decide which tiles its decodes have.
    const fn chooses(self) -> bool {
        !self.fixed && self.decode_tile.is_none()
    }
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

/// The kernels of a configuration in which two kernels share SMs, for a plan with fixed splits.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::plan) struct SharedKernels {
    /// Index of the configuration in the device description.
    pub config: usize,
    /// The kernels that share SMs.
    pub co_resident: TileTable,
    /// Slowdowns of the prefill and of the decode alone, as in the configuration.
    pub prefill_slowdown: f64,
    pub decode_slowdown: f64,
}

/// Makes the tokens of a tile of 128 rows divide 128, by a power of two of heads per tile: chunks that begin at multiples of
/// 128 then have the tiles of the whole prompt.
fn align_to_chunks(step: &mut PrefillTile) {
    if step.tile.m == CHUNK && step.up_to > SHORT {
        step.pack = 1 << step.pack.trailing_zeros();
    }
}

impl TileTable {
    /// The kernels that plans with these options use outside of hybrid batches.
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

    /// The tables that a batch may take instead: with another kernel for few keys of few rows, with smaller tiles for few
    /// decodes, and with a larger one for many rows.
    #[must_use]
    pub fn others(
        &self,
        device: &DeviceDescription,
        spec: &Spec,
        options: &PlanOptions,
    ) -> [Option<Self>; 3] {
        match KernelRule::from(options).chooses() {
            true => [
                self.for_few_keys(device, spec, options),
                self.smaller(device, spec),
                self.larger(device, spec),
            ],
            false => [None, None, None],
        }
    }

    /// The kernels that are used outside of hybrid batches, and those among them that share SMs.
    pub(in crate::plan) fn by_rule(
        device: &DeviceDescription,
        spec: &Spec,
        rule: KernelRule,
    ) -> Result<(Self, Option<SharedKernels>), PlanError> {
        let mut alone = Self::new(device, spec, rule.decode_tile)?;
        if rule.fixed {
            alone.prefill.iter_mut().for_each(align_to_chunks);
        }
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

    /// The table with kernels that share SMs for the requests that have such kernels. None if the heads have none.
    fn with_shared(
        &self,
        device: &DeviceDescription,
        spec: &Spec,
    ) -> Option<(Self, SharedKernels)> {
        // Of the measured configurations, the one with the fastest prefills alone. Those for 8-bit keys only and those of 16
        // rows are not for fixed splits: their decodes were not measured alone.
        let configs = device.pod.configs.iter();
        let measured = configs.filter(|config| {
            let few_rows = config.decode.is_some_and(|tile| tile.m <= 8);
            config.shares_sms() && config.kv_bits != Some(8) && few_rows
        });
        let tables = measured.filter_map(|config| {
            let decode = config.decode?;
            Some((config, decode, Self::fused(device, spec, None, config)?))
        });
        let (config, tile, mut co_resident) =
            tables.min_by(|a, b| a.0.prefill_slowdown.total_cmp(&b.0.prefill_slowdown))?;
        let mut tiles = self.clone();

        co_resident.prefill.iter_mut().for_each(align_to_chunks);
        let prefill = *co_resident.prefill(LONG);
        tiles.prefill = self.with_prefill(prefill)?;

        // Alone, there is room for the most stages. Their number changes no bit.
        let of_tile = |id: &KernelId| id.info().co_resident && Choice::of(*id).tile == tile;
        let deepest = serving(device, spec, Op::Decode).filter(of_tile);
        let decode = Choice::of(deepest.max_by_key(|id| id.info().stages)?);
        let same =
            |id: Option<KernelId>| id.zip(decode.kernel).is_some_and(|(a, b)| a.same_bits(b));
        let [shared_decode] = co_resident.decodes() else {
            return None;
        };
        let replaced = tiles.decode.iter_mut().find(|own| own.tile.m == tile.m)?;
        if !same(shared_decode.kernel) || co_resident.decode_pack != self.decode_pack {
            return None;
        }
        *replaced = decode;

        // The decode with that many stages was measured beside another prefill.
        let as_deep = device.pod.configs.iter().find(|config| {
            let table = Self::fused(device, spec, None, config);
            table.is_some_and(|table| matches!(table.decodes(), [only] if *only == decode))
        });
        let shared = SharedKernels {
            config: device.pod.configs.iter().position(|of| of == config)?,
            co_resident,
            prefill_slowdown: config.prefill_slowdown,
            decode_slowdown: as_deep.unwrap_or(config).decode_slowdown,
        };
        Some((tiles, shared))
    }

    /// The prefills, with this one for lengths that are neither short nor long. None if another prefill has the same
    /// tile (kernels are looked up by tile), or a kernel of another head dimension (padding costs more than is gained).
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

    /// Whether a row block of `tokens` query tokens gets the same bits from this table as from another: in one tile of
    /// a decode, or in tiles of a prefill.
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
