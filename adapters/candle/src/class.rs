//! Planning for the layers of one specification, within what was reserved for them.

use candle_core::Result;
use tandem_attn::{
    plan::{Bound, DeviceDescription, Plan, PlanError, PlanOptions, Planner},
    problem::{Batch, Spec},
};

#[cfg(any(feature = "cuda", test))]
use crate::growth::of_both;
use crate::wrap;

/// The planner for layers of one specification.
#[derive(Debug)]
pub struct Class {
    spec: Spec,
    planner: Planner,
    /// What was reserved. Plans stay within it, if they can.
    pub reserved: Option<Bound>,
}

impl Class {
    pub fn of<'a>(classes: &'a mut Vec<Self>, spec: &Spec) -> &'a mut Self {
        let known = classes.iter().position(|class| class.spec == *spec);
        let index = known.unwrap_or_else(|| {
            classes.push(Self {
                spec: *spec,
                planner: Planner::new(),
                reserved: None,
            });
            classes.len() - 1
        });
        &mut classes[index]
    }

    /// The bound of what was reserved before and of this.
    #[cfg(any(feature = "cuda", test))]
    pub fn with(&self, bound: &Bound) -> Bound {
        self.reserved.map_or(*bound, |had| of_both(bound, &had))
    }

    /// Plans a batch. What was reserved is enough for the plan, unless the batch is beyond the limits.
    pub fn plan(&mut self, batch: &Batch, device: &DeviceDescription) -> Result<Plan> {
        let (spec, options) = (&self.spec, PlanOptions::default());
        if let Some(bound) = self.reserved {
            let within = options.with_bound(bound);
            match self.planner.plan(spec, batch, device, &within) {
                Err(PlanError::Bound { .. }) => {}
                planned => return planned.map_err(wrap),
            }
        }
        let plan = self.planner.plan(spec, batch, device, &options);
        plan.map_err(wrap)
    }
}

#[cfg(test)]
mod tests {
    use tandem_attn::{plan::BatchLimits, problem::PageTable};

    use super::*;

    const PAGE: u32 = 16;
    const REQUESTS: u32 = 512;

    /// Decodes in a binary tree of prefixes: on every level, half of the requests of the level above have a prefix of
    /// `pages` pages in common.
    fn tree(levels: u32, pages: u32) -> Batch {
        let mut table = PageTable::new(PAGE, ((1 << levels) + REQUESTS) * pages);
        for request in 0..REQUESTS {
            let nodes = (0..levels).map(|level| (1 << level) + (request >> (9 - level)) - 1);
            let ids: Vec<u32> = nodes
                .flat_map(|node| node * pages..(node + 1) * pages)
                .collect();
            table.push(&ids, ids.len() as u32 * PAGE);
        }
        Batch::new((0..=REQUESTS).collect(), table)
    }

    fn class(limits: Option<&BatchLimits>) -> Result<(Class, DeviceDescription)> {
        let (spec, device) = (Spec::new(32, 8, 128), DeviceDescription::named("h200"));
        let device = device.map_err(wrap)?;
        let bound =
            limits.map(|limits| Bound::new(&spec, &device, &PlanOptions::default(), limits));
        let mut classes = Vec::new();
        Class::of(&mut classes, &spec).reserved = bound.transpose().map_err(wrap)?;
        Ok((classes.remove(0), device))
    }

    /// Plans of steps within the limits once exceeded what was reserved, and the step allocated.
    #[test]
    fn plans_within_the_limits_stay_within_what_was_reserved() -> Result<()> {
        let batch = tree(9, 128);
        let limits = BatchLimits::decodes(REQUESTS, 9 * 128 * PAGE, PAGE).with_states_per_token(2);
        let (mut class, device) = class(Some(&limits))?;
        let reserved = class.reserved.expect("it was reserved");
        let plan = class.plan(&batch, &device)?;
        reserved.check(&Bound::of(&plan)).map_err(wrap)?;

        let (mut class, _) = self::class(None)?;
        let fastest = class.plan(&batch, &device)?;
        let refusal = reserved.check(&Bound::of(&fastest));
        assert!(
            matches!(refusal, Err(PlanError::Bound { .. })),
            "the case is too small"
        );
        Ok(())
    }

    #[test]
    fn batches_beyond_the_limits_are_planned_without_them() -> Result<()> {
        let batch = tree(2, 4);
        let (mut class, device) = class(Some(&BatchLimits::decodes(8, 64, PAGE)))?;
        let (mut free, _) = self::class(None)?;
        assert_eq!(
            Bound::of(&class.plan(&batch, &device)?),
            Bound::of(&free.plan(&batch, &device)?)
        );
        Ok(())
    }

    #[test]
    fn what_is_reserved_twice_is_enough_for_both() -> Result<()> {
        let [many, long] = [(64, 64), (1, 1 << 20)]
            .map(|(requests, keys)| BatchLimits::decodes(requests, keys, PAGE));
        let (mut class, device) = class(Some(&many))?;
        let (spec, options) = (class.spec, PlanOptions::default());
        let long = Bound::new(&spec, &device, &options, &long).map_err(wrap)?;
        let (first, both) = (class.reserved.expect("it was reserved"), class.with(&long));
        class.reserved = Some(both);
        for bound in [first, long] {
            both.check(&bound).map_err(wrap)?;
            assert_eq!(class.with(&bound), both);
        }
        assert_eq!(both.page_ids, first.page_ids.max(long.page_ids));
        Ok(())
    }
}
