//! Units that synchronise at the same time have barriers of their own.

use super::*;

fn units_find_barriers_of_their_own<
    const DIM: u32,
    const ROWS: u32,
    const WARPS: u32,
    const CACHE: u32,
>() {
    let meeting = Layout::<DIM, ROWS, WARPS, CACHE>::meeting;
    // However much memory there is.
    for bytes in [227 << 10, 1 << 20] {
        let at_a_time = Layout::<DIM, ROWS, WARPS, CACHE>::AT_A_TIME;
        let apart = 2..at_a_time + Layout::<DIM, ROWS, WARPS, CACHE>::stages(bytes);
        for chunk in 0..64 {
            assert!((1..16).contains(&meeting(chunk, 0)));
            for apart in apart.clone() {
                assert_ne!(
                    meeting(chunk, 0),
                    meeting(chunk + apart, 0),
                    "{chunk} {apart}"
                );
            }
        }
    }
}

#[test]
fn units_that_meet_at_a_time_have_barriers_of_their_own() {
    units_find_barriers_of_their_own::<64, 8, 8, { cache::BITS16 }>();
    units_find_barriers_of_their_own::<64, 16, 8, { cache::BITS16 }>();
    units_find_barriers_of_their_own::<128, 8, 8, { cache::BITS16 }>();
    units_find_barriers_of_their_own::<128, 16, 8, { cache::BITS16 }>();
    units_find_barriers_of_their_own::<256, 8, 4, { cache::BITS16 }>();
    units_find_barriers_of_their_own::<256, 16, 4, { cache::BITS16 }>();
    units_find_barriers_of_their_own::<64, 8, 8, { cache::BITS16_TURNED }>();
    units_find_barriers_of_their_own::<128, 16, 8, { cache::BITS16_TURNED }>();
}
