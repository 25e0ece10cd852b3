//! The time of the attention of a step, for one layer on one GPU.
//!
//! There are two sources for the same numbers: the planner's own plan of the batch ([`AttentionModel::planned`]), and
//! a closed form of the planner's cost model ([`AttentionModel::estimate`]), which needs only
//! lengths and is used for long simulations. A test checks that they agree.

use serde::{Deserialize, Serialize};

use super::CacheType;
use tandem_attn::{
    plan::{
        DeviceDescription, Kernel, Plan, PlanError, PlanOptions, Planner, PrefillDescription,
        tiles::TileTable,
    },
    problem::{Batch, PageTable, Spec},
};

/// Time to read a key that another request of the step also reads, relative to a key from memory. It comes from L2: 9.2
/// TB/s on an H200 that reads memory at 4.5 TB/s (PAT's trees without packing, `docs/notes/serving.md`).
const FROM_L2: f64 = 0.49;

/// A prompt chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Query tokens.
    pub tokens: u32,
    /// Keys, including the chunk's own.
    pub keys: u32,
}

/// The lengths of a step that determine its time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepShape {
    /// Number of decodes (one token each).
    pub decodes: u32,
    /// Total keys of all decodes.
    pub decode_keys: u64,
    /// Prompt chunks.
    pub chunks: Vec<Chunk>,
    /// Number of tokens whose logits are needed.
    pub sampled: u32,
}

impl StepShape {
    /// A step of decodes with `keys` keys each.
    #[must_use]
    pub fn decodes(decodes: u32, keys: u32) -> Self {
        Self {
            decodes,
            decode_keys: u64::from(decodes) * u64::from(keys),
            sampled: decodes,
            ..Self::default()
        }
    }

    /// Adds a prompt chunk.
    #[must_use]
    pub fn with_chunk(mut self, tokens: u32, keys: u32) -> Self {
        self.chunks.push(Chunk { tokens, keys });
        self
    }

    /// Adds a decode.
    pub fn push_decode(&mut self, keys: u32) {
        self.decodes += 1;
        self.decode_keys += u64::from(keys);
    }

    /// Number of query tokens.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.decodes + self.chunks.iter().map(|chunk| chunk.tokens).sum::<u32>()
    }

    pub(super) fn clear(&mut self) {
        (self.decodes, self.decode_keys, self.sampled) = (0, 0, 0);
        self.chunks.clear();
    }
}

/// How prefill and decode share the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum Overlap {
    /// One after the other.
    #[default]
    Serial,
    /// In one kernel. Takes the time of the longer one plus this fraction of the shorter one, because both compete for
    /// the GPU.
    Pod {
        /// 0.1 is the POD-Attention paper's theoretical peak.
        loss: f64,
    },
}

impl Overlap {
    /// The loss at which the paper's best measurement, 1.59 times as fast as serial, is the best case
    /// (prefill and decode equally long): 2 / 1.59 − 1.
    pub const POD: Self = Self::Pod { loss: 0.26 };

    /// The same for caches of 8 bits, whose prefills and decodes run on separate SMs: the mean loss of the seven batches
    /// in `docs/notes/fp8.md`. One after the other, they take 1.07 times as long.
    pub const POD_8_BIT: Self = Self::Pod { loss: 0.84 };

    /// The loss of prefill and decode that share the GPU, with caches of this type.
    #[must_use]
    pub const fn pod(cache_type: CacheType) -> Self {
        match cache_type.is_8_bit() {
            true => Self::POD_8_BIT,
            false => Self::POD,
        }
    }

    /// Time of prefill and decode together.
    #[must_use]
    pub fn join(self, prefill_ns: f64, decode_ns: f64) -> f64 {
        match self {
            Self::Serial => prefill_ns + decode_ns,
            Self::Pod { loss } => prefill_ns.max(decode_ns) + loss * prefill_ns.min(decode_ns),
        }
    }
}

/// Separate times of prefill and decode, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AttentionTime {
    /// All chunks.
    pub prefill_ns: f64,
    /// All decodes.
    pub decode_ns: f64,
}

/// Model of the attention time of one layer on one GPU.
#[derive(Clone, Debug)]
pub struct AttentionModel {
    device: DeviceDescription,
    spec: Spec,
    decode: KernelTime,
    prefill: KernelTime,
}

