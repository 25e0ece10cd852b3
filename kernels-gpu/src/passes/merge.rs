//! `merge_states`: ⊕ over any number of partial states per output row.
//!
//! Memory-bound: per slot a thread reads 32 bytes of output and a log that its whole head shares, and
//! it computes about one exp2 and eight multiply-adds for them. So the layout decides. A thread owns a
//! *chunk* of 8 elements, two 16-byte loads per slot and one 16-byte store of a 16-bit output. Chunks are
//! counted through rows and heads without a gap: a warp covers 256 neighbouring elements, whether those
//! are two heads of one row or four rows of a single small head. Slots go by fours, all of whose loads are under
//! way before the first is looked at. The first ids are there before the kernel that writes the states has ended.
//!
//! There are three kernels that compute the same bits. Where much is to be merged, threads are what hides latency:
//! [`MANY`] and [`LONG`] have five blocks on an SM. Where it is little, and stands at the end of a step, waiting decides: a thread of
//! [`FEW`] has sixteen slots under way, and as many warps as the device has room for share the slots of a row.
//!
//! The order of ⊕ is that of the slots. Sixteen of them are a *section*: their states are merged one after the other, and
//! then those of the sections. So the result depends neither on timing nor on how many warps share a row.

/// Elements that a thread computes.
pub const CHUNK: usize = 8;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Slots that are merged together.
#[cfg(target_arch = "nvptx64")]
const GROUP: usize = 4;

/// The kernels, each of them for each element of outputs: `merge_<how many>_<element>`.
macro_rules! table {
    ($as:ident $then:ident) => {
        $crate::each_half! { $as $then {
            states: MANY;
            long: LONG;
            few: FEW;
        }}
    };
}

/// Also for outputs in single precision.
macro_rules! f32_table {
    ($then:ident) => {
        $then! { F32 "f32" {
            states: MANY;
            long: LONG;
            few: FEW;
        }}
    };
}

/// A kernel for so much: groups of slots that it loads together, and its blocks on an SM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Groups of four slots.
    pub groups: usize,
    /// Blocks that an SM holds.
    pub blocks: u32,
    /// Rows may have more than a section.
    pub long: bool,
}

/// Chunks of a block where there are few rows, a lane each; it has up to [`THREADS`] threads.
pub const FEW_CHUNKS: u32 = 32;

/// Slots that are merged before they meet the others of their row.
pub const SECTION: u32 = 16;

/// Dynamic shared memory of a thread.
pub const SHARED_BYTES: u32 = (CHUNK as u32 + 2) * 4;

/// For many rows, none of them of more than [`SECTION`] slots.
pub const MANY: Shape = Shape {
    groups: 1,
    blocks: 5,
    long: false,
};

/// For many rows.
pub const LONG: Shape = Shape { long: true, ..MANY };

