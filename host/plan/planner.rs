//! The planner: from specification and batch to plan, reusing its buffers.

mod derived;
mod tables;

use super::{
    Bound, DeviceDescription, Kernel, MergeMode, PackRule, Plan, PlanError, PlanOptions,
    PlannedPart, SplitMode, TileGroup,
    draft::{Draft, DraftRow, DraftRun, PartInput},
    emit::{Emitter, Pieces},
    gather::Gatherer,
    pod::{PodMode, PodPlan, PrefillLoad, Seats, Tickets},
    split::{SplitInput, Splitter},
};
use crate::problem::{Batch, Spec};
use derived::Derived;
use tables::{check_split, collect_tables};

/// Makes plans. Keep it from step to step: its buffers are reused, so that planning allocates nothing in
/// the steady state.
#[derive(Debug, Default)]
pub struct Planner {
    /// What follows from heads, device and options, and what it was derived from.
    derived: Option<Derived>,
    gatherer: Gatherer,
    drafts: Vec<Draft>,
    draft_rows: Vec<DraftRow>,
    draft_runs: Vec<DraftRun>,
    splitter: Splitter,
    emitter: Emitter,
}

impl Planner {
    /// A planner without memory of any batch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Plans a batch.
    ///
    /// # Errors
    /// [`PlanError`]: a wrong specification or batch, heads or a tile that the device has no kernel for, or a
    /// bound that the batch does not fit.
    pub fn plan(
        &mut self,
        spec: &Spec,
        batch: &Batch,
        device: &DeviceDescription,
        options: &PlanOptions,
    ) -> Result<Plan, PlanError> {
        let mut plan = Plan::empty(*spec);
        self.plan_into(spec, batch, device, options, &mut plan)?;
        Ok(plan)
    }

