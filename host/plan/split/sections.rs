//! The order of prompts and heads: tiles that read the same keys run at about the same time.

use std::cmp::Reverse;

use super::{classes::DraftClasses, input::SplitInput, piece::Piece};
use crate::plan::{data::Kernel, draft::Draft};

/// The tiles of a row block: a run of pieces, none of which is cut.
#[derive(Clone, Copy, Debug)]
struct Prompt {
    first: u32,
    pieces: u32,
    keys: u32,
    /// Time of the longest unit, and of all units together.
    longest: u64,
    work: u64,
}

/// Sections of a launch order: KV heads and prompts whose keys fit in cache together. Buffers are reused.
#[derive(Debug, Default)]
pub struct Sections {
    kv_heads_together: u32,
    prompts: Vec<Prompt>,
    /// Index of the first prompt of each section.
    begins: Vec<usize>,
}

impl Sections {
    /// Puts the prefills into sections: sections with the longest tiles come first, and within a section the longest
    /// tiles. Without sections, tiles of equal length of all prompts run at the same time, and the keys of every prompt
    /// are read from memory again for each length.
    ///
    /// `pieces` are sorted by draft. If a prefill is cut, or all keys fit in cache with room for queries, nothing
    /// changes.
    ///
    /// KV heads are divided first: a section of KV heads has all prompts. Prompts are divided if even the keys of these
    /// heads do not fit. Measured on a busy H100: 4 × 7091 with 32/8 heads of 256 5,033 → 4,600 µs, 2 × 3333 with 40/8
    /// 773 → 718, 1 × 16384 with 64/8 of 128 6,045 → 5,824. Less memory traffic also leaves more power for computing.
    pub fn assign(
        &mut self,
        input: &SplitInput<'_>,
        classes: &DraftClasses,
        drafts: &[Draft],
        pieces: &mut [Piece],
    ) {
        self.kv_heads_together = 0;
        if input.hybrid || !self.find(classes, drafts, pieces) {
            return;
        }
        // Prefills of several heads have more KV heads than the specification; all of a launch must have the same number.
        let mut of_prefills = drafts
            .iter()
            .filter(|draft| draft.kernel == Kernel::Prefill)
            .map(|draft| draft.heads);
        let heads = of_prefills.next().unwrap_or(1);
        if of_prefills.any(|other| other != heads) {
            return;
        }
        let input = &SplitInput {
            kv_heads: input.kv_heads * heads,
            section_keys: input.section_keys / heads,
            ..*input
        };
        let ctas = u64::from(classes.ctas(input.cost, Kernel::Prefill).0);
        let all: u64 = self.prompts.iter().map(|p| u64::from(p.keys)).sum();
        let together = self.heads(input, all, ctas);
        let heads = u64::from(input.kv_heads);
        if together < heads {
            self.kv_heads_together = together as u32;
        }
        let most = u64::from(input.section_keys) * heads / together;
        if all <= 2 * most {
            return;
        }
        self.prompts
            .sort_unstable_by_key(|prompt| (Reverse(prompt.longest), prompt.first));
        self.begins.clear();
        let mut held = u64::MAX;
        for (at, prompt) in self.prompts.iter().enumerate() {
            let keys = u64::from(prompt.keys);
            // Prompts that fill a section alone gain nothing from separate sections, and stay together.
            if held >= most && (keys < most || at == 0) {
                self.begins.push(at);
                held = 0;
            }
            held += keys;
        }
        // The last section needs enough work to keep all CTAs busy until only its short tiles are left.
        while let Some(&begin) = self.begins.last().filter(|&&begin| begin > 0) {
            let last = &self.prompts[begin..];
            let work = work_of(last);
            if work / heads * together >= ctas * last[0].longest {
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

    /// Number of KV heads of a section: as many as fit in cache, or all. A section also needs enough work to keep all
    /// CTAs busy until only its short tiles are left; 15/16 of that will do. Of 128 heads and 8192 tokens, four have work for
    /// 130 CTAs: with eight, memory is read twice as often.
    fn heads(&self, input: &SplitInput<'_>, keys: u64, ctas: u64) -> u64 {
        let (heads, fit) = (u64::from(input.kv_heads), u64::from(input.section_keys));
        if keys <= 2 * fit {
            return heads;
        }
        let work = work_of(&self.prompts);
        let longest = self.prompts.iter().map(|prompt| prompt.longest).max();
        let busy = |together| work / heads * together >= ctas * longest.unwrap_or(0) / 16 * 15;
        let mut divisors = (1..=heads)
            .rev()
            .filter(|d| heads.is_multiple_of(*d) && busy(*d));
        // The most that fit, else the fewest that keep all CTAs busy.
        let mut least = heads;
        divisors
            .find(|&together| {
                least = together;
                keys * together <= fit * heads
            })
            .unwrap_or(least)
    }

    /// See [`TileGroup::kv_heads_together`](crate::plan::TileGroup::kv_heads_together).
    pub const fn kv_heads_together(&self) -> u32 {
        self.kv_heads_together
    }

    /// Finds the prompts. Returns false if a prefill is cut.
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
            let work = u64::from(unit.units).saturating_mul(cost);
            match self.prompts.last_mut().filter(|_| last == Some(of)) {
                Some(prompt) => {
                    prompt.pieces += 1;
                    prompt.keys = prompt.keys.max(draft.kv_end);
                    prompt.longest = prompt.longest.max(cost);
                    prompt.work = prompt.work.saturating_add(work);
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

/// Time of all units of the prompts.
fn work_of(prompts: &[Prompt]) -> u64 {
    let work = prompts.iter().map(|prompt| prompt.work);
    work.fold(0, u64::saturating_add)
}