/// For few rows, by blocks of [`FEW_CHUNKS`]: the SMs hold all of them, and none has more than its share to read.
pub const FEW: Shape = Shape {
    groups: 4,
    blocks: 1,
    long: true,
};

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{FEW, LONG, MANY, Shape, THREADS};
    use crate::registry::{Arch, Element, Family, KernelInfo, Op, registers};

    macro_rules! rows {
        ($output:ident $element:literal { $($what:ident: $shape:ident;)* }) => {
            &[$(KernelInfo {
                element: Element::$output,
                ..row(concat!("merge_", stringify!($what), "_", $element), $shape)
            }),*]
        };
    }

    /// See the macro `table`.
    pub const ROWS: &[&[KernelInfo]] = table!(list rows);
    /// See the macro `f32_table`.
    pub const F32_ROWS: &[KernelInfo] = f32_table!(rows);

    const fn row(name: &'static str, shape: Shape) -> KernelInfo {
        KernelInfo {
            threads: THREADS,
            registers: registers(THREADS, shape.blocks),
            ..KernelInfo::new(name, Family::Passes, Arch::Sm80, Op::Merge(shape))
        }
    }
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::{F32_ROWS, ROWS};

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::{barrier, misc, prelude::*, shared, warp};

    use super::{CHUNK, FEW, GROUP, LONG, MANY, SECTION, SHARED_BYTES, THREADS};
    use crate::{
        abi::MergeParams,
        common::{
            half::{Bf16, F16, Half},
            state::{Merger, State, natural, sink_of},
            tile_counter,
        },
    };

    /// Output elements of a type.
    trait Output {
        /// # Safety
        /// `out` is the address of a tensor of this type, in which `element .. element + 8` are the thread's
        /// own and start at a multiple of 8.
        unsafe fn store(out: u64, element: u64, values: [f32; CHUNK]);
    }

    struct F32;

    impl<T: Half> Output for T {
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
        unsafe fn store(out: u64, element: u64, v: [f32; CHUNK]) {
            let out = (out + element * 4) as *mut f32;
            // SAFETY: the caller's promise.
            unsafe {
                ptr::store_f32x4(out, [v[0], v[1], v[2], v[3]]);
                ptr::store_f32x4(out.add(4), [v[4], v[5], v[6], v[7]]);
            }
        }
    }

    /// Where a thread reads: its chunk and its head's log, in any slot.
    #[derive(Clone, Copy)]
    struct Place {
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
        unsafe fn load(self, slot: u32) -> State<CHUNK> {
            let chunk = u64::from(slot) * u64::from(self.chunks_per_row) + u64::from(self.chunk);
            let head = u64::from(slot) * u64::from(self.q_heads) + u64::from(self.head);
            let out = (self.partial_out + chunk * 32) as *const f32;
            // Not the read-only path: under a programmatic launch the kernel before this one still writes
            // partial states while this one starts.
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

        /// The states of the slots, all on their way before the first is looked at; none where there is no slot.
        ///
        /// # Safety
        /// As [`load`](Self::load)'s.
        #[inline(always)]
        unsafe fn load_all<const GROUPS: usize>(
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

    /// No slot of the workspace.
    const NO_SLOT: u32 = u32::MAX;

    /// The slots of a row that stand at `list`, as many as there are places and `left` says.
    ///
    /// # Safety
    /// They are there.
    #[inline(always)]
    unsafe fn next_slots<const GROUPS: usize>(
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

    /// What a thread merges.
    #[derive(Clone, Copy)]
    struct Chunk {
        place: Place,
        token: u32,
        /// Its place in the row, and in the head.
        in_row: u32,
        in_head: u32,
        list: *const u32,
        slots: u32,
    }

    impl Chunk {
        /// None behind the last.
        ///
        /// # Safety
        /// The parameters describe memory as [`MergeParams`] says.
        #[inline(always)]
        unsafe fn look_up(params: &MergeParams, chunk: u32) -> Option<Self> {
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
                in_head,
                list: (params.merge_slots + u64::from(slots_begin) * 4) as *const u32,
                slots,
            })
        }

        /// # Safety
        /// As [`look_up`](Self::look_up)'s; `out` is of the type `O`.
        #[inline(always)]
        unsafe fn store<O: Output>(&self, params: &MergeParams, mut merged: State<CHUNK>) {
            let head = self.place.head;
            if params.sinks != 0 {
                // SAFETY: one for each query head.
                merged = merged.with_sink(unsafe { sink_of(params.sinks, head) });
            }
            let element = u64::from(self.token) * u64::from(params.out_token_stride)
                + u64::from(self.in_row) * CHUNK as u64;
            // SAFETY: the token is a row of `out` that no other row of the launch writes.
            unsafe { O::store(params.out, element, merged.out) };
            if self.in_head == 0 && params.lse != 0 {
                let at = u64::from(self.token) * u64::from(params.q_heads) + u64::from(head);
                // SAFETY: as above.
                unsafe { ptr::store_f32((params.lse + at * 4) as *mut f32, natural(merged.lse)) };
            }
        }
    }

    /// Waits for the kernel that writes the states; what the host wrote was there before.
    #[inline(always)]
    fn wait() {
        #[cfg(target_feature = "sm_90a")]
        cuda_std::griddep::wait();
    }

    /// Room in shared memory for ten words of each thread of a block, each lane's in a bank of its own.
    #[derive(Clone, Copy)]
    struct Parked {
        base: u32,
    }

    impl Parked {
        const WORDS: u32 = SHARED_BYTES / 4;

        /// Where the first word of a thread stands; the others follow, 128 bytes apart.
        #[inline(always)]
        fn of(self, thread: u32) -> u32 {
            self.base + (thread / 32 * 32 * Self::WORDS + thread % 32) * 4
        }

        /// # Safety
        /// Nobody else uses the place of the thread meanwhile.
        #[inline(always)]
        unsafe fn store(self, thread: u32, merger: &Merger<CHUNK>) {
            let mut at = self.of(thread);
            let mut i = 0;
            // SAFETY: the place has as many words.
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
        /// A merger was stored there, and a barrier lies between if another thread did.
        #[inline(always)]
        unsafe fn load(self, thread: u32) -> Merger<CHUNK> {
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

    /// A thread for each chunk, of rows with at most a section.
    ///
    /// # Safety
    /// The parameters describe memory as [`MergeParams`] says, `out` is of the type `O`.
    #[inline(always)]
    unsafe fn merge_many<O: Output>(params: &MergeParams) {
        // SAFETY: the caller's promises; `left` slots of the row are at `list`.
        unsafe {
            let Some(chunk) = Chunk::look_up(params, thread::index_1d()) else {
                return;
            };
            let (mut list, mut left) = (chunk.list, chunk.slots);
            let mut next = next_slots::<1>(list, left);
            // No list begins so. That it is looked at keeps ptxas from asking for it behind the wait.
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

    /// A thread for each chunk, of rows with any number of slots.
    ///
    /// # Safety
    /// The parameters describe memory as [`MergeParams`] says, `out` is of the type `O`; `parked` are places for a block.
    #[inline(always)]
    unsafe fn merge_long<O: Output>(params: &MergeParams, parked: Parked) {
        // SAFETY: the caller's promises; `slots` of the row are at `list`.
        unsafe {
            let Some(chunk) = Chunk::look_up(params, thread::index_1d()) else {
                return;
            };
            let (mut done, slots) = (0, chunk.slots);
            let ids = |done: u32| {
                next_slots::<1>(chunk.list.add(done as usize), slots.saturating_sub(done))
            };
            let mut next = ids(done);
            // No list begins so. That it is looked at keeps ptxas from asking for it behind the wait.
            if slots > 0 && next[0][0] == NO_SLOT {
                return;
            }
            wait();
            let mut section = Merger::EMPTY;
            while done < slots {
                let [states] = chunk.place.load_all(next);
                done += GROUP as u32;
                section.push_all(states);
                // Long rows are rare where there are many: what has been merged of them is in shared memory while a
                // section is, for registers are few.
                if done % SECTION == 0 && done < slots {
                    // Opaque: or it is kept in registers.
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

    /// A lane for each chunk; the warps of a block take the sections of its rows in turn.
    ///
    /// # Safety
    /// The parameters describe memory as [`MergeParams`] says, `out` is of the type `O`; `parked` are places for a block.
    #[inline(always)]
    unsafe fn merge_few<O: Output>(params: &MergeParams, parked: Parked) {
        const GROUPS: usize = SECTION as usize / GROUP;
        let thread = thread::thread_idx_x();
        let (warp, lane, threads) = (thread / 32, thread % 32, thread::block_dim_x());
        let step = threads / 32 * SECTION;
        // SAFETY: the caller's promises; `slots` of the row are at `list`. All warps of a block have the same chunks, so
        // all threads come to the same barriers.
        unsafe {
            let chunk = Chunk::look_up(params, thread::block_idx_x() * 32 + lane);
            let slots = chunk.map_or(0, |chunk| chunk.slots);
            let list = chunk.map_or(core::ptr::null(), |chunk| chunk.list);
            let ids = |at: u32| {
                next_slots::<GROUPS>(list.wrapping_add(at as usize), slots.saturating_sub(at))
            };
            let mut at = warp * SECTION;
            let mut next = ids(at);
            // No list begins so. That it is looked at keeps ptxas from asking for it behind the wait.
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
                        // None without a slot: the same bits as where they come one by one.
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
                        // A row of one section is that section.
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
            /// See the module.
            ///
            /// # Safety
            /// The parameters describe memory as [`MergeParams`] says, the output is of the type in the name.
            #[kernel(
                name = ["merge_", $what, "_", $element],
                max_threads = THREADS,
                min_blocks = $shape.blocks
            )]
            pub unsafe fn entry(params: MergeParams) {
                let parked = Parked {
                    base: shared::dynamic_shared_address(),
                };
                // SAFETY: the caller's promise; the launch gives the block its shared memory.
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
}
