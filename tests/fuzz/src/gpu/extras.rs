//! Calls besides those of a step: each has a batch of its own over the same queries, pages and pools.

use tandem_attn::{
    Error,
    exec::gpu::WorkspaceOptions,
    plan::{Bound, Planner},
    problem::{Batch, Compute, Spec},
    reference::Output,
};

use super::{Runner, arch, refusal, text};
use crate::{case::Extra, numeric::Rng, oracle::Right, refused::Given};

impl Runner<'_> {
    /// The calls of a step.
    pub(super) fn extras(&mut self, at: usize, q: &[f32]) -> Result<(), String> {
        let case = self.case;
        for (index, &extra) in case.steps[at].extras.iter().enumerate() {
            let mut rng = Rng(case.seed ^ 12 ^ (at as u64) << 32 ^ (index as u64) << 16);
            let done = match extra {
                Extra::ByHead => self.by_head(at, q, &mut rng),
                Extra::Blocks(masked) => self.blocks(at, q, masked, &mut rng),
                Extra::Merged => self.merged(at, q, &mut rng),
                Extra::Tree => self.tree(at, q, &mut rng),
                Extra::Chosen(keys) => self.chosen(at, q, keys, &mut rng),
            };
            done.and_then(|()| self.unchanged())
                .map_err(|what| format!("{extra:?}: {what}"))?;
        }
        Ok(())
    }

    /// The specification without what counts distances: lists of keys have none. One of four keeps it, to be refused.
    pub(super) fn without_distances(&self, rng: &mut Rng) -> Spec {
        let mut spec = self.in_16_bits();
        if rng.below(4) > 0 {
            spec.rotary = None;
            spec.variant.window_left = None;
            (spec.variant.hooks, spec.variant.adds_up) = (None, false);
        }
        spec
    }

    /// The specification with products of 16 bits.
    pub(super) fn in_16_bits(&self) -> Spec {
        self.case.spec.with_compute(Compute::F16)
    }

    /// Counts a refusal by its reason.
    ///
    /// # Errors
    /// What is no refusal.
    pub(super) fn refused(&mut self, error: impl Into<Error>) -> Result<(), String> {
        refusal(error.into(), &mut self.tally)
    }

    /// Plans a batch and runs it in a workspace of its own. False: it was refused, and counted.
    pub(super) fn call(
        &mut self,
        spec: &Spec,
        batch: &Batch,
        given: &Given,
    ) -> Result<bool, String> {
        let plan = Planner::new().plan(spec, batch, &self.device, &self.case.options);
        let plan = match plan {
            Ok(plan) => plan,
            Err(error) => return self.refused(error).map(|()| false),
        };
        plan.verify(batch)
            .map_err(|broken| format!("a plan is broken: {broken}"))?;
        let options = WorkspaceOptions::default().with_arch(arch(self.case));
        let done = self
            .gpu
            .workspace(spec, &Bound::of(&plan), options)
            .and_then(|mut workspace| {
                // SAFETY: everything lives until the stream was waited for, and the stream is ours.
                unsafe {
                    workspace.upload(&plan, *self.stream)?;
                    given.run(self.gpu, &mut workspace, *self.stream)?;
                }
                self.stream.synchronize()
            });
        match done {
            Ok(()) => Ok(true),
            Err(error) => self.refused(error).map(|()| false),
        }
    }

    /// Runs a batch twice, and compares its results.
    pub(super) fn call_and_judge(
        &mut self,
        called: &'static str,
        spec: &Spec,
        batch: &Batch,
        given: &Given,
        right: Output,
    ) -> Result<(), String> {
        let (right, mut first) = (Right::from(right), None);
        let tokens = given.q.shape[0] * given.q.shape[1] / self.case.spec.q_heads as usize;
        for _ in 0..2 {
            let results = self.world.results.bytes();
            self.results.write(0, results).map_err(text)?;
            if !self.call(spec, batch, given)? {
                return Ok(());
            }
            self.judge(called, tokens, &right, &mut first)?;
        }
        Ok(())
    }
}
