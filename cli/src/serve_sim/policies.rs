//! Names of policies, and the flags that only some of them read.

use tandem_schedule::{chunk::Expected, policy, trace::Trace};

use super::Args;
use crate::Failure;

/// The policy of a name, and whether prefill and decode attention share the GPU.
pub(super) fn parts(name: &str) -> Result<(&str, bool), Failure> {
    match name.split_once('+') {
        None => Ok((name, false)),
        Some((policy, "pod")) => Ok((policy, true)),
        Some((_, part)) => Err(Failure::Input(format!(
            "{name}: there is no +{part}; in simulations a policy may end in +pod"
        ))),
    }
}

/// What adaptive chunks expect of a trace: requests of its mean lengths, so many at a time.
pub(crate) fn expected(trace: &Trace, requests: u32) -> Expected {
    let (prompt, generated) = trace.mean_lengths();
    Expected {
        prompt: prompt as u32,
        generated: generated as u32,
        requests,
        target_ns: None,
    }
}

impl Args {
    /// Refuses flags that would change nothing.
    pub(super) fn check_effects(&self) -> Result<(), Failure> {
        let mut policies = Vec::new();
        for name in &self.policy {
            let (policy, _) = parts(name)?;
            policy::check_name(policy)?;
            policies.push(policy);
        }
        let needs = |flag: &str, given: bool, policy: &str| {
            if given && !policies.contains(&policy) {
                return Err(Failure::Input(format!(
                    "{flag} is for the policy {policy}, which is not among those of --policy: {}; leave {flag} out, or \
                     add {policy}",
                    self.policy.join(",")
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
        if self.speed.is_some() && self.trace.is_none() && self.rate.is_none() {
            return Err(Failure::Input(
                "--speed divides arrival times, but all requests arrive at once: leave it out, or give --trace or --rate"
                    .to_owned(),
            ));
        }
        Ok(())
    }
}
