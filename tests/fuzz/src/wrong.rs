//! Wrong specifications, batches, options and plans, by class.

use tandem_attn::{
    plan::{Bound, DeviceDescription, Plan, PlanOptions, Planner, SplitMode, Tile},
    problem::{Batch, Dtype, Spec},
    variants::ALIBI,
};

use crate::{case::Case, numeric::Rng, tally::Tally};

/// What is planned, changed by a class of mistakes; `None` where the class does not apply.
struct Asked {
    spec: Spec,
    batch: Batch,
    options: PlanOptions,
    on_gpu: bool,
}

type Wrong = fn(&mut Asked, &mut Rng) -> Option<()>;

/// An index of an array that has any.
fn any(rng: &mut Rng, len: usize) -> Option<usize> {
    (len > 0).then(|| rng.below(len))
}

const CLASSES: [(&str, Wrong); 38] = [
    ("a page id past the pool", |asked, rng| {
        let table = &mut asked.batch.parts[0].table;
        let at = any(rng, table.indices.len())?;
        table.indices[at] = table.pool_pages + rng.below(3) as u32 * 0x4000_0000;
        Some(())
    }),
    ("qo_indptr falls", |asked, rng| {
        let at = any(rng, asked.batch.requests())?;
        asked.batch.qo_indptr[at] = asked.batch.qo_indptr[at + 1] + 1;
        Some(())
    }),
    ("qo_indptr begins behind 0", |asked, _| {
        asked
            .batch
            .qo_indptr
            .iter_mut()
            .for_each(|entry| *entry += 1);
        Some(())
    }),
    ("qo_indptr is empty", |asked, _| {
        asked.batch.qo_indptr.clear();
        Some(())
    }),
    ("a part has more queries than the batch", |asked, _| {
        let part = &mut asked.batch.parts[0];
        *part.q_indptr.last_mut()? += 1000;
        Some(())
    }),
    ("a part has a row block too few", |asked, _| {
        let part = &mut asked.batch.parts[0];
        (part.row_blocks() > 0).then(|| part.q_indptr.pop())?;
        Some(())
    }),
    ("table.indptr falls", |asked, rng| {
        let table = &mut asked.batch.parts[0].table;
        let at = any(rng, table.row_blocks())?;
        table.indptr[at] = table.indptr[at + 1] + 1;
        Some(())
    }),
    ("table.indptr begins behind 0", |asked, _| {
        asked.batch.parts[0].table.indptr[0] = 1;
        Some(())
    }),
    ("table.indptr ends behind its pages", |asked, _| {
        *asked.batch.parts[0].table.indptr.last_mut()? += 1;
        Some(())
    }),
    ("a last page holds more than a page", |asked, rng| {
        let table = &mut asked.batch.parts[0].table;
        let at = any(rng, table.row_blocks())?;
        table.last_page_len[at] = table.page_size + 1;
        Some(())
    }),
    ("a last page holds nothing", |asked, rng| {
        let table = &mut asked.batch.parts[0].table;
        let at = any(rng, table.row_blocks())?;
        (table.last_page_len[at] > 0).then(|| table.last_page_len[at] = 0)
    }),
    ("keys without pages", |asked, rng| {
        let table = &mut asked.batch.parts[0].table;
        let at = any(rng, table.row_blocks())?;
        (table.last_page_len[at] == 0).then(|| table.last_page_len[at] = 1)
    }),
    ("a last_page_len too few", |asked, _| {
        asked.batch.parts[0].table.last_page_len.pop()?;
        Some(())
    }),
    ("keys_after of another length", |asked, _| {
        let part = &mut asked.batch.parts[0];
        part.keys_after = vec![1; part.row_blocks() + 1];
        Some(())
    }),
    ("keys_after past all positions", |asked, _| {
        let part = &mut asked.batch.parts[0];
        (part.row_blocks() > 0).then(|| part.keys_after = vec![u32::MAX; part.row_blocks()])
    }),
    ("pages of no tokens", |asked, _| {
        asked.batch.parts[0].table.page_size = 0;
        Some(())
    }),
    ("pages of too many tokens", |asked, _| {
        asked.batch.parts[0].table.page_size = 4097;
        Some(())
    }),
    ("more queries than keys", |asked, rng| {
        let [part] = &mut asked.batch.parts[..] else {
            return None;
        };
        let at = any(rng, part.row_blocks())?;
        let pages = part.table.pages(at).len();
        let few = pages == 1 && part.q_range(at).len() > 1 && part.after(at) == 0;
        (few && asked.spec.variant.causal).then(|| part.table.last_page_len[at] = 1)
    }),
    ("no parts", |asked, _| {
        asked.batch.parts.clear();
        Some(())
    }),
    ("ancestors of other queries", |asked, _| {
        asked.batch.ancestors = vec![1; asked.batch.total_q() as usize + 1];
        Some(())
    }),
    ("ancestors without a causal mask", |asked, _| {
        asked.spec.variant.causal = false;
        asked.batch.ancestors = vec![1; asked.batch.total_q() as usize];
        (asked.batch.total_q() > 0).then_some(())
    }),
    ("no query heads", |asked, _| {
        asked.spec.q_heads = 0;
        Some(())
    }),
    ("no KV heads", |asked, _| {
        asked.spec.kv_heads = 0;
        Some(())
    }),
    ("KV heads that do not divide", |asked, _| {
        asked.spec.q_heads += 1;
        (asked.spec.kv_heads > 1).then_some(())
    }),
    ("a head dimension of nothing", |asked, _| {
        asked.spec.head_dim_v = 0;
        Some(())
    }),
    ("a head dimension between multiples of 16", |asked, _| {
        asked.spec.head_dim_qk += 8;
        Some(())
    }),
    ("a head dimension past all", |asked, _| {
        asked.spec.head_dim_qk = 1 << 20;
        Some(())
    }),
    ("a scale that is not positive", |asked, rng| {
        asked.spec.scale = [0.0, -1.0, f32::NAN, f32::INFINITY][rng.below(4)];
        Some(())
    }),
    ("a cap that is not positive", |asked, rng| {
        let cap = [0.0, -1.0, f32::NAN, f32::INFINITY][rng.below(4)];
        asked.spec.variant.soft_cap = Some(cap);
        Some(())
    }),
    ("a window past all positions", |asked, _| {
        asked.spec.variant.window_left = Some(u32::MAX);
        Some(())
    }),
    ("a cap beside logits of a variant", |asked, _| {
        asked.spec = asked.spec.with_hooks(&ALIBI).with_soft_cap(3.0);
        Some(())
    }),
    (
        "latent heads with values of their own length",
        |asked, _| {
            asked.spec.latent = true;
            asked.spec.head_dim_v = asked.spec.head_dim_qk + 16;
            Some(())
        },
    ),
    ("outputs of 8 bits", |asked, _| {
        asked.spec.out_dtype = Dtype::F8E4M3;
        Some(())
    }),
    ("keys that no kernel takes", |asked, _| {
        asked.spec.kv_dtype = Dtype::F32;
        asked.on_gpu.then_some(())
    }),
    ("a fixed split within a page", |asked, _| {
        let page_size = asked.batch.parts[0].table.page_size;
        asked.options.split = SplitMode::Fixed {
            tokens: 3 * page_size + 1,
        };
        (page_size > 1).then_some(())
    }),
    ("a fixed split of nothing", |asked, _| {
        asked.options.split = SplitMode::Fixed { tokens: 0 };
        Some(())
    }),
    ("a bound that holds nothing", |asked, _| {
        asked.options.bound = Some(Bound::default());
        let pages = asked
            .batch
            .parts
            .iter()
            .map(|part| part.table.indices.len());
        (pages.sum::<usize>() > 0).then_some(())
    }),
    ("a tile that no kernel has", |asked, _| {
        asked.options.decode_tile = Some(Tile { m: 7, n: 9 });
        asked.on_gpu.then_some(())
    }),
];

