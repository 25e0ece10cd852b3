//! A thread's loads and stores: a chunk of a row, in any slot.

use cuda_std::{prelude::*, shared};

use super::{CHUNK, GROUP, SHARED_BYTES};
use crate::{
    abi::MergeParams,
    common::{
        half::Half,
        state::{Merger, State, natural, sink_of},
        tile_counter,
    },
};

/// The element type of outputs.
pub trait Output {
    /// # Safety
    /// `out` is the address of a tensor of this type, which has `element .. element + 8`, from a multiple of 8 on.
    unsafe fn load(out: u64, element: u64) -> [f32; CHUNK];

    /// # Safety
    /// `out` is the address of a tensor of this type. Only this thread writes `element .. element + 8`, which start at
    /// a multiple of 8.
    unsafe fn store(out: u64, element: u64, values: [f32; CHUNK]);
}

/// Outputs in f32.
pub struct F32;

impl<T: Half> Output for T {
    #[inline(always)]
    unsafe fn load(out: u64, element: u64) -> [f32; CHUNK] {
        // SAFETY: the caller's promise.
        let pairs = unsafe { ptr::load_u32x4((out + element * 2) as *const u32) };
        let ([a, b], [c, d]) = (T::unpack(pairs[0]), T::unpack(pairs[1]));
        let ([e, f], [g, h]) = (T::unpack(pairs[2]), T::unpack(pairs[3]));
        [a, b, c, d, e, f, g, h]
    }

    #[inline(always)]
    unsafe fn store(out: u64, element: u64, v: [f32; CHUNK]) {
        let pairs = [
            T::pack(v[0], v[1]),
            T::pack(v[2], v[3]),
            T::pack(v[4], v[5]),
            T::pack(v[6], v[7]),
        ];
        // SAFETY: the caller's promise.
        unsafe { ptr::store_u32x4((out + element * 2) as *mut u32, pairs) }
    }
}

impl Output for F32 {
    #[inline(always)]
    unsafe fn load(out: u64, element: u64) -> [f32; CHUNK] {
        let out = (out + element * 4) as *const f32;
        // SAFETY: the caller's promise.
        let ([a, b, c, d], [e, f, g, h]) =
            unsafe { (ptr::load_f32x4(out), ptr::load_f32x4(out.add(4))) };
        [a, b, c, d, e, f, g, h]
    }

    #[inline(always)]
    unsafe fn store(out: u64, element: u64, v: [f32; CHUNK]) {
        let out = (out + element * 4) as *mut f32;
        // SAFETY: the caller's promise.
        unsafe {
            ptr::store_f32x4(out, [v[0], v[1], v[2], v[3]]);
            ptr::store_f32x4(out.add(4), [v[4], v[5], v[6], v[7]]);
        }
    }
}

/// A thread's source: its chunk and its head's LSE, in any slot.
#[derive(Clone, Copy)]
pub(super) struct Place {
    partial_out: u64,
    partial_lse: u64,
    chunks_per_row: u32,
    chunk: u32,
    q_heads: u32,
    head: u32,
}

impl Place {
    /// # Safety
    /// `slot` is one of the partial states.
    #[inline(always)]
    pub unsafe fn load(self, slot: u32) -> State<CHUNK> {
        let chunk = u64::from(slot) * u64::from(self.chunks_per_row) + u64::from(self.chunk);
        let head = u64::from(slot) * u64::from(self.q_heads) + u64::from(self.head);
        let out = (self.partial_out + chunk * 32) as *const f32;
        // Not the read-only path: with a programmatic dependent launch the previous kernel may still write partial
        // states while this one starts.
        // SAFETY: inside the arrays, by the promise on `slot`; chunks are 32 bytes and aligned to 16.
        unsafe {
            let lse = ptr::load_f32((self.partial_lse + head * 4) as *const f32);
            let [a, b, c, d] = ptr::load_f32x4(out);
            let [e, f, g, h] = ptr::load_f32x4(out.add(4));
            State {
                out: [a, b, c, d, e, f, g, h],
                lse,
            }
        }
    }

    /// Loads the states of the slots, all in flight at once; empty states for [`NO_SLOT`].
    ///
    /// # Safety
    /// As [`load`](Self::load)'s.
    #[inline(always)]
    pub unsafe fn load_all<const GROUPS: usize>(
        self,
        slots: [[u32; GROUP]; GROUPS],
    ) -> [[State<CHUNK>; GROUP]; GROUPS] {
        let mut states = [[State::EMPTY; GROUP]; GROUPS];
        let mut i = 0;
        while i < GROUPS * GROUP {
            let (group, i_in) = (i / GROUP, i % GROUP);
            if slots[group][i_in] != NO_SLOT {
                // SAFETY: the caller's promise.
                states[group][i_in] = unsafe { self.load(slots[group][i_in]) };
            }
            i += 1;
        }
        states
    }
}

/// Not a slot of the workspace.
pub(super) const NO_SLOT: u32 = u32::MAX;

/// The next slots of a row, from `list` on: at most `left`, padded with [`NO_SLOT`].
///
/// # Safety
/// `list` has `left` slots.
#[inline(always)]
pub(super) unsafe fn next_slots<const GROUPS: usize>(
    list: *const u32,
    left: u32,
) -> [[u32; GROUP]; GROUPS] {
    let mut slots = [[NO_SLOT; GROUP]; GROUPS];
    let mut i = 0;
    while i < GROUPS * GROUP {
        if (i as u32) < left {
            // SAFETY: the caller's promise.
            slots[i / GROUP][i % GROUP] = unsafe { ptr::load_nc_u32(list.add(i)) };
        }
        i += 1;
    }
    slots
}

