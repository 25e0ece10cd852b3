//! A plan over time: what each resident CTA does, by the cost model.

use std::{cmp::Reverse, collections::BinaryHeap};

use kernels_gpu::abi::{NO_MERGE, WorkItem};

use crate::plan::{
    data::{CtaSplit, Kernel, Plan, PodMode, TileGroup},
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

/// A plan over time. Launches follow one another in the plan's order. Within and across launches, a unit goes to the
/// CTA that is free first. If prefills and decodes overlap, each have CTAs of their own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Schedule {
    /// CTAs.
    pub ctas: u32,
    /// Number of CTAs of the prefills, which come first and run side by side with the others; 0 if nothing overlaps.
    pub prefill_ctas: u32,
    /// All units, in launch order. If prefills and decodes overlap, those of the prefills come first. The last unit
    /// ends at the makespan.
    pub spans: Vec<Span>,
    /// When the last unit ends: the predicted time of the plan, without its merges. For a hybrid batch it is the
    /// [forecast](crate::plan::pod::PodForecast) for the form in which the batch runs.
    pub makespan_ns: f64,
    /// The sum of the times of all units.
    pub busy_ns: f64,
}

impl Schedule {
    /// The part of the time, up to the last span's end, in which CTAs have a unit.
    #[must_use]
    pub fn busy(&self) -> f64 {
        let spans = self.spans.iter();
        // The sum of nothing would be −0.
        let busy = spans.fold(0.0, |sum, span| sum + (span.end_ns - span.begin_ns));
        busy / (self.makespan_ns * f64::from(self.ctas)).max(f64::MIN_POSITIVE)
    }

    /// Scales the spans so that they begin at `begin_ns` and the last ends at `end_ns`.
    fn fit(&mut self, begin_ns: f64, end_ns: f64) {
        let ends = self.spans.iter().map(|span| span.end_ns);
        let last = ends.fold(0.0, f64::max).max(f64::MIN_POSITIVE);
        let scale = (end_ns - begin_ns) / last;
        for span in &mut self.spans {
            span.begin_ns = begin_ns + span.begin_ns * scale;
            // Exact at the end, whatever the rounding of the scale.
            span.end_ns = match span.end_ns == last {
                true => end_ns,
                false => begin_ns + span.end_ns * scale,
            };
        }
        self.makespan_ns = end_ns;
    }

    /// Adds the units of another schedule. `above` is added to the indices of its CTAs.
    fn join(&mut self, other: Self, above: u32) {
        self.spans.extend(other.spans.into_iter().map(|span| Span {
            cta: span.cta + above,
            ..span
        }));
        self.ctas = self.ctas.max(other.ctas + above);
        self.makespan_ns = self.makespan_ns.max(other.makespan_ns);
        self.busy_ns += other.busy_ns;
    }
}

impl Plan {
    /// Schedules the plan on a device, without its merges.
    #[must_use]
    pub fn schedule(&self, device: &DeviceDescription) -> Schedule {
        let cost = CostModel::new(device, &self.spec);
        let Some(pod) = &self.pod else {
            let mut schedule = self.in_turns(&cost, |_| true, None);
            schedule.fit(0.0, schedule.makespan_ns);
            return schedule;
        };
        let split = (pod.ctas != CtaSplit::default()).then_some(pod.ctas);
        let of = |kernel: Kernel| {
            let ctas = split.map(|split| match kernel {
                Kernel::Prefill => split.prefill,
                Kernel::Decode => split.decode,
            });
            self.in_turns(&cost, |group| group.kernel == kernel, ctas)
        };
        let (mut prefills, mut decodes) = (of(Kernel::Prefill), of(Kernel::Decode));
        let [prefilled, decoded] = pod.forecast.done(pod.mode);
        if pod.mode != PodMode::Serial {
            prefills.fit(0.0, prefilled);
            decodes.fit(0.0, decoded);
            prefills.prefill_ctas = prefills.ctas;
            prefills.join(decodes, prefills.ctas);
            return prefills;
        }
        let prefills_first = self.groups.first().map(|group| group.kernel) == Some(Kernel::Prefill);
        let end = pod.forecast.serial_ns;
        let (mut first, mut second, between) = match prefills_first {
            true => (prefills, decodes, prefilled),
            false => (decodes, prefills, decoded),
        };
        first.fit(0.0, between);
        second.fit(between, end);
        first.join(second, 0);
        first
    }

    /// Schedules the wanted groups, one after the other, on `ctas` CTAs or on all resident ones.
    fn in_turns(
        &self,
        cost: &CostModel,
        wanted: impl Fn(&TileGroup) -> bool,
        ctas: Option<u32>,
    ) -> Schedule {
        let groups = || self.groups.iter().filter(|group| wanted(group));
        let contentions =
            groups().map(|group| cost.contention_of(group.kernel, group.tile, group.pack));
        let contention = contentions.reduce(Contention::and).unwrap_or_default();
        let resident = groups().map(|group| cost.resident_ctas(group.kernel));
        let ctas = ctas.unwrap_or_else(|| resident.max().unwrap_or(0) * contention.ctas_sharing);
        let mut free: BinaryHeap<_> = (0..ctas).map(|cta| Reverse((0, cta))).collect();
        let mut schedule = Schedule {
            ctas,
            ..Schedule::default()
        };
        let (mut makespan, mut busy, mut states, mut fixed) = (0, 0, 0, u64::MAX);
        for group in groups() {
            // All groups run on the same CTAs, even if a kernel has fewer CTAs on an SM.
            let units = cost.units_per_item(group.pack) * group.heads;
            let sections = match group.kv_heads_together {
                0 => 1,
                together => self.spec.kv_heads * group.heads / together,
            };
            let of_section = units / sections;
            let ordered = (0..sections).flat_map(|section| {
                let units = section * of_section..(section + 1) * of_section;
                group.items.clone().map(move |index| (index, units.clone()))
            });
            for (index, units) in ordered {
                let item = &self.items[index as usize];
                let cut_rows = self.partial_rows(group.kernel, item);
                let of = (group.kernel, group.tile, group.pack);
                fixed = fixed.min(cost.own_ps(of.0, of.1, of.2, 0));
                let unit_states = cost.states_ps(of.0, of.1, of.2, cut_rows);
                let unit_ps = cost.own_ps(of.0, of.1, of.2, cut_rows)
                    + cost.key_ps(group.kernel, group.tile, group.pack).max(1)
                        * u64::from(contention.ctas_sharing)
                        * u64::from(item.kv_len());
                for unit in units {
                    let Some(Reverse((begin, cta))) = free.pop() else {
                        break;
                    };
                    let end = begin + unit_ps;
                    free.push(Reverse((end, cta)));
                    makespan = makespan.max(end);
                    busy += unit_ps;
                    states += unit_states;
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
        // CTAs are faster while others are idle.
        let timeline = CtaTimeline::of(free.into_iter().map(|Reverse((load, _))| load));
        let all_states = states / u64::from(ctas.max(1));
        let end = timeline.sooner(makespan, fixed, contention) + all_states;
        schedule.makespan_ns = end as f64 / 1e3;
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
