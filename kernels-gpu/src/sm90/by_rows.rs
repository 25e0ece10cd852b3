//! Copies of keys and values one by one, from pools that no tensor map describes: pages whose size is no multiple of 8, values
//! that lie otherwise than keys, and heads smaller than the kernel's of 8 bits, of 224 and of 240.
//!
//! The lanes of a loader copy keys by `cp.async`, 16 bytes each, to where TMA would have put them. A lane has the same
//! place in every key. It knows where one key of 32 is, and the others get this from it by a shuffle.

use cuda_std::{async_copy, misc, prelude::*};

use crate::abi::{DecodeParams, KvStrides};

/// Keys that are copied together: one for each lane, which knows where it is.
pub(super) const KEYS: u32 = 32;

/// Bytes of a copy.
pub(super) const VECTOR: u32 = 16;

/// How keys, or values, of one head lie in shared memory: 8 next to each other, line by line.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    /// Bytes of a key.
    pub key: u32,
    /// Bytes of an element.
    pub element: u32,
}

impl Rows {
    /// Vectors of a line: 128 bytes, or a whole key. As many lanes copy a key. (With half as many, and two copies for an
    /// address, 8-bit keys took 1.07 to 1.18 times as long.)
    const fn line(self) -> u32 {
        if self.key < 8 * VECTOR {
            self.key / VECTOR
        } else {
            8
        }
    }

    /// Lines of a key.
    const fn lines(self) -> u32 {
        self.key / VECTOR / self.line()
    }

    /// Vectors of a slab of 64 elements.
    const fn slab(self) -> u32 {
        64 * self.element / VECTOR
    }

    /// Keys that a warp copies at once.
    const fn at_once(self) -> u32 {
        32 / self.line()
    }

    /// Which of [`KEYS`] keys a lane has to find: one of those that it then copies with the lanes of the same key.
    #[inline(always)]
    pub const fn key_of(self, lane: u32) -> u32 {
        lane % self.line() * self.at_once() + lane / self.line()
    }

    /// What the swizzle of tensor maps adds to the place of a vector in its line: lines of 128 bytes have it by their place
    /// in a group of 8 keys, of 64 bytes by half of that.
    const fn swizzle(self, key: u32) -> u32 {
        let of_key = if self.line() == 8 { key } else { key / 2 };
        of_key % self.line()
    }
}

/// The most lines of a key: 256 elements of 16 bits.
const LINES: usize = 4;

/// A lane's place in each key.
#[derive(Clone, Copy)]
pub(super) struct Column {
    rows: Rows,
    /// Bytes from the beginning of a key in the pool to the lane's vector in the first line, and from line to line.
    pub from: u32,
    step: u32,
    /// Bytes to copy of each line: 0 behind the head's columns, and if there are no keys. Zeros are filled in there.
    valid: [u32; LINES],
    /// Where the lane's vector of the first of its keys goes.
    to: u32,
}

impl Column {
    /// The lane's place, if there are `any` keys.
    #[inline(always)]
    pub fn new(p: &DecodeParams, rows: Rows, lane: u32, any: bool) -> Self {
        let (key, vector) = (lane / rows.line(), lane % rows.line());
        let (slab, in_slab) = (vector / rows.slab(), vector % rows.slab());
        // A line of 16-bit elements is a slab, of 8-bit elements two.
        let slabs = 8_u32.div_ceil(rows.slab());
        let (first, step) = (slab * p.slab_step + in_slab, slabs * p.slab_step);
        let mut valid = [0; LINES];
        let mut line = 0;
        while line < rows.lines() {
            if any && first + line * step < p.vectors {
                valid[line as usize] = VECTOR;
            }
            line += 1;
        }
        Self {
            rows,
            from: first * VECTOR,
            step: step * VECTOR,
            valid,
            to: (key * rows.line() + (vector ^ rows.swizzle(key))) * VECTOR,
        }
    }

    /// Copies [`KEYS`] keys from each pool to its target. `places` are the vectors in the pools before the
    /// [lane's key](Rows::key_of), and `pools` the addresses of the lane's vector in their first keys.
    ///
    /// # Safety
    /// The lanes come together; the keys exist if there are any, and nobody accesses the targets.
    #[inline(always)]
    pub unsafe fn copy<const POOLS: usize>(
        &self,
        pools: [u64; POOLS],
        places: [u32; POOLS],
        targets: [u32; POOLS],
        policy: u64,
    ) {
        let rows = self.rows;
        // Opaque: otherwise its sums for all copies are kept in registers from one call to the next.
        let own = misc::opaque(self.to);
        // ptxas 12.9 makes an illegal instruction of such a copy with a uniform register in its target, and a shuffle gives
        // another one.
        // SAFETY: the lanes come together.
        let targets =
            targets.map(|target| unsafe { warp::warp_shuffle_idx(warp::FULL_MASK, target, 0, 32) });
        let mut time = 0;
        while time < rows.line() {
            // The lane's first key is below the number of keys copied at once, a divisor of 8. So steps of that number are
            // steps of the group and of the swizzle.
            let first = time * rows.at_once();
            let (group, in_group) = (first / 8, first % 8);
            let to = group * 8 * rows.key
                + in_group * rows.line() * VECTOR
                + (own ^ rows.swizzle(in_group) * VECTOR);
            let mut i = 0;
            while i < POOLS {
                // SAFETY: the lanes come together.
                let place = unsafe {
                    warp::warp_shuffle_idx(warp::FULL_MASK, places[i], time, rows.line())
                };
                let from = pools[i] + u64::from(place) * u64::from(VECTOR);
                let mut line = 0;
                while line < rows.lines() {
                    // SAFETY: the caller's promise.
                    unsafe {
                        async_copy::copy_cg_hint_zfill(
                            targets[i] + to + line * 8 * rows.line() * VECTOR,
                            (from + u64::from(line * self.step)) as *const u8,
                            self.valid[line as usize],
                            policy,
                        );
                    }
                    line += 1;
                }
                i += 1;
            }
            time += 1;
        }
    }
}

/// Vectors in a pool before a key of a head.
#[inline(always)]
pub(super) fn place(strides: &KvStrides, page: u32, token: u32, head: u32) -> u32 {
    page * strides.page + token * strides.token + head * strides.head
}
