//! The pages of 64 keys that prefills convert: from 8 bits, or by applying the rotary embedding. A launch converts each
//! page once, into a pool that it then reads.

use std::{collections::HashMap, ops::Range};

use kernels_gpu::{
    abi::{
        ConvertParams, ConvertedPage, LaunchRecord, PrefillParams, ScaleParams, TurnParams,
        WidenParams, WorkItem,
    },
    common::cache,
    divisor::Divisor,
    passes::{turn::PIECES, widen::NUMBERS},
    registry::Op,
};

use super::{
    DeviceArray, Gpu, KvPool, KvScales, Workspace,
    prefill::describes_values,
    prefill_rows::vectors_of,
    registry::element,
    steps::{Parameters, Step, check_pool},
};
use crate::{
    Error,
    plan::{
        Plan,
        conversion::{converted_pages, first_to_last},
    },
    problem::{Compute, Dtype, KvLayout},
};

/// The pages, launch after launch, in the order in which tiles need them.
#[derive(Debug, Default)]
pub(super) struct Conversion {
    /// The source of each converted page.
    pub(super) pages: Vec<ConvertedPage>,
    /// The tables of the row blocks.
    pub(super) ids: Vec<u32>,
    /// For the current launch, by the table in the plan: the table of converted pages.
    tables: HashMap<u32, Table>,
    /// Full pages of the current launch, by their place in their table and their first page id.
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
    pub(super) fn clear(&mut self) {
        self.pages.clear();
        self.ids.clear();
    }

    /// Adds the pages that the items of a launch see, and makes the items refer to converted pages. Returns the pages
    /// of the launch.
    ///
    /// Sorts the items by their tables: all tiles of a request use its converted pages before the next request begins.
    /// If they were sorted by length, the first wave of tiles would need the keys of all requests.
    pub(super) fn add(&mut self, plan: &Plan, items: &mut [WorkItem]) -> Range<u32> {
        self.tables.clear();
        self.known.clear();
        let first = self.pages.len() as u32;
        for item in &*items {
            if !self.tables.contains_key(&item.table) {
                let seen = match item.flags & WorkItem::SHARED_KEYS {
                    0 => plan.keys_seen(plan.row_block_of(item)),
                    _ => {
                        let of_table = items.iter().filter(|other| other.table == item.table);
                        first_to_last(of_table.map(|item| item.kv_begin..item.kv_end))
                    }
                };
                self.add_table(plan, item, seen);
            }
        }
        items.sort_by_cached_key(|item| self.tables[&item.table].begin);
        for item in items {
            item.table = self.tables[&item.table].page_0;
        }
        first..self.pages.len() as u32
    }

    /// Adds the pages of an item's table that are seen.
    fn add_table(&mut self, plan: &Plan, item: &WorkItem, seen: Range<u32>) {
        let pages = converted_pages(&seen);
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

    /// The converted page at a place of an item's table: a known page, or a new one.
    fn page(&mut self, plan: &Plan, item: &WorkItem, page: u32, end: u32) -> u32 {
        let page_size = plan.parts[item.part as usize].page_size;
        let ids = |table: u32, key: u32, keys: u32| {
            let ids = table + key / page_size..table + (key + keys).div_ceil(page_size);
            &plan.page_ids[ids.start as usize..ids.end as usize]
        };
        let key = page * ConvertedPage::KEYS;
        let new = ConvertedPage {
            table: item.table,
            key,
            keys: ConvertedPage::KEYS.min(end - key),
            page: self.pages.len() as u32,
        };
        let own = ids(new.table, key, new.keys);
        let known = self.known.get(&(page, own[0]));
        let known = known.map(|&known| self.pages[known as usize]);
        let same = |known: &ConvertedPage| ids(known.table, key, ConvertedPage::KEYS) == own;
        if let Some(known) = known.filter(|known| new.keys == ConvertedPage::KEYS && same(known)) {
            return known.page;
        }
        if new.keys == ConvertedPage::KEYS {
            self.known.insert((page, own[0]), new.page);
        }
        self.pages.push(new);
        new.page
    }
}

/// The kernel's number for the element type of a pool.
pub(super) fn format(dtype: Dtype) -> Result<u32, Error> {
    match dtype {
        Dtype::F8E4M3 => Ok(cache::E4M3),
        Dtype::F8E5M2 => Ok(cache::E5M2),
        got => Err(Error::Dtype {
            tensor: "the KV pool",
            got,
            expected: "F8E4M3 or F8E5M2",
        }),
    }
}

impl Workspace {
    /// The pool of converted keys and values. It has no pages if the plan has no prefills.
    pub(super) fn converted_pool(&self) -> KvPool {
        let spec = match self.spec.compute {
            Compute::F16 => self.spec.with_kv_dtype(self.spec.on_kernels().q_dtype),
            Compute::F8 => self.spec,
        };
        let [k, v, ..] = self.converted();
        KvPool::new(
            &spec,
            KvLayout::Hnd,
            ConvertedPage::KEYS,
            self.bound.converted_pages,
            k,
            v,
        )
    }

    /// Makes a prefill convert the pages of an 8-bit pool that its launch lists.
    pub(super) fn convert_for(
        &self,
        params: &mut PrefillParams,
        pool: &KvPool,
        pages: Range<u32>,
        tokens: usize,
    ) -> Result<(), Error> {
        params.attention.scales = pool.scales.parameters(&self.spec, pool, tokens)?;
        params.convert = self.conversion_of(pool, pages)?;
        Ok(())
    }

