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
        conversion::{converted_pages, first_to_last, keys_of_row_block},
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
        Ok(self.step(kernel, pieces, Parameters::Widen(params)))
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
        Ok(self.step(kernel, pieces, Parameters::Turn(params)))
    }
}

#[cfg(test)]
mod tests;
