//! Page lists that differ by KV head.

use half::bf16;
use proptest::prelude::*;
use tandem_attn::{
    exec::gpu::{KvPool, RunTensors, WorkspaceOptions},
    plan::{Bound, PlanOptions, Planner},
    problem::Dtype,
};

use super::common::{Memory, Stream, gpu, heads::Lists, problems::cases};

#[test]
fn each_head_reads_its_own_pages() {
    let Some(gpu) = gpu("each_head_reads_its_own_pages") else {
        return;
    };
    proptest!(cases(24), |(seed in any::<u64>())| {
        let lists = Lists::random(seed);
        let (by_head, device) = (lists.by_head(), gpu.device());
        let (batch, spec) = (by_head.batch(), by_head.spec());
        let mut planner = Planner::new();
        let plan = planner.plan(spec, &batch, &device, &PlanOptions::default()).unwrap();
        let bound = Bound::of(&plan);
        let mut workspace = gpu.workspace(spec, &bound, WorkspaceOptions::default()).unwrap();
        let [q, k, v] = [&lists.q, &lists.pools[0], &lists.pools[1]].map(|values| Memory::new(values));
        let [heads, kv_heads] = [lists.spec.q_heads, lists.spec.kv_heads].map(|heads| heads as usize);
        let dim = lists.spec.head_dim_qk as usize;
        let tokens = lists.q.len() / (heads * dim);
        let out = Memory::new(&vec![bf16::NAN; lists.q.len()]);
        let lse = Memory::new(&vec![f32::NAN; tokens * heads]);
        let pool = KvPool::new(&lists.spec, lists.layout, lists.page_size, lists.pages, k.address(), v.address());
        let pool = pool.by_head(lists.spec.kv_heads).expect("a dense pool");
        let tensor = |memory: &Memory| {
            let tensor = memory.tensor(Dtype::BF16, [tokens, heads, dim]);
            tensor.by_kv_head(kv_heads as u32).expect("dense tokens")
        };
        let (q, out_tensor, stream) = (tensor(&q), tensor(&out), Stream::new());
        let lse_tensor = lse.tensor(Dtype::F32, [tokens * kv_heads, heads / kv_heads]);
        let pools = [pool];
        let tensors = RunTensors::new(&q, &pools, &out_tensor).with_lse(&lse_tensor);
        // SAFETY: everything is there as described until the stream is done.
        unsafe {
            workspace.upload(&plan, stream.0).unwrap();
            gpu.run_with(&mut workspace, &tensors, stream.0).unwrap();
        }
        stream.wait();
        lists.check(&out.read::<bf16>(), &lse.read::<f32>(), true).map_err(TestCaseError::fail)?;
    });
}
