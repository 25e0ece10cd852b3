//! `pad_heads`: pads heads to a dimension that attention kernels support, and back.
//!
//! Those kernels have head dimensions of 64, 128 or 256, in slabs of 64. Tensor maps read heads of other dimensions as
//! overlapping slabs, so that no byte of the neighbouring head is read: slab `j` starts at element `j · step`. Elements
//! in two slabs are zero in the second slab of the padded queries, so they count once. Loaders that copy row by row take slabs
//! that follow each other, and end the last one with zeros.
//!
//! A thread moves 8 elements of 16 bits.

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Elements per thread.
pub const CHUNK: u32 = 8;

/// The source of 8 elements of a padded head: the index of the first in the unpadded head, or `None` for zeros.
///
/// `at` is their index in the padded head; slabs are `step` elements apart and cover `dim` elements.
#[inline(always)]
#[must_use]
pub const fn source(at: u32, dim: u32, step: u32) -> Option<u32> {
    let (slab, column) = (at / 64, at % 64);
    let from = slab * step + column;
    // Elements that the previous slab already has, or past the end.
    if from >= dim || slab > 0 && column + step < 64 {
        None
    } else {
        Some(from)
    }
}

/// The index, in the padded head, of 8 elements of the unpadded head.
#[inline(always)]
#[must_use]
pub const fn place(from: u32, step: u32) -> u32 {
    let mut slab = 0;
    while from >= slab * step + 64 {
        slab += 1;
    }
    slab * 64 + (from - slab * step)
}

/// The kernel's name, for its row and for its entry.
macro_rules! table {
    ($then:ident) => {
        $then! { "pad_heads" }
    };
}

/// The kernel.
#[cfg(not(target_arch = "nvptx64"))]
pub const ROWS: &[crate::registry::KernelInfo] = {
    use crate::registry::{Arch, Family, KernelInfo, Op, registers};
    macro_rules! row {
        ($name:literal) => {
            KernelInfo {
                threads: THREADS,
                registers: registers(THREADS, 4),
                ..KernelInfo::new($name, Family::Passes, Arch::Sm80, Op::Pad)
            }
        };
    }
    &[table!(row)]
};

#[cfg(target_arch = "nvptx64")]
mod device {
    #[cfg(target_feature = "sm_90a")]
    use cuda_std::griddep;
    use cuda_std::prelude::*;

    use super::{CHUNK, THREADS, place, source};
    use crate::abi::PadParams;

    macro_rules! entry {
        ($name:literal) => {
            /// See the module's documentation.
            ///
            /// # Safety
            /// The parameters describe memory as [`PadParams`] says.
            #[kernel(name = [$name], max_threads = THREADS, min_blocks = 4)]
            pub unsafe fn entry(p: PadParams) {
                let chunk = thread::index_1d();
                if chunk >= p.chunks {
                    return;
                }
                let (row, at) = p.chunks_per_head.div_rem(chunk);
                let (token, head) = p.heads.div_rem(row);
                let at = at * CHUNK;
                let from = if p.back == 0 {
                    source(at, p.dim, p.step)
                } else {
                    Some(place(at, p.step))
                };
                let (token, head) = (u64::from(token), u64::from(head));
                let element = |token_stride: u32, head_stride: u32, at: u32| {
                    token * u64::from(token_stride) + head * u64::from(head_stride) + u64::from(at)
                };
                // Dependent launch: the previous kernel, which writes the source, may still run.
                #[cfg(target_feature = "sm_90a")]
                griddep::wait();
                let mut values = [0; 4];
                // SAFETY: inside the tensors, 8 elements aligned to 16 bytes; only this thread writes them.
                unsafe {
                    if let Some(from) = from {
                        let from = p.from + element(p.from_token, p.from_head, from) * 2;
                        // Not the read-only path: the launch before may still write when this one starts.
                        values = ptr::load_u32x4(from as *const u32);
                    }
                    let to = p.to + element(p.to_token, p.to_head, at) * 2;
                    ptr::store_u32x4(to as *mut u32, values);
                }
            }
        };
    }
    table!(entry);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_has_one_place_and_is_found_there() {
        for (dim, slabs, step) in [
            (32, 1, 64),
            (80, 2, 16),
            (96, 2, 32),
            (160, 3, 48),
            (208, 4, 48),
            (144, 3, 64),
            (224, 4, 64),
            (240, 4, 64),
        ] {
            let mut seen = 0;
            for at in (0..slabs * 64).step_by(CHUNK as usize) {
                let Some(from) = source(at, dim, step) else {
                    continue;
                };
                assert_eq!(place(from, step), at, "{dim}");
                seen += CHUNK;
            }
            assert_eq!(seen, dim);
        }
    }
}