/// The chunk that a thread merges.
#[derive(Clone, Copy)]
pub(super) struct Chunk {
    pub place: Place,
    token: u32,
    /// Its index in the row.
    in_row: u32,
    /// Not its index in the head: that would occupy a register beside the states, and spill others.
    first_of_head: bool,
    pub list: *const u32,
    pub slots: u32,
}

impl Chunk {
    /// `None` past the last chunk.
    ///
    /// # Safety
    /// The parameters describe memory as [`MergeParams`] says.
    #[inline(always)]
    pub unsafe fn look_up(params: &MergeParams, chunk: u32) -> Option<Self> {
        let (mut first, mut chunks) = (0, params.chunks);
        if params.record != 0 {
            // SAFETY: the caller's promise.
            let [row, rows] = unsafe { tile_counter::load(params.record) };
            (first, chunks) = (row, rows * params.chunks_per_row.get());
        }
        if chunk >= chunks {
            return None;
        }
        let (row, in_row) = params.chunks_per_row.div_rem(chunk);
        let (head, in_head) = params.chunks_per_head.div_rem(in_row);
        // SAFETY: one 16-byte `MergeRow` for each row.
        let [token, slots_begin, slots, _] = unsafe {
            ptr::load_nc_u32x4((params.rows + u64::from(first + row) * 16) as *const u32)
        };
        Some(Self {
            place: Place {
                partial_out: params.partial_out,
                partial_lse: params.partial_lse,
                chunks_per_row: params.chunks_per_row.get(),
                chunk: in_row,
                q_heads: params.q_heads,
                head,
            },
            token,
            in_row,
            first_of_head: in_head == 0,
            list: (params.merge_slots + u64::from(slots_begin) * 4) as *const u32,
            slots,
        })
    }

    /// # Safety
    /// As [`look_up`](Self::look_up)'s; `out` has the type `O`.
    #[inline(always)]
    pub unsafe fn store<O: Output>(&self, params: &MergeParams, mut merged: State<CHUNK>) {
        // Below 2³¹, as the host checks.
        let at = self.token * params.q_heads + self.place.head;
        if params.sinks != 0 {
            // The remainder of the row's index is that of its token, and its head.
            let (_, index) = params.sink_count.div_rem(at);
            // SAFETY: one for each query head of each of the sinks' tokens.
            merged = merged.with_sink(unsafe { sink_of(params.sinks, index) });
        }
        if params.add_up != 0 {
            merged = merged.added_up();
        }
        let element = u64::from(self.token) * u64::from(params.out_token_stride)
            + u64::from(self.in_row) * CHUNK as u64;
        // SAFETY: the token is a row of `out` that no other row of the launch writes.
        unsafe { O::store(params.out, element, merged.out) };
        if self.first_of_head && params.lse != 0 {
            // SAFETY: as above.
            unsafe {
                ptr::store_f32(
                    (params.lse + u64::from(at) * 4) as *mut f32,
                    natural(merged.lse),
                )
            };
        }
    }
}

/// Dependent launch: waits for the kernel that writes the states. Data written by the host needs no wait. Then the launch
/// after this one may begin, such as the decode of the next layer.
#[inline(always)]
pub(super) fn wait() {
    #[cfg(target_feature = "sm_90a")]
    {
        cuda_std::griddep::wait();
        cuda_std::griddep::launch_dependents();
    }
}

/// Shared memory for ten words of each thread of a block; each lane has a bank of its own.
#[derive(Clone, Copy)]
pub(super) struct Parked {
    pub base: u32,
}

impl Parked {
    const WORDS: u32 = SHARED_BYTES / 4;

    /// Address of a thread's first word; the others follow at intervals of 128 bytes.
    #[inline(always)]
    fn of(self, thread: u32) -> u32 {
        self.base + (thread / 32 * 32 * Self::WORDS + thread % 32) * 4
    }

    /// # Safety
    /// No other thread accesses this thread's words meanwhile.
    #[inline(always)]
    pub unsafe fn store(self, thread: u32, merger: &Merger<CHUNK>) {
        let mut at = self.of(thread);
        let mut i = 0;
        // SAFETY: each thread has this many words.
        unsafe {
            while i < CHUNK {
                shared::store_f32(at, merger.out[i]);
                at += 128;
                i += 1;
            }
            shared::store_f32(at, merger.softmax.max);
            shared::store_f32(at + 128, merger.softmax.sum);
        }
    }

    /// # Safety
    /// A merger was stored there; if by another thread, a barrier completed since.
    #[inline(always)]
    pub unsafe fn load(self, thread: u32) -> Merger<CHUNK> {
        let mut at = self.of(thread);
        let mut merger = Merger::EMPTY;
        let mut i = 0;
        // SAFETY: the caller's promise.
        unsafe {
            while i < CHUNK {
                merger.out[i] = shared::load_f32(at);
                at += 128;
                i += 1;
            }
            merger.softmax.max = shared::load_f32(at);
            merger.softmax.sum = shared::load_f32(at + 128);
        }
        merger
    }
}
