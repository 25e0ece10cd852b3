//! Several steps under way, and pages for too few requests.

use super::super::*;
use crate::policy::SarathiServe;

fn composer(limits: Limits, pages: u32) -> Composer {
    Composer::new(limits, pages, 4, SarathiServe).unwrap()
}

fn complete(composer: &mut Composer, step: &Step) {
    composer.complete(step, |_| Sampled::Token(0));
}

/// A request that is swapped out while all others are in steps under way. There is no step to compute then, and the copies were
/// lost: the request later read host pages to which nothing was copied.
#[test]
fn copies_of_a_step_without_entries_are_in_the_next_one() {
    let limits = Limits {
        step_tokens: 8,
        host_pages: 8,
        prefix_cache: false,
        ..Limits::default()
    };
    let mut composer = composer(limits, 4);
    let steps: &mut [Step; 4] = &mut Default::default();
    composer.submit(Request::of_length(12, 1)).unwrap();
    assert!(composer.compose(&mut steps[0]));
    let late = composer.submit(Request::of_length(4, 8)).unwrap();
    assert!(composer.compose(&mut steps[1]));
    complete(&mut composer, &steps[0]);
    assert!(composer.compose(&mut steps[2]));
    complete(&mut composer, &steps[1]);
    // The late request needs a page for its first token, and the other one is under way.
    assert!(!composer.compose(&mut steps[3]));
    let lost = Preemption {
        request: late,
        swapped: true,
    };
    assert_eq!(steps[3].preempted, [lost]);
    complete(&mut composer, &steps[2]);
    assert!(composer.compose(&mut steps[3]));
    let [Swap::Out { host: to, .. }, Swap::In { host: from, .. }] = steps[3].swaps[..] else {
        panic!("{:?}", steps[3]);
    };
    assert_eq!(to, from);
}

/// The request that arrived first waits for a page of a later one that is in a step under way. It once lost its own keys.
#[test]
fn the_first_request_waits_for_pages_of_later_ones_under_way() {
    let limits = Limits {
        prefix_cache: false,
        ..Limits::default()
    };
    let mut composer = composer(limits, 4);
    let steps: &mut [Step; 3] = &mut Default::default();
    let first = composer.submit(Request::of_length(4, 8)).unwrap();
    assert!(composer.compose(&mut steps[0]));
    composer.submit(Request::of_length(12, 4)).unwrap();
    assert!(composer.compose(&mut steps[1]));
    complete(&mut composer, &steps[0]);
    assert!(!composer.compose(&mut steps[2]));
    assert!(steps[2].preempted.is_empty(), "{:?}", steps[2].preempted);
    complete(&mut composer, &steps[1]);
    assert!(composer.compose(&mut steps[2]));
    assert_eq!(steps[2].entries[0].request, first);
    assert_eq!(steps[2].preempted.len(), 1, "the later one");
}

/// Pages of prompts that only count as computed hold no keys.
#[test]
fn the_prefix_cache_has_no_pages_that_nobody_wrote() {
    let mut composer = composer(Limits::default(), 100);
    let mut step = Step::default();
    let mut request = Request::new((0..40).collect(), 2);
    request.computed = 32;
    for first in [32, 0] {
        composer.submit(request.clone()).unwrap();
        while composer.compose(&mut step) {
            if let Some(entry) = step.entries.iter().find(|entry| !entry.decode) {
                assert_eq!(entry.first, first);
            }
            complete(&mut composer, &step);
        }
        let written = composer.prefix_cache().unwrap().pages() > 0;
        assert_eq!(written, first == 0);
        request.computed = 0;
    }
}

/// Blocks of so large ids that their tokens would have the ids of other blocks: they were found in the cache in their place.
#[test]
fn blocks_with_the_tokens_of_others_are_refused() {
    let mut composer = composer(Limits::default(), 1000);
    let blocks = |id| Request {
        prompt: Prompt::Blocks {
            ids: [id].into(),
            block: 512,
            len: 512,
        },
        max_new_tokens: 1,
        computed: 0,
    };
    let most = u32::MAX / 512;
    assert!(composer.submit(blocks(most)).is_ok());
    let error = composer.submit(blocks(most + 1)).unwrap_err();
    assert_eq!(
        error,
        ScheduleError::BlockId {
            id: most + 1,
            block: 512,
            most
        }
    );
}

/// A request for which there is no room, whatever is evicted, leaves the prefix cache as it is.
#[test]
fn nothing_is_evicted_for_a_request_that_does_not_fit_anyway() {
    let mut composer = composer(Limits::default(), 16);
    let mut step = Step::default();
    for (prompt, new) in [(100..104, 1), (0..32, 16)] {
        composer
            .submit(Request::new(prompt.collect(), new))
            .unwrap();
        assert!(composer.compose(&mut step));
        complete(&mut composer, &step);
    }
    // One page is not in use.
    let cached = composer.prefix_cache().unwrap().pages();
    assert_eq!(cached, 1 + 8);
    composer.submit(Request::of_length(40, 1)).unwrap();
    assert!(composer.compose(&mut step));
    assert_eq!((composer.running(), composer.waiting()), (1, 1));
    assert_eq!(composer.prefix_cache().unwrap().pages(), cached);
}

/// Two requests with the same prompt, and pages for one of them. The second needs none of its own for the prompt once that of the
/// first is in the prefix cache; it was tried again only when a request left.
#[test]
fn a_request_is_admitted_when_its_prompt_enters_the_prefix_cache() {
    let mut composer = composer(Limits::default(), 6);
    let mut step = Step::default();
    for new in [8, 4] {
        composer
            .submit(Request::new((0..16).collect(), new))
            .unwrap();
    }
    assert!(composer.compose(&mut step));
    assert_eq!(step.entries.len(), 1);
    complete(&mut composer, &step);
    assert!(composer.compose(&mut step));
    assert_eq!(step.entries.len(), 2);
}

/// Two requests computed the same prompt. The second gives its pages back when its prompt ends, and a queued request finds them.
#[test]
fn a_request_is_admitted_when_equal_prompts_become_one() {
    let limits = Limits {
        step_tokens: 24,
        ..Limits::default()
    };
    let mut composer = composer(limits, 10);
    let mut step = Step::default();
    for prompt in [0..16, 0..16, 100..112] {
        composer.submit(Request::new(prompt.collect(), 4)).unwrap();
    }
    for entries in [2, 2, 3] {
        assert!(composer.compose(&mut step));
        assert_eq!(step.entries.len(), entries);
        complete(&mut composer, &step);
    }
}
