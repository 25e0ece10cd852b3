//! Keys of latent attention in rows of 656 bytes.

use half::{bf16, f16};
use proptest::prelude::*;
use tandem_attn::{
    Error,
    exec::Cpu,
    kv::{AppendScales, KvScales, KvTensors, KvView, KvViewMut, LATENT_656_BYTES},
    plan::{PlanOptions, Planner},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    reference,
    tensor::{Element, F8E4M3, ShapeError, TensorMut, TensorRef},
};

use crate::{
    agree,
    numeric::{Rng, Tolerance},
    problems::{Tensors, cases, kv_len, prefixed},
    widen,
};

const ROW: usize = LATENT_656_BYTES as usize;

fn spec(heads: u32) -> Spec {
    Spec::latent(heads, 512, 64).with_kv_dtype(Dtype::F8E4M3)
}

/// What the rows of a pool stand for, written down once more from the format's description.
fn widened(pool: &[F8E4M3]) -> Vec<bf16> {
    let of_row = |row: &[F8E4M3]| {
        let bytes: Vec<u8> = row.iter().map(|byte| byte.0).collect();
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        let numbers = (0..512).map(|i| {
            let scale = f32::from_bits(word(512 + i / 128 * 4));
            bf16::from_f32(row[i].to_f32() * scale)
        });
        let rope = (0..64).map(|i| {
            let at = 528 + 2 * i;
            bf16::from_bits(u16::from_ne_bytes([bytes[at], bytes[at + 1]]))
        });
        numbers.chain(rope).collect::<Vec<_>>()
    };
    pool.chunks_exact(ROW).flat_map(of_row).collect()
}

fn batch() -> impl Strategy<Value = Batch> {
    let request = (kv_len(), 0..20_usize, 1..6_u32);
    let page = prop_oneof![Just(1_u32), Just(3), Just(16), Just(64)];
    (prop::collection::vec(request, 1..5), page, any::<u64>())
        .prop_map(|(requests, page, seed)| prefixed(&requests, page, false, seed))
}

proptest! {
    #![proptest_config(cases(40))]

    #[test]
    fn rows_are_read_as_what_they_stand_for(batch in batch(), heads in 1..9_u32, seed: u64) {
        let spec = spec(heads);
        let tensors: Tensors<bf16, F8E4M3> = Tensors::random(&spec, &batch, KvLayout::Nhd, seed);
        let right = tensors.reference(&spec, &batch);
        // The reference reads the same numbers from a pool of 16 bits.
        let wide: Vec<_> = tensors.parts.iter().map(|part| widened(&part.k)).collect();
        let of_16_bits = spec.with_kv_dtype(Dtype::BF16);
        let page = batch.parts[0].table.page_size;
        let views: Vec<_> = wide.iter().map(|pool| KvView::latent(&of_16_bits, page, pool)).collect();
        let same = reference::attention(&of_16_bits, &batch, &tensors.q, &views).unwrap();
        prop_assert!(same == right, "the reference differs");

        let cpu = Cpu::new();
        let plan = Planner::new().plan(&spec, &batch, &cpu.device(), &PlanOptions::default()).unwrap();
        let rows = (plan.total_q * heads) as usize;
        let mut got = (vec![bf16::ZERO; rows * 512], vec![f32::NAN; rows]);
        cpu.run(&plan, &tensors.q, &tensors.views(), &mut got.0, Some(&mut got.1)).unwrap();
        agree(&spec, &widen(&got), &(right.out, right.lse), Tolerance::of(Dtype::BF16))?;

        // Tensors whose type is known when the program runs.
        let pages = batch.parts[0].table.pool_pages as usize;
        let pool = TensorRef::new(&tensors.parts[0].k, [pages, page as usize, 1, ROW]).unwrap();
        let kv = KvTensors { k: pool, v: pool, scales: KvScales::InRow };
        let (tokens, heads) = (plan.total_q as usize, heads as usize);
        let q = TensorRef::new(&tensors.q, [tokens, heads, 576]).unwrap();
        let mut again = vec![bf16::ZERO; rows * 512];
        let out = TensorMut::new(&mut again, [tokens, heads, 512]).unwrap();
        cpu.run_tensors(&plan, &q, &[kv], out, None).unwrap();
        prop_assert!(again == got.0);
    }
}

/// Its page ids are not those of a pool: what runs without the indices would read other keys.
#[test]
fn keys_chosen_on_the_device_are_known_to_runs_on_gpus_only() {
    let (spec, batch) = (spec(2), Batch::of_top_k(3, 4).unwrap());
    let cpu = Cpu::new();
    let plan = Planner::new()
        .plan(&spec, &batch, &cpu.device(), &PlanOptions::default())
        .unwrap();
    let (q, mut out) = (vec![bf16::ONE; 3 * 2 * 576], vec![bf16::ONE; 3 * 2 * 512]);
    let pool = vec![F8E4M3(0); 64 * ROW];
    let view = KvView::latent_656(1, &pool);
    let chosen = ShapeError::ChosenOnDevice { part: 0 };
    let ran = cpu.run(&plan, &q, &[view], &mut out, None);
    assert_eq!(ran, Err(chosen.into()));
    assert_eq!(
        reference::attention(&spec, &batch, &q, &[view]).unwrap_err(),
        chosen
    );
    let tensor = TensorRef::new(&pool, [64, 1, 1, ROW]).unwrap();
    let kv = KvTensors {
        k: tensor,
        v: tensor,
        scales: KvScales::InRow,
    };
    let q = TensorRef::new(&q, [3, 2, 576]).unwrap();
    let to = TensorMut::new(&mut out, [3, 2, 512]).unwrap();
    assert_eq!(
        cpu.run_tensors(&plan, &q, &[kv], to, None),
        Err(chosen.into())
    );
    assert_eq!(out, vec![bf16::ONE; 3 * 2 * 512]);
}

