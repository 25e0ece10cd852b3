//! A plan as a table.

use std::fmt;

use crate::plan::data::Plan;

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<8} {:>9} {:>6} {:>8} {:>8} {:>10} {:>12}",
            "kernel", "tile", "heads", "items", "units", "tokens", "keys"
        )?;
        for group in &self.groups {
            let items = self.items_of(group);
            let tokens: u64 = items.iter().map(|item| u64::from(item.rows)).sum();
            let keys: u64 = items.iter().map(|item| u64::from(item.kv_len())).sum();
            writeln!(
                f,
                "{:<8} {:>9} {:>6} {:>8} {:>8} {tokens:>10} {keys:>12}",
                format!("{:?}", group.kernel),
                group.tile.to_string(),
                group.pack,
                items.len(),
                self.units_of(group),
            )?;
        }
        write!(
            f,
            "{} query tokens, {} merges of {} partial states",
            self.total_q,
            self.merges.len(),
            self.slots
        )
    }
}
