//! Copies to a warp's shared memory: queries, and blocks of keys and values from their pages.

use cuda_std::{async_copy, prelude::*};

use super::{config::ROWS, shared::Shared, unit::Unit};
use crate::{
    abi::GatherDecodeParams,
    common::{cache, decode::KEYS},
};

const WARP: u32 = warp::FULL_MASK;

/// The most slabs of a row.
const SLABS: usize = 4;

/// Copies the queries of a unit as dense rows; rows that do not exist become zero.
///
/// # Safety
/// Whole warps; the unit's rows were read; no lane reads the memory of the queries meanwhile.
#[inline(always)]
pub(super) unsafe fn queries(p: &GatherDecodeParams, s: Shared, lane: u32, unit: &Unit) {
    let (a, head_dim) = (&p.attention, s.shape.head_dim);
    let vectors = head_dim / 8;
    let mut i = lane;
    while i < ROWS * vectors {
        let (row, vector) = (i / vectors, i % vectors);
        let exists = row < unit.tokens * a.group;
        let (token, in_group) = p.group.div_rem(if exists { row } else { 0 });
        // SAFETY: the row exists, or nothing is read.
        unsafe {
            let token = if exists {
                shared::load_u32(s.token(token))
            } else {
                0
            };
            let element = u64::from(token) * u64::from(a.q_token_stride)
                + u64::from((unit.head * a.group + in_group) * head_dim + vector * 8);
            async_copy::copy_cg_zfill(
                s.queries() + i * 16,
                (a.q + element * 2) as *const u8,
                if exists { 16 } else { 0 },
            );
        }
        i += 32;
    }
}

/// The place of a lane's key: its page, and the token in it.
#[derive(Clone, Copy)]
pub(super) struct Found {
    page: u32,
    in_page: u32,
}

impl Found {
    pub(super) const NOTHING: Self = Self {
        page: 0,
        in_page: 0,
    };
}

/// Looks up the lane's key of the chunk at `first`.
///
/// # Safety
/// The unit is the launch's.
#[inline(always)]
pub(super) unsafe fn look_up(p: &GatherDecodeParams, lane: u32, unit: &Unit, first: u32) -> Found {
    let position = first + lane;
    let mut found = Found::NOTHING;
    if position >= unit.begin && position < unit.end {
        let (page, in_page) = p.page_size.div_rem(position);
        let entry = (p.attention.page_ids + u64::from(unit.table + page) * 4) as *const u32;
        // SAFETY: the table has a page for each key of the item.
        found.page = unsafe { ptr::load_nc_u32(entry) };
        found.in_page = in_page;
    }
    found
}

/// Copies the scales of the lane's key of the chunk at `first`, and of its value, to `target`, where tokens have some.
///
/// # Safety
/// The key was looked up; no lane reads the scales meanwhile.
#[inline(always)]
pub(super) unsafe fn scales<const CACHE: u32>(
    p: &GatherDecodeParams,
    lane: u32,
    unit: &Unit,
    found: Found,
    first: u32,
    target: u32,
) {
    let position = first + lane;
    if cache::by_token(CACHE) && position >= unit.begin && position < unit.end {
        let [k, v] = (p.attention.scales).places(found.page, found.in_page, unit.head);
        let target = target + lane * 4;
        // SAFETY: the token has scales.
        unsafe {
            async_copy::copy_ca::<4>(target, k as *const u8);
            async_copy::copy_ca::<4>(target + KEYS * 4, v as *const u8);
        }
    }
}

/// Copies the rows of the chunk at `first`, values or keys, to `target`. Rows outside the unit become zero, whatever
/// the pool holds, and so do columns behind the end of a row.
///
/// # Safety
/// Whole warps; no lane reads the block meanwhile.
#[inline(always)]
pub(super) unsafe fn block<const VALUES: bool>(
    p: &GatherDecodeParams,
    s: Shared,
    lane: u32,
    unit: &Unit,
    found: Found,
    first: u32,
    target: u32,
    policy: u64,
) {
    let (pool, strides) = if VALUES {
        (p.attention.v, &p.v_vectors)
    } else {
        (p.attention.k, &p.k_vectors)
    };
    let row_bytes = s.shape.row_bytes();
    // A copy of the warp takes as many rows as the lanes cover; of longer rows it takes one slab each.
    let width = if row_bytes < 128 { row_bytes } else { 128 };
    let (lanes, rows) = (width / 16, 512 / width);
    let (row, vector) = (lane / lanes, lane % lanes);
    let place =
        found.page * strides.page + found.in_page * strides.token + unit.head * strides.head;
    let pool = pool + u64::from(vector) * 16;
    let (slabs, group) = (row_bytes / width, row_bytes * 8);
    // Which slabs have the lane's column. The row may be shorter than the kernel's.
    let (vectors, step) = (u32::from(p.vectors), u32::from(p.slab_step));
    let mut has = [false; SLABS];
    let mut slab = 0;
    while slab < slabs {
        has[slab as usize] = slab * step + vector < vectors;
        slab += 1;
    }
    let mut i = 0;
    while i < KEYS / rows {
        // SAFETY: rows of the unit are in the pool; for others nothing is read.
        unsafe {
            let at = warp::warp_shuffle_idx(WARP, place, rows * i + row, 32);
            let position = first + rows * i + row;
            let exists = position >= unit.begin && position < unit.end;
            let source = (pool + u64::from(at) * 16) as *const u8;
            let in_group = i * rows % 8 + row;
            let swizzle = in_group * width / 128;
            let target = target + i * rows / 8 * group + in_group * width + (vector ^ swizzle) * 16;
            let mut slab = 0;
            while slab < slabs {
                async_copy::copy_cg_hint_zfill(
                    target + slab * 1024,
                    source.add((slab * step * 16) as usize),
                    if exists && has[slab as usize] { 16 } else { 0 },
                    policy,
                );
                slab += 1;
            }
        }
        i += 1;
    }
}
