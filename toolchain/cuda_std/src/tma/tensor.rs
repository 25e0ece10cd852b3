//! Copies of boxes of tensors.

use core::arch::asm;

use super::TensorMap;

/// Coordinates of a box in a tensor of rank 1 to 5, the fastest dimension first.
pub trait Coordinates: Copy {
    #[doc(hidden)]
    unsafe fn load(self, target: u32, map: *const TensorMap, barrier: u32);
    #[doc(hidden)]
    unsafe fn load_hint(self, target: u32, map: *const TensorMap, barrier: u32, policy: u64);
    #[doc(hidden)]
    unsafe fn load_multicast(self, target: u32, map: *const TensorMap, barrier: u32, ctas: u16);
    #[doc(hidden)]
    unsafe fn load_multicast_hint(
        self,
        target: u32,
        map: *const TensorMap,
        barrier: u32,
        ctas: u16,
        policy: u64,
    );
    #[doc(hidden)]
    unsafe fn store(self, map: *const TensorMap, source: u32);
    #[doc(hidden)]
    unsafe fn store_hint(self, map: *const TensorMap, source: u32, policy: u64);
    #[doc(hidden)]
    unsafe fn reduce_add(self, map: *const TensorMap, source: u32);
    #[doc(hidden)]
    unsafe fn prefetch(self, map: *const TensorMap);
}

/// A method of [`Coordinates`]: one instruction whose first operands are the coordinates `$i`.
macro_rules! method {
    ($name:ident($($argument:ident: $type:ty = $class:ident),*), [$($i:tt)*], $($ptx:literal),*) => {
        #[inline(always)]
        unsafe fn $name(self, $($argument: $type),*) {
            // SAFETY: the caller's promise is the instruction's.
            unsafe {
                asm!(
                    concat!($($ptx),*),
                    $(in(reg32) self[$i],)*
                    $($argument = in($class) $argument,)*
                    options(nostack),
                );
            }
        }
    };
}

macro_rules! ranks {
    ($($rank:literal, $list:literal, $i:tt;)*) => {$(
        impl Coordinates for [i32; $rank] {
            method!(
                load(target: u32 = reg32, map: *const TensorMap = reg64, barrier: u32 = reg32), $i,
                "cp.async.bulk.tensor.", $rank, "d.shared::cluster.global.mbarrier::complete_tx::bytes ",
                "[{target}], [{map}, ", $list, "], [{barrier}];"
            );
            method!(
                load_hint(target: u32 = reg32, map: *const TensorMap = reg64, barrier: u32 = reg32, policy: u64 = reg64), $i,
                "cp.async.bulk.tensor.", $rank, "d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint ",
                "[{target}], [{map}, ", $list, "], [{barrier}], {policy};"
            );
            method!(
                load_multicast(target: u32 = reg32, map: *const TensorMap = reg64, barrier: u32 = reg32, ctas: u16 = reg16), $i,
                "cp.async.bulk.tensor.", $rank, "d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster ",
                "[{target}], [{map}, ", $list, "], [{barrier}], {ctas};"
            );
            method!(
                load_multicast_hint(target: u32 = reg32, map: *const TensorMap = reg64, barrier: u32 = reg32, ctas: u16 = reg16, policy: u64 = reg64), $i,
                "cp.async.bulk.tensor.", $rank, "d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint ",
                "[{target}], [{map}, ", $list, "], [{barrier}], {ctas}, {policy};"
            );
            method!(
                store(map: *const TensorMap = reg64, source: u32 = reg32), $i,
                "cp.async.bulk.tensor.", $rank, "d.global.shared::cta.bulk_group [{map}, ", $list, "], [{source}];"
            );
            method!(
                store_hint(map: *const TensorMap = reg64, source: u32 = reg32, policy: u64 = reg64), $i,
                "cp.async.bulk.tensor.", $rank, "d.global.shared::cta.bulk_group.L2::cache_hint [{map}, ", $list, "], [{source}], {policy};"
            );
            method!(
                reduce_add(map: *const TensorMap = reg64, source: u32 = reg32), $i,
                "cp.reduce.async.bulk.tensor.", $rank, "d.global.shared::cta.add.bulk_group [{map}, ", $list, "], [{source}];"
            );
            method!(
                prefetch(map: *const TensorMap = reg64), $i,
                "cp.async.bulk.prefetch.tensor.", $rank, "d.L2.global [{map}, ", $list, "];"
            );
        }
    )*};
}

ranks! {
    1, "{{{}}}", [0];
    2, "{{{}, {}}}", [0 1];
    3, "{{{}, {}, {}}}", [0 1 2];
    4, "{{{}, {}, {}, {}}}", [0 1 2 3];
    5, "{{{}, {}, {}, {}, {}}}", [0 1 2 3 4];
}

/// Copies a box of a tensor into shared memory. Elements outside of the tensor arrive as zeros (or as
/// the map states) and their bytes count, too.
///
/// # Safety
/// - `map` is the generic address of a valid tensor map of this rank, aligned to 64.
/// - `target` is aligned to 128 (with a swizzle: to the period of its pattern), and the box fits.
/// - `barrier` is an initialised mbarrier that expects the bytes of the box.
/// - No thread accesses the target until the barrier's phase has completed.
///
/// # PTX
/// `cp.async.bulk.tensor.<rank>d.shared::cluster.global.mbarrier::complete_tx::bytes` (sm_90)
#[inline(always)]
pub unsafe fn load_tensor<C: Coordinates>(
    target: u32,
    map: *const TensorMap,
    coordinates: C,
    barrier: u32,
) {
    // SAFETY: the caller's promise.
    unsafe { coordinates.load(target, map, barrier) }
}

