//! Steps of decode priority meet its target.

use super::super::*;
use crate::{
    policy::DecodePriority,
    sim::{Simulation, simulate},
    trace::Trace,
};

/// Chunks at the end of a long prompt see all keys before them, and were once priced as if they saw only the keys that were left
/// to compute.
#[test]
fn steps_meet_the_target_up_to_the_end_of_a_long_prompt() {
    let target_ns = 20e6;
    for kind in 0..3 {
        let mut late = match kind {
            0 => Request::of_length(32_768, 4),
            _ => Request::new((0..32_768).collect(), 4),
        };
        late.computed = if kind == 2 { 20_000 } else { 0 };
        let policy = DecodePriority::new(cost(), target_ns);
        let mut composer = Composer::new(Limits::default(), 10_000, 16, policy).unwrap();
        for _ in 0..16 {
            composer.submit(Request::of_length(1, 5000)).unwrap();
        }
        let mut step = Step::default();
        assert!(composer.compose(&mut step));
        composer.complete(&step, |_| Sampled::Token(0));
        composer.submit(late).unwrap();
        let mut chunks = Vec::new();
        loop {
            assert!(composer.compose(&mut step));
            let [chunk] = step.shape().chunks[..] else {
                break;
            };
            let ns = cost().step(step.shape()).last_stage_ns();
            assert!(ns <= target_ns, "{chunk:?}: {ns} ns");
            chunks.push(chunk.tokens);
            composer.complete(&step, |_| Sampled::Token(0));
        }
        // The first chunks see few keys, so they have more tokens.
        assert!(
            kind == 2 || chunks[1] > chunks[chunks.len() - 2],
            "{chunks:?}"
        );
    }
}

/// A token passes all stages. The target was once compared with the time of one.
#[test]
fn a_pipeline_meets_the_target() {
    let model = ModelDescription::named("llama-3-8b").unwrap();
    let hardware = Hardware::named("a100").unwrap();
    let trace = Trace::uniform(300, 2000, 200).with_poisson_arrivals(6.0, 1);
    for pipeline in [1, 2, 4] {
        let parallel = Parallel {
            tensor: 1,
            pipeline,
        };
        let cost = CostModel::new(&model, &hardware, parallel).unwrap();
        let limits = Limits {
            step_requests: 256 / pipeline,
            ..Limits::default()
        };
        let policy = DecodePriority::new(cost.clone(), 30e6);
        let report = simulate(&trace, Simulation::new(&cost, limits, policy)).unwrap();
        assert_eq!(report.finished, 300);
        let [p95_ms, p99_ms] = [0.95, 0.99].map(|part| 1e3 * report.tbt.quantile(part));
        assert!(p95_ms <= 30.0, "{pipeline} stages: {p95_ms} ms");
        // When chunks begin, decodes wait for a step that is longer than their own last one.
        assert!(p99_ms < 37.5, "{pipeline} stages: {p99_ms} ms");
    }
}

/// A step without decodes once had the whole budget, although decodes of the step before it had to wait for it.
#[test]
fn a_prompt_behind_decodes_under_way_meets_the_target() {
    let policy = DecodePriority::new(cost(), 20e6);
    let mut composer = Composer::new(Limits::default(), 10_000, 16, policy).unwrap();
    composer.submit(Request::of_length(1, 5000)).unwrap();
    let (mut first, mut second) = (Step::default(), Step::default());
    assert!(composer.compose(&mut first));
    composer.complete(&first, |_| Sampled::Token(0));
    assert!(composer.compose(&mut first));
    composer.submit(Request::of_length(9000, 4)).unwrap();
    assert!(composer.compose(&mut second));
    let [chunk] = second.shape().chunks[..] else {
        panic!("{second:?}");
    };
    let ns = cost().step(second.shape()).last_stage_ns();
    assert!(ns <= 20e6, "{chunk:?}: {ns} ns");
}
