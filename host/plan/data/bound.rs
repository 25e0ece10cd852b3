//! Limits of batches, and the sizes of plans within them.

use serde::{Deserialize, Serialize};

use super::{Plan, PlanError};
use crate::plan::conversion;

/// The largest default of [`BatchLimits::prefill_keys`]: 1 GiB of 16-bit keys and values with 8 heads of 128.
const PREFILL_KEYS: u32 = 1 << 18;

/// The most new tokens of a request whose heads all read the same pages that become lists by KV head. Others are prompts.
pub const LIST_TOKENS: u32 = 8;

/// The limits of batches that a workspace must hold. All batches within them can be planned with the [`Bound`] that follows from
/// them. A batch beyond them is not always refused: it is if its plan does not fit the bound.
///
/// ```
/// use tandem_attn::plan::BatchLimits;
///
/// // 256 requests of up to 8192 keys on pages of 16, together with prompt chunks of up to 4096 tokens.
/// let limits = BatchLimits::decodes(256, 8192, 16).with_query_tokens(256 + 4096);
/// assert_eq!(limits.page_ids, 256 * 512);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BatchLimits {
    /// Number of requests (row blocks of a part).
    pub requests: u32,
    /// Query tokens of all requests.
    pub query_tokens: u32,
    /// Page ids of all parts.
    pub page_ids: u32,
    /// Tokens in a page, 1 to 4096. [`Bound::new`] checks it; [`decodes`](Self::decodes) computes `page_ids` from it.
    #[serde(default = "one")]
    pub page_size: u32,
    /// Keys of one request. Only fixed splits and the default of [`prefill_keys`](Self::prefill_keys) depend on it.
    pub kv_len: u32,
    /// Keys of all prefills of a batch together, and of decodes that run as prefills because no tile holds the query heads of their KV
    /// head. With 8-bit keys, or if attention applies rotary embeddings, the workspace has room
    /// for this number of converted keys and values of 16 bits. The default is the keys of all requests, but at most 262,144 or the
    /// keys of one request, whichever is more. Prefixes that prefills read for decodes use this room, too; if it is too small,
    /// decodes read them.
    #[serde(default)]
    pub prefill_keys: u32,
    /// Parts of a batch.
    pub parts: u32,
    /// Partial states per query token, on average. Prefixes that are shared on several levels
    /// need one state per level and one more. If a batch needs more than this, fewer of its prefixes are shared.
    pub states_per_token: u32,
    /// Whether batches may have masks of the last keys ([`Batch::ancestors`](crate::problem::Batch::ancestors)).
    pub trees: bool,
    /// Words of the masks of all query tokens together ([`Batch::mask_words`](crate::problem::Batch::mask_words)); 0: batches have no
    /// [`Batch::masks`](crate::problem::Batch::masks).
    #[serde(default)]
    pub mask_words: u32,
}

/// The page size of limits that were stored without it.
const fn one() -> u32 {
    1
}

impl BatchLimits {
    /// Up to `requests` requests, each with one query token and up to `kv_len` keys, or fewer requests with more query tokens.
    #[must_use]
    pub const fn decodes(requests: u32, kv_len: u32, page_size: u32) -> Self {
        Self {
            requests,
            query_tokens: requests,
            page_ids: requests.saturating_mul(kv_len.div_ceil(match page_size {
                0 => 1,
                _ => page_size,
            })),
            page_size,
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
            mask_words: 0,
        }
    }

    /// With this number of query tokens of all requests.
    #[must_use]
    pub const fn with_query_tokens(mut self, query_tokens: u32) -> Self {
        self.query_tokens = query_tokens;
        self
    }

    /// With this number of keys of all prefills of a batch. Prefills are requests with more query tokens than a decode
    /// has. Of decodes, prefixes that prefills read for them use this room.
    #[must_use]
    pub const fn with_prefill_keys(mut self, prefill_keys: u32) -> Self {
        self.prefill_keys = prefill_keys;
        self
    }

    /// With or without masks of the last keys ([`Batch::ancestors`](crate::problem::Batch::ancestors)).
    #[must_use]
    pub const fn with_trees(mut self, trees: bool) -> Self {
        self.trees = trees;
        self
    }

    /// With masks of any keys ([`Batch::masks`](crate::problem::Batch::masks)) that have this number of words together. A token with
    /// bits for `n` keys has `n / 64` words, rounded up; neighbouring tokens that see the same keys share them.
    #[must_use]
    pub const fn with_mask_words(mut self, words: u32) -> Self {
        self.mask_words = words;
        self
    }

    /// With this number of page ids of all parts.
    #[must_use]
    pub const fn with_page_ids(mut self, page_ids: u32) -> Self {
        self.page_ids = page_ids;
        self
    }

    /// With this number of parts of a batch.
    #[must_use]
    pub const fn with_parts(mut self, parts: u32) -> Self {
        self.parts = parts;
        self
    }