#[test]
fn appended_keys_are_those_that_are_read() {
    let (page, pages) = (4_usize, 3);
    let mut noise = Rng(3);
    let keys: Vec<f16> = (0..3 * 600)
        .map(|_| f16::from_f32(noise.between(-3.0, 3.0)))
        .collect();
    // Rows with gaps, into the second and the third page; the middle one is left out.
    let rows = TensorRef::strided(&keys, [3, 576], [600, 1]).unwrap();
    let mut pool = vec![F8E4M3(0x5a); pages * page * ROW];
    let to = TensorMut::new(&mut pool, [pages, page, ROW]).unwrap();
    Cpu::append_latent_656(&rows, &[9_i64, -1, 4], to).unwrap();
    let wide = widened(&pool);
    for (token, slot) in [(0, 9), (2, 4)] {
        let of_tile = |tile: usize| {
            let tile = &keys[token * 600 + tile * 128..][..128];
            tile.iter()
                .fold(0.0, |most: f32, x| most.max(x.to_f32().abs()))
        };
        for i in 0..576 {
            let (key, got) = (
                keys[token * 600 + i].to_f32(),
                wide[slot * 576 + i].to_f32(),
            );
            match i {
                512.. => assert_eq!(got, bf16::from_f32(key).to_f32()),
                _ => assert!((got - key).abs() <= key.abs() / 16.0 + of_tile(i / 128) / 1e5),
            }
        }
    }
    let untouched = |slot: usize| pool[slot * ROW..][..ROW].iter().all(|byte| byte.0 == 0x5a);
    assert!((0..12).filter(|slot| ![4, 9].contains(slot)).all(untouched));
}

#[test]
fn pools_of_other_rows_than_656_bytes_are_refused() {
    let rows = [0.0_f32; 576];
    let rows = TensorRef::new(&rows, [1, 576]).unwrap();
    let mut pool = vec![F8E4M3(0); 4 * ROW];
    let mut append = |rows: &TensorRef<'_, 2>, slot: i64, shape| {
        Cpu::append_latent_656(rows, &[slot], TensorMut::new(&mut pool, shape).unwrap())
            .unwrap_err()
    };
    let narrow = TensorRef::new(&[0.0_f32; 512], [1, 512]).unwrap();
    assert!(matches!(
        append(&narrow, 0, [2, 2, ROW]),
        Error::Extent { got: 512, .. }
    ));
    assert!(matches!(
        append(&rows, 0, [2, 2, 576]),
        Error::Extent { got: 576, .. }
    ));
    assert!(matches!(
        append(&rows, 4, [2, 2, ROW]),
        Error::IndexOutOfRange { got: 4, .. }
    ));
    let eight = TensorRef::new(&[F8E4M3(0); 576], [1, 576]).unwrap();
    assert!(matches!(
        append(&eight, 0, [2, 2, ROW]),
        Error::Dtype { tensor: "rows", .. }
    ));

    // Heads that have no such rows, and other types of keys.
    let mut table = PageTable::new(1, 4);
    table.push(&[2], 1);
    let batch = Batch::new(vec![0, 1], table);
    let cpu = Cpu::new();
    let run = |spec: &Spec, view: KvView<'_, F8E4M3>| {
        let plan = Planner::new()
            .plan(spec, &batch, &cpu.device(), &PlanOptions::default())
            .unwrap();
        let q = vec![bf16::ZERO; spec.head_dim_qk as usize];
        cpu.run(
            &plan,
            &q,
            &[view],
            &mut vec![bf16::ZERO; spec.head_dim_v as usize],
            None,
        )
    };
    let view = KvView::latent_656(1, &pool);
    run(&spec(1), view).unwrap();
    let small = Spec::latent(1, 64, 16).with_kv_dtype(Dtype::F8E4M3);
    let no_rows = ShapeError::NoRows656 {
        latent: true,
        head_dim_qk: 80,
        head_dim_v: 64,
        dtype: Dtype::F8E4M3,
    };
    assert_eq!(run(&small, view), Err(no_rows.into()));
    let short = KvView::latent_656(1, &pool[..3 * ROW - 1]);
    let needed = 3 * ROW;
    assert!(
        matches!(run(&spec(1), short), Err(Error::Shape(ShapeError::PoolTooSmall { needed: n, .. })) if n == needed)
    );

    // Keys and values apart cannot be appended to them.
    let (mut k, mut v) = (vec![F8E4M3(0); ROW], vec![F8E4M3(0); ROW]);
    let mut to = KvViewMut::new(&small, KvLayout::Nhd, 1, &mut k, &mut v);
    let scales = AppendScales::Given(KvScales::InRow);
    let refused =
        Cpu::append_quantised(&small, 1, &[0], &[0.0_f32; 80], &[0.0; 64], &mut to, scales);
    assert!(matches!(refused, Err(Error::NoInstance { .. })));
}
