//! Page lists that differ by KV head.

use half::bf16;
use proptest::prelude::*;
use tandem_attn::{
    abi::{DIRECT, WorkItem},
    exec::Cpu,
    kv::{BlockMask, BlockSparse, KvScales, KvView, MaskedHeads, PagesByHead},
    plan::{DeviceDescription, Kernel, Plan, PlanOptions, Planner, SplitMode, Update},
    problem::{Batch, Dtype, KvLayout, PageTable, Part, ProblemError, Spec},
    reference,
    shard::{Keys, Sharding},
    tensor::{Element, F8E4M3, HeadTensors, ShapeError},
    variants::ALIBI,
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
    let (spec, heads) = (by_head.spec(), lists.heads());
    let right = reference::attention_heads(spec, &batch, &lists.q, views, &heads).unwrap();
    let lse: Vec<f32> = right.lse.iter().map(|&lse| lse as f32).collect();
    let out: Vec<f32> = right.out.iter().map(|&out| out as f32).collect();
    lists.check(&out, &lse, false)?;
    let mut out = vec![bf16::NAN; lists.q.len()];
    let mut lse = vec![f32::NAN; out.len() / lists.spec.head_dim_qk as usize];
    cpu.run_heads(&plan, &lists.q, views, &mut out, Some(&mut lse), &heads)
        .unwrap();
    lists.check(&out, &lse, false)
}

/// Runs plans of GPUs with these options on the CPU.
fn run_planned(lists: &Lists<bf16>, options: &PlanOptions) -> Result<(), String> {
    let by_head = lists.by_head();
    let (batch, cpu) = (by_head.batch(), Cpu::new());
    for device in ["h200", "a100"] {
        let device = DeviceDescription::named(device).unwrap();
        let plan = Planner::new().plan(by_head.spec(), &batch, &device, options);
        let plan = plan.unwrap();
        plan.verify(&batch).map_err(|defect| defect.to_string())?;
        let views = [lists.view().by_head().unwrap(), lists.view()];
        let views = &views[..batch.parts.len()];
        let mut out = vec![bf16::NAN; lists.q.len()];
        let mut lse = vec![f32::NAN; out.len() / lists.spec.head_dim_qk as usize];
        let heads = lists.heads();
        cpu.run_heads(&plan, &lists.q, views, &mut out, Some(&mut lse), &heads)
            .unwrap();
        lists.check(&out, &lse, false)?;
    }
    Ok(())
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
        let options = PlanOptions::default();
        run_planned(&Lists::mixed(seed), &options).map_err(TestCaseError::fail)?;
    }

}

proptest! {
    #![proptest_config(cases(16))]

    #[test]
    fn sinks_are_those_of_the_model(seed in any::<u64>()) {
        run(&Lists::<bf16>::random(seed).with_sinks(seed)).map_err(TestCaseError::fail)?;
        run(&Lists::<F8E4M3>::mixed(seed).with_sinks(seed)).map_err(TestCaseError::fail)?;
        let group = [1, 4, 7, 8, 20, 72][(seed % 6) as usize];
        let lists = Lists::<bf16>::mixed_groups(seed, group).with_sinks(seed);
        run(&lists).map_err(TestCaseError::fail)?;
        // Rows are cut, so that their states are merged.
        let cut = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 80 });
        run_planned(&lists, &cut).map_err(TestCaseError::fail)?;
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
    assert_eq!(
        with(|spec| *spec = spec.with_hooks(&ALIBI)),
        by_head("hooks")
    );
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

/// Lists, and a chunk of a long prompt between them, of which so few tiles are there that a GPU's plan cuts its keys.
fn beside_a_chunk() -> (Spec, PagesByHead, Batch) {
    let spec = Spec::new(8, 2, 64);
    let strides = KvLayout::Hnd.strides(16, 2, 64);
    let mut lists = PagesByHead::new(&spec, strides, 256).unwrap();
    let all: Vec<u32> = (0..256).rev().collect();
    lists.push(1, &[(&[7, 3], 21), (&all[..40], 633)]).unwrap();
    lists.push_whole(48, &all, 4090).unwrap();
    lists.push_whole(1, &all[..100], 1597).unwrap();
    let batch = lists.batch();
    (spec, lists, batch)
}

