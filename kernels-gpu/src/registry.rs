//! Every kernel there is, a [row](KernelInfo) each.
//!
//! A family states its kernels in one table (`table!` in its module). On the GPU each row of a table becomes an
//! entry for each 16-bit float; here it becomes a [`KernelInfo`], with what the same const functions say it takes.
//! The planner chooses among these rows, plans name them, and the GPU executor loads and launches them: no other
//! place knows the name of a kernel or the shape of one.

use crate::{measure, passes, sm80, sm90, step};

mod id;

pub use id::KernelId;

/// A module of kernels: what is compiled together, and a feature of this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// Hopper's prefill.
    Prefill,
    /// Hopper's prefill with products of 8 bits.
    PrefillF8,
    /// Hopper's decode of 8 and 16 rows.
    DecodeMma,
    /// Hopper's decode of 64 and 128 rows, of 8 beside a prefill, and of heads of 512.
    DecodeWgmma,
    /// Hopper's latent attention.
    Mla,
    /// Prefill with the instructions of Ampere.
    Sm80Prefill,
    /// Decode with the instructions of Ampere.
    Sm80Decode,
    /// Prefill and decode in one kernel, with the instructions of Ampere.
    Pod,
    /// What goes around attention.
    Passes,
    /// The step around attention.
    Step,
    /// To pages of 8 bits, from them, and to pages of keys that are turned.
    Quantise,
    /// What the library has of [variants](crate::variants).
    Variants,
    /// What measures the hardware.
    Measure,
}

impl Family {
    /// As the feature is called, and the module.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::PrefillF8 => "prefill_f8",
            Self::DecodeMma => "decode_mma",
            Self::DecodeWgmma => "decode_wgmma",
            Self::Mla => "mla",
            Self::Sm80Prefill => "sm80_prefill",
            Self::Sm80Decode => "sm80_decode",
            Self::Pod => "pod",
            Self::Passes => "passes",
            Self::Step => "step",
            Self::Quantise => "quantise",
            Self::Variants => "variants",
            Self::Measure => "measure",
        }
    }
}

/// The architecture whose instructions a kernel needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Arch {
    /// Ampere; everything after it has them, too.
    Sm80,
    /// Hopper, and nothing else.
    Sm90a,
}

impl Arch {
    /// Whether GPUs of this compute capability have them.
    #[must_use]
    pub const fn runs_on(self, (major, minor): (u32, u32)) -> bool {
        match self {
            Self::Sm80 => major >= 8,
            Self::Sm90a => major == 9 && minor == 0,
        }
    }
}

/// What a kernel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Attention of contiguous rows.
    Prefill,
    /// Attention of gathered rows, all query heads of a KV head in a tile.
    Decode,
    /// Both.
    Pod,
    /// Merges partial states.
    Merge(passes::merge::Shape),
    /// Merges what several GPUs computed.
    MergeRanks,
    /// Appends keys and values to their pages.
    Append {
        /// What a thread moves at a time.
        vector_bytes: u32,
    },
    /// Appends keys and values of 16 bits to pages of 8.
    Quantise,
    /// Appends keys of latent attention to rows of 656 bytes.
    QuantiseLatent,
    /// Widens keys and values of 8 bits by the scale of each token, for a prefill.
    Widen,
    /// Turns queries and keys by their positions, for a prefill.
    Turn,
    /// Brings heads to the dimension of a kernel, and back.
    Pad,
    /// Rounds queries to 16 bits.
    Narrow,
    /// From a fused projection to queries, and to keys and values in their pages.
    QkvStep {
        /// Heads of a thread.
        heads: u32,
        /// Pages are of 8 bits.
        quantises: bool,
    },
    /// Divides rows by the root of their mean square.
    RmsNorm {
        /// Vectors of a thread, at most.
        vectors: u32,
    },
    /// Activates gates and multiplies.
    Gate,
    /// Looks rows of a table up.
    Embed,
    /// Draws tokens from logits.
    Sample,
    /// Reads as fast as that can be done.
    MeasureRead,
    /// Multiplies as fast as that can be done.
    MeasureProducts,
    /// Runs two loops at two limits.
    MeasureOverlap,
}

/// How keys and values come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loads {
    /// By the tensor memory accelerator: pages of a multiple of 8 tokens.
    Pages,
    /// Row by row: pages of any size.
    Rows,
    /// Either way, as the launch says.
    PagesOrRows,
}

/// What outputs are made of, and in attention queries, keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// Single precision.
    F32,
    /// 8-bit float with 4 exponent bits.
    E4m3,
    /// 8-bit float with 5 exponent bits.
    E5m2,
    /// Whatever it is: bytes are moved.
    Any,
}

