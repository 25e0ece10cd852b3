//! Steps of decode priority meet its target.

use super::super::*;
use crate::policy::DecodePriority;

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