/// Plans a step's batch with mistakes of some classes: each is to be refused.
pub fn batches(
    case: &Case,
    step: usize,
    batch: &Batch,
    device: &DeviceDescription,
    tally: &mut Tally,
) -> Result<(), String> {
    let mut rng = Rng(case.seed ^ 7 ^ (step as u64) << 32);
    for _ in 0..case.wrong {
        let (class, wrong) = CLASSES[rng.below(CLASSES.len())];
        let mut asked = Asked {
            spec: case.spec,
            batch: batch.clone(),
            options: case.options,
            on_gpu: device.name != "cpu",
        };
        if wrong(&mut asked, &mut rng).is_none() {
            continue;
        }
        let Asked {
            spec,
            batch,
            options,
            ..
        } = &asked;
        if Planner::new().plan(spec, batch, device, options).is_ok() {
            return Err(format!("planned, though wrong: {class}"));
        }
        // A plan of before is no reason to look less closely.
        let mut plan = Plan::empty(*spec);
        let updated = Planner::new().update(spec, batch, device, options, &mut plan);
        if updated.is_ok() {
            return Err(format!("updated, though wrong: {class}"));
        }
        tally.refused(class);
    }
    Ok(())
}

/// A plan with a number changed somewhere.
pub fn damaged_plan(plan: &Plan, seed: u64) -> Plan {
    let (mut plan, mut rng) = (plan.clone(), Rng(seed ^ 8));
    let words: &mut [u32] = match rng.below(5) {
        0 => bytemuck::cast_slice_mut(&mut plan.items),
        1 => bytemuck::cast_slice_mut(&mut plan.rows),
        2 => bytemuck::cast_slice_mut(&mut plan.merges),
        3 => &mut plan.merge_slots,
        _ => &mut plan.page_ids,
    };
    if let Some(at) = any(&mut rng, words.len()) {
        words[at] = match rng.below(4) {
            0 => rng.bits() as u32,
            // Something near is harder to see.
            _ => words[at].wrapping_add(rng.below(7) as u32).wrapping_sub(3),
        };
    }
    plan
}