/// [`load_tensor`] with a cache policy for L2.
///
/// # Safety
/// - As [`load_tensor`]'s; `policy` comes from [`crate::ptr`]'s policy functions.
///
/// # PTX
/// `cp.async.bulk.tensor.<rank>d.….L2::cache_hint` (sm_90)
#[inline(always)]
pub unsafe fn load_tensor_hint<C: Coordinates>(
    target: u32,
    map: *const TensorMap,
    coordinates: C,
    barrier: u32,
    policy: u64,
) {
    // SAFETY: the caller's promise.
    unsafe { coordinates.load_hint(target, map, barrier, policy) }
}

/// [`load_tensor`] into every block of the cluster whose rank's bit is set in `ctas`. Each gets the
/// data and the signal at the same offsets.
///
/// # Safety
/// - As [`load_tensor`]'s, for each of these blocks.
///
/// # PTX
/// `cp.async.bulk.tensor.<rank>d.….multicast::cluster` (sm_90)
#[inline(always)]
pub unsafe fn load_tensor_multicast<C: Coordinates>(
    target: u32,
    map: *const TensorMap,
    coordinates: C,
    barrier: u32,
    ctas: u16,
) {
    // SAFETY: the caller's promise.
    unsafe { coordinates.load_multicast(target, map, barrier, ctas) }
}

/// [`load_tensor_multicast`] with a cache policy for L2.
///
/// # Safety
/// - As [`load_tensor_multicast`]'s; `policy` comes from [`crate::ptr`]'s policy functions.
///
/// # PTX
/// `cp.async.bulk.tensor.<rank>d.….multicast::cluster.L2::cache_hint` (sm_90)
#[inline(always)]
pub unsafe fn load_tensor_multicast_hint<C: Coordinates>(
    target: u32,
    map: *const TensorMap,
    coordinates: C,
    barrier: u32,
    ctas: u16,
    policy: u64,
) {
    // SAFETY: the caller's promise.
    unsafe { coordinates.load_multicast_hint(target, map, barrier, ctas, policy) }
}

/// Copies a box from shared memory to a tensor. Elements outside of the tensor are not written.
///
/// # Safety
/// - `map` is the generic address of a valid tensor map of this rank, aligned to 64.
/// - `source` contains the box, is aligned as [`load_tensor`]'s target and stays unchanged until the
///   group has been waited for.
///
/// # PTX
/// `cp.async.bulk.tensor.<rank>d.global.shared::cta.bulk_group` (sm_90)
#[inline(always)]
pub unsafe fn store_tensor<C: Coordinates>(map: *const TensorMap, coordinates: C, source: u32) {
    // SAFETY: the caller's promise.
    unsafe { coordinates.store(map, source) }
}

/// [`store_tensor`] with a cache policy for L2.
///
/// # Safety
/// - As [`store_tensor`]'s; `policy` comes from [`crate::ptr`]'s policy functions.
///
/// # PTX
/// `cp.async.bulk.tensor.<rank>d.global.shared::cta.bulk_group.L2::cache_hint` (sm_90)
#[inline(always)]
pub unsafe fn store_tensor_hint<C: Coordinates>(
    map: *const TensorMap,
    coordinates: C,
    source: u32,
    policy: u64,
) {
    // SAFETY: the caller's promise.
    unsafe { coordinates.store_hint(map, source, policy) }
}

/// Adds a box in shared memory to a tensor, element by element; each addition is atomic.
///
/// # Safety
/// - As [`store_tensor`]'s.
///
/// # PTX
/// `cp.reduce.async.bulk.tensor.<rank>d.global.shared::cta.add.bulk_group` (sm_90)
#[inline(always)]
pub unsafe fn reduce_add_tensor<C: Coordinates>(
    map: *const TensorMap,
    coordinates: C,
    source: u32,
) {
    // SAFETY: the caller's promise.
    unsafe { coordinates.reduce_add(map, source) }
}

/// Prefetches a box of a tensor into L2.
///
/// # Safety
/// - `map` is the generic address of a valid tensor map of this rank, aligned to 64.
///
/// # PTX
/// `cp.async.bulk.prefetch.tensor.<rank>d.L2.global` (sm_90)
#[inline(always)]
pub unsafe fn prefetch_tensor<C: Coordinates>(map: *const TensorMap, coordinates: C) {
    // SAFETY: the caller's promise.
    unsafe { coordinates.prefetch(map) }
}

/// Prefetches the descriptor itself, so that the first copy need not wait for it.
///
/// # Safety
/// - `map` is the generic address of a valid tensor map, aligned to 64.
///
/// # PTX
/// `prefetch.tensormap [map]` (sm_90)
#[inline(always)]
pub unsafe fn prefetch_tensor_map(map: *const TensorMap) {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { asm!("prefetch.tensormap [{}];", in(reg64) map, options(nostack)) }
}
