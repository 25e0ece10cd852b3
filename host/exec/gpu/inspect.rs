//! Checks on the host what kernels are about to read: the debug mode of a workspace.

use std::ops::Range;

use bytemuck::Pod;
use kernels_gpu::abi::{ConvertedPage, DIRECT, NO_MERGE, PieceOf, QueryRow, WorkItem};

use super::launch_plan::{GroupLaunch, LaunchPlan};
use crate::{
    Error,
    plan::{Plan, WorkspaceLayout, conversion::converted_pages},
};

/// What is known of the plan whose arrays are checked.
#[derive(Debug, Default)]
pub(super) struct Known {
    rows: u32,
    merges: u32,
    slots: u32,
    page_ids: u32,
    /// The page ids of every row block, part after part.
    tables: Vec<Table>,
}

#[derive(Clone, Debug)]
struct Table {
    part: u32,
    row_block: u32,
    pages: Range<u32>,
}

impl Known {
    pub(super) fn of(plan: &Plan) -> Self {
        let mut tables = Vec::with_capacity(plan.row_blocks.len());
        for (index, part) in plan.parts.iter().enumerate() {
            let blocks = part.row_blocks.start as usize..part.row_blocks.end as usize;
            let mut first = part.pages.start;
            for (row_block, block) in plan.row_blocks[blocks].iter().enumerate() {
                let pages = first..first + block.capacity / part.page_size;
                first = pages.end;
                tables.push(Table {
                    part: index as u32,
                    row_block: row_block as u32,
                    pages,
                });
            }
        }
        Self {
            rows: plan.rows.len() as u32,
            merges: plan.merges.len() as u32,
            slots: plan.slots,
            page_ids: plan.page_ids.len() as u32,
            tables,
        }
    }

    /// The table that a page id belongs to.
    fn table(&self, page: u32) -> Option<&Table> {
        // Tables follow each other; one without pages ends where the table before it does.
        let behind = |table: &Table| table.pages.end <= page;
        let table = self.tables.get(self.tables.partition_point(behind))?;
        table.pages.contains(&page).then_some(table)
    }
}

fn read<T: Pod>(bytes: &[u8], place: &Range<u64>, index: u32) -> T {
    let at = place.start as usize + index as usize * size_of::<T>();
    bytemuck::pod_read_unaligned(&bytes[at..at + size_of::<T>()])
}

/// Checks the first bytes of a workspace, copied back from the device, for tensors of `tokens` query tokens and pools
/// with these numbers of `pages`.
pub(super) fn inspect(
    bytes: &[u8],
    layout: &WorkspaceLayout,
    launch_plan: &LaunchPlan,
    known: &Known,
    pages: &[u32],
    tokens: u32,
) -> Result<(), Error> {
    for launch in &launch_plan.launches {
        let part = launch.key.part as usize;
        let (page_size, pool_pages) = (launch_plan.parts[part].page_size, pages[part]);
        for page in launch.converted.clone() {
            let page: ConvertedPage = read(bytes, &layout.conversions, page);
            let keys = [page.first, page.end].map(|at| page.key.saturating_add(at.into()));
            let keys = keys[0]..keys[1];
            let pages = keys.start / page_size..keys.end.div_ceil(page_size);
            let table = known.table(page.table);
            let Some(table) = table.filter(|t| page.table.saturating_add(pages.end) <= t.pages.end)
            else {
                return Err(Error::Damaged {
                    item: launch.first,
                    request: table.map(|table| table.row_block),
                    part: launch.key.part,
                    what: "the table of a page to convert",
                    got: page.table,
                    limit: known.page_ids,
                });
            };
            check_pages(bytes, layout, table, page.table, pages, pool_pages)?;
        }
        let launched = launch.first..launch.first + launch.items;
        for index in launched.flat_map(|index| with_runs(bytes, layout, index)) {
            let item: WorkItem = read(bytes, &layout.items, index);
            let broken = |what: &'static str, got: u32, limit: u32| {
                let request = known.table(item.table).map(|table| table.row_block);
                Err(Error::Damaged {
                    item: index,
                    request,
                    part: launch.key.part,
                    what,
                    got,
                    limit,
                })
            };
            if item.part != launch.key.part {
                return broken("its part", item.part, launch.key.part);
            }
            if !launch.converted.is_empty() {
                check_rows(bytes, layout, known, &item, launch, tokens)
                    .or_else(|(what, got, limit)| broken(what, got, limit))?;
                for page in converted_pages(&(item.kv_begin..item.kv_end)) {
                    let entry = item.table.wrapping_add(page);
                    let entries = launch_plan.conversion.ids.len() as u32;
                    if entry >= entries {
                        return broken("its table of converted pages", entry, entries);
                    }
                    let id: u32 = read(bytes, &layout.converted_ids, entry);
                    if !launch.converted.contains(&id) {
                        return broken("a converted page", id, launch.converted.end);
                    }
                }
                continue;
            }
            let Some(table) = known.table(item.table) else {
                return broken("the start of its table", item.table, known.page_ids);
            };
            let capacity = (table.pages.end - item.table) * page_size;
            // The keys of a joint item are those of its runs.
            let keys = if item.is_joint() {
                0..0
            } else {
                item.kv_begin..item.kv_end
            };
            if keys.end > capacity || keys.start > keys.end {
                return broken("the end of its keys", item.kv_end, capacity);
            }
            let pages = keys.start / page_size..keys.end.div_ceil(page_size);
            check_pages(bytes, layout, table, item.table, pages, pool_pages)?;
            check_rows(bytes, layout, known, &item, launch, tokens)
                .or_else(|(what, got, limit)| broken(what, got, limit))?;
        }
    }
    Ok(())
}