    /// The parameters that convert entries of the list.
    fn conversion_of(&self, pool: &KvPool, pages: Range<u32>) -> Result<ConvertParams, Error> {
        check_pool(pool)?;
        pool.check_dtype(&self.spec)?;
        let [to_k, to_v, done, control] = self.converted();
        let [k_strides, v_strides] = vectors_of(pool, self.spec.kv_heads)?;
        Ok(ConvertParams {
            k: pool.k,
            v: pool.v,
            to_k,
            to_v,
            list: self.conversions().address,
            page_ids: self.page_ids().address,
            done,
            control,
            k_strides,
            v_strides,
            page_size: Divisor::new(pool.k_strides.page_size),
            first_page: pages.start,
            pages: pages.len() as u32,
            format: match self.spec.rotary {
                Some(_) => cache::BITS16,
                None => format(pool.dtype)?,
            },
            reserved: [0; 2],
        })
    }
}

impl Gpu {
    /// The launch that widens the keys of a prefill, each by the scale of its token if tokens have scales.
    pub(super) fn prepare_widen(
        &self,
        workspace: &Workspace,
        pool: &KvPool,
        pages: Range<u32>,
        record: Option<DeviceArray<LaunchRecord>>,
        tokens: usize,
    ) -> Result<Step, Error> {
        let spec = &workspace.spec.on_kernels();
        let pieces = pages.len() as u32 * spec.kv_heads * 2;
        let params = WidenParams {
            convert: workspace.conversion_of(pool, pages)?,
            scales: match pool.scales {
                KvScales::Token { .. } => pool.scales.parameters(spec, pool, tokens)?,
                _ => ScaleParams::default(),
            },
            record: record.map_or(0, |record| record.address),
            kv_heads: Divisor::new(spec.kv_heads),
            vectors_log: (spec.head_dim_qk / NUMBERS).trailing_zeros(),
        };
        let kernel = self.pass(Op::Widen, element(spec.q_dtype))?;
        Ok(Step {
            kernel: *kernel,
            launch: self.resident(kernel, pieces),
            part: 0,
            parameters: Parameters::Widen(params),
        })
    }
}

impl Gpu {
    /// The launch that applies the rotary embedding to the keys of a prefill.
    pub(super) fn prepare_turn(
        &self,
        workspace: &Workspace,
        pool: &KvPool,
        pages: Range<u32>,
        record: Option<DeviceArray<LaunchRecord>>,
    ) -> Result<Step, Error> {
        let spec = &workspace.spec;
        let pieces = (pages.len() as u32).saturating_mul(PIECES);
        let mut convert = workspace.conversion_of(pool, pages)?;
        if describes_values(pool, spec) {
            convert.to_v = 0;
        }
        let params = TurnParams {
            convert,
            rotary: workspace.rotary(),
            record: record.map_or(0, |record| record.address),
            kv_heads: spec.kv_heads,
            lanes_log: (spec.head_dim_qk / 16).trailing_zeros(),
        };
        let kernel = self.pass(Op::Turn, element(spec.kv_dtype))?;
        Ok(Step {
            kernel: *kernel,
            launch: self.resident(kernel, pieces),
            part: 0,
            parameters: Parameters::Turn(params),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        plan::{DeviceDescription, PlanOptions, Planner, conversion::most_pages, pod::PodMode},
        problem::{Batch, PageTable, Spec},
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
                        let id = conversion.ids
                            [item.table.wrapping_add(key / ConvertedPage::KEYS) as usize];
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

    /// Decodes read keys in the middle of a table, because their requests are not next to each other: prefills convert these
    /// keys, too, and the bound counts them.
    #[test]
    fn keys_between_two_prefixes_of_a_table_are_counted() {
        // 33 requests have three common levels, 14 have two of these, and 33 among the 14 have one.
        let [root, both, run] =
            [0..500, 500..625, 625..685].map(|pages| pages.collect::<Vec<u32>>());
        let mut table = PageTable::new(16, 800);
        for request in 0..80_u32 {
            let pages = match request {
                0..33 => [&root[..], &both, &run].concat(),
                _ if request % 2 == 0 && request < 61 => [&root[..], &both].concat(),
                _ => root.clone(),
            };
            let pages = [&pages[..], &[700 + request]].concat();
            table.push(&pages, pages.len() as u32 * 16);
        }
        let batch = Batch::new((0..=80).collect(), table);
        let device = DeviceDescription::named("h200").unwrap();
        let spec = Spec::new(32, 8, 128).with_kv_dtype(Dtype::F8E4M3);
        let options = PlanOptions::default().with_pod(PodMode::Fused);
        let plan = Planner::new()
            .plan(&spec, &batch, &device, &options)
            .unwrap();
        let prefills = plan.items.iter().filter(|item| !item.is_gathered());
        let of_first = prefills.clone().filter(|item| item.table == 0);
        let between = |item: &WorkItem| item.kv_begin < 10_000 && item.kv_end > 8000;
        assert!(!of_first.clone().any(between), "{plan}");
        assert_eq!(of_first.clone().map(|item| item.kv_begin).min(), Some(0));
        assert_eq!(of_first.map(|item| item.kv_end).max(), Some(10_960));
        let mut conversion = Conversion::default();
        let mut items: Vec<WorkItem> = prefills.copied().collect();
        conversion.add(&plan, &mut items);
        assert!(conversion.pages.len() as u32 <= most_pages(&plan));
        assert_eq!(conversion.ids.len() as u32, most_pages(&plan));
    }
}
