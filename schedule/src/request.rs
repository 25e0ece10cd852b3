//! Requests, as users submit them.

use std::fmt;

use super::ScheduleError;

/// Identifies a request. A composer never uses an id twice.
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

/// The prompt of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Prompt {
    /// Token ids.
    Tokens(Vec<u32>),
    /// Only the number of tokens. No prefix is shared with other requests.
    Length(u32),
    /// Ids of token blocks, as in traces. Equal leading ids are a shared prefix. Each token has its own id of 32 bits, so ids
    /// are less than 2³² ÷ `block`.
    Blocks {
        /// One id for each block. `len` may cut the last block short.
        ids: Box<[u32]>,
        /// Tokens in a block.
        block: u32,
        /// Tokens of the prompt, at most `ids.len() × block`.
        len: u32,
    },
}

impl Prompt {
    /// Number of tokens.
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

    /// Refuses blocks whose tokens would not all have ids of their own: these blocks would count as others.
    pub(super) fn check_blocks(&self) -> Result<(), ScheduleError> {
        let Self::Blocks { ids, block, .. } = self else {
            return Ok(());
        };
        let most = ((1 << 32) / u64::from((*block).max(1)) - 1) as u32;
        match ids.iter().find(|&&id| id > most) {
            Some(&id) => Err(ScheduleError::BlockId {
                id,
                block: *block,
                most,
            }),
            None => Ok(()),
        }
    }

    /// Whether it has no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes token ids for the blocks: equal ids for equal blocks. Does nothing for other kinds of prompts.
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
    /// The prompt.
    pub prompt: Prompt,
    /// Maximum number of tokens to generate.
    pub max_new_tokens: u32,
    /// Prompt tokens that count as computed on first admission, whatever the pages hold; the last token never does. For
    /// measurements that begin in the middle of a prompt.
    pub computed: u32,
}

impl Request {
    /// A request with token ids.
    #[must_use]
    pub const fn new(prompt: Vec<u32>, max_new_tokens: u32) -> Self {
        Self {
            prompt: Prompt::Tokens(prompt),
            max_new_tokens,
            computed: 0,
        }
    }

    /// A request with only a length, for simulations.
    #[must_use]
    pub const fn of_length(prompt: u32, max_new_tokens: u32) -> Self {
        Self {
            prompt: Prompt::Length(prompt),
            max_new_tokens,
            computed: 0,
        }
    }
}
