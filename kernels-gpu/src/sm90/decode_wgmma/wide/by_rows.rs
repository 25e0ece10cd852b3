//! The loaders of keys and values for pools that no tensor map describes: [one by one](crate::sm90::by_rows).
//!
//! The keys of a unit are runs of pieces here, too, of 8 keys each, whatever the pages. The copies arrive at the block's
//! barrier by themselves. Keys outside of the unit are copies of its first key, so that no value has to be zeroed.

use cuda_std::{async_copy, mbarrier, misc, warp};

use super::{
    super::super::{
        by_rows::{Column, KEYS, Rows, place},
        pipeline::Pipeline,
    },
    PREFETCH_DISTANCE,
    masks::Mode,
    runs::{TOKENS, Walk},
    scales,
    shared::{Shared, Unit},
};
use crate::{
    abi::{DecodeParams, WorkItem},
    common::{cache, policy::Policies, variant::Variant},
};

/// Steps of [`KEYS`] keys whose page ids are looked up ahead. More would take too many registers.
const AHEAD: usize = 2;

/// The page of a lane's key, and its token there. The unit may have no such key.
#[derive(Clone, Copy)]
struct Key {
    page: u32,
    token: u32,
}

impl Key {
    const NONE: Self = Self {
        page: 0,
        token: u32::MAX,
    };

    #[inline(always)]
    const fn exists(self) -> bool {
        self.token != Self::NONE.token
    }

    /// Finds a key of the unit, which is in run `run` or a later one.
    ///
    /// # Safety
    /// The unit is written in the slot, and has the run.
    #[inline(always)]
    unsafe fn find(
        p: &DecodeParams,
        run: &mut u32,
        s: Shared,
        slot: u32,
        unit: &Unit,
        key: u32,
    ) -> Self {
        // SAFETY: the caller's promise; the run has the key.
        unsafe {
            // The run is read again each time: it would take eight registers.
            let mut walk = Walk::resume(s, slot, *run);
            let piece = walk.seek(s, slot, unit, key / TOKENS, TOKENS);
            *run = walk.index;
            let in_piece = key % TOKENS;
            match in_piece >= piece.first && in_piece < piece.past {
                true => Self::at(p, &walk, piece.at + in_piece),
                false => Self::NONE,
            }
        }
    }

    /// Finds the first key of the unit.
    ///
    /// # Safety
    /// The unit is written in the slot.
    #[inline(always)]
    unsafe fn find_first(p: &DecodeParams, s: Shared, slot: u32, unit: &Unit) -> Self {
        // SAFETY: the caller's promise; the run has the key.
        unsafe {
            let mut walk = Walk::resume(s, slot, 0);
            let piece = walk.seek(s, slot, unit, 0, TOKENS);
            match piece.first < piece.past {
                true => Self::at(p, &walk, piece.at + piece.first),
                false => Self::NONE,
            }
        }
    }

    /// # Safety
    /// The run has a key at this position.
    #[inline(always)]
    unsafe fn at(p: &DecodeParams, walk: &Walk, position: u32) -> Self {
        let (page, token) = p.page_size.div_rem(position);
        Self {
            // SAFETY: the caller's promise.
            page: unsafe { walk.page(p, page) },
            token,
        }
    }
}

