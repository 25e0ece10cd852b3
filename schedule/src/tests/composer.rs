//! Invariants of all policies for any requests: no token is computed twice or skipped, no page is lost, budgets hold,
//! and no request waits forever.

mod audit;
mod decode_priority;
mod under_way;

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::policy::{DecodePriority, Orca, PrefillFirst, Sarathi, SarathiServe};
use audit::Audit;

#[test]
fn a_request_goes_on_where_it_stood() {
    let mut composer = Composer::new(Limits::default(), 100, 16, SarathiServe).unwrap();
    let mut goes_on = Request::of_length(40, 3);
    goes_on.computed = 39;
    let mut begins = Request::new((0..50).collect(), 3);
    begins.computed = 500;
    for request in [goes_on, begins] {
        composer.submit(request).unwrap();
    }
    let mut step = Step::default();
    assert!(composer.compose(&mut step));
    let firsts: Vec<_> = step.entries.iter().map(|e| (e.first, e.tokens)).collect();
    // The last token of a prompt is always computed, even if it is cached.
    assert_eq!(firsts, [(39, 1), (49, 1)]);
}

/// An event in the life of a composer.
#[derive(Clone, Debug)]
enum Event {
    /// Prompt length, length of the prefix shared with other prompts, new tokens, and the kind of prompt.
    Submit(u32, u32, u32, u8),
    Compose,
    Complete,
    Cancel(prop::sample::Index),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => (1..90_u32, 0..60_u32, 1..12_u32, 0..3_u8)
            .prop_map(|(prompt, common, new, kind)| Event::Submit(prompt, common, new, kind)),
        5 => Just(Event::Compose),
        5 => Just(Event::Complete),
        1 => any::<prop::sample::Index>().prop_map(Event::Cancel),
    ]
}

fn request(prompt: u32, common: u32, new: u32, kind: u8, salt: u32) -> Request {
    let tokens = |i: u32| if i < common { i } else { i + 1000 * (salt + 1) };
    match kind {
        0 => Request::of_length(prompt, new),
        1 => Request::new((0..prompt).map(tokens).collect(), new),
        _ => Request {
            prompt: Prompt::Blocks {
                ids: (0..prompt.div_ceil(8))
                    .map(|i| {
                        if 8 * i < common {
                            i
                        } else {
                            1000 * (salt + 1) + i
                        }
                    })
                    .collect(),
                block: 8,
                len: prompt,
            },
            max_new_tokens: new,
            computed: 0,
        },
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 2000 }))]

    /// Any policy and any requests, with small pools, several steps under way or one composed ahead of sampled tokens,
    /// and cancellation at any point.
    #[test]
    fn books_balance(
        policy in 0..policy::NAMES.len(),
        events in prop::collection::vec(event(), 1..150),
        (step_tokens, step_requests, running) in (1..80_u32, 1..10_u32, 1..12_u32),
        (pages, page_size, host_pages) in (26..60_u32, 4..9_u32, prop_oneof![Just(0_u32), 10..40_u32]),
        (stages, ahead, prefix_cache, spare_pages) in
            (1..4_usize, any::<bool>(), any::<bool>(), prop_oneof![4 => 0..4_u32, 1 => Just(u32::MAX)]),
    ) {
        let limits = Limits {
            step_tokens, step_requests, running, host_pages, prefix_cache, spare_pages,
            ..Limits::default()
        };
        let policy = policy::by_name(policy::NAMES[policy], &options()).unwrap();
        let mut audit = Audit::new(limits, pages, page_size, policy);
        audit.ahead = ahead;
        let stages = if ahead { 2 } else { stages };
        for (salt, event) in events.into_iter().enumerate() {
            match event {
                Event::Submit(prompt, common, new, kind) => {
                    audit.submit(request(prompt, common, new, kind, salt as u32));
                }
                Event::Compose if audit.under_way.len() < stages => {
                    audit.compose();
                }
                Event::Compose | Event::Complete => audit.complete(),
                Event::Cancel(index) => {
                    let mut ids: Vec<_> =
                        audit.known.iter().filter(|(_, k)| !k.cancelled).map(|(&id, _)| id).collect();
                    ids.sort_unstable();
                    if !ids.is_empty() {
                        audit.cancel(*index.get(&ids));
                    }
                }
            }
        }
        while !audit.under_way.is_empty() {
            audit.complete();
        }
        audit.drain(100_000);
        audit.check_empty();
    }

    /// Equal requests give equal steps.
    #[test]
    fn composing_is_deterministic(
        policy in 0..policy::NAMES.len(),
        requests in prop::collection::vec((1..90_u32, 0..60_u32, 1..12_u32, 0..3_u8), 1..20),
    ) {
        let run = || {
            let policy = policy::by_name(policy::NAMES[policy], &options()).unwrap();
            let limits = Limits { step_tokens: 50, ..Limits::default() };
            let mut composer = Composer::with_policy(limits, 30, 8, policy).unwrap();
            for (salt, &(prompt, common, new, kind)) in requests.iter().enumerate() {
                composer.submit(request(prompt, common, new, kind, salt as u32)).unwrap();
            }
            let (mut steps, mut step) = (Vec::new(), Step::default());
            while composer.compose(&mut step) {
                composer.complete(&step, |_| Sampled::Token(1));
                steps.push(step.clone());
            }
            steps
        };
        prop_assert_eq!(run(), run());
    }

    /// Under decode priority, a prompt at the head of the queue gets a chunk at least every `patience + 1` steps, even
    /// if the target allows none and decodes could fill every step.
    #[test]
    fn decode_priority_starves_nobody(
        decodes in 1..40_u32,
        prompt in 1..600_u32,
        patience in 0..6_u32,
        step_tokens in 2..200_u32,
    ) {
        let limits = Limits { step_tokens, prefix_cache: false, ..Limits::default() };
        // No step meets a target of 1 ns.
        let policy = DecodePriority::new(cost(), 1.0).with_patience(patience);
        let mut composer = Composer::new(limits, 10_000, 16, policy).unwrap();
        for _ in 0..decodes {
            composer.submit(Request::of_length(1, 50_000)).unwrap();
        }
        let mut step = Step::default();
        for _ in 0..(decodes + 1) * (patience + 1) {
            composer.compose(&mut step);
            composer.complete(&step, |_| Sampled::Token(0));
        }
        prop_assert_eq!(composer.waiting(), 0);
        let late = composer.submit(Request::of_length(prompt, 1)).unwrap();
        let chunk = cost().tile().min(step_tokens / 2).max(1);
        let bound = prompt.div_ceil(chunk) * (patience + 1);
        let mut steps = 0;
        let mut done = false;
        while !done {
            steps += 1;
            prop_assert!(steps <= bound, "not done after {} steps", bound);
            composer.compose(&mut step);
            prop_assert!(step.tokens() <= step_tokens);
            done = composer.complete(&step, |_| Sampled::Token(0)).iter().any(|f| f.request == late);
        }
    }
}

