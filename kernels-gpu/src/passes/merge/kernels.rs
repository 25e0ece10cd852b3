//! The three merge kernels.

use cuda_std::{barrier, misc, prelude::*, shared, warp};

use super::{
    FEW, GROUP, LONG, MANY, SECTION, THREADS,
    slots::{Chunk, F32, NO_SLOT, Output, Parked, next_slots, wait},
};
use crate::{
    abi::MergeParams,
    common::{
        half::{Bf16, F16},
        state::Merger,
    },
};

/// One thread per chunk, for rows of at most one section.
///
/// # Safety
/// The parameters describe memory as [`MergeParams`] says; `out` has the type `O`.
#[inline(always)]
unsafe fn merge_many<O: Output>(params: &MergeParams) {
    // SAFETY: the caller's promises; `left` slots of the row are at `list`.
    unsafe {
        // Threads without a chunk wait, too: the launch behind this one waits only for this one, which therefore must not
        // end before the attention, even if it has nothing to merge.
        let Some(chunk) = Chunk::look_up(params, thread::index_1d()) else {
            wait();
            return;
        };
        let (mut list, mut left) = (chunk.list, chunk.slots);
        let mut next = next_slots::<1>(list, left);
        // Never true: no list starts with `NO_SLOT`. Reading the id keeps ptxas from moving its load behind the wait.
        if left > 0 && next[0][0] == NO_SLOT {
            return;
        }
        wait();
        let mut merger = Merger::EMPTY;
        while left > 0 {
            let [states] = chunk.place.load_all(next);
            left = left.saturating_sub(GROUP as u32);
            list = list.add(GROUP);
            merger.push_all(states);
            next = next_slots(list, left);
        }
        chunk.store::<O>(params, merger.finish());
    }
}

/// One thread per chunk, for rows with any number of slots.
///
/// # Safety
/// The parameters describe memory as [`MergeParams`] says; `out` has the type `O`; `parked` has room for a block.
#[inline(always)]
unsafe fn merge_long<O: Output>(params: &MergeParams, parked: Parked) {
    // SAFETY: the caller's promises; `slots` of the row are at `list`.
    unsafe {
        // Threads without a chunk wait, too: see `merge_many`.
        let Some(chunk) = Chunk::look_up(params, thread::index_1d()) else {
            wait();
            return;
        };
        let (mut done, slots) = (0, chunk.slots);
        let ids =
            |done: u32| next_slots::<1>(chunk.list.add(done as usize), slots.saturating_sub(done));
        let mut next = ids(done);
        // Never true: no list starts with `NO_SLOT`. Reading the id keeps ptxas from moving its load behind the wait.
        if slots > 0 && next[0][0] == NO_SLOT {
            return;
        }
        wait();
        let mut section = Merger::EMPTY;
        while done < slots {
            let [states] = chunk.place.load_all(next);
            done += GROUP as u32;
            section.push_all(states);
            // To save registers, the result of a row's previous sections is parked in shared memory while a section is
            // merged. Long rows are rare in large merges.
            if done % SECTION == 0 && done < slots {
                // Opaque: otherwise it stays in a register.
                let thread = misc::opaque(thread::thread_idx_x());
                let mut row = match done {
                    SECTION => Merger::EMPTY,
                    _ => parked.load(thread),
                };
                row.push(section.finish());
                parked.store(thread, &row);
                section = Merger::EMPTY;
            }
            next = ids(done);
        }
        if slots > SECTION {
            let mut row = parked.load(misc::opaque(thread::thread_idx_x()));
            row.push(section.finish());
            section = row;
        }
        chunk.store::<O>(params, section.finish());
    }
}

/// One lane per chunk; the warps of a block take the sections of its rows in turn.
///
/// # Safety
/// The parameters describe memory as [`MergeParams`] says; `out` has the type `O`; `parked` has room for a block.
#[inline(always)]
unsafe fn merge_few<O: Output>(params: &MergeParams, parked: Parked) {
    const GROUPS: usize = SECTION as usize / GROUP;
    let thread = thread::thread_idx_x();
    let (warp, lane, threads) = (thread / 32, thread % 32, thread::block_dim_x());
    let step = threads / 32 * SECTION;
    // SAFETY: the caller's promises; `slots` of the row are at `list`. All warps of a block have the same chunks, so
    // all threads reach the same barriers.
    unsafe {
        let chunk = Chunk::look_up(params, thread::block_idx_x() * 32 + lane);
        let slots = chunk.map_or(0, |chunk| chunk.slots);
        let list = chunk.map_or(core::ptr::null(), |chunk| chunk.list);
        let ids = |at: u32| {
            next_slots::<GROUPS>(list.wrapping_add(at as usize), slots.saturating_sub(at))
        };
        let mut at = warp * SECTION;
        let mut next = ids(at);
        // Never true: no list starts with `NO_SLOT`. Reading the id keeps ptxas from moving its load behind the wait.
        if slots > at && next[0][0] == NO_SLOT {
            return;
        }
        wait();
        let most = warp::warp_reduce_max(warp::FULL_MASK, slots);
        let mut row = Merger::EMPTY;
        let mut begin = 0;
        loop {
            let mut section = Merger::EMPTY;
            if let Some(chunk) = chunk
                && slots > at
            {
                let states: [_; GROUPS] = chunk.place.load_all(next);
                let here = slots - at;
                at += step;
                next = ids(at);
                let mut group = 0;
                while group < GROUPS {
                    // Skip groups without slots, for bit-identical results with the other kernels.
                    if here > (group * GROUP) as u32 {
                        section.push_all(states[group]);
                    }
                    group += 1;
                }
            }
            if most <= SECTION {
                row = section;
                break;
            }
            parked.store(thread, &section);
            barrier::bar_sync(0, threads);
            if warp == 0 {
                let mut of = lane;
                let mut first = begin;
                while of < threads && first < slots {
                    let section = parked.load(of);
                    // A row of one section needs no further merge.
                    if slots <= SECTION {
                        row = section;
                    } else {
                        row.push(section.finish());
                    }
                    of += 32;
                    first += SECTION;
                }
            }
            begin += step;
            if begin >= most {
                break;
            }
            barrier::bar_sync(0, threads);
        }
        if let (0, Some(chunk)) = (warp, chunk) {
            chunk.store::<O>(params, row.finish());
        }
    }
}

macro_rules! entries {
    ($output:ident $element:literal { $($what:ident: $shape:ident;)* }) => { $( const _: () = {
        /// See the module's documentation.
        ///
        /// # Safety
        /// The parameters describe memory as [`MergeParams`] says; the output has the type in the name.
        #[kernel(
            name = ["merge_", $what, "_", $element],
            max_threads = THREADS,
            min_blocks = $shape.blocks
        )]
        pub unsafe fn entry(params: MergeParams) {
            let parked = Parked {
                base: shared::dynamic_shared_address(),
            };
            // SAFETY: the caller's promise; the launch provides the shared memory.
            unsafe {
                match ($shape.groups, $shape.long) {
                    (1, false) => merge_many::<$output>(&params),
                    (1, true) => merge_long::<$output>(&params, parked),
                    _ => merge_few::<$output>(&params, parked),
                }
            }
        }
    }; )* };
}

table!(items entries);
f32_table!(entries);
