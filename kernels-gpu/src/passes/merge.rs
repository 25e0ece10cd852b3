//! `merge_states`: ⊕ over any number of partial states per output row.
//!
//! Memory-bound: per slot a thread reads 32 bytes of output and a log that its whole head shares, and
//! it computes about one exp2 and eight multiply-adds for them. So the layout decides. A thread owns a
//! *chunk* of 8 elements, two 16-byte loads per slot and one 16-byte store of a 16-bit output. Chunks are
//! counted through rows and heads without a gap: a warp covers 256 neighbouring elements, whether those
//! are two heads of one row or four rows of a single small head. Slots go by fours, all of whose loads are under
//! way before the first is looked at. The first ids are there before the kernel that writes the states has ended.
//!
//! There are two kernels that compute the same bits. Where much is to be merged, threads are what hides latency:
//! [`MANY`] has five blocks on an SM. Where it is little, and stands at the end of a step, waiting decides: [`FEW`]
//! has sixteen slots under way, and asks for the ids of the next before it looks at them.
//!
//! The order of ⊕ is that of the slots, so that the result does not depend on timing.

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
        $crate::common::half::each_half! { $as $then {
            states: MANY;
            few: FEW;
        }}
    };
}

/// Also for outputs in single precision.
macro_rules! f32_table {
    ($then:ident) => {
        $then! { F32 "f32" {
            states: MANY;
            few: FEW;
        }}
    };
}

/// A kernel for so much: groups of slots that it loads together, and its blocks on an SM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Groups of four slots.
    pub groups: usize,
    /// Blocks that an SM holds.
    pub blocks: u32,
}

/// Threads of a block where there are few rows.
pub const FEW_THREADS: u32 = 32;

/// For many rows.
pub const MANY: Shape = Shape {
    groups: 1,
    blocks: 5,
};

/// For few rows, by blocks of [`FEW_THREADS`]: the SMs hold all of them, and none has more than its share to read.
pub const FEW: Shape = Shape {
    groups: 4,
    blocks: 1,
};

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{FEW, MANY, Shape, THREADS};
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
        let few = shape.groups == FEW.groups;
        KernelInfo {
            threads: THREADS,
            registers: registers(THREADS, shape.blocks),
            ..KernelInfo::new(name, Family::Passes, Arch::Sm80, Op::Merge { few })
        }
    }
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::{F32_ROWS, ROWS};

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::prelude::*;

    use super::{CHUNK, FEW, GROUP, MANY, THREADS};
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

    /// The next of `left` slots.
    ///
    /// # Safety
    /// They are at `list`.
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

    /// # Safety
    /// The parameters describe memory as [`MergeParams`] says, `out` is of the type `O`.
    #[inline(always)]
    unsafe fn merge<O: Output, const GROUPS: usize>(params: &MergeParams) {
        let (mut first, mut chunks) = (0, params.chunks);
        if params.record != 0 {
            // SAFETY: the caller's promise.
            let [row, rows] = unsafe { tile_counter::load(params.record) };
            (first, chunks) = (row, rows * params.chunks_per_row.get());
        }
        let chunk = thread::index_1d();
        if chunk >= chunks {
            return;
        }
        let (row, in_row) = params.chunks_per_row.div_rem(chunk);
        let (head, in_head) = params.chunks_per_head.div_rem(in_row);
        // SAFETY: one 16-byte `MergeRow` for each row.
        let [token, slots_begin, slots, _] = unsafe {
            ptr::load_nc_u32x4((params.rows + u64::from(first + row) * 16) as *const u32)
        };
        let place = Place {
            partial_out: params.partial_out,
            partial_lse: params.partial_lse,
            chunks_per_row: params.chunks_per_row.get(),
            chunk: in_row,
            q_heads: params.q_heads,
            head,
        };
        let mut list = (params.merge_slots + u64::from(slots_begin) * 4) as *const u32;
        let mut left = slots;
        let mut merger = Merger::EMPTY;
        // SAFETY: `left` slots of the row are at `list`.
        unsafe {
            let mut next = next_slots(list, left);
            // No list begins so. That it is looked at keeps ptxas from asking for it behind the wait.
            if left > 0 && next[0][0] == NO_SLOT {
                return;
            }
            // What the host wrote was there before; what a kernel wrote is there from here on.
            #[cfg(target_feature = "sm_90a")]
            cuda_std::griddep::wait();
            while left > 0 {
                let states: [_; GROUPS] = place.load_all(next);
                let here = left;
                left = left.saturating_sub((GROUPS * GROUP) as u32);
                list = list.add(GROUPS * GROUP);
                if GROUPS > 1 {
                    next = next_slots(list, left);
                }
                let mut group = 0;
                while group < GROUPS {
                    // The same groups in both kernels, and none without a slot: the same bits.
                    if here > (group * GROUP) as u32 {
                        merger.push_all(states[group]);
                    }
                    group += 1;
                }
                if GROUPS == 1 {
                    next = next_slots(list, left);
                }
            }
        }
        let mut merged = merger.finish();
        if params.sinks != 0 {
            // SAFETY: one for each query head.
            merged = merged.with_sink(unsafe { sink_of(params.sinks, head) });
        }
        let element = u64::from(token) * u64::from(params.out_token_stride)
            + u64::from(in_row) * CHUNK as u64;
        // SAFETY: the token is a row of `out` that no other row of the launch writes.
        unsafe { O::store(params.out, element, merged.out) };
        if in_head == 0 && params.lse != 0 {
            let at = u64::from(token) * u64::from(params.q_heads) + u64::from(head);
            // SAFETY: as above.
            unsafe { ptr::store_f32((params.lse + at * 4) as *mut f32, natural(merged.lse)) };
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
                // SAFETY: the caller's promise.
                unsafe { merge::<$output, { $shape.groups }>(&params) }
            }
        }; )* };
    }

    table!(items entries);
    f32_table!(entries);
}