#[test]
fn decodes_above_the_budget_take_turns() {
    let limits = Limits {
        step_tokens: 8,
        ..Limits::default()
    };
    let mut composer = Composer::new(limits, 1000, 16, Sarathi::new(8, 8)).unwrap();
    for _ in 0..20 {
        composer.submit(Request::of_length(1, 1000)).unwrap();
    }
    let mut step = Step::default();
    let mut last = HashMap::new();
    for now in 0..200 {
        composer.compose(&mut step);
        assert!(step.tokens() <= 8);
        for entry in &step.entries {
            if let Some(before) = last.insert(entry.request, now).filter(|_| now > 40) {
                assert!(
                    now - before <= 3,
                    "20 requests, 8 a step: each at least every third"
                );
            }
        }
        composer.complete(&step, |_| Sampled::Token(0));
    }
    assert_eq!(last.len(), 20);
}

#[test]
fn a_cached_prefix_is_not_computed_again() {
    let mut composer = Composer::new(Limits::default(), 100, 16, SarathiServe).unwrap();
    let prompt: Vec<u32> = (0..100).collect();
    let mut step = Step::default();
    let mut firsts = Vec::new();
    for _ in 0..2 {
        composer.submit(Request::new(prompt.clone(), 20)).unwrap();
        while composer.compose(&mut step) {
            firsts.extend(step.entries.iter().filter(|e| !e.decode).map(|e| e.first));
            composer.complete(&step, |entry| {
                Sampled::Token(7 + entry.first + entry.tokens - 1)
            });
        }
    }
    assert_eq!(firsts, [0, 96]);
    assert_eq!(composer.cached_tokens(), 96);
    // The next turn of the conversation: prompt and answer are cached up to their last full page.
    let mut longer = prompt;
    longer.extend((99..119).map(|position| 7 + position));
    composer.submit(Request::new(longer, 1)).unwrap();
    composer.compose(&mut step);
    assert_eq!(step.entries[0].first, 112);
}

#[test]
fn pages_run_out_and_come_back() {
    for host_pages in [0, 64] {
        let limits = Limits {
            host_pages,
            prefix_cache: false,
            ..Limits::default()
        };
        let mut audit = Audit::new(limits, 12, 4, Box::new(SarathiServe));
        for _ in 0..3 {
            audit.submit(Request::of_length(12, 20)).unwrap();
        }
        audit.drain(1000);
        audit.check_empty();
        let lost = audit.composer.lost_tokens();
        assert_eq!(
            lost == 0,
            host_pages > 0,
            "{host_pages} host pages, {lost} lost"
        );
    }
}

