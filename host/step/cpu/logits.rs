//! Biases and penalties of logits, and log-probabilities.

use std::cmp::Reverse;

use kernels_gpu::step::sample::{LOG_PROBS, MOST_TOP, adjust::adjusted, key};
use rayon::prelude::*;

use super::rows_of;
use crate::{
    Error,
    checks::extent,
    step::{AdjustRow, AdjustToken, LogProb, LogProbRow, NO_TOKEN},
    tensor::ShapeError,
};

/// Adds biases to logits (`[…, vocabulary]`) and applies penalties, as [`Penalties`](crate::step::Penalties) says. Tokens keep the
/// logits as they were, for [`restore`]. A row's newest token is one of `ids`; tokens outside the vocabulary are passed over.
///
/// # Errors
/// [`Error::Extent`]; nothing is written then.
pub fn adjust(
    logits: &mut [f32],
    vocabulary: usize,
    rows: &[AdjustRow],
    tokens: &mut [AdjustToken],
    ids: &[u32],
) -> Result<(), Error> {
    check(logits.len(), vocabulary, rows, tokens.len())?;
    for row in rows {
        if row.newest != NO_TOKEN && row.newest as usize >= ids.len() {
            let rule = "more than the newest token of each row".to_owned();
            return Err(extent("ids", "tokens", ids.len(), rule));
        }
    }
    for row in rows {
        let logits = &mut logits[row.row as usize * vocabulary..][..vocabulary];
        let newest = match row.newest {
            NO_TOKEN => NO_TOKEN,
            at => ids[at as usize],
        };
        let (listed, more) = tokens[row.first as usize..=row.end as usize]
            .split_at_mut((row.end - row.first) as usize);
        let is_listed = listed.iter().any(|token| token.token == newest);
        more[0] = AdjustToken {
            token: if is_listed { NO_TOKEN } else { newest },
            bias: 0.0,
            seen: 0,
            logit: 0.0,
        };
        for token in listed.iter_mut().chain(more) {
            let is_newest = token.token == newest;
            if let Some(logit) = logits.get_mut(token.token as usize) {
                token.logit = *logit;
                // The list keeps its counts: the newest token counts once more in this call alone.
                let mut counted = *token;
                counted.seen += u32::from(is_newest);
                *logit = adjusted(*logit, &counted, row);
            }
        }
    }
    Ok(())
}

/// Writes the logits back that [`adjust`] changed.
///
/// # Errors
/// As [`adjust`].
pub fn restore(
    logits: &mut [f32],
    vocabulary: usize,
    rows: &[AdjustRow],
    tokens: &[AdjustToken],
) -> Result<(), Error> {
    check(logits.len(), vocabulary, rows, tokens.len())?;
    for row in rows {
        let logits = &mut logits[row.row as usize * vocabulary..][..vocabulary];
        for token in &tokens[row.first as usize..=row.end as usize] {
            if let Some(logit) = logits.get_mut(token.token as usize) {
                *logit = token.logit;
            }
        }
    }
    Ok(())
}

/// Whether there are the logits and tokens of all rows.
fn check(
    elements: usize,
    vocabulary: usize,
    rows: &[AdjustRow],
    tokens: usize,
) -> Result<(), Error> {
    let all = rows_of("logits", elements, vocabulary)?;
    for row in rows {
        if row.row as usize >= all {
            let rule = format!("more than {}, as the adjusted row", row.row);
            return Err(extent("logits", "rows", all, rule));
        }
        if row.first > row.end || row.end as usize >= tokens {
            let rule = format!(
                "more than {}, and row {} has those from {} on and one more",
                row.end, row.row, row.first
            );
            return Err(extent("tokens", "tokens", tokens, rule));
        }
    }
    Ok(())
}

/// Log-probabilities of rows of logits (`[…, vocabulary]`), as the model gives them: without temperature or rules. A row's first
/// result is that of its token in `ids`; the most probable tokens follow, of equally probable ones the first. There are [`LOG_PROBS`] results for each row.
///
/// ```
/// use tandem_attn::step::{LOG_PROBS, LogProb, LogProbRow, cpu::log_probs};
///
/// let logits = [0.0_f32, 1.0, 1.0, f32::NEG_INFINITY];
/// let mut out = [LogProb::default(); LOG_PROBS as usize];
/// log_probs(&logits, 4, &[LogProbRow { row: 0, top: 2 }], &[0], &mut out)?;
/// let sum = 1.0 + 2.0 * std::f32::consts::E;
/// assert!((out[0].value + sum.ln()).abs() < 1e-6);
/// assert_eq!([out[1].token, out[2].token], [1, 2]);
/// # Ok::<(), tandem_attn::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`], [`Error::Extent`]; nothing is written then.
pub fn log_probs(
    logits: &[f32],
    vocabulary: usize,
    rows: &[LogProbRow],
    ids: &[u32],
    out: &mut [LogProb],
) -> Result<(), Error> {
    let all = rows_of("logits", logits.len(), vocabulary)?;
    let expected = rows.len() * LOG_PROBS as usize;
    ShapeError::length("out", out.len(), "[rows, LOG_PROBS]", expected)?;
    for row in rows {
        if row.row as usize >= all.min(ids.len()) {
            let rule = format!("more than {}, as the row", row.row);
            return Err(extent("logits", "rows", all.min(ids.len()), rule));
        }
        if row.top > MOST_TOP {
            let rule = format!("at most {MOST_TOP}");
            return Err(extent(
                "rows",
                "most probable tokens",
                row.top as usize,
                rule,
            ));
        }
    }
    let results = out.par_chunks_mut(LOG_PROBS as usize);
    results.zip(rows).for_each(|(out, row)| {
        let logits = &logits[row.row as usize * vocabulary..][..vocabulary];
        of_row(logits, ids[row.row as usize], row.top as usize, out);
    });
    Ok(())
}

fn of_row(logits: &[f32], token: u32, top: usize, out: &mut [LogProb]) {
    let order = |token: u32| (Reverse(key(logits[token as usize])), token);
    let mut tokens: Vec<u32> = (0..logits.len() as u32).collect();
    let most = top.clamp(1, tokens.len());
    if most < tokens.len() {
        tokens.select_nth_unstable_by_key(most - 1, |&token| order(token));
        tokens.truncate(most);
    }
    tokens.sort_unstable_by_key(|&token| order(token));
    let largest = logits[tokens[0] as usize];
    let weight = |&logit: &f32| match logit {
        logit if logit.is_nan() => 0.0,
        logit if logit == largest => 1.0,
        logit => f64::from(logit - largest).exp(),
    };
    let log_sum = logits.iter().map(weight).sum::<f64>().ln() as f32;
    let result = |token: u32| LogProb {
        token,
        value: logits
            .get(token as usize)
            .map_or(f32::NAN, |logit| logit - largest - log_sum),
    };
    out[0] = result(token);
    for (rank, out) in out[1..=top].iter_mut().enumerate() {
        *out = match tokens.get(rank) {
            Some(&token) => result(token),
            None => LogProb {
                token: NO_TOKEN,
                value: f32::NEG_INFINITY,
            },
        };
    }
}