#[test]
fn prompts_beside_lists_are_cut_along_their_keys() {
    let (spec, lists, batch) = beside_a_chunk();
    let h200 = DeviceDescription::named("h200").unwrap();
    let plan = |options| {
        let plan = Planner::new().plan(lists.spec(), &batch, &h200, &options);
        plan.unwrap()
    };
    let cut = plan(PlanOptions::default());
    assert_eq!(cut.verify(&batch), Ok(()));
    let of_prompt = |item: &&WorkItem| item.part == 1;
    let leave_states = cut
        .items
        .iter()
        .filter(of_prompt)
        .all(|item| item.slot != DIRECT);
    assert!(
        leave_states && cut.items.iter().filter(of_prompt).count() > 1,
        "{cut}"
    );
    // Each tile has the heads of a token together, each of which is a token of the batch.
    let whole = plan(PlanOptions::default().with_split(SplitMode::Off));
    let group = whole.groups.iter().find(|group| group.heads == 2).unwrap();
    assert_eq!(
        whole.units_of(group) * group.pack,
        whole.items_of(group).len() as u32 * 8
    );
    let chunk = Batch::new(vec![0, 48], {
        let mut table = PageTable::new(16, 256);
        table.push(&(0..256).collect::<Vec<_>>(), 4090);
        table
    });
    let alone = Planner::new().plan(
        &spec,
        &chunk,
        &h200,
        &PlanOptions::default().with_split(SplitMode::Off),
    );
    let [alone, beside] = [&alone.unwrap(), &whole].map(|plan| {
        let groups = plan
            .groups
            .iter()
            .filter(|group| group.kernel == Kernel::Prefill);
        let items = groups.flat_map(|group| plan.items_of(group));
        items.fold(0, |sum, item| {
            sum + plan.traffic_of(Kernel::Prefill, item).kv_bytes
        })
    });
    assert_eq!(alone, beside);

    let mut noise = Rng(9);
    let mut numbers = |count: usize| -> Vec<bf16> {
        let numbers = noise.floats(count, -1.0, 1.0).into_iter();
        numbers.map(bf16::from_f32).collect()
    };
    let (q, k, v) = (numbers(50 * 512), numbers(256 * 2048), numbers(256 * 2048));
    let view = KvView::new(&spec, KvLayout::Hnd, 16, &k, &v);
    let views = [view.by_head().unwrap(), view];
    let right = reference::attention(lists.spec(), &batch, &q, &views).unwrap();
    let read: Plan = serde_json::from_str(&serde_json::to_string(&cut).unwrap()).unwrap();
    for plan in [&cut, &whole, &read] {
        let mut out = vec![bf16::NAN; q.len()];
        Cpu::new().run(plan, &q, &views, &mut out, None).unwrap();
        compare(
            "out",
            &[100, 4, 64],
            &to_f64(&out),
            &right.out,
            Tolerance::of(Dtype::BF16),
        )
        .unwrap();
    }

    let mut out = vec![bf16::NAN; q.len()];
    for heads in [0, 3] {
        let mut wrong = cut.clone();
        wrong.parts[1].heads = heads;
        assert!(wrong.verify(&batch).is_err());
        let ran = Cpu::new()
            .run(&wrong, &q, &views, &mut out, None)
            .unwrap_err();
        assert!(ran.to_string().contains("part 1 of the plan has"), "{ran}");
    }
    let mut wrong = cut;
    let gathered = wrong
        .items
        .iter_mut()
        .find(|item| item.is_gathered())
        .unwrap();
    gathered.part = 1;
    assert!(wrong.verify(&batch).is_err());
    assert!(Cpu::new().run(&wrong, &q, &views, &mut out, None).is_err());
}

