//! Merging partial states, row by row.

use kernels_gpu::{
    abi::MergeRow,
    state::{Softmax, natural},
};
use rayon::prelude::*;

use crate::{
    Error,
    exec::check_merged_heads,
    tensor::{Element, ShapeError},
};

/// Partial states in host memory: one for each slot, all query heads.
#[derive(Clone, Copy, Debug)]
pub struct Partials<'a> {
    /// `[slots, q_heads, head_dim_v]`, normalised.
    pub out: &'a [f32],
    /// `[slots, q_heads]`, base 2; −∞ where a state saw no key (its output is not read then).
    pub lse: &'a [f32],
    /// Query heads.
    pub q_heads: usize,
    /// Head dimension of values and outputs, a multiple of 8.
    pub head_dim_v: usize,
}

/// Combines the states of each row in the order in which its slots are listed.
///
/// `out` is `[tokens, q_heads, head_dim_v]` and `lse`, if wanted, `[tokens, q_heads]` in natural log. Only
/// the tokens that `rows` names are written; no two rows may name one token. A row without slots gets
/// output 0 and LSE −∞.
///
/// ```
/// use tandem_attn::{abi::MergeRow, exec::cpu::{Partials, merge_states}};
///
/// // Two states of one head with equal weight: the mean, and one more bit of log-sum.
/// let (out, lse) = ([[1.0; 8], [3.0; 8]].concat(), [5.0, 5.0]);
/// let partials = Partials { out: &out, lse: &lse, q_heads: 1, head_dim_v: 8 };
/// let row = MergeRow { token: 0, slots_begin: 0, slots: 2, ..Default::default() };
/// let (mut merged, mut merged_lse) = ([0.0_f32; 8], [0.0]);
/// merge_states(&partials, &[row], &[0, 1], &mut merged, Some(&mut merged_lse))?;
/// assert_eq!(merged, [2.0; 8]);
/// assert_eq!(merged_lse, [6.0 * std::f32::consts::LN_2]);
/// # Ok::<(), tandem_attn::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`], [`Error::HeadDim`] or [`Error::IndexOutOfRange`]; nothing is written then.
pub fn merge_states<T: Element>(
    partials: &Partials<'_>,
    rows: &[MergeRow],
    merge_slots: &[u32],
    out: &mut [T],
    lse: Option<&mut [f32]>,
) -> Result<(), Error> {
    let tokens = check(partials, rows, merge_slots, out.len(), lse.as_deref())?;
    let (heads, dim) = (partials.q_heads, partials.head_dim_v);

    // Rows are distributed by output token, so that threads own what they write.
    let mut row_of = vec![None; tokens];
    for row in rows {
        row_of[row.token as usize] = Some(row);
    }
    let mut no_lse = Vec::new();
    let wants_lse = lse.is_some();
    let lse = lse.unwrap_or_else(|| {
        no_lse.resize(tokens * heads, 0.0);
        &mut no_lse
    });
    out.par_chunks_mut(heads * dim)
        .zip(lse.par_chunks_mut(heads))
        .zip(row_of)
        .for_each_init(
            || vec![0.0; dim],
            |merged, ((out, lse), row)| {
                let Some(row) = row else { return };
                let slots = &merge_slots[row.slots_begin as usize..][..row.slots as usize];
                for (head, (out, lse)) in out.chunks_exact_mut(dim).zip(lse).enumerate() {
                    let log = merge_head(partials, slots, head, merged);
                    for (out, &x) in out.iter_mut().zip(&*merged) {
                        *out = T::from_f32(x);
                    }
                    if wants_lse {
                        *lse = natural(log);
                    }
                }
            },
        );
    Ok(())
}

/// Merges one head into `merged`; returns the log-sum, base 2.
fn merge_head(partials: &Partials<'_>, slots: &[u32], head: usize, merged: &mut [f32]) -> f32 {
    let dim = partials.head_dim_v;
    let states = slots.iter().map(|&slot| {
        let state = slot as usize * partials.q_heads + head;
        (partials.lse[state], &partials.out[state * dim..][..dim])
    });
    let mut softmax = Softmax::EMPTY;
    for (log, _) in states.clone() {
        let _ = softmax.raise(log); // nothing is accumulated yet
    }
    merged.fill(0.0);
    for (log, out) in states {
        if log == f32::NEG_INFINITY {
            continue;
        }
        let weight = softmax.weight(log);
        softmax.sum += weight;
        for (merged, x) in merged.iter_mut().zip(out) {
            *merged += weight * x;
        }
    }
    let norm = softmax.norm();
    merged.iter_mut().for_each(|x| *x *= norm);
    softmax.lse()
}

