//! Loads of keys and values one by one ([`by_rows`](crate::sm90::by_rows)). The copies arrive at the stage's barrier by
//! themselves, so that nobody waits for them.

use cuda_std::{async_copy, mbarrier, misc, ptr};

use super::{
    super::{
        by_rows::{Column, Rows, place},
        pipeline::LaunchPipeline,
    },
    layout::{KEYS, Layout},
    load::Loader,
    unit::{Descriptor, Seen, Unit},
};
use crate::common::cache;

/// Chunks of a loader whose page ids are looked up together, while those before are loaded: under load, an id takes longer
/// than a chunk.
const LOOKED_UP: usize = 4;

impl<const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32>
    Loader<'_, DIM, ROWS, WARPS, CACHE>
{
    const ROWS_OF_KEYS: Rows = Rows {
        key: Layout::<DIM, ROWS, WARPS, CACHE>::KEY_BYTES,
        element: cache::bytes(CACHE),
    };

    /// Whether keys are loaded one by one. Kernels that read two KV heads at a time have tensor maps.
    #[inline(always)]
    pub(super) const fn loads_rows(&self) -> bool {
        cache::kv_heads(CACHE) == 1 && self.p.loads_rows()
    }

    /// Page ids of the lane's keys in this loader's chunks from `chunk` on. Keys outside of the unit have those of its
    /// first or last one.
    ///
    /// # Safety
    /// The unit's table has a page for each key.
    #[inline(always)]
    unsafe fn pages_of_keys(&self, unit: &Unit, chunk: u32) -> [u32; LOOKED_UP] {
        let p = self.p;
        let mut ids = [0; LOOKED_UP];
        let mut i = 0;
        while i < LOOKED_UP {
            let chunk = chunk + i as u32 * Self::LOADERS;
            if chunk < unit.chunks && unit.begin < unit.end {
                let page = unit.table + p.page_size.div(self.position(unit, chunk));
                // SAFETY: the caller's promise.
                ids[i] = unsafe {
                    ptr::load_nc_u32((p.attention.page_ids + u64::from(page) * 4) as *const u32)
                };
            }
            i += 1;
        }
        ids
    }

    /// Position of the lane's key of a chunk; outside of the unit, that of its first or last key.
    #[inline(always)]
    fn position(&self, unit: &Unit, chunk: u32) -> u32 {
        let position = unit.first_key() + chunk * KEYS + Self::ROWS_OF_KEYS.key_of(self.lane);
        position.max(unit.begin).min(unit.end.max(1) - 1)
    }

    /// Loads a unit's chunks from `chunk` on into the stages from `stages` on.
    ///
    /// # Safety
    /// The lanes come together; the unit is in the slot of `slots`, and its table has a page for each key.
    #[inline(always)]
    pub(super) unsafe fn load_by_rows(
        &self,
        unit: &Unit,
        slots: LaunchPipeline,
        seen: Seen,
        [mut chunk, ending]: [u32; 2],
        stages: &mut LaunchPipeline,
    ) {
        let (p, layout) = (self.p, self.layout);
        let column = Column::new(p, Self::ROWS_OF_KEYS, self.lane, unit.begin < unit.end);
        let pools = [p.attention.k, p.attention.v].map(|pool| pool + u64::from(column.from));
        let policy = self.policy(unit.flags);
        // SAFETY: the caller's promise; the stages' barriers order accesses with the consumers'.
        unsafe {
            let (mut ids, mut left) = ([0; LOOKED_UP], 0);
            let mut next = self.pages_of_keys(unit, chunk);
            while chunk < unit.chunks {
                // Opaque, so that the loop is not unrolled: that would take 1,800 instructions.
                if misc::opaque(left) == 0 {
                    (ids, left) = (next, LOOKED_UP as u32);
                    next = self.pages_of_keys(unit, chunk + LOOKED_UP as u32 * Self::LOADERS);
                }
                left -= 1;
                let page = ids[0];
                ids = [ids[1], ids[2], ids[3], 0];
                let (_, token) = p.page_size.div_rem(self.position(unit, chunk));
                let places =
                    [&p.k_vectors, &p.v_vectors].map(|of| place(of, page, token, unit.head));
                let first = unit.first_key() + chunk * KEYS;
                mbarrier::wait(layout.stage_empty(stages.stage), stages.parity ^ 1);
                let full = layout.stage_full(stages.stage);
                if self.lane == 0 {
                    Descriptor {
                        slot: slots.stage,
                        parity: slots.parity,
                        chunk,
                        first,
                        masked: seen.mask(first),
                        exit: false,
                    }
                    .store(layout.descriptor(stages.stage));
                    mbarrier::arrive(full);
                    if chunk == ending {
                        mbarrier::arrive(layout.unit_ending(slots.stage));
                    }
                }
                let target = layout.stage(stages.stage);
                let targets = [target, target + Layout::<DIM, ROWS, WARPS, CACHE>::CHUNK];
                column.copy(pools, places, targets, policy);
                if cache::by_token(CACHE) {
                    let key = Self::ROWS_OF_KEYS.key_of(self.lane);
                    let keys = [unit.begin, unit.end];
                    self.load_scales(stages.stage, [first, key], keys, page, unit.head);
                } else {
                    async_copy::mbarrier_arrive(full);
                }
                stages.advance_in(Self::LOADERS, layout.stages);
                chunk += Self::LOADERS;
            }
        }
    }
}
