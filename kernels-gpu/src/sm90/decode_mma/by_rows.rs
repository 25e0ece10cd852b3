//! Loads of keys and values one by one, from pools that no tensor map describes: pages whose size is no multiple of 8, or
//! heads whose dimension is smaller than the kernel's.
//!
//! The lanes of a loader copy a chunk by `cp.async`, 16 bytes each, to where TMA would have put them. A lane has the same
//! place in every key. It knows one key's page, and the others get the address from it by a shuffle. The copies
//! arrive at the stage's barrier by themselves, so that nobody waits for them.

use cuda_std::{async_copy, mbarrier, misc, prelude::*};

use super::{
    layout::{KEYS, Layout},
    load::{Loader, Seen},
    place::Place,
    unit::{Descriptor, Unit},
};
use crate::{abi::KvStrides, common::cache};

const ALL: u32 = warp::FULL_MASK;

/// Chunks of a loader whose page ids are looked up together, while those before are loaded: under load, an id takes longer
/// than a chunk.
const LOOKED_UP: usize = 4;

/// Bytes of a copy.
const VECTOR: u32 = 16;

/// A lane's place in each key.
#[derive(Clone, Copy)]
struct Column {
    /// Addresses of the vector in the first key and in the first value of the pools.
    from: [u64; 2],
    /// Bytes to copy: 0 behind the head's columns, and of units without keys. Zeros are filled in there.
    valid: u32,
    /// The lane's first key of a chunk, and where its vector goes in a chunk.
    key: u32,
    to: u32,
}

impl<const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32>
    Loader<'_, DIM, ROWS, WARPS, CACHE>
{
    const KEY_BYTES: u32 = Layout::<DIM, ROWS, WARPS, CACHE>::KEY_BYTES;
    /// Vectors of a key.
    const VECTORS: u32 = Self::KEY_BYTES / VECTOR;
    /// Keys that a warp copies at once.
    const AT_ONCE: u32 = 32 / Self::VECTORS;
    /// Vectors of a slab of 64 elements.
    const SLAB: u32 = 64 * cache::bytes(CACHE) / VECTOR;
    /// Vectors of a line in shared memory: 128 bytes, or a whole key.
    const LINE: u32 = if Self::VECTORS < 8 { Self::VECTORS } else { 8 };

    /// Whether keys are loaded one by one. Kernels that read two KV heads at a time have tensor maps.
    #[inline(always)]
    pub(super) const fn loads_rows(&self) -> bool {
        cache::kv_heads(CACHE) == 1 && self.p.piece_tokens == 1
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
        let position = unit.first_key() + chunk * KEYS + self.lane;
        position.max(unit.begin).min(unit.end.max(1) - 1)
    }

    /// The lane's place, if there are `any` keys.
    #[inline(always)]
    fn column(&self, any: bool) -> Column {
        let (p, lane) = (self.p, self.lane);
        let (key, vector) = (lane / Self::VECTORS, lane % Self::VECTORS);
        let (slab, in_slab) = (vector / Self::SLAB, vector % Self::SLAB);
        let from = u64::from(slab * p.slab_step + in_slab) * u64::from(VECTOR);
        let valid = any && slab < p.slabs && in_slab < p.slab_vectors;
        let (line, in_line) = (vector / Self::LINE, vector % Self::LINE);
        // The swizzle of tensor maps: lines of 128 bytes by their place in a group of 8 keys, of 64 bytes by half of it.
        let swizzle = if Self::LINE == 8 { key } else { key / 2 };
        Column {
            from: [p.attention.k + from, p.attention.v + from],
            valid: if valid { VECTOR } else { 0 },
            key,
            to: (line * 8 + key) * Self::LINE * VECTOR + (in_line ^ swizzle % Self::LINE) * VECTOR,
        }
    }

    /// Loads a unit's chunks from `chunk` on into the stages from `stage` on.
    ///
    /// # Safety
    /// The lanes come together; the unit is in slot `slot`, and its table has a page for each key.
    #[inline(always)]
    pub(super) unsafe fn load_by_rows(
        &self,
        unit: &Unit,
        slot: Place,
        seen: Seen,
        [mut chunk, ending]: [u32; 2],
        stage: &mut Place,
    ) {
        let (p, layout) = (self.p, self.layout);
        let column = self.column(unit.begin < unit.end);
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
                let place = |strides: &KvStrides| {
                    page * strides.page + token * strides.token + unit.head * strides.head
                };
                let rows = [place(&p.k_vectors), place(&p.v_vectors)];
                let first = unit.first_key() + chunk * KEYS;
                mbarrier::wait(layout.stage_empty(stage.index), stage.parity ^ 1);
                let full = layout.stage_full(stage.index);
                if self.lane == 0 {
                    Descriptor {
                        slot: slot.index,
                        parity: slot.parity,
                        chunk,
                        first,
                        masked: seen.mask(first),
                        exit: false,
                    }
                    .store(layout.descriptor(stage.index));
                    mbarrier::arrive(full);
                    if chunk == ending {
                        mbarrier::arrive(layout.unit_ending(slot.index));
                    }
                }
                self.copy_chunk(&column, rows, layout.stage(stage.index), policy);
                if cache::by_token(CACHE) {
                    let keys = [unit.begin, unit.end];
                    self.load_scales(stage.index, first, keys, page, unit.head);
                } else {
                    async_copy::mbarrier_arrive(full);
                }
                stage.advance(Self::LOADERS, layout.stages);
                chunk += Self::LOADERS;
            }
        }
    }

    /// Copies a chunk's keys and values; `rows` are the vectors in the pools before the lane's key and value.
    ///
    /// # Safety
    /// The lanes come together; the rows exist if the column is valid, and nobody accesses the stage at `target`.
    #[inline(always)]
    unsafe fn copy_chunk(&self, column: &Column, rows: [u32; 2], target: u32, policy: u64) {
        let mut first = 0;
        while first < KEYS {
            let key = first + column.key;
            // `column.key` is below `AT_ONCE`, a divisor of 8, so steps of it are those of the group and of the swizzle.
            let (group, in_group) = (first / 8, first % 8);
            let swizzle = if Self::LINE == 8 {
                in_group
            } else {
                in_group / 2
            };
            let to = target
                + group * 8 * Self::KEY_BYTES
                + in_group * Self::LINE * VECTOR
                + (column.to ^ swizzle % Self::LINE * VECTOR);
            let mut i = 0;
            while i < 2 {
                // SAFETY: the caller's promise.
                unsafe {
                    let row = warp::warp_shuffle_idx(ALL, rows[i as usize], key, 32);
                    let from = column.from[i as usize] + u64::from(row) * u64::from(VECTOR);
                    async_copy::copy_cg_hint_zfill(
                        to + i * Layout::<DIM, ROWS, WARPS, CACHE>::CHUNK,
                        from as *const u8,
                        column.valid,
                        policy,
                    );
                }
                i += 1;
            }
            first += Self::AT_ONCE;
        }
    }
}
