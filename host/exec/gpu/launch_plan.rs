//! The launches of a run and their order: a plan as the GPU executor sees it. Needs no GPU.

mod fingerprint;

use std::{cmp::Reverse, ops::Range};

use kernels_gpu::{
    abi::{NO_MERGE, QueryRow, WorkItem},
    registry::Op,
};

use super::{
    launch_key::{LaunchKey, pairs},
    registry::has_own_heads,
};
use crate::{
    Error,
    plan::{
        MergeMode, Plan, TileGroup,
        launched::{converted::Conversion, merging::Merging, pairs::MOST_LENGTHS},
        pod::{CtaSplit, PodMode, Tickets},
    },
    problem::{Padding, PageTable},
};

/// Items that run together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GroupLaunch {
    pub(super) key: LaunchKey,
    /// Index of the first item, in the launch plan's order.
    pub(super) first: u32,
    pub(super) items: u32,
    /// Units that a CTA of the decode kernel claims at a time.
    pub(super) run: u32,
    /// Whether it reads several times as many bytes as L2 holds.
    pub(super) long: bool,
    /// Whether it has joint items.
    pub(super) joint: bool,
    /// Whether it has rows of two items, [which its kernel merges](kernels_gpu::registry::KernelInfo::merges_pieces).
    pub(super) pieces: bool,
    /// As [`TileGroup::kv_heads_together`].
    pub(super) kv_heads_together: u32,
    /// Pages that it converts, as a range of the launch plan's converted pages.
    pub(super) converted: Range<u32>,
    /// Whether a launch before it converts these pages: few rows of queries see each key. How many are few depends on the number
    /// of keys.
    pub(super) few_rows: bool,
    /// As a range of the launch plan's lengths: see [`LaunchPlan::lengths_of`].
    pub(super) lengths: Range<u32>,
}

/// What the pool of a part must have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PartNeeds {
    pub(super) page_size: u32,
    /// One past the largest page id.
    pub(super) pages: u32,
}

/// A plan's launches. Keeps its memory from plan to plan.
#[derive(Debug, Default)]
pub(super) struct LaunchPlan {
    pub(super) launches: Vec<GroupLaunch>,
    /// The items in launch order, if they differ from the plan's: ordered by part, or with tables of converted pages.
    pub(super) items: Option<Vec<WorkItem>>,
    /// The pages that prefills convert.
    pub(super) conversion: Conversion,
    /// Which merges decodes do, and which the merging kernel.
    pub(super) merging: Merging,
    /// How prefills and decodes share the GPU, if the plan has both.
    pub(super) pod: PodMode,
    /// Number of CTAs of each, if they share SMs.
    pub(super) resident: CtaSplit,
    /// How the CTAs alternate, if one kernel has both.
    pub(super) tickets: Option<Tickets>,
    pub(super) total_q: u32,
    /// As [`Plan::fixed_splits`].
    pub(super) fixed_splits: bool,
    /// Whether query tokens have ancestors.
    pub(super) trees: bool,
    /// Whether query tokens have masks of any keys.
    pub(super) masks: bool,
    pub(super) parts: Vec<PartNeeds>,
    /// Number of page ids, if runs are given the indices of keys instead
    /// ([`Batch::of_top_k`](crate::problem::Batch::of_top_k)).
    pub(super) indices: Option<u32>,
    /// If only some launches pad heads: the range of query tokens of these launches. None if the other launches have
    /// tokens in this range, or if prefills leave partial states.
    pub(super) padded: Option<Range<u32>>,
    /// See [`lengths_of`](Self::lengths_of).
    lengths: Vec<u32>,
}

impl LaunchPlan {
    /// Fills the launch plan from a plan. States are merged by `merge_mode`, if that is possible.
    ///
    /// # Errors
    /// [`Error::NoInstance`] if the plan is not for a GPU.
    pub(super) fn fill(&mut self, plan: &Plan, merge_mode: MergeMode) -> Result<(), Error> {
        self.total_q = plan.total_q;
        self.fixed_splits = plan.fixed_splits;
        self.trees = !plan.ancestors.is_empty();
        self.masks = !plan.masks.is_empty();
        self.pod = plan.pod.map_or(PodMode::Serial, |pod| pod.mode);
        self.resident = plan.pod.map_or(CtaSplit::default(), |pod| pod.ctas);
        let by_tickets = plan.pod.filter(|pod| pod.mode == PodMode::Tickets);
        self.tickets = by_tickets.map(|pod| pod.tickets);
        self.parts.clear();
        self.parts.extend(plan.parts.iter().map(|part| PartNeeds {
            page_size: part.page_size,
            pages: plan.pool_pages(part),
        }));
        let one_token = matches!(&self.parts[..], [part] if part.page_size == 1);
        let mut ids = plan.page_ids.iter().zip(PageTable::CHOSEN..);
        let chosen = one_token && ids.all(|(&id, index)| id == index);
        self.indices = chosen.then_some(plan.page_ids.len() as u32);
        self.order(plan)?;
        self.list_lengths(plan);
        self.convert(plan);
        self.divide_merges(plan, merge_mode);
        self.padded = self.padded_tokens(plan);
        Ok(())
    }

