//! Masks of any keys, as bits.

use std::ops::Range;

use bytemuck::{bytes_of, cast_slice};
use kernels_gpu::{
    abi::TokenMask,
    masks::{REACH, sees},
};
use serde::{Deserialize, Serialize};

use super::{Batch, ProblemError, Quantity};
use crate::problem::fits;

/// Two u64 describe the mask of a token.
const TOKEN: usize = size_of::<TokenMask>() / size_of::<u64>();

/// The masks of a batch. [`Batch::push_mask`] and what follows it push them.
///
/// They are pushed request by request. The bits of a token begin at the *last key* of its request, that of the last query
/// token: bit `b` is the key `b` before it. Keys that the bits do not describe are seen. All bits are in addition to the causal
/// mask and the window.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Masks {
    /// `[total_q]`. `first` counts from the beginning of `words`.
    tokens: Vec<TokenMask>,
    words: Vec<u64>,
}

impl Masks {
    pub(crate) const NONE: Self = Self {
        tokens: Vec::new(),
        words: Vec::new(),
    };

    /// Adds the next request, of `q_len` query tokens and `kv_len` keys. `sees` is asked for each query token and each key.
    ///
    /// Tokens that follow each other and see the same keys share their words.
    pub fn push(&mut self, q_len: u32, kv_len: u32, mut sees: impl FnMut(u32, u32) -> bool) {
        let words = kv_len.div_ceil(REACH);
        let mut row = vec![0; words as usize];
        for query in 0..q_len {
            row.fill(0);
            for bit in 0..kv_len {
                let seen = sees(query, kv_len - 1 - bit);
                row[(bit / REACH) as usize] |= u64::from(seen) << (bit % REACH);
            }
            self.push_row(&row, q_len - 1 - query);
        }
    }

    /// Adds the next request, of `q_len` query tokens, by a flag for each pair of a token and a key: token by token, with all
    /// keys of a token together.
    ///
    /// # Errors
    /// [`ProblemError::Masks`] if the flags are not as many for each token.
    pub fn push_flags(&mut self, q_len: u32, flags: &[bool]) -> Result<(), ProblemError> {
        let keys = self.each("flags", q_len, flags.len())?;
        let keys = PlainLen::of(keys)?;
        self.push(q_len, keys.0, |query, key| flags[keys.at(query, key)]);
        Ok(())
    }

    /// As [`push_flags`](Self::push_flags), with flags as bits: pair `i` is bit `i % 8` of byte `i / 8`, and all tokens follow each
    /// other without gaps, as in FlashInfer's `packed_custom_mask`.
    ///
    /// # Errors
    /// [`ProblemError::Masks`] if there are not `q_len × kv_len` bits, in whole bytes.
    pub fn push_packed(
        &mut self,
        q_len: u32,
        kv_len: u32,
        bytes: &[u8],
    ) -> Result<(), ProblemError> {
        let bits = u64::from(q_len) * u64::from(kv_len);
        if bytes.len() as u64 != bits.div_ceil(8) {
            return Err(ProblemError::Masks {
                what: "bytes",
                got: bytes.len(),
                expected: bits.div_ceil(8) as usize,
            });
        }
        let keys = PlainLen(kv_len);
        self.push(q_len, kv_len, |query, key| {
            let at = keys.at(query, key);
            bytes[at / 8] >> (at % 8) & 1 != 0
        });
        Ok(())
    }

    /// Adds the next request, of `q_len` query tokens, by its words: as many for each token, token by token. Bit `b` of a
    /// token's words (bit `b % 64` of word `b / 64`) is the key `b` before the request's last key.
    ///
    /// # Errors
    /// [`ProblemError::Masks`] if the words are not as many for each token.
    pub fn push_words(&mut self, q_len: u32, words: &[u64]) -> Result<(), ProblemError> {
        let each = self.each("words", q_len, words.len())?;
        for query in 0..q_len {
            let row = query as usize * each..(query as usize + 1) * each;
            self.push_row(&words[row], q_len - 1 - query);
        }
        Ok(())
    }

    /// Adds the next request, of `q_len` query tokens, of which no key is hidden.
    pub fn push_open(&mut self, q_len: u32) {
        (0..q_len).for_each(|query| self.push_row(&[], q_len - 1 - query));
    }

