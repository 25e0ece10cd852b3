//! Page lists by KV head, and in the same run requests whose heads read the same pages.

use tandem_attn::{
    exec::gpu::{DeviceArray, DeviceBuffer, DeviceTensor, KvPool, KvScales},
    kv::PagesByHead,
    problem::Dtype,
};

use super::{Runner, text};
use crate::{
    case::{Case, Row, Scales},
    numeric::Rng,
    oracle,
};

/// A request: its first token, its tokens, and for each KV head the slots of its keys.
struct Listed {
    first: usize,
    tokens: usize,
    slots: Vec<Vec<u32>>,
}

/// Pages of a request and their keys: some of its pages in any order, the last one last.
fn list(case: &Case, row: &Row, table: &[u32], rng: &mut Rng) -> (Vec<u32>, u32) {
    let held = row.keys.div_ceil(case.page_size) as usize;
    let Some((last, full)) = table[..held].split_last() else {
        return (Vec::new(), 0);
    };
    let of_last = row.keys - full.len() as u32 * case.page_size;
    let mut pages: Vec<u32> = full.to_vec();
    rng.shuffle(&mut pages);
    let least = row.queries.saturating_sub(of_last).div_ceil(case.page_size) as usize;
    pages.truncate(least + rng.below(pages.len() - least + 1));
    let keys = pages.len() as u32 * case.page_size + of_last;
    pages.push(*last);
    (pages, keys)
}

impl Runner<'_> {
    pub(super) fn by_head(&mut self, at: usize, q: &[f32], rng: &mut Rng) -> Result<(), String> {
        let (case, page_size) = (self.case, self.case.page_size);
        let (spec, pool) = (self.without_distances(rng), self.pools()[at % 2]);
        let mut lists = match PagesByHead::new(&spec, pool.k_strides, self.world.pages) {
            Ok(lists) => lists,
            Err(error) => return self.refused(error),
        };
        let (tables, _) = case.tables();
        let (mut all, mut first) = (Vec::new(), 0);
        for row in &case.steps[at].rows {
            if row.queries == 0 {
                continue;
            }
            let table = &tables[row.sequence];
            let whole = row.queries > 4 || rng.below(3) == 0;
            let of_heads: Vec<(Vec<u32>, u32)> = (0..spec.kv_heads)
                .map(|_| match whole {
                    true => {
                        let held = row.keys.div_ceil(page_size) as usize;
                        (table[..held].to_vec(), row.keys)
                    }
                    false => list(case, row, table, rng),
                })
                .collect();
            let pushed = match whole {
                true => lists.push_whole(row.queries, &of_heads[0].0, row.keys),
                false => {
                    let of_heads = of_heads.iter();
                    let of_heads: Vec<_> =
                        of_heads.map(|(pages, keys)| (&pages[..], *keys)).collect();
                    lists.push(row.queries, &of_heads)
                }
            };
            pushed.map_err(|error| format!("good lists are refused: {error}"))?;
            let slot = |pages: &[u32], key: u32| {
                pages[(key / page_size) as usize] * page_size + key % page_size
            };
            let of_heads = of_heads.iter();
            let slots =
                of_heads.map(|(pages, keys)| (0..*keys).map(|key| slot(pages, key)).collect());
            let tokens = row.queries as usize;
            all.push(Listed {
                first,
                tokens,
                slots: slots.collect(),
            });
            first += tokens;
        }
        let (causal, group) = (spec.variant.causal, spec.group() as usize);
        let seen = |token: usize, head: usize| -> Vec<u32> {
            let of = all.partition_point(|listed| listed.first <= token) - 1;
            let listed = &all[of];
            let slots = &listed.slots[head / group];
            let later = listed.first + listed.tokens - 1 - token;
            let hidden = if causal { later } else { 0 };
            slots[..slots.len().saturating_sub(hidden)].to_vec()
        };
        let right = oracle::of_slots(case, &self.world, q, spec.variant.sinks, seen);
        self.run_lists(&lists, pool, first, right)
    }

    fn run_lists(
        &mut self,
        lists: &PagesByHead,
        pool: KvPool,
        tokens: usize,
        right: tandem_attn::reference::Output,
    ) -> Result<(), String> {
        let spec = self.case.spec;
        let (batch, heads) = (lists.batch(), lists.heads());
        let mut by_head = pool;
        let of_heads = self.case.scales == Scales::Head;
        let of_token = DeviceBuffer::from_slice(self.gpu, &heads).map_err(text)?;
        if of_heads {
            by_head.scales = KvScales::One;
        }
        by_head = match by_head.by_head(spec.kv_heads) {
            Ok(by_head) => by_head,
            Err(error) => return self.refused(error),
        };
        if let (true, KvScales::Head { k, v }) = (of_heads, pool.scales) {
            let shape = [spec.kv_heads as usize, 1];
            by_head = by_head.with_scales(KvScales::Request {
                k: DeviceTensor::new(k.address, Dtype::F32, shape),
                v: DeviceTensor::new(v.address, Dtype::F32, shape),
                of_token: DeviceArray::new(of_token.address(), heads.len()),
            });
        }
        let mut given = self.given(0, tokens);
        given.pools = [by_head, pool][..batch.parts.len()].to_vec();
        let [q, out] = [given.q, given.out].map(|tensor| tensor.by_kv_head(spec.kv_heads));
        let (Some(q), Some(out)) = (q, out) else {
            self.tally.unsupported("tokens with gaps are not by head");
            return Ok(());
        };
        (given.q, given.out) = (q, out);
        let lse = given.lse.map(|lse| lse.address);
        let shape = [given.q.shape[0], given.q.shape[1]];
        given.lse = lse.map(|address| DeviceTensor::new(address, Dtype::F32, shape));
        given.own.clear();
        self.call_and_judge("page lists by KV head", lists.spec(), &batch, &given, right)
    }
}
