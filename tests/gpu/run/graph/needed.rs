//! Graphs of the launches that plans need, all over one workspace.

use std::collections::{BTreeMap, btree_map::Entry};

use half::bf16;
use tandem_attn::{
    Error,
    exec::gpu::{Gpu, Graph, OwnedStream, RunTensors, Workspace},
    plan::{MergeMode, pod::PodMode},
    tensor::F8E4M3,
};

use super::{PAGE, Replay, TOKENS, serves_by};
use crate::{
    common::{Memory, Stream},
    run::hopper,
};

/// A graph for each choice of launches, captured when a plan needs it.
struct ByNeed {
    graphs: BTreeMap<u128, Graph>,
    capturing: OwnedStream,
    /// Launches of graphs that were captured for plans that need other launches.
    ran: usize,
    refused: usize,
}

impl ByNeed {
    fn new(gpu: &Gpu) -> Self {
        Self {
            graphs: BTreeMap::new(),
            capturing: gpu.stream().unwrap(),
            ran: 0,
            refused: 0,
        }
    }
}

/// Bytes that no result has.
const UNTOUCHED: u8 = 0xff;

fn clear(results: &[&Memory]) {
    for memory in results {
        let bytes = memory.read::<u8>().len();
        memory.write_at(0, &vec![UNTOUCHED; bytes]);
    }
}

fn read(results: &[&Memory]) -> Vec<Vec<u8>> {
    results.iter().map(|memory| memory.read()).collect()
}

impl Replay for ByNeed {
    const KEEPS_MEMORY: bool = false;

    fn replay(
        &mut self,
        gpu: &Gpu,
        workspace: &mut Workspace,
        tensors: &RunTensors<'_>,
        (tokens, results): (usize, &[&Memory]),
        stream: &Stream,
    ) {
        // The upload was on the stream, and copies of the host come after it.
        stream.wait();
        let needed = workspace.needed_launches();
        if let Entry::Vacant(place) = self.graphs.entry(needed) {
            workspace.launch_only_needed();
            // SAFETY: everything on the device lives until it was waited for, here and below.
            let run = |on| unsafe { gpu.run_with(workspace, tensors, on) };
            let graph = self.capturing.capture(run).unwrap();
            place.insert(graph);
        }
        clear(results);
        unsafe { self.graphs[&needed].launch(stream.0) }.unwrap();
        stream.wait();
        let right = read(results);
        // The other graphs compute the same, or nothing.
        for (_, graph) in self.graphs.iter().filter(|(other, _)| **other != needed) {
            clear(results);
            let launched = unsafe { graph.launch(stream.0) };
            stream.wait();
            let got = read(results);
            match launched {
                Ok(()) => {
                    self.ran += 1;
                    // Behind the tokens of the plan, padded results have anything.
                    for (got, right) in got.iter().zip(&right) {
                        let of_tokens = right.len() / TOKENS as usize * tokens;
                        let same = got[..of_tokens] == right[..of_tokens];
                        assert!(same, "a graph of more launches has other results");
                    }
                }
                Err(Error::NotInGraph { launch }) => {
                    self.refused += 1;
                    let untouched = got.iter().flatten().all(|&byte| byte == UNTOUCHED);
                    assert!(untouched, "refused for {launch}");
                }
                Err(other) => panic!("{other}"),
            }
        }
        for (memory, right) in results.iter().zip(&right) {
            memory.write_at(0, right);
        }
    }

    fn end(&self, rounds: usize) {
        let (graphs, ran, refused) = (self.graphs.len(), self.ran, self.refused);
        println!(
            "{graphs} graphs in {rounds} rounds; {ran} other launches ran, {refused} were refused"
        );
        if rounds >= 60 {
            assert!(graphs > 2 && ran > 0 && refused > 0);
        }
    }
}

#[test]
fn graphs_of_needed_launches_compute_their_plans_and_refuse_others() {
    let Some(gpu) = hopper("graphs_of_needed_launches_compute_their_plans_and_refuse_others")
    else {
        return;
    };
    let modes = [
        (MergeMode::Kernel, false, PodMode::Auto, false),
        (MergeMode::Fused, false, PodMode::Auto, true),
        (MergeMode::Kernel, true, PodMode::Auto, true),
        (MergeMode::Fused, true, PodMode::Auto, false),
        (MergeMode::Kernel, true, PodMode::Tickets, false),
    ];
    serves_by::<bf16, ByNeed>(gpu, [128, PAGE], &modes, ByNeed::new);
}

/// Prefills convert pages.
#[test]
fn graphs_of_needed_launches_compute_plans_over_8_bit_pages() {
    let Some(gpu) = hopper("graphs_of_needed_launches_compute_plans_over_8_bit_pages") else {
        return;
    };
    let modes = [(MergeMode::Kernel, true, PodMode::Auto, false)];
    serves_by::<F8E4M3, ByNeed>(gpu, [128, PAGE], &modes, ByNeed::new);
}

/// Whether heads are padded depends on what a graph contains: prefills alone read and write them as they are.
#[test]
fn graphs_of_needed_launches_pad_heads_where_a_launch_wants_it() {
    let Some(gpu) = hopper("graphs_of_needed_launches_pad_heads_where_a_launch_wants_it") else {
        return;
    };
    let modes = [(MergeMode::Kernel, true, PodMode::Auto, false)];
    serves_by::<bf16, ByNeed>(gpu, [112, PAGE], &modes, ByNeed::new);
}