/// A kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// The entry.
    pub name: &'static str,
    /// The module that it is in.
    pub family: Family,
    /// The instructions that it needs.
    pub arch: Arch,
    /// What it does.
    pub op: Op,
    /// How keys and values come.
    pub loads: Loads,
    /// Elements.
    pub element: Element,
    /// Elements of keys and values, where they are others.
    pub cache: Option<Element>,
    /// Its products are of 8 bits.
    pub products_of_8_bits: bool,
    /// Each token and KV head of the cache has scales of its own.
    pub by_token: bool,
    /// KV heads that a unit reads together.
    pub kv_heads: u32,
    /// Rows of a tile, for each of its KV heads: query tokens × packed query heads.
    pub rows: u32,
    /// Keys of a block.
    pub keys: u32,
    /// Head dimension of queries and keys.
    pub head_dim: u32,
    /// Head dimension of values and outputs.
    pub value_dim: u32,
    /// Values are the first elements of the keys, and read with them.
    pub latent: bool,
    /// It has the soft cap, or it has not.
    pub cap: bool,
    /// It turns queries and keys by their positions.
    pub turns: bool,
    /// It takes sinks and masks of the last keys.
    pub extras: bool,
    /// No plan names it: it is launched in the place of the kernel of its tile that does not take
    /// [`extras`](Self::extras), of that of latent heads that loads pages, or of that of single KV heads.
    pub stands_in: bool,
    /// It leaves room on an SM for a CTA of another kernel.
    pub co_resident: bool,
    /// Rows of a tile may have page tables of their own ([joint](crate::abi::WorkItem::JOINT) items).
    pub multi_table: bool,
    /// Partial states are merged by a kernel behind it, never by its own CTAs.
    pub leaves_merges: bool,
    /// A decode that prompts take as well: for its heads there is no prefill.
    pub takes_prompts: bool,
    /// What tensor maps bring of keys and of values at a time: slabs of 64 columns, and tokens at most. None: all
    /// slabs, and a page or 32 tokens.
    pub boxes: Option<[[u32; 2]; 2]>,
    /// Tiles of queries in shared memory, of a prefill with tensor maps. With one, each warpgroup's come for themselves.
    pub query_stages: u32,
    /// Blocks of keys in shared memory.
    pub stages: u32,
    /// Units that a CTA may claim at a time, at most.
    pub run: u32,
    /// Threads of a CTA.
    pub threads: u32,
    /// Registers of a thread at launch, at most.
    pub registers: u32,
    /// Dynamic shared memory of a CTA.
    pub shared_bytes: u32,
    /// CTAs of an SM that it is launched with; 0: as many as find room.
    pub ctas_per_sm: u32,
}

impl KernelInfo {
    /// What a table's row begins with.
    pub(crate) const fn new(name: &'static str, family: Family, arch: Arch, op: Op) -> Self {
        Self {
            name,
            family,
            arch,
            op,
            loads: Loads::Rows,
            element: Element::Any,
            cache: None,
            products_of_8_bits: false,
            by_token: false,
            kv_heads: 1,
            rows: 0,
            keys: 0,
            head_dim: 0,
            value_dim: 0,
            latent: false,
            cap: false,
            turns: false,
            extras: true,
            stands_in: false,
            co_resident: false,
            multi_table: false,
            leaves_merges: false,
            takes_prompts: false,
            boxes: None,
            query_stages: 0,
            stages: 0,
            run: 1,
            threads: 0,
            registers: 0,
            shared_bytes: 0,
            ctas_per_sm: 0,
        }
    }

    /// Whether keys and values are of this type.
    #[must_use]
    pub fn takes_cache(&self, element: Element) -> bool {
        self.cache.unwrap_or(self.element) == element
    }

    /// What it computes, whatever its tile and however it loads.
    fn computes(&self) -> (Op, [Option<Element>; 2], [u32; 2], [bool; 4]) {
        let types = [Some(self.element), self.cache];
        let dims = [self.head_dim, self.value_dim];
        let flags = [self.latent, self.cap, self.products_of_8_bits, self.turns];
        (self.op, types, dims, flags)
    }

    /// Whether it computes attention.
    #[must_use]
    pub const fn is_attention(&self) -> bool {
        matches!(self.op, Op::Prefill | Op::Decode | Op::Pod)
    }

    /// CTAs that an SM holds at a time.
    #[must_use]
    pub const fn ctas_on(&self, sm: &Sm) -> u32 {
        if self.ctas_per_sm > 0 {
            return self.ctas_per_sm;
        }
        let by_memory = sm.shared_bytes / (self.shared_bytes + Sm::RESERVED);
        let by_registers = sm.registers / (self.threads * self.registers.next_multiple_of(8));
        if by_memory < by_registers {
            by_memory
        } else {
            by_registers
        }
    }

