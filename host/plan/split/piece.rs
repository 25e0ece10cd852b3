//! A run of a draft's keys, and where it may end.

use std::ops::Range;

use crate::plan::draft::{Draft, aligned};

/// A run of a draft's keys; becomes a work item.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    pub draft: u32,
    pub kv_begin: u32,
    pub kv_end: u32,
    /// Its place in launch order: 6 bits of the launch, then 36 of the order within it: a time or a section, and the
    /// cost.
    pub order: u64,
}

/// Unit of a time in `Piece::order`, in picoseconds.
const TIME: u64 = 64_000;

/// Maximum of a time in `Piece::order`, in units of 64 ns.
const TIME_MASK: u64 = (1 << 18) - 1;

/// Start times of pieces that are launched one after the other, whatever their cost, differ by at least this.
pub const NTH: u64 = TIME;

impl Piece {
    /// A piece with its place in launch order: by launch, then by start time, then the longest first.
    pub fn new(draft: u32, keys: Range<u32>, launch: u32, start: u64, cost: u64) -> Self {
        let [start, cost] = [start, cost].map(|ps| (ps / TIME).min(TIME_MASK));
        Self {
            draft,
            kv_begin: keys.start,
            kv_end: keys.end,
            order: u64::from(launch) << 36 | start << 18 | (TIME_MASK - cost),
        }
    }

    /// Orders the piece by its section. The section takes the place of the start time, which must be 0.
    pub fn put_into(&mut self, section: u32) {
        self.order |= u64::from(section).min(TIME_MASK) << 18;
    }

    pub const fn launch(&self) -> u32 {
        (self.order >> 36) as u32
    }
}

/// A piece ends with a whole tile if that shortens it by at most 1/64.
const ROUNDED_BY: u64 = 64;

/// The last place at or before a key where a draft may be cut: between tiles if that shortens the piece only a little,
/// otherwise within a tile.
pub fn cut_before(draft: &Draft, key: u32) -> u32 {
    let alignment = draft.split_alignment();
    let mut step = aligned(draft.tile.n, alignment);
    while step > alignment && u64::from(step) * ROUNDED_BY > u64::from(key - draft.kv_begin) {
        step = aligned(step / 2, alignment);
    }
    match step.is_power_of_two() {
        true => key & !(step - 1),
        false => key / step * step,
    }
}
