//! Plans of a step: one for each kind of attention in the model.

use tandem_attn::{
    plan::{DeviceDescription, Plan, PlanError, PlanOptions, Planner},
    problem::{Batch, Spec},
};

/// Plans the batches of one kind of attention. Keeps the last plan, from which the next one can be made.
#[derive(Debug)]
pub(super) struct Plans {
    pub spec: Spec,
    device: DeviceDescription,
    options: PlanOptions,
    planner: Planner,
    last: Option<Plan>,
}

impl Plans {
    pub(super) fn new(spec: Spec, device: DeviceDescription, options: PlanOptions) -> Self {
        Self {
            spec,
            device,
            options,
            planner: Planner::new(),
            last: None,
        }
    }

    /// If all requests are decodes that only grew, the last plan is patched.
    pub(super) fn plan(&mut self, batch: &Batch) -> Result<&Plan, PlanError> {
        let Self {
            spec,
            device,
            options,
            planner,
            last,
        } = self;
        match last {
            Some(plan) => {
                planner.update(spec, batch, device, options, plan)?;
            }
            None => *last = Some(planner.plan(spec, batch, device, options)?),
        }
        Ok(self.last.as_ref().expect("planned above"))
    }

    /// Uses other options for all later plans.
    pub(super) fn plan_with(&mut self, options: PlanOptions) {
        *self = Self::new(self.spec, self.device.clone(), options);
    }

    pub(super) fn last(&self) -> &Plan {
        self.last
            .as_ref()
            .expect("a step is planned before it is computed")
    }
}
