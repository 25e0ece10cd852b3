//! `merge_results`: ⊕ over results of attention of the same queries to different keys, as runs write them.
//!
//! Results are outputs and their LSEs in natural log, in the order in which they are merged. A thread merges a *chunk* of 8
//! elements. The loads from all results are issued before the first is used.

/// Elements per thread.
pub const CHUNK: u32 = 8;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Resident blocks per SM.
const BLOCKS: u32 = 2;

/// The kernels, one per type of outputs: `merge_results_<element>`.
#[cfg(not(target_arch = "nvptx64"))]
pub const ROWS: &[&[crate::registry::KernelInfo]] = &[
    {
        use crate::common::half::half_row;
        crate::each_half! { list half_row { "merge_results_", Passes Sm80 MergeResults, THREADS, BLOCKS } }
    },
    &[crate::registry::KernelInfo {
        element: crate::registry::Element::F32,
        threads: THREADS,
        registers: crate::registry::registers(THREADS, BLOCKS),
        ..crate::registry::KernelInfo::new(
            "merge_results_f32",
            crate::registry::Family::Passes,
            crate::registry::Arch::Sm80,
            crate::registry::Op::MergeResults,
        )
    }],
];

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::prelude::*;

    use super::{BLOCKS, CHUNK, THREADS};
    use crate::{
        abi::{MAX_RESULTS, ResultMergeParams},
        common::{
            half::{Bf16, F16},
            state::{Merger, State, natural},
        },
        passes::merge::{F32, Output},
    };

    /// # Safety
    /// As [`ResultMergeParams`] says; results and output are of the type `O`.
    #[inline(always)]
    unsafe fn merge<O: Output>(params: &ResultMergeParams) {
        let at = thread::index_1d();
        if at >= params.chunks {
            return;
        }
        let (token, in_row) = params.chunks_per_row.div_rem(at);
        let (head, in_head) = params.chunks_per_head.div_rem(in_row);
        let log = u64::from(token) * u64::from(params.q_heads) + u64::from(head);
        let element =
            |stride: u32| u64::from(token) * u64::from(stride) + u64::from(in_row * CHUNK);
        let mut states = [State::EMPTY; MAX_RESULTS];
        let mut result = 0;
        while result < MAX_RESULTS {
            if (result as u32) < params.results {
                let place = element(params.token_stride_of[result]);
                // SAFETY: the caller's promise: the result has the token and the head.
                unsafe {
                    let lse = ptr::load_f32((params.lse_of[result] + log * 4) as *const f32);
                    states[result] = State {
                        out: O::load(params.out_of[result], place),
                        lse: lse * core::f32::consts::LOG2_E,
                    };
                }
            }
            result += 1;
        }
        let mut merger = Merger::EMPTY;
        result = 0;
        while result < MAX_RESULTS {
            if (result as u32) < params.results {
                merger.push(states[result]);
            }
            result += 1;
        }
        let State { out, lse } = merger.finish();
        // SAFETY: only this thread writes the chunk, and the first of a head its LSE. Where `out` is the output of a
        // result, only this thread reads the chunk, too.
        unsafe {
            O::store(params.out, element(params.out_token_stride), out);
            if in_head == 0 && params.lse != 0 {
                ptr::store_f32((params.lse + log * 4) as *mut f32, natural(lse));
            }
        }
    }

    macro_rules! entry {
        ($output:ident $element:literal { $prefix:literal }) => {
            const _: () = {
                /// See the module's documentation.
                ///
                /// # Safety
                /// The parameters describe memory as [`ResultMergeParams`] says; tensors have the type in the name.
                #[kernel(name = [$prefix, $element], max_threads = THREADS, min_blocks = BLOCKS)]
                pub unsafe fn entry(params: ResultMergeParams) {
                    // SAFETY: the launch's promise.
                    unsafe { merge::<$output>(&params) }
                }
            };
        };
    }

    crate::each_half! { items entry { "merge_results_" } }
    entry! { F32 "f32" { "merge_results_" } }
}
