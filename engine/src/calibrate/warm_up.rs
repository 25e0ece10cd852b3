//! Steps before the first request, so that none waits for what a device does once.

use std::sync::Weak;

use tandem_attn::step::{LogProbRow, MOST_TOP, Penalties, Sampling};

use super::{HYBRID, StepLengths, WARM, chunk, decodes, repeat, run};
use crate::{
    Error, LogitRules, LogitWork,
    backend::Backend,
    rules::{LogitRows, Rules},
};

/// Keys of short decodes, and those that each decode has behind a common prefix.
const SHORT: u32 = 64;
/// Keys of long decodes, if the caches and the model have room for them: the splits of few decodes are merged.
const LONG: u32 = 8192;
/// Tokens of a common prefix, likewise.
const PREFIX: u32 = 2048;

/// Runs decodes of each size for which a backend has graphs, prompt chunks and hybrid steps, so that requests later wait for no
/// capture of a usual graph, and rarely for the choice of an algorithm. Decodes are short, long, and behind a common prefix, with rules of logits and
/// log-probabilities, and without.
///
/// A backend on the CPU needs none of it.
///
/// # Errors
/// If the backend fails.
pub fn warm_up(backend: &mut dyn Backend) -> Result<(), Error> {
    for size in sizes(backend.step_requests().min(backend.step_tokens())) {
        for (lengths, common) in of_size(backend, size) {
            let inputs = lengths.inputs(backend, common);
            let greedy = Sampling::GREEDY;
            repeat(backend, &inputs, greedy, LogitWork::default(), WARM)?;
            let rows = adjusted(backend, size);
            repeat(backend, &inputs, SAMPLED, rows.work(), WARM)?;
        }
    }
    // Full steps are the most frequent ones with prompts.
    let full = backend.step_tokens();
    let chunks = (4..u32::BITS).map(|bit| 1 << bit);
    let chunks = chunks.take_while(|&tokens| tokens < full).chain([full]);
    let chunks = chunks.map(|tokens| chunk(tokens, tokens));
    for lengths in chunks.chain(HYBRID).chain(full_step(backend)) {
        if lengths.fits(backend, u32::MAX) {
            run(backend, lengths, WARM)?;
        }
    }
    Ok(())
}

/// How a token is drawn in steps with rules.
const SAMPLED: Sampling = Sampling {
    temperature: 1.0,
    top_k: 50,
    top_p: 0.9,
    min_p: 0.0,
    seed: 1,
};

/// Powers of two, and the most.
fn sizes(most: u32) -> impl Iterator<Item = u32> {
    let powers = (0..u32::BITS).map(|bit| 1 << bit);
    powers.take_while(move |&size| size < most).chain([most])
}

/// Decodes for which there is room, and the number of pages that they have in common.
fn of_size(backend: &dyn Backend, size: u32) -> Vec<(StepLengths, u32)> {
    let (page, pages) = (backend.page_size(), backend.pages());
    let positions = backend.architecture().positions;
    let short = SHORT.min(positions);
    let long = LONG.min(positions).min((pages / size).saturating_mul(page));
    let own = short.div_ceil(page);
    let room = pages.saturating_sub(size.saturating_mul(own));
    let common = PREFIX
        .div_ceil(page)
        .min(room)
        .min((positions - short) / page);
    let mut all = vec![(decodes(size, short), 0)];
    if long > short {
        all.push((decodes(size, long), 0));
    }
    if size > 1 && common > 0 {
        all.push((decodes(size, common * page + short), common));
    }
    all.retain(|(lengths, common)| *common > 0 || lengths.fits(backend, u32::MAX));
    all
}

/// Long decodes, and a chunk in the rest of a full step: as many decodes as fit beside a chunk, if the chunk is longer than they
/// are many. Other hybrids need more room than many backends have.
fn full_step(backend: &dyn Backend) -> Option<StepLengths> {
    let (page, tokens) = (backend.page_size(), backend.step_tokens());
    let positions = backend.architecture().positions;
    let size = backend.step_requests().saturating_sub(1).min(tokens / 2);
    let chunk = (tokens - size).min(positions);
    let room = backend.pages().saturating_sub(chunk.div_ceil(page));
    let keys = room.checked_div(size)?.saturating_mul(page);
    let keys = keys.min(LONG).min(positions);
    (keys > 0).then_some(StepLengths {
        decodes: size,
        keys,
        chunk,
        chunk_keys: chunk,
    })
}

/// Rules and log-probabilities for each row of so many decodes.
fn adjusted(backend: &dyn Backend, size: u32) -> LogitRows {
    let rules = LogitRules {
        penalties: Penalties {
            repetition: 1.1,
            ..Penalties::NONE
        },
        bias: vec![(0, 1.0)],
    };
    let rules = Rules::new(&rules, &[0], [].into_iter(), 0, &mut Weak::new());
    let rules = rules.expect("a penalty changes logits");
    let vocabulary = backend.architecture().vocabulary;
    let top = MOST_TOP.min(u32::try_from(vocabulary).unwrap_or(MOST_TOP));
    let mut rows = LogitRows::default();
    for row in 0..size {
        rules.add_to(&mut rows, row, 0, None);
        rows.log_probs.push(LogProbRow { row, top });
    }
    rows
}
