//! The resident CTAs over time, as the units of a plan fill them.
//!
//! Persistent CTAs claim units in launch order, so a launch behaves as list scheduling: each unit goes to
//! the CTA that is free first. All units of an item cost the same and are claimed one after the other, so
//! CTAs are kept in *columns* of several that move together.

use std::collections::VecDeque;

use super::Contention;

/// The load of each column, in picoseconds.
#[derive(Debug, Default)]
pub struct CtaTimeline {
    /// Ascending.
    loads: VecDeque<u64>,
    ctas_per_column: u32,
}

impl CtaTimeline {
    /// Starts with idle CTAs, for items whose numbers of units are multiples of `units`. Columns are as wide as
    /// possible.
    pub fn reset(&mut self, resident_ctas: u32, units: u32) {
        self.ctas_per_column = gcd(resident_ctas, units);
        self.loads.clear();
        self.loads
            .resize((resident_ctas / self.ctas_per_column) as usize, 0);
    }

    /// CTAs with these loads.
    pub fn of(loads: impl Iterator<Item = u64>) -> Self {
        let mut loads: Vec<u64> = loads.collect();
        loads.sort_unstable();
        Self {
            loads: loads.into(),
            ctas_per_column: 1,
        }
    }

    /// The columns that an item takes.
    const fn width(&self, units: u32) -> usize {
        (units / self.ctas_per_column) as usize
    }

    /// The most that a unit of an item may cost if the item is to end by `until`.
    pub fn room(&self, units: u32, until: u64) -> u64 {
        let width = self.width(units);
        let columns = width.min(self.loads.len());
        let rounds = width.div_ceil(columns) as u64;
        until.saturating_sub(self.loads[columns - 1]) / rounds
    }

    /// Places an item whose units cost `cost`; returns when the first of them starts, and when the last ends.
    pub fn place(&mut self, units: u32, cost: u64) -> (u64, u64) {
        let start = self.loads[0];
        let mut end = start;
        for _ in 0..self.width(units) {
            let load = self.loads.pop_front().unwrap_or_default() + cost;
            // Often the new load is the greatest. With unequal pieces, it may belong anywhere among hundreds.
            match self.loads.back() {
                Some(&greatest) if greatest > load => {
                    let at = self.loads.partition_point(|&other| other <= load);
                    self.loads.insert(at, load);
                }
                _ => self.loads.push_back(load),
            }
            end = load;
        }
        (start, end)
    }

    /// When work ends that would end at `until` if every CTA were busy until then. CTAs that still have work are faster
    /// while others are idle, except for a time `fixed` in which they only wait.
    pub fn sooner(&self, until: u64, fixed: u64, contention: Contention) -> u64 {
        if contention.solo_speedup <= 1000 {
            return until;
        }
        let all = self.loads.len() as u64;
        let mut done = fixed.min(until);
        let mut time = done;
        for (active, &load) in (1..=all).rev().zip(&self.loads) {
            let next = load.clamp(done, until);
            // Most CTAs end together, and a speed takes two square roots.
            if next == done {
                continue;
            }
            time += (next - done) * 1000 / contention.speed(active, all);
            done = next;
        }
        time
    }

    /// When the last column is done.
    pub fn makespan(&self) -> u64 {
        self.loads.back().copied().unwrap_or_default()
    }
}

/// The greatest common divisor.
pub const fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_go_to_the_cta_that_is_free_first() {
        let mut timeline = CtaTimeline::default();
        timeline.reset(3, 1);
        let starts = [50, 40, 30, 20, 10].map(|cost| timeline.place(1, cost).0);
        assert_eq!(starts, [0, 0, 0, 30, 40]);
        assert_eq!(timeline.makespan(), 50);
        assert_eq!(timeline.room(1, 60), 10);
        assert_eq!(timeline.room(2, 60), 10);
        assert_eq!(timeline.room(6, 60), 5);
    }

    #[test]
    fn the_last_ones_are_quicker() {
        let mut timeline = CtaTimeline::default();
        timeline.reset(4, 1);
        for cost in [100, 60, 40, 20] {
            timeline.place(1, cost);
        }
        let alone = |alone| Contention {
            ctas_sharing: 1,
            solo_speedup: alone,
        };
        assert_eq!(timeline.sooner(100, 0, Contention::NONE), 100);
        // Four until 20, three until 40, two until 60, and then one.
        let until = |until| timeline.sooner(until, 0, alone(2000));
        assert_eq!((until(20), until(40)), (20, 35));
        assert_eq!((until(60), until(100)), (46, 66));
        assert_eq!(timeline.sooner(100, 90, alone(2000)), 95);
        // As if all were spread evenly, nearly.
        assert_eq!(timeline.sooner(100, 0, alone(9000)), 55);
    }

    #[test]
    fn columns_are_as_wide_as_the_device_allows() {
        let mut timeline = CtaTimeline::default();
        timeline.reset(132, 8);
        assert_eq!((timeline.loads.len(), timeline.width(8)), (33, 2));
        // More units than CTAs take turns.
        timeline.reset(2, 8);
        timeline.place(8, 10);
        assert_eq!((timeline.makespan(), timeline.room(8, 80)), (40, 10));
    }
}
