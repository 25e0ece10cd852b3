//! The device code: adds biases, normalises heads, applies rotary embeddings and writes the results. And the entries.

use core::{f32::consts::TAU, mem::MaybeUninit};

use cuda_std::{
    math::{self, fma},
    prelude::*,
    shared,
};

#[cfg(feature = "quantise")]
use super::page::E4m3;
#[cfg(feature = "step")]
use super::page::Same;
use super::{
    THREADS,
    page::{Page, Place},
    threads,
};
use crate::{
    abi::QkvParams,
    common::{
        half::{self, Half},
        rotary::turned,
    },
    step::{Vector, at, begin, pack, squares, unpack},
};

/// Sine and cosine of a thread's 8 pairs.
type Sines = [[f32; 2]; 8];

/// The addresses of a thread's two vectors of a head.
type Two = [u64; 2];

/// One block of a kernel: each thread processes its part of `HEADS` heads.
///
/// Threads without a head load the first key head of the first token, which nobody writes, and write nothing. Loads
/// without conditions take fewer instructions.
///
/// # Safety
/// The parameters describe memory as [`QkvParams`] says, for threads with `HEADS` heads.
#[inline(always)]
unsafe fn qkv<T: Half, P: Page, const HEADS: usize>(p: &QkvParams) {
    let index = thread::block_idx_x() * threads(HEADS as u32) + thread::thread_idx_x();
    let lane = index & ((1 << p.lanes_log) - 1);
    let (token, group) = p.groups.div_rem(index >> p.lanes_log);
    // Many threads share the sines of a token. Single ones, of few tokens, do not wait for each other.
    let are_shared = HEADS > 1;
    let (all, mut row) = ([token, group], 0);
    let exists = token < p.tokens && lane < p.lanes;
    let heads = Heads::<HEADS>::of(p, group);
    let is_turned = lane < p.turned;
    // Lanes that do not exist load vectors that do.
    let [first, apart] = match () {
        () if !exists => [0, 1],
        () if is_turned && p.interleaved == 0 => [lane, p.turned],
        () => [2 * lane, 1],
    };
    let vectors = 2 * p.lanes;
    let from = heads.first * vectors + first;
    let (token, from) = if exists {
        (token, from)
    } else {
        (0, p.q_heads * vectors)
    };
    let next = heads.apart * vectors;
    let two = |base: u64, from: u32, i: usize| {
        let a = from + i as u32 * next;
        [at(base, a.into()), at(base, (a + apart).into())]
    };

    // What a branch sets is read only in branches with the same condition.
    let mut sines = MaybeUninit::<Sines>::uninit();
    let mut biases = MaybeUninit::<[[[u32; 4]; 2]; HEADS]>::uninit();
    let mut words = [[[0; 4]; 2]; HEADS];
    let mut slot = u32::MAX;
    let slot_at = (p.slots + u64::from(token) * 4) as *const u32;
    // SAFETY: the heads are in the tensors, and the token has a slot. Lanes that are not rotated read the angles of the
    // last that is.
    unsafe {
        // With two heads this waits until registers are free. There it is an ordinary load, which the compiler does not
        // move behind stores.
        if HEADS == 1 {
            slot = ptr::load_u32(slot_at);
        }
        // Opaque: the address of a vector is one instruction away from that of its token.
        let source = at(p.source, u64::from(token) * u64::from(p.source_token));
        let source = misc::opaque_u64(source);
        let mut i = 0;
        while i < HEADS {
            words[i] = two(source, from, i).map(|address| ptr::load_u32x4(address as *const u32));
            i += 1;
        }
        // With one head there are registers for its bias, which then arrives with the head.
        if p.bias != 0 && HEADS == 1 {
            biases.write([load(two(p.bias, from, 0)); HEADS]);
        }
        if p.turns != 0 && are_shared {
            row = share_sines(p, lane, all);
        } else if p.turns != 0 {
            let position = ptr::load_u32((p.positions + u64::from(token) * 4) as *const u32);
            sines.write(sines_of(
                p,
                if is_turned { lane } else { p.turned - 1 },
                position,
            ));
        }
    }

    let mut x = words.map(|words| words.map(unpack::<T>));
    if p.bias != 0 {
        let mut i = 0;
        // SAFETY: set under the same condition; the bias has these heads.
        let biases = unsafe {
            if HEADS == 1 {
                biases.assume_init()
            } else {
                // Opaque: offsets are computed again, instead of held in registers.
                let from = misc::opaque(from);
                let mut biases = [[[0; 4]; 2]; HEADS];
                while i < HEADS {
                    biases[i] = load(two(p.bias, from, i));
                    i += 1;
                }
                biases
            }
        };
        i = 0;
        while i < HEADS {
            add::<T>(&mut x[i], biases[i]);
            i += 1;
        }
    }
    if HEADS > 1 && !heads.are_queries {
        // SAFETY: the token has a slot.
        slot = unsafe { ptr::load_u32(slot_at) };
    }
    if p.q_weight != 0 {
        let weights = if heads.are_queries {
            p.q_weight
        } else {
            p.k_weight
        };
        // SAFETY: there are weights for a head. All lanes come here.
        unsafe {
            let weights = load([
                at(weights, first.into()),
                at(weights, (first + apart).into()),
            ]);
            let sums = x.map(|x| squares(&x[0]) + squares(&x[1]));
            let sums = sums_of_lanes(sums.map(|sum| if exists { sum } else { 0.0 }), p.lanes_log);
            let inverse = sums.map(|sum| math::rsqrt(sum * p.inverse_dim + p.eps));
            scale::<T, HEADS>(&mut x, &heads, inverse, p.offset, weights);
        }
    }
    // Only here: warps do not wait for the sines while they have something to do.
    if p.turns != 0 && are_shared {
        thread::sync_threads();
    }
    if p.turns != 0 && is_turned && exists {
        // SAFETY: set under the same condition.
        let sines = unsafe {
            if are_shared {
                shared_sines(p, row)
            } else {
                sines.assume_init()
            }
        };
        // Opaque: compared again, instead of held in a predicate.
        if misc::opaque(p.interleaved) != 0 {
            turn_each(&mut x, &heads, &sines, true);
        } else {
            turn_each(&mut x, &heads, &sines, false);
        }
    }
    // SAFETY: all lanes come here. Only this thread writes these vectors of the output and of the pool, as no two tokens
    // share a slot.
    unsafe {
        if heads.are_queries && exists {
            let to = u64::from(token) * u64::from(p.q_token)
                + u64::from(heads.first) * u64::from(p.q_head);
            let mut to = misc::opaque_u64(at(p.q, to));
            let mut i = 0;
            while i < HEADS {
                if i == 0 || heads.first + 1 < p.q_heads {
                    let [a, b] = [at(to, first.into()), at(to, (first + apart).into())];
                    ptr::store_u32x4(a as *mut u32, pack::<T>(x[i][0]));
                    ptr::store_u32x4(b as *mut u32, pack::<T>(x[i][1]));
                    to = at(to, p.q_head.into());
                }
                i += 1;
            }
        }
        let exists_in_pool = exists && slot < p.pool_slots;
        let (page, offset) = p.page_size.div_rem(if exists_in_pool { slot } else { 0 });
        let place = Place {
            page,
            offset,
            head: heads.of_kv(p),
            token,
            first,
            apart,
            exists: exists_in_pool && !heads.are_queries,
            leads: first == 0,
        };
        P::append::<T, HEADS>(p, &place, heads.first_is_key, &x);
    }
}

