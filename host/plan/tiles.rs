//! Which tiles a device can run, and which of them an item takes.
//!
//! The solver derives the feasible `(m, n)` from a device description: shared memory, registers, bytes in
//! flight against latency × bandwidth, and the smallest matrix instruction. What the compiler really used
//! is checked against it by [`check_report`]. The selector then takes the smallest `m` that covers the rows
//! and the `n` that the description's decision tree gives for the number of keys.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{DeviceDescription, Kernel, PlanError, QueryStep, Tile};
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

/// The tiles that a plan for one specification on one device chooses from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TileTable {
    group: u32,
    /// The bounds of the decision tree for the key tile of decodes.
    key_steps: Vec<u32>,
    /// Row tiles of decodes, ascending, each with its key tile for every step.
    decode: Vec<(u32, Vec<u32>)>,
    prefill: Vec<PrefillTile>,
}

/// What prefills of some length take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillTile {
    /// Up to this many query tokens.
    pub up_to: u32,
    /// The tile.
    pub tile: Tile,
    /// Query heads that it holds, a divisor of the group.
    pub pack: u32,
}

/// The key tile that goes with `m` rows and is no larger than `n` if there is one: among what was compiled
/// for the heads, or where nothing was, by the solver.
fn key_tile(
    device: &DeviceDescription,
    spec: &Spec,
    kernel: Kernel,
    Tile { m, n }: Tile,
) -> Option<u32> {
    let serving = || device.compiled(kernel).iter().filter(|i| i.serves(spec));
    if serving().next().is_some() {
        let keys = || serving().filter(|instance| instance.m == m).map(|i| i.n);
        return keys().filter(|&keys| keys <= n).max().or(keys().min());
    }
    // A key tile that does not fit is halved, so that the tree holds for every head dimension.
    std::iter::successors(Some(n), |n| (*n >= 32).then_some(n / 32 * 16))
        .find(|&n| solve(device, spec, kernel, Tile { m, n }).is_ok())
}

/// The tile of a step of the tree; where its rows are not to be had, the most below, or the fewest above.
fn prefill_tile(device: &DeviceDescription, spec: &Spec, step: &QueryStep) -> Option<PrefillTile> {
    let compiled = device.prefill.compiled.iter().map(|instance| instance.m);
    let rows: Vec<u32> = compiled.chain((16..=step.m).step_by(16)).collect();
    let with = |m: u32| {
        let n = key_tile(device, spec, Kernel::Prefill, Tile { m, n: step.n })?;
        Some(Tile { m, n })
    };
    let below = || {
        rows.iter()
            .copied()
            .filter(|&m| m <= step.m)
            .filter_map(with)
    };
    let above = || {
        rows.iter()
            .copied()
            .filter(|&m| m > step.m)
            .filter_map(with)
    };
    let tile = below()
        .max_by_key(|tile| tile.m)
        .or_else(|| above().min_by_key(|tile| tile.m))?;
    Some(PrefillTile {
        up_to: step.up_to.unwrap_or(u32::MAX),
        tile,
        pack: packed_heads(spec, tile.m, step.pack),
    })
}

/// As many query heads of a KV head as a tile of `m` rows may hold: a divisor of their number.
fn packed_heads(spec: &Spec, m: u32, most: Option<u32>) -> u32 {
    let (group, most) = (spec.group(), most.unwrap_or(u32::MAX).min(m));
    let mut fitting = (1..=group.min(most)).rev();
    fitting
        .find(|&pack| group.is_multiple_of(pack))
        .unwrap_or(1)
}

