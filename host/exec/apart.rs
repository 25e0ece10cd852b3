//! What is checked of a pool before it is written: its rows do not overlap, and its pages are there.

use kernels_gpu::abi::KvStrides;

use crate::{Error, kv::PageCopy, problem::Spec};

/// Checks that the rows of `[pages, tokens, heads]` with these strides are apart. The axes may be nested in any order; the
/// stride of each must span the rows of all inner ones. Rows that overlap would be overwritten, on a GPU in any order.
pub(super) fn check_apart(
    tensor: &'static str,
    [pages, tokens, heads]: [usize; 3],
    row: usize,
    [page, token, head]: [usize; 3],
) -> Result<(), Error> {
    let mut axes = [
        (page, pages, "pages"),
        (token, tokens, "tokens"),
        (head, heads, "heads"),
    ];
    if axes.iter().any(|axis| axis.1 == 0) {
        return Ok(());
    }
    axes.sort_unstable_by_key(|axis| axis.0);
    let mut least = row;
    for (got, extent, dimension) in axes.into_iter().filter(|axis| axis.1 > 1) {
        if got < least {
            return Err(Error::Stride {
                tensor,
                dimension,
                got,
                rule: format!("at least {least}, so that no two rows overlap"),
            });
        }
        least = got.saturating_mul(extent - 1).saturating_add(least);
    }
    Ok(())
}

/// The same for a page pool.
pub(super) fn check_pool(
    tensor: &'static str,
    pages: u32,
    heads: u32,
    row: u32,
    strides: KvStrides,
) -> Result<(), Error> {
    let wide = |numbers: [u32; 3]| numbers.map(|number| number as usize);
    let KvStrides {
        page,
        token,
        head,
        page_size,
    } = strides;
    let shape = wide([pages, page_size, heads]);
    check_apart(tensor, shape, row as usize, wide([page, token, head]))
}

/// The same for the pools of keys and of values.
pub(super) fn check_sides(
    spec: &Spec,
    pages: u32,
    [k_strides, v_strides]: [KvStrides; 2],
) -> Result<(), Error> {
    let (heads, k, v) = (spec.kv_heads, spec.head_dim_qk, spec.head_dim_v);
    check_pool("the key pool", pages, heads, k, k_strides)?;
    check_pool("the value pool", pages, heads, v, v_strides)
}

/// Checks that values have memory of their own: those of latent attention are the first elements of the keys, and an append
/// of both would write them there.
pub(super) fn check_own_values(spec: &Spec, instead: &'static str) -> Result<(), Error> {
    if !spec.latent {
        return Ok(());
    }
    Err(Error::NoInstance {
        kernel: "append",
        asked:
            "keys and values of latent attention, whose values are the first elements of the keys"
                .into(),
        there: instead,
    })
}

/// Checks that a pool has the pages that are copied.
pub(super) fn check_copies(copies: &[PageCopy], pages: u64) -> Result<(), Error> {
    for (index, copy) in copies.iter().enumerate() {
        let both = [copy.from, copy.to].map(u64::from);
        if let Some(got) = both.into_iter().find(|&page| page >= pages) {
            return Err(Error::IndexOutOfRange {
                array: "copies",
                index,
                got: got.into(),
                limit: pages,
                of: "pages in the pool",
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(shape: [usize; 3], strides: [usize; 3]) -> Option<&'static str> {
        match check_apart("the pool", shape, 16, strides) {
            Ok(()) => None,
            Err(Error::Stride { dimension, .. }) => Some(dimension),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn rows_in_any_order_may_be_apart() {
        for strides in [
            [64, 32, 16],  // pages, tokens, heads
            [64, 16, 32],  // pages, heads, tokens
            [32, 96, 16],  // tokens, pages, heads
            [128, 32, 16], // keys and values of a page side by side
            [640, 80, 40], // gaps everywhere
        ] {
            assert_eq!(wrong([3, 2, 2], strides), None, "{strides:?}");
        }
        // Axes of one element have no stride, and empty pools no rows.
        assert_eq!(wrong([1, 1, 1], [0, 0, 0]), None);
        assert_eq!(wrong([0, 2, 1], [0, 0, 0]), None);
        assert_eq!(wrong([usize::MAX, 1, 1], [usize::MAX, 0, 0]), None);
    }

    #[test]
    fn rows_that_overlap_are_named() {
        for (strides, dimension) in [
            ([64, 0, 16], "tokens"),
            ([64, 32, 0], "heads"),
            ([0, 32, 16], "pages"),
            ([63, 32, 16], "pages"),
            ([64, 31, 16], "tokens"),
            ([64, 32, 15], "heads"),
        ] {
            assert_eq!(wrong([3, 2, 2], strides), Some(dimension), "{strides:?}");
        }
    }
}
