//! Names of policies, and the flags that only some of them read: the same for simulations and for `tandem bench --serve`.

use tandem_schedule::{
    Prompt,
    chunk::{ChunkSize, Expected},
    cost::CostModel,
    policy::{self, PolicyOptions},
    trace::Trace,
};

use super::Args;
use crate::Failure;

/// Chunk of the policy sarathi, and target of decode-priority in milliseconds, if they are not given.
const CHUNK: u32 = 512;
const TARGET_MS: f64 = 50.0;

/// A policy with the ways to compute attention that stand behind its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Name<'a> {
    /// The policy of the scheduler.
    pub policy: &'a str,
    /// `+pod`: prefill and decode attention share the GPU.
    pub pod: bool,
    /// `+unpacked`: each request reads its shared prefix separately.
    pub unpacked: bool,
}

impl<'a> Name<'a> {
    /// Takes a name apart.
    pub(crate) fn of(name: &'a str) -> Result<Self, Failure> {
        let mut parts = name.split('+');
        let mut found = Self {
            policy: parts.next().unwrap_or_default(),
            pod: false,
            unpacked: false,
        };
        for part in parts {
            let given = match part {
                "pod" => &mut found.pod,
                "unpacked" => &mut found.unpacked,
                _ => {
                    return Err(Failure::Input(format!(
                        "{name}: there is no +{part}; a policy may end in +pod or +unpacked"
                    )));
                }
            };
            if std::mem::replace(given, true) {
                return Err(Failure::Input(format!(
                    "{name}: +{part} is given twice; a policy may end in +pod or +unpacked, each once"
                )));
            }
        }
        Ok(found)
    }

    /// Whether the policy computes prompts whole.
    pub(crate) fn is_whole(&self) -> bool {
        matches!(self.policy, "prefill-first" | "orca")
    }
}

/// Whether the trace says which blocks of its prompts are equal.
pub(crate) fn shares_blocks(trace: &Trace) -> bool {
    let mut arrivals = trace.arrivals.iter();
    arrivals.any(|arrival| matches!(arrival.request.prompt, Prompt::Blocks { .. }))
}

/// What adaptive chunks expect of a trace: requests of its mean lengths, as many at a time as the memory holds and `batch`
/// allows, divided among the stages.
fn expected(cost: &CostModel, trace: &Trace, batch: u32) -> Expected {
    let (prompt, generated) = trace.mean_lengths();
    let fitting = cost.max_requests((prompt + generated).max(1.0) as u32);
    let requests = batch.min(fitting) / cost.parallel().pipeline;
    Expected {
        prompt: prompt.round() as u32,
        generated: generated.round() as u32,
        requests: requests.max(1),
        target_ns: None,
    }
}

/// Policies, and the flags that some of them read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Policies<'a> {
    pub names: &'a [String],
    pub chunk: Option<u32>,
    pub target_ms: Option<f64>,
    /// Tokens of a step.
    pub budget: u32,
    /// Number of requests that hold pages.
    pub batch: u32,
    pub prefix_cache: bool,
}

impl Policies<'_> {
    /// Refuses unknown policies, and flags that would change nothing.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let mut policies = Vec::new();
        for given in self.names {
            let name = Name::of(given)?;
            policy::check_name(name.policy)?;
            policies.push(name.policy);
            if name.unpacked && !self.prefix_cache {
                return Err(Failure::Input(format!(
                    "{given}: without a prefix cache no request shares a prefix: leave +unpacked out, or --no-prefix-cache"
                )));
            }
        }
        let needs = |flag: &str, given: bool, policy: &str| {
            if given && !policies.contains(&policy) {
                return Err(Failure::Input(format!(
                    "{flag} is for the policy {policy}, which is not among those of --policy: {}; leave {flag} out, or \
                     add {policy}",
                    self.names.join(",")
                )));
            }
            Ok(())
        };
        needs("--chunk", self.chunk.is_some(), "sarathi")?;
        needs("--target-ms", self.target_ms.is_some(), "decode-priority")?;
        if let Some(chunk) = self.chunk.filter(|&chunk| chunk > self.budget) {
            return Err(Failure::Input(format!(
                "--chunk {chunk} is more than the {} tokens of a step: give a smaller chunk, or a larger --budget",
                self.budget
            )));
        }
        Ok(())
    }

    /// Refuses to compare ways to read shared prefixes, or to leave their cache out, if there are none. `instead` are the flags
    /// that give some.
    pub(crate) fn check_shared(&self, trace: &Trace, instead: &str) -> Result<(), Failure> {
        let unpacked = |given: &&String| Name::of(given).is_ok_and(|name| name.unpacked);
        let given = self
            .names
            .iter()
            .find(unpacked)
            .map(|name| (name.as_str(), "+unpacked"));
        let flag = "--no-prefix-cache";
        let left_out = !self.prefix_cache;
        match given.or(left_out.then_some((flag, flag))) {
            Some((given, part)) if !shares_blocks(trace) => Err(Failure::Input(format!(
                "{given}: the requests have no blocks in common: give {instead}, or leave {part} out"
            ))),
            _ => Ok(()),
        }
    }

    /// The options of policies that serve a trace.
    pub(crate) fn options(&self, cost: &CostModel, trace: &Trace) -> PolicyOptions {
        PolicyOptions {
            chunk: match self.chunk.unwrap_or(CHUNK) {
                0 => ChunkSize::adaptive(cost.clone(), expected(cost, trace, self.batch)),
                tokens => ChunkSize::Fixed(tokens),
            },
            target_ns: self.target_ms.unwrap_or(TARGET_MS) * 1e6,
            cost: cost.clone(),
        }
    }
}

impl Args {
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

    /// Refuses flags that would change nothing.
    pub(super) fn check_effects(&self) -> Result<(), Failure> {
        self.policies().check()?;
        for given in &self.policy {
            if Name::of(given)?.unpacked && !self.plan {
                return Err(Failure::Input(format!(
                    "{given}: attention times from lengths alone ignore shared prefixes, packed or not: give --plan, or leave \
                     +unpacked out"
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tandem_schedule::{Hardware, ModelDescription, cost::Parallel};

    use super::*;

    /// As `tandem chunk-size` recommends, which they follow later on.
    #[test]
    fn adaptive_chunks_expect_the_requests_that_the_memory_holds() {
        let model = ModelDescription::named("llama-3-8b").unwrap();
        let hardware = Hardware::named("a100").unwrap();
        let trace = Trace::uniform(3, 30_000, 2000);
        for pipeline in [1, 2] {
            let parallel = Parallel {
                tensor: 1,
                pipeline,
            };
            let cost = CostModel::new(&model, &hardware, parallel).unwrap();
            let fitting = cost.max_requests(32_000);
            assert!((2..256).contains(&fitting), "{fitting}");
            let requests = |batch: u32| expected(&cost, &trace, batch).requests;
            assert_eq!(requests(256), fitting / pipeline);
            assert_eq!(requests(4), 4 / pipeline);
            assert_eq!(requests(1), 1);
        }
    }
}
