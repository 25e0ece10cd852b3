//! A token from each row of logits.

use kernels_gpu::{
    abi::DrawParams,
    step::sample::{fall, key, share, weight},
};
use rayon::prelude::*;

use crate::{
    Error,
    step::Draw,
    tensor::{Element, ShapeError},
};

/// Draws a token from each row of `logits` (`[rows, vocabulary]`), as the row's [`Sampling`](crate::step::Sampling)
/// says.
///
/// ```
/// use tandem_attn::step::{Sampling, cpu::sample};
///
/// let logits = [0.0_f32, 3.0, 1.0, 2.0, 2.0, -1.0];
/// let hot = Sampling { temperature: 1.0, top_k: 2, seed: 7, ..Sampling::GREEDY };
/// let mut ids = [0; 2];
/// sample(&logits, 3, &[Sampling::GREEDY.draw(0)?, hot.draw(0)?], &mut ids)?;
/// assert_eq!(ids[0], 1);
/// assert!(ids[1] < 2);
/// # Ok::<(), tandem_attn::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`], [`Error::Extent`]; nothing is written then.
pub fn sample<T: Element>(
    logits: &[T],
    vocabulary: usize,
    draws: &[Draw],
    ids: &mut [u32],
) -> Result<(), Error> {
    super::rows_of("logits", logits.len(), vocabulary)?;
    let (shape, expected) = ("[rows, vocabulary]", draws.len() * vocabulary);
    ShapeError::length("logits", logits.len(), shape, expected)?;
    ShapeError::length("ids", ids.len(), "[rows]", draws.len())?;
    let rows = logits.par_chunks(vocabulary).zip(draws);
    ids.par_iter_mut().zip(rows).for_each(|(id, (row, draw))| {
        let row: Vec<f32> = row.iter().map(|x| x.to_f32()).collect();
        *id = choose(&row, &draw.0);
    });
    Ok(())
}

fn choose(logits: &[f32], draw: &DrawParams) -> u32 {
    let keys: Vec<u32> = logits.iter().map(|&logit| key(logit)).collect();
    let largest = *keys.iter().max().expect("a vocabulary has tokens");
    let first = keys
        .iter()
        .position(|&key| key == largest)
        .expect("it is one");
    if draw.scale == 0.0 || !logits[first].is_finite() {
        return first as u32;
    }
    let weigh = |logit: f32| weight(logit, logits[first], draw.scale);
    let mut weights: Vec<u32> = logits.iter().map(|&logit| weigh(logit)).collect();
    // Logits whose keys are below this one are dropped.
    let mut least = 0;
    let k = draw.top_k as usize;
    if k > 0 && k < keys.len() {
        let mut keys = keys.clone();
        let (_, kth, _) = keys.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
        least = *kth;
    }
    if draw.top_p > 0 {
        let pairs = keys
            .iter()
            .zip(&weights)
            .map(|(&key, &weight)| (key, weight));
        let mut staying: Vec<_> = pairs
            .filter(|&(key, weight)| key >= least && weight > 0)
            .collect();
        let all = staying.iter().map(|&(_, weight)| u64::from(weight)).sum();
        staying.sort_unstable_by_key(|&(key, _)| std::cmp::Reverse(key));
        let (needed, mut sum) = (share(all, draw.top_p), 0);
        for (key, weight) in staying {
            sum += u64::from(weight);
            if sum >= needed {
                least = key;
                break;
            }
        }
    }
    for (weight, &key) in weights.iter_mut().zip(&keys) {
        if key < least || *weight < draw.min_weight {
            *weight = 0;
        }
    }
    let sum = weights.iter().map(|&weight| u64::from(weight)).sum();
    let mut left = fall(sum, draw.random);
    for (id, &weight) in weights.iter().enumerate() {
        match left.checked_sub(weight.into()) {
            Some(rest) => left = rest,
            None => return id as u32,
        }
    }
    unreachable!("the random number is below the sum")
}