    /// For batches of page lists by KV head (`kv::PagesByHead`, feature `unstable`) of a model with so many KV heads: from limits of
    /// the requests of the model. Each head of a token is a token there, and each token of a list has row blocks and page ids of its
    /// own. There is room for lists of up to 8 new tokens; for lists of more, give as many requests as query tokens. Prompts beside
    /// lists are a part of their own.
    ///
    /// ```
    /// use tandem_attn::plan::BatchLimits;
    ///
    /// // Up to 512 tokens in lists: 8 of each request.
    /// let limits = BatchLimits::decodes(64, 8192, 16).with_query_tokens(64 + 1024).by_kv_head(8);
    /// assert_eq!((limits.requests, limits.query_tokens, limits.parts), (8 * 512, 8 * 1088, 2));
    /// assert_eq!(limits.page_ids, 8 * 512 * 512);
    /// ```
    #[must_use]
    pub const fn by_kv_head(mut self, kv_heads: u32) -> Self {
        let most = self.requests.saturating_mul(LIST_TOKENS);
        let lists = if most < self.query_tokens {
            most
        } else {
            self.query_tokens
        };
        // All page ids may be those of requests with so many tokens, but no list has more than its keys need.
        let of_lists = BatchLimits::decodes(lists, self.kv_len, self.page_size).page_ids;
        let most = self.page_ids.saturating_mul(LIST_TOKENS);
        let page_ids = if most < of_lists { most } else { of_lists };
        if page_ids > self.page_ids {
            self.page_ids = page_ids;
        }
        // Requests without queries keep theirs.
        if lists > self.requests {
            self.requests = lists;
        }
        self.requests = self.requests.saturating_mul(kv_heads);
        self.query_tokens = self.query_tokens.saturating_mul(kv_heads);
        self.page_ids = self.page_ids.saturating_mul(kv_heads);
        self.prefill_keys = self.prefill_keys.saturating_mul(kv_heads);
        self.mask_words = self.mask_words.saturating_mul(kv_heads);
        self.parts = 2;
        self
    }

    /// With this number of partial states per query token, on average.
    #[must_use]
    pub const fn with_states_per_token(mut self, states_per_token: u32) -> Self {
        self.states_per_token = states_per_token;
        self
    }
}

/// The number of entries of each array of a plan, or its maximum.
///
/// ```
/// use tandem_attn::plan::{BatchLimits, Bound, DeviceDescription, PlanOptions, Planner};
/// use tandem_attn::problem::{Batch, PageTable, Spec};
///
/// let spec = Spec::new(32, 8, 128);
/// let device = DeviceDescription::named("h200")?;
/// let limits = BatchLimits::decodes(256, 8192, 16).with_query_tokens(256 + 4096);
/// let bound = Bound::new(&spec, &device, &PlanOptions::default(), &limits)?;
/// // With these options, plans stay within the bound.
/// let options = PlanOptions::default().with_bound(bound);
/// let mut table = PageTable::new(16, 10);
/// table.push(&[7, 3], 20);
/// let plan = Planner::new().plan(&spec, &Batch::new(vec![0, 20], table), &device, &options)?;
/// bound.check(&Bound::of(&plan))?;
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
    /// Words of masks, and two for each query token if there are any.
    #[serde(default)]
    pub mask_words: u32,
    /// Query tokens whose heads are padded for the kernels of a GPU, or whose queries are rounded or rotated (RoPE) for them.
    #[serde(default)]
    pub padded_tokens: u32,
    /// Pages of 64 keys that prefills convert from 8 bits to 16, or to which they apply the rotary embedding.
    #[serde(default)]
    pub converted_pages: u32,
}

impl Bound {
    /// The sizes of one plan.
    #[must_use]
    pub fn of(plan: &Plan) -> Self {
        Self {
            items: plan.items.len() as u32,
            rows: plan.rows.len() as u32,
            page_ids: plan.page_ids.len() as u32,
            merges: plan.merges.len() as u32,
            slots: plan.slots,
            ancestors: plan.ancestors.len() as u32,
            mask_words: plan.masks.array_len() as u32,
            padded_tokens: match plan.spec.moves_queries() {
                true => plan.total_q,
                false => 0,
            },
            converted_pages: conversion::most_pages(plan),
        }
    }

    /// Checks that `needed` is within this bound.
    ///
    /// # Errors
    /// [`PlanError::Bound`] with the first array that is too short.
    pub fn check(&self, needed: &Self) -> Result<(), PlanError> {
        for (what, needed, bound) in [
            ("work items", needed.items, self.items),
            ("rows of gathered items", needed.rows, self.rows),
            (
                "page ids (requests × kv_len / page_size of BatchLimits::decodes, or with_page_ids)",
                needed.page_ids,
                self.page_ids,
            ),
            ("merges", needed.merges, self.merges),
            ("partial states", needed.slots, self.slots),
            (
                "masks of the last keys (BatchLimits::with_trees)",
                needed.ancestors,
                self.ancestors,
            ),
            (
                "words of masks, and two for each query token (BatchLimits::with_mask_words)",
                needed.mask_words,
                self.mask_words,
            ),
            (
                "query tokens (BatchLimits::with_query_tokens)",
                needed.padded_tokens,
                self.padded_tokens,
            ),
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
