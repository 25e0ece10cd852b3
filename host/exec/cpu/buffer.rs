//! Memory of one thread.

use bytemuck::{Pod, Zeroable};

/// A cache line.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// Memory that starts on a cache line and only grows.
#[derive(Debug, Default)]
pub(super) struct Buffer(Vec<Line>);

impl Buffer {
    /// The first `len` numbers, with their previous values: finite unless NaN was written there.
    pub(super) fn floats(&mut self, len: usize) -> &mut [f32] {
        let lines = len.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; 16]));
        }
        &mut bytemuck::cast_slice_mut(&mut self.0)[..len]
    }
}
