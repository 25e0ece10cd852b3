//! Page lists that differ by KV head, as in Quest and MInference.
//!
//! Each pair of a new token and a KV head becomes a request of a specification with one KV head. No data moves.
//! Queries `[tokens, q_heads, dim]` are `[tokens · kv_heads, group, dim]` in the same memory, and so are outputs and LSEs.
//! If the page stride of a pool is a multiple of its head stride, the part of a page that belongs to one head is a page of the view
//! that [`KvView::by_head`](super::KvView::by_head) returns.

use kernels_gpu::abi::KvStrides;

use crate::problem::{self, Batch, PageTable, ProblemError, Quantity, Spec};

/// Page lists of requests by KV head, and the batch that computes them.
///
/// ```
/// use half::bf16;
/// use tandem_attn::{
///     Cpu, kv::{KvView, PagesByHead}, plan::{PlanOptions, Planner},
///     problem::{KvLayout, Spec},
/// };
///
/// let (spec, page_size, pages) = (Spec::new(8, 2, 64), 16, 10);
/// let pool = vec![bf16::ONE; 10 * 16 * 2 * 64];
/// let view = KvView::new(&spec, KvLayout::Nhd, page_size, &pool, &pool);
/// let mut lists = PagesByHead::new(&spec, view.k_strides, pages)?;
/// // A decode: the first KV head reads two pages of which the last has 5 keys, the second one three.
/// lists.push(1, &[(&[7, 3], 21), (&[0, 7, 3], 37)])?;
///
/// let (cpu, batch) = (Cpu::new(), lists.batch());
/// let plan = Planner::new().plan(lists.spec(), &batch, &cpu.device(), &PlanOptions::default())?;
/// let (q, mut out) = (vec![bf16::ONE; 8 * 64], vec![bf16::ZERO; 8 * 64]);
/// cpu.run(&plan, &q, &[view.by_head()?], &mut out, None)?;
/// assert_eq!(out, q);
/// # Ok::<(), tandem_attn::Error>(())
/// ```
///
/// On a GPU pools and tensors are [`KvPool::by_head`](crate::gpu::KvPool::by_head) and
/// [`DeviceTensor::by_kv_head`](crate::gpu::DeviceTensor::by_kv_head).
#[derive(Clone, Debug)]
pub struct PagesByHead {
    spec: Spec,
    kv_heads: u32,
    pages: u32,
    strided: Strided,
    table: PageTable,
}

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

impl PagesByHead {
    /// An empty set of lists, for a pool of `pages` pages with these strides.
    ///
    /// # Errors
    /// [`ProblemError::ByHead`] if the specification has a window, sinks, hooks or a rotary embedding: lists skip keys, so positions are
    /// unknown, and data for each query head does not fit. [`ProblemError::UnevenHeads`], [`ProblemError::TooLarge`].
    pub fn new(spec: &Spec, strides: KvStrides, pages: u32) -> Result<Self, ProblemError> {
        let variant = &spec.variant;
        let what = [
            (variant.window_left.is_some(), "a window"),
            (variant.sinks, "sinks"),
            (variant.hooks.is_some(), "hooks"),
            (spec.rotary.is_some(), "a rotary embedding"),
        ];
        if let Some((_, what)) = what.into_iter().find(|&(there, _)| there) {
            return Err(ProblemError::ByHead { what });
        }
        let strided = Strided::by_head(strides, pages, spec.kv_heads)?;
        let one = Spec {
            q_heads: spec.group(),
            kv_heads: 1,
            ..*spec
        };
        Ok(Self {
            spec: one,
            kv_heads: spec.kv_heads,
            pages,
            strided,
            table: PageTable::new(strides.page_size, strided.pages),
        })
    }

    /// Adds a request: the number of new tokens, and for each KV head the pages that it reads and the number of keys on them (the last
    /// ones are those of the new tokens).
    ///
    /// # Errors
    /// [`ProblemError::HeadLists`], [`ProblemError::BlockTokens`], [`ProblemError::NoPage`], and those of [`PageTable::try_push`]. Nothing is added then.
    pub fn push(&mut self, tokens: u32, lists: &[(&[u32], u32)]) -> Result<(), ProblemError> {
        let (got, expected) = (lists.len(), self.kv_heads);
        if got != expected as usize {
            return Err(ProblemError::HeadLists { got, expected });
        }
        // A list without keys is allowed: its queries see nothing.
        let short = lists.iter().find(|(_, keys)| (1..tokens).contains(keys));
        if let (Some(&(_, keys)), true) = (short, self.spec.variant.causal) {
            return Err(ProblemError::BlockTokens { tokens, keys });
        }
        let mut table = PageTable::new(self.table.page_size, self.table.pool_pages);
        for token in 0..tokens {
            for (head, &(pages, keys)) in (0..).zip(lists) {
                if let Some(&got) = pages.iter().find(|&&page| page >= self.pages) {
                    let pages = self.pages;
                    return Err(ProblemError::NoPage { got, pages });
                }
                let hidden = match self.spec.variant.causal {
                    true => tokens - 1 - token,
                    false => 0,
                };
                let ids: Vec<u32> = pages
                    .iter()
                    .map(|&page| self.strided.id(page, head))
                    .collect();
                table.try_push(ids, keys.saturating_sub(hidden))?;
            }
        }
        for row in 0..table.row_blocks() {
            self.table.push(table.pages(row), table.kv_len(row));
        }
        Ok(())
    }

    /// The KV head of each query token of the [batch](Self::batch). A pool with a scale for each KV head becomes a view with a scale for
    /// each request ([`KvScales::Request`](super::KvScales::Request)): these are its `of_token`, and its requests the KV heads.
    #[must_use]
    pub fn heads(&self) -> Vec<u32> {
        let rows = self.table.row_blocks() as u32;
        (0..rows).map(|row| row % self.kv_heads).collect()
    }

    /// The specification of the [batch](Self::batch): one KV head and its group.
    #[must_use]
    pub const fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The batch: a request of one query token for each new token and KV head.
    #[must_use]
    pub fn batch(&self) -> Batch {
        let rows = self.table.row_blocks() as u32;
        Batch::new((0..=rows).collect(), self.table.clone())
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
                 PagesByHead::heads as the requests of the query tokens",
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
