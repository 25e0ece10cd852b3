//! Latent keys in two pools, against the same keys in one.

use half::{bf16, f16};
use proptest::prelude::*;
use tandem_attn::{
    Error,
    exec::Cpu,
    kv::{KvScales, KvView, RopePart},
    plan::{PlanOptions, Planner},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    reference,
    tensor::{Element, F8E4M3, ShapeError},
};

use crate::{
    latent_parts::Parts,
    problems::{Tensors, cases, kv_len, prefixed},
};

fn batch() -> impl Strategy<Value = Batch> {
    let request = (
        kv_len(),
        0..20_usize,
        prop_oneof![4 => 1..6_u32, 1 => 6..90_u32],
    );
    let page = prop_oneof![Just(1_u32), Just(3), Just(16), Just(64)];
    (prop::collection::vec(request, 1..5), page, any::<u64>())
        .prop_map(|(requests, page, seed)| prefixed(&requests, page, false, seed))
}

fn check<T: Element>(
    spec: &Spec,
    batch: &Batch,
    gaps: [[u32; 2]; 2],
    scales: KvScales<'_>,
    seed: u64,
) -> Result<(), TestCaseError> {
    let spec = spec.with_kv_dtype(T::DTYPE);
    let tensors: Tensors<bf16, T> = Tensors::random(&spec, batch, KvLayout::Nhd, seed);
    let parts: Vec<_> = tensors
        .parts
        .iter()
        .map(|pool| Parts::of(&spec, pool, gaps))
        .collect();
    let one: Vec<_> = tensors
        .views()
        .into_iter()
        .map(|view| view.with_scales(scales))
        .collect();
    let two: Vec<_> = parts
        .iter()
        .map(|parts| parts.view(&spec).with_scales(scales))
        .collect();
    let right = reference::attention(&spec, batch, &tensors.q, &one).unwrap();
    let same = reference::attention(&spec, batch, &tensors.q, &two).unwrap();
    prop_assert!(same == right, "the reference differs");

    let cpu = Cpu::new();
    let plan = Planner::new()
        .plan(&spec, batch, &cpu.device(), &PlanOptions::default())
        .unwrap();
    let rows = (plan.total_q * spec.q_heads) as usize;
    let run = |views: &[KvView<'_, T>]| {
        let mut out = vec![bf16::NAN; rows * spec.head_dim_v as usize];
        let mut lse = vec![f32::NAN; rows];
        cpu.run(&plan, &tensors.q, views, &mut out, Some(&mut lse))
            .unwrap();
        (out, lse)
    };
    let bits = |(out, lse): (Vec<bf16>, Vec<f32>)| {
        let out: Vec<u16> = out.iter().map(|x| x.to_bits()).collect();
        (out, lse.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
    };
    prop_assert!(bits(run(&one)) == bits(run(&two)), "results differ");
    Ok(())
}

proptest! {
    #![proptest_config(cases(60))]

    #[test]
    fn keys_in_two_pools_are_those_of_one(
        batch in batch(),
        heads in prop_oneof![1..9_u32, Just(16)],
        small: bool,
        gaps in prop::array::uniform2(prop::array::uniform2(0..5_u32)),
        dtype in 0..4,
        seed: u64,
    ) {
        let spec = if small { Spec::latent(heads, 48, 16) } else { Spec::latent(heads, 512, 64) };
        match dtype {
            0 => check::<f16>(&spec, &batch, gaps, KvScales::One, seed)?,
            1 => check::<f32>(&spec, &batch, gaps, KvScales::One, seed)?,
            2 => {
                // Of other heads than those of rows of 656 bytes.
                let spec = Spec::latent(heads, 48, 16);
                let scales = KvScales::Tensor { k: 0.5, v: 3.0 };
                check::<F8E4M3>(&spec, &batch, gaps, scales, seed)?;
            }
            _ => check::<bf16>(&spec, &batch, gaps, KvScales::One, seed)?,
        }
    }
}

#[test]
fn pages_of_one_token_are_the_same_memory() {
    let spec = Spec::latent(2, 16, 16);
    let (latent, rope) = ([bf16::ONE; 4 * 16], [bf16::ONE; 4 * 16]);
    let view = KvView::latent_parts(&spec, 2, &latent, &rope);
    let by_token = view.by_token().expect("tokens lie at one stride");
    let strides = by_token.rope.map(|rope| rope.strides);
    let expected = KvView::latent_parts(&spec, 1, &latent, &rope);
    assert_eq!(by_token.k_strides, expected.k_strides);
    assert_eq!(strides, expected.rope.map(|rope| rope.strides));
    let error = view.by_head().unwrap_err().to_string();
    assert!(error.contains("keys in two pools"), "{error}");
    let mut apart = view;
    if let Some(rope) = &mut apart.rope {
        rope.strides.page += 1;
    }
    assert!(apart.by_token().is_none());
}

#[test]
fn pools_that_are_no_pair_of_latent_parts_are_refused() {
    let mut table = PageTable::new(2, 2);
    table.push(&[1], 2);
    let batch = Batch::new(vec![0, 1], table);
    let cpu = Cpu::new();
    fn run<T: Element>(
        cpu: &Cpu,
        spec: &Spec,
        batch: &Batch,
        view: KvView<'_, T>,
    ) -> Option<ShapeError> {
        let plan = Planner::new()
            .plan(spec, batch, &cpu.device(), &PlanOptions::default())
            .unwrap();
        let q = vec![bf16::ONE; (spec.q_heads * spec.head_dim_qk) as usize];
        let mut out = vec![bf16::ZERO; (spec.q_heads * spec.head_dim_v) as usize];
        match cpu.run(&plan, &q, &[view], &mut out, None) {
            Ok(()) => None,
            Err(Error::Shape(error)) => Some(error),
            Err(other) => panic!("{other}"),
        }
    }
    let spec = Spec::latent(2, 16, 16);
    let (latent, rope) = ([bf16::ONE; 4 * 16], [bf16::ONE; 4 * 16]);
    let view = KvView::latent_parts(&spec, 2, &latent, &rope);
    assert_eq!(run(&cpu, &spec, &batch, view), None);

    let mut plain = spec;
    plain.latent = false;
    let not_latent = ShapeError::NotInParts {
        part: 0,
        latent: false,
    };
    assert_eq!(run(&cpu, &plain, &batch, view), Some(not_latent));
    assert!(not_latent.to_string().contains("KvView::latent_parts"));

    let in_row = Spec::latent(2, 512, 64).with_kv_dtype(Dtype::F8E4M3);
    let rows = [F8E4M3(0); 4 * 656];
    let with_rope = KvView {
        rope: Some(RopePart {
            pool: &rows,
            strides: KvLayout::Nhd.strides(2, 1, 64),
        }),
        ..KvView::latent_656(2, &rows)
    };
    let no_parts = ShapeError::NotInParts {
        part: 0,
        latent: true,
    };
    assert_eq!(run(&cpu, &in_row, &batch, with_rope), Some(no_parts));

    let short = KvView::latent_parts(&spec, 2, &latent, &rope[..63]);
    assert!(matches!(
        run(&cpu, &spec, &batch, short),
        Some(ShapeError::PoolTooSmall {
            tensor: "rope",
            needed: 64,
            ..
        })
    ));
    let mut other_pages = view;
    if let Some(rope) = &mut other_pages.rope {
        rope.strides.page_size = 4;
    }
    assert!(matches!(
        run(&cpu, &spec, &batch, other_pages),
        Some(ShapeError::PageSize {
            got: 4,
            expected: 2,
            ..
        })
    ));
    let values = latent;
    let own_values = KvView { v: &values, ..view };
    assert_eq!(
        run(&cpu, &spec, &batch, own_values),
        Some(ShapeError::NotLatent { part: 0 })
    );
}

#[test]
#[should_panic(expected = "two pools")]
fn a_key_in_two_pools_is_no_slice() {
    let spec = Spec::latent(2, 16, 16);
    let (latent, rope) = ([bf16::ONE; 16], [bf16::ONE; 16]);
    let _ = KvView::latent_parts(&spec, 1, &latent, &rope).key(0, 0, 0, 32);
}
