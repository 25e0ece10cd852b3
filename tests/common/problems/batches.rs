//! Batches whose tables share prefixes.

use proptest::{prelude::*, sample::Index};
use tandem_attn::problem::{Batch, PageTable};

use super::super::numeric::Rng;

/// Key lengths around the edges of chunks and pages, and beyond what one CTA loads ahead.
pub fn kv_len() -> impl Strategy<Value = u32> {
    let edge = (1..20_u32, 0..3_u32).prop_map(|(chunks, off)| chunks * 32 + off - 1);
    prop_oneof![1 => Just(0_u32), 3 => 1..70_u32, 4 => edge, 2 => 1..1500_u32]
}

/// Requests of so many keys of their own, pages shared with another, and queries.
pub fn prefixed(requests: &[(u32, usize, u32)], page: u32, one_token: bool, seed: u64) -> Batch {
    let mut noise = Rng(seed);
    let (mut tables, mut used) = (Vec::<Vec<u32>>::new(), 0);
    let (mut indptr, mut lens) = (vec![0], Vec::new());
    for &(own, shared, queries) in requests {
        let queries = if one_token { 1 } else { queries };
        let parent = noise.below(tables.len().max(1));
        let prefix = tables
            .get(parent)
            .map_or(&[][..], |other| &other[..shared.min(other.len())]);
        let mut pages = prefix.to_vec();
        let kv_len = (pages.len() as u32 * page + own).max(queries);
        let more = kv_len.div_ceil(page) - pages.len() as u32;
        pages.extend(used..used + more);
        used += more;
        tables.push(pages);
        lens.push(kv_len);
        indptr.push(indptr[indptr.len() - 1] + queries);
    }
    let mut shuffled: Vec<u32> = (0..used + 3).collect();
    noise.shuffle(&mut shuffled);
    let mut table = PageTable::new(page, used + 3);
    for (pages, &kv_len) in tables.iter().zip(&lens) {
        let pages: Vec<u32> = pages.iter().map(|&page| shuffled[page as usize]).collect();
        table.push(&pages, kv_len);
    }
    Batch::new(indptr, table)
}

/// One request of a random batch: where it leaves the table of an earlier one, how far it goes on alone, and
/// its queries.
#[derive(Clone, Debug)]
pub struct Request {
    parent: Index,
    shared: Index,
    own: u32,
    queries: u32,
}

/// A request of so many keys of its own, and queries.
pub fn request(
    own: impl Strategy<Value = u32>,
    queries: impl Strategy<Value = u32>,
) -> impl Strategy<Value = Request> {
    (any::<Index>(), any::<Index>(), own, queries).prop_map(|(parent, shared, own, queries)| {
        Request {
            parent,
            shared,
            own,
            queries,
        }
    })
}

/// Batches whose tables share prefixes as a prefix cache hands them out, on shuffled pages; of one part, or
/// of several.
pub fn batch() -> impl Strategy<Value = Batch> {
    let own = prop_oneof![1 => Just(0u32), 8 => 0u32..40, 3 => 0u32..200, 1 => 0u32..700];
    let queries =
        prop_oneof![2 => Just(0u32), 8 => Just(1), 5 => 1u32..12, 3 => 1u32..70, 1 => 1u32..200];
    batch_of(prop::collection::vec(request(own, queries), 0..7))
}

pub fn batch_of(requests: impl Strategy<Value = Vec<Request>>) -> impl Strategy<Value = Batch> {
    let page_size = prop_oneof![Just(1u32), Just(3), Just(16), Just(64)];
    (page_size, requests, any::<u64>()).prop_map(|(page_size, requests, seed)| {
        let mut tables: Vec<(Vec<u32>, u32)> = Vec::new();
        let mut used = 0;
        let mut qo_indptr = vec![0];
        for Request {
            parent,
            shared,
            own,
            queries,
        } in &requests
        {
            let mut pages = Vec::new();
            if let Some((parent, parent_len)) = tables.get(parent.index(tables.len().max(1))) {
                pages.extend_from_slice(
                    &parent[..shared.index((parent_len / page_size) as usize + 1)],
                );
            }
            let kv_len = (pages.len() as u32 * page_size + own).max(*queries);
            let more = kv_len.div_ceil(page_size) - pages.len() as u32;
            pages.extend(used..used + more);
            used += more;
            tables.push((pages, kv_len));
            qo_indptr.push(qo_indptr[qo_indptr.len() - 1] + queries);
        }
        let shuffled = shuffled_pages(used + 3, seed);
        let mut table = PageTable::new(page_size, used + 3);
        for (pages, kv_len) in &tables {
            let pages: Vec<u32> = pages.iter().map(|&page| shuffled[page as usize]).collect();
            table.push(&pages, *kv_len);
        }
        Batch::new(qo_indptr, table)
    })
}

fn shuffled_pages(pages: u32, seed: u64) -> Vec<u32> {
    let mut noise = Rng(seed);
    let mut keyed: Vec<(u32, u32)> = (0..pages)
        .map(|page| (noise.between(0.0, 1.0).to_bits(), page))
        .collect();
    keyed.sort_unstable();
    keyed.into_iter().map(|(_, page)| page).collect()
}