impl TileTable {
    /// The tiles there are; `decode` and `prefill` (with the most query heads that it is to hold) replace the
    /// choice.
    ///
    /// # Errors
    /// [`PlanError::NoTile`] where a kernel has none.
    pub fn new(
        device: &DeviceDescription,
        spec: &Spec,
        decode: Option<Tile>,
        prefill: Option<(Tile, Option<u32>)>,
    ) -> Result<Self, PlanError> {
        let no_tile = |kernel| PlanError::NoTile {
            kernel,
            head_dim_qk: spec.head_dim_qk,
            head_dim_v: spec.head_dim_v,
            group: spec.group(),
            device: device.name.clone(),
        };
        let key_steps = &device.decode.n_by_kv_len;
        let keys = |m: u32| {
            let steps = key_steps.iter();
            let keys =
                steps.map(|step| key_tile(device, spec, Kernel::Decode, Tile { m, n: step.n }));
            Some((m, keys.collect::<Option<Vec<_>>>()?))
        };
        let mut row_tiles: Vec<_> = match decode {
            Some(tile) => vec![(tile.m, vec![tile.n; key_steps.len()])],
            None => device.decode.m.iter().filter_map(|&m| keys(m)).collect(),
        };
        // A gathered token brings all its heads.
        row_tiles.retain(|(m, _)| *m >= spec.group());
        if row_tiles.is_empty() {
            return Err(no_tile(Kernel::Decode));
        }
        let prefill = match prefill {
            Some((tile, most)) => Some(vec![PrefillTile {
                up_to: u32::MAX,
                tile,
                pack: packed_heads(spec, tile.m, most),
            }]),
            None => {
                let steps = device.prefill.by_q_len.iter();
                let fits = |step: &&QueryStep| step.head_dim.is_none_or(|d| d == spec.head_dim_qk);
                let tiles = steps
                    .filter(fits)
                    .map(|step| prefill_tile(device, spec, step));
                tiles.collect()
            }
        };
        Ok(Self {
            group: spec.group(),
            key_steps: key_steps
                .iter()
                .map(|step| step.up_to.unwrap_or(u32::MAX))
                .collect(),
            decode: row_tiles,
            prefill: prefill.ok_or_else(|| no_tile(Kernel::Prefill))?,
        })
    }

    /// The most query tokens that a tile of decodes holds.
    #[must_use]
    pub fn decode_tokens(&self) -> u32 {
        self.decode.last().map_or(0, |(m, _)| m / self.group)
    }

    /// The most query tokens that the tile holds which holds the fewest, at least 1: of the widest of decodes
    /// and all of prefills.
    #[must_use]
    pub fn fewest_tokens(&self) -> u32 {
        let prefill = self.prefill.iter().map(|step| step.tile.m / step.pack);
        prefill
            .chain([self.decode_tokens()])
            .min()
            .unwrap_or(1)
            .max(1)
    }

    /// The smallest row tile that covers so many query tokens of decodes; the largest where none does.
    #[must_use]
    pub fn row_tile(&self, tokens: u32) -> u32 {
        let rows = tokens * self.group;
        let mut tiles = self.decode.iter().map(|(m, _)| *m);
        let largest = self.decode.last().map_or(0, |(m, _)| *m);
        tiles.find(|m| *m >= rows).unwrap_or(largest)
    }

    /// The key tile of decodes with `m` rows, for so many keys.
    #[must_use]
    pub fn key_tile(&self, m: u32, kv_len: u32) -> u32 {
        let step = self.step(kv_len);
        let tile = self.decode.iter().find(|(other, _)| *other == m);
        tile.map_or(0, |(_, n)| n[step])
    }

    /// The key tile for so many keys that decodes with any number of rows can have.
    #[must_use]
    pub fn common_key_tile(&self, kv_len: u32) -> u32 {
        let step = self.step(kv_len);
        let keys = self.decode.iter().map(|(_, n)| n[step]);
        keys.min().unwrap_or(0)
    }

    fn step(&self, kv_len: u32) -> usize {
        let step = self.key_steps.iter().position(|&up_to| kv_len <= up_to);
        step.unwrap_or(self.key_steps.len() - 1)
    }

    /// What a prefill of so many query tokens takes.
    #[must_use]
    pub fn prefill(&self, tokens: u32) -> &PrefillTile {
        let step = self.prefill.iter().find(|step| tokens <= step.up_to);
        step.unwrap_or(&self.prefill[self.prefill.len() - 1])
    }

    /// What prefills take, by their query tokens.
    #[must_use]
    pub fn prefills(&self) -> &[PrefillTile] {
        &self.prefill
    }

    /// Every tile of a kernel that can be chosen, ascending.
    #[must_use]
    pub fn all(&self, kernel: Kernel) -> Vec<Tile> {
        let mut all: Vec<_> = match kernel {
            Kernel::Decode => {
                let tiles = self.decode.iter();
                tiles
                    .flat_map(|(m, n)| n.iter().map(|&n| Tile { m: *m, n }))
                    .collect()
            }
            Kernel::Prefill => self.prefill.iter().map(|step| step.tile).collect(),
        };
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
        let ctas = device.ctas_per_sm(line.kernel);
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
