//! Shared-memory addresses of units, rows, queries, keys, weights and mbarriers.

use super::config::{
    Offsets, ROWS_OF_TILE, SAID, STAGE_BARRIERS, TEAMS, THREADS, UNDER_WAY, WARPS, WEIGHTS_BYTES,
    WEIGHTS_OF_BLOCK,
};
use crate::sm90::{
    arrivals,
    mla::{
        config::Ring,
        keys_656::{GROUPS, KEYS, LOADERS, PARTS},
        load::Places,
        shared::Units,
    },
};

/// A lane's outputs: per 16 columns two fragments of 16 rows, one of the even and one of the odd columns.
pub(super) type Outputs = [[f32; 4]; 8];

/// Products of two rows and two keys over half of the columns, in fragment order.
#[derive(Clone, Copy)]
pub(super) struct Products {
    /// Per group of columns, without scales.
    pub columns: [[f32; 4]; GROUPS as usize / 2],
    pub rope: [f32; 4],
}

/// Named barriers of a team: all warps have stored their row maxima; the weights are stored.
pub(super) const SAID_ALL: u32 = 1;
pub(super) const WEIGHTS_READY: u32 = 1 + TEAMS;
/// Named barriers of each pair of warps: partial logits are exchanged.
pub(super) const PAIR: u32 = BOTH + 1;
/// Named barrier of both teams: for the sums, for the exchanged halves of rows, and for the next unit's queries.
pub(super) const BOTH: u32 = 1 + 2 * TEAMS;

/// Shared addresses, with `STAGES` places for 32 keys each.
#[derive(Clone, Copy)]
pub(super) struct Shared<const STAGES: u32> {
    pub base: u32,
}

impl<const STAGES: u32> Units for Shared<STAGES> {
    const KEYS: u32 = KEYS;
    const ROWS: u32 = ROWS_OF_TILE;
    const RING: Ring = Self::AT.ring;
    const STAGE_BARRIERS: u32 = STAGE_BARRIERS;
    #[inline(always)]
    fn base(self) -> u32 {
        self.base
    }
}

impl<const STAGES: u32> Places for Shared<STAGES> {
    const STAGES: u32 = STAGES;
    const FREED: u32 = PARTS;
    const UNDER_WAY: u32 = UNDER_WAY;
    const KEYS_AT: u32 = Self::AT.keys;
    const THERE_AT: u32 = Self::AT.there;
}

impl<const STAGES: u32> Shared<STAGES> {
    const AT: Offsets = Offsets::new(STAGES);

    /// A lane's part of the queries' first fragment; the others follow.
    #[inline(always)]
    pub fn queries(self, lane: u32) -> u32 {
        self.base + Self::AT.queries + lane * 16
    }
    /// The 64 weights, 16 bits each, of a row for a group of columns.
    #[inline(always)]
    pub fn weights(self, team: u32, group: u32, row: u32) -> u32 {
        let row = group * ROWS_OF_TILE + row;
        self.base + Self::AT.weights + team * 2 * WEIGHTS_OF_BLOCK + row * WEIGHTS_BYTES
    }
    /// Word `what` of [`SAID`] that each warp stores for a row. At the end of a unit word 0 is the warp's sum of
    /// weights.
    #[inline(always)]
    pub fn said(self, team: u32, row: u32, what: u32) -> u32 {
        let row = team * ROWS_OF_TILE + row;
        self.base + Self::AT.said + (row * SAID + what) * WARPS * 4
    }
    /// Log of the extra power of two in a row's weights, for each group.
    #[inline(always)]
    pub fn shifts(self, team: u32, row: u32) -> u32 {
        self.base + Self::AT.shifts + (team * ROWS_OF_TILE + row) * GROUPS * 4
    }
    /// The largest log of weight times scale in each group, as of the last renewal of the row's reference.
    #[inline(always)]
    pub fn tops(self, team: u32, row: u32) -> u32 {
        self.base + Self::AT.tops + (team * ROWS_OF_TILE + row) * GROUPS * 4
    }
    /// A row's reference, an unused word, and the first and last key that it sees. Keys are numbered over all units'
    /// blocks.
    #[inline(always)]
    pub fn state(self, team: u32, row: u32) -> u32 {
        self.base + Self::AT.states + (team * ROWS_OF_TILE + row) * 16
    }
    /// The inverse of the power of two by which a row's query was multiplied.
    #[inline(always)]
    pub fn inverse(self, row: u32) -> u32 {
        self.base + Self::AT.inverses + row * 4
    }

    /// Initialises the barriers.
    ///
    /// # Safety
    /// All threads of the CTA come here once, and then meet at a CTA-wide barrier.
    #[inline(always)]
    pub unsafe fn init(self) {
        // All lanes of the loaders and the teams.
        let all = (LOADERS + TEAMS * WARPS) * 32;
        // Full: the lanes of a loader. Free: the lanes of a team.
        let runs = [
            (2, 32),
            (4, all),
            (6, 32),
            (7, 1),
            (STAGE_BARRIERS + STAGES, 32),
        ];
        let arrivals = |index| arrivals(index, runs, WARPS * 32);
        let count = STAGE_BARRIERS + STAGES + STAGES / PARTS;
        // SAFETY: the caller's promise.
        unsafe { self.init_barriers(THREADS, count, arrivals) };
    }
}