/// Loads the blocks of all units: values or keys. The loader of keys also writes each stage's mask.
///
/// # Safety
/// A whole warp comes here; the barriers are initialised for copies by each lane.
#[inline(always)]
pub(super) unsafe fn load<V: Variant, const VALUES: bool, const STAGES: u32>(
    p: &DecodeParams,
    variant: &V,
    s: Shared,
) {
    let a = &p.attention;
    let (pool, strides) = match VALUES {
        true => (a.v, &p.v_vectors),
        false => (a.k, &p.k_vectors),
    };
    let lane = warp::lane_id();
    let keys = s.shape.keys;
    let rows = Rows {
        key: s.shape.row_bytes(),
        element: cache::bytes(s.shape.cache),
    };
    let own = rows.key_of(lane);
    let at_once = if keys < AHEAD as u32 * KEYS { 1 } else { AHEAD };
    // SAFETY: the launch's parameters are valid.
    let policies = unsafe { Policies::new(p.long, a.record) };
    let mut slots = Pipeline::<2>::CONSUMER;
    let mut blocks = Pipeline::<STAGES>::PRODUCER;
    let mut masks = 0;
    loop {
        // SAFETY: the full and free barriers order every access to a slot or stage; a whole warp; the runs of a unit have a
        // page for each of their keys.
        unsafe {
            mbarrier::wait(s.unit_full(slots.stage), slots.parity);
            let slot = slots.stage;
            let unit = Unit::load(s.unit(slot));
            if unit.tokens == 0 {
                return;
            }
            // The runs of the keys whose pages are looked up, and of those whose masks are written.
            let (mut ahead, mut masked_run) = (0, 0);
            // All lanes find the unit's first key.
            let first = Key::find_first(p, s, slot, &unit);
            let any = first.exists();
            let first_place = place(strides, first.page, first.token, unit.head);
            let column = Column::new(p, rows, lane, any);
            let source = pool + u64::from(column.from);
            let mut next = [Key::NONE; AHEAD];
            let mut i = 0;
            while i < at_once {
                let key = i as u32 * KEYS + own;
                next[i] = Key::find(p, &mut ahead, s, slot, &unit, key);
                i += 1;
            }
            let mut block = 0;
            while block < unit.blocks {
                if !VALUES && lane == 0 && block + PREFETCH_DISTANCE == unit.blocks {
                    mbarrier::arrive(s.near_end());
                }
                let (full, free, target) = match VALUES {
                    true => (
                        s.values_full(blocks.stage),
                        s.values_free(blocks.stage),
                        s.values(blocks.stage),
                    ),
                    false => (
                        s.keys_full(blocks.stage),
                        s.keys_free(blocks.stage),
                        s.keys(blocks.stage),
                    ),
                };
                let mask = match s.shape.converts() {
                    true => masks,
                    false => blocks.stage,
                };
                masks = s.shape.next_mask(masks);
                let flags = Walk::resume(s, slot, ahead).run.flags;
                let policy = policies.of(flags & WorkItem::SHARED_KEYS != 0);
                mbarrier::wait(free, blocks.parity);
                let mut first = 0;
                // Opaque, so that the loop is not unrolled.
                while misc::opaque(first) < keys {
                    i = 0;
                    while i < at_once {
                        let first = first + i as u32 * KEYS;
                        let found = next[i];
                        let place = match found.exists() {
                            true => place(strides, found.page, found.token, unit.head),
                            false => first_place,
                        };
                        let key = block * keys + first + at_once as u32 * KEYS + own;
                        next[i] = Key::find(p, &mut ahead, s, slot, &unit, key);
                        column.copy([source], [place], [target + first * rows.key], policy);
                        if !VALUES && cache::by_token(s.shape.cache) {
                            let of = found.exists();
                            let of = of.then_some([found.page, found.token, unit.head]);
                            scales::load_one(p, s, s.token_scales(mask), first + own, of);
                        }
                        i += 1;
                    }
                    first += at_once as u32 * KEYS;
                }
                async_copy::mbarrier_arrive(full);
                if !VALUES {
                    // Read again, because it would take registers in the loop over keys.
                    let unit = Unit::load(s.unit(slot));
                    let (_, least) = variant.visible_keys(unit.position);
                    let least = a.seen_by_all(least, unit.position);
                    let windowed = variant.params().window_left != i32::MAX;
                    let (mask, mine) = (s.mask(mask), lane < keys / TOKENS);
                    let mut walk = Walk::resume(s, slot, masked_run);
                    let piece = walk.seek(s, slot, &unit, block * (keys / TOKENS) + lane, TOKENS);
                    masked_run = walk.index;
                    let masked = match mine {
                        true => walk.mode(piece, TOKENS, s.shape.rows(), least, windowed),
                        false => Mode::NONE,
                    }
                    .store(mask);
                    // Otherwise consumers do not read the words.
                    if mine && (V::TRANSFORMS_LOGITS || V::MASKS || masked) {
                        walk.mask(piece, TOKENS, mask + 16 + lane * TOKENS);
                    }
                    mbarrier::arrive(full);
                }
                blocks.advance();
                block += 1;
            }
            mbarrier::arrive(s.unit_free(slot));
        }
        slots.advance();
    }
}