/// The heads of a thread: a query head or two neighbouring ones, or a key head and the value head of the same index, or
/// one of the two.
struct Heads<const HEADS: usize> {
    are_queries: bool,
    /// If it is not a query.
    first_is_key: bool,
    /// The first, and the distance to the second.
    first: u32,
    apart: u32,
}

impl<const HEADS: usize> Heads<HEADS> {
    #[inline(always)]
    fn of(p: &QkvParams, group: u32) -> Self {
        let of_queries = p.q_heads.div_ceil(HEADS as u32);
        let are_queries = group < of_queries;
        let after = group.wrapping_sub(of_queries);
        let first_is_key = HEADS == 2 || after < p.kv_heads;
        Self {
            are_queries,
            first_is_key,
            first: if are_queries {
                group * HEADS as u32
            } else {
                p.q_heads + after
            },
            apart: if are_queries { 1 } else { p.kv_heads },
        }
    }

    /// The index of the KV head, computed again: a register less until then.
    #[inline(always)]
    fn of_kv(&self, p: &QkvParams) -> u32 {
        let first = misc::opaque(self.first);
        first - p.q_heads - if self.first_is_key { 0 } else { p.kv_heads }
    }

    /// Whether a head is normalised and rotated.
    #[inline(always)]
    fn is_turned(&self, head: usize) -> bool {
        self.are_queries || (head == 0 && self.first_is_key)
    }
}