/// Prompts whose requests are preempted and that the prefix cache still has. They count as cached only once, and are
/// not computed again.
#[test]
fn what_a_preempted_request_finds_in_the_cache_is_neither_lost_nor_found_twice() {
    let mut composer = Composer::new(Limits::default(), 12, 4, SarathiServe).unwrap();
    let mut prompts = 0;
    for first in [0, 100, 200] {
        let prompt: Vec<u32> = (first..first + 12).collect();
        prompts += prompt.len() as u64;
        composer.submit(Request::new(prompt, 20)).unwrap();
    }
    let (mut step, mut preempted) = (Step::default(), 0);
    let (mut computed, mut needed) = (0, 0);
    while composer.compose(&mut step) {
        preempted += step.preempted.len();
        computed += u64::from(step.tokens());
        composer.complete(&step, |entry| Sampled::Token(1000 + entry.first));
    }
    // Each request has keys for its prompt and for all but the last token of its answer.
    needed += prompts + 3 * 19;
    assert!(preempted > 0);
    assert_eq!(
        composer.cached_tokens(),
        0,
        "the prompts have nothing in common"
    );
    assert_eq!(composer.lost_tokens(), computed - needed);
}

#[test]
fn impossible_requests_are_refused_with_reasons() {
    let limits = Limits {
        request_tokens: 100,
        ..Limits::default()
    };
    let mut composer = Composer::new(limits, 4, 16, SarathiServe).unwrap();
    let mut refused = |request| composer.submit(request).unwrap_err().to_string();
    assert!(refused(Request::new(vec![], 1)).contains("empty"));
    assert!(refused(Request::of_length(1, 0)).contains("at least 1"));
    assert!(refused(Request::of_length(90, 11)).contains("the 100 a request may have"));
    assert!(refused(Request::of_length(60, 6)).contains("needs 5 pages and the pool has 4"));
    let id = composer.submit(Request::of_length(60, 5)).unwrap();
    assert!(composer.cancel(id) && !composer.cancel(id));
    let limits = Limits {
        step_tokens: 0,
        ..limits
    };
    let wrong = Composer::new(limits, 4, 16, SarathiServe).unwrap_err();
    assert!(wrong.to_string().contains("Limits::step_tokens is 0"));
    let wide = Composer::new(Limits::default(), 4, 4097, SarathiServe).unwrap_err();
    assert!(wide.to_string().contains("give 1 to 4096 tokens"), "{wide}");
    assert!(
        policy::by_name("fifo", &options())
            .unwrap_err()
            .to_string()
            .contains("orca")
    );
}

/// The next step needs at most one more page for each request, so a larger number once let requests run one after the other.
#[test]
fn admission_keeps_at_most_one_page_for_each_running_request() {
    for (spare_pages, fit) in [(0, 5), (1, 4), (4, 4), (u32::MAX, 4)] {
        let limits = Limits {
            spare_pages,
            ..Limits::default()
        };
        let mut composer = Composer::new(limits, 15, 8, SarathiServe).unwrap();
        for _ in 0..6 {
            composer.submit(Request::of_length(20, 4)).unwrap();
        }
        assert!(composer.compose(&mut Step::default()));
        // Three pages each. A fifth would leave none for the four that run.
        assert_eq!(composer.running(), fit, "{spare_pages}");
    }
}

/// Between two steps no request is admitted. One for which there is room then waits only for the next step.
#[test]
fn requests_for_which_there_is_room_do_not_count_as_waiting() {
    let limits = Limits {
        running: 3,
        waiting: 2,
        ..Limits::default()
    };
    let mut composer = Composer::new(limits, 64, 16, SarathiServe).unwrap();
    let fill = |composer: &mut Composer| loop {
        if let Err(full) = composer.submit(Request::of_length(4, 2)) {
            return full;
        }
    };
    assert_eq!(
        fill(&mut composer),
        ScheduleError::QueueFull { waiting: 5 },
        "idle: three to admit, two behind them"
    );
    let mut step = Step::default();
    assert!(composer.compose(&mut step));
    assert_eq!((composer.running(), composer.waiting()), (3, 2));
    assert_eq!(
        fill(&mut composer),
        ScheduleError::QueueFull { waiting: 2 },
        "the batch is full"
    );
    let mut sampled = [Sampled::Last(1), Sampled::Token(1), Sampled::Token(1)].into_iter();
    composer.complete(&step, |_| sampled.next().unwrap());
    assert_eq!(
        fill(&mut composer),
        ScheduleError::QueueFull { waiting: 3 },
        "one has left"
    );
    let limits = Limits {
        waiting: usize::MAX,
        ..limits
    };
    let mut endless = Composer::new(limits, 64, 16, SarathiServe).unwrap();
    assert!(endless.submit(Request::of_length(4, 2)).is_ok());
}

