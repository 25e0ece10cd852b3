//! Results of the same queries to different keys, merged.

use half::bf16;
use tandem_attn::{
    Error,
    exec::Cpu,
    kv::KvView,
    plan::{DeviceDescription, PlanOptions, Planner},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
};

use crate::numeric::{Rng, Tolerance, compare};

const PAGE: u32 = 16;

/// Attention of one query token to the keys of some pages, without a causal mask: outputs and LSEs.
fn attention(
    spec: &Spec,
    q: &[bf16],
    pages: &[u32],
    keys: u32,
    pool: &[bf16],
) -> (Vec<f32>, Vec<f32>) {
    let mut table = PageTable::new(PAGE, 8);
    table.push(pages, keys);
    let batch = Batch::new(vec![0, 1], table);
    let device = DeviceDescription::named("cpu").expect("a device");
    let plan = Planner::new()
        .plan(spec, &batch, &device, &PlanOptions::default())
        .expect("a plan");
    let view = KvView::new(spec, KvLayout::Nhd, PAGE, pool, pool);
    let (heads, dim) = (spec.q_heads as usize, spec.head_dim_v as usize);
    let (mut out, mut lse) = (vec![0.0; heads * dim], vec![0.0; heads]);
    Cpu::new()
        .run(&plan, q, &[view], &mut out, Some(&mut lse))
        .expect("a run");
    (out, lse)
}

#[test]
fn results_of_parts_of_the_keys_merge_to_that_of_all() {
    let mut spec = Spec::new(4, 2, 32).non_causal();
    spec.out_dtype = Dtype::F32;
    let mut rng = Rng(3);
    let mut numbers = |len| -> Vec<bf16> {
        let numbers = rng.floats(len, -2.0, 2.0);
        numbers.into_iter().map(bf16::from_f32).collect()
    };
    let q = numbers(4 * 32);
    let pool = numbers(8 * PAGE as usize * 2 * 32);
    let all = attention(&spec, &q, &[5, 0, 3, 6], 55, &pool);
    // The last one saw no key.
    let parts = [
        attention(&spec, &q, &[5, 0], 32, &pool),
        attention(&spec, &q, &[3], 16, &pool),
        attention(&spec, &q, &[6], 7, &pool),
        (vec![f32::NAN; 4 * 32], vec![f32::NEG_INFINITY; 4]),
    ];
    let results: Vec<_> = parts
        .iter()
        .map(|(out, lse)| (&out[..], &lse[..]))
        .collect();
    let (mut out, mut lse) = (vec![f32::NAN; 4 * 32], vec![f32::NAN; 4]);
    Cpu::merge_results(&results, 4, 32, &mut out, Some(&mut lse)).expect("they fit");
    let wide = |values: &[f32]| -> Vec<f64> { values.iter().map(|&x| f64::from(x)).collect() };
    let tolerance = Tolerance::of(Dtype::F32);
    compare("out", &[4, 32], &wide(&out), &wide(&all.0), tolerance).unwrap();
    compare("lse", &[4], &wide(&lse), &wide(&all.1), tolerance).unwrap();

    let short = [(&parts[0].0[..64], &parts[0].1[..])];
    let refused = Cpu::merge_results(&short, 4, 32, &mut out, None);
    assert!(matches!(refused, Err(Error::Shape(_))), "{refused:?}");
    let none = Cpu::merge_results::<f32>(&[], 4, 32, &mut out, None);
    assert!(
        matches!(none, Err(Error::Extent { got: 0, .. })),
        "{none:?}"
    );
    let odd = Cpu::merge_results(&results, 4, 12, &mut out, None);
    let of_out = matches!(
        odd,
        Err(Error::HeadDim {
            tensor: "out",
            got: 12,
            ..
        })
    );
    assert!(of_out, "{odd:?}");
}
