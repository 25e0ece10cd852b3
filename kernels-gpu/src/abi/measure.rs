//! Parameters of the kernels that measure the hardware.

use bytemuck::{Pod, Zeroable};

/// Parameters of the kernels that measure the hardware's limits.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct CeilingParams {
    /// The memory to read.
    pub source: u64,
    /// Four bytes that may be written.
    pub sink: u64,
    /// Tiles to read, or rounds of products.
    pub count: u32,
    /// Zero.
    pub reserved: u32,
}

/// Parameters of [`loops`](crate::measure::loops).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct LoopsParams {
    /// `[elements]` f32 each: the memory-bound loop adds the first two to the third.
    pub memory: [u64; 3],
    /// `[products]` f32: the compute-bound loop multiplies each repeatedly.
    pub compute: u64,
    /// `[2 + SMs]` u32, zero before a launch: started blocks of each loop, and of each SM.
    pub counters: u64,
    /// Elements of the memory-bound loop.
    pub elements: u32,
    /// Elements of the compute-bound loop.
    pub products: u32,
    /// The factor of each multiplication.
    pub factor: f32,
    /// Multiplications per element.
    pub rounds: u32,
    /// Blocks of each loop.
    pub blocks: u32,
    /// Which blocks run which loop: a [`Binding`](crate::measure::loops::Binding).
    pub binding: u32,
}
