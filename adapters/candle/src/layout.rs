//! The part of a storage that a tensor covers.

use candle_core::{Layout, Result, bail};

/// The first element, extents and strides.
#[derive(Clone, Copy, Debug)]
pub struct Axes<const RANK: usize> {
    pub first: usize,
    pub shape: [usize; RANK],
    pub strides: [usize; RANK],
}

impl<const RANK: usize> Axes<RANK> {
    pub fn of(layout: &Layout) -> Result<Self> {
        match (layout.dims().try_into(), layout.stride().try_into()) {
            (Ok(shape), Ok(strides)) => Ok(Self {
                first: layout.start_offset(),
                shape,
                strides,
            }),
            _ => bail!(
                "a tensor of {:?} where {RANK} axes are expected",
                layout.shape()
            ),
        }
    }
}

impl Axes<4> {
    /// The pages of a cache, or packed keys `[tokens, kv_heads, head_dim]` viewed as pages in place.
    pub fn pages(layout: &Layout, page_size: usize) -> Result<Self> {
        if layout.dims().len() == 4 {
            return Self::of(layout);
        }
        let Axes {
            first,
            shape: [tokens, heads, dim],
            strides: [token, head, element],
        } = Axes::of(layout)?;
        Ok(Self {
            first,
            shape: [tokens / page_size, page_size, heads, dim],
            strides: [token * page_size, token, head, element],
        })
    }
}
