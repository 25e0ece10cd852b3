//! What a user asks for.

use std::fmt;

/// Names a request for as long as it lives; never given twice by one composer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId {
    pub(super) slot: u32,
    pub(super) generation: u32,
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.slot, self.generation)
    }
}

/// What a request starts from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Prompt {
    /// Token ids.
    Tokens(Vec<u32>),
    /// Only how many tokens: nothing is shared with other requests.
    Length(u32),
    /// Ids of blocks of tokens, as traces give them: equal leading ids are a shared prefix.
    Blocks {
        /// One id for each block; the last block may be cut short by `len`.
        ids: Box<[u32]>,
        /// Tokens in a block.
        block: u32,
        /// Tokens of the prompt, at most `ids.len() × block`.
        len: u32,
    },
}

impl Prompt {
    /// Tokens.
    #[must_use]
    pub fn len(&self) -> u32 {
        match self {
            Self::Tokens(tokens) => tokens.len() as u32,
            Self::Length(len) => *len,
            Self::Blocks { ids, block, len } => {
                u64::from(*len).min(ids.len() as u64 * u64::from(*block)) as u32
            }
        }
    }

    /// Whether there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Token ids that stand for the blocks, the same for the same id; nothing changes for other prompts.
    pub fn expand_blocks(&self, tokens: &mut Vec<u32>) {
        if let Self::Blocks { ids, block, .. } = self {
            let len = self.len() as usize;
            tokens.clear();
            tokens.reserve_exact(len);
            for &id in ids {
                let first = id.wrapping_mul(*block);
                let rest = (len - tokens.len()).min(*block as usize) as u32;
                tokens.extend((0..rest).map(|offset| first.wrapping_add(offset)));
            }
        }
    }
}

/// A prompt and how many tokens to generate after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// What it starts from.
    pub prompt: Prompt,
    /// The most tokens to generate.
    pub max_new_tokens: u32,
    /// Tokens of the prompt that count as computed when it is admitted first, whatever its pages hold; the last never does.
    /// For measurements that begin in the middle.
    pub computed: u32,
}

impl Request {
    /// From token ids.
    #[must_use]
    pub const fn new(prompt: Vec<u32>, max_new_tokens: u32) -> Self {
        Self {
            prompt: Prompt::Tokens(prompt),
            max_new_tokens,
            computed: 0,
        }
    }

    /// From a length alone, for simulations.
    #[must_use]
    pub const fn of_length(prompt: u32, max_new_tokens: u32) -> Self {
        Self {
            prompt: Prompt::Length(prompt),
            max_new_tokens,
            computed: 0,
        }
    }
}