/// Sine and cosine of a lane's pairs at a position.
///
/// # Safety
/// The lane has 8 pairs, and the table has their angles.
#[inline(always)]
unsafe fn sines_of(p: &QkvParams, lane: u32, position: u32) -> Sines {
    let turns = (p.turns + u64::from(lane) * 64) as *const u32;
    let mut sines = [[0.0; 2]; 8];
    let mut i = 0;
    while i < 4 {
        // SAFETY: the caller's promise.
        let words = unsafe { ptr::load_nc_u32x4(turns.add(4 * i)) };
        sines[2 * i] = sine_cosine(p, [words[0], words[1]], position);
        sines[2 * i + 1] = sine_cosine(p, [words[2], words[3]], position);
        i += 1;
    }
    sines
}

/// Sine and cosine of a pair at a position, times their magnitude.
#[inline(always)]
fn sine_cosine(p: &QkvParams, turn: [u32; 2], position: u32) -> [f32; 2] {
    // Between −π and π. The conversion rounds to 24 bits.
    let angle = turned(turn, position) as i32 as f32 * (TAU / 4_294_967_296.0);
    [
        math::sin(angle) * p.magnitude,
        math::cos(angle) * p.magnitude,
    ]
}

/// Computes the sines of the block's tokens in shared memory, each once: of the groups of a token that the block has,
/// each computes a part of the pairs of its lanes. Returns the address of those of the thread's lane, for
/// [`shared_sines`].
///
/// # Safety
/// The block's memory has [`sine_bytes`](super::sine_bytes).
#[inline(always)]
unsafe fn share_sines(p: &QkvParams, lane: u32, [token, group]: [u32; 2]) -> u32 {
    let groups = THREADS >> p.lanes_log;
    let in_block = thread::thread_idx_x() >> p.lanes_log;
    let first_token = p.groups.div(thread::block_idx_x() * groups);
    // The index among the groups of the token that the block has, and their number.
    let rank = if group < in_block { group } else { in_block };
    let [after, until] = [p.groups.get() - group, groups - in_block];
    let count = rank + if after < until { after } else { until };
    let of_token = (token - first_token) * p.turned * 64;
    let row = shared::dynamic_shared_address() + of_token + lane * 16;
    // SAFETY: the token exists, and the lane has 8 pairs. Each pair is written by one thread.
    unsafe {
        let mut pair = rank;
        if token < p.tokens && lane < p.turned && pair < 8 {
            let position = ptr::load_u32((p.positions + u64::from(token) * 4) as *const u32);
            while pair < 8 {
                let turn = p.turns + u64::from(lane * 8 + pair) * 8;
                let turn = ptr::load_nc_u32x2(turn as *const u32);
                let to = row + pair / 2 * p.turned * 16 + pair % 2 * 8;
                shared::store_f32x2(to, sine_cosine(p, turn, position));
                pair += count;
            }
        }
    }
    row
}

/// The sines of a lane, from where [`share_sines`] put them: neighbouring lanes load neighbouring vectors.
///
/// # Safety
/// The token exists, and the lane is rotated. A barrier of the block separates this from `share_sines`.
#[inline(always)]
unsafe fn shared_sines(p: &QkvParams, row: u32) -> Sines {
    let (mut sines, mut i) = ([[0.0; 2]; 8], 0);
    while i < 4 {
        // SAFETY: the caller's promise.
        let [a, b, c, d] = unsafe { shared::load_f32x4(row + i as u32 * p.turned * 16) };
        [sines[2 * i], sines[2 * i + 1]] = [[a, b], [c, d]];
        i += 1;
    }
    sines
}

/// The sums over groups of `1 << log` lanes, each of several numbers. The steps are unrolled: their distances are
/// constants of the shuffles.
///
/// # Safety
/// All lanes of the warp come here.
#[inline(always)]
unsafe fn sums_of_lanes<const N: usize>(mut x: [f32; N], log: u32) -> [f32; N] {
    let mut step = 5;
    while step > 0 {
        step -= 1;
        if log > step {
            let mut i = 0;
            while i < N {
                // SAFETY: the caller's promise.
                x[i] += unsafe { warp::warp_shuffle_xor(warp::FULL_MASK, x[i], 1 << step, 32) };
                i += 1;
            }
        }
    }
    x
}