/// A list without keys gives the sink alone. A model whose tokens have sinks of their own already has more of them by head.
#[test]
fn sinks_count_where_there_is_no_key_and_for_each_token() {
    let mut spec = Spec::new(4, 2, 16).with_sinks();
    spec.variant.sink_tokens = 2;
    let pool = vec![bf16::ONE; 4 * 4 * 2 * 16];
    let view = KvView::new(&spec, KvLayout::Hnd, 4, &pool, &pool);
    let mut lists = PagesByHead::new(&spec, view.k_strides, 4).unwrap();
    assert_eq!(lists.spec().variant.sink_tokens, 4);
    for _ in 0..3 {
        lists.push(1, &[(&[], 0), (&[2], 1)]).unwrap();
    }
    let (cpu, batch) = (Cpu::new(), lists.batch());
    let plan = Planner::new()
        .plan(lists.spec(), &batch, &cpu.device(), &PlanOptions::default())
        .unwrap();
    let q = vec![bf16::ZERO; 3 * 4 * 16];
    // For tokens 0 and 2, and for token 1. A weight of 1 beside a key's.
    let sinks = [
        1.0,
        f32::NEG_INFINITY,
        0.0,
        f32::NEG_INFINITY,
        3.0,
        4.0,
        5.0,
        6.0,
    ];
    let view = [view.by_head().unwrap()];
    let (mut out, mut lse) = (vec![bf16::NAN; q.len()], vec![f32::NAN; 12]);
    let heads = HeadTensors::default().with_sinks(&sinks);
    cpu.run_heads(&plan, &q, &view, &mut out, Some(&mut lse), &heads)
        .unwrap();
    let first = [1.0, f32::NEG_INFINITY, 2.0_f32.ln(), 0.0];
    for token in [0, 8] {
        compare(
            "lse",
            &[4],
            &to_f64(&lse[token..][..4]),
            &first.map(f64::from),
            Tolerance::of(Dtype::F32),
        )
        .unwrap();
        let of_heads = [0, 1, 2, 3].map(|head| out[(token + head) * 16].to_f32());
        assert_eq!(of_heads, [0.0, 0.0, 0.5, 1.0]);
    }
    let of_sinks = [3.0, 4.0].map(|sink: f32| sink..sink + 1e-5);
    assert!(
        of_sinks
            .iter()
            .zip(&lse[4..])
            .all(|(near, lse)| near.contains(lse)),
        "{lse:?}"
    );
    let right = reference::attention_heads(lists.spec(), &batch, &q, &view, &heads).unwrap();
    compare(
        "lse",
        &[12],
        &to_f64(&lse),
        &right.lse,
        Tolerance::of(Dtype::F32),
    )
    .unwrap();

    let few = HeadTensors::default().with_sinks(&sinks[..4]);
    let ran = cpu.run_heads(&plan, &q, &view, &mut out, None, &few);
    let wrong = ShapeError::Length {
        name: "sinks",
        got: 4,
        shape: "[sink_tokens, q_heads]",
        expected: 8,
    };
    assert_eq!(ran, Err(wrong.into()));
}

/// Ranks of keys divide what each row sees, and the first has the sinks. Ranks of queries would have other tokens.
#[test]
fn ranks_of_keys_have_the_sinks_of_lists_once() {
    let spec = Spec::new(8, 2, 64).with_sinks();
    let strides = KvLayout::Hnd.strides(16, 2, 64);
    let mut lists = PagesByHead::new(&spec, strides, 40).unwrap();
    let pages: Vec<u32> = (0..20).collect();
    lists.push(1, &[(&pages, 311), (&pages[..9], 140)]).unwrap();
    let (spec, batch) = (*lists.spec(), lists.batch());
    let sharding = Sharding::one().over_keys(2, Keys::RoundRobin { pages: 1 });
    let shares = sharding.shares(&spec, &batch).unwrap();
    let of_shares: Vec<_> = shares
        .iter()
        .map(|share| (share.spec.variant.sinks, share.spec.variant.sink_tokens))
        .collect();
    assert_eq!(of_shares, [(true, 2), (false, 1)]);
    assert_eq!(sharding.verify(&spec, &batch, &shares), Ok(()));
    let refused = Sharding::one().over_queries(2).shares(&spec, &batch);
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("sinks beside queries"), "{refused}");
}

#[test]
fn block_masks_stand_beside_lists() {
    block_masks(Spec::new(8, 2, 64), &HeadTensors::default());
    let sinks = [3.0, -1.0, f32::NEG_INFINITY, 0.5, 2.0, 6.0, 1.5, 4.0];
    let heads = HeadTensors::default().with_sinks(&sinks);
    block_masks(Spec::new(8, 2, 64).with_sinks(), &heads);
}

