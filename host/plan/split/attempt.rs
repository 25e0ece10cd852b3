//! Ways to cut drafts into pieces of unequal size, and what it costs that these read keys apart.

use super::{piece::Piece, problem::Problem};

/// Ways to cut into pieces of unequal size, in the order in which they are tried.
#[derive(Clone, Copy)]
pub enum Attempt {
    WrapAround,
    List,
}

impl Attempt {
    /// The units that no longer read the keys of others, where tiles of a prompt share keys.
    pub const fn apart(self, share_keys: bool) -> Apart {
        match self {
            _ if !share_keys => Apart::None,
            // A CTA begins with the rest of a draft, so that all of its units start at another time.
            Self::WrapAround => Apart::All,
            // A CTA ends with the piece of a draft.
            Self::List => Apart::Cut,
        }
    }
}

/// The units that read other keys than the units beside them, so that memory is read for each of them.
#[derive(Clone, Copy)]
pub enum Apart {
    None,
    Cut,
    All,
}

impl Apart {
    /// The time that this adds to the step.
    pub fn time(self, problem: &Problem<'_>, pieces: &[Piece]) -> u64 {
        let (load, classes) = (problem.load, problem.classes);
        let added = match self {
            Self::None => 0,
            Self::All => load.keys_apart - load.keys,
            Self::Cut => {
                let of = |piece: &Piece| {
                    let unit = classes.unit_cost(piece.draft);
                    let keys = piece.kv_end - piece.kv_begin;
                    match keys < unit.keys {
                        true => unit.apart(keys),
                        false => 0,
                    }
                };
                pieces.iter().map(of).sum()
            }
        };
        added / u64::from(load.ctas)
    }
}
