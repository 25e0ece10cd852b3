//! Block masks of prompts.

use half::bf16;
use proptest::prelude::*;
use tandem_attn::{
    exec::gpu::{KvPool, RunTensors, WorkspaceOptions},
    kv::MaskedHeads,
    plan::{Bound, PlanOptions, Planner},
    problem::Dtype,
};

use super::{
    common::{Memory, Stream, blocks::Prompts, problems::cases},
    hopper,
};

#[test]
fn blocks_are_seen_as_their_bits_say() {
    let Some(gpu) = hopper("blocks_are_seen_as_their_bits_say") else {
        return;
    };
    proptest!(cases(16), |(seed in any::<u64>())| {
        let prompts = Prompts::random(seed);
        let (sparse, device) = (prompts.sparse(), gpu.device());
        let spec = sparse.spec();
        let (tokens, heads) = (prompts.tokens(), prompts.spec.q_heads as usize);
        let dim = spec.head_dim_qk as usize;
        let [q, k, v] = [&prompts.q, &prompts.pools[0], &prompts.pools[1]].map(|values| Memory::new(values));
        let out = Memory::new(&vec![bf16::NAN; prompts.q.len()]);
        let lse = Memory::new(&vec![f32::NAN; tokens * heads]);
        let pool = KvPool::new(&prompts.spec, prompts.layout, prompts.page_size, prompts.pages, k.address(), v.address());
        let pool = match prompts.masked {
            MaskedHeads::All => pool,
            _ => pool.by_head(prompts.spec.kv_heads).expect("a dense pool"),
        };
        let [q, to] = [&q, &out].map(|memory| memory.tensor(Dtype::BF16, [tokens, heads, dim]));
        let lse_of_runs = lse.tensor(Dtype::F32, [tokens, spec.q_heads as usize]);
        let (pools, stream) = ([pool], Stream::new());
        for (index, run) in sparse.runs().iter().enumerate() {
            let plan = Planner::new().plan(spec, &run.batch, &device, &PlanOptions::default()).unwrap();
            let mut workspace = gpu.workspace(spec, &Bound::of(&plan), WorkspaceOptions::default()).unwrap();
            let [q, to] = [q, to].map(|tensor| tensor.heads(run.q_heads.clone()).expect("its heads"));
            let mut lse = lse_of_runs;
            lse.address += (index * tokens * spec.q_heads as usize * 4) as u64;
            let tensors = RunTensors::new(&q, &pools, &to).with_lse(&lse);
            // SAFETY: everything is there as described until the stream is done.
            unsafe {
                workspace.upload(&plan, stream.0).unwrap();
                gpu.run_with(&mut workspace, &tensors, stream.0).unwrap();
            }
            stream.wait();
        }
        prompts.check(&out.read::<bf16>(), &lse.read::<f32>(), true).map_err(TestCaseError::fail)?;
    });
}
