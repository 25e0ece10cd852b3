//! Which tiles a device can run, and which of them an item takes.
//!
//! The solver derives the feasible `(m, n)` from a device description: shared memory, registers, bytes in
//! flight against latency × bandwidth, and the smallest matrix instruction. What the compiler really used
//! is checked against it by [`check_report`]. The selector then takes the smallest `m` that covers the rows
//! and the `n` that the description's decision tree gives for the number of keys.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{DeviceDescription, Kernel, PlanError, Tile};
use crate::problem::Spec;

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
pub const MAX_STAGES: u32 = 8;

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
        Kernel::Prefill | Kernel::PrefillPacked if device.compute_capability.0 >= 9 => 64,
        Kernel::Prefill | Kernel::PrefillPacked => 16,
    };
    if m == 0 || n == 0 || !m.is_multiple_of(smallest_m) || !n.is_multiple_of(16) {
        return Err(Infeasible::Instruction);
    }
    let ctas = u64::from(device.kernel(kernel).ctas_per_sm);
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

/// The tiles that a plan for one specification on one device chooses from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TileTable {
    group: u32,
    decode: KernelTiles,
    prefill: KernelTiles,
    prefill_packed: KernelTiles,
}

/// Per kernel: row tiles, ascending, each with the key tiles of the decision tree that it can afford.
#[derive(Clone, Debug, Default, PartialEq)]
struct KernelTiles {
    /// Rows of a tile that one query token takes.
    rows_per_token: u32,
    steps: Vec<u32>,
    m: Vec<(u32, Vec<u32>)>,
}

impl KernelTiles {
    fn new(
        device: &DeviceDescription,
        spec: &Spec,
        kernel: Kernel,
        only: Option<Tile>,
    ) -> Result<Self, PlanError> {
        let description = device.kernel(kernel);
        let rows_per_token = kernel.rows_per_token(spec);
        let affordable = |m: u32, n: u32| {
            // A key tile that does not fit is halved, so that the tree holds for every head dimension.
            std::iter::successors(Some(n), |n| (n / 2 >= 16).then_some(n / 2))
                .find(|&n| solve(device, spec, kernel, Tile { m, n }).is_ok())
        };
        let candidates = match only {
            Some(tile) => vec![(tile.m, vec![tile.n; description.n_by_kv_len.len()])],
            None => {
                let keys = |m: u32| {
                    let steps = description.n_by_kv_len.iter();
                    steps
                        .map(|step| affordable(m, step.n))
                        .collect::<Option<Vec<_>>>()
                };
                description
                    .m
                    .iter()
                    .filter_map(|&m| keys(m).map(|n| (m, n)))
                    .collect()
            }
        };
        let m: Vec<_> = candidates
            .into_iter()
            .filter(|(m, _)| *m >= rows_per_token)
            .collect();
        if m.is_empty() {
            return Err(PlanError::NoTile {
                kernel,
                head_dim_qk: spec.head_dim_qk,
                head_dim_v: spec.head_dim_v,
                group: spec.group(),
                device: device.name.clone(),
            });
        }
        let steps = description
            .n_by_kv_len
            .iter()
            .map(|step| step.up_to.unwrap_or(u32::MAX))
            .collect();
        Ok(Self {
            rows_per_token,
            steps,
            m,
        })
    }

    fn row_tile(&self, tokens: u32) -> u32 {
        let rows = tokens * self.rows_per_token;
        let covers = self.m.iter().map(|(m, _)| *m).find(|m| *m >= rows);
        covers.unwrap_or_else(|| self.m.last().map_or(0, |(m, _)| *m))
    }

    fn key_tile(&self, m: u32, kv_len: u32) -> u32 {
        let step = self
            .steps
            .iter()
            .position(|&up_to| kv_len <= up_to)
            .unwrap_or(self.steps.len() - 1);
        let n = self
            .m
            .iter()
            .find(|(other, _)| *other == m)
            .map(|(_, n)| n[step]);
        n.unwrap_or(0)
    }
}

impl TileTable {
    /// The feasible tiles of every kernel; `decode` and `prefill` replace the choice for those.
    ///
    /// # Errors
    /// [`PlanError::NoTile`] where a kernel has none.
    pub fn new(
        device: &DeviceDescription,
        spec: &Spec,
        decode: Option<Tile>,
        prefill: Option<Tile>,
    ) -> Result<Self, PlanError> {
        Ok(Self {
            group: spec.group(),
            decode: KernelTiles::new(device, spec, Kernel::Decode, decode)?,
            prefill: KernelTiles::new(device, spec, Kernel::Prefill, prefill)?,
            // Where no packed tile holds a group, short chunks run unpacked.
            prefill_packed: KernelTiles::new(device, spec, Kernel::PrefillPacked, prefill)
                .unwrap_or_default(),
        })
    }

    fn kernel(&self, kernel: Kernel) -> &KernelTiles {
        match kernel {
            Kernel::Decode => &self.decode,
            Kernel::Prefill => &self.prefill,
            Kernel::PrefillPacked => &self.prefill_packed,
        }
    }

