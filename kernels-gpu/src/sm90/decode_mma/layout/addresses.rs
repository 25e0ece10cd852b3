//! The addresses of everything in shared memory, and the initialisation of the barriers.

use core::ops::Range;

use cuda_std::{fence, mbarrier, shared, thread};

use super::{BARRIERS, IDS, Layout, PAIR, SLOT_BARRIERS, loaders};
use crate::common::cache;

impl<const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32>
    Layout<DIM, ROWS, WARPS, CACHE>
{
    /// The dynamic shared memory of this CTA.
    #[inline(always)]
    pub fn new(stages: u32) -> Self {
        Self {
            base: shared::dynamic_shared_address(),
            stages,
        }
    }

    /// The keys of a stage; the values follow.
    #[inline(always)]
    pub fn stage(&self, index: u32) -> u32 {
        self.base + index * Self::STAGE
    }

    #[inline(always)]
    fn units(&self) -> u32 {
        self.base + self.stages * Self::STAGE
    }

    /// The queries of a unit: `ROWS` dense rows.
    #[inline(always)]
    pub fn queries(&self, slot: u32) -> u32 {
        self.units() + slot * Self::UNIT
    }

    /// The [`QueryRow`](crate::abi::QueryRow) of one of a unit's tokens.
    #[inline(always)]
    pub fn token(&self, slot: u32, token: u32) -> u32 {
        self.queries(slot) + Self::QUERIES + token * 16
    }

    /// The page ids of a unit's first [`IDS`] pieces.
    #[inline(always)]
    pub fn ids(&self, slot: u32) -> u32 {
        self.token(slot, ROWS)
    }

    /// The [`Unit`](super::super::unit::Unit) of a slot.
    #[inline(always)]
    pub fn unit(&self, slot: u32) -> u32 {
        self.ids(slot) + IDS * 4
    }

    #[inline(always)]
    fn states(&self) -> u32 {
        self.units() + Self::UNITS * Self::UNIT
    }

    /// The output of a warp's state: [`Self::OWN_ROWS`] rows of f32, [`Self::PITCH`] apart.
    #[inline(always)]
    pub fn state_out(&self, warp: u32) -> u32 {
        self.states() + warp * Self::STATE
    }

    /// The LSEs of a warp's state, base 2.
    #[inline(always)]
    pub fn state_lse(&self, warp: u32) -> u32 {
        self.state_out(warp) + Self::OWN_ROWS * Self::PITCH * 4
    }

    /// Sines and cosines of a chunk's keys, and angles: see `common::decode::turn`.
    #[inline(always)]
    pub fn turning(&self) -> u32 {
        self.states() + WARPS * Self::STATE
    }

    /// The scales of a stage's keys, one per key and KV head; those of the values follow.
    #[inline(always)]
    pub fn scales(&self, stage: u32) -> u32 {
        self.turning() + Self::TURNING + stage * Self::SCALES
    }

    /// The [`Descriptor`](super::super::unit::Descriptor) of a stage.
    #[inline(always)]
    pub fn descriptor(&self, stage: u32) -> u32 {
        self.scales(self.stages) + stage * 16
    }

    /// Completes when all barriers are initialised.
    #[inline(always)]
    pub fn started(&self) -> u32 {
        self.descriptor(self.stages)
    }

    /// Completes when the chunk is loaded.
    #[inline(always)]
    pub fn stage_full(&self, stage: u32) -> u32 {
        self.started() + 8 + stage * PAIR
    }

    /// Completes when every lane of the warps that use the chunk has arrived.
    #[inline(always)]
    pub fn stage_empty(&self, stage: u32) -> u32 {
        self.stage_full(stage) + 8
    }

    /// Completes when the scheduler has described the slot's unit.
    #[inline(always)]
    pub fn unit_listed(&self, slot: u32) -> u32 {
        self.stage_full(self.stages) + slot * SLOT_BARRIERS
    }

    /// Completes when the unit's queries are loaded.
    #[inline(always)]
    pub fn unit_full(&self, slot: u32) -> u32 {
        self.unit_listed(slot) + 8
    }

    /// Completes when the loads of all but the unit's last [`known_ahead`](super::known_ahead) chunks are issued.
    #[inline(always)]
    pub fn unit_ending(&self, slot: u32) -> u32 {
        self.unit_listed(slot) + 16
    }

    /// Completes when the unit is finished and no loader reads the slot any more; every lane of consumers and loaders
    /// arrives.
    #[inline(always)]
    pub fn unit_empty(&self, slot: u32) -> u32 {
        self.unit_listed(slot) + 24
    }

    /// The barriers that the first loads need: [`started`](Self::started), those of the stages and of the first slot.
    #[inline(always)]
    pub fn first_barriers(&self) -> Range<u32> {
        0..1 + 2 * self.stages + BARRIERS
    }

    /// All other barriers.
    #[inline(always)]
    pub fn other_barriers(&self) -> Range<u32> {
        self.first_barriers().end..1 + 2 * self.stages + BARRIERS * Self::UNITS
    }

    /// Initialises a range of mbarriers and, with the first range, the list of merges. One `mbarrier.init` takes about
    /// 60 cycles, and the lanes of a warp execute it one by one, so `warps` warps share the work; `warp` is this one's
    /// index.
    ///
    /// If keys are loaded `by_rows`, the lanes of a loader arrive for their own copies.
    ///
    /// # Safety
    /// All threads of those warps call this once for each range, and then reach a barrier of the CTA.
    #[inline(always)]
    pub unsafe fn initialise(&self, barriers: Range<u32>, [warp, warps]: [u32; 2], by_rows: bool) {
        let lane = thread::thread_idx_x() % 32;
        let stages = 1 + 2 * self.stages;
        let mut barrier = barriers.start + warp + lane * warps;
        // SAFETY: the barriers are adjacent, and nobody uses them yet.
        unsafe {
            while barrier < barriers.end {
                // `listed`, `full` and `ending` take one arrival, plus one per lane where lanes arrive for their own
                // `cp.async`. `empty` takes one per lane of each warp that reads. (The count is a sum because the
                // compiler turns a `match` into a table in global memory, whose latency is high.)
                let of_slot = (barrier - stages.min(barrier)) % BARRIERS;
                let (in_stages, in_slots) = (barrier > 0 && barrier < stages, barrier >= stages);
                let arrivals = 1
                    + (warps * 32 - 1) * (barrier == 0) as u32
                    + (32 * Self::PER_CHUNK - 1) * (in_stages && barrier % 2 == 0) as u32
                    + 32 * ((cache::by_token(CACHE) || by_rows) && in_stages && barrier % 2 == 1)
                        as u32
                    + 32 * (in_slots && of_slot == 0) as u32
                    + ((WARPS + loaders(DIM, WARPS, CACHE)) * 32 - 1)
                        * (in_slots && of_slot == 3) as u32;
                mbarrier::init(self.started() + barrier * 8, arrivals);
                barrier += warps * 32;
            }
            if barriers.start == 0 && warp == 0 && lane == 0 {
                shared::store_u32(self.merges(), 0);
            }
        }
        fence::mbarrier_init();
    }

    /// The number of deferred merges.
    #[inline(always)]
    pub fn merges(&self) -> u32 {
        (self.unit_listed(Self::UNITS) + 15) & !15
    }

    /// A deferred merge.
    #[inline(always)]
    pub fn merge(&self, index: u32) -> u32 {
        self.merges() + 16 + index * 16
    }
}