    /// Adds the next request: a tree of draft tokens of any size, whose keys are the last ones of the request. Each token sees the
    /// context, its ancestors and itself; `parents` is as in [`Batch::ancestors_of`].
    ///
    /// # Panics
    /// If a parent does not come before its child.
    pub fn push_tree(&mut self, parents: &[Option<u32>]) {
        let tokens = parents.len() as u32;
        let mut path = vec![false; parents.len()];
        let mut row = vec![0; tokens.div_ceil(REACH) as usize];
        for token in 0..tokens {
            path.fill(false);
            let mut at = Some(token);
            while let Some(of) = at {
                path[of as usize] = true;
                at = parents[of as usize];
                let before = at.is_none_or(|parent| parent < of);
                assert!(
                    before,
                    "token {of} cannot follow token {at:?}: parents come first"
                );
            }
            row.fill(u64::MAX);
            for (bit, &seen) in (0..).zip(path.iter().rev()) {
                let hidden: u64 = (!seen).into();
                row[bit / REACH as usize] &= !(hidden << (bit % REACH as usize));
            }
            self.push_row(&row, tokens - 1 - token);
        }
    }

    /// Whether nothing was pushed.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Query tokens of all requests that were pushed.
    #[must_use]
    pub const fn tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Words of all query tokens; what a workspace for captured graphs must have room for
    /// ([`BatchLimits::with_mask_words`](crate::plan::BatchLimits::with_mask_words)).
    #[must_use]
    pub const fn words(&self) -> usize {
        self.words.len()
    }

    /// Becomes the same as another, and allocates nothing if it was as large before.
    pub(crate) fn copy(&mut self, other: &Self) {
        self.tokens.clone_from(&other.tokens);
        self.words.clone_from(&other.words);
    }

    /// The words of a query token and its `after` ([`kernels_gpu::masks`]); no words if nothing is hidden.
    pub(crate) fn of_token(&self, token: u32) -> (&[u64], u32) {
        let mask = self.tokens.get(token as usize);
        mask.map_or((&[], 0), |mask| (self.row(mask), mask.after))
    }

    /// Whether query token `token`, at a position among the keys of a table, sees a key of the table.
    pub(crate) fn sees(&self, token: u32, position: i32, key: i32) -> bool {
        let (words, after) = self.of_token(token);
        sees(words, after, position, key)
    }

    /// The masks of some query tokens, which become the tokens of another batch.
    pub(crate) fn of_tokens(&self, tokens: impl IntoIterator<Item = u32>) -> Self {
        let mut own = Self::default();
        if !self.is_empty() {
            for token in tokens {
                let mask = &self.tokens[token as usize];
                own.push_row(self.row(mask), mask.after);
            }
        }
        own
    }

