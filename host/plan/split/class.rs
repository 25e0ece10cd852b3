//! Kernels whose items are balanced together, and what bounds their time.

use super::kinds::{Kind, Load};
use crate::plan::{Kernel, balance::gcd, cost::Company};

/// Kernels whose items are balanced together: beside prefill, decodes have resident CTAs of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Decode,
    Prefill,
}

impl Class {
    pub(super) fn of(kernel: Kernel) -> Self {
        match kernel {
            Kernel::Decode => Self::Decode,
            Kernel::Prefill => Self::Prefill,
        }
    }
}

/// All loads of a class.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClassLoad {
    /// CTAs that run at the same time.
    pub(super) ctas: u32,
    pub(super) company: Company,
    /// What the units of every item are a multiple of.
    pub(super) units: u32,
    /// Of all units together: everything, and their keys.
    pub(super) work: u64,
    pub(super) keys: u64,
    /// Units before any is cut.
    pub(super) count: u64,
    pub(super) least_fixed: u64,
    pub(super) longest: u64,
    pub(super) longest_unsplittable: u64,
}

impl ClassLoad {
    pub(super) const NONE: Self = Self {
        ctas: 1,
        company: Company::NONE,
        units: 0,
        work: 0,
        keys: 0,
        count: 0,
        least_fixed: 0,
        longest: 0,
        longest_unsplittable: 0,
    };

    pub(super) fn add(&mut self, kind: &Kind, ctas: u32, company: Company) {
        let Load {
            units, fixed, key, ..
        } = kind.load;
        self.least_fixed = if self.units == 0 {
            fixed
        } else {
            self.least_fixed.min(fixed)
        };
        (self.ctas, self.company) = (ctas, company);
        self.units = gcd(self.units, units);
        self.count += kind.count * u64::from(units);
        self.work += kind.work();
        self.keys += u64::from(units) * key * kind.keys;
        self.longest = self.longest.max(kind.longest());
    }

    /// Whether there is a unit for every CTA.
    pub(super) fn fills(&self) -> bool {
        self.count >= u64::from(self.ctas)
    }

    /// No plan is done earlier: not with every CTA busy all the time, nor with the longest unit that cannot
    /// be cut. Every CTA that takes part pays the fixed cost of a unit at least once.
    pub(super) fn bound(&self) -> u64 {
        self.spread().max(self.longest_unsplittable)
    }

    /// The same, were every unit to be cut as one likes.
    pub(super) fn spread(&self) -> u64 {
        let ctas = u64::from(self.ctas);
        let spread = (self.least_fixed + self.keys / ctas).min(self.work);
        spread.max(self.work / ctas)
    }
}
