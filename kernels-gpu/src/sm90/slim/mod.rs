//! Decode of few rows in what a prefill leaves of an SM: little shared memory, 64 registers a thread.
//!
//! Both products are transposed, so that keys and elements of the head stand on the 64-wide side of `wgmma`
//! and the few rows on the other, which goes down to 8: Sᵀ = K·Qᵀ and Oᵀ += Vᵀ·Pᵀ. Keys and values are read
//! from shared memory by the tensor cores themselves, and a thread holds 12 accumulators for 8 rows. So one
//! warpgroup keeps up with the memory while the prefill's products take most of the tensor cores' time.
//!
//! Units, rows, keys and values come much as they do for [`wide`](super::wide) tiles, but all rows of a unit see
//! one table: there are neither the registers nor the shared memory for more.

#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod consume;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod feed;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod finish;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod products;
mod shape;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod shared;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod softmax;

pub use shape::Shape;

/// What the kernel beside a prefill with heads of 128 elements is compiled for: 8 rows, 64 keys at a time, 96 KB of
/// keys and values under way.
pub const SHAPE: Shape = Shape {
    consumers: 1,
    rows: 8,
    keys: 64,
    head_dim: 128,
    stages: 3,
    value_stages: 3,
};

/// The same with 64 KB under way, beside a prefill that takes more of the memory. Results are the same bits.
pub const SHALLOW: Shape = Shape {
    stages: 2,
    value_stages: 2,
    ..SHAPE
};

/// Registers of a thread: at launch, and then of the warps that feed and of those that compute.
pub const REGISTERS: [u32; 3] = [64, 48, 80];

/// Blocks of a unit's keys that have not been asked for when the next unit is claimed. Who claims early may claim
/// what another CTA could have begun; who claims late waits for ticket, item and queries, and memory is busy here.
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
const CLAIM_AHEAD: u32 = 8;

/// Weights of two blocks, the state of a unit, and what the warps tell each other.
const fn extra_bytes(shape: &Shape) -> u32 {
    2 * shape.rows * shape.keys * 2 + shape.rows * (state_pitch(shape) * 4 + 9 * 4)
}

/// f32 of a row of a unit's state; the padding spreads the columns of a fragment over banks.
const fn state_pitch(shape: &Shape) -> u32 {
    shape.head_dim + 4
}

/// Dynamic shared memory.
#[must_use]
pub const fn shared_bytes(shape: &Shape) -> u32 {
    shape.shared_bytes().next_multiple_of(16) + extra_bytes(shape)
}

/// The deepest kernel that shares an SM with CTAs of so much dynamic shared memory.
#[must_use]
pub const fn beside(others: u32) -> Shape {
    const SM: u32 = 233_472;
    // What the system takes for a CTA.
    const RESERVED: u32 = 1024;
    match others + shared_bytes(&SHAPE) + 2 * RESERVED <= SM {
        true => SHAPE,
        false => SHALLOW,
    }
}

#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod entries {
    use cuda_std::{
        barrier, griddep, param_address, prelude::*, setmaxnreg, shared, thread, tma::TensorMap,
        wgmma,
    };

    use super::{
        REGISTERS, Shape,
        consume::consume,
        feed::{gather, help_gather, load},
        shared::Shared,
    };
    use crate::{
        abi::DecodeParams,
        decode::half::{Bf16, F16},
        variant::Standard,
    };

    macro_rules! entries {
        ($($name:ident: $shape:ident, $dtype:ident;)*) => {$(
            /// See the module.
            ///
            /// # Safety
            /// The parameters describe memory as [`DecodeParams`] says.
            #[kernel(max_threads = super::SHAPE.threads(), max_registers = REGISTERS[0], tensor_maps)]
            pub unsafe fn $name(p: DecodeParams) {
                const SHAPE: Shape = super::$shape;
                let maps: *const TensorMap = param_address!($name, 0);
                let variant = Standard::<false>(p.attention.variant);
                let s = Shared { base: shared::dynamic_shared_address(), shape: SHAPE };
                let thread = thread::thread_idx_x();
                // SAFETY: the caller's promise; every warp has one role, begun once the barriers are initialised.
                unsafe {
                    s.init();
                    barrier::bar_sync(0, SHAPE.threads());
                    // The merging kernel may wait on SMs that this one has left.
                    griddep::launch_dependents();
                    if thread < 128 {
                        setmaxnreg::decrease::<{ REGISTERS[1] }>();
                        match thread / 32 {
                            0 => load::<false, { SHAPE.stages }>(&p, maps, s),
                            1 => load::<true, { SHAPE.value_stages }>(&p, maps.add(1), s),
                            2 => gather(&p, s),
                            _ => help_gather(&p, s),
                        }
                    } else {
                        setmaxnreg::increase::<{ REGISTERS[2] }>();
                        consume::<wgmma::$dtype, $dtype, _, { SHAPE.stages }, { SHAPE.value_stages }, 4>(&p, &variant, s);
                    }
                }
            }
        )*};
    }

    entries! {
        decode_bf16_d128_m8_slim: SHAPE, Bf16;
        decode_bf16_d128_m8_slim_shallow: SHALLOW, Bf16;
        decode_f16_d128_m8_slim: SHAPE, F16;
        decode_f16_d128_m8_slim_shallow: SHALLOW, F16;
    }
}

#[cfg(test)]
mod tests {
    use super::{super::prefill, *};

    #[test]
    fn it_fits_beside_the_prefill() {
        for prefill in prefill::Shape::ALL.iter().filter(|shape| shape.beside) {
            let decode = shared_bytes(&beside(prefill.shared_bytes()));
            assert!(decode + prefill.shared_bytes() + 2 * 1024 <= 233_472);
            // Registers are shared out by quarters of an SM, which have every fourth warp of a CTA.
            let quarter = |threads: u32, registers: u32| threads / 128 * 32 * registers;
            let registers = quarter(SHAPE.threads(), REGISTERS[0])
                + quarter(prefill.threads(), prefill.registers()[0]);
            assert!(registers <= 16384, "{registers}");
        }
    }
}
