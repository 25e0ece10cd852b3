//! The load of an operation's drafts, and lower bounds of their time.

use super::{
    classes::{DraftClass, DraftClasses, UnitCost},
    input::SplitInput,
};
use crate::plan::{
    data::Kernel,
    model::{Contention, gcd},
};

/// The load of all drafts of an operation. In hybrid batches, decodes have resident CTAs of their own.
#[derive(Clone, Copy, Debug)]
pub struct OpLoad {
    /// CTAs that run at the same time.
    pub ctas: u32,
    pub contention: Contention,
    /// Greatest common divisor of the numbers of units of all items.
    pub units: u32,
    /// Time of all units together: in total, and for their keys only.
    pub work: u64,
    pub keys: u64,
    /// Time of the keys if no two units read the same ones at about the same time.
    pub keys_apart: u64,
    /// Units before any is cut.
    pub count: u64,
    pub least_fixed: u64,
    pub longest: u64,
    pub longest_unsplittable: u64,
}

impl OpLoad {
    const NONE: Self = Self {
        ctas: 1,
        contention: Contention::NONE,
        units: 0,
        work: 0,
        keys: 0,
        keys_apart: 0,
        count: 0,
        least_fixed: 0,
        longest: 0,
        longest_unsplittable: 0,
    };

    /// The loads of decodes and of prefills.
    pub fn of_both(input: &SplitInput<'_>, classes: &DraftClasses) -> [Self; 2] {
        let mut loads = [Self::NONE; 2];
        for class in &classes.classes {
            let kernel = class.draft.kernel;
            let (mut ctas, contention) = classes.ctas(input.cost, kernel);
            if let Some(split) = input.ctas {
                ctas = match kernel {
                    Kernel::Decode => split.decode,
                    Kernel::Prefill => split.prefill,
                };
            }
            loads[kernel as usize].add(class, ctas, contention);
        }
        // Single drafts are only checked if a class may have a unit longer than the even share: this is rare.
        let spread = loads.map(|load| load.spread());
        let may_be_long = |class: &DraftClass| {
            class.longest().min(class.unit.least_divisible()) > spread[class.draft.kernel as usize]
        };
        if classes.classes.iter().any(may_be_long) {
            for (unit, of) in classes.unit_costs().zip(&classes.of) {
                let kernel = classes.classes[of.class as usize].draft.kernel;
                let longest = &mut loads[kernel as usize].longest_unsplittable;
                if unit.whole().min(unit.least_divisible()) > *longest {
                    *longest = unit.unsplittable().max(*longest);
                }
            }
        }
        loads
    }

    fn add(&mut self, class: &DraftClass, ctas: u32, contention: Contention) {
        let UnitCost {
            units,
            fixed,
            key,
            key_apart,
            ..
        } = class.unit;
        self.least_fixed = if self.units == 0 {
            fixed
        } else {
            self.least_fixed.min(fixed)
        };
        (self.ctas, self.contention) = (ctas, contention);
        self.units = gcd(self.units, units);
        self.count += class.count * u64::from(units);
        self.work = self.work.saturating_add(class.work());
        let of_keys = |key: u64| (u64::from(units) * key).saturating_mul(class.keys);
        self.keys = self.keys.saturating_add(of_keys(key));
        self.keys_apart = self.keys_apart.saturating_add(of_keys(key_apart));
        self.longest = self.longest.max(class.longest());
    }

    /// Whether there is a unit for every CTA.
    pub fn fills(&self) -> bool {
        self.count >= u64::from(self.ctas)
    }

    /// Lower bound of the time: all CTAs are always busy, or the longest unit that cannot be cut runs alone. Every CTA
    /// in use pays the fixed cost of a unit at least once.
    pub fn bound(&self) -> u64 {
        self.spread().max(self.longest_unsplittable)
    }

    /// The same bound if every unit could be cut anywhere.
    pub fn spread(&self) -> u64 {
        let ctas = u64::from(self.ctas);
        let spread = self
            .least_fixed
            .saturating_add(self.keys / ctas)
            .min(self.work);
        spread.max(self.work / ctas)
    }
}
