//! Which keys of 8 bits the prefills of a plan turn into 16-bit ones: pages of 64 keys, each once in a launch.

use std::{collections::HashMap, ops::Range};

use kernels_gpu::abi::{ConvertedPage, WorkItem};

use super::data::Plan;

/// Keys of a converted page.
pub(crate) const PAGE: u32 = 64;

/// The pages that hold some keys.
const fn pages(keys: &Range<u32>) -> Range<u32> {
    keys.start / PAGE..keys.end.div_ceil(PAGE)
}

/// How many pages a plan converts at most; fewer where requests share prefixes.
pub(crate) fn most_pages(plan: &Plan) -> u32 {
    if !plan.spec.converts() || plan.groups.iter().any(|group| group.id.is_none()) {
        return 0;
    }
    let prefills = plan.items.iter().filter(|item| !item.is_gathered());
    // Of a row block one piece: that of its last query token and last key.
    let of_blocks = prefills.filter_map(|item| {
        let block = plan.row_block_of(item);
        let keys = plan.keys_seen(block);
        let last_token = item.rows_begin + item.rows == block.first_token + block.tokens;
        (last_token && item.kv_end == keys.end).then(|| pages(&keys).len() as u32)
    });
    of_blocks.sum()
}

/// The pages, launch after launch, in the order in which tiles need them.
#[derive(Debug, Default)]
pub(crate) struct Conversion {
    /// What each is made of.
    pub(crate) pages: Vec<ConvertedPage>,
    /// The tables of the row blocks.
    pub(crate) ids: Vec<u32>,
    /// Of a launch: the tables of the plan.
    tables: HashMap<u32, Table>,
    /// Full pages of a launch, by their place in their table and the first page id.
    known: HashMap<(u32, u32), u32>,
}

/// Where a table lies among the ids.
#[derive(Clone, Copy, Debug)]
struct Table {
    begin: u32,
    /// Where it would begin if it began with key 0: perhaps before the first of the ids, and then wrapped around.
    page_0: u32,
}

impl Conversion {
    pub(crate) fn clear(&mut self) {
        self.pages.clear();
        self.ids.clear();
    }

    /// Adds what the items of a launch see, and has them speak of converted pages. The launch's pages.
    ///
    /// The items are put in order of their tables: what is converted is used by all tiles of a request before the next
    /// request is begun. One after the other by length, the first wave of tiles would need the keys of all requests.
    pub(crate) fn add(&mut self, plan: &Plan, items: &mut [WorkItem]) -> Range<u32> {
        self.tables.clear();
        self.known.clear();
        let first = self.pages.len() as u32;
        for item in &*items {
            if !self.tables.contains_key(&item.table) {
                self.add_table(plan, item);
            }
        }
        items.sort_by_cached_key(|item| self.tables[&item.table].begin);
        for item in items {
            item.table = self.tables[&item.table].page_0;
        }
        first..self.pages.len() as u32
    }

    /// Adds what is seen of an item's table.
    fn add_table(&mut self, plan: &Plan, item: &WorkItem) {
        let seen = plan.keys_seen(plan.row_block_of(item));
        let pages = pages(&seen);
        let begin = self.ids.len();
        self.ids.resize(begin + pages.len(), 0);
        for page in pages.clone().rev() {
            let id = self.page(plan, item, page, seen.end);
            self.ids[begin + (page - pages.start) as usize] = id;
        }
        let begin = begin as u32;
        let page_0 = begin.wrapping_sub(pages.start);
        self.tables.insert(item.table, Table { begin, page_0 });
    }

    /// The converted page of an item's table at a place in it: one that is known, or a new one.
    fn page(&mut self, plan: &Plan, item: &WorkItem, page: u32, end: u32) -> u32 {
        let page_size = plan.parts[item.part as usize].page_size;
        let ids = |table: u32, key: u32, keys: u32| {
            let ids = table + key / page_size..table + (key + keys).div_ceil(page_size);
            &plan.page_ids[ids.start as usize..ids.end as usize]
        };
        let key = page * PAGE;
        let new = ConvertedPage {
            table: item.table,
            key,
            keys: PAGE.min(end - key),
            page: self.pages.len() as u32,
        };
        let own = ids(new.table, key, new.keys);
        let known = self.known.get(&(page, own[0]));
        let known = known.map(|&known| self.pages[known as usize]);
        let same = |known: &ConvertedPage| ids(known.table, key, PAGE) == own;
        if let Some(known) = known.filter(|known| new.keys == PAGE && same(known)) {
            return known.page;
        }
        if new.keys == PAGE {
            self.known.insert((page, own[0]), new.page);
        }
        self.pages.push(new);
        new.page
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        plan::{DeviceDescription, PlanOptions, Planner},
        problem::{Batch, Dtype, PageTable, Spec},
    };

    #[test]
    fn pages_are_converted_once_and_no_more_than_are_seen() {
        let mut table = PageTable::new(16, 1000);
        // 200 keys of which 160 are a prefix, twice; and a decode.
        let prefix: Vec<u32> = (100..110).collect();
        table.push(&[&prefix[..], &[7, 8, 9]].concat(), 200);
        table.push(&[&prefix[..], &[17, 18, 19]].concat(), 200);
        table.push(&[1, 2], 20);
        let batch = Batch::new(vec![0, 100, 200, 201], table);
        let device = DeviceDescription::named("h200").unwrap();
        let plan = |spec: &Spec| {
            let plan = Planner::new().plan(spec, &batch, &device, &PlanOptions::default());
            plan.unwrap()
        };
        let spec = Spec::new(8, 2, 128).with_kv_dtype(Dtype::F8E4M3);
        let converted = |plan: &Plan| {
            let mut conversion = Conversion::default();
            for group in &plan.groups {
                let mut items = plan.items_of(group).to_vec();
                items.retain(|item| !item.is_gathered());
                let before = items.clone();
                conversion.add(plan, &mut items);
                for item in &items {
                    let same = |before: &&WorkItem| before.rows_begin == item.rows_begin;
                    let before = before.iter().find(same).unwrap();
                    for key in before.kv_begin..before.kv_end {
                        let id = conversion.ids[item.table.wrapping_add(key / PAGE) as usize];
                        let page = conversion.pages[id as usize];
                        assert!(key >= page.key && key < page.key + page.keys);
                        let id = |table: u32| plan.page_ids[(table + key / 16) as usize];
                        assert_eq!(id(page.table), id(before.table));
                    }
                }
            }
            conversion
        };
        let causal = plan(&spec);
        let conversion = converted(&causal);
        // Two pages of 64 of the prefix, and two of each.
        assert_eq!((conversion.pages.len(), conversion.ids.len()), (6, 8));
        assert_eq!(most_pages(&causal), 8);
        assert_eq!(conversion.pages[0].key, 192);
        let window = plan(&spec.with_window_left(10));
        assert_eq!(converted(&window).ids.len(), 6);
        assert_eq!(most_pages(&window), 6);
        assert_eq!(most_pages(&plan(&Spec::new(8, 2, 128))), 0);
    }
}
