//! The device code of a thread, from loads to stores, and the entries.

use core::mem::MaybeUninit;

use cuda_std::{math, prelude::*};

#[cfg(feature = "quantise")]
use super::page::E4m3;
#[cfg(feature = "step")]
use super::page::Same;
use super::{
    arithmetic::{Heads, add, load, of_lanes, scale, turn_each},
    page::{Page, Place},
    sines::{Sines, share_sines, shared_sines, sines_of},
    threads,
};
use crate::{
    abi::QkvParams,
    common::half::{self, Half},
    step::{at, begin, pack, squares, unpack},
};

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
            let sums = sums.map(|sum| if exists { sum } else { 0.0 });
            let sums = of_lanes(sums, p.lanes_log, |one, other| one + other);
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
            in_head: exists,
        };
        P::append::<T, HEADS>(p, &place, heads.first_is_key, &x);
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
