//! Pools in which the part of a page that belongs to one KV head is a page of its own.

use kernels_gpu::abi::KvStrides;

use crate::problem::{self, ProblemError, Quantity};

/// How tables number the pages of a pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strided {
    /// Number of pages of the view from one page of the pool to the next.
    step: u32,
    /// Number of pages of the view.
    pub(super) pages: u32,
}

impl Strided {
    /// The pool as it is: pages with all heads.
    pub(super) const fn whole(pages: u32) -> Self {
        Self { step: 1, pages }
    }

    /// The part of a page that belongs to one head is a page of its own.
    pub(super) fn by_head(
        strides: KvStrides,
        pages: u32,
        kv_heads: u32,
    ) -> Result<Self, ProblemError> {
        let (_, step) = by_head(strides)?;
        let of_view = match u64::from(pages) {
            0 => 0,
            // The view ends with the heads of the last page.
            pages => (pages - 1) * u64::from(step) + u64::from(kv_heads),
        };
        problem::fits(
            Quantity::Pool("pages × heads of the pool"),
            of_view,
            u32::MAX.into(),
        )?;
        Ok(Self {
            step,
            pages: of_view as u32,
        })
    }

    /// The id of a page of the pool, or of a head's part of it.
    pub(super) const fn id(&self, page: u32, head: u32) -> u32 {
        page * self.step + head
    }
}

/// The strides of the parts of pages that belong to one head, as pages; and the number of such pages from one page of the
/// pool to the next.
fn by_head(strides: KvStrides) -> Result<(KvStrides, u32), ProblemError> {
    let KvStrides { page, head, .. } = strides;
    if head == 0 || !page.is_multiple_of(head) {
        return Err(ProblemError::UnevenHeads { page, head });
    }
    let of_head = KvStrides {
        page: head,
        ..strides
    };
    Ok((of_head, page / head))
}

/// What a view of a pool by head has as scales.
#[cfg(feature = "unstable")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScalesByHead {
    /// Those of the pool, or none.
    Same,
    /// The pool has a scale for each KV head.
    OfHeads,
    /// The pool has scales of another kind, in words.
    Others(&'static str),
}

/// The strides of keys and of values of a view by head, and the number of its pages from one page of the pool to the next.
#[cfg(feature = "unstable")]
pub(crate) fn view_by_head(
    [k, v]: [KvStrides; 2],
    scales: ScalesByHead,
    in_parts: bool,
) -> Result<([KvStrides; 2], u32), ProblemError> {
    let refused = |what, instead| Err(ProblemError::PoolByHead { what, instead });
    match scales {
        ScalesByHead::Same => {}
        ScalesByHead::OfHeads => {
            return refused(
                "a scale for each KV head",
                "make the view without scales, and give it KvScales::Request: one request for each KV head, and \
                 PagesByHead::heads as the requests of the query tokens; for a block mask by head, run each KV head \
                 by itself, with its scale as KvScales::Tensor",
            );
        }
        ScalesByHead::Others(what) => {
            return refused(
                what,
                "give it one scale for all keys and one for all values",
            );
        }
    }
    if in_parts {
        return refused("keys in two pools", "use one pool for whole keys");
    }
    let ((k, of_k), (v, of_v)) = (by_head(k)?, by_head(v)?);
    if of_k != of_v {
        return refused(
            "different layouts of keys and values",
            "use one layout for both",
        );
    }
    Ok(([k, v], of_k))
}
