//! A plan as a table.

use std::fmt;

use crate::plan::data::{Kernel, Plan, TileGroup};

impl Plan {
    /// The name of the kernel that runs a group, as [`launches`](Self::launches) knows it; of several, for parts whose pages differ, the
    /// first. With tickets, this kernel has both operations. On the CPU, which has no kernels, the name of the operation.
    #[must_use]
    pub fn kernel_name(&self, group: &TileGroup) -> String {
        match (self.entry_of_group(group), group.kernel) {
            (Some(entry), _) => entry,
            (None, Kernel::Prefill) => "Prefill".into(),
            (None, Kernel::Decode) => "Decode".into(),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.groups.iter().map(|group| self.kernel_name(group));
        let names: Vec<_> = names.collect();
        let width = names.iter().map(|name| name.len()).max().unwrap_or(0);
        let width = width.max(8);
        writeln!(
            f,
            "{:<width$} {:>9} {:>6} {:>8} {:>8} {:>10} {:>12}",
            "kernel", "tile", "heads", "items", "units", "tokens", "keys"
        )?;
        for (group, name) in self.groups.iter().zip(names) {
            let items = self.items_of(group);
            let tokens: u64 = items.iter().map(|item| u64::from(item.rows)).sum();
            let keys: u64 = items.iter().map(|item| u64::from(item.kv_len())).sum();
            writeln!(
                f,
                "{name:<width$} {:>9} {:>6} {:>8} {:>8} {tokens:>10} {keys:>12}",
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