/// Times of one kernel, with its units spread over the whole device.
#[derive(Clone, Copy, Debug, PartialEq)]
struct KernelTime {
    /// A unit's fixed time divided by the number of resident CTAs.
    fixed_ns: f64,
    units_per_item: f64,
    /// Times per key for all units of an item: reading it, and computing it for one row.
    read_ns: f64,
    row_ns: f64,
    m: u32,
    /// Query heads that share a tile.
    pack: u32,
    /// Fixed time of the last unit, which no other unit overlaps, and of the launch.
    tail_ns: f64,
}

impl KernelTime {
    fn new(
        device: &DeviceDescription,
        spec: &Spec,
        bytes_per_key: u64,
        kernel: Kernel,
        m: u32,
        pack: u32,
    ) -> Self {
        let units_per_item = f64::from(spec.q_heads / pack);
        let unit_ns = device.unit_ns(kernel);
        Self {
            fixed_ns: unit_ns / f64::from(device.resident_ctas(kernel)),
            units_per_item,
            read_ns: bytes_per_key as f64 / device.read_bytes_per_ns,
            row_ns: spec.flops_per_pair() as f64 / f64::from(spec.q_heads) / device.flops_per_ns
                * units_per_item,
            m,
            pack,
            tail_ns: device.launch_ns + unit_ns,
        }
    }

    /// Time of an item of `rows` rows, spread over the device.
    fn item_ns(&self, rows: u32, keys: f64) -> f64 {
        self.units_per_item * self.fixed_ns + keys * self.read_ns.max(f64::from(rows) * self.row_ns)
    }
}

impl AttentionModel {
    /// A model for the given heads on a device.
    #[must_use]
    pub fn new(device: &DeviceDescription, spec: &Spec) -> Self {
        Self::with_cache_type(device, spec, CacheType::Auto)
    }

    /// A model for the given heads, with keys and values in caches of a type.
    #[must_use]
    pub fn with_cache_type(device: &DeviceDescription, spec: &Spec, cache_type: CacheType) -> Self {
        let bytes = cache_type.bytes_per_token(spec);
        let spec = &cache_type.spec(*spec);
        let rows = spec.group();
        let tiles = TileTable::new(device, spec, None);
        let m = tiles
            .as_ref()
            .map_or(rows, |tiles| tiles.row_tile(1).max(1));
        // Chunks are long, so the configuration of the longest queries applies.
        let prefill = device.prefill.by_q_len.last();
        let (prefill_m, pack) = prefill.map_or((64, 1), |step| {
            let most = step.pack.unwrap_or(u32::MAX).min(rows);
            (
                step.rows,
                (1..=most)
                    .rev()
                    .find(|&pack| rows.is_multiple_of(pack))
                    .unwrap_or(1),
            )
        });
        // Where no prefill was compiled for the heads, decodes take prompts, in their widest tiles.
        let prefill = match tiles {
            Ok(tiles) if !tiles.has_prefills() => (Kernel::Decode, tiles.widest().max(1), rows),
            _ => (Kernel::Prefill, prefill_m, pack),
        };
        let time = |(kernel, m, pack)| KernelTime::new(device, spec, bytes, kernel, m, pack);
        Self {
            device: device.clone(),
            spec: *spec,
            decode: time((Kernel::Decode, m, rows)),
            prefill: time(prefill),
        }
    }

    /// Estimates the time from lengths alone, in closed form. Ignores shared prefixes.
    #[must_use]
    pub fn estimate(&self, shape: &StepShape) -> AttentionTime {
        self.estimate_repeated(shape, 0)
    }

    /// Estimates in closed form for requests that each read their shared prefix: all but the first read it from L2.
    #[must_use]
    pub fn estimate_unpacked(&self, shape: &StepShape, batch: &Batch) -> AttentionTime {
        self.estimate_repeated(shape, repeated_keys(batch))
    }