/// Attention over caches of 8 bits converts the keys of all chunks of a step, and has room for so many.
#[test]
fn the_chunks_of_a_step_have_no_more_keys_than_there_is_room_for() {
    let limits = Limits {
        step_tokens: 512,
        chunk_keys: 1000,
        prefix_cache: false,
        ..Limits::default()
    };
    let mut composer = Composer::new(limits, 10_000, 16, SarathiServe).unwrap();
    for _ in 0..6 {
        composer.submit(Request::of_length(300, 2)).unwrap();
    }
    // The keys of its last chunk are more than the limit, and it is computed nevertheless, alone.
    composer.submit(Request::of_length(1100, 2)).unwrap();
    let (mut step, mut most, mut computed) = (Step::default(), 0, 0);
    while composer.compose(&mut step) {
        let chunks = &step.shape().chunks;
        let keys: u32 = chunks.iter().map(|chunk| chunk.keys).sum();
        assert!(keys <= 1000 || chunks.len() == 1, "{chunks:?}");
        most = most.max(chunks.len());
        computed += chunks.iter().map(|chunk| chunk.tokens).sum::<u32>();
        composer.complete(&step, |_| Sampled::Token(0));
    }
    assert_eq!((computed, most), (6 * 300 + 1100, 3));
    assert!(composer.is_idle());
}

#[test]
fn sarathi_composes_whole_tiles() {
    let limits = Limits {
        step_requests: 18,
        running: 18,
        prefix_cache: false,
        ..Limits::default()
    };
    let mut composer = Composer::new(limits, 10_000, 16, Sarathi::new(256, 128)).unwrap();
    for _ in 0..60 {
        composer.submit(Request::of_length(956, 68)).unwrap();
    }
    let (mut step, mut whole, mut hybrid) = (Step::default(), 0, 0);
    while composer.compose(&mut step) {
        let [chunk] = step.shape().chunks[..] else {
            assert!(step.shape().chunks.is_empty(), "one chunk at most");
            composer.complete(&step, |_| Sampled::Token(0));
            continue;
        };
        hybrid += 1;
        whole += usize::from(step.tokens() == 256);
        // Only the last chunk of a prompt leaves a tile partly empty.
        assert!(step.tokens() == 256 || chunk.keys == 956);
        composer.complete(&step, |_| Sampled::Token(0));
    }
    assert!(whole * 10 > hybrid * 7, "{whole} of {hybrid}");
}

/// So the bits of a prompt do not depend on the other requests: kernels add chunks of other lengths in other orders.
#[test]
fn prefill_first_cuts_a_prompt_by_its_own_length_alone() {
    let prompts = [30, 200, 64, 65, 10, 400, 1];
    let chunks = |prompts: &[u32]| -> Vec<Vec<u32>> {
        let limits = Limits {
            step_tokens: 64,
            prefix_cache: false,
            ..Limits::default()
        };
        let mut composer = Composer::new(limits, 1000, 16, PrefillFirst).unwrap();
        let requests = prompts.iter().map(|&prompt| {
            let request = Request::of_length(prompt, 5);
            composer.submit(request).unwrap()
        });
        let requests: Vec<_> = requests.collect();
        let mut chunks = vec![Vec::new(); prompts.len()];
        let mut step = Step::default();
        while composer.compose(&mut step) {
            for entry in step.entries.iter().filter(|entry| !entry.decode) {
                let request = requests.iter().position(|&one| one == entry.request);
                chunks[request.unwrap()].push(entry.tokens);
            }
            composer.complete(&step, |_| Sampled::Token(0));
        }
        chunks
    };
    let together = chunks(&prompts);
    assert_eq!(together[1], [64, 64, 64, 8]);
    for (prompt, together) in prompts.iter().zip(together) {
        assert_eq!(chunks(&[*prompt]), [together]);
    }
}

#[test]
fn orca_computes_prompts_whole() {
    let mut composer = Composer::new(Limits::default(), 1000, 16, Orca::new(1)).unwrap();
    for _ in 0..4 {
        composer.submit(Request::of_length(700, 5)).unwrap();
    }
    let mut step = Step::default();
    while composer.compose(&mut step) {
        for chunk in &step.shape().chunks {
            assert_eq!((chunk.tokens, chunk.keys), (700, 700));
        }
        composer.complete(&step, |_| Sampled::Token(0));
    }
}
