//! Tensors that do not fit and plans that are damaged.

use half::bf16;
use tandem_attn::{
    Error,
    abi::DIRECT,
    exec::Cpu,
    kv::{AppendScales, KvScales, KvView, KvViewMut},
    plan::{BrokenPlan, Plan, PlanOptions, SplitMode},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    step::cpu::{QkvStep, qkv},
    tensor::{F8E4M3, ShapeError},
};

use crate::{
    plan_of,
    problems::{Problem, Tensors},
    tiny,
};

#[test]
fn wrong_tensors_are_named() {
    let problem = tiny(&Spec::new(8, 2, 128));
    let plan = plan_of(&problem);
    let tensors: Tensors<bf16, bf16> =
        Tensors::random(&problem.spec, &problem.batch, problem.layout, 1);
    let (q, views) = (&tensors.q[..], tensors.views());
    let cpu = Cpu::new();
    let mut out = vec![bf16::ZERO; 1024];
    let mut lse = [0.0; 8];
    let mut error = |q: &[bf16], kv: &[KvView<'_, bf16>], len: usize, lse_len: usize| {
        cpu.run(&plan, q, kv, &mut out[..len], Some(&mut lse[..lse_len]))
            .expect_err("something is wrong")
    };
    let length = |name, got, shape, expected| {
        Error::Shape(ShapeError::Length {
            name,
            got,
            shape,
            expected,
        })
    };
    assert_eq!(
        error(&q[1..], &views, 1024, 8),
        length("q", 1023, "[total_q, q_heads, head_dim_qk]", 1024)
    );
    assert_eq!(
        error(q, &views, 1000, 8),
        length("out", 1000, "[total_q, q_heads, head_dim_v]", 1024)
    );
    assert_eq!(
        error(q, &views, 1024, 7),
        length("lse", 7, "[total_q, q_heads]", 8)
    );
    assert_eq!(
        error(q, &[], 1024, 8),
        Error::Shape(ShapeError::Parts {
            got: 0,
            expected: 1
        })
    );
    let short = KvView {
        k: &views[0].k[..100],
        ..views[0]
    };
    assert!(matches!(
        error(q, &[short], 1024, 8),
        Error::Shape(ShapeError::PoolTooSmall { tensor: "k", .. })
    ));

    let floats = vec![0.0f32; 1024];
    let expected = ShapeError::Dtype {
        name: "q",
        got: Dtype::F32,
        expected: Dtype::BF16,
    };
    assert_eq!(
        cpu.run(&plan, &floats, &views, &mut out, None),
        Err(expected.into())
    );
}

#[test]
fn latent_attention_wants_one_pool() {
    let problem = tiny(&Spec::latent(4, 32, 16));
    let plan = plan_of(&problem);
    let tensors: Tensors<bf16, bf16> =
        Tensors::random(&problem.spec, &problem.batch, problem.layout, 1);
    let one = tensors.views();
    let pool = KvView::latent(&problem.spec, 16, one[0].k);
    let other = one[0].k.to_vec();
    let two = KvView { v: &other, ..pool };
    let cpu = Cpu::new();
    let mut out = vec![bf16::ZERO; 4 * 32];
    cpu.run(&plan, &tensors.q, &[pool], &mut out, None).unwrap();
    assert_eq!(
        cpu.run(&plan, &tensors.q, &[two], &mut out, None),
        Err(ShapeError::NotLatent { part: 0 }.into())
    );

    // Several KV heads have a row each. The pool has more rows than are read, so that no row is missing.
    for page_size in [1, 16] {
        let spec = Spec::new(4, 2, 32);
        let mut table = PageTable::new(page_size, 64);
        table.push(&[0], 1);
        let problem = Problem {
            batch: Batch::new(vec![0, 1], table),
            ..tiny(&spec)
        };
        let pool = vec![bf16::ONE; 65 * 16 * 32];
        let view = KvView::latent(&spec, page_size, &pool);
        let (q, mut out) = ([bf16::ONE; 4 * 32], [bf16::ZERO; 4 * 32]);
        let of_heads = ShapeError::OneHead {
            part: 0,
            kv_heads: 2,
        };
        assert_eq!(
            cpu.run(&plan_of(&problem), &q, &[view], &mut out, None),
            Err(of_heads.into())
        );
    }
}

