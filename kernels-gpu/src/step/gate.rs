//! `gate`: SiLU(gate) · up or GELU(gate) · up.
//!
//! Memory-bound: a thread moves vectors of 16 bytes, numbered continuously over tokens. All loads of a thread are in
//! flight before the first result is used.

use crate::math::{exp2, recip};

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Vectors per thread.
pub const PER_THREAD: u32 = 2;

/// Resident blocks per SM.
const BLOCKS: u32 = 6;

/// `x · σ(x)`.
#[inline(always)]
#[must_use]
pub fn silu(x: f32) -> f32 {
    x * recip(1.0 + exp2(x * -core::f32::consts::LOG2_E))
}

/// `x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))`, which is `x · σ(2 √(2/π) · (x + 0.044715 x³))`.
#[inline(always)]
#[must_use]
pub fn gelu_tanh(x: f32) -> f32 {
    // -2 √(2/π) log₂e.
    const SCALE: f32 = -2.302_208_2;
    x * recip(1.0 + exp2(x * (SCALE + SCALE * 0.044_715 * (x * x))))
}

/// The kernels: `gate_<element>`.
#[cfg(not(target_arch = "nvptx64"))]
pub const ROWS: &[crate::registry::KernelInfo] = {
    use crate::common::half::half_row;
    crate::each_half! { list half_row { "gate_", Step Sm80 Gate, THREADS, BLOCKS } }
};

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::prelude::*;

    use super::{BLOCKS, PER_THREAD, THREADS, gelu_tanh, silu};
    use crate::{
        abi::GateParams,
        common::half::{Half, half_entry},
        step::{Vector, at, begin, pack, unpack},
    };

    const N: usize = PER_THREAD as usize;

    /// # Safety
    /// The parameters describe memory as [`GateParams`] says.
    #[inline(always)]
    unsafe fn gate<T: Half>(p: &GateParams) {
        begin();
        let first = thread::block_idx_x() * (THREADS * PER_THREAD) + thread::thread_idx_x();
        let (mut gates, mut ups, mut to) = ([[0; 4]; N], [[0; 4]; N], [0; N]);
        let mut i = 0;
        while i < N {
            let vector = first + i as u32 * THREADS;
            if vector < p.vectors {
                let (token, in_token) = p.per_token.div_rem(vector);
                let from = u64::from(token) * u64::from(p.source_token) + u64::from(in_token);
                let up = from + u64::from(p.per_token.get());
                to[i] = at(
                    p.out,
                    u64::from(token) * u64::from(p.out_token) + u64::from(in_token),
                );
                // SAFETY: vectors of the source.
                unsafe {
                    gates[i] = ptr::load_stream_u32x4(at(p.source, from) as *const u32);
                    ups[i] = ptr::load_stream_u32x4(at(p.source, up) as *const u32);
                }
            }
            i += 1;
        }
        i = 0;
        while i < N {
            let (gate, mut up) = (unpack::<T>(gates[i]), unpack::<T>(ups[i]));
            multiply(&gate, &mut up, p.gelu != 0);
            if first + (i as u32 * THREADS) < p.vectors {
                // SAFETY: a vector of the output that only this thread writes.
                unsafe { ptr::store_u32x4(to[i] as *mut u32, pack::<T>(up)) };
            }
            i += 1;
        }
    }

    #[inline(always)]
    fn multiply(gate: &Vector, up: &mut Vector, gelu: bool) {
        let mut j = 0;
        if gelu {
            while j < 8 {
                up[j] *= gelu_tanh(gate[j]);
                j += 1;
            }
        } else {
            while j < 8 {
                up[j] *= silu(gate[j]);
                j += 1;
            }
        }
    }

    crate::each_half! { items half_entry { "gate_", THREADS, BLOCKS, gate(GateParams) } }
}
