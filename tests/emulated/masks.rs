//! Parts of single tokens beside parts of pages, over the same memory: draft trees with and without windows, and masks that are
//! written out.

use half::{bf16, f16};
use tandem_attn::{
    exec::emulated::Emulated,
    kv::{DraftTree, KvView, mask::slots},
    plan::{PlanOptions, Planner, SplitMode},
    problem::{Batch, Dtype, KvLayout, Part, Spec},
    reference,
    tensor::{Element, F8E4M3},
};

use crate::{
    no_failure,
    numeric::{Rng, Tolerance, compare, to_f64},
    settings,
};

const PAGE_SIZE: u32 = 8;
const POOL_PAGES: u32 = 24;
const POOL_SLOTS: u32 = PAGE_SIZE * POOL_PAGES;

/// Runs a batch whose parts see one pool, by pages or by tokens.
fn check<T: Element, K: Element>(spec: &Spec, batch: &Batch, split: SplitMode, schedule: u8) {
    let _others = no_failure();
    let emulated = Emulated::new(settings(schedule, 5)).expect("the emulator");
    let spec = &spec.with_dtype(T::DTYPE).with_kv_dtype(K::DTYPE);
    batch.check(spec).unwrap();
    let mut noise = Rng(17);
    fn numbers<T: Element>(noise: &mut Rng, count: u32, largest: f32) -> Vec<T> {
        let numbers = (0..count).map(|_| T::from_f32(noise.between(-largest, largest)));
        numbers.collect()
    }
    let tokens = batch.total_q();
    let q: Vec<T> = numbers(&mut noise, tokens * spec.q_heads * spec.head_dim_qk, 4.0);
    let elements = POOL_SLOTS * spec.kv_heads * spec.head_dim_qk;
    let [k, v] = [(); 2].map(|()| numbers::<K>(&mut noise, elements, 1.0));
    let pool = KvView::new(spec, KvLayout::Nhd, PAGE_SIZE, &k, &v);
    let by_token = pool.by_token().expect("tokens lie at one stride");
    let of_part = |part: &Part| match part.table.page_size {
        1 => by_token,
        _ => pool,
    };
    let views: Vec<_> = batch.parts.iter().map(of_part).collect();
    let right = reference::attention(spec, batch, &q, &views).expect("they fit");
    let options = PlanOptions::default().with_split(split);
    let plan = Planner::new()
        .plan(spec, batch, &emulated.device(), &options)
        .expect("the batch can be planned");
    plan.verify(batch).unwrap();
    let mut out = vec![T::from_f32(f32::NAN); q.len()];
    let mut lse = vec![f32::NAN; right.lse.len()];
    emulated
        .run(&plan, &q, &views, &mut out, Some(&mut lse))
        .unwrap_or_else(|error| panic!("{spec:?}: {error}"));
    let shape = [tokens, spec.q_heads, spec.head_dim_v].map(|extent| extent as usize);
    let mut tolerance = Tolerance::of(T::DTYPE);
    tolerance.absolute = match T::DTYPE {
        Dtype::BF16 => 1.0 / 256.0,
        _ => 1.0 / 2048.0,
    };
    compare("out", &shape, &to_f64(&out), &right.out, tolerance)
        .unwrap_or_else(|error| panic!("{spec:?}: {error}"));
    let tolerance = Tolerance {
        absolute: 2e-4,
        relative: 1e-5,
    };
    compare("lse", &shape[..2], &to_f64(&lse), &right.lse, tolerance)
        .unwrap_or_else(|error| panic!("{spec:?}: {error}"));
}

/// Two trees behind contexts, one of which is a context alone in its last page.
fn drafts(spec: &Spec) -> Batch {
    let trees = [
        DraftTree {
            context: &[3, 17, 9, 0],
            context_len: 29,
            parents: &[None, None, Some(0), Some(2), Some(1)],
            slots: &[160, 161, 40, 47, 162],
        },
        DraftTree {
            context: &[5],
            context_len: 1,
            parents: &[None, Some(0), Some(0)],
            slots: &[64, 191, 70],
        },
    ];
    DraftTree::batch(spec, PAGE_SIZE, POOL_PAGES, &trees)
}

/// A window hides a context more, the deeper a token is.
#[test]
fn draft_trees_are_the_reference() {
    let fixed = SplitMode::Fixed { tokens: 16 };
    let of_64 = Spec::new(4, 2, 64);
    for (window, split, schedule) in [
        (None, SplitMode::Makespan, 0),
        (Some(7), SplitMode::Makespan, 1),
        (Some(2), fixed, 2),
        (Some(0), SplitMode::Off, 0),
    ] {
        let mut spec = of_64;
        spec.variant.window_left = window;
        check::<bf16, bf16>(&spec, &drafts(&spec), split, schedule);
        check::<bf16, F8E4M3>(&spec, &drafts(&spec), split, schedule);
    }
    let capped = Spec::new(8, 1, 128).with_window_left(9).with_soft_cap(15.0);
    check::<f16, f16>(&capped, &drafts(&capped), SplitMode::Makespan, 1);
    // Pages of one token without a prefill kernel of these heads, and many rows of a token.
    let wide = Spec::new(24, 1, 64).with_window_left(5);
    check::<bf16, bf16>(&wide, &drafts(&wide), SplitMode::Makespan, 2);
}

/// A causal mask, and others, written out token by token; with a window, the last keys of each list.
#[test]
fn masks_of_single_tokens_are_the_reference() {
    let pages = [9, 4, 20, 11];
    let rows = (20..26).map(|visible| slots(&pages, PAGE_SIZE, visible));
    let every_third = (0..3).map(|token| (token..POOL_SLOTS).step_by(3).collect::<Vec<_>>());
    let batches = [
        Batch::composed(vec![0, 6], vec![Part::token_level(0, POOL_SLOTS, rows)]),
        Batch::composed(
            vec![0, 1, 2, 3],
            vec![Part::token_level(0, POOL_SLOTS, every_third)],
        ),
    ];
    let spec = Spec::new(4, 2, 64);
    for (batch, schedule) in batches.iter().zip(0..) {
        let open = spec.non_causal();
        check::<bf16, bf16>(&open, batch, SplitMode::Makespan, schedule);
        check::<f16, F8E4M3>(&open, batch, SplitMode::Fixed { tokens: 16 }, schedule);
        // A row is a query of its own, which is the last token of its list.
        let windowed = spec.with_window_left(4);
        check::<bf16, bf16>(&windowed, batch, SplitMode::Makespan, schedule);
    }
}
