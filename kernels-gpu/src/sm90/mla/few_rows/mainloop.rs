//! The consumer warpgroups. Each computes the logits of every other block, and half of the columns of the outputs.

use cuda_std::{barrier, fence, mbarrier, shared, thread, warp, wgmma};

use super::{
    config::{GROUP_BYTES, KEYS, PART_SLABS, PARTS},
    epilogue::finish,
    products::{add, multiply},
    shared::Shared,
    weigh::weigh,
};
use crate::{
    abi::LatentParams,
    common::{half::Half, variant::Variant},
    sm90::{
        mla::{
            config::{FEEDERS, SLABS as HALF_SLABS},
            shared::{Parts as _, QueryPlace as _, Unit, Units as _},
            swapped::{
                CONSUMER, Outputs, Swapped as _, WEIGHTS_READY, adopt, adopt_sums, hide, renew,
                take,
            },
            visible::is_whole,
        },
        pipeline::Pipeline,
        uniform,
    },
};

/// Works through all units, as the consumer of half of the columns and the owner of every other block. `BY_ROWS`: keys were
/// copied one by one, with zeros outside of items. `PIECES`: units may be pieces of the same rows.
///
/// # Safety
/// All warps of both consumers come here; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn consume<
    T: Half,
    V: Variant,
    const ROWS: u32,
    const STAGES: u32,
    const N: usize,
    const H: usize,
    const BY_ROWS: bool,
    const PIECES: bool,
>(
    p: &LatentParams,
    variant: &V,
    s: Shared<ROWS, STAGES>,
) where
    [f32; N]: wgmma::Accumulator,
{
    const { assert!(!V::TRANSFORMS_LOGITS && !V::MASKS && V::SOFTMAX) };
    const {
        assert!(
            !PIECES || ROWS == 16,
            "a state has the order of registers for 16 rows"
        )
    };
    const { assert!(N as u32 == ROWS / 2 && H == N / 2 && HALF_SLABS[0] == 4) };
    let lane = warp::lane_id();
    let thread = thread::thread_idx_x() - FEEDERS;
    // SAFETY: whole warps here and in everything below.
    let (consumer, warp) = unsafe { (uniform(thread / 128), uniform(thread / 32 % 4)) };
    let thread = thread % 128;
    let own_barrier = CONSUMER + consumer;
    let scale = variant.params().scale_log2;
    let mut slots = Pipeline::<2>::CONSUMER;
    // Number of blocks of all previous units.
    let mut before = 0;

    macro_rules! release {
        ($barrier:expr) => {
            if lane == 0 {
                mbarrier::arrive($barrier);
            }
        };
    }

    // SAFETY: a whole warpgroup; the full and free barriers order every access to a stage.
    unsafe {
        loop {
            let slot = slots.stage;
            mbarrier::wait(s.unit_full(slot), slots.parity);
            let unit = Unit::load(s.unit(slot));
            if unit.tokens == 0 {
                return;
            }
            mbarrier::wait(s.rows_full(slot), slots.parity);
            // One phase per unit, so its parity is that of the unit's slot.
            mbarrier::wait(s.queries_full(), slot);
            let blocks = uniform(unit.blocks);
            let mut o: Outputs<N> = [[0.0; N]; _];
            let mut sums = [0.0; H];
            let mut logits = [0.0; N];

            if consumer >= blocks {
                release!(s.queries_free());
            }
            let mut block = 0;
            while block < blocks {
                let number = before + block;
                if block % 2 == consumer {
                    multiply::<T, _, _, _, BY_ROWS>(s, number, &mut logits);
                    wgmma::wait_group::<0>();
                    wgmma::fence_operand(&mut logits);
                    if block + 2 >= blocks {
                        release!(s.queries_free());
                    }
                    // Reloaded from shared memory for each block, to save registers.
                    let unit = Unit::load(s.unit(slot));
                    let begin = unit.first + block * KEYS;
                    let whole = is_whole(variant, &unit, begin as i32, KEYS as i32);
                    if !whole {
                        let first = begin + warp * 16 + lane / 4;
                        hide(s, slot, first, [true; 2], &mut logits);
                    }
                    let sums_before = sums;
                    let weights = s.weights(number);
                    let over =
                        weigh::<T, _, _, _, _>(s, slot, &logits, scale, &mut sums, weights, warp);
                    let over = warp::warp_vote_any(warp::FULL_MASK, over);
                    // Stored before this consumer's barrier: racecheck cannot follow stores between this barrier and
                    // the next.
                    if lane == 0 {
                        shared::store_u32(s.grew(consumer) + warp * 4, u32::from(over));
                    }
                    fence::proxy_async_shared();
                    let grew = barrier::bar_any(own_barrier, 128, over);
                    if grew {
                        let log = |logit: f32, _| logit * scale;
                        renew(s, consumer, slot, &logits, log, thread, own_barrier);
                        sums = sums_before;
                        adopt_sums(s, consumer, &mut sums);
                        adopt(s, consumer, &mut o);
                        let _ = weigh::<T, _, _, _, _>(
                            s, slot, &logits, scale, &mut sums, weights, warp,
                        );
                        fence::proxy_async_shared();
                        barrier::bar_sync(own_barrier, 128);
                    }
                    if !whole && !BY_ROWS {
                        // All warps have multiplied the keys.
                        let unit = Unit::load(s.unit(slot));
                        clear(s, number, thread, &unit, begin);
                        fence::proxy_async_shared();
                        barrier::bar_sync(own_barrier, 128);
                    }
                    barrier::bar_arrive(WEIGHTS_READY + consumer, 256);
                } else {
                    take(s, consumer, &mut o, &mut sums);
                }
                // P·V of the block for this consumer's columns. No wait for the keys: the owner's warps have waited for
                // them, and then at a barrier.
                add::<T, _, _, _>(s, number, consumer, &mut o);
                wgmma::wait_group::<0>();
                for of_tile in &mut o {
                    wgmma::fence_operand(of_tile);
                }
                let mut part = 0;
                while part < PARTS {
                    release!(s.free(s.stage(number, part).0));
                    part += 1;
                }
                block += 1;
            }
            finish::<T, _, _, _, _, PIECES>(
                p,
                s,
                consumer,
                slot,
                thread,
                &mut o,
                &sums,
                own_barrier,
            );
            mbarrier::arrive(s.unit_free(slot));
            slots.advance();
            before += blocks;
        }
    }
}

/// Zeroes the values of keys outside the item: they may be anything, and 0 · NaN is NaN.
#[inline(always)]
unsafe fn clear<const ROWS: u32, const STAGES: u32>(
    s: Shared<ROWS, STAGES>,
    number: u32,
    thread: u32,
    unit: &Unit,
    begin: u32,
) {
    let vector = thread % 8;
    let mut key = thread / 8;
    while key < KEYS {
        if begin + key < unit.kv_begin || begin + key >= unit.kv_end {
            let mut part = 0;
            while part < PARTS {
                let keys = s.keys(s.stage(number, part).0);
                let row = keys + key / 8 * GROUP_BYTES + key % 8 * 128 + vector * 16;
                let mut slab = 0;
                while slab < PART_SLABS {
                    // SAFETY: only this consumer writes the block. The swizzle only permutes chunks of a zeroed row.
                    unsafe { shared::store_u32x4(row + slab * 1024, [0; 4]) };
                    slab += 1;
                }
                part += 1;
            }
        }
        key += 16;
    }
}
