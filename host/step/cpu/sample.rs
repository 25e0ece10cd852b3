//! A token from each row of logits.

use kernels_gpu::{
    abi::DrawParams,
    step::{
        VECTOR,
        sample::{
            key, least_of,
            race::{Race, Scored},
            share, weight,
        },
    },
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
    if draw.scale == 0.0 {
        return first_of_largest(logits) as u32;
    }
    let rule = Rule::new(logits, draw);
    let race = Race::new(draw);
    let mut best: Option<(Scored, u32)> = None;
    for (group, some) in logits.chunks(GROUP).enumerate() {
        let mut x = [f32::NAN; GROUP];
        x[..some.len()].copy_from_slice(some);
        let largest = x.iter().copied().fold(f32::NAN, f32::max);
        if largest.is_nan() || !rule.keeps(largest) {
            continue;
        }
        let group = group as u32;
        // Most groups cannot have the largest score, whatever their other tokens are.
        if let Some((best, _)) = best
            && key(race.score(largest, race.bounds(group)[1])) < best.key
        {
            continue;
        }
        let mut weights = race.weights(&x, largest);
        for (weight, &logit) in weights.iter_mut().zip(&x) {
            if !rule.keeps(logit) {
                *weight = 0.0;
            }
        }
        let scored = race.scored(group, &x, &weights, largest);
        // Of equal scores that of the first group counts.
        if best.is_none_or(|(best, _)| (scored.key, scored.tie) > (best.key, best.tie)) {
            best = Some((scored, group));
        }
    }
    // Without numbers, the first token.
    best.map_or(0, |(scored, group)| group * GROUP as u32 + scored.place)
}

const GROUP: usize = VECTOR as usize;

/// −∞ is above NaN.
fn first_of_largest(logits: &[f32]) -> usize {
    let keys = logits.iter().map(|&logit| key(logit));
    let largest = keys.clone().max().expect("a vocabulary has tokens");
    keys.clone()
        .position(|key| key == largest)
        .expect("it is one")
}

/// Which tokens of a row are kept: those with at least this key.
struct Rule {
    least: u32,
}

impl Rule {
    fn new(logits: &[f32], draw: &DrawParams) -> Self {
        let mut rule = Self { least: 0 };
        let k = match draw.top_k as usize {
            k if k < logits.len() => k,
            _ => 0,
        };
        if k == 0 && draw.top_p == 0 && draw.min_weight == 0 {
            return rule;
        }
        let largest = logits[first_of_largest(logits)];
        // Of infinite logits the race takes the first.
        if !largest.is_finite() {
            return rule;
        }
        let mut keys: Vec<u32> = logits.iter().map(|&logit| key(logit)).collect();
        if k > 0 {
            let (_, kth, _) = keys.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
            rule.least = *kth;
        }
        if draw.top_p > 0 {
            let weight_of = |&logit: &f32| (key(logit), weight(logit, largest, draw.scale));
            let weighed = logits.iter().map(weight_of);
            let mut staying: Vec<_> = weighed
                .filter(|&(key, weight)| key >= rule.least && weight > 0)
                .collect();
            let all = staying.iter().map(|&(_, weight)| u64::from(weight)).sum();
            staying.sort_unstable_by_key(|&(key, _)| std::cmp::Reverse(key));
            let (needed, mut sum) = (share(all, draw.top_p), 0);
            for (key, weight) in staying {
                sum += u64::from(weight);
                if sum >= needed {
                    rule.least = key;
                    break;
                }
            }
        }
        if draw.min_weight > 0 {
            let heavy = least_of(draw.min_weight, largest, draw.inverse_scale);
            rule.least = rule.least.max(key(heavy));
        }
        rule
    }

    fn keeps(&self, logit: f32) -> bool {
        key(logit) >= self.least
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::Sampling;

    /// Groups are skipped only if they do not have the largest score.
    #[test]
    fn bounds_do_not_change_what_is_drawn() {
        let logits: Vec<f32> = (0..4000_u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 21) as f32)
            .collect();
        for temperature in [0.01, 0.3, 1.0, 1000.0] {
            let sampling = Sampling {
                temperature,
                ..Sampling::GREEDY
            };
            for position in 0..50 {
                let draw = sampling.draw(position).expect("a good sampling").0;
                let race = Race::new(&draw);
                let groups = logits.chunks(GROUP).enumerate().map(|(group, x)| {
                    let x: [f32; GROUP] = x.try_into().expect("a whole group");
                    let largest = x.iter().copied().fold(f32::NAN, f32::max);
                    let scored = race.scored(group as u32, &x, &race.weights(&x, largest), largest);
                    let first = std::cmp::Reverse(group);
                    (scored.key, scored.tie, first, scored.place)
                });
                let (_, _, group, place) = groups.max().expect("there are groups");
                let right = (group.0 * GROUP) as u32 + place;
                assert_eq!(choose(&logits, &draw), right);
            }
        }
    }
}
