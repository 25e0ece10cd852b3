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

/// Whether the kernels for GPUs read 16-bit queries of `[tokens, heads, head_dim]` in place. They want the heads of a token
/// side by side, and vectors of 16 bytes.
pub fn reads_in_place(queries: &Layout) -> Result<bool> {
    const VECTOR: usize = 8;
    let Axes {
        first,
        shape: [tokens, heads, dim],
        strides: [token, head, element],
    } = Axes::of(queries)?;
    let dense = (dim <= 1 || element == 1) && (heads <= 1 || head == dim);
    let apart = token >= heads * dim || tokens <= 1;
    let aligned = first.is_multiple_of(VECTOR) && token.is_multiple_of(VECTOR);
    Ok(dense && apart && aligned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_that_kernels_cannot_read_are_copied() -> Result<()> {
        for (shape, strides, first, expected) in [
            ([5, 4, 64], [256, 64, 1], 0, true),
            // A fused projection.
            ([5, 4, 64], [768, 64, 1], 256, true),
            // Rows of a width, or from an element, that is no multiple of 8.
            ([5, 4, 64], [772, 64, 1], 0, false),
            ([5, 4, 64], [768, 64, 1], 4, false),
            ([1, 4, 64], [772, 64, 1], 0, false),
            // A part of each head, tokens behind heads, elements apart, and one token for all.
            ([5, 4, 64], [384, 96, 1], 0, false),
            ([5, 4, 64], [64, 320, 1], 0, false),
            ([5, 4, 64], [256, 1, 4], 0, false),
            ([5, 4, 64], [0, 64, 1], 0, false),
            // The stride of a single head does not matter, and no token needs no room.
            ([5, 1, 64], [256, 96, 1], 128, true),
            ([1, 4, 64], [8, 64, 1], 0, true),
            ([0, 4, 64], [256, 64, 1], 0, true),
        ] {
            let layout = Layout::new((&shape).into(), strides.to_vec(), first);
            assert_eq!(reads_in_place(&layout)?, expected, "{layout:?}");
        }
        Ok(())
    }
}
