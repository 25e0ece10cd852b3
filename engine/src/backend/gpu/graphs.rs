//! The graphs of steps with only decodes: which step captures one, and which one it launches.

use std::{collections::BTreeMap, fmt};

/// The most graphs of a bucket that contain only what plans need. Decodes without common prefixes need few; prefixes and
/// a second kind of attention multiply them. Plans that need yet other launches share a graph with all launches: it is a
/// few microseconds slower in each layer, and capturing again and again would take milliseconds.
const MOST_OF_BUCKET: usize = 16;

/// The number of decodes that a step of so many is padded to: a power of two, or the most that a step may have.
pub(super) fn bucket(requests: usize, most: usize) -> usize {
    requests.next_power_of_two().min(most)
}

/// Graphs by their bucket, the number of decodes that a step is padded to.
pub(super) struct Graphs<G> {
    buckets: BTreeMap<usize, Captured<G>>,
    /// Why captures failed.
    failures: Vec<String>,
}

/// The graphs of a bucket. The bucket ran once, so libraries have loaded what they load on first use.
struct Captured<G> {
    /// By the launches that the plans of each kind of attention need.
    needed: BTreeMap<Vec<u128>, G>,
    /// With all launches of the launch sets, if there are too many others.
    whole: Option<G>,
    /// A capture failed: no other is tried, and steps without a graph launch kernel by kernel.
    failed: bool,
}

impl<G> Default for Graphs<G> {
    fn default() -> Self {
        Self {
            buckets: BTreeMap::new(),
            failures: Vec::new(),
        }
    }
}

impl<G> Graphs<G> {
    /// Captures a graph for plans that need these launches, unless the bucket has one for them, did not run before, or
    /// could not be captured. `capture` receives whether the graph contains only these launches.
    pub(super) fn prepare<E: fmt::Display>(
        &mut self,
        bucket: usize,
        needed: &[u128],
        capture: impl FnOnce(bool) -> Result<G, E>,
    ) {
        let Some(known) = self.buckets.get_mut(&bucket) else {
            let first = Captured {
                needed: BTreeMap::new(),
                whole: None,
                failed: false,
            };
            self.buckets.insert(bucket, first);
            return;
        };
        if known.failed || known.graph(needed).is_some() {
            return;
        }
        let only_needed = known.needed.len() < MOST_OF_BUCKET;
        match capture(only_needed) {
            Ok(graph) if only_needed => drop(known.needed.insert(needed.to_vec(), graph)),
            Ok(graph) => known.whole = Some(graph),
            Err(error) => {
                let failure = format!("steps of {bucket} decodes run without a new graph: {error}");
                self.failures.push(failure);
                known.failed = true;
            }
        }
    }

    /// Forgets all graphs, and which sizes of steps ran. Failures that nobody has asked for stay.
    pub(super) fn clear(&mut self) {
        self.buckets.clear();
    }

    /// Why captures failed since this was last asked.
    pub(super) fn failures(&mut self) -> Vec<String> {
        std::mem::take(&mut self.failures)
    }

    /// The graph for plans that need these launches.
    pub(super) fn get(&self, bucket: usize, needed: &[u128]) -> Option<&G> {
        self.buckets.get(&bucket)?.graph(needed)
    }
}

impl<G> Captured<G> {
    fn graph(&self, needed: &[u128]) -> Option<&G> {
        self.needed.get(needed).or(self.whole.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A graph is what `prepare` passed to its capture.
    fn captured(graphs: &mut Graphs<bool>, bucket: usize, needed: u128) -> Option<bool> {
        let mut asked = None;
        graphs.prepare(bucket, &[needed], |only_needed| {
            asked = Some(only_needed);
            Ok::<_, &str>(only_needed)
        });
        asked
    }

    #[test]
    fn the_largest_steps_have_a_bucket_too() {
        let buckets = |most: usize| [1, 2, 3, 64, 65, 96].map(|requests| bucket(requests, most));
        assert_eq!(buckets(96), [1, 2, 4, 64, 96, 96]);
        assert_eq!(buckets(128), [1, 2, 4, 64, 128, 128]);
        assert_eq!(bucket(3, 3), 3);
    }

    #[test]
    fn the_first_step_of_a_bucket_captures_nothing() {
        let mut graphs = Graphs::default();
        assert_eq!(captured(&mut graphs, 4, 1), None);
        assert_eq!(graphs.get(4, &[1]), None);
        assert_eq!(captured(&mut graphs, 4, 1), Some(true));
        assert_eq!(captured(&mut graphs, 4, 1), None, "it is there");
        assert_eq!(graphs.get(4, &[1]), Some(&true));
        assert_eq!(captured(&mut graphs, 8, 1), None, "another bucket");
    }

    #[test]
    fn plans_behind_the_limit_share_a_graph_with_all_launches() {
        let mut graphs = Graphs::default();
        assert_eq!(captured(&mut graphs, 4, 0), None);
        for needed in 0..MOST_OF_BUCKET as u128 {
            assert_eq!(captured(&mut graphs, 4, needed), Some(true));
        }
        assert_eq!(captured(&mut graphs, 4, 100), Some(false));
        for needed in 101..200 {
            assert_eq!(captured(&mut graphs, 4, needed), None);
            assert_eq!(graphs.get(4, &[needed]), Some(&false));
        }
        assert_eq!(graphs.get(4, &[0]), Some(&true), "the others are kept");
    }

    #[test]
    fn a_failed_capture_is_not_tried_again() {
        let mut graphs = Graphs::default();
        assert_eq!(captured(&mut graphs, 4, 1), None);
        assert_eq!(captured(&mut graphs, 4, 1), Some(true));
        graphs.prepare(4, &[2], |_| Err("no memory"));
        assert_eq!(graphs.get(4, &[2]), None, "such a step is launched");
        assert_eq!(captured(&mut graphs, 4, 2), None);
        assert_eq!(graphs.get(4, &[1]), Some(&true), "the others are kept");
        let said = "steps of 4 decodes run without a new graph: no memory";
        graphs.clear();
        assert_eq!(graphs.get(4, &[1]), None, "all are forgotten");
        assert_eq!(captured(&mut graphs, 4, 1), None, "a first step");
        assert_eq!(captured(&mut graphs, 4, 1), Some(true), "tried again");
        assert_eq!(graphs.failures(), [said], "it was not asked for before");
        assert_eq!(graphs.failures(), [""; 0], "said once");
    }
}
