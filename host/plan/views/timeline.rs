//! A plan in time: what each resident CTA does, as the cost model has it.

use std::{cmp::Reverse, collections::BinaryHeap};

use kernels_gpu::abi::{NO_MERGE, WorkItem};

use crate::plan::{
    data::{Kernel, Plan},
    model::{Contention, CostModel, CtaTimeline, DeviceDescription},
};

/// A unit of work on its CTA.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The item.
    pub item: u32,
    /// Which of the item's units (a head).
    pub unit: u32,
    /// The CTA.
    pub cta: u32,
    /// When it starts, in nanoseconds.
    pub begin_ns: f64,
    /// When it ends.
    pub end_ns: f64,
}

/// A plan in time. Launches follow one another in the plan's order; within and across them, a unit goes to
/// the CTA that is free first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Schedule {
    /// CTAs.
    pub ctas: u32,
    /// All units, in launch order.
    pub spans: Vec<Span>,
    /// When the last unit ends. Before the end that its span has, if a CTA is quicker while others have nothing to do
    /// (spans are as if they had).
    pub makespan_ns: f64,
    /// What all units take together.
    pub busy_ns: f64,
}

impl Schedule {
    /// When the last span ends: the makespan, or later.
    #[must_use]
    pub fn spans_end_ns(&self) -> f64 {
        let ends = self.spans.iter().map(|span| span.end_ns);
        ends.fold(0.0, f64::max)
    }
}

impl Plan {
    /// Schedules the plan on a device, without its merges.
    #[must_use]
    pub fn schedule(&self, device: &DeviceDescription) -> Schedule {
        let cost = CostModel::new(device, &self.spec);
        let contentions = self
            .groups
            .iter()
            .map(|group| cost.contention(group.kernel, group.tile.m));
        let contention = contentions.reduce(Contention::and).unwrap_or_default();
        let ctas = self
            .groups
            .iter()
            .map(|group| cost.resident_ctas(group.kernel))
            .max()
            .unwrap_or(0)
            * contention.ctas_sharing;
        let mut free: BinaryHeap<_> = (0..ctas).map(|cta| Reverse((0, cta))).collect();
        let mut schedule = Schedule {
            ctas,
            ..Schedule::default()
        };
        let (mut makespan, mut busy, mut fixed) = (0, 0, u64::MAX);
        for group in &self.groups {
            // A kernel with fewer CTAs on an SM leaves the others idle: its CTAs stand for several.
            for index in group.items.clone() {
                let item = &self.items[index as usize];
                let cut_rows = self.partial_rows(group.kernel, item);
                let unit_fixed = cost.fixed_ps(group.kernel, group.tile, group.pack, cut_rows);
                fixed = fixed.min(cost.fixed_ps(group.kernel, group.tile, group.pack, 0));
                let unit_ps = unit_fixed
                    + cost.key_ps(group.kernel, group.tile, group.pack).max(1)
                        * u64::from(contention.ctas_sharing)
                        * u64::from(item.kv_len());
                for unit in 0..cost.units_per_item(group.pack) {
                    let Some(Reverse((begin, cta))) = free.pop() else {
                        break;
                    };
                    let end = begin + unit_ps;
                    free.push(Reverse((end, cta)));
                    makespan = makespan.max(end);
                    busy += unit_ps;
                    let [begin_ns, end_ns] = [begin, end].map(|ps| ps as f64 / 1e3);
                    schedule.spans.push(Span {
                        item: index,
                        unit,
                        cta,
                        begin_ns,
                        end_ns,
                    });
                }
            }
        }
        let timeline = CtaTimeline::of(free.into_iter().map(|Reverse((load, _))| load));
        schedule.makespan_ns = timeline.sooner(makespan, fixed, contention) as f64 / 1e3;
        schedule.busy_ns = busy as f64 / 1e3;
        schedule
    }

    /// Query tokens of an item that leave a partial state.
    pub(in crate::plan) fn partial_rows(&self, kernel: Kernel, item: &WorkItem) -> u32 {
        if kernel == Kernel::Decode {
            self.rows_of(item)
                .iter()
                .filter(|row| row.merge != NO_MERGE)
                .count() as u32
        } else if item.merge == NO_MERGE {
            0
        } else {
            item.rows
        }
    }
}
