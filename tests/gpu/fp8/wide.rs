//! Tiles of 64 rows on 8-bit keys, also where the planner would choose others.

use super::*;
use tandem_attn::plan::Tile;

/// The tile of a head dimension.
const TILES: [(u32, Tile); 3] = [(64, TILE), (128, TILE), (256, TILE)];
const TILE: Tile = Tile { m: 64, n: 64 };

#[test]
fn tiles_of_64_rows_on_8_bit_pages_are_the_reference() {
    let Some(gpu) = gpu("tiles_of_64_rows_on_8_bit_pages_are_the_reference") else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(200));
    runner
        .run(&case(8, 4), |mut case| {
            let (dim, tile) = TILES[case.seed as usize / 32 % TILES.len()];
            let variant = case.spec.variant;
            case.spec = Spec::new(case.spec.q_heads, case.spec.kv_heads, dim);
            case.spec.variant = variant;
            case.spec.variant.sinks = case.seed % 4 == 1;
            if variant.causal && case.seed % 5 < 2 {
                case.batch = case
                    .batch
                    .clone()
                    .with_ancestors(ancestors(&case.batch, case.seed));
            }
            case.options = case.options.with_decode_tile(Some(tile));
            match case.seed / 64 % 2 {
                0 => check::<f16, F8E4M3>(gpu, &case),
                _ => check::<bf16, F8E4M3>(gpu, &case),
            }
        })
        .unwrap();
}
