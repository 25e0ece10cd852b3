//! The pieces in launch order.

use super::{launch::Launch, piece::Piece};

/// Bits of an entry of `LaunchOrder::order` that hold the index of the piece.
const PIECE_BITS: u32 = 22;

/// The most pieces of a plan.
pub const MAX_PIECES: usize = 1 << PIECE_BITS;

/// Where each piece is launched. Buffers are reused.
#[derive(Debug, Default)]
pub struct LaunchOrder {
    /// The place of each piece in launch order.
    pub place: Vec<u32>,
    /// For each launch in turn, the order key and the index of each of its pieces.
    order: Vec<u64>,
    /// For each launch, where its next piece goes.
    next: Vec<u32>,
}

impl LaunchOrder {
    /// Orders the pieces, and counts those of each launch.
    pub fn sort(&mut self, pieces: &[Piece], launches: &mut [Launch]) {
        let Self { place, order, next } = self;
        count(
            next,
            launches.len(),
            pieces.iter().map(|piece| piece.launch()),
        );
        for (launch, bounds) in launches.iter_mut().zip(next.windows(2)) {
            launch.pieces = bounds[1] - bounds[0];
        }
        place.clear();
        if pieces.is_sorted_by_key(|piece| piece.order) {
            place.extend(0..pieces.len() as u32);
            return;
        }
        order.clear();
        order.resize(pieces.len(), 0);
        for (index, piece) in pieces.iter().enumerate() {
            let at = &mut next[piece.launch() as usize];
            order[*at as usize] = piece.order << PIECE_BITS | index as u64;
            *at += 1;
        }
        let mut rest = order.as_mut_slice();
        for launch in launches.iter() {
            let (pieces, others) = rest.split_at_mut(launch.pieces as usize);
            pieces.sort_unstable(); // a no-op if all order keys are equal
            rest = others;
        }
        place.resize(pieces.len(), 0);
        for (at, &entry) in order.iter().enumerate() {
            place[entry as usize & (MAX_PIECES - 1)] = at as u32;
        }
    }
}

/// Counting sort: the index at which each of `buckets` begins, if there is one element for every key.
pub fn count(begins: &mut Vec<u32>, buckets: usize, keys: impl Iterator<Item = u32>) {
    begins.clear();
    begins.resize(buckets + 1, 0);
    for key in keys {
        begins[key as usize + 1] += 1;
    }
    for bucket in 0..buckets {
        begins[bucket + 1] += begins[bucket];
    }
}
