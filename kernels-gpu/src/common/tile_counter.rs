//! The units of a launch, and the counter by which CTAs claim them. A launch gets its extent from its parameters or, if
//! it was captured in a graph and serves many plans, from a record in the workspace.

use core::mem::offset_of;

use cuda_std::{
    atomic::{self, Gpu, Relaxed},
    ptr, warp,
};

use crate::abi::{AttentionParams, ConvertParams, LaunchRecord, PrefillParams, WorkItem};

impl AttentionParams {
    /// The parameters with `items` and `units` of the plan that is now in the workspace. Only code that claims units
    /// needs them.
    ///
    /// # Safety
    /// The record, if there is one, is readable.
    #[inline(always)]
    #[must_use]
    pub unsafe fn of_this_plan(&self) -> Self {
        let mut params = *self;
        if self.record != 0 {
            // SAFETY: the caller's promise.
            let [first, items] = unsafe { load(self.record) };
            params.items += u64::from(first) * size_of::<WorkItem>() as u64;
            params.units *= items;
        }
        params
    }

    /// Takes the next ticket. Every CTA starts with the unit of its own index; ticket `t` is then unit `CTAs + t`. One
    /// ticket is taken per unit, so whoever gets the last ticket resets the counter to zero for the next launch.
    ///
    /// # Safety
    /// One thread calls this per claimed unit; the counter is this launch's.
    #[inline(always)]
    #[must_use]
    pub unsafe fn ticket(&self) -> u32 {
        // SAFETY: the caller's promise.
        unsafe {
            let ticket = atomic::fetch_add::<Relaxed, Gpu, _>(self.ticket as *mut u32, 1);
            if ticket == self.units - 1 {
                ptr::store_u32(self.ticket as *mut u32, 0);
            }
            ticket
        }
    }

    /// Claims the next unit of a CTA, in all lanes of a warp. Each of the `ctas` CTAs starts with a unit without
    /// claiming it.
    ///
    /// # Safety
    /// As [`ticket`](Self::ticket)'s; the lanes come together.
    #[inline(always)]
    #[must_use]
    pub unsafe fn next_unit(&self, lane: u32, ctas: u32) -> u32 {
        // SAFETY: the caller's promise.
        unsafe {
            let ticket = if lane == 0 { self.ticket() } else { 0 };
            ctas + warp::warp_shuffle_idx(warp::FULL_MASK, ticket, 0, 32)
        }
    }
}

impl ConvertParams {
    /// The launch's first entry of the list, and the number of its entries; from the record, if there is one.
    ///
    /// # Safety
    /// The record, if there is one, is readable.
    #[inline(always)]
    #[must_use]
    pub unsafe fn of_this_plan(&self, record: u64) -> [u32; 2] {
        if record == 0 {
            return [self.first_page, self.pages];
        }
        let at = record + offset_of!(LaunchRecord, first_page) as u64;
        // SAFETY: the caller's promise; nobody writes it while kernels run.
        unsafe { [at, at + 4].map(|at| ptr::load_nc_u32(at as *const u32)) }
    }
}

impl PrefillParams {
    /// The number of KV heads that are processed together in the order of units, from the parameters or the record.
    ///
    /// # Safety
    /// The record, if there is one, is readable.
    #[inline(always)]
    #[must_use]
    pub unsafe fn heads_together(&self, a: &AttentionParams) -> u32 {
        let mut together = self.kv_heads_together;
        if a.record != 0 {
            let at = a.record + offset_of!(LaunchRecord, kv_heads_together) as u64;
            // SAFETY: the caller's promise; nobody writes it while kernels run.
            together = unsafe { ptr::load_nc_u32(at as *const u32) };
        }
        if together == 0 { a.kv_heads } else { together }
    }
}

/// Whether the launch reads several times the capacity of L2: `long`, or the record's word.
///
/// # Safety
/// The record, if there is one, is readable.
#[inline(always)]
#[must_use]
pub unsafe fn is_long(long: u32, record: u64) -> bool {
    if record == 0 {
        return long != 0;
    }
    // SAFETY: the caller's promise; nobody writes it while kernels run.
    unsafe { ptr::load_nc_u32((record + 8) as *const u32) != 0 }
}

/// The first item and the number of items of a record.
///
/// # Safety
/// The record is readable.
#[inline(always)]
pub unsafe fn load(record: u64) -> [u32; 2] {
    const { assert!(size_of::<LaunchRecord>() == 32) };
    // SAFETY: the caller's promise; nobody writes it while kernels run.
    unsafe { ptr::load_nc_u32x2(record as *const u32) }
}