    /// Whether the kernel has a tile at all.
    #[must_use]
    pub fn has(&self, kernel: Kernel) -> bool {
        !self.kernel(kernel).m.is_empty()
    }

    /// The most query tokens that a tile of the kernel holds.
    #[must_use]
    pub fn max_tokens(&self, kernel: Kernel) -> u32 {
        let tiles = self.kernel(kernel);
        tiles.m.last().map_or(0, |(m, _)| m / tiles.rows_per_token)
    }

    /// The tile for `tokens` query tokens against `kv_len` keys: the smallest `m` that covers the rows, the
    /// `n` of the decision tree.
    #[must_use]
    pub fn select(&self, kernel: Kernel, tokens: u32, kv_len: u32) -> Tile {
        let m = self.row_tile(kernel, tokens);
        Tile {
            m,
            n: self.key_tile(kernel, m, kv_len),
        }
    }

    /// The `n` of a tile with `m` rows, for so many keys.
    #[must_use]
    pub fn key_tile(&self, kernel: Kernel, m: u32, kv_len: u32) -> u32 {
        self.kernel(kernel).key_tile(m, kv_len)
    }

    /// The `n` for so many keys that tiles of any number of rows can have.
    #[must_use]
    pub fn common_key_tile(&self, kernel: Kernel, kv_len: u32) -> u32 {
        let tiles = self.kernel(kernel);
        let rows = tiles.m.iter().map(|(m, _)| tiles.key_tile(*m, kv_len));
        rows.min().unwrap_or(0)
    }

    /// The smallest `m` that covers the rows of `tokens` query tokens.
    #[must_use]
    pub fn row_tile(&self, kernel: Kernel, tokens: u32) -> u32 {
        self.kernel(kernel).row_tile(tokens)
    }

    /// Every tile that [`select`](Self::select) can return, ascending.
    #[must_use]
    pub fn all(&self, kernel: Kernel) -> Vec<Tile> {
        let tiles = self.kernel(kernel).m.iter();
        let mut all: Vec<_> = tiles
            .flat_map(|(m, n)| n.iter().map(|&n| Tile { m: *m, n }))
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// What the compiler made of one kernel: a line of the static report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelReport {
    /// Name of the entry.
    pub entry: String,
    /// The kernel.
    pub kernel: Kernel,
    /// Its tile.
    pub tile: Tile,
    /// Threads of a CTA.
    pub threads: u32,
    /// Registers per thread.
    pub registers: u32,
    /// Shared memory, static and dynamic, in bytes.
    pub shared_bytes: u32,
    /// Bytes spilled to local memory.
    pub spill_bytes: u32,
}

/// A kernel whose compiled form does not keep what the device description promises.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disagreement {
    /// Name of the entry, or of the tile where no entry was compiled for it.
    pub entry: String,
    /// What is wrong.
    pub reason: String,
}

/// Compares what the compiler used with what the device has and what the planner may choose.
///
/// Found are: a CTA count that registers or shared memory do not allow, spills, and tiles that the planner
/// may choose for `spec` but that were not compiled.
///
/// # Errors
/// [`PlanError::NoTile`] where the heads have no tile at all.
pub fn check_report(
    device: &DeviceDescription,
    spec: &Spec,
    report: &[KernelReport],
) -> Result<Vec<Disagreement>, PlanError> {
    let table = TileTable::new(device, spec, None, None)?;
    let mut found = Vec::new();
    for line in report {
        let mut wrong = |reason: String| {
            found.push(Disagreement {
                entry: line.entry.clone(),
                reason,
            });
        };
        let ctas = device.kernel(line.kernel).ctas_per_sm;
        let registers = ctas * line.threads * line.registers.next_multiple_of(8);
        if registers > device.registers_per_sm {
            let available = device.registers_per_sm;
            wrong(format!(
                "{ctas} CTAs take {registers} registers of an SM's {available}"
            ));
        }
        // The driver keeps 1 KB of an SM's shared memory per CTA for itself.
        let shared = ctas * (line.shared_bytes + 1024);
        if line.shared_bytes > device.shared_bytes_per_cta || shared > device.shared_bytes_per_sm {
            let (cta, sm) = (device.shared_bytes_per_cta, device.shared_bytes_per_sm);
            wrong(format!(
                "{ctas} CTAs of {} bytes of shared memory; a CTA may have {cta}, an SM has {sm}",
                line.shared_bytes
            ));
        }
        if line.spill_bytes > 0 {
            wrong(format!("{} bytes spilled", line.spill_bytes));
        }
    }
    for kernel in Kernel::ALL {
        for tile in table.all(kernel) {
            if !report
                .iter()
                .any(|line| line.kernel == kernel && line.tile == tile)
            {
                let reason = "the planner may choose this tile, but it was not compiled".to_owned();
                found.push(Disagreement {
                    entry: format!("{kernel:?} {tile}"),
                    reason,
                });
            }
        }
    }
    Ok(found)
}
