//! Cutting items along their keys, and the order in which the pieces are launched.
//!
//! Drafts that cost the same form a class. Each class gets a key tile and a launch, the drafts are cut (at
//! multiples of a chunk, or so that the last CTA finishes early), and the pieces are put into launch order.

use self::{
    balance::{Balancer, Step},
    classes::{DraftClass, DraftClasses},
    launch::Launches,
    load::OpLoad,
    order::LaunchOrder,
    sections::Sections,
    widen::widen,
};
use super::{
    data::{Chunk, Kernel, PlanError, SplitMode},
    draft::Draft,
};

mod attempt;
mod balance;
mod classes;
mod equal;
mod finish;
mod fixed;
mod guided;
mod input;
mod launch;
mod list;
mod load;
mod order;
mod piece;
mod problem;
mod sections;
mod widen;
mod wrap_around;

pub use balance::{FEW_ROWS, SHORT};
pub use fixed::{first_key, has_many_rows, keys_of_piece, next_first_key};
pub use input::SplitInput;
pub use launch::Launch;
pub use order::MAX_PIECES;
use piece::NTH;
pub use piece::Piece;

/// Cuts drafts. Buffers keep their memory from plan to plan.
#[derive(Debug, Default)]
pub struct Splitter {
    /// The pieces, ascending by draft, then by key.
    pub pieces: Vec<Piece>,
    /// Units of all pieces, decode first.
    pub units: [u32; 2],
    classes: DraftClasses,
    launches: Launches,
    balancer: Balancer,
    order: LaunchOrder,
    sections: Sections,
}

impl Splitter {
    /// Cuts the drafts into pieces, chooses their key tiles, and orders them for launch.
    ///
    /// # Errors
    /// [`PlanError::TooManyPieces`].
    pub fn split(&mut self, input: &SplitInput<'_>, drafts: &mut [Draft]) -> Result<(), PlanError> {
        let SplitInput { mode, cost, .. } = *input;
        // Where splits are fixed, nothing may depend on the other requests. Beside prefills, decodes have other kernels. Rules are
        // compared in the tiles that the drafts have.
        if !mode.is_fixed() && !input.hybrid && input.chunk.is_none() {
            widen(cost, input.tiles, drafts);
        }
        self.classes
            .find(cost, drafts, !mode.is_fixed(), input.co_resident);
        self.pieces.clear();
        match (mode, input.chunk) {
            (SplitMode::Off, _) => self.cut_at_multiples(input, drafts, |_| u32::MAX)?,
            (SplitMode::Fixed { tokens }, _) => self.cut_at_multiples(input, drafts, |class| {
                keys_of_piece(class.draft.many_rows, tokens)
            })?,
            (SplitMode::Makespan, Some(rule)) => {
                let keys_of_units = self.classes.keys_of_units();
                let ctas = Kernel::ALL.map(|kernel| self.classes.ctas(cost, kernel).0);
                self.cut_at_multiples(input, drafts, |class| {
                    rule(&Chunk {
                        keys_of_units,
                        ctas: ctas[class.draft.kernel as usize],
                        alignment: class.draft.split_alignment(),
                    })
                })?;
            }
            (SplitMode::Makespan, None) => self.balance(input, drafts),
        }
        self.units = [0; 2];
        for piece in &self.pieces {
            let kernel = self.launches.list[piece.launch() as usize].kernel;
            let units = &mut self.units[kernel as usize];
            *units = units.saturating_add(self.classes.unit_cost(piece.draft).units);
        }
        if self.units[Kernel::Prefill as usize] > 0 {
            self.sections
                .assign(input, &self.classes, drafts, &mut self.pieces);
            for launch in &mut self.launches.list {
                // Only kernels that load queries by tensor maps know sections.
                if launch.id.is_some_and(|id| id.info().query_stages > 0) {
                    launch.kv_heads_together = self.sections.kv_heads_together();
                }
            }
        }
        self.order.sort(&self.pieces, &mut self.launches.list);
        Ok(())
    }

    /// The launches, in launch order.
    pub fn launches(&self) -> &[Launch] {
        &self.launches.list
    }

    /// The place of each piece in launch order.
    pub fn place(&self) -> &[u32] {
        &self.order.place
    }

    /// Cuts every draft at multiples of its class's chunk, counted from the first key of its table.
    fn cut_at_multiples(
        &mut self,
        input: &SplitInput<'_>,
        drafts: &mut [Draft],
        chunk: impl Fn(&DraftClass) -> u32,
    ) -> Result<(), PlanError> {
        let Self {
            classes,
            launches,
            pieces,
            ..
        } = self;
        launches.choose(input, classes, drafts, chunk);
        let count = |(index, draft): (usize, &Draft)| {
            let chunk = launches.wanted(classes, index);
            u64::from((draft.kv_end - 1) / chunk - draft.kv_begin / chunk + 1)
        };
        let all: u64 = drafts.iter().enumerate().map(count).sum();
        if all > MAX_PIECES as u64 {
            return Err(PlanError::TooManyPieces {
                got: all,
                limit: MAX_PIECES as u64,
            });
        }
        for (index, (draft, unit)) in drafts.iter().zip(classes.unit_costs()).enumerate() {
            let chunk = launches.wanted(classes, index);
            let whole = draft.kv_begin / chunk == (draft.kv_end - 1) / chunk;
            let mut begin = draft.kv_begin;
            while begin < draft.kv_end {
                let end = (begin / chunk + 1).saturating_mul(chunk).min(draft.kv_end);
                let cost = unit.piece(end - begin);
                // Prompts are launched piece after piece, so that their tiles read the same keys at about the same time.
                let start = if draft.kernel == Kernel::Prefill && !whole {
                    u64::from(begin / chunk - draft.kv_begin / chunk) * NTH
                } else {
                    0
                };
                pieces.push(Piece::new(
                    index as u32,
                    begin..end,
                    unit.launch,
                    start,
                    cost,
                ));
                begin = end;
            }
        }
        Ok(())
    }

    /// Cuts so that the last resident CTA of each operation finishes as early as possible.
    fn balance(&mut self, input: &SplitInput<'_>, drafts: &mut [Draft]) {
        let Self {
            classes,
            launches,
            balancer,
            pieces,
            ..
        } = self;
        let loads = OpLoad::of_both(input, classes);
        let bounds = loads.map(|load| load.bound());
        launches.choose(input, classes, drafts, |class| {
            let bound = bounds[class.draft.kernel as usize];
            let fitting = bound.saturating_sub(class.unit.fixed_cut) / class.unit.key;
            u32::try_from(fitting)
                .unwrap_or(u32::MAX)
                .max(class.unit.shortest)
        });
        let step = Step {
            input,
            drafts,
            classes,
            launches: &launches.list,
            loads: &loads,
        };
        balancer.balance(&step, pieces);
    }
}
