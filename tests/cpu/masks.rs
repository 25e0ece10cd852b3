//! Masks of single tokens and of draft trees: parts with pages of different sizes over the same memory.

use half::bf16;
use proptest::{prelude::*, sample::Index};
use tandem_attn::{
    exec::Cpu,
    kv::{DraftTree, KvView, mask::slots},
    plan::{DeviceDescription, PlanOptions, Planner, SplitMode},
    problem::{Batch, Dtype, KvLayout, PageTable, Part, Spec},
    reference,
    tensor::{Element, F8E4M3},
};

use crate::{
    agree,
    numeric::{Rng, Tolerance, to_f64},
    problems::cases,
    widen,
};

const PAGE_SIZE: u32 = 4;
const POOL_PAGES: u32 = 48;
const POOL_SLOTS: u32 = PAGE_SIZE * POOL_PAGES;

fn numbers<T: Element>(noise: &mut Rng, len: u32, largest: f32) -> Vec<T> {
    let numbers = (0..len).map(|_| T::from_f32(noise.between(-largest, largest)));
    numbers.collect()
}

/// Runs a batch whose parts see one pool, by pages or by tokens, and compares with the reference.
fn against_reference<Q: Element, T: Element>(
    spec: &Spec,
    batch: &Batch,
    split: SplitMode,
    seed: u64,
) -> Result<(), TestCaseError> {
    let spec = &spec.with_dtype(Q::DTYPE).with_kv_dtype(T::DTYPE);
    let mut noise = Rng(seed);
    let q: Vec<Q> = numbers(
        &mut noise,
        batch.total_q() * spec.q_heads * spec.head_dim_qk,
        4.0,
    );
    let elements = POOL_SLOTS * spec.kv_heads * spec.head_dim_qk;
    let (k, v): (Vec<T>, Vec<T>) = (
        numbers(&mut noise, elements, 1.0),
        numbers(&mut noise, elements, 1.0),
    );
    let pool = KvView::new(spec, KvLayout::Nhd, PAGE_SIZE, &k, &v);
    let views: Vec<_> = batch
        .parts
        .iter()
        .map(|part| match part.table.page_size {
            1 => pool.by_token().expect("tokens lie at one stride"),
            _ => pool,
        })
        .collect();
    let right = reference::attention(spec, batch, &q, &views).expect("they fit");

    let device = DeviceDescription::named("cpu").expect("it is built in");
    let options = PlanOptions::default().with_split(split);
    let plan = Planner::new()
        .plan(spec, batch, &device, &options)
        .expect("the batch can be planned");
    plan.verify(batch).expect("the plan computes the batch");
    let mut out = vec![Q::from_f32(f32::NAN); q.len()];
    let mut lse = vec![f32::NAN; right.lse.len()];
    Cpu::new()
        .run(&plan, &q, &views, &mut out, Some(&mut lse))
        .expect("they fit");
    let got = (to_f64(&out), widen(&(out, lse)).1);
    agree(spec, &got, &(right.out, right.lse), Tolerance::of(Q::DTYPE))
}

/// A tree of drafted tokens behind a context.
#[derive(Clone, Debug)]
struct Draft {
    context: Vec<u32>,
    context_len: u32,
    parents: Vec<Option<u32>>,
    slots: Vec<u32>,
}

fn draft() -> impl Strategy<Value = Draft> {
    let parents = prop::collection::vec(prop::option::of(any::<Index>()), 1..9);
    let context = prop::collection::vec(0..POOL_PAGES, 0..9);
    let drafted = prop::collection::vec(0..POOL_SLOTS, 9);
    (context, 1..=PAGE_SIZE, parents, drafted).prop_map(|(context, last, parents, mut slots)| {
        let before = (context.len() as u32).saturating_sub(1) * PAGE_SIZE;
        let context_len = if context.is_empty() { 0 } else { before + last };
        let parents: Vec<_> = (0u32..)
            .zip(parents)
            .map(|(token, parent)| {
                parent
                    .filter(|_| token > 0)
                    .map(|at| at.index(token as usize) as u32)
            })
            .collect();
        slots.truncate(parents.len());
        Draft {
            context,
            context_len,
            parents,
            slots,
        }
    })
}

