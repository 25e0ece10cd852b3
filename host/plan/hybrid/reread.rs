//! Keys that decodes read again beside prefills: their tiles hold fewer query tokens there than alone. Several tiles then read the
//! keys of a request with several new tokens, and a prefix that many requests share.

use crate::plan::{
    data::{PlanOptions, Rules},
    draft::{BatchInput, Drafter},
    model::{TileTable, tiles::Choice},
};

/// Time to read a key again, relative to a key from memory: a key of one request with several new tokens, and a key that
/// requests share. The latter are few and in L2: 9.2 TB/s on an H200 that reads memory at 4.5 TB/s (docs/notes/serving.md). The
/// former by 34 batches (docs/notes/pod.md).
const AGAIN: [f64; 2] = [0.8, 0.49];

/// Time of the decodes in the tiles of each configuration of the fused form, relative to their time in the tiles that
/// they have alone.
pub fn rereads(
    input: &BatchInput<'_>,
    drafter: &mut Drafter,
    options: &PlanOptions,
    rules: &Rules,
    times: &mut Vec<f64>,
) {
    times.clear();
    let fused = &input.model.fused_tiles;
    for (index, tiles) in fused.iter().enumerate() {
        // Most configurations have the decode kernel of another.
        let known = (fused[..index].iter()).position(|other| decodes(other) == decodes(tiles));
        times.push(match (known, tiles) {
            (Some(known), _) => times[known],
            (_, Some(tiles)) => {
                let keys = drafter.keys_again(input, tiles, options, rules);
                1.0 + AGAIN[0] * keys[0] + AGAIN[1] * keys[1]
            }
            (_, None) => 1.0,
        });
    }
}

fn decodes(tiles: &Option<TileTable>) -> Option<&[Choice]> {
    tiles.as_ref().map(TileTable::decodes)
}