    /// Plans a batch into a plan whose memory is reused; after an error its content is unspecified.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn plan_into(
        &mut self,
        spec: &Spec,
        batch: &Batch,
        device: &DeviceDescription,
        options: &PlanOptions,
        plan: &mut Plan,
    ) -> Result<(), PlanError> {
        let same = |derived: &Derived| derived.is_of(spec, device, options.decode_tile);
        if !self.derived.as_ref().is_some_and(same) {
            self.derived = Some(Derived::new(spec, device, options.decode_tile)?);
        }
        batch.check(spec)?;
        check_split(options.split, batch)?;
        // Few rows and many go to different kernels, whose results differ in the last bits: where these shall
        // not depend on the company, no tile is shared.
        let apart = PlanOptions {
            packing: PackRule::Off,
            ..*options
        };
        let options = match options.split {
            SplitMode::Fixed { .. } => &apart,
            _ => options,
        };
        plan.spec = *spec;
        plan.total_q = batch.total_q();
        collect_tables(batch, plan)?;

        self.plan_once(batch, options, plan)?;
        let Some(bound) = options.bound else {
            return Ok(());
        };
        // Less packing needs fewer states and rows, and fewer cuts do.
        let uncut = match options.split {
            SplitMode::Fixed { .. } => options.split,
            _ => SplitMode::Off,
        };
        for split in [options.split, uncut] {
            if bound.check(&Bound::of(plan)).is_ok() {
                return Ok(());
            }
            self.plan_once(
                batch,
                &PlanOptions {
                    packing: PackRule::Off,
                    split,
                    ..*options
                },
                plan,
            )?;
        }
        bound.check(&Bound::of(plan))
    }

    fn plan_once(
        &mut self,
        batch: &Batch,
        options: &PlanOptions,
        plan: &mut Plan,
    ) -> Result<(), PlanError> {
        let Self {
            derived,
            gatherer,
            drafts,
            draft_rows,
            draft_runs,
            splitter,
            emitter,
        } = self;
        let derived = derived.as_ref().expect("derived before planning");
        let Derived {
            device, spec, cost, ..
        } = derived;
        let row_blocks = &plan.row_blocks;
        let most_decode_tokens = device.most_decode_tokens(&derived.tiles);
        let parts = |tiles| {
            let part = move |(index, (part, planned)): (usize, (_, &PlannedPart))| PartInput {
                device,
                most_decode_tokens,
                spec,
                cost,
                tiles,
                part,
                index: index as u32,
                first_page: planned.pages.start,
                row_blocks: &row_blocks
                    [planned.row_blocks.start as usize..planned.row_blocks.end as usize],
                first_row_block: planned.row_blocks.start,
                composed: batch.parts.len() > 1,
            };
            batch.parts.iter().zip(&plan.parts).enumerate().map(part)
        };
        drafts.clear();
        draft_rows.clear();
        draft_runs.clear();
        let mut prefills = false;
        for part in parts(&derived.tiles) {
            prefills |= gatherer.gather(&part, options, drafts, draft_rows, draft_runs);
        }
        let hybrid = prefills && !drafts.is_empty();
        let mut pod = hybrid.then(|| {
            let flops: u64 = parts(&derived.tiles)
                .map(|part| part.contiguous_flops())
                .sum();
            let load = |tiles| PrefillLoad {
                ns: flops as f64 / device.flops_per_ns,
                tiles: parts(tiles).map(|part| part.contiguous_units()).sum(),
                divisible: options.split != SplitMode::Off,
            };
            // Results that do not depend on the batch need the same tiles in any company.
            let fixed = options.split.is_fixed();
            let fused = (derived.fused_tiles.iter())
                .map(|tiles| tiles.as_ref().filter(|_| !fixed).map(load));
            let decode_ns = cost.mean_load_ps(drafts) as f64 / 1e3;
            PodPlan::choose(device, options, &load(&derived.tiles), fused, decode_ns)
        });
        let config = pod.and_then(|pod| Some(&device.pod.configs[pod.config? as usize]));
        let tiles = derived.tiles(pod.as_ref());
        // Drafts stand part after part, because states are merged in that order.
        let again = hybrid
            && (batch.parts.len() > 1 || config.is_some_and(|config| config.decode.is_some()));
        if again {
            drafts.clear();
            draft_rows.clear();
            draft_runs.clear();
        }
        for part in parts(tiles) {
            if again {
                gatherer.gather(&part, options, drafts, draft_rows, draft_runs);
            }
            if prefills {
                part.draft_contiguous(drafts);
            }
        }

        let input = SplitInput {
            mode: options.split,
            cost,
            tiles,
            // One after the other, each has the device to itself.
            hybrid: pod.is_some_and(|pod| pod.mode != PodMode::Serial),
            shared_sms: config.is_some(),
            seats: pod
                .map(|pod| pod.seats)
                .filter(|&seats| seats != Seats::default()),
        };
        splitter.split(&input, drafts);
        if let Some(pod) = &mut pod {
            let [decodes, prefills] = splitter.outcome.units;
            let virtual_decodes = config.map_or(1, |config| config.virtual_decodes.max(1));
            pod.tickets =
                Tickets::new(options.tickets, prefills, decodes.div_ceil(virtual_decodes));
        }
        if let (Some(pod), Some(true)) = (&mut pod, config.map(|config| config.by_tickets)) {
            pod.mode = PodMode::Tickets;
        }
        plan.pod = pod;
        let input = Pieces {
            variant: spec.variant,
            drafts,
            draft_rows,
            draft_runs,
            fixed_splits: options.split.is_fixed(),
            pieces: &splitter.pieces,
            launches: &splitter.launches,
            place: &splitter.place,
        };
        emitter.emit(&input, plan)?;
        plan.merge_mode = match options.merge_mode {
            MergeMode::Auto if merges_in_passing(device, options, plan) => MergeMode::Fused,
            MergeMode::Auto => MergeMode::Kernel,
            mode => mode,
        };
        Ok(())
    }
}

/// Whether the CTAs of a plan merge in less time than a kernel behind them takes to start: tiles of few rows do,
/// all warps at once, wider ones row by row. A few merges each, or the kernel's many CTAs are faster.
fn merges_in_passing(device: &DeviceDescription, options: &PlanOptions, plan: &Plan) -> bool {
    const ROWS: u32 = 16;
    const MERGES_PER_SM: usize = 4;
    // What merges must not depend on the company where results shall not.
    let fixed = options.split.is_fixed();
    let few_rows = |group: &TileGroup| group.kernel == Kernel::Decode && group.tile.m <= ROWS;
    let merges = plan.merges.len() * plan.spec.kv_heads as usize;
    let all_have_states = plan.merges.iter().all(|merge| merge.slots > 0);
    !fixed
        && (1..=MERGES_PER_SM * device.sms as usize).contains(&merges)
        && all_have_states
        && plan.groups.iter().all(few_rows)
}
