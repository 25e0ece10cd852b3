//! Plans of a case by graphs.

use std::collections::btree_map::Entry;

use tandem_attn::plan::Plan;

use super::{Runner, text};
use crate::{case::Step, oracle::Right};

impl Runner<'_> {
    /// The plan of a step by a graph, twice: by the one that was captured in the first step that could be, or by one of the
    /// launches that the plan needs.
    pub(super) fn replay(&mut self, plan: &Plan, step: &Step, right: &Right) -> Result<(), String> {
        if self.captured.is_none() {
            return Ok(());
        }
        self.spoil(true)?;
        let [parts, tokens] = self.most;
        let given = self.given(parts, tokens);
        let (workspace, graphs) = self.captured.as_mut().expect("looked at above");
        // SAFETY: the stream is ours, and runs before it were waited for.
        if let Err(error) = unsafe { workspace.upload(plan, *self.stream) } {
            return self.refused(error);
        }
        let only_needed = (self.case.seed / 2).is_multiple_of(2);
        let key = only_needed.then(|| workspace.needed_launches());
        if let Entry::Vacant(place) = graphs.entry(key) {
            if only_needed {
                workspace.launch_only_needed();
            }
            let gpu = self.gpu;
            // SAFETY: everything that is captured lives as long as the graph.
            let made = self
                .stream
                .capture(|stream| unsafe { given.run(gpu, workspace, stream) });
            match made {
                Ok(made) => drop(place.insert(made)),
                Err(error) => return self.refused(error),
            }
        }
        let tokens = step.rows.iter().map(|row| row.queries as usize).sum();
        let mut first = None;
        for _ in 0..2 {
            self.results
                .write(0, self.world.results.bytes())
                .map_err(text)?;
            let (_, graphs) = self.captured.as_ref().expect("looked at above");
            let graph = graphs.get(&key).expect("captured by now");
            // SAFETY: everything in it lives.
            unsafe { graph.launch(*self.stream) }.map_err(text)?;
            self.stream.synchronize().map_err(text)?;
            self.judge("run by a graph", tokens, right, &mut first)?;
            self.tally.right(&self.case.special(Some(step)));
        }
        self.workspace(true, plan)
    }
}