    /// The launches: one for each group, or for each part in it.
    fn order(&mut self, plan: &Plan) -> Result<(), Error> {
        self.launches.clear();
        if plan.parts.len() == 1 {
            self.items = None;
            for group in &plan.groups {
                let items = plan.items_of(group);
                self.launches
                    .push(launch(plan, group, group.items.start, items, 0)?);
            }
            return Ok(());
        }
        let mut ordered = self.items.take().unwrap_or_default();
        ordered.clear();
        for group in &plan.groups {
            for part in 0..plan.parts.len() as u32 {
                let first = ordered.len();
                let of_part = plan.items_of(group).iter().filter(|item| item.part == part);
                ordered.extend(of_part);
                if ordered.len() > first {
                    let items = &ordered[first..];
                    self.launches
                        .push(launch(plan, group, first as u32, items, part)?);
                }
            }
        }
        self.items = Some(ordered);
        Ok(())
    }

    /// Lets prefills read converted pages, if keys are converted.
    fn convert(&mut self, plan: &Plan) {
        self.conversion.clear();
        if !plan.spec.converts() {
            return;
        }
        // Pages lie by their number. Those of several heads are longer, and must begin behind those of one.
        for several in [false, true] {
            let of_prefills = |launch: &&mut GroupLaunch| {
                let op = launch.key.kernel.info().op;
                op == Op::Prefill && (launch.key.heads > 1) == several
            };
            for launch in self.launches.iter_mut().filter(of_prefills) {
                let items = self.items.get_or_insert_with(|| plan.items.clone());
                let range = launch.first as usize..(launch.first + launch.items) as usize;
                let items = &mut items[range];
                launch.converted = self.conversion.add(plan, items);
                let (pages, heads) = (launch.converted.clone(), launch.key.heads);
                launch.few_rows = self.conversion.few_rows_see(pages, plan, items, heads);
            }
        }
    }

    /// Divides the merges between decodes and the merging kernel.
    fn divide_merges(&mut self, plan: &Plan, merge_mode: MergeMode) {
        self.merging.divide(plan, merge_mode);
        let items = self.items.as_ref().unwrap_or(&plan.items);
        for launch in &mut self.launches {
            let range = launch.first as usize..(launch.first + launch.items) as usize;
            launch.pieces = self.merging.pieces.are_among(&items[range]);
        }
    }

