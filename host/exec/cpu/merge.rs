//! ⊕ over partial states, row by row.

use kernels_gpu::{
    abi::MergeRow,
    state::{Merger, State, natural},
};
use rayon::prelude::*;

use crate::{
    Error,
    tensor::{Element, ShapeError},
};

/// Elements of a head that are merged together: as many as one GPU thread takes.
const CHUNK: usize = 8;

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

    // Rows are handed out by output token, so that threads own what they write.
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
        .for_each(|((out, lse), row)| {
            let Some(row) = row else { return };
            let slots = &merge_slots[row.slots_begin as usize..][..row.slots as usize];
            for head in 0..heads {
                for begin in (0..dim).step_by(CHUNK) {
                    let merged = merge_chunk(partials, slots, head, begin);
                    for (to, x) in out[head * dim + begin..].iter_mut().zip(merged.out) {
                        *to = T::from_f32(x);
                    }
                    if wants_lse {
                        lse[head] = natural(merged.lse);
                    }
                }
            }
        });
    Ok(())
}

fn merge_chunk(partials: &Partials<'_>, slots: &[u32], head: usize, begin: usize) -> State<CHUNK> {
    let mut merger = Merger::EMPTY;
    for &slot in slots {
        let state = slot as usize * partials.q_heads + head;
        let mut out = [0.0; CHUNK];
        out.copy_from_slice(&partials.out[state * partials.head_dim_v + begin..][..CHUNK]);
        merger.push(State {
            out,
            lse: partials.lse[state],
        });
    }
    merger.finish()
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
    if head_dim_v == 0 || !head_dim_v.is_multiple_of(CHUNK) {
        return Err(Error::HeadDim {
            tensor: "partial_out",
            got: head_dim_v,
            multiple: CHUNK,
        });
    }
    if q_heads == 0 {
        return Err(Error::Extent {
            tensor: "partial_out",
            dimension: "query heads",
            got: 0,
            rule: "at least 1".into(),
        });
    }
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
        if got != expected {
            return Err(ShapeError::Length {
                name,
                got,
                shape,
                expected,
            }
            .into());
        }
    }
    let mut written = vec![false; tokens];
    for (index, row) in rows.iter().enumerate() {
        let end = u64::from(row.slots_begin) + u64::from(row.slots);
        if end > merge_slots.len() as u64 {
            return Err(Error::IndexOutOfRange {
                array: "rows (end of slots)",
                index,
                got: end,
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
                    got: row.token,
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