    /// Estimates in closed form; `repeated` of the decodes' keys are also read by other decodes.
    fn estimate_repeated(&self, shape: &StepShape, repeated: u64) -> AttentionTime {
        let mut time = AttentionTime::default();
        if shape.decodes > 0 {
            let kernel = &self.decode;
            let fixed = f64::from(shape.decodes) * kernel.units_per_item * kernel.fixed_ns;
            let rows_ns = f64::from(kernel.m) * kernel.row_ns;
            let from_memory = shape.decode_keys.saturating_sub(repeated) as f64;
            time.decode_ns = fixed
                + from_memory * kernel.read_ns.max(rows_ns)
                + repeated as f64 * (FROM_L2 * kernel.read_ns).max(rows_ns)
                + kernel.tail_ns;
        }
        let mut longest = 0.0_f64;
        for &Chunk { tokens, keys } in &shape.chunks {
            let kernel = &self.prefill;
            // Each packed head of a group adds rows.
            let (all_rows, of_tile) = (tokens * kernel.pack, f64::from(kernel.m / kernel.pack));
            let tiles = all_rows.div_ceil(kernel.m).max(1);
            // Tile i reads the keys before the chunk and those of tiles 0 to i.
            let within = f64::from(tiles - 1) * f64::from(tiles) / 2.0 * of_tile;
            let seen = f64::from(tiles) * f64::from(keys - tokens) + within + f64::from(tokens);
            let rows = kernel.m.min(all_rows.next_multiple_of(64));
            let fixed = f64::from(tiles - 1) * kernel.units_per_item * kernel.fixed_ns;
            time.prefill_ns += kernel.item_ns(rows, seen) + fixed;
            let ctas = f64::from(self.device.resident_ctas(Kernel::Prefill));
            let of_unit = f64::from(keys) * f64::from(rows) * kernel.row_ns * ctas;
            longest = longest.max(of_unit / kernel.units_per_item);
        }
        if !shape.chunks.is_empty() {
            // Few tiles do not fill the device. They are cut along their keys where that saves more than it costs.
            let cut =
                time.prefill_ns + f64::from(PrefillDescription::CUT_NS) + self.device.merge_ns;
            time.prefill_ns = time.prefill_ns.max(longest.min(cut));
            time.prefill_ns += self.prefill.tail_ns;
        }
        time
    }

    /// Predicts from the planner's own plans of the batch's decodes and of its prefills. Their items, shared prefixes
    /// included, are scheduled on the resident CTAs.
    ///
    /// # Errors
    /// As [`Planner::plan`].
    pub fn planned(
        &self,
        planner: &mut Planner,
        batch: &Batch,
    ) -> Result<AttentionTime, PlanError> {
        let mut time_of = |decodes: bool| -> Result<f64, PlanError> {
            let Some(batch) = half(batch, decodes) else {
                return Ok(0.0);
            };
            let plan = planner.plan(&self.spec, &batch, &self.device, &PlanOptions::default())?;
            Ok(self.predict(&plan))
        };
        Ok(AttentionTime {
            prefill_ns: time_of(false)?,
            decode_ns: time_of(true)?,
        })
    }

    /// Time of a plan: its makespan on the resident CTAs, its launches and its merges.
    #[must_use]
    pub fn predict(&self, plan: &Plan) -> f64 {
        let launches = plan.groups.len() as f64 * self.device.launch_ns;
        let merge_ns = if plan.merges.is_empty() {
            0.0
        } else {
            self.device.merge_ns
        };
        plan.schedule(&self.device).makespan_ns + launches + merge_ns
    }
}

/// Number of decode keys on pages that an earlier decode of the batch also uses.
fn repeated_keys(batch: &Batch) -> u64 {
    let Some(part) = batch.parts.first() else {
        return 0;
    };
    let table = &part.table;
    let mut seen = vec![false; table.pool_pages as usize];
    let mut repeated = 0;
    for request in (0..batch.requests()).filter(|&request| batch.q_len(request) == 1) {
        let mut left = table.kv_len(request);
        for &page in table.pages(request) {
            let keys = left.min(table.page_size);
            left -= keys;
            if std::mem::replace(&mut seen[page as usize], true) {
                repeated += u64::from(keys);
            }
        }
    }
    repeated
}

/// The requests of a batch with one query token, or those with more.
fn half(batch: &Batch, decodes: bool) -> Option<Batch> {
    let table = &batch.parts.first()?.table;
    let mut half = PageTable::new(table.page_size, table.pool_pages);
    let mut indptr = vec![0];
    for request in 0..batch.requests() {
        let q_len = batch.q_len(request);
        if q_len > 0 && (q_len == 1) == decodes {
            half.push(table.pages(request), table.kv_len(request));
            indptr.push(indptr[indptr.len() - 1] + q_len);
        }
    }
    (indptr.len() > 1).then(|| Batch::new(indptr, half))
}