    /// The same as the masks of the last keys ([`Batch::ancestors`]), or as none, of so many query tokens.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_ancestors(ancestors: &[u64], total_q: u32) -> Self {
        let word = |token: u32| match ancestors.get(token as usize) {
            Some(_) => (token, 1),
            None => (0, 0),
        };
        let tokens = (0..total_q).map(word).map(|(first, words)| TokenMask {
            first,
            words,
            ..TokenMask::default()
        });
        Self {
            tokens: tokens.collect(),
            words: ancestors.to_vec(),
        }
    }

    /// The number of u64 that kernels read: two for each token, followed by the words.
    pub(crate) const fn array_len(&self) -> usize {
        TOKEN * self.tokens.len() + self.words.len()
    }

    /// Writes what kernels read.
    ///
    /// # Panics
    /// If `to` has not [`array_len`](Self::array_len) u64.
    pub(crate) fn write(&self, to: &mut [u8]) {
        let before = (TOKEN * self.tokens.len()) as u32;
        let (entries, words) = to.split_at_mut(size_of_val(&self.tokens[..]));
        let entries = entries.chunks_exact_mut(size_of::<TokenMask>());
        for (entry, &mask) in entries.zip(&self.tokens) {
            let first = mask.first + before;
            entry.copy_from_slice(bytes_of(&TokenMask { first, ..mask }));
        }
        words.copy_from_slice(cast_slice(&self.words));
    }

    /// The number of keys before a query token's own word of 64 keys that its mask may hide, too.
    pub(crate) fn beyond_a_word(&self, token: u32) -> u32 {
        let mask = self.tokens.get(token as usize);
        mask.map_or(0, |mask| {
            let others = mask.words.saturating_sub(1).saturating_mul(REACH);
            others.saturating_sub(mask.after)
        })
    }

    /// The first token whose words are not there.
    pub(crate) fn broken(&self) -> Option<usize> {
        let ends = self
            .tokens
            .iter()
            .map(|mask| u64::from(mask.first) + u64::from(mask.words));
        let words = self.words.len() as u64;
        ends.into_iter().position(|end| end > words)
    }

    /// Checks the masks of a batch with so many query tokens.
    pub(super) fn check(&self, total_q: u32) -> Result<(), ProblemError> {
        if self.is_empty() {
            return Ok(());
        }
        let (got, expected) = (self.tokens.len(), total_q as usize);
        if got != expected {
            let what = "query tokens";
            return Err(ProblemError::Masks {
                what,
                got,
                expected,
            });
        }
        let words = self.array_len() as u64;
        fits(Quantity::Batch("words of masks"), words, 1 << 31)?;
        match self.broken() {
            Some(token) => Err(ProblemError::MaskOfToken {
                token: token as u32,
            }),
            None => Ok(()),
        }
    }

    /// Checks that the masks of a row block are those of consecutive tokens of one request: kernels rely on it.
    pub(super) fn check_block(&self, tokens: Range<u32>) -> Result<(), ProblemError> {
        let own = self
            .tokens
            .get(tokens.start as usize..tokens.end as usize)
            .unwrap_or_default();
        let continues = |pair: &[TokenMask]| {
            pair[0].words == pair[1].words
                && (pair[0].words == 0 || pair[0].after == pair[1].after.wrapping_add(1))
        };
        match own.windows(2).position(|pair| !continues(pair)) {
            Some(before) => Err(ProblemError::MaskOfToken {
                token: tokens.start + before as u32 + 1,
            }),
            None => Ok(()),
        }
    }

    fn row(&self, mask: &TokenMask) -> &[u64] {
        let first = mask.first as usize;
        &self.words[first..first + mask.words as usize]
    }

    /// Adds the mask of a token, with `after` more tokens of its request behind it.
    fn push_row(&mut self, words: &[u64], after: u32) {
        let same = self.tokens.last().filter(|last| self.row(last) == words);
        let first = match same {
            Some(last) => last.first,
            None => {
                let first = self.words.len() as u32;
                self.words.extend_from_slice(words);
                first
            }
        };
        self.tokens.push(TokenMask {
            first,
            words: words.len() as u32,
            after,
            reserved: 0,
        });
    }

    /// How many of `got` things each of `q_len` tokens has.
    fn each(&self, what: &'static str, q_len: u32, got: usize) -> Result<usize, ProblemError> {
        let tokens = q_len as usize;
        match got.checked_div(tokens) {
            Some(each) if each * tokens == got => Ok(each),
            None if got == 0 => Ok(0),
            each => Err(ProblemError::Masks {
                what,
                got,
                expected: each.unwrap_or(0) * tokens,
            }),
        }
    }
}

/// Masks of any keys, as bits. They are pushed request by request, in order; requests without query tokens have none.
///
/// Bits hide keys in addition to the causal mask and the window: where tokens are to see later ones, the variant must not be causal.
/// They change no distances. A batch has masks of all its requests or of none.
impl Batch {
    /// Adds the mask of the next request. `sees` is asked for each of its query tokens and each of its keys
    /// ([`kv_len`](Self::kv_len)). Tokens that follow each other and see the same keys share their words.
    ///
    /// Where a request has keys in several parts, [`Part::keys_after`](super::super::Part::keys_after) of each part is the number of
    /// keys behind it, also without a causal mask: bits count from the request's last key.
    ///
    /// ```
    /// use tandem_attn::problem::{Batch, PageTable, Spec};
    ///
    /// // A prompt of 6 tokens, and a decode.
    /// let mut table = PageTable::new(16, 4);
    /// table.push(&[2], 6);
    /// table.push(&[0], 9);
    /// let mut batch = Batch::new(vec![0, 6, 7], table);
    /// // Tokens 1 to 4 of the prompt are an image: they see each other. The decode sees every key.
    /// let image = 1..5;
    /// batch.push_mask(|query, key| key <= query || image.contains(&query) && image.contains(&key))?;
    /// batch.push_mask_open()?;
    /// batch.check(&Spec::new(8, 2, 64).non_causal())?;
    /// # Ok::<(), tandem_attn::problem::ProblemError>(())
    /// ```
    ///
    /// # Errors
    /// [`ProblemError::Masks`] if all requests have a mask. The first mask of a batch: also what [`check`](Self::check) refuses of
    /// its arrays.
    pub fn push_mask(&mut self, sees: impl FnMut(u32, u32) -> bool) -> Result<(), ProblemError> {
        let [q_len, kv_len] = self.next_masked()?;
        self.masks.push(q_len, kv_len, sees);
        Ok(())
    }

