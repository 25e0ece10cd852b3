//! Page lists that differ by KV head.

use half::bf16;
use proptest::prelude::*;
use tandem_attn::{
    exec::Cpu,
    kv::{KvScales, KvView, PagesByHead},
    plan::{DeviceDescription, PlanOptions, Planner},
    problem::{Batch, Dtype, KvLayout, PageTable, ProblemError, Spec},
    reference,
    tensor::{Element, F8E4M3},
};

use crate::{
    heads::Lists,
    numeric::{Rng, Tolerance, compare, to_f64},
    problems::cases,
};

fn run<T: Element>(lists: &Lists<T>) -> Result<(), String> {
    let (by_head, cpu) = (lists.by_head(), Cpu::new());
    let batch = by_head.batch();
    batch.check(by_head.spec()).unwrap();
    let plan = Planner::new()
        .plan(
            by_head.spec(),
            &batch,
            &cpu.device(),
            &PlanOptions::default(),
        )
        .unwrap();
    plan.verify(&batch).unwrap();
    let views = [lists.view().by_head().unwrap(), lists.view()];
    let views = &views[..batch.parts.len()];
    let right = reference::attention(by_head.spec(), &batch, &lists.q, views).unwrap();
    let lse: Vec<f32> = right.lse.iter().map(|&lse| lse as f32).collect();
    let out: Vec<f32> = right.out.iter().map(|&out| out as f32).collect();
    lists.check(&out, &lse, false)?;
    let mut out = vec![bf16::NAN; lists.q.len()];
    let mut lse = vec![f32::NAN; out.len() / lists.spec.head_dim_qk as usize];
    cpu.run(&plan, &lists.q, views, &mut out, Some(&mut lse))
        .unwrap();
    lists.check(&out, &lse, false)
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn each_head_reads_its_own_pages(seed in any::<u64>()) {
        run(&Lists::<bf16>::random(seed)).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn requests_without_lists_run_beside_those_with_lists(seed in any::<u64>()) {
        run(&Lists::<bf16>::mixed(seed)).map_err(TestCaseError::fail)?;
        run(&Lists::<F8E4M3>::mixed(seed)).map_err(TestCaseError::fail)?;
    }

    /// Plans for GPUs have other tiles, and cut prompts along their keys.
    #[test]
    fn plans_for_gpus_are_of_the_same_batch(seed in any::<u64>()) {
        let lists = Lists::<bf16>::mixed(seed);
        let by_head = lists.by_head();
        let (batch, cpu) = (by_head.batch(), Cpu::new());
        for device in ["h200", "a100"] {
            let device = DeviceDescription::named(device).unwrap();
            let plan = Planner::new().plan(by_head.spec(), &batch, &device, &PlanOptions::default());
            let plan = plan.unwrap();
            plan.verify(&batch).map_err(|defect| TestCaseError::fail(defect.to_string()))?;
            let views = [lists.view().by_head().unwrap(), lists.view()];
            let mut out = vec![bf16::NAN; lists.q.len()];
            let mut lse = vec![f32::NAN; out.len() / lists.spec.head_dim_qk as usize];
            cpu.run(&plan, &lists.q, &views[..batch.parts.len()], &mut out, Some(&mut lse)).unwrap();
            lists.check(&out, &lse, false).map_err(TestCaseError::fail)?;
        }
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
    assert!(view.by_head().is_ok());
    let said = |view: KvView<'_, f32>| view.by_head().unwrap_err().to_string();
    let one = [1.0; 2];
    for (scales, what) in [
        (
            KvScales::Head { k: &one, v: &one },
            "a scale for each KV head",
        ),
        (
            KvScales::Request {
                k: &one,
                v: &one,
                of_token: &[0],
            },
            "scales of requests",
        ),
        (
            KvScales::Token {
                k: &one,
                v: &one,
                k_strides: strides,
                v_strides: strides,
            },
            "a scale for each token",
        ),
        (KvScales::InRow, "scales in its rows"),
    ] {
        let said = said(view.with_scales(scales));
        assert!(said.contains(what), "{said}");
    }
    let mut mixed = view;
    mixed.v_strides = KvLayout::Hnd.strides(16, 2, 64);
    mixed.v_strides.page *= 2;
    let mixed = said(mixed);
    assert!(mixed.contains("different layouts"), "{mixed}");
    let mut uneven = view;
    uneven.k_strides.page += 1;
    let uneven = said(uneven);
    assert!(uneven.contains("a multiple"), "{uneven}");
}

/// A scale for each KV head is one for each request of a view by head.
#[test]
fn scales_of_heads_are_those_of_requests() {
    let spec = Spec::new(4, 2, 16).with_kv_dtype(Dtype::F8E4M3);
    let mut noise = Rng(3);
    let mut numbers = |count: usize| noise.floats(count, -1.0, 1.0);
    let q: Vec<bf16> = numbers(3 * 4 * 16)
        .into_iter()
        .map(bf16::from_f32)
        .collect();
    let [k, v] = [(); 2].map(|()| -> Vec<F8E4M3> {
        let numbers = numbers(6 * 4 * 2 * 16).into_iter();
        numbers.map(F8E4M3::from_f32).collect()
    });
    let (of_k, of_v) = ([0.5, 2.0], [4.0, 0.25]);
    let pool = KvView::new(&spec, KvLayout::Hnd, 4, &k, &v);
    let cpu = Cpu::new();
    let run = |spec: &Spec, batch: &Batch, view: KvView<'_, F8E4M3>| {
        let plan = Planner::new()
            .plan(spec, batch, &cpu.device(), &PlanOptions::default())
            .unwrap();
        let mut out = vec![bf16::NAN; q.len()];
        cpu.run(&plan, &q, &[view], &mut out, None).unwrap();
        to_f64(&out)
    };

    // All heads read the same pages, so there are two ways to compute it.
    let (pages, keys, tokens) = ([4_u32, 1, 3], 10, 3);
    let mut table = PageTable::new(4, 6);
    table.push(&pages, keys);
    let of_heads = KvScales::Head { k: &of_k, v: &of_v };
    let right = run(
        &spec,
        &Batch::new(vec![0, tokens], table),
        pool.with_scales(of_heads),
    );
    let mut lists = PagesByHead::new(&spec, pool.k_strides, 6).unwrap();
    lists
        .push(tokens, &[(&pages, keys), (&pages, keys)])
        .unwrap();
    let heads = lists.heads();
    assert_eq!(heads, [0, 1, 0, 1, 0, 1]);
    let view = pool.by_head().unwrap().with_scales(KvScales::Request {
        k: &of_k,
        v: &of_v,
        of_token: &heads,
    });
    let got = run(lists.spec(), &lists.batch(), view);
    let shape = [tokens as usize, 4, 16];
    compare("out", &shape, &got, &right, Tolerance::of(Dtype::BF16)).unwrap();
}
