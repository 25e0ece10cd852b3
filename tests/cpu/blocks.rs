//! Block masks of prompts.

use half::bf16;
use proptest::prelude::*;
use tandem_attn::{
    exec::Cpu,
    kv::{BlockMask, BlockSparse, MaskedHeads},
    plan::{DeviceDescription, PlanOptions, Planner},
    problem::{Batch, KvLayout, PageTable, ProblemError, Spec},
};

use crate::{blocks::Prompts, problems::cases};

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn blocks_are_seen_as_their_bits_say(seed in any::<u64>()) {
        let prompts = Prompts::random(seed);
        let (sparse, cpu) = (prompts.sparse(), Cpu::new());
        let spec = sparse.spec();
        let (tokens, dim) = (prompts.tokens(), spec.head_dim_qk as usize);
        let row = prompts.spec.q_heads as usize * dim;
        let mut out = vec![bf16::NAN; prompts.q.len()];
        let mut lse = vec![f32::NAN; prompts.q.len() / dim];
        let view = match prompts.masked {
            MaskedHeads::All => prompts.view(),
            _ => prompts.view().by_head().unwrap(),
        };
        let pools = [view];
        let of_run = tokens * spec.q_heads as usize;
        for (run, lse) in sparse.runs().iter().zip(lse.chunks_mut(of_run)) {
            run.batch.check(spec).unwrap();
            let mut planner = Planner::new();
            for device in [cpu.device(), DeviceDescription::named("h200").unwrap()] {
                let plan = planner.plan(spec, &run.batch, &device, &PlanOptions::default()).unwrap();
                plan.verify(&run.batch).unwrap();
            }
            let plan = planner.plan(spec, &run.batch, &cpu.device(), &PlanOptions::default()).unwrap();
            let heads = run.q_heads.start as usize * dim..run.q_heads.end as usize * dim;
            let q: Vec<bf16> = prompts.q.chunks(row).flat_map(|q| &q[heads.clone()]).copied().collect();
            let mut of_heads = vec![bf16::NAN; q.len()];
            cpu.run(&plan, &q, &pools, &mut of_heads, Some(lse)).unwrap();
            for (out, of_heads) in out.chunks_mut(row).zip(of_heads.chunks(heads.len())) {
                out[heads.clone()].copy_from_slice(of_heads);
            }
        }
        prompts.check(&out, &lse, false).map_err(TestCaseError::fail)?;
    }
}

#[test]
fn masks_that_cannot_be_are_named() {
    let spec = Spec::new(8, 2, 64);
    let strides = KvLayout::Nhd.strides(16, 2, 64);
    let new = |spec: &Spec, strides| BlockSparse::new(spec, strides, 24, MaskedHeads::KvHead);
    let window = new(&spec.with_window_left(7), strides).unwrap_err();
    assert_eq!(window, ProblemError::Blocks { what: "a window" });
    let page_size = 24;
    let odd = new(&spec, KvLayout::Nhd.strides(page_size, 2, 64)).unwrap_err();
    assert_eq!(odd, ProblemError::BlockPages { page_size });
    assert_eq!(
        BlockMask::new(96, 10, 10).unwrap_err(),
        ProblemError::BlockRows { got: 96 }
    );

    let mut sparse = new(&spec, strides).unwrap();
    let mask = |tokens, keys| BlockMask::new(64, tokens, keys).unwrap();
    let table: Vec<u32> = (0..24).collect();
    let one = sparse.push(300, &table, 300, &[mask(300, 300)]);
    let (got, expected) = (1, 2);
    assert_eq!(one, Err(ProblemError::BlockMasks { got, expected }));
    let other = sparse.push(300, &table, 300, &[mask(300, 300), mask(300, 310)]);
    let (got, expected) = ([300, 310], [300, 300]);
    assert_eq!(other, Err(ProblemError::BlockMask { got, expected }));
    let [two, more] = [(300, 200), (300, 400)].map(|(tokens, keys)| {
        sparse.push(
            tokens,
            &table,
            keys,
            &[mask(tokens, keys), mask(tokens, keys)],
        )
    });
    let (tokens, keys) = (300, 200);
    assert_eq!(two, Err(ProblemError::BlockTokens { tokens, keys }));
    assert!(
        matches!(more, Err(ProblemError::TooFewPages { .. })),
        "{more:?}"
    );
    let outside = sparse.push(16, &[24], 16, &[mask(16, 16), mask(16, 16)]);
    assert_eq!(outside, Err(ProblemError::NoPage { got: 24, pages: 24 }));
    assert!(sparse.runs().iter().all(|run| run.batch.total_q() == 0));
}

/// By the cost model of an H200: a quarter of the blocks at no less than 0.8 of the rate of the whole prompt.
#[test]
fn a_quarter_of_the_blocks_is_forecast_at_the_rate_of_all() {
    const TOKENS: u32 = 8192;
    let spec = Spec::new(32, 8, 128);
    let (strides, pages) = (KvLayout::Nhd.strides(64, 8, 128), TOKENS / 64);
    let device = DeviceDescription::named("h200").unwrap();
    let table: Vec<u32> = (0..pages).collect();
    // One in so many blocks, and that of the queries themselves.
    let forecast = |masked, one_in: u32| {
        let mut sparse = BlockSparse::new(&spec, strides, pages, masked).unwrap();
        let runs = sparse.runs().len() as u32;
        let mask = |run: u32| {
            BlockMask::from_fn(128, TOKENS, TOKENS, |query, key| {
                query == key || (query * 7 + key * 3 + run).is_multiple_of(one_in)
            })
            .unwrap()
        };
        let masks: Vec<_> = (0..runs).map(mask).collect();
        sparse.push(TOKENS, &table, TOKENS, &masks).unwrap();
        let (mut nanoseconds, mut keys) = (0.0, 0);
        for run in sparse.runs() {
            let plan = Planner::new()
                .plan(sparse.spec(), &run.batch, &device, &PlanOptions::default())
                .unwrap();
            nanoseconds += plan.schedule(&device).makespan_ns;
            let part = &run.batch.parts[0];
            let of_block = |block| u64::from(part.kv_len(block) * run.q_heads.len() as u32);
            keys += (0..part.row_blocks()).map(of_block).sum::<u64>();
        }
        (nanoseconds, keys as f64)
    };
    let mut whole = PageTable::new(64, pages);
    whole.push(&table, TOKENS);
    let whole = Batch::new(vec![0, TOKENS], whole);
    let plan = Planner::new().plan(&spec, &whole, &device, &PlanOptions::default());
    let dense = plan.unwrap().schedule(&device).makespan_ns;
    let (_, keys) = forecast(MaskedHeads::All, 1);
    for masked in [MaskedHeads::All, MaskedHeads::KvHead] {
        let (quarter, of_quarter) = forecast(masked, 4);
        let part = of_quarter / keys;
        let rate = part * dense / quarter;
        assert!(
            (0.25..0.3).contains(&part),
            "{masked:?}: {part} of the keys"
        );
        assert!(
            rate > 0.8,
            "{masked:?}: {rate} of the rate, {dense} ns and {quarter}"
        );
    }
}
