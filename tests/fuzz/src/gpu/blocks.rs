//! Prompts with block masks: one run, or one for each head with masks of its own.

use tandem_attn::{
    exec::gpu::{DeviceArray, DeviceTensor},
    kv::{BlockMask, BlockSparse, MaskedHeads},
    problem::Dtype,
};

use super::{Runner, text};
use crate::{
    case::Masked,
    numeric::Rng,
    oracle::{self, Right},
};

/// A prompt: its first token, its keys by slot, its masks.
struct Prompt {
    first: usize,
    tokens: usize,
    slots: Vec<u32>,
    masks: Vec<BlockMask>,
}

impl Runner<'_> {
    pub(super) fn blocks(
        &mut self,
        at: usize,
        q: &[f32],
        masked: Masked,
        rng: &mut Rng,
    ) -> Result<(), String> {
        let (case, page_size) = (self.case, self.case.page_size);
        let (spec, pool) = (self.without_distances(rng), self.pools()[at % 2]);
        let (masked, masks) = match masked {
            Masked::All => (MaskedHeads::All, 1),
            Masked::KvHead => (MaskedHeads::KvHead, spec.kv_heads),
            Masked::QueryHead => (MaskedHeads::QueryHead, spec.q_heads),
        };
        let sparse = BlockSparse::new(&spec, pool.k_strides, self.world.pages, masked);
        let mut sparse = match sparse {
            Ok(sparse) => sparse,
            Err(error) => return self.refused(error),
        };
        let (tables, _) = case.tables();
        let (mut prompts, mut first) = (Vec::new(), 0);
        for row in case.steps[at].rows.iter().filter(|row| row.queries > 0) {
            let table = &tables[row.sequence][..row.keys.div_ceil(page_size) as usize];
            let rows = [64, 128][rng.below(2)];
            let mut mask = || {
                let (words, one_in) = (rng.bits(), 1 + rng.below(4) as u64);
                let sees = |query: u32, key: u32| {
                    let of = u64::from(query) << 32 | u64::from(key);
                    Rng(words ^ of).bits().is_multiple_of(one_in)
                };
                BlockMask::from_fn(rows, row.queries, row.keys, sees).expect("blocks of 64 or 128")
            };
            let masks: Vec<_> = (0..masks).map(|_| mask()).collect();
            let pushed = sparse.push(row.queries, table, row.keys, &masks);
            pushed.map_err(|error| format!("good masks are refused: {error}"))?;
            let slot = |key: u32| table[(key / page_size) as usize] * page_size + key % page_size;
            prompts.push(Prompt {
                first,
                tokens: row.queries as usize,
                slots: (0..row.keys).map(slot).collect(),
                masks,
            });
            first += row.queries as usize;
        }
        let (causal, heads) = (spec.variant.causal, spec.q_heads as usize);
        let seen = |token: usize, head: usize| -> Vec<u32> {
            let of = prompts.partition_point(|prompt| prompt.first <= token) - 1;
            let prompt = &prompts[of];
            let (in_prompt, keys) = (token - prompt.first, prompt.slots.len());
            let mask = &prompt.masks[head * prompt.masks.len() / heads];
            let end = if causal {
                keys + in_prompt + 1 - prompt.tokens
            } else {
                keys
            };
            let sees = |key: &usize| {
                mask.sees(
                    in_prompt as u32 / mask.rows(),
                    *key as u32 / BlockMask::KEYS,
                )
            };
            (0..end).filter(sees).map(|key| prompt.slots[key]).collect()
        };
        let right = oracle::of_slots(case, &self.world, q, spec.variant.sinks, seen);
        self.run_blocks(&sparse, masked, first, at, &Right::from(right))
    }

    /// The runs of all heads, and their results together.
    fn run_blocks(
        &mut self,
        sparse: &BlockSparse,
        masked: MaskedHeads,
        tokens: usize,
        at: usize,
        right: &Right,
    ) -> Result<(), String> {
        let mut pool = self.pools()[at % 2];
        if masked != MaskedHeads::All {
            pool = match pool.by_head(self.case.spec.kv_heads) {
                Ok(pool) => pool,
                Err(error) => return self.refused(error),
            };
        }
        let results = self.world.results.bytes();
        self.results.write(0, results).map_err(text)?;
        let of_run = sparse.spec().q_heads as usize;
        for (index, run) in sparse.runs().iter().enumerate() {
            let mut given = self.given(0, tokens);
            let of_heads = |tensor: &DeviceTensor<3>| tensor.heads(run.q_heads.clone());
            let there = "heads of the specification";
            given.q = of_heads(&given.q).expect(there);
            given.out = of_heads(&given.out).expect(there);
            given.pools = vec![pool; run.batch.parts.len()];
            let skipped = 4 * index * tokens * of_run;
            given.lse = given.lse.map(|lse| {
                DeviceTensor::new(lse.address + skipped as u64, Dtype::F32, [tokens, of_run])
            });
            given.sinks = given.sinks.map(|sinks| {
                DeviceArray::new(sinks.address + 4 * u64::from(run.q_heads.start), of_run)
            });
            given.own.clear();
            if !self.call(sparse.spec(), &run.batch, &given)? {
                return Ok(());
            }
        }
        self.tally.calls += 1;
        let mut results = self.results.read().map_err(text)?;
        let heads = self.case.spec.q_heads as usize;
        let place = &self.world.lse;
        let by_run = results[place.start..place.start + 4 * tokens * heads].to_vec();
        for (row, to) in results[place.start..]
            .chunks_mut(4)
            .take(tokens * heads)
            .enumerate()
        {
            let (token, head) = (row / heads, row % heads);
            let from = head / of_run * tokens * of_run + token * of_run + head % of_run;
            to.copy_from_slice(&by_run[4 * from..][..4]);
        }
        oracle::judge(self.case, &self.world, tokens, true, &results, right)?;
        self.tally.right(&[match masked {
            MaskedHeads::All => "block masks of all heads",
            MaskedHeads::KvHead => "block masks by KV head",
            _ => "block masks by query head",
        }]);
        Ok(())
    }
}
