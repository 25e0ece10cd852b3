//! Scales at the ends of their range. One of a value that is NaN: rows that see the value are NaN. Those of other KV heads are as without it; other rows of
//! the same tile may be NaN, as with a value that is NaN.

use super::*;
use tandem_attn::plan::Tile;

const HEADS: u32 = 2;
const GROUP: u32 = 2;
const TOKENS: u32 = 3;
const KEYS: u32 = 150;
const PAGE: u32 = 16;

/// Decodes of one request in tiles of one kernel.
fn in_tiles(gpu: &Gpu, dim: u32, dtype: Dtype, tile: Tile, granularity: u32) -> (Case, Plan) {
    let spec = Spec::new(HEADS * GROUP, HEADS, dim)
        .with_dtype(dtype)
        .with_kv_dtype(Dtype::F8E4M3);
    let case = Case {
        spec,
        batch: prefixed(&[(KEYS, 0, TOKENS)], PAGE, false, 1),
        layout: KvLayout::Nhd,
        options: PlanOptions::default().with_decode_tile(Some(tile)),
        captured: false,
        granularity,
        powers: false,
        query_exponent: 0,
        seed: 1,
    };
    let plan = Planner::new()
        .plan(&spec, &case.batch, &gpu.device(), &case.options)
        .expect("it can be planned");
    assert!(plan.groups.iter().all(|of| of.tile == tile));
    (case, plan)
}

/// The last two of three query tokens see the value.
fn check(gpu: &Gpu, dim: u32, m: u32, n: u32) {
    let (case, plan) = in_tiles(gpu, dim, Dtype::F16, Tile { m, n }, 4);
    let tensors = Tensors::<f16, F8E4M3>::random(&case.spec, &case.batch, case.layout, 1);
    let mut scales = Scales::random(&case);
    let run = |scales: &Scales| {
        let memory = [
            Memory::new(&scales.k),
            Memory::new(&scales.v),
            Memory::new(&scales.of_token),
        ];
        let [first, _] = run_twice(gpu, &case, &plan, &tensors, on_device(&case, &memory));
        common::decode(Dtype::F16, bytemuck::cast_slice(&first.0))
    };
    let right = run(&scales);
    // The last key but one, of the second KV head.
    let (key, head) = (KEYS - 2, 1);
    let (table, strides) = (&case.batch.parts[0].table, by_token(&case));
    let page = table.indices[(key / PAGE) as usize];
    let at = page * strides.page + key % PAGE * strides.token + head;
    scales.v[at as usize] = f32::NAN;
    let got = run(&scales);
    let row = (HEADS * GROUP * dim) as usize;
    for (i, (got, right)) in got.into_iter().zip(right).enumerate() {
        let (token, of_head) = (i / row, i % row / (GROUP * dim) as usize);
        let sees = token as u32 + 1 >= TOKENS - 1;
        let is_right = match of_head as u32 == head {
            true => got.is_nan() || !sees,
            false => got == right,
        };
        assert!(is_right, "{m}x{n} d{dim}: {got} for {right} at {i}");
    }
}

#[test]
fn a_scale_that_is_nan_makes_rows_nan_that_see_its_value() {
    let Some(gpu) = gpu("a_scale_that_is_nan_makes_rows_nan_that_see_its_value") else {
        return;
    };
    for (dim, m, n) in [
        (64, 64, 64),
        (128, 64, 64),
        (256, 64, 64),
        (128, 128, 64),
        (128, 16, 32),
        (128, 8, 32),
        (128, 8, 128),
    ] {
        check(gpu, dim, m, n);
    }
}

/// The factor of a row of zeros is the smallest there is. Times a small scale of the keys it rounds to 0, and −∞ · 0 would be
/// NaN for each hidden key.
#[test]
fn rows_of_zeros_weigh_all_keys_alike_with_a_tiny_scale() {
    let Some(gpu) = gpu("rows_of_zeros_weigh_all_keys_alike_with_a_tiny_scale") else {
        return;
    };
    for (m, n) in [(64, 64), (128, 64), (16, 32), (8, 32), (8, 128)] {
        let (case, plan) = in_tiles(gpu, 128, Dtype::BF16, Tile { m, n }, 1);
        let mut tensors = Tensors::<bf16, F8E4M3>::random(&case.spec, &case.batch, case.layout, 1);
        tensors.q.fill(bf16::ZERO);
        let of_scale = |scale: f32| {
            let memory = [
                Memory::new(&[scale]),
                Memory::new(&[0.5_f32]),
                Memory::new(&[0_u32]),
            ];
            let [first, _] = run_twice(gpu, &case, &plan, &tensors, on_device(&case, &memory));
            first
        };
        assert_eq!(of_scale(1e-8), of_scale(1.0), "{m}x{n}");
    }
}
