//! How large a plan may get.

use serde::{Deserialize, Serialize};

use super::{Plan, PlanError};
use crate::plan::conversion;

/// What prefills have together by default, at most: with 8 heads of 128, 1 GiB of keys and values of 16 bits.
const PREFILL_KEYS: u32 = 1 << 18;

/// The largest batches that are to be planned.
///
/// ```
/// use tandem_attn::plan::BatchLimits;
///
/// // 256 requests of up to 8192 keys on pages of 16, and chunks of prompts of up to 4096 tokens with them.
/// let limits = BatchLimits::decodes(256, 8192, 16).with_query_tokens(256 + 4096);
/// assert_eq!(limits.page_ids, 256 * 512);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BatchLimits {
    /// Requests (row blocks of a part).
    pub requests: u32,
    /// Query tokens of all requests.
    pub query_tokens: u32,
    /// Page ids of all parts.
    pub page_ids: u32,
    /// Keys of one request; matters for fixed splits, and for the default of [`prefill_keys`](Self::prefill_keys).
    pub kv_len: u32,
    /// Keys that the prefills of a batch have together. Matters where keys have 8 bits or are turned by their positions: the
    /// workspace then has room for so many keys and values of 16 bits. By default those of all requests, but no more than 262,144 and those of one.
    #[serde(default)]
    pub prefill_keys: u32,
    /// Parts of a batch.
    pub parts: u32,
    /// Partial states that a query token may have on average. Prefixes that are shared on several levels
    /// need one per level and one more; what needs more than this is packed less.
    pub states_per_token: u32,
    /// Whether batches may say which of the last keys each query token sees.
    pub trees: bool,
}

impl BatchLimits {
    /// Up to so many requests, each with one query token and up to `kv_len` keys, or fewer with more queries.
    #[must_use]
    pub const fn decodes(requests: u32, kv_len: u32, page_size: u32) -> Self {
        Self {
            requests,
            query_tokens: requests,
            page_ids: requests.saturating_mul(kv_len.div_ceil(match page_size {
                0 => 1,
                _ => page_size,
            })),
            kv_len,
            prefill_keys: {
                let all = requests.saturating_mul(kv_len);
                let most = if kv_len > PREFILL_KEYS {
                    kv_len
                } else {
                    PREFILL_KEYS
                };
                if all < most { all } else { most }
            },
            parts: 1,
            states_per_token: 8,
            trees: false,
        }
    }

    /// With so many query tokens of all requests.
    #[must_use]
    pub const fn with_query_tokens(mut self, query_tokens: u32) -> Self {
        self.query_tokens = query_tokens;
        self
    }

    /// With so many keys of all prefills of a batch: those of requests that are given more query tokens than a decode
    /// has, and where pages are no multiple of 8 tokens those of all requests.
    #[must_use]
    pub const fn with_prefill_keys(mut self, prefill_keys: u32) -> Self {
        self.prefill_keys = prefill_keys;
        self
    }

    /// With [ancestors](crate::problem::Batch::ancestors) of query tokens, or without.
    #[must_use]
    pub const fn with_trees(mut self, trees: bool) -> Self {
        self.trees = trees;
        self
    }

    /// With so many page ids of all parts.
    #[must_use]
    pub const fn with_page_ids(mut self, page_ids: u32) -> Self {
        self.page_ids = page_ids;
        self
    }

    /// With so many parts of a batch.
    #[must_use]
    pub const fn with_parts(mut self, parts: u32) -> Self {
        self.parts = parts;
        self
    }

    /// With so many partial states of a query token, on average.
    #[must_use]
    pub const fn with_states_per_token(mut self, states_per_token: u32) -> Self {
        self.states_per_token = states_per_token;
        self
    }
}

/// How many entries each array of a plan has, or may have.
///
/// ```
/// use tandem_attn::plan::{BatchLimits, Bound, DeviceDescription, PlanOptions, WorkspaceLayout};
/// use tandem_attn::problem::Spec;
///
/// let spec = Spec::new(32, 8, 128);
/// let device = DeviceDescription::named("h200")?;
/// let limits = BatchLimits::decodes(256, 8192, 16);
/// let bound = Bound::new(&spec, &device, &PlanOptions::default(), &limits)?;
/// // The size is known before anything is planned; offsets never move.
/// let layout = WorkspaceLayout::new(&spec, &bound);
/// assert!(layout.bytes > layout.upload_bytes);
/// // A planner with these options keeps to it.
/// let options = PlanOptions::default().with_bound(bound);
/// # let _ = options;
/// # Ok::<(), tandem_attn::plan::PlanError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bound {
    /// Work items.
    pub items: u32,
    /// Rows of gathered items.
    pub rows: u32,
    /// Page ids.
    pub page_ids: u32,
    /// Merges.
    pub merges: u32,
    /// Partial states.
    pub slots: u32,
    /// Query tokens with ancestors.
    #[serde(default)]
    pub ancestors: u32,
    /// Query tokens whose heads are padded for the kernels of a GPU, or whose queries are rounded or turned for them.
    #[serde(default)]
    pub padded_tokens: u32,
    /// Pages of 64 keys that prefills convert from 8 bits to 16, or turn by their positions.
    #[serde(default)]
    pub converted_pages: u32,
}

impl Bound {
    /// What a plan takes.
    #[must_use]
    pub fn of(plan: &Plan) -> Self {
        Self {
            items: plan.items.len() as u32,
            rows: plan.rows.len() as u32,
            page_ids: plan.page_ids.len() as u32,
            merges: plan.merges.len() as u32,
            slots: plan.slots,
            ancestors: plan.ancestors.len() as u32,
            padded_tokens: match plan.spec.moves_queries() {
                true => plan.total_q,
                false => 0,
            },
            converted_pages: conversion::most_pages(plan),
        }
    }

    /// Whether the bound holds what is needed.
    ///
    /// # Errors
    /// [`PlanError::Bound`] with the first array that is too short.
    pub fn check(&self, needed: &Self) -> Result<(), PlanError> {
        for (what, needed, bound) in [
            ("work items", needed.items, self.items),
            ("rows of gathered items", needed.rows, self.rows),
            ("page ids", needed.page_ids, self.page_ids),
            ("merges", needed.merges, self.merges),
            ("partial states", needed.slots, self.slots),
            ("ancestors", needed.ancestors, self.ancestors),
            ("query tokens", needed.padded_tokens, self.padded_tokens),
            (
                "pages of 64 keys that prefills convert (BatchLimits::with_prefill_keys)",
                needed.converted_pages,
                self.converted_pages,
            ),
        ] {
            if needed > bound {
                let (needed, bound) = (needed.into(), bound.into());
                return Err(PlanError::Bound {
                    what,
                    needed,
                    bound,
                });
            }
        }
        Ok(())
    }
}