fn block_masks(spec: Spec, heads: &HeadTensors<'_>) {
    let mut noise = Rng(5);
    let mut numbers = |count: usize| -> Vec<bf16> {
        let numbers = noise.floats(count, -1.0, 1.0).into_iter();
        numbers.map(bf16::from_f32).collect()
    };
    let (q, k, v) = (numbers(302 * 512), numbers(30 * 2048), numbers(30 * 2048));
    let view = KvView::new(&spec, KvLayout::Nhd, 16, &k, &v);
    let table: Vec<u32> = (0..24).rev().collect();
    // Of the last block of queries its own keys are hidden.
    let mask = BlockMask::from_fn(64, 300, 377, |query, key| {
        query < 4 && (query + key) % 2 == 0
    })
    .unwrap();
    let run = |spec: &Spec, batch: &Batch, q: &[bf16], views: &[KvView<'_, bf16>]| {
        let cpu = Cpu::new();
        let plan = Planner::new().plan(spec, batch, &cpu.device(), &PlanOptions::default());
        let plan = plan.unwrap();
        plan.verify(batch).unwrap();
        let mut out = vec![bf16::NAN; q.len()];
        cpu.run_heads(&plan, q, views, &mut out, None, heads)
            .unwrap();
        to_f64(&out)
    };
    let mut alone = BlockSparse::new(&spec, view.k_strides, 30, MaskedHeads::All).unwrap();
    alone
        .push(300, &table, 377, std::slice::from_ref(&mask))
        .unwrap();
    let right = run(
        &spec,
        &alone.runs()[0].batch,
        &q[512..][..300 * 512],
        &[view],
    );

    let mut lists = PagesByHead::new(&spec, view.k_strides, 30).unwrap();
    lists.push(1, &[(&[25, 3], 21), (&[29], 9)]).unwrap();
    lists.push_masked(300, &table, 377, &mask).unwrap();
    lists.push_whole(1, &[28], 7).unwrap();
    let views = [view.by_head().unwrap(), view];
    let got = run(lists.spec(), &lists.batch(), &q, &views);
    let tolerance = Tolerance::of(Dtype::BF16);
    compare(
        "out",
        &[300, 8, 64],
        &got[512..][..300 * 512],
        &right,
        tolerance,
    )
    .unwrap();
}

#[test]
fn plans_of_lists_follow_the_growth_of_decodes() {
    let spec = Spec::new(8, 2, 64);
    let strides = KvLayout::Hnd.strides(16, 2, 64);
    let h200 = DeviceDescription::named("h200").unwrap();
    let batch = |more: u32, prompt: bool| {
        let mut lists = PagesByHead::new(&spec, strides, 20).unwrap();
        lists
            .push(1, &[(&[7, 3], 21 + more), (&[9, 8], 20 + more)])
            .unwrap();
        lists.push_whole(1, &[1, 2], 19 + more).unwrap();
        if prompt {
            lists.push_whole(9, &[4, 5], 20).unwrap();
        }
        lists.batch()
    };
    let spec = *PagesByHead::new(&spec, strides, 20).unwrap().spec();
    let (mut planner, options) = (Planner::new(), PlanOptions::default());
    let mut plan = planner
        .plan(&spec, &batch(0, false), &h200, &options)
        .unwrap();
    let mut update = |batch: Batch| {
        let update = planner
            .update(&spec, &batch, &h200, &options, &mut plan)
            .unwrap();
        plan.verify(&batch).unwrap();
        update
    };
    assert_eq!(update(batch(1, false)), Update::Patched);
    assert_eq!(update(batch(1, true)), Update::Planned);
    assert_eq!(update(batch(2, true)), Update::Planned);
}

