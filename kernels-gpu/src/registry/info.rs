//! A row of the registry: what a kernel computes, its tile, and its resources on an SM.

use super::{Arch, Element, Family, Loads, Op};

/// A kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelInfo {
    /// The name of its entry.
    pub name: &'static str,
    /// The module that it is in.
    pub family: Family,
    /// The architecture whose instructions it needs.
    pub arch: Arch,
    /// What it does.
    pub op: Op,
    /// How keys and values are loaded.
    pub loads: Loads,
    /// Type of the elements.
    pub element: Element,
    /// Type of keys and values, if different.
    pub cache: Option<Element>,
    /// It multiplies 8-bit operands.
    pub products_of_8_bits: bool,
    /// The cache has a scale per token and KV head.
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
    /// Latent attention (MLA): values are the first elements of the keys and are read with them.
    pub latent: bool,
    /// It applies a soft cap.
    pub cap: bool,
    /// It applies rotary embeddings.
    pub turns: bool,
    /// It supports sinks and masks of the last keys.
    pub extras: bool,
    /// A prefill with Ampere's instructions that pads heads, and applies the scales of 8-bit keys that a launch before it
    /// widened.
    pub general: bool,
    /// It supports sinks that all tokens share. Kernels with [`extras`](Self::extras) support all sinks.
    pub sinks: bool,
    /// No plan names it. It is launched instead of a planned kernel with the same tile: one without
    /// [`extras`](Self::extras), one that is not [`general`](Self::general), one for latent heads that loads pages or does not
    /// [merge pieces](Self::merges_pieces), or one for single KV heads.
    pub stands_in: bool,
    /// Co-resident: it leaves room on an SM for a CTA of another kernel.
    pub co_resident: bool,
    /// Rows of a tile may have page tables of their own ([joint](crate::abi::WorkItem::JOINT) items).
    pub multi_table: bool,
    /// Its partial states are merged by a following kernel, and not by its own CTAs, except for [pieces](Self::merges_pieces).
    pub leaves_merges: bool,
    /// It [merges](crate::abi::PieceOf) two pieces of the same rows from registers, where the host says so. Its other partial states
    /// are merged by a following kernel.
    pub merges_pieces: bool,
    /// A decode that is also used for prompts, since its head dimension has no prefill.
    pub takes_prompts: bool,
    /// It takes less shared memory than [another kernel that does the same](super::KernelId::is_replaced), which is faster
    /// where it fits.
    pub smaller: bool,
    /// The TMA boxes of keys and of values: slabs of 64 columns, and the largest number of tokens. `None`: all slabs,
    /// and a page or 32 tokens.
    pub boxes: Option<[[u32; 2]; 2]>,
    /// Stages of queries, for a prefill with tensor maps. With one, each warpgroup's queries are loaded separately.
    pub query_stages: u32,
    /// Stages of keys.
    pub stages: u32,
    /// The largest number of units that a CTA claims at a time.
    pub run: u32,
    /// Threads of a CTA.
    pub threads: u32,
    /// The largest number of registers of a thread at launch.
    pub registers: u32,
    /// Dynamic shared memory of a CTA.
    pub shared_bytes: u32,
    /// CTAs per SM with which it is launched; 0: as many as fit.
    pub ctas_per_sm: u32,
}

impl KernelInfo {
    /// The defaults of a table's row.
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
            general: false,
            sinks: true,
            stands_in: false,
            co_resident: false,
            multi_table: false,
            leaves_merges: false,
            merges_pieces: false,
            takes_prompts: false,
            smaller: false,
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

    /// What it computes, regardless of its tile and of how it loads.
    pub(super) fn computes(&self) -> (Op, [Option<Element>; 2], [u32; 2], [bool; 4]) {
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

    /// The number of its CTAs that fit on an SM.
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

    /// Whether a CTA of each kernel fits on an SM together, by shared memory and registers.
    #[must_use]
    pub const fn fits_beside(&self, other: &Self, sm: &Sm) -> bool {
        let shared = self.shared_bytes + other.shared_bytes + 2 * Sm::RESERVED;
        let registers = self.threads * self.registers + other.threads * other.registers;
        shared <= sm.shared_bytes && registers <= sm.registers
    }
}

/// The resources of an SM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sm {
    /// Bytes of shared memory.
    pub shared_bytes: u32,
    /// Registers of 32 bits.
    pub registers: u32,
}

impl Sm {
    /// An SM of H100 and H200.
    pub const HOPPER: Self = Self {
        shared_bytes: 233_472,
        registers: 65_536,
    };
    /// Shared memory per CTA that the system reserves.
    pub const RESERVED: u32 = 1024;
    /// The largest dynamic shared memory of a CTA on Hopper.
    pub const HOPPER_CTA: u32 = Self::HOPPER.shared_bytes - Self::RESERVED;
}

/// The largest number of registers per thread with which `ctas` CTAs of `threads` threads fit on an SM.
pub(crate) const fn registers(threads: u32, ctas: u32) -> u32 {
    let share = Sm::HOPPER.registers / (threads * ctas) / 8 * 8;
    if share < 255 { share } else { 255 }
}
