//! The pages of 64 keys that prefills convert: from 8 bits, or by applying the rotary embedding. A launch converts each
//! page once, into a pool that it then reads.

use std::{collections::HashMap, ops::Range};

use kernels_gpu::abi::{ConvertedPage, WorkItem};

use crate::plan::{
    conversion::{converted_pages, few_rows_see_them, first_to_last, keys_of_row_block},
    data::Plan,
};

/// The pages, launch after launch, in the order in which tiles need them.
#[derive(Debug, Default)]
pub(crate) struct Conversion {
    /// The source of each converted page.
    pub(crate) pages: Vec<ConvertedPage>,
    /// The tables of the row blocks.
    pub(crate) ids: Vec<u32>,
    /// For the current launch, by the table in the plan: the table of converted pages.
    tables: HashMap<u32, Table>,
    /// Full pages of the current launch of which all keys are seen, by their place in their table and their first page id.
    known: HashMap<(u32, u32), u32>,
}

/// The place of a table among the ids.
#[derive(Clone, Copy, Debug)]
struct Table {
    begin: u32,
    /// Where it would begin if it began with key 0. This may be before the first id, and is then wrapped around.
    page_0: u32,
}

impl Conversion {
    #[cfg(feature = "cuda")]
    pub(crate) fn clear(&mut self) {
        self.pages.clear();
        self.ids.clear();
    }

    /// Adds the pages that the items of a launch see, and makes the items refer to converted pages. Returns the pages
    /// of the launch.
    ///
    /// Sorts the items by their tables: all tiles of a request use its converted pages before the next request begins.
    /// If they were sorted by length, the first wave of tiles would need the keys of all requests.
    pub(crate) fn add(&mut self, plan: &Plan, items: &mut [WorkItem]) -> Range<u32> {
        self.tables.clear();
        self.known.clear();
        let first = self.pages.len() as u32;
        for item in &*items {
            if !self.tables.contains_key(&item.table) {
                let seen = keys_of_row_block(plan, item).unwrap_or_else(|| {
                    let of_table = items.iter().filter(|other| other.table == item.table);
                    first_to_last(of_table.map(|item| item.kv_begin..item.kv_end))
                });
                self.add_table(plan, item, seen);
            }
        }
        items.sort_by_cached_key(|item| self.tables[&item.table].begin);
        for item in items {
            item.table = self.tables[&item.table].page_0;
        }
        first..self.pages.len() as u32
    }

    /// Whether few rows of the items of a launch see each of its converted pages, so that a launch before it converts them.
    /// `heads` are those of its part.
    pub(crate) fn few_rows_see(
        &self,
        pages: Range<u32>,
        plan: &Plan,
        items: &[WorkItem],
        heads: u32,
    ) -> bool {
        let pages = self.pages[pages.start as usize..pages.end as usize].iter();
        let keys: u64 = pages.map(|page| u64::from(page.end - page.first)).sum();
        let pair = |item: &WorkItem| u64::from(item.rows) * u64::from(item.kv_len());
        let pairs: u64 = items.iter().map(pair).sum();
        let heads = u64::from(heads);
        let [pairs, keys] = [pairs * u64::from(plan.spec.group()), keys].map(|sum| sum * heads);
        few_rows_see_them(pairs, keys, plan.spec.kv_heads)
    }

    /// Adds the pages of an item's table that are seen.
    fn add_table(&mut self, plan: &Plan, item: &WorkItem, seen: Range<u32>) {
        let pages = converted_pages(&seen);
        let begin = self.ids.len();
        self.ids.resize(begin + pages.len(), 0);
        for page in pages.clone().rev() {
            let id = self.page(plan, item, page, &seen);
            self.ids[begin + (page - pages.start) as usize] = id;
        }
        let begin = begin as u32;
        let page_0 = begin.wrapping_sub(pages.start);
        self.tables.insert(item.table, Table { begin, page_0 });
    }

    /// The converted page at a place of an item's table: a known page, or a new one. Pages of which not all keys are seen are known
    /// to none: two requests with the same page may see other keys of it.
    fn page(&mut self, plan: &Plan, item: &WorkItem, page: u32, seen: &Range<u32>) -> u32 {
        let page_size = plan.parts[item.part as usize].page_size;
        let ids = |table: u32, key: u32, keys: u32| {
            let ids = table + key / page_size..table + (key + keys).div_ceil(page_size);
            &plan.page_ids[ids.start as usize..ids.end as usize]
        };
        let key = page * ConvertedPage::KEYS;
        let new = ConvertedPage {
            table: item.table,
            key,
            first: seen.start.saturating_sub(key) as u16,
            end: ConvertedPage::KEYS.min(seen.end - key) as u16,
            page: self.pages.len() as u32,
        };
        if u32::from(new.end - new.first) < ConvertedPage::KEYS {
            self.pages.push(new);
            return new.page;
        }
        let own = ids(new.table, key, ConvertedPage::KEYS);
        let known = self.known.get(&(page, own[0]));
        let known = known.map(|&known| self.pages[known as usize]);
        let same = |known: &ConvertedPage| ids(known.table, key, ConvertedPage::KEYS) == own;
        if let Some(known) = known.filter(same) {
            return known.page;
        }
        self.known.insert((page, own[0]), new.page);
        self.pages.push(new);
        new.page
    }
}

#[cfg(test)]
mod tests;