#[test]
fn broken_plans_are_refused() {
    let mut table = PageTable::new(16, 64);
    table.push(&(0..40).collect::<Vec<_>>(), 640);
    table.push(&[50], 3);
    let options = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 64 });
    let problem = Problem {
        batch: Batch::new(vec![0, 20, 21], table),
        options,
        ..tiny(&Spec::new(8, 2, 128))
    };
    let tensors: Tensors<bf16, bf16> =
        Tensors::random(&problem.spec, &problem.batch, problem.layout, 1);
    let good = plan_of(&problem);
    let direct = good
        .items
        .iter()
        .position(|item| item.is_gathered())
        .expect("the decode");
    let row = good.items[direct].rows_begin as usize;
    assert_eq!(good.rows[row].slot, DIRECT);
    let error = |break_it: &dyn Fn(&mut Plan)| {
        let mut plan = good.clone();
        break_it(&mut plan);
        let mut out = vec![bf16::ZERO; tensors.q.len()];
        match Cpu::new().run(&plan, &tensors.q, &tensors.views(), &mut out, None) {
            Err(Error::BrokenPlan(BrokenPlan { array, field, .. })) => (array, field),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(error(&|plan| plan.items[0].part = 9), ("items", "part"));
    assert_eq!(
        error(&|plan| plan.items[0].table = 1 << 30),
        ("items", "table")
    );
    assert_eq!(
        error(&|plan| plan.items[0].kv_begin = u32::MAX),
        ("items", "kv_begin")
    );
    assert_eq!(
        error(&|plan| plan.items[0].rows = u32::MAX),
        ("items", "rows_begin")
    );
    assert_eq!(
        error(&|plan| plan.items[direct].rows_begin = u32::MAX),
        ("items", "rows_begin")
    );
    assert_eq!(error(&|plan| plan.rows[row].token = 0), ("merges", "token"));
    assert_eq!(
        error(&|plan| plan.rows[row].token = 1000),
        ("items", "token")
    );
    assert_eq!(
        error(&|plan| plan.rows[row].slot = plan.slots),
        ("items", "slot")
    );
    assert_eq!(error(&|plan| plan.rows[row].slot = 0), ("items", "slot"));
    assert_eq!(
        error(&|plan| plan.merge_slots[0] = plan.slots),
        ("merges", "slot")
    );
    assert_eq!(
        error(&|plan| plan.merges[0].slots = 1 << 30),
        ("merges", "slots_begin")
    );
    assert_eq!(
        error(&|plan| plan.merges.truncate(3)),
        ("tokens", "number of items")
    );
    assert_eq!(error(&|plan| plan.page_ids.truncate(3)), ("parts", "pages"));
}

/// Appends to pools without heads, or with heads without elements, ended in panics.
#[test]
fn appends_without_heads_are_refused() {
    let spec = Spec::new(2, 1, 16).with_kv_dtype(Dtype::F8E4M3);
    let change = |change: fn(&mut Spec)| {
        let mut spec = spec;
        change(&mut spec);
        spec
    };
    let [mut k, mut v] = [[F8E4M3(0); 64]; 2];
    for spec in [
        change(|spec| spec.kv_heads = 0),
        change(|spec| (spec.head_dim_qk, spec.head_dim_v) = (0, 0)),
        change(|spec| spec.head_dim_v = 0),
    ] {
        let mut pool = KvViewMut::new(&spec, KvLayout::Nhd, 2, &mut k, &mut v);
        let scales = || AppendScales::Given(KvScales::One);
        let (none, slots) = ([0.0_f32; 0], [1_u32]);
        let quantised = Cpu::append_quantised(&spec, 2, &slots, &none, &none, &mut pool, scales());
        assert!(
            matches!(quantised, Err(Error::Extent { .. })),
            "{quantised:?}"
        );
        if spec.head_dim_qk != spec.head_dim_v {
            continue;
        }
        let step = QkvStep {
            qkv: &none,
            bias: None,
            norm: None,
            rope: None,
        };
        let got = qkv(&spec, &step, &slots, &mut [], &mut pool, 2, scales());
        assert!(matches!(got, Err(Error::Problem(_))), "{got:?}");
    }
}

/// The error spoke of a view of one pool, which there is for reading only.
#[test]
fn appends_of_latent_keys_name_the_call_for_them() {
    let spec = Spec::latent(4, 32, 16).with_dtype(Dtype::F32);
    let (mut k, mut v) = ([0.0_f32; 2 * 48], [0.0_f32; 2 * 32]);
    let mut pool = KvViewMut::new(&spec, KvLayout::Nhd, 2, &mut k, &mut v);
    let refused = |got: Result<(), Error>, instead: &str| {
        let text = got.unwrap_err().to_string();
        assert!(text.contains("latent") && text.contains(instead), "{text}");
    };
    let got = Cpu::append_paged_kv(&spec, 1, &[1_u32], &[1.0; 48], &[1.0; 32], &mut pool);
    refused(got, "append_rows with the keys alone");
    let spec = spec.with_kv_dtype(Dtype::F8E4M3);
    let (mut k, mut v) = ([F8E4M3(0); 2 * 48], [F8E4M3(0); 2 * 32]);
    let mut pool = KvViewMut::new(&spec, KvLayout::Nhd, 2, &mut k, &mut v);
    let scales = AppendScales::Given(KvScales::One);
    let (key, value) = ([1.0_f32; 48], [1.0; 32]);
    let got = Cpu::append_quantised(&spec, 1, &[1_u32], &key, &value, &mut pool, scales);
    refused(got, "append_rows_quantised with the keys alone");
}
