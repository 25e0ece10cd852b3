//! `narrow_rows`: rounds f32 queries to the 16-bit type of the attention kernels, to nearest.
//!
//! A thread converts 8 elements: it reads 32 bytes and writes 16.

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Elements per thread.
pub const CHUNK: u32 = 8;

/// The kernels: `narrow_rows_<element>`.
macro_rules! table {
    ($as:ident $then:ident) => {
        $crate::each_half! { $as $then {} }
    };
}

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::THREADS;
    use crate::registry::{Arch, Element, Family, KernelInfo, Op, registers};

    macro_rules! rows {
        ($half:ident $element:literal {}) => {
            &[KernelInfo {
                element: Element::$half,
                threads: THREADS,
                registers: registers(THREADS, 4),
                ..KernelInfo::new(
                    concat!("narrow_rows_", $element),
                    Family::Passes,
                    Arch::Sm80,
                    Op::Narrow,
                )
            }]
        };
    }

    /// See the macro `table`.
    pub const ROWS: &[&[KernelInfo]] = table!(list rows);
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::prelude::*;

    use super::{CHUNK, THREADS};
    use crate::{
        abi::NarrowParams,
        common::half::{self, Half},
    };

    macro_rules! entries {
        ($half:ident $element:literal {}) => {
            const _: () = {
                /// See the module's documentation.
                ///
                /// # Safety
                /// The parameters describe memory as [`NarrowParams`] says; the target has the type in the name.
                #[kernel(name = ["narrow_rows_", $element], max_threads = THREADS, min_blocks = 4)]
                pub unsafe fn entry(p: NarrowParams) {
                    let chunk = thread::index_1d();
                    if chunk >= p.chunks {
                        return;
                    }
                    let (token, at) = p.chunks_per_token.div_rem(chunk);
                    let element =
                        u64::from(token) * u64::from(p.from_token) + u64::from(at * CHUNK);
                    let from = (p.from + element * 4) as *const f32;
                    let to = (p.to + u64::from(chunk) * u64::from(CHUNK) * 2) as *mut u32;
                    // SAFETY: inside the tensors, 8 elements aligned to 16 bytes; only this thread writes them.
                    unsafe {
                        let [a, b, c, d] = ptr::load_f32x4(from);
                        let [e, f, g, h] = ptr::load_f32x4(from.add(4));
                        let pack = <half::$half as Half>::pack;
                        ptr::store_u32x4(to, [pack(a, b), pack(c, d), pack(e, f), pack(g, h)]);
                    }
                }
            };
        };
    }

    table!(items entries);
}
