//! Masks and transforms of logits in tensor-core accumulators; for the order of their elements see
//! [`softmax`](super::softmax).

use cuda_std::{math::fma, warp};

use crate::common::{
    masks::KeyMask,
    variant::{Hook, Pair, Variant},
};

/// Column of a thread's first element, counted in keys from the block's first.
#[inline(always)]
fn first_column() -> i32 {
    (2 * (warp::lane_id() % 4)) as i32
}

/// Sets keys after `last` to −∞, for each of a thread's two rows; `begin` is the block's first key.
#[inline(always)]
pub fn hide_after<const S: usize>(s: &mut [f32; S], begin: i32, last: [i32; 2]) {
    let last = last.map(|last| last - begin - first_column());
    let mut i = 0;
    while i < S {
        if (8 * (i / 4) + i % 2) as i32 > last[i / 2 % 2] {
            s[i] = f32::NEG_INFINITY;
        }
        i += 1;
    }
}

/// Sets keys before `first` to −∞, for each of a thread's two rows.
#[inline(always)]
pub fn hide_before<const S: usize>(s: &mut [f32; S], begin: i32, first: [i32; 2]) {
    let first = first.map(|first| first - begin - first_column());
    let mut i = 0;
    while i < S {
        if ((8 * (i / 4) + i % 2) as i32) < first[i / 2 % 2] {
            s[i] = f32::NEG_INFINITY;
        }
        i += 1;
    }
}

/// Sets keys that the rows' masks hide to −∞; `begin` is the block's first key, `row` gives a row's position and mask. `skips`: whether
/// columns that all rows of the warp see are skipped. Some kernels then have too few registers.
///
/// # Safety
/// Whole warps, and the masks are those of the launch.
#[inline(always)]
pub unsafe fn hide_masked<const S: usize>(
    s: &mut [f32; S],
    begin: i32,
    row: impl Fn(usize) -> (i32, KeyMask),
    skips: bool,
) {
    // The elements of a row for which 64 bits suffice: two of each eight columns, 57 columns apart at most.
    const AT_ONCE: usize = 16;
    let mut h = 0;
    while h < 2 {
        let (position, mask) = row(h);
        let last = begin + first_column() + 57;
        let mut first = 0;
        while first < S / 2 {
            // SAFETY: a row's mask.
            let bits = unsafe { mask.bits(position - last - 4 * first as i32) };
            // SAFETY: whole warps.
            let any = !skips || unsafe { warp::warp_vote_any(warp::FULL_MASK, bits != u64::MAX) };
            let mut i = 0;
            while any && i < AT_ONCE && first + i < S / 2 {
                let before_last = 57 - (8 * (i / 2) + i % 2);
                if bits >> before_last & 1 == 0 {
                    s[4 * ((first + i) / 2) + 2 * h + i % 2] = f32::NEG_INFINITY;
                }
                i += 1;
            }
            first += AT_ONCE;
        }
        h += 1;
    }
}

/// A row's query paired with the lane's first key of a block.
#[inline(always)]
fn first_pair(at: &Pair, begin: i32) -> Pair {
    // A block may begin before key 0: those keys wrap around and are hidden.
    let key = begin + first_column();
    Pair {
        key: key as u32,
        distance: (at.position - key) as f32,
        ..*at
    }
}

/// The pair of an accumulator's element; `at` holds each row's pair with the lane's first key.
#[inline(always)]
fn pair_of(at: &[Pair; 2], element: usize) -> Pair {
    at[element / 2 % 2].further((8 * (element / 4) + element % 2) as u32)
}

/// Sets keys that the variant hides to −∞; `at` holds the query of each row (`key` is filled in here).
#[inline(always)]
pub fn mask<V: Variant, const S: usize>(s: &mut [f32; S], variant: &V, begin: i32, at: [Pair; 2]) {
    let at = at.map(|at| first_pair(&at, begin));
    let mut i = 0;
    while i < S {
        let pair = pair_of(&at, i);
        if !variant.visible(pair).plain() {
            s[i] = f32::NEG_INFINITY;
        }
        i += 1;
    }
}

/// A bias that is linear in the distance, at a block's first key: the [shift](super::softmax::Shift) of logits to which the
/// products have added the rest.
#[inline(always)]
pub fn bias_of_first(begin: i32, at: &[Pair; 2]) -> [f32; 2] {
    at.map(|at| at.of_row * (at.position - begin) as f32)
}

/// Adds a bias that is linear in the distance, relative to its value at the lane's first key of the block. Returns that
/// value: the [shift](super::softmax::Shift) that is still to be added to the logits.
#[inline(always)]
pub fn lean<const S: usize>(s: &mut [f32; S], begin: i32, at: [Pair; 2]) -> [f32; 2] {
    let mut i = 0;
    while i < S {
        let column = (8 * (i / 4) + i % 2) as f32;
        s[i] = fma(at[i / 2 % 2].of_row, -column, s[i]);
        i += 1;
    }
    at.map(|at| at.of_row * first_pair(&at, begin).distance)
}

/// Applies [`Variant::logits`] to four logits of a row at a time.
#[inline(always)]
pub fn transform_fours<V: Variant, const S: usize>(
    s: &mut [f32; S],
    variant: &V,
    begin: i32,
    at: [Pair; 2],
) {
    const { assert!(S.is_multiple_of(8)) };
    let at = at.map(|at| first_pair(&at, begin));
    let mut i = 0;
    while i < S {
        // Those of a row are in pairs.
        let four = [i, i + 1, i + 4, i + 5];
        let pairs = four.map(|i| pair_of(&at, i));
        let logits = variant.logits(four.map(|i| s[i]), pairs).plain();
        let mut k = 0;
        while k < 4 {
            s[four[k]] = logits[k];
            k += 1;
        }
        i += if i % 4 == 2 { 6 } else { 2 };
    }
}

/// Applies [`Variant::logit`] to each logit.
#[inline(always)]
pub fn transform<V: Variant, const S: usize>(
    s: &mut [f32; S],
    variant: &V,
    begin: i32,
    at: [Pair; 2],
) {
    let at = at.map(|at| first_pair(&at, begin));
    let mut i = 0;
    while i < S {
        let pair = pair_of(&at, i);
        s[i] = variant.logit(s[i], pair).plain();
        i += 1;
    }
}
