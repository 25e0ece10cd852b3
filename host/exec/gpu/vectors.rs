//! Strides of pools whose rows are loaded one by one, in vectors of 16 bytes.

use kernels_gpu::abi::KvStrides;

use super::{
    KvPool,
    tensor::{VECTOR_BYTES, check_address},
};
use crate::{
    Error,
    problem::{Dtype, Quantity, Spec},
};

/// [`vectors`] of a pool's keys, and of its values.
pub(super) fn vectors_of(pool: &KvPool, kv_heads: u32) -> Result<[KvStrides; 2], Error> {
    let extents = [pool.pages, kv_heads];
    let of = |tensor, address, strides| vectors(tensor, address, strides, extents, pool.dtype);
    Ok([
        of("the key pool", pool.k, &pool.k_strides)?,
        of("the value pool", pool.v, &pool.v_strides)?,
    ])
}

/// Strides in vectors. Checks that rows begin at vectors, and that 32 bits can count the vectors of a pool with these
/// pages and KV heads.
pub(super) fn vectors(
    tensor: &'static str,
    address: u64,
    strides: &KvStrides,
    [pages, kv_heads]: [u32; 2],
    dtype: Dtype,
) -> Result<KvStrides, Error> {
    let elements = VECTOR_BYTES / dtype.bytes();
    check_address(tensor, address, pages == 0, VECTOR_BYTES)?;
    for (dimension, got) in [
        ("pages", strides.page),
        ("tokens", strides.token),
        ("heads", strides.head),
    ] {
        if !got.is_multiple_of(elements) {
            return Err(Error::Stride {
                tensor,
                dimension,
                got: got as usize,
                rule: format!("a multiple of {elements}"),
            });
        }
    }
    let reach = |count: u32, stride: u32| u64::from(count) * u64::from(stride / elements);
    let last = |count: u32, stride| reach(count.saturating_sub(1), stride);
    // If pages follow one another, their strides give the reach. Heads or tokens of a page may also be further apart
    // than pages.
    let row = last(pages, strides.page)
        + last(strides.page_size, strides.token)
        + last(kv_heads, strides.head);
    let (got, limit) = (
        reach(pages, strides.page).max(row + u64::from(Spec::MAX_HEAD_DIM / elements)),
        u64::from(u32::MAX),
    );
    if got > limit {
        let what = Quantity::Pool("vectors of 16 bytes in the KV pool");
        return Err(what.too_large(got, limit).into());
    }
    Ok(KvStrides {
        page: strides.page / elements,
        token: strides.token / elements,
        head: strides.head / elements,
        page_size: strides.page_size,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::KvLayout;

    /// Kernels count vectors in 32 bits.
    #[test]
    fn all_heads_of_a_pool_can_be_counted() {
        let of = |strides: &KvStrides, pages| {
            vectors("the key pool", 1 << 20, strides, [pages, 64], Dtype::BF16)
        };
        let dense = KvLayout::Nhd.strides(16, 64, 128);
        assert!(of(&dense, 250_000).is_ok());
        let error = of(&dense, 270_000).unwrap_err();
        assert!(error.to_string().contains("vectors of 16 bytes"), "{error}");
        // Heads that follow one another as a whole, 64 GiB or more in total: with 32 bits, the last head would be read
        // from the first.
        let by_head = |pages: u32| KvStrides {
            page: 16 * 128,
            token: 128,
            head: pages * 16 * 128,
            page_size: 16,
        };
        assert!(of(&by_head(250_000), 250_000).is_ok());
        let error = of(&by_head(270_000), 270_000).unwrap_err();
        assert!(error.to_string().contains("vectors of 16 bytes"), "{error}");
    }
}