/// The pages of a table whose ids begin at `first`.
fn check_pages(
    bytes: &[u8],
    layout: &WorkspaceLayout,
    table: &Table,
    first: u32,
    pages: Range<u32>,
    limit: u32,
) -> Result<(), Error> {
    for page in pages {
        let got: u32 = read(bytes, &layout.page_ids, first + page);
        if got >= limit {
            return Err(Error::PageOutside {
                part: table.part,
                request: table.row_block,
                page: first + page - table.pages.start,
                got,
                pages: limit,
            });
        }
    }
    Ok(())
}

/// An item and its runs, as far as these are in the workspace.
fn with_runs(bytes: &[u8], layout: &WorkspaceLayout, index: u32) -> impl Iterator<Item = u32> {
    let item: WorkItem = read(bytes, &layout.items, index);
    let all = (layout.items.end - layout.items.start) / size_of::<WorkItem>() as u64;
    let first = index.saturating_add(item.slot).min(all as u32);
    let runs = match item.is_joint() {
        true => first..first.saturating_add(item.merge).min(all as u32),
        false => 0..0,
    };
    std::iter::once(index).chain(runs)
}

/// Checks the tokens, states and merges of an item. Returns what is out of its array, its value, and the limit.
fn check_rows(
    bytes: &[u8],
    layout: &WorkspaceLayout,
    known: &Known,
    item: &WorkItem,
    launch: &GroupLaunch,
    tokens: u32,
) -> Result<(), (&'static str, u32, u32)> {
    let heads = launch.key.heads;
    let below = |what, got: u32, limit: u32| match got < limit {
        true => Ok(()),
        false => Err((what, got, limit)),
    };
    let last = item.rows.saturating_sub(1);
    if !item.is_gathered() {
        below(
            "its last query token",
            item.rows_begin.saturating_add(last),
            tokens / heads,
        )?;
        if item.slot != DIRECT {
            below(
                "its last partial state",
                item.slot.saturating_add(last),
                known.slots / heads,
            )?;
        }
        return Ok(());
    }
    below(
        "its last row",
        item.rows_begin.saturating_add(last),
        known.rows,
    )?;
    for row in item.rows_begin..item.rows_begin + item.rows {
        let row: QueryRow = read(bytes, &layout.rows, row);
        below("a query token", row.token, tokens)?;
        if row.slot != DIRECT {
            below("a partial state", row.slot, known.slots)?;
        }
        if row.merge != NO_MERGE {
            let merge = match launch.pieces {
                true => PieceOf::of_word(row.merge).merge,
                false => row.merge,
            };
            below("a merge", merge, known.merges)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        plan::{Bound, DeviceDescription, PlanOptions, Planner},
        problem::{Batch, PageTable, Spec},
    };

    #[test]
    fn damage_is_named_by_request_and_page() {
        let mut table = PageTable::new(16, 1000);
        table.push(&[7, 3], 20);
        table.push(&(100..400).collect::<Vec<_>>(), 4800);
        let batch = Batch::new(vec![0, 1, 41], table);
        let spec = Spec::new(8, 2, 128);
        let device = DeviceDescription::named("h200").unwrap();
        let plan = Planner::new()
            .plan(&spec, &batch, &device, &PlanOptions::default())
            .unwrap();
        let layout = WorkspaceLayout::new(&spec, &Bound::of(&plan));
        let mut launch_plan = LaunchPlan::default();
        launch_plan.fill(&plan, plan.merge_mode).unwrap();
        let known = Known::of(&plan);
        let check = |damage: &dyn Fn(&mut Plan), pages: u32, tokens: u32| {
            let mut plan = plan.clone();
            damage(&mut plan);
            let mut bytes = vec![0; layout.upload_bytes as usize];
            layout.write(&plan, &mut bytes).unwrap();
            inspect(&bytes, &layout, &launch_plan, &known, &[pages], tokens)
        };
        assert_eq!(check(&|_| {}, 1000, 41), Ok(()));
        let outside = check(&|plan| plan.page_ids[2 + 5] = 1000, 1000, 41);
        assert_eq!(
            outside,
            Err(Error::PageOutside {
                part: 0,
                request: 1,
                page: 5,
                got: 1000,
                pages: 1000
            })
        );
        let of_request_0 = |plan: &Plan| plan.items.iter().position(|item| item.table == 0);
        let at = of_request_0(&plan).unwrap();
        let long = check(&|plan| plan.items[at].kv_end = 33, 1000, 41).unwrap_err();
        assert!(
            matches!(
                long,
                Error::Damaged {
                    request: Some(0),
                    got: 33,
                    limit: 32,
                    ..
                }
            ),
            "{long}"
        );
        assert!(matches!(
            check(&|_| {}, 1000, 40),
            Err(Error::Damaged { limit: 40, .. })
        ));
        let lost = check(&|plan| plan.items[at].table = 9999, 1000, 41).unwrap_err();
        assert!(
            lost.to_string().contains("the start of its table"),
            "{lost}"
        );
    }
}
