//! The producers' view of the work: units claimed by a ticket counter, and the description of a unit.

use cuda_std::{
    atomic::{self, Gpu, Relaxed},
    ptr, thread, warp,
};

use crate::{
    abi::{AttentionParams, DIRECT, NO_MERGE, QueryRow, WorkItem},
    common::divisor::Divisor,
};

const ALL: u32 = warp::FULL_MASK;

/// Claims runs of units. The first run of a CTA is known without a claim.
pub struct Claims {
    ticket: *mut u32,
    run: u32,
    units: u32,
    runs: u32,
    ctas: u32,
}

impl Claims {
    /// For this launch: `ctas` CTAs claim `run` units at a time.
    #[inline(always)]
    pub fn new(params: &AttentionParams, run: u32, ctas: u32) -> Self {
        Self {
            ticket: params.ticket as *mut u32,
            run,
            units: params.units,
            runs: cuda_std::math::div_u32(params.units + run - 1, run),
            ctas,
        }
    }

    /// Whether there are more runs than CTAs. Each CTA starts with one run without claiming it.
    #[inline(always)]
    #[must_use]
    pub const fn any_left(&self) -> bool {
        self.runs > self.ctas
    }

    /// Units of the run that begins at `first`.
    #[inline(always)]
    pub fn length(&self, first: u32) -> u32 {
        self.units.saturating_sub(first).min(self.run)
    }

    /// Issues the claim of the next run; [`answer`](Self::answer) waits for it. Each CTA claims until it gets a run
    /// past the end, and then stops.
    ///
    /// # Safety
    /// The ticket counter is the launch's own.
    #[inline(always)]
    pub unsafe fn ask(&self, lane: u32) -> u32 {
        if lane == 0 {
            // SAFETY: the caller's promise.
            unsafe { atomic::fetch_add::<Relaxed, Gpu, u32>(self.ticket, 1) }
        } else {
            0
        }
    }

    /// The first unit of the run claimed by [`ask`](Self::ask), in all lanes.
    ///
    /// # Safety
    /// The lanes come together, each with the result of [`ask`](Self::ask).
    #[inline(always)]
    pub unsafe fn answer(&self, lane: u32, before: u32) -> u32 {
        // SAFETY: the caller's promise; after the last claim, nobody else accesses the ticket counter.
        unsafe {
            // The launch makes `runs` claims in all; the last one resets the counter.
            if lane == 0 && before + 1 == self.runs {
                atomic::store::<Relaxed, Gpu, u32>(self.ticket, 0);
            }
            (self.ctas + warp::warp_shuffle_idx(ALL, before, 0, 32)) * self.run
        }
    }
}

impl QueryRow {
    /// The row with these words in memory.
    #[inline(always)]
    pub(crate) const fn from_words([token, position, slot, merge]: [u32; 4]) -> Self {
        Self {
            token,
            position: position as i32,
            slot,
            merge,
        }
    }

    /// Its words in memory.
    #[inline(always)]
    pub(crate) const fn words(self) -> [u32; 4] {
        [self.token, self.position as u32, self.slot, self.merge]
    }
}

/// A unit of the plan, in the registers of one lane or, broadcast, of all.
#[derive(Clone, Copy)]
pub struct Header {
    /// The item.
    pub item: WorkItem,
    /// The KV head.
    pub head: u32,
}

impl Header {
    /// No unit.
    pub const EMPTY: Self = Self {
        item: WorkItem {
            rows_begin: 0,
            rows: 0,
            table: 0,
            kv_begin: 0,
            kv_end: 0,
            position: 0,
            slot: 0,
            merge: 0,
            flags: 0,
            part: 0,
        },
        head: 0,
    };

    /// Loads the first unit of this CTA, if it has one. That needs no barrier, and takes as long as the initialisation of
    /// mbarriers: kernels begin with it.
    ///
    /// # Safety
    /// The launch's parameters are valid.
    #[inline(always)]
    pub unsafe fn first(params: &AttentionParams, kv_heads: Divisor) -> Self {
        let unit = thread::block_idx_x();
        // SAFETY: the caller's promise; the unit exists.
        unsafe {
            let params = params.of_this_plan();
            match unit < params.units {
                true => Self::load(&params, kv_heads, unit),
                false => Self::EMPTY,
            }
        }
    }

    /// Loads unit `unit`.
    ///
    /// # Safety
    /// `unit` is below `params.units`.
    #[inline(always)]
    pub unsafe fn load(params: &AttentionParams, kv_heads: Divisor, unit: u32) -> Self {
        let (index, head) = kv_heads.div_rem(unit);
        let address =
            (params.items + u64::from(index) * size_of::<WorkItem>() as u64) as *const u32;
        // SAFETY: an item is 40 bytes, aligned to 8.
        let item = unsafe {
            let [rows_begin, rows] = ptr::load_nc_u32x2(address);
            let [table, kv_begin] = ptr::load_nc_u32x2(address.add(2));
            let [kv_end, position] = ptr::load_nc_u32x2(address.add(4));
            let [slot, merge] = ptr::load_nc_u32x2(address.add(6));
            let [flags, part] = ptr::load_nc_u32x2(address.add(8));
            WorkItem {
                rows_begin,
                rows,
                table,
                kv_begin,
                kv_end,
                position: position as i32,
                slot,
                merge,
                flags,
                part,
            }
        };
        Self { item, head }
    }

    /// The query row of the unit's token `token`.
    ///
    /// # Safety
    /// `token` is below `item.rows`.
    #[inline(always)]
    pub unsafe fn load_row(&self, params: &AttentionParams, token: u32) -> QueryRow {
        let item = &self.item;
        if item.is_gathered() {
            let index = u64::from(item.rows_begin + token);
            // SAFETY: a row is 16 bytes, aligned.
            let words = unsafe { ptr::load_nc_u32x4((params.rows + index * 16) as *const u32) };
            QueryRow::from_words(words)
        } else {
            let offset = |first: u32, none: u32| if first == none { none } else { first + token };
            QueryRow {
                token: item.rows_begin + token,
                position: item.position + token as i32,
                slot: offset(item.slot, DIRECT),
                merge: offset(item.merge, NO_MERGE),
            }
        }
    }

    /// The header of lane `lane`; each lane may name a different one.
    ///
    /// # Safety
    /// The lanes come together.
    #[inline(always)]
    pub unsafe fn of_lane(&self, lane: u32) -> Self {
        // SAFETY: the caller's promise.
        let get = |value: u32| unsafe { warp::warp_shuffle_idx(ALL, value, lane, 32) };
        let WorkItem {
            rows_begin,
            rows,
            table,
            kv_begin,
            kv_end,
            position,
            slot,
            merge,
            flags,
            part,
        } = self.item;
        Self {
            item: WorkItem {
                rows_begin: get(rows_begin),
                rows: get(rows),
                table: get(table),
                kv_begin: get(kv_begin),
                kv_end: get(kv_end),
                position: get(position as u32) as i32,
                slot: get(slot),
                merge: get(merge),
                flags: get(flags),
                part: get(part),
            },
            head: get(self.head),
        }
    }
}
