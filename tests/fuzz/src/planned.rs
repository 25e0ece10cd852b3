//! The plans of a case.

use tandem_attn::{
    plan::{Bound, DeviceDescription, PackRule, Plan, PlanError, Planner},
    problem::Batch,
};

use crate::{
    case::Case,
    tally::{Failure, Tally},
    wrong,
};

/// A step's batch, and plans of it: the first is that of the case's options, updated where the step says so.
pub struct Planned {
    pub batch: Batch,
    pub plans: Vec<Plan>,
}

/// Plans all steps, and holds each plan against its batch.
pub fn planned(
    case: &Case,
    device: &DeviceDescription,
    tally: &mut Tally,
) -> Result<Vec<Planned>, Failure> {
    let mut planner = Planner::new();
    let mut last: Option<Plan> = None;
    let mut steps = Vec::new();
    for (at, step) in case.steps.iter().enumerate() {
        let batch = case.batch(step);
        let fail = |what: String| Failure::at(at, what);
        wrong::batches(case, at, &batch, device, tally).map_err(fail)?;
        let mut plans = Vec::new();
        let mut add = |plan: Result<Plan, PlanError>, tally: &mut Tally| {
            tally.calls += 1;
            match plan {
                Ok(plan) => {
                    let verified = plan.verify(&batch);
                    verified.map_err(|broken| fail(format!("a plan is broken: {broken}")))?;
                    plans.push(plan.clone());
                    Ok(Some(plan))
                }
                Err(PlanError::Unsupported(error)) => {
                    tally.unsupported(&error.to_string());
                    Ok(None)
                }
                Err(error @ PlanError::NoTile { .. }) => {
                    tally.unsupported(&error.to_string());
                    Ok(None)
                }
                Err(error) => Err(fail(format!("a right batch is refused: {error}"))),
            }
        };
        let main = match (step.update, last.take()) {
            (true, Some(mut plan)) => planner
                .update(&case.spec, &batch, device, &case.options, &mut plan)
                .map(|_| plan),
            _ => planner.plan(&case.spec, &batch, device, &case.options),
        };
        last = add(main, tally)?;
        for options in &step.others {
            add(planner.plan(&case.spec, &batch, device, options), tally)?;
        }
        // Within what packing may exceed, the planner makes several attempts.
        let without = case.options.with_packing(PackRule::Off);
        let without = match (case.seed + at as u64).is_multiple_of(4) {
            true => planner.plan(&case.spec, &batch, device, &without).ok(),
            false => None,
        };
        if let Some(without) = without {
            let within = case.options.with_bound(Bound::of(&without));
            add(planner.plan(&case.spec, &batch, device, &within), tally)?;
        }
        steps.push(Planned { batch, plans });
    }
    Ok(steps)
}

/// What all plans need, and so much more.
pub fn bound(steps: &[Planned], slack: u32) -> Bound {
    let plans = steps.iter().flat_map(|step| &step.plans);
    let most = plans.fold(Bound::default(), |most, plan| {
        let needed = Bound::of(plan);
        Bound {
            items: most.items.max(needed.items),
            rows: most.rows.max(needed.rows),
            page_ids: most.page_ids.max(needed.page_ids),
            merges: most.merges.max(needed.merges),
            slots: most.slots.max(needed.slots),
            ancestors: most.ancestors.max(needed.ancestors),
            mask_words: most.mask_words.max(needed.mask_words),
            padded_tokens: most.padded_tokens.max(needed.padded_tokens),
            converted_pages: most.converted_pages.max(needed.converted_pages),
        }
    });
    // Where there is room for masks, graphs read the masks of all batches.
    let tokens = steps.iter().flat_map(|step| &step.plans);
    let tokens = tokens.map(|plan| plan.total_q).max().unwrap_or(0);
    let of_tokens = if most.mask_words > 0 { 3 * tokens } else { 0 };
    let ancestors = if most.ancestors > 0 { tokens } else { 0 };
    Bound {
        ancestors,
        mask_words: most.mask_words + of_tokens,
        items: most.items + slack,
        rows: most.rows + slack,
        page_ids: most.page_ids + slack,
        merges: most.merges + slack,
        slots: most.slots + slack,
        ..most
    }
}