    /// Whether a CTA of each finds room on an SM, by shared memory and registers.
    #[must_use]
    pub const fn fits_beside(&self, other: &Self, sm: &Sm) -> bool {
        let shared = self.shared_bytes + other.shared_bytes + 2 * Sm::RESERVED;
        let registers = self.threads * self.registers + other.threads * other.registers;
        shared <= sm.shared_bytes && registers <= sm.registers
    }
}

/// What CTAs share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sm {
    /// Shared memory.
    pub shared_bytes: u32,
    /// Registers of 32 bits.
    pub registers: u32,
}

impl Sm {
    /// Of an H100 and an H200.
    pub const HOPPER: Self = Self {
        shared_bytes: 233_472,
        registers: 65_536,
    };
    /// Shared memory that the system takes of each CTA.
    pub const RESERVED: u32 = 1024;
    /// Dynamic shared memory that a CTA can have on Hopper.
    pub const HOPPER_CTA: u32 = Self::HOPPER.shared_bytes - Self::RESERVED;
}

/// Registers that the compiler may give each of so many threads, where an SM is to hold so many CTAs.
pub(crate) const fn registers(threads: u32, ctas: u32) -> u32 {
    let share = Sm::HOPPER.registers / (threads * ctas) / 8 * 8;
    if share < 255 { share } else { 255 }
}

/// The tables of all families.
const TABLES: [&[&[KernelInfo]]; 15] = [
    sm90::prefill::ROWS,
    sm90::prefill::f8::ROWS,
    sm90::decode_mma::ROWS,
    sm90::decode_wgmma::narrow::ROWS,
    sm90::decode_wgmma::wide::ROWS,
    sm90::decode_wgmma::large::ROWS,
    sm90::mla::ROWS,
    sm90::mla::narrow::ROWS,
    sm80::prefill::ROWS,
    sm80::decode::TABLE,
    sm80::pod::ROWS,
    passes::ROWS,
    step::ROWS,
    step::qkv::QUANTISING_ROWS,
    measure::ROWS,
];

const COUNT: usize = {
    let (mut count, mut table) = (0, 0);
    while table < TABLES.len() {
        let mut part = 0;
        while part < TABLES[table].len() {
            count += TABLES[table][part].len();
            part += 1;
        }
        table += 1;
    }
    count
};

/// Every kernel, family after family.
pub static KERNELS: [KernelInfo; COUNT] = {
    let mut all = [measure::ROWS[0][0]; COUNT];
    let (mut next, mut table) = (0, 0);
    while table < TABLES.len() {
        let mut part = 0;
        while part < TABLES[table].len() {
            let mut row = 0;
            while row < TABLES[table][part].len() {
                all[next] = TABLES[table][part][row];
                next += 1;
                row += 1;
            }
            part += 1;
        }
        table += 1;
    }
    all
};

/// An entry of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The module.
    pub family: Family,
    /// Its name there.
    pub name: String,
    /// The kernel that it is, or in the place of which it stands.
    pub kernel: KernelId,
}

/// What modules have: every kernel, and those of the library's [variants](crate::variants).
pub fn entries() -> impl Iterator<Item = Entry> {
    let kernels = KernelId::all().map(|kernel| Entry {
        family: kernel.info().family,
        name: kernel.info().name.into(),
        kernel,
    });
    let of_variant = |hooks: &'static crate::Hooks| {
        hooks.kernels().map(move |kernel| Entry {
            family: Family::Variants,
            name: hooks.entry(kernel.info()),
            kernel,
        })
    };
    kernels.chain(crate::variants::BUILT_IN.iter().flat_map(of_variant))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_fit_the_sm_they_are_made_for() {
        for row in &KERNELS {
            assert!(row.shared_bytes <= Sm::HOPPER_CTA, "{row:?}");
            assert!(row.ctas_on(&Sm::HOPPER) > 0, "{row:?}");
            let resident = row.ctas_per_sm * (row.shared_bytes + Sm::RESERVED);
            assert!(resident <= Sm::HOPPER.shared_bytes, "{row:?}");
            let registers = row.ctas_per_sm * row.threads * row.registers;
            assert!(registers <= Sm::HOPPER.registers, "{row:?}");
        }
    }

    #[test]
    fn each_co_resident_prefill_has_a_decode_that_fits_beside_it() {
        let of = |op| {
            KERNELS
                .iter()
                .filter(move |row| row.co_resident && row.op == op)
        };
        assert!(of(Op::Prefill).count() > 0);
        for prefill in of(Op::Prefill) {
            let fits = |row: &&KernelInfo| row.fits_beside(prefill, &Sm::HOPPER);
            let mut decodes = of(Op::Decode).filter(|row| row.element == prefill.element);
            assert!(decodes.any(|row| fits(&row)), "{prefill:?}");
        }
    }
}
