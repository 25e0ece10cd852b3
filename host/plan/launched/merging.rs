//! Which merges of a plan decodes do themselves, and which launch does the others.

use kernels_gpu::{
    abi::{DIRECT, MergeRow, NO_MERGE, QueryRow},
    passes::merge::{FEW, FEW_CHUNKS, LONG, MANY, SECTION, Shape, THREADS},
    registry::Sm,
};

use super::pieces::Pieces;
use crate::plan::data::{MergeMode, Plan, PodMode, TileGroup};

/// How the merges of a plan are divided. Keeps its memory from plan to plan.
#[derive(Debug, Default)]
pub(crate) struct Merging {
    /// Whether decodes merge their states where they can.
    pub(crate) fused: bool,
    /// Whether prefills leave partial states, and whether a merge may have states of both prefills and decodes.
    pub(crate) prefill_merges: bool,
    pub(crate) mixed: bool,
    /// Number of merges that the merging kernel does.
    pub(crate) left: u32,
    /// The most slots of any of these merges.
    pub(crate) most_slots: u32,
    /// Rows of latent attention that two items share.
    pub(crate) pieces: Pieces,
    /// The merges that the merging kernel does, if they are not all of the plan's.
    left_rows: Vec<MergeRow>,
    /// Which merges are left to the merging kernel, if decodes do others.
    leaves: Vec<bool>,
}

impl Merging {
    /// Decodes can do the merges whose states all come from decodes, except for kernels that share SMs.
    pub(crate) fn divide(&mut self, plan: &Plan, merge_mode: MergeMode) {
        self.left_rows.clear();
        self.leaves.clear();
        self.leaves.resize(plan.merges.len(), false);
        let mut any = false;
        for item in plan.items.iter().filter(|item| !item.is_gathered()) {
            if item.merge != NO_MERGE && item.slot != DIRECT {
                let rows = item.rows * plan.parts[item.part as usize].heads;
                let merges = item.merge as usize..(item.merge + rows) as usize;
                if let Some(merges) = self.leaves.get_mut(merges) {
                    merges.fill(true);
                    any = true;
                }
            }
        }
        self.prefill_merges = any;
        // Decodes share merges with prefills of other parts, and with prefills of their prefixes.
        let merges = |row: &QueryRow| self.leaves.get(row.merge as usize) == Some(&true);
        self.mixed = any && (plan.parts.len() > 1 || plan.rows.iter().any(merges));
        // In one kernel with a prefill, decodes only stream keys and do not merge.
        let in_one = plan.pod.is_some_and(|pod| pod.mode == PodMode::Tickets);
        self.fused = merge_mode == MergeMode::Fused && !self.mixed && !in_one;
        self.pieces.clear();
        if self.fused && plan.spec.latent {
            self.fused = self.pieces.find(plan, &mut self.leaves);
        }
        if self.fused {
            self.leave_those_of_shared_sms(plan);
            let merges = plan.merges.iter().zip(&self.leaves);
            let left = merges.filter(|(merge, leaves)| **leaves || merge.slots == 0);
            self.left_rows.extend(left.map(|(merge, _)| *merge));
            self.left = self.left_rows.len() as u32;
        } else {
            self.left = plan.merges.len() as u32;
        }
        let slots = self.left_rows(plan).iter().map(|merge| merge.slots);
        self.most_slots = slots.max().unwrap_or(0);
    }

    /// Leaves the merges of decodes by kernels that share SMs to the merging kernel: these kernels only stream keys.
    fn leave_those_of_shared_sms(&mut self, plan: &Plan) {
        let shares = |group: &&TileGroup| group.id.is_some_and(|id| id.info().co_resident);
        for group in plan.groups.iter().filter(shares) {
            let items = plan
                .items_of(group)
                .iter()
                .filter(|item| item.is_gathered());
            for item in items {
                let rows = item.rows_begin as usize..(item.rows_begin + item.rows) as usize;
                for row in plan.rows.get(rows).unwrap_or_default() {
                    if let Some(leaves) = self.leaves.get_mut(row.merge as usize) {
                        *leaves = true;
                    }
                }
            }
        }
    }

    /// Whether the merging kernel does this merge, if decodes do others.
    #[cfg(feature = "cuda")]
    pub(crate) fn leaves(&self, merge: u32) -> bool {
        self.leaves.get(merge as usize) == Some(&true)
    }

    /// The rows of the merging kernel.
    pub(crate) fn left_rows<'a>(&'a self, plan: &'a Plan) -> &'a [MergeRow] {
        if self.fused {
            &self.left_rows
        } else {
            &plan.merges
        }
    }
}

/// The merging kernel for this number of chunks on so many SMs, and the warps that share a chunk's slots, or 0. `registers` are those of
/// the kernel for few rows; `most_slots` is the number of slots of the longest row, if that is known.
pub(crate) fn shape(
    chunks: u32,
    most_slots: Option<u32>,
    registers: u32,
    sms: u32,
) -> (Shape, u32) {
    let resident = Sm::HOPPER.registers / registers * sms;
    // If there are few rows, several warps share the slots of a row.
    let warps = (resident / chunks.max(1)).min(THREADS / FEW_CHUNKS);
    let shape = match warps {
        0 if most_slots.is_some_and(|most| most <= SECTION) => MANY,
        0 => LONG,
        _ => FEW,
    };
    (shape, warps)
}