fn spec() -> impl Strategy<Value = Spec> {
    let heads = prop_oneof![Just((4u32, 2u32)), Just((8, 1)), Just((3, 3))];
    let window = prop::option::of(0u32..20);
    let cap = prop::option::of(1.0f32..20.0);
    (heads, any::<bool>(), window, cap).prop_map(|((q_heads, kv_heads), causal, window, cap)| {
        let mut spec = Spec::new(q_heads, kv_heads, 32);
        spec.variant.causal = causal;
        spec.variant.window_left = window;
        spec.variant.soft_cap = cap;
        spec
    })
}

fn split() -> impl Strategy<Value = SplitMode> {
    prop_oneof![
        Just(SplitMode::Makespan),
        Just(SplitMode::Off),
        Just(SplitMode::Fixed { tokens: 8 }),
    ]
}

proptest! {
    #![proptest_config(cases(500))]

    #[test]
    fn draft_trees_are_the_reference(
        spec in spec(), drafts in prop::collection::vec(draft(), 1..4), split in split(), seed: u64,
    ) {
        let trees: Vec<_> = drafts
            .iter()
            .map(|draft| DraftTree {
                context: &draft.context,
                context_len: draft.context_len,
                parents: &draft.parents,
                slots: &draft.slots,
            })
            .collect();
        let batch = DraftTree::batch(&spec, PAGE_SIZE, POOL_PAGES, &trees);
        batch.check(&spec).map_err(|error| TestCaseError::fail(error.to_string()))?;
        against_reference::<f32, f32>(&spec, &batch, split, seed)?;
        against_reference::<bf16, F8E4M3>(&spec, &batch, split, seed)?;
    }

    /// Each query sees the tokens that it is given, whichever they are.
    #[test]
    fn token_level_masks_are_the_reference(
        spec in spec(),
        rows in prop::collection::vec(prop::collection::vec(0..POOL_SLOTS, 0..40), 1..12),
        split in split(),
        seed: u64,
    ) {
        let mut spec = spec.non_causal();
        spec.variant.window_left = None;
        let tokens = rows.len() as u32;
        let batch = Batch::composed(vec![0, tokens], vec![Part::token_level(0, POOL_SLOTS, rows)]);
        batch.check(&spec).map_err(|error| TestCaseError::fail(error.to_string()))?;
        against_reference::<f32, f32>(&spec, &batch, split, seed)?;
        against_reference::<bf16, F8E4M3>(&spec, &batch, split, seed)?;
    }
}

/// A causal mask written out token by token is the causal mask.
#[test]
fn a_mask_written_out_gives_the_same() {
    let spec = Spec::new(4, 2, 32);
    let pages = [9, 4, 30];
    let rows = (8..=10).map(|visible| slots(&pages, PAGE_SIZE, visible));
    let batch = Batch::composed(vec![0, 3], vec![Part::token_level(0, POOL_SLOTS, rows)]);
    against_reference::<f32, f32>(&spec.non_causal(), &batch, SplitMode::Off, 7).unwrap();
}

/// The last of 64 drafted tokens sees the first, or not, as its bit says. The reference asks the same function as the
/// executor, so the values tell: those of the first token are 1, all others 0.
#[test]
fn the_farthest_ancestor_counts() {
    let spec = Spec::new(1, 1, 16).with_dtype(Dtype::F32);
    let mut table = PageTable::new(64, 1);
    table.push(&[0], 64);
    let (q, k) = (vec![0.0_f32; 64 * 16], vec![0.0_f32; 64 * 16]);
    let mut v = vec![0.0_f32; 64 * 16];
    v[..16].fill(1.0);
    for (ancestors, expected) in [(!0, 1.0 / 64.0), (!(1 << 63), 0.0)] {
        let batch = Batch::new(vec![0, 64], table.clone()).with_ancestors(vec![ancestors; 64]);
        let device = DeviceDescription::named("cpu").expect("it is built in");
        let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
        let view = KvView::new(&spec, KvLayout::Nhd, 64, &k, &v);
        let mut out = vec![f32::NAN; 64 * 16];
        Cpu::new()
            .run(
                &plan.expect("it can be planned"),
                &q,
                &[view],
                &mut out,
                None,
            )
            .expect("they fit");
        let last = out[63 * 16];
        assert!((last - expected).abs() < 1e-6, "{last}, not {expected}");
    }
}
