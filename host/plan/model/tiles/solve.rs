//! What a tile takes of a device.

use std::fmt;

use super::super::DeviceDescription;
use crate::{
    plan::data::{Kernel, Tile},
    problem::Spec,
};

/// What a tile takes of an SM, by the solver's arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Threads that hold accumulators.
    pub threads: u32,
    /// Registers of each of them.
    pub registers_per_thread: u32,
    /// Buffers for a key tile and its values, as many as fit (at most [`MAX_STAGES`]).
    pub stages: u32,
    /// Shared memory of a CTA, in bytes.
    pub shared_bytes: u32,
}

/// Why a tile cannot run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Infeasible {
    /// Smaller than the smallest matrix instruction, or no multiple of it.
    Instruction,
    /// Two key tiles do not fit shared memory beside the queries.
    SharedMemory {
        /// Bytes that it takes.
        needed: u64,
        /// Bytes that there are.
        available: u64,
    },
    /// The accumulators do not fit the registers.
    Registers {
        /// Registers per thread that it takes, with as many threads as may be.
        needed: u64,
    },
    /// Too few bytes in flight to cover latency × bandwidth.
    BytesInFlight {
        /// Bytes per SM that it takes.
        needed: u64,
        /// Bytes per SM that there are.
        available: u64,
    },
}

impl fmt::Display for Infeasible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Instruction => write!(f, "no multiple of the matrix instruction"),
            Self::SharedMemory { needed, available } => {
                write!(
                    f,
                    "needs {needed} bytes of shared memory, there are {available}"
                )
            }
            Self::Registers { needed } => write!(f, "needs {needed} registers per thread"),
            Self::BytesInFlight { needed, available } => {
                write!(f, "has {available} bytes in flight per SM, needs {needed}")
            }
        }
    }
}

/// The deepest ring of key tiles that is of use.
pub const MAX_STAGES: u32 = 16;

/// Registers a thread needs beside accumulators: addresses, row maxima and sums, loop state.
const OTHER_REGISTERS: u64 = 40;

/// The most that the compiler lets a thread have, less what it wants for itself.
const MAX_REGISTERS_PER_THREAD: u64 = 240;

/// What a tile takes of a device, or why it cannot run there.
///
/// # Errors
/// The first constraint that the tile violates.
pub fn solve(
    device: &DeviceDescription,
    spec: &Spec,
    kernel: Kernel,
    tile: Tile,
) -> Result<Resources, Infeasible> {
    let Tile { m, n } = tile;
    // Decode may put the rows on the narrow side of the instruction (Sᵀ = K·Qᵀ), 8 wide on every GPU;
    // prefill keeps them on the wide side, which a whole warpgroup shares from Hopper on.
    let smallest_m = match kernel {
        Kernel::Decode => 8,
        Kernel::Prefill if device.compute_capability.0 >= 9 => 64,
        Kernel::Prefill => 16,
    };
    if m == 0 || n == 0 || !m.is_multiple_of(smallest_m) || !n.is_multiple_of(16) {
        return Err(Infeasible::Instruction);
    }
    let ctas = u64::from(device.ctas_per_sm(kernel));
    let (m, n) = (u64::from(m), u64::from(n));
    let (d_qk, d_v) = (u64::from(spec.head_dim_qk), u64::from(spec.head_dim_v));

    let queries = m * d_qk * u64::from(spec.q_dtype.bytes());
    let stage = n * (d_qk + d_v) * u64::from(spec.kv_dtype.bytes());
    let available =
        u64::from(device.shared_bytes_per_cta).min(u64::from(device.shared_bytes_per_sm) / ctas);
    let needed = queries + 2 * stage;
    if needed > available {
        return Err(Infeasible::SharedMemory { needed, available });
    }
    let stages = ((available - queries) / stage).min(u64::from(MAX_STAGES));

    // O and S in f32, P in 16 bits, spread over the threads of one to four warpgroups.
    let accumulators = m * d_v + m * n + m * n / 2;
    let per_thread = |threads: u64| accumulators.div_ceil(threads) + OTHER_REGISTERS;
    let fits = |&threads: &u64| {
        let registers = per_thread(threads);
        registers <= MAX_REGISTERS_PER_THREAD
            && ctas * threads * registers <= u64::from(device.registers_per_sm)
    };
    let Some(threads) = [128, 256, 384, 512].into_iter().find(fits) else {
        return Err(Infeasible::Registers {
            needed: per_thread(512),
        });
    };

    // One stage is being computed on, the others are on their way. A prefill tile lives on its FLOPs.
    let in_flight = ctas * (stages - 1) * stage;
    let needed =
        (device.latency_ns * device.read_bytes_per_ns / f64::from(device.sms)).ceil() as u64;
    if kernel == Kernel::Decode && in_flight < needed {
        return Err(Infeasible::BytesInFlight {
            needed,
            available: in_flight,
        });
    }
    Ok(Resources {
        threads: threads as u32,
        registers_per_thread: per_thread(threads) as u32,
        stages: stages as u32,
        shared_bytes: (queries + stages * stage) as u32,
    })
}
