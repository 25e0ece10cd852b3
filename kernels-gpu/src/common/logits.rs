//! Masks and transforms of logits in tensor-core accumulators; for the order of their elements see
//! [`softmax`](super::softmax).

use cuda_std::{math::fma, misc, warp};

use crate::common::{
    tree::descends,
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

/// Sets keys of other branches of a tree to −∞. `key` gives the position of the lane's first key in each group of 8
/// columns, `row` a row's position and ancestors.
///
/// A loop that is not unrolled first collects one bit per key: unrolled, it needs more registers than the kernels have.
#[inline(always)]
pub fn hide_other_branches<const S: usize>(
    s: &mut [f32; S],
    key: impl Fn(u32) -> i32,
    row: impl Fn(usize) -> (i32, u64),
) {
    const { assert!(S <= 64) };
    let mut h = 0;
    while h < 2 {
        let (position, ancestors) = row(h);
        let (mut hidden, mut group) = (0_u32, 0);
        let groups = misc::opaque(S as u32 / 4);
        while group < groups {
            let key = key(group);
            let other = |key| u32::from(!descends(ancestors, position, key));
            hidden |= (other(key) | other(key + 1) << 1) << (2 * group);
            group += 1;
        }
        let mut i = 0;
        while i < S / 2 {
            if hidden >> i & 1 != 0 {
                s[4 * (i / 2) + 2 * h + i % 2] = f32::NEG_INFINITY;
            }
            i += 1;
        }
        h += 1;
    }
}

/// The same for a block of consecutive keys from `begin` on.
#[inline(always)]
pub fn hide_strangers_from<const S: usize>(
    s: &mut [f32; S],
    begin: i32,
    row: impl Fn(usize) -> (i32, u64),
) {
    let column = begin + first_column();
    hide_other_branches(s, |group| column + 8 * group as i32, row);
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