/// Returns the number of output tokens.
fn check(
    partials: &Partials<'_>,
    rows: &[MergeRow],
    merge_slots: &[u32],
    out: usize,
    lse: Option<&[f32]>,
) -> Result<usize, Error> {
    let &Partials {
        q_heads,
        head_dim_v,
        ..
    } = partials;
    check_merged_heads("partial_out", q_heads, head_dim_v)?;
    let (slots, tokens) = (partials.lse.len() / q_heads, out / (q_heads * head_dim_v));
    let lengths = [
        (
            "partial_lse",
            partials.lse.len(),
            "[slots, q_heads]",
            slots * q_heads,
        ),
        (
            "partial_out",
            partials.out.len(),
            "[slots, q_heads, head_dim_v]",
            slots * q_heads * head_dim_v,
        ),
        (
            "out",
            out,
            "[tokens, q_heads, head_dim_v]",
            tokens * q_heads * head_dim_v,
        ),
        (
            "lse",
            lse.map_or(tokens * q_heads, <[f32]>::len),
            "[tokens, q_heads]",
            tokens * q_heads,
        ),
    ];
    for (name, got, shape, expected) in lengths {
        ShapeError::length(name, got, shape, expected)?;
    }
    let mut written = vec![false; tokens];
    for (index, row) in rows.iter().enumerate() {
        let end = u64::from(row.slots_begin) + u64::from(row.slots);
        if end > merge_slots.len() as u64 {
            return Err(Error::IndexOutOfRange {
                array: "rows (end of slots)",
                index,
                got: end.into(),
                limit: merge_slots.len() as u64 + 1,
                of: "entries of merge_slots",
            });
        }
        match written.get_mut(row.token as usize) {
            Some(written) if !*written => *written = true,
            Some(_) => {
                return Err(Error::WrittenTwice {
                    array: "rows",
                    index,
                    got: row.token.into(),
                });
            }
            None => {
                return Err(Error::IndexOutOfRange {
                    array: "rows (token)",
                    index,
                    got: row.token.into(),
                    limit: tokens as u64,
                    of: "output tokens",
                });
            }
        }
    }
    match merge_slots.iter().position(|&slot| slot as usize >= slots) {
        Some(index) => Err(Error::IndexOutOfRange {
            array: "merge_slots",
            index,
            got: merge_slots[index].into(),
            limit: slots as u64,
            of: "partial states",
        }),
        None => Ok(tokens),
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    const OUT: [f32; 2 * 8] = [1.0; 16];
    const LSE: [f32; 2] = [0.0; 2];
    const TWO: Partials<'static> = Partials {
        out: &OUT,
        lse: &LSE,
        q_heads: 1,
        head_dim_v: 8,
    };

    fn row(token: u32, slots_begin: u32, slots: u32) -> MergeRow {
        MergeRow {
            token,
            slots_begin,
            slots,
            reserved: 0,
        }
    }

    #[test]
    fn rows_without_slots_are_empty_and_other_tokens_stay() {
        let mut out = [bf16::from_f32(7.0); 3 * 8];
        let mut lse = [7.0; 3];
        merge_states(
            &TWO,
            &[row(1, 0, 0), row(0, 0, 2)],
            &[0, 1],
            &mut out,
            Some(&mut lse),
        )
        .unwrap();
        assert!(out[..8].iter().all(|x| x.to_f32() == 1.0));
        assert!(out[8..16].iter().all(|x| x.to_f32() == 0.0));
        assert!(out[16..].iter().all(|x| x.to_f32() == 7.0));
        assert_eq!(lse, [std::f32::consts::LN_2, f32::NEG_INFINITY, 7.0]);
    }

    #[test]
    fn each_thing_that_is_wrong_has_its_error_and_nothing_is_written() {
        let call =
            |partials: Partials<'_>, rows: &[MergeRow], slots: &[u32], out: usize, lse: usize| {
                let (mut out, mut lse) = (vec![7.0_f32; out], vec![7.0_f32; lse]);
                let error =
                    merge_states(&partials, rows, slots, &mut out, Some(&mut lse)).unwrap_err();
                assert!(out.iter().chain(&lse).all(|&x| x == 7.0), "{error}");
                error
            };
        let good = [row(0, 0, 1)];
        let length = |error| match error {
            Error::Shape(ShapeError::Length { name, .. }) => name,
            other => panic!("{other:?}"),
        };
        let out_of_range = |error| match error {
            Error::IndexOutOfRange { array, got, .. } => (array, got),
            other => panic!("{other:?}"),
        };
        assert_eq!(
            length(call(
                Partials {
                    out: &OUT[..9],
                    ..TWO
                },
                &good,
                &[0],
                16,
                2
            )),
            "partial_out"
        );
        assert_eq!(
            length(call(
                Partials {
                    lse: &[0.0],
                    q_heads: 2,
                    ..TWO
                },
                &good,
                &[0],
                16,
                2
            )),
            "partial_lse"
        );
        assert_eq!(length(call(TWO, &good, &[0], 15, 1)), "out");
        assert_eq!(length(call(TWO, &good, &[0], 16, 1)), "lse");
        let narrow = Partials {
            head_dim_v: 4,
            ..TWO
        };
        assert!(matches!(
            call(narrow, &good, &[0], 16, 2),
            Error::HeadDim {
                got: 4,
                multiple: 8,
                ..
            }
        ));
        let headless = Partials { q_heads: 0, ..TWO };
        assert!(matches!(
            call(headless, &good, &[0], 16, 2),
            Error::Extent { got: 0, .. }
        ));
        assert_eq!(
            out_of_range(call(TWO, &[row(2, 0, 1)], &[0], 16, 2)),
            ("rows (token)", 2)
        );
        assert_eq!(
            out_of_range(call(TWO, &[row(0, 0, 2)], &[0], 16, 2)),
            ("rows (end of slots)", 2)
        );
        assert_eq!(
            out_of_range(call(TWO, &[row(0, u32::MAX, 2)], &[0], 16, 2)),
            ("rows (end of slots)", 1 + (1 << 32))
        );
        assert_eq!(
            out_of_range(call(TWO, &good, &[2], 16, 2)),
            ("merge_slots", 2)
        );
        let twice = [row(0, 0, 1), row(0, 0, 1)];
        assert!(matches!(
            call(TWO, &twice, &[0], 16, 2),
            Error::WrittenTwice {
                index: 1,
                got: 0,
                ..
            }
        ));
    }
}
