//! The order of prompts: tiles that read the same keys run at about the same time.

use std::cmp::Reverse;

use super::{classes::DraftClasses, input::SplitInput, piece::Piece};
use crate::plan::{data::Kernel, draft::Draft};

/// The tiles of a row block: a run of pieces, none of which is cut.
#[derive(Clone, Copy, Debug)]
struct Prompt {
    first: u32,
    pieces: u32,
    keys: u32,
    /// The longest unit, and all of them.
    longest: u64,
    work: u64,
}

/// Sections of a launch order: prompts whose keys fit in cache together. Buffers are reused.
#[derive(Debug, Default)]
pub struct Sections {
    prompts: Vec<Prompt>,
    /// Where each section begins among the prompts.
    begins: Vec<usize>,
}

impl Sections {
    /// Gives the prefills their places, section after section: those with the longest tiles first, and within a section
    /// the longest tiles of all its prompts. Without sections all prompts' tiles of a length run side by side, and the
    /// keys of each come from memory again for every length.
    ///
    /// Pieces stand by draft. Where a prefill is cut, or all keys fit in cache with room for queries, nothing changes.
    pub fn assign(
        &mut self,
        input: &SplitInput<'_>,
        classes: &DraftClasses,
        drafts: &[Draft],
        pieces: &mut [Piece],
    ) {
        if input.hybrid || !self.find(classes, drafts, pieces) {
            return;
        }
        let keys = |prompts: &[Prompt]| prompts.iter().map(|prompt| u64::from(prompt.keys)).sum();
        let all: u64 = keys(&self.prompts);
        if all <= 2 * u64::from(input.section_keys) {
            return;
        }
        self.prompts
            .sort_unstable_by_key(|prompt| (Reverse(prompt.longest), prompt.first));
        self.begins.clear();
        let (mut held, most) = (u64::MAX, u64::from(input.section_keys));
        for (at, prompt) in self.prompts.iter().enumerate() {
            let keys = u64::from(prompt.keys);
            // Prompts that fill a section by themselves gain nothing, and stay together.
            if held >= most && (keys < most || at == 0) {
                self.begins.push(at);
                held = 0;
            }
            held += keys;
        }
        // The last one keeps all CTAs busy until its short tiles are left.
        let ctas = u64::from(classes.ctas(input.cost, Kernel::Prefill).0);
        while let Some(&begin) = self.begins.last().filter(|&&begin| begin > 0) {
            let last = &self.prompts[begin..];
            let work: u64 = last.iter().map(|prompt| prompt.work).sum();
            if work >= ctas * last[0].longest {
                break;
            }
            self.begins.pop();
        }
        let mut section = 0;
        for (at, prompt) in self.prompts.iter().enumerate() {
            section += u32::from(self.begins.get(section as usize + 1) == Some(&at));
            let first = prompt.first as usize;
            for piece in &mut pieces[first..first + prompt.pieces as usize] {
                piece.put_into(section);
            }
        }
    }

    /// Finds the prompts; false where a piece of a prefill is not a whole draft.
    fn find(&mut self, classes: &DraftClasses, drafts: &[Draft], pieces: &[Piece]) -> bool {
        self.prompts.clear();
        let mut last = None;
        for (at, piece) in (0..).zip(pieces) {
            let draft = &drafts[piece.draft as usize];
            if draft.kernel != Kernel::Prefill {
                continue;
            }
            if (piece.kv_begin, piece.kv_end) != (draft.kv_begin, draft.kv_end) {
                return false;
            }
            let unit = classes.unit_cost(piece.draft);
            let (cost, of) = (unit.whole(), (draft.part, draft.table));
            let work = u64::from(unit.units) * cost;
            match self.prompts.last_mut().filter(|_| last == Some(of)) {
                Some(prompt) => {
                    prompt.pieces += 1;
                    prompt.keys = prompt.keys.max(draft.kv_end);
                    prompt.longest = prompt.longest.max(cost);
                    prompt.work += work;
                }
                None => self.prompts.push(Prompt {
                    first: at,
                    pieces: 1,
                    keys: draft.kv_end,
                    longest: cost,
                    work,
                }),
            }
            last = Some(of);
        }
        true
    }
}
