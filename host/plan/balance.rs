//! The resident CTAs as a plan fills them.
//!
//! Persistent CTAs claim units in launch order, so a launch behaves as list scheduling: each unit goes to
//! the CTA that is free first. All units of an item cost the same and are claimed one after the other, so
//! CTAs are kept in *columns* of several that move together.

/// The load of each column, in picoseconds.
#[derive(Debug, Default)]
pub(super) struct Columns {
    /// Ascending.
    loads: Vec<u64>,
    ctas_per_column: u32,
}

/// At most this part of the CTAs may be left out of the columns.
const MAX_IDLE: f64 = 0.0;

impl Columns {
    /// Columns of idle CTAs, for items whose numbers of units `units` divides.
    pub fn reset(&mut self, resident_ctas: u32, units: u32) {
        let idle = |block: u32| resident_ctas % block;
        let divisors = (1..=units.min(resident_ctas))
            .rev()
            .filter(|block| units.is_multiple_of(*block));
        let narrow_enough =
            |block: &u32| f64::from(idle(*block)) <= MAX_IDLE * f64::from(resident_ctas);
        self.ctas_per_column = divisors.clone().find(narrow_enough).unwrap_or(1);
        self.loads.clear();
        self.loads
            .resize((resident_ctas / self.ctas_per_column) as usize, 0);
    }

    /// Blocks of units that an item of so many units is placed in.
    fn blocks(&self, units: u32) -> usize {
        (units / self.ctas_per_column) as usize
    }

    /// What a unit of an item may cost so that the item ends by `until`.
    pub fn room(&self, units: u32, until: u64) -> u64 {
        let blocks = self.blocks(units);
        let columns = blocks.min(self.loads.len());
        let rounds = blocks.div_ceil(columns) as u64;
        until.saturating_sub(self.loads[columns - 1]) / rounds
    }

    /// Places an item whose units cost `cost`; returns when the first of them starts.
    pub fn place(&mut self, units: u32, cost: u64) -> u64 {
        let start = self.loads[0];
        for _ in 0..self.blocks(units) {
            let load = self.loads[0] + cost;
            let after = self.loads.partition_point(|&other| other < load);
            self.loads.copy_within(1..after, 0);
            self.loads[after - 1] = load;
        }
        start
    }

    /// When the last column is done.
    pub fn makespan(&self) -> u64 {
        *self.loads.last().expect("there is at least one column")
    }
}