    /// Rows that are uploaded otherwise than the plan has them, and their indices. Pieces have the word that says so. Merges that are
    /// left to the merging kernel are taken away: decodes that count arrivals must not count theirs, because kernels that share SMs count
    /// none, and a counter would not return to zero.
    pub(super) fn changed_rows<'a>(
        &'a self,
        plan: &'a Plan,
    ) -> impl Iterator<Item = (usize, QueryRow)> + 'a {
        let merging = &self.merging;
        let left = move |row: &QueryRow| {
            row.merge != NO_MERGE && (!merging.fused || merging.leaves(row.merge))
        };
        let rows = plan.rows.iter().enumerate();
        rows.filter_map(move |(index, row)| {
            let merge = match merging.pieces.word(index) {
                Some(word) => word,
                None if left(row) => NO_MERGE,
                None => return None,
            };
            Some((index, QueryRow { merge, ..*row }))
        })
    }

    fn padded_tokens(&self, plan: &Plan) -> Option<Range<u32>> {
        if Padding::of(&plan.spec).is_none() || self.merging.prefill_merges {
            return None;
        }
        let (own, padded): (Vec<_>, Vec<_>) = plan
            .groups
            .iter()
            .partition(|group| group.id.is_some_and(|id| has_own_heads(id, &plan.spec)));
        let merged = plan.merges.iter().map(|merge| merge.token..merge.token + 1);
        let of_items = padded.iter().flat_map(|group| plan.items_of(group));
        let tokens = of_items.map(|item| tokens_of(plan, item)).chain(merged);
        let within = tokens.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))?;
        let mut others = own.iter().flat_map(|group| plan.items_of(group));
        let apart = |item: &WorkItem| {
            let tokens = tokens_of(plan, item);
            tokens.end <= within.start || tokens.start >= within.end
        };
        others.all(apart).then_some(within)
    }

    /// Keys of the items that a launch computes, the longest first, also if the launch is captured and has room for more. Nothing
    /// where no kernel has [pairs](kernels_gpu::registry::KernelId::of_pairs) of KV heads, or splits are fixed. More than
    /// [`MOST_LENGTHS`] are in no order.
    pub(super) fn lengths_of(&self, launch: &GroupLaunch) -> &[u32] {
        let own = self.launches.iter().find(|own| own.key == launch.key);
        own.map_or(&[], |own| {
            &self.lengths[own.lengths.start as usize..own.lengths.end as usize]
        })
    }

    /// Lists the keys of items whose kernels have pairs of KV heads.
    fn list_lengths(&mut self, plan: &Plan) {
        self.lengths.clear();
        let items = self.items.as_deref().unwrap_or(&plan.items);
        for launch in &mut self.launches {
            let first = self.lengths.len();
            let kernel = launch.key.kernel;
            if !plan.fixed_splits && kernel.of_pairs(plan.spec.head_dim_qk).is_some() {
                let items = &items[launch.first as usize..(launch.first + launch.items) as usize];
                self.lengths.extend(items.iter().map(WorkItem::kv_len));
                if items.len() <= MOST_LENGTHS {
                    self.lengths[first..].sort_unstable_by_key(|&keys| Reverse(keys));
                }
            }
            launch.lengths = first as u32..self.lengths.len() as u32;
        }
    }

    /// See [`pairs`].
    pub(super) fn pairs(&self) -> Vec<[usize; 2]> {
        let keys: Vec<_> = self.launches.iter().map(|launch| launch.key).collect();
        pairs(&keys)
    }
}

fn launch(
    plan: &Plan,
    group: &TileGroup,
    first: u32,
    items: &[WorkItem],
    part: u32,
) -> Result<GroupLaunch, Error> {
    let keys: u64 = items.iter().map(|item| u64::from(item.kv_len())).sum();
    let kernel = group.id.ok_or_else(|| Error::NoInstance {
        kernel: "GPU",
        asked: format!("tiles of {} (the plan is for another device)", group.tile),
        there: "plans for the description of this GPU",
    })?;
    Ok(GroupLaunch {
        key: LaunchKey {
            kernel,
            pack: group.pack,
            part,
            heads: group.heads,
        },
        first,
        items: items.len() as u32,
        run: run_length(keys / items.len().max(1) as u64),
        long: keys * plan.spec.kv_bytes_per_token() * u64::from(group.heads) >= LONG,
        joint: items.iter().any(WorkItem::is_joint),
        pieces: false,
        kv_heads_together: group.kv_heads_together,
        converted: 0..0,
        few_rows: false,
        lengths: 0..0,
    })
}

/// The range from the first query token of an item to the last.
fn tokens_of(plan: &Plan, item: &WorkItem) -> Range<u32> {
    let rows = item.rows_begin..item.rows_begin + item.rows;
    if !item.is_gathered() {
        let heads = plan.parts[item.part as usize].heads;
        return rows.start * heads..rows.end * heads;
    }
    let rows = &plan.rows[rows.start as usize..rows.end as usize];
    let tokens = rows.iter().map(|row| row.token);
    let first = tokens.clone().min().unwrap_or(0);
    first..tokens.max().map_or(first, |last| last + 1)
}

/// A launch that reads at least this many bytes of keys and values is long. On an H200 (50 MB of L2), shorter decodes
/// are faster if their keys leave L2 first, so that its earlier contents stay. Longer decodes are faster if their keys
/// replace these contents.
const LONG: u64 = 200_000_000;

/// Units that a CTA claims at a time. Several short ones, because otherwise claiming takes most of the time: on an
/// H200, two of 256 keys at a time take 7 % less than one by one, four of 64 keys 25 %. Longer ones are spread better
/// one by one.
fn run_length(keys_per_item: u64) -> u32 {
    match keys_per_item {
        0..=64 => 4,
        65..=256 => 2,
        _ => 1,
    }
}

#[cfg(test)]
pub(super) mod tests;