/// Loads two vectors from read-only memory.
///
/// # Safety
/// The vectors exist.
#[inline(always)]
unsafe fn load(two: Two) -> [[u32; 4]; 2] {
    // SAFETY: the caller's promise.
    two.map(|at| unsafe { ptr::load_nc_u32x4(at as *const u32) })
}

#[inline(always)]
fn add<T: Half>(x: &mut [Vector; 2], bias: [[u32; 4]; 2]) {
    let bias = [unpack::<T>(bias[0]), unpack::<T>(bias[1])];
    let mut j = 0;
    while j < 8 {
        x[0][j] += bias[0][j];
        x[1][j] += bias[1][j];
        j += 1;
    }
}

/// Multiplies queries and keys by their factors and by the weights.
#[inline(always)]
fn scale<T: Half, const HEADS: usize>(
    x: &mut [[Vector; 2]; HEADS],
    heads: &Heads<HEADS>,
    mut inverse: [f32; HEADS],
    offset: f32,
    weights: [[u32; 4]; 2],
) {
    let weights = weights.map(unpack::<T>);
    let (mut offsets, mut i) = ([0.0; HEADS], 0);
    while i < HEADS {
        // Values are multiplied by 1: fewer instructions than a branch, as heads share the unpacked weights.
        (inverse[i], offsets[i]) = match heads.is_turned(i) {
            true => (inverse[i], offset * inverse[i]),
            false => (0.0, 1.0),
        };
        i += 1;
    }
    let mut j = 0;
    while j < 8 {
        i = 0;
        while i < HEADS {
            x[i][0][j] *= fma(weights[0][j], inverse[i], offsets[i]);
            x[i][1][j] *= fma(weights[1][j], inverse[i], offsets[i]);
            i += 1;
        }
        j += 1;
    }
}

#[inline(always)]
fn turn_each<const HEADS: usize>(
    x: &mut [[Vector; 2]; HEADS],
    heads: &Heads<HEADS>,
    sines: &Sines,
    interleaved: bool,
) {
    let mut i = 0;
    while i < HEADS {
        if heads.is_turned(i) {
            turn(&mut x[i], sines, interleaved);
        }
        i += 1;
    }
}

#[inline(always)]
fn turn(x: &mut [Vector; 2], sines: &Sines, interleaved: bool) {
    let mut i = 0;
    if interleaved {
        while i < 8 {
            let (vector, j) = (i / 4, 2 * (i % 4));
            let [sine, cosine] = sines[i];
            let (first, second) = (x[vector][j], x[vector][j + 1]);
            x[vector][j] = fma(first, cosine, -(second * sine));
            x[vector][j + 1] = fma(second, cosine, first * sine);
            i += 1;
        }
    } else {
        while i < 8 {
            let [sine, cosine] = sines[i];
            let (first, second) = (x[0][i], x[1][i]);
            x[0][i] = fma(first, cosine, -(second * sine));
            x[1][i] = fma(second, cosine, first * sine);
            i += 1;
        }
    }
}

#[cfg(feature = "step")]
macro_rules! entries {
    ($half:ident $element:literal { $($heads:literal, $blocks:expr;)* }) => { $( const _: () = {
        /// See the module's documentation.
        ///
        /// # Safety
        /// As [`qkv`].
        #[kernel(name = ["qkv_step_", $heads, "_", $element], max_threads = threads($heads), min_blocks = $blocks)]
        pub unsafe fn entry(params: QkvParams) {
            // SAFETY: the launch's promise.
            unsafe {
                begin();
                qkv::<half::$half, Same, $heads>(&params)
            }
        }
    }; )* };
}

#[cfg(feature = "step")]
table!(items entries);

#[cfg(feature = "quantise")]
macro_rules! quantising_entries {
    ($half:ident $element:literal { $($heads:literal, $blocks:expr;)* }) => { $( const _: () = {
        /// See the module's documentation.
        ///
        /// # Safety
        /// As [`qkv`].
        #[kernel(
            name = ["qkv_step_", $heads, "_", $element, "_e4m3"],
            max_threads = threads($heads),
            min_blocks = $blocks
        )]
        pub unsafe fn entry(params: QkvParams) {
            // SAFETY: the launch's promise.
            unsafe {
                begin();
                qkv::<half::$half, E4m3, $heads>(&params)
            }
        }
    }; )* };
}

#[cfg(feature = "quantise")]
table!(items quantising_entries);
