//! Where the rows of a pool are.

use std::ops::Range;

use kernels_gpu::abi::KvStrides;

use crate::tensor::ShapeError;

/// Checks that a pool has pages of this many tokens, and so many of them.
pub(super) fn check_rows(
    part: usize,
    (tensor, got): (&'static str, usize),
    strides: KvStrides,
    [page_size, pool_pages]: [u32; 2],
    heads: u32,
    head_dim: u32,
) -> Result<(), ShapeError> {
    if strides.page_size != page_size || page_size == 0 {
        return Err(ShapeError::PageSize {
            part,
            got: strides.page_size,
            expected: page_size,
        });
    }
    if heads == 0 {
        return Err(ShapeError::NoKvHeads { part });
    }
    let needed = match pool_pages {
        0 => 0,
        pages => row(strides, pages - 1, page_size - 1, heads - 1, head_dim).end,
    };
    if got < needed {
        return Err(ShapeError::PoolTooSmall {
            part,
            tensor,
            got,
            needed,
            pool_pages,
        });
    }
    Ok(())
}

/// Number of whole pages in this number of elements.
pub(super) fn pages_in(elements: usize, strides: KvStrides, heads: u32, head_dim: u32) -> u32 {
    if strides.page_size == 0 || heads == 0 {
        return 0;
    }
    let page = row(strides, 0, strides.page_size - 1, heads - 1, head_dim).end;
    match (elements.checked_sub(page), strides.page) {
        (None, _) => 0,
        (Some(_), 0) => 1,
        (Some(rest), stride) => u32::try_from(rest / stride as usize + 1).unwrap_or(u32::MAX),
    }
}

#[inline(always)]
pub(super) fn row(
    strides: KvStrides,
    page: u32,
    offset: u32,
    head: u32,
    head_dim: u32,
) -> Range<usize> {
    let start = page as usize * strides.page as usize
        + offset as usize * strides.token as usize
        + head as usize * strides.head as usize;
    start..start + head_dim as usize
}
