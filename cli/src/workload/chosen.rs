//! Keys that are chosen for each query token, as an indexer does for sparse attention.

use tandem_attn::problem::{Batch, Dtype, Spec};

use super::Case;
use crate::{Failure, tensors::has_rows_656};

/// A batch whose keys a GPU finds by indices in its memory.
pub struct Chosen {
    /// What is planned: the number of keys of each query token, without the keys.
    pub planned: Batch,
    /// The keys of each query token as places in the pool, `page × page_size + offset`; −1 is none.
    pub indices: Vec<i32>,
}

/// Multiplier of a hash of 32 bits: 2³² over the golden ratio. The scripts in `peers/` choose with the same.
const SPREAD: u32 = 2_654_435_761;

/// One key of the range `at` of `k` equal ranges of the first `keys` keys.
fn pick(token: u32, at: u32, keys: u32, k: u32) -> u32 {
    let bound = |at: u32| (u64::from(at) * u64::from(keys) / u64::from(k)) as u32;
    let (first, end) = (bound(at), bound(at + 1));
    let mixed = token.wrapping_mul(k).wrapping_add(at).wrapping_mul(SPREAD) >> 8;
    first + mixed % (end - first)
}

/// The keys of each query token as places in the pool of a batch, `k` for each; −1 where a token sees fewer.
pub(super) fn indices(spec: &Spec, batch: &Batch, k: u32) -> Vec<i32> {
    let part = &batch.parts[0];
    let table = &part.table;
    let mut indices = Vec::with_capacity(batch.total_q() as usize * k as usize);
    for request in 0..batch.requests() {
        let (pages, first) = (table.pages(request), part.first_position(request));
        let place = |key: u32| {
            let page = pages[(key / table.page_size) as usize];
            (page * table.page_size + key % table.page_size) as i32
        };
        for index in 0..batch.q_len(request) {
            let token = batch.qo_indptr[request] + index;
            let seen = spec
                .variant
                .visible(first + index as i32, part.kv_len(request));
            let chosen = (0..k).map(|at| match seen.end > k {
                true => place(pick(token, at, seen.end, k)),
                false if at < seen.end => place(at),
                false => -1,
            });
            indices.extend(chosen);
        }
    }
    indices
}

/// Refuses keys chosen for a batch whose kernels do not read by indices.
pub(super) fn check(case: &Case, k: u32) -> Result<(), String> {
    let trees = case.requests.iter();
    let trees = trees
        .map(|one| one.branches + one.one_block_in)
        .any(|some| some > 0);
    let window = case.spec.variant.window_left.is_some();
    if k == 0 || !has_rows_656(&case.spec) || trees || window || case.by_head.is_some() {
        return Err(format!(
            "top_k is {k}: give 1 or more, latent keys of 576 elements with values of 512 in f8e4m3, and no window, branches, \
             one_block_in or pages_by_head"
        ));
    }
    Ok(())
}

impl Case {
    /// With keys and values of another type, if one is given. Keys can only be chosen among those of a type.
    pub(crate) fn use_kv_dtype(&mut self, dtype: Option<Dtype>) -> Result<(), Failure> {
        self.spec.kv_dtype = dtype.unwrap_or(self.spec.kv_dtype);
        let checked = self.top_k.map_or(Ok(()), |k| check(self, k));
        checked.map_err(|reason| Failure::Input(format!("case {:?}: {reason}", self.name)))
    }

    /// Refuses a case with chosen keys for something that does not take them.
    pub(crate) fn refuse_chosen(&self, instead: &str) -> Result<(), Failure> {
        match self.top_k {
            None => Ok(()),
            Some(k) => Err(Failure::Input(format!(
                "case {:?} has a top_k of {k}, keys that are chosen in the memory of one GPU: {instead}",
                self.name
            ))),
        }
    }
}