    /// The same by a flag for each pair: token by token, with all keys of a token together.
    ///
    /// # Errors
    /// As [`push_mask`](Self::push_mask), and [`ProblemError::Masks`] if the flags are not as many as the pairs.
    pub fn push_mask_flags(&mut self, flags: &[bool]) -> Result<(), ProblemError> {
        let [q_len, kv_len] = self.next_masked()?;
        let expected = q_len as usize * kv_len as usize;
        if flags.len() != expected {
            return Err(ProblemError::Masks {
                what: "flags",
                got: flags.len(),
                expected,
            });
        }
        self.masks.push_flags(q_len, flags)
    }

    /// The same by bits: pair `i` is bit `i % 8` of byte `i / 8`, and tokens follow each other without gaps, as in FlashInfer's
    /// `packed_custom_mask` of a request.
    ///
    /// # Errors
    /// As [`push_mask`](Self::push_mask), and [`ProblemError::Masks`] if there is not a bit for each pair, in whole bytes.
    pub fn push_mask_packed(&mut self, bytes: &[u8]) -> Result<(), ProblemError> {
        let [q_len, kv_len] = self.next_masked()?;
        self.masks.push_packed(q_len, kv_len, bytes)
    }

    /// The same by words, as many for each token, token by token, as they are stored. Bit `b` of a token's words (bit `b % 64` of word
    /// `b / 64`) is the key `b` before the request's last key; keys that the words do not describe are seen.
    ///
    /// # Errors
    /// As [`push_mask`](Self::push_mask), and [`ProblemError::Masks`] if the words are not as many for each token.
    pub fn push_mask_words(&mut self, words: &[u64]) -> Result<(), ProblemError> {
        let [q_len, _] = self.next_masked()?;
        self.masks.push_words(q_len, words)
    }

    /// The next request has no mask.
    ///
    /// # Errors
    /// As [`push_mask`](Self::push_mask).
    pub fn push_mask_open(&mut self) -> Result<(), ProblemError> {
        let [q_len, _] = self.next_masked()?;
        self.masks.push_open(q_len);
        Ok(())
    }

    /// The query tokens of the next request are a tree of draft tokens of any size. Each sees the context, its ancestors and itself;
    /// `parents` is as in [`ancestors_of`](Self::ancestors_of), which makes smaller masks of up to 64 tokens.
    ///
    /// # Errors
    /// As [`push_mask`](Self::push_mask), and [`ProblemError::Masks`] if there is not a parent (or none) for each token.
    ///
    /// # Panics
    /// If a parent does not come before its child.
    pub fn push_mask_tree(&mut self, parents: &[Option<u32>]) -> Result<(), ProblemError> {
        let [q_len, _] = self.next_masked()?;
        if parents.len() != q_len as usize {
            return Err(ProblemError::Masks {
                what: "parents",
                got: parents.len(),
                expected: q_len as usize,
            });
        }
        self.masks.push_tree(parents);
        Ok(())
    }

    /// Words of all masks, for [`BatchLimits::with_mask_words`](crate::plan::BatchLimits::with_mask_words).
    #[must_use]
    pub const fn mask_words(&self) -> usize {
        self.masks.words()
    }

    /// Query tokens and keys of the request that gets the next mask.
    fn next_masked(&self) -> Result<[u32; 2], ProblemError> {
        // Once for all masks: this takes time linear in the size of the batch.
        if self.masks.is_empty() {
            self.check_arrays()?;
        }
        let pushed = self.masks.tokens();
        if pushed >= self.total_q() as usize {
            return Err(ProblemError::Masks {
                what: "requests",
                got: self.requests() + 1,
                expected: self.requests(),
            });
        }
        let begun = |&first: &u32| first as usize <= pushed;
        let request = self.qo_indptr.partition_point(begun) - 1;
        let keys = PlainLen::of(self.kv_len(request) as usize)?;
        Ok([self.q_len(request), keys.0])
    }
}

/// The number of keys of rows of pairs.
#[derive(Clone, Copy)]
struct PlainLen(u32);

impl PlainLen {
    fn of(keys: usize) -> Result<Self, ProblemError> {
        fits(
            Quantity::Keys("keys of a mask"),
            keys as u64,
            crate::problem::MAX_POSITION.into(),
        )?;
        Ok(Self(keys as u32))
    }

    const fn at(self, query: u32, key: u32) -> usize {
        query as usize * self.0 as usize + key as usize
    }
}
