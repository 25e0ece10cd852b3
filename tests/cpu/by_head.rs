//! Page lists that differ by KV head.

use half::bf16;
use proptest::prelude::*;
use tandem_attn::{
    exec::Cpu,
    kv::{KvScales, KvView, PagesByHead},
    plan::{PlanOptions, Planner},
    problem::{KvLayout, ProblemError, Spec},
};

use crate::{heads::Lists, problems::cases};

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn each_head_reads_its_own_pages(seed in any::<u64>()) {
        let lists = Lists::random(seed);
        let (by_head, cpu) = (lists.by_head(), Cpu::new());
        let batch = by_head.batch();
        batch.check(by_head.spec()).unwrap();
        let plan = Planner::new()
            .plan(by_head.spec(), &batch, &cpu.device(), &PlanOptions::default())
            .unwrap();
        plan.verify(&batch).unwrap();
        let view = lists.view().by_head().unwrap();
        let mut out = vec![bf16::NAN; lists.q.len()];
        let mut lse = vec![f32::NAN; out.len() / lists.spec.head_dim_qk as usize];
        cpu.run(&plan, &lists.q, &[view], &mut out, Some(&mut lse)).unwrap();
        lists.check(&out, &lse, false).map_err(TestCaseError::fail)?;
    }
}

#[test]
fn lists_that_cannot_be_are_named() {
    let spec = Spec::new(8, 2, 64);
    let strides = KvLayout::Nhd.strides(16, 2, 64);
    let with = |change: fn(&mut Spec)| {
        let mut spec = spec;
        change(&mut spec);
        PagesByHead::new(&spec, strides, 10).unwrap_err()
    };
    let by_head = |what| ProblemError::ByHead { what };
    assert_eq!(
        with(|spec| spec.variant.window_left = Some(7)),
        by_head("a window")
    );
    assert_eq!(with(|spec| spec.variant.sinks = true), by_head("sinks"));
    let mut uneven = strides;
    uneven.page += 1;
    let uneven = PagesByHead::new(&spec, uneven, 10).unwrap_err();
    assert_eq!(
        uneven,
        ProblemError::UnevenHeads {
            page: 2049,
            head: 64
        }
    );

    let mut lists = PagesByHead::new(&spec, strides, 10).unwrap();
    let (got, expected) = (1, 2);
    let one = lists.push(1, &[(&[3], 5)]);
    assert_eq!(one, Err(ProblemError::HeadLists { got, expected }));
    let outside = lists.push(1, &[(&[3], 5), (&[10], 5)]);
    assert_eq!(outside, Err(ProblemError::NoPage { got: 10, pages: 10 }));
    let short = lists.push(1, &[(&[3], 5), (&[4], 17)]);
    assert!(
        matches!(short, Err(ProblemError::TooFewPages { .. })),
        "{short:?}"
    );
    let (tokens, keys) = (3, 2);
    let hidden = lists.push(tokens, &[(&[3], 5), (&[4], keys)]);
    assert_eq!(hidden, Err(ProblemError::BlockTokens { tokens, keys }));
    assert_eq!(lists.batch().requests(), 0);

    let pool = vec![0.0_f32; 10 * 2048];
    let view = KvView::new(&spec, KvLayout::Nhd, 16, &pool, &pool);
    assert!(view.by_head().is_some());
    let scales = KvScales::Head {
        k: &[1.0; 2],
        v: &[1.0; 2],
    };
    assert!(view.with_scales(scales).by_head().is_none());
}
