//! What a launch works on: given by its parameters, or by a record in the workspace where the launch was
//! captured in a graph and serves one plan after the other.

use core::mem::offset_of;

use cuda_std::{
    atomic::{self, Gpu, Relaxed},
    ptr,
};

use crate::abi::{AttentionParams, ConvertParams, LaunchRecord, PrefillParams, WorkItem};

impl AttentionParams {
    /// The parameters with `items` and `units` of the plan that is in the workspace now. Only who claims
    /// units needs them.
    ///
    /// # Safety
    /// The record, if there is one, can be read.
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

    /// The next ticket: a CTA that has claimed a unit takes one, and works on the unit so many behind the first ones of
    /// all. Every unit takes one ticket, so the last one means that none will be asked for, and the counter is zero
    /// again.
    ///
    /// # Safety
    /// One thread for each unit that is claimed; the counter is this launch's.
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
}

impl ConvertParams {
    /// The launch's first entry of the list, and how many are its own: by its record, if it has one.
    ///
    /// # Safety
    /// The record, if there is one, can be read.
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
    /// KV heads that are together in the order of units: what the parameters say, or the record.
    ///
    /// # Safety
    /// The record, if there is one, can be read.
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

/// Whether the launch reads several times what L2 holds, as far as its parameters say: `long`, or the record.
///
/// # Safety
/// The record, if there is one, can be read.
#[inline(always)]
#[must_use]
pub unsafe fn is_long(long: u32, record: u64) -> bool {
    if record == 0 {
        return long != 0;
    }
    // SAFETY: the caller's promise; nobody writes it while kernels run.
    unsafe { ptr::load_nc_u32((record + 8) as *const u32) != 0 }
}

/// First entry of a record, and how many there are.
///
/// # Safety
/// It can be read.
#[inline(always)]
pub unsafe fn load(record: u64) -> [u32; 2] {
    const { assert!(size_of::<LaunchRecord>() == 32) };
    // SAFETY: the caller's promise; nobody writes it while kernels run.
    unsafe { ptr::load_nc_u32x2(record as *const u32) }
}
