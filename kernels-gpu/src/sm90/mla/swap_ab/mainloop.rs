//! The consumer warpgroups. Each computes the logits of every other block, and half of the columns of the outputs.

use cuda_std::{barrier, fence, math::fma, mbarrier, misc, shared, thread, warp, wgmma};

use super::{
    convert::{Power, scale_at},
    epilogue::finish,
    products::{Outputs, add, add_rope, load_rope, multiply},
    queries::bring,
    shared::Shared,
    weigh::{Sums, store_at, undo, weigh},
};
use crate::{
    abi::LatentParams,
    common::variant::Variant,
    sm90::{
        meet,
        mla::{
            config::{FEEDERS, VALUE_DIM},
            keys_656::{BLOCK, GROUPS, KEYS, PARTS, ROW_BYTES},
            load::Places as _,
            shared::{QueryPlace as _, Unit, Units as _},
            swapped::{
                BOTH, CONSUMER, Swapped as _, WEIGHTS_READY, adopt, adopt_sums, hide, renew, take,
            },
            visible::is_whole,
        },
        pipeline::Pipeline,
        uniform,
    },
};

/// Works through all units, as the consumer of half of the columns and the owner of every other block. Both consumers
/// run the same code: with a copy for each, 10 % of the time was stalls on instruction fetch.
///
/// # Safety
/// All warps of both consumers come here; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn consume<V: Variant, const STAGES: u32>(
    p: &LatentParams,
    variant: &V,
    s: Shared<STAGES>,
) {
    const { assert!(!V::TRANSFORMS_LOGITS && !V::MASKS && V::SOFTMAX) };
    let thread = thread::thread_idx_x() - FEEDERS;
    // SAFETY: whole warps here and in everything below.
    let (consumer, warp) = unsafe { (uniform(thread / 128), uniform(thread / 32 % 4)) };
    let thread = thread % 128;
    let scale = variant.params().scale_log2;
    let mut slots = Pipeline::<2>::CONSUMER;
    // Number of blocks of all previous units.
    let mut before = 0;
    // SAFETY: a whole warpgroup; the full and free barriers order every access to a place.
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
            bring(
                p,
                variant,
                s,
                slot,
                &unit,
                misc::opaque(4 * consumer + warp),
            );
            meet(BOTH, 8);
            let blocks = uniform(unit.blocks.div_ceil(PARTS));
            let mut o: Outputs = [[0.0; 32]; _];
            let mut sums: Sums = [0.0; 16];

            let mut block = consumer;
            if block >= blocks {
                mbarrier::arrive(s.queries_free());
            }
            // The last iteration may have only the other consumer's last block.
            while block < blocks + 1 {
                let number = misc::opaque(before + block);
                let mut grew = false;
                if block < blocks {
                    let (first_place, parity) = s.first_place(number);
                    let own_place = first_place + warp / 2;
                    mbarrier::wait(s.full(own_place), parity);
                    let lane = misc::opaque(warp::lane_id());
                    let in_block = warp * 16 + lane / 4;
                    let row = s.block(number) + in_block * ROW_BYTES;
                    let powers = [0, 8].map(|down| Power::of(row + down * ROW_BYTES));
                    let mut logits = [0.0; 32];
                    multiply(s, row, powers, &mut logits);
                    let rope = load_rope(row);
                    undo(s, powers, &mut logits);
                    wgmma::fence_operand(&mut logits);
                    add_rope(s, &rope, &mut logits);
                    if block > 0 {
                        take(s, consumer, &mut o, &mut sums);
                    }
                    wgmma::wait_group::<0>();
                    wgmma::fence_operand(&mut logits);
                    // Reloaded from shared memory for each block, to save registers.
                    let unit = Unit::load(s.unit(slot));
                    let begin = unit.first + block * BLOCK;
                    let there = shared::load_u32(s.there(own_place));
                    if there != u32::MAX || !is_whole(variant, &unit, begin as i32, BLOCK as i32) {
                        let there = there >> (in_block % KEYS);
                        let there = [there & 1 != 0, there >> 8 & 1 != 0];
                        hide(s, slot, begin + in_block, there, &mut logits);
                    }
                    if block + 2 >= blocks {
                        mbarrier::arrive(s.queries_free());
                    }
                    // Each of four lanes stores the scales of one group.
                    let mut h = 0;
                    while h < 2 {
                        let down = 8 * h as u32;
                        let scale = powers[h].scale(row + down * ROW_BYTES, lane % 4);
                        let at = scale_at(lane % 4, in_block + down);
                        shared::store_u16(s.scales(number) + at, scale as u16);
                        h += 1;
                    }
                    let sums_before = sums;
                    let target = store_at(s.weights(number), misc::opaque(warp));
                    let over = weigh(s, slot, powers, &logits, scale, &mut sums, target);
                    let over = warp::warp_vote_any(warp::FULL_MASK, over);
                    // Stored before this consumer's barrier: racecheck cannot follow stores between this barrier and
                    // the next.
                    if lane == 0 {
                        shared::store_u32(s.grew(consumer) + warp * 4, u32::from(over));
                    }
                    fence::proxy_async_shared();
                    grew = barrier::bar_any(CONSUMER + consumer, 128, over);
                    if grew {
                        let barrier = CONSUMER + consumer;
                        let logs = powers.map(Power::log);
                        let log = |logit, h: usize| fma(logit, scale, logs[h]);
                        renew(s, consumer, slot, &logits, log, thread, barrier);
                        sums = sums_before;
                        adopt_sums(s, consumer, &mut sums);
                        let _ = weigh(s, slot, powers, &logits, scale, &mut sums, target);
                        fence::proxy_async_shared();
                        barrier::bar_sync(barrier, 128);
                    }
                    barrier::bar_arrive(WEIGHTS_READY + consumer, 256);
                } else {
                    take(s, consumer, &mut o, &mut sums);
                }
                // P·V of the other consumer's block and of this one, for this consumer's columns. No wait for the keys:
                // the owner's warps have waited for them, and then at a barrier.
                let mut multiplied = block.max(1) - 1;
                while multiplied < blocks && multiplied <= block {
                    if multiplied == block && grew {
                        adopt(s, consumer, &mut o);
                    }
                    let number = misc::opaque(before + multiplied);
                    let lane = misc::opaque(warp::lane_id());
                    let column = consumer * (VALUE_DIM / 2) + warp * 16;
                    let values = s.block(number) + lane * ROW_BYTES + column;
                    let group = scale_at(consumer * (GROUPS / 2), 0);
                    let scales = s.scales(number) + group + lane % 4 * 32;
                    // Each lane has read keys and arrives for itself.
                    let (first, _) = s.first_place(number);
                    let read = |part: u32| mbarrier::arrive(s.free(first + part));
                    add(&mut o, values, scales, s.weights(number), read);
                    multiplied += 1;
                }
                block += 2;
            }
            finish(p, s, consumer, slot, thread, &o, &sums, CONSUMER + consumer);
            mbarrier::arrive(s.unit_free(slot));
            slots.advance();
            before += blocks;
        }
    }
}