#[test]
fn what_cannot_stand_beside_lists_is_named() {
    let (_, lists, batch) = beside_a_chunk();
    let spec = *lists.spec();
    assert_eq!(batch.check(&spec), Ok(()));
    assert_eq!(batch.kv_len(1), 633);
    assert_eq!((batch.q_len(2), batch.kv_len(2)), (96, 4090));
    let by_head = |what| Err(ProblemError::ByHead { what });
    let sinks_of = |sink_tokens| {
        let mut spec = spec.with_sinks();
        spec.variant.sink_tokens = sink_tokens;
        batch.check(&spec)
    };
    for sink_tokens in [1, 3] {
        let (part, heads) = (1, 2);
        let wrong = ProblemError::SinksOfHeads {
            part,
            heads,
            sink_tokens,
        };
        assert_eq!(sinks_of(sink_tokens), Err(wrong));
    }
    assert_eq!([2, 4].map(sinks_of), [Ok(()), Ok(())]);
    assert_eq!(batch.check(&spec.with_window_left(5)), by_head("a window"));
    let masked = batch.clone().with_ancestors(vec![u64::MAX; 100]);
    assert_eq!(masked.check(&spec), by_head("masks as bits"));
    let mut masked = batch.clone();
    while masked.push_mask(|_, key| key != 3).is_ok() {}
    assert_eq!(masked.check(&spec), by_head("masks as bits"));
    for heads in [0, 3] {
        let (mut wrong, part, total_q) = (batch.clone(), 1, 100);
        wrong.parts[1].heads = heads;
        assert_eq!(
            wrong.check(&spec),
            Err(ProblemError::PartHeads {
                part,
                heads,
                total_q
            })
        );
    }
    let mut wrong = batch.clone();
    wrong
        .parts
        .push(Part::new(vec![0], PageTable::new(16, 256)).with_heads(4));
    assert_eq!(
        wrong.check(&spec),
        Err(ProblemError::PartsOfHeads {
            part: 2,
            got: 4,
            other: 2
        })
    );
    let shares = Sharding::one()
        .shares(&spec, &batch)
        .unwrap_err()
        .to_string();
    assert!(shares.contains("distributed over ranks"), "{shares}");

    let mut refused = lists.clone();
    let outside = refused.push_whole(20, &[3, 256], 25);
    assert_eq!(
        outside,
        Err(ProblemError::NoPage {
            got: 256,
            pages: 256
        })
    );
    let (tokens, keys) = (20, 19);
    let short = refused.push_whole(tokens, &[3, 4], keys);
    assert_eq!(short, Err(ProblemError::BlockTokens { tokens, keys }));
    let pages = refused.push_whole(20, &[3], 25);
    assert!(
        matches!(pages, Err(ProblemError::TooFewPages { .. })),
        "{pages:?}"
    );
    let mask = BlockMask::new(64, 20, 20).unwrap();
    let mask = refused.push_masked(20, &[3, 4], 25, &mask);
    assert!(
        matches!(mask, Err(ProblemError::BlockMask { .. })),
        "{mask:?}"
    );
    assert_eq!(refused.batch(), batch);
}

#[test]
fn no_heads_are_refused() {
    let (strides, mut none) = (KvLayout::Nhd.strides(16, 1, 64), Spec::new(4, 1, 64));
    none.kv_heads = 0;
    let group = ProblemError::GroupSize {
        q_heads: 4,
        kv_heads: 0,
    };
    assert_eq!(PagesByHead::new(&none, strides, 3).unwrap_err(), group);
    for masked in [
        MaskedHeads::All,
        MaskedHeads::KvHead,
        MaskedHeads::QueryHead,
    ] {
        let refused = BlockSparse::new(&none, strides, 3, masked).unwrap_err();
        assert_eq!(refused, group);
    }
    let pool = vec![bf16::ZERO; 16 * 64];
    let view = KvView {
        k: &pool,
        v: &pool,
        k_strides: strides,
        v_strides: strides,
        scales: KvScales::One,
        rope: None,
    };
    let missing = ShapeError::NoKvHeads { part: 0 };
    assert_eq!(view.check(&none, 0, 16, 1), Err(missing));
    let mut table = PageTable::new(16, 1);
    table.push(&[0], 3);
    let (batch, q) = (Batch::new(vec![0, 1], table), [bf16::ZERO; 256]);
    let said = reference::attention(&none, &batch, &q, &[view]);
    assert_eq!(said.unwrap_err(), missing);
}
