//! What the kernels take that measure the hardware.

use bytemuck::{Pod, Zeroable};

/// What the kernels that measure the hardware's limits take.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct CeilingParams {
    /// What is read.
    pub source: u64,
    /// Four bytes that may be written.
    pub sink: u64,
    /// Tiles to read, or rounds of products.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
}

/// What [`loops`](crate::measure::loops) work on.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct LoopsParams {
    /// `[elements]` f32 each: the memory-bound loop adds the first two to the third.
    pub memory: [u64; 3],
    /// `[products]` f32: the compute-bound loop multiplies each again and again.
    pub compute: u64,
    /// `[2 + SMs]` u32, zero before a launch: blocks begun of each loop, and on each SM.
    pub counters: u64,
    /// Elements of the memory-bound loop.
    pub elements: u32,
    /// Elements of the compute-bound loop.
    pub products: u32,
    /// What each is multiplied by.
    pub factor: f32,
    /// How often.
    pub rounds: u32,
    /// Blocks of each loop.
    pub blocks: u32,
    /// Who does what: see [`Binding`](crate::measure::loops::Binding).
    pub binding: u32,
}
