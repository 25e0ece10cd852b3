//! Policies by name, and simulations under them.

use tandem_attn::plan::{PackRule, PlanOptions, pod::PodMode};
use tandem_engine::{Backend, Limits};
use tandem_schedule::{
    cost::CostModel,
    policy::{self, Policy},
    sim::{AttentionSource, Simulation},
    trace::Trace,
};

use super::requests::longest;
use crate::{
    Failure,
    bench::serving::Args,
    serve_sim::{Name, Policies, shares_blocks},
};

/// How the kernels of a policy are planned.
pub(super) fn planning(name: &Name<'_>) -> PlanOptions {
    PlanOptions::default()
        .with_pod(if name.pod {
            PodMode::Auto
        } else {
            PodMode::Serial
        })
        .with_packing(if name.unpacked {
            PackRule::Off
        } else {
            PackRule::Fastest
        })
}

impl Args {
    /// The policies with their flags.
    pub(super) fn policies(&self) -> Policies<'_> {
        Policies {
            names: &self.policy,
            chunk: self.chunk,
            target_ms: self.target_ms,
            budget: self.budget,
            batch: self.batch,
            prefix_cache: !self.no_prefix_cache,
        }
    }

    pub(super) fn policy(
        &self,
        name: &Name<'_>,
        cost: &CostModel,
        trace: &Trace,
    ) -> Result<Box<dyn Policy>, Failure> {
        let options = self.policies().options(cost, trace);
        Ok(policy::by_name(name.policy, &options)?)
    }

    pub(super) fn limits(&self, name: &Name<'_>, trace: &Trace) -> Limits {
        Limits {
            step_tokens: match name.is_whole() {
                true => self.budget.max(longest(trace)),
                false => self.budget,
            },
            step_requests: self.batch,
            running: self.batch,
            spare_pages: self.batch,
            prefix_cache: !self.no_prefix_cache,
            ..Limits::default()
        }
    }

    /// Whether each step is composed before the tokens of the last one are known.
    pub(super) fn ahead(&self, backend: &dyn Backend) -> bool {
        backend.is_asynchronous() && !self.wait
    }

    /// Number of tokens of the largest step of any policy.
    pub(super) fn most_tokens(&self, trace: &Trace) -> Result<u32, Failure> {
        let mut most = self.budget.max(self.batch);
        for name in &self.policy {
            most = most.max(self.limits(&Name::of(name)?, trace).step_tokens);
        }
        Ok(most)
    }

    /// Whether a policy reads shared prefixes separately. Then the simulations must see shared prefixes, too.
    fn compares_packing(&self) -> bool {
        let unpacked = |name: &String| Name::of(name).is_ok_and(|name| name.unpacked);
        self.policy.iter().any(unpacked)
    }

    pub(super) fn simulation<'a>(
        &self,
        name: &Name<'_>,
        cost: &'a CostModel,
        trace: &Trace,
        backend: &dyn Backend,
    ) -> Result<Simulation<'a>, Failure> {
        let policy = self.policy(name, cost, trace)?;
        let limits = Limits {
            chunk_keys: backend.chunk_keys(),
            ..self.limits(name, trace)
        };
        let mut simulation = Simulation::with_policy(cost, limits, policy);
        simulation.page_size = backend.page_size();
        simulation.pages = Some(backend.pages());
        simulation.ahead = self.ahead(backend);
        if self.prefix.is_some() || self.compares_packing() && shares_blocks(trace) {
            simulation.attention = match name.unpacked {
                true => AttentionSource::Unpacked,
                false => AttentionSource::Planner,
            };
        }
        Ok(simulation)
    }
}
