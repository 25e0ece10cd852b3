//! Vectors as arrays: loops over a constant number of lanes become vector instructions.

use bytemuck::{Pod, Zeroable};
use kernels_gpu::math::exp2_with;

/// `a · b + c`, fused where the instruction set has it (elsewhere that would be a library call).
#[inline(always)]
pub(super) fn mul_add<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

#[inline(always)]
pub(super) fn exp2<const FMA: bool>(x: f32) -> f32 {
    exp2_with(x, mul_add::<FMA>)
}

/// The larger; the first where the second is NaN. One instruction.
#[inline(always)]
pub(super) fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// The first `N` numbers of a slice.
#[inline(always)]
pub(super) fn load<const N: usize>(from: &[f32]) -> [f32; N] {
    let mut lanes = [0.0; N];
    lanes.copy_from_slice(&from[..N]);
    lanes
}

/// All lanes combined, halves first.
#[inline(always)]
pub(super) fn reduce<const N: usize>(mut lanes: [f32; N], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = N / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = f(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// A cache line.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// Memory that starts on a cache line and only grows.
#[derive(Debug, Default)]
pub(super) struct Buffer(Vec<Line>);

impl Buffer {
    /// The first `len` numbers, with whatever they were left at; finite unless NaN was put there.
    pub(super) fn floats(&mut self, len: usize) -> &mut [f32] {
        let lines = len.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; 16]));
        }
        &mut bytemuck::cast_slice_mut(&mut self.0)[..len]
    }
}
