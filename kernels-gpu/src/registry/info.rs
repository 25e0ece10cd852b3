//! A row of the registry: what a kernel computes, in which tiles, and how much of an SM it takes.

use super::{Arch, Element, Family, Loads, Op};

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
