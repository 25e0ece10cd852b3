//! Policies by name, and simulations under them.

use tandem_attn::plan::{PackRule, PlanOptions, pod::PodMode};
use tandem_engine::{Backend, Limits};
use tandem_schedule::{
    chunk::ChunkSize,
    cost::CostModel,
    policy::{self, Policy, PolicyOptions},
    sim::{AttentionSource, Simulation},
    trace::Trace,
};

use super::requests::{longest, shares_blocks};
use crate::{Failure, bench::serving::Args, serve_sim::expected};

/// The parts of a policy's name.
pub(super) struct Choices<'a> {
    policy: &'a str,
    pub pod: bool,
    unpacked: bool,
}

impl<'a> Choices<'a> {
    pub(super) fn of(name: &'a str) -> Result<Self, Failure> {
        let mut parts = name.split('+');
        let mut choices = Self {
            policy: parts.next().unwrap_or_default(),
            pod: false,
            unpacked: false,
        };
        for part in parts {
            match part {
                "pod" => choices.pod = true,
                "unpacked" => choices.unpacked = true,
                _ => {
                    return Err(Failure::Input(format!(
                        "{name}: there is no +{part}; a policy may end in +pod or +unpacked"
                    )));
                }
            }
        }
        Ok(choices)
    }

    /// Whether the policy computes prompts whole.
    fn is_whole(&self) -> bool {
        matches!(self.policy, "prefill-first" | "orca")
    }

    pub(super) fn planning(&self) -> PlanOptions {
        PlanOptions::default()
            .with_pod(if self.pod {
                PodMode::Auto
            } else {
                PodMode::Serial
            })
            .with_packing(if self.unpacked {
                PackRule::Off
            } else {
                PackRule::Fastest
            })
    }

    pub(super) fn policy(
        &self,
        args: &Args,
        cost: &CostModel,
        trace: &Trace,
    ) -> Result<Box<dyn Policy>, Failure> {
        let expected = expected(trace, args.batch);
        let options = PolicyOptions {
            chunk: ChunkSize::adaptive(cost.clone(), expected),
            target_ns: 50e6,
            cost: cost.clone(),
        };
        Ok(policy::by_name(self.policy, &options)?)
    }

    pub(super) fn limits(&self, args: &Args, trace: &Trace) -> Limits {
        Limits {
            step_tokens: match self.is_whole() {
                true => args.budget.max(longest(trace)),
                false => args.budget,
            },
            step_requests: args.batch,
            running: args.batch,
            spare_pages: args.batch,
            ..Limits::default()
        }
    }
}

impl Args {
    /// Whether each step is composed before the tokens of the last one are known.
    pub(super) fn ahead(&self, backend: &dyn Backend) -> bool {
        backend.is_asynchronous() && !self.wait
    }

    /// Number of tokens of the largest step of any policy.
    pub(super) fn most_tokens(&self, trace: &Trace) -> Result<u32, Failure> {
        let mut most = self.budget.max(self.batch);
        for name in &self.policy {
            most = most.max(Choices::of(name)?.limits(self, trace).step_tokens);
        }
        Ok(most)
    }

    /// Whether a policy reads shared prefixes separately. Then the simulations must see shared prefixes, too.
    fn compares_packing(&self) -> bool {
        let unpacked = |name: &String| Choices::of(name).is_ok_and(|choices| choices.unpacked);
        self.policy.iter().any(unpacked)
    }

    pub(super) fn simulation<'a>(
        &self,
        choices: &Choices<'_>,
        cost: &'a CostModel,
        trace: &Trace,
        backend: &dyn Backend,
    ) -> Result<Simulation<'a>, Failure> {
        let policy = choices.policy(self, cost, trace)?;
        let limits = Limits {
            chunk_keys: backend.chunk_keys(),
            ..choices.limits(self, trace)
        };
        let mut simulation = Simulation::with_policy(cost, limits, policy);
        simulation.page_size = backend.page_size();
        simulation.pages = Some(backend.pages());
        simulation.ahead = self.ahead(backend);
        if self.prefix.is_some() || self.compares_packing() && shares_blocks(trace) {
            simulation.attention = match choices.unpacked {
                true => AttentionSource::Unpacked,
                false => AttentionSource::Planner,
            };
        }
        Ok(simulation)
    }
}
