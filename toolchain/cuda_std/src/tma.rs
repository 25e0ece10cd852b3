//! Copies by the tensor memory accelerator (sm_90): tensors, plain runs of bytes, reductions.
//!
//! One thread issues a copy. A copy into shared memory counts its bytes at an
//! [mbarrier](crate::mbarrier); a copy out of it belongs to a *bulk group* of the thread, closed by
//! [`commit_group`] and awaited by [`wait_group`]. Before data written by ordinary stores is copied out
//! comes [`fence::proxy_async_shared`](crate::fence::proxy_async_shared).
//!
//! `barrier` and shared addresses may be mapped ones of the cluster; an address of the block's own
//! window stands for its own memory.

/// The opaque 128 bytes of a `CUtensorMap`, made on the host by `cuTensorMapEncodeTiled`.
///
/// The hardware wants an alignment of 64. rustc's NVPTX backend takes at most 16 in a kernel's
/// parameters, so the type has 16, and `#[kernel(tensor_maps)]` makes up the rest: the maps stand
/// first in the kernel's first parameter, a struct given by value, whose address in parameter memory
/// [`param_address!`](crate::param_address) gives.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap(pub [u64; 16]);

/// Address of parameter `index` of the entry `entry`, in whose body the macro must stand.
///
/// rustc would copy a parameter whose address is taken to the stack; a tensor map must be read where
/// the launch put it.
///
/// ```text
/// #[kernel(tensor_maps)]
/// pub unsafe fn prefill(p: Params) {
///     let maps: *const TensorMap = param_address!(prefill, 0);
/// }
/// ```
///
/// # PTX
/// `mov.b64 t, <entry>_param_<index>; cvta.param.u64 d, t` (PTX 7.7)
#[macro_export]
macro_rules! param_address {
    ($entry:ident, $index:literal) => {{
        let address;
        // SAFETY: computes an address.
        #[allow(unused_unsafe)]
        unsafe {
            ::core::arch::asm!(
                concat!(
                    "{{ .reg .b64 t; mov.b64 t, ", stringify!($entry), "_param_", $index,
                    "; cvta.param.u64 {}, t; }}"
                ),
                out(reg64) address,
                options(pure, nomem, nostack),
            );
        }
        address
    }};
}

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use super::TensorMap;
    use core::arch::asm;

    unsafe extern "C" {
        #[link_name = "llvm.nvvm.cp.async.bulk.commit.group"]
        safe fn bulk_commit_group();
        #[link_name = "llvm.nvvm.cp.async.bulk.wait.group"]
        safe fn bulk_wait_group(pending: u32);
        #[link_name = "llvm.nvvm.cp.async.bulk.wait.group.read"]
        safe fn bulk_wait_group_read(pending: u32);
    }

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

    macro_rules! ranks {
        ($($rank:literal, $list:literal, [$($i:tt),*];)*) => {$(
            impl Coordinates for [i32; $rank] {
                #[inline(always)]
                unsafe fn load(self, target: u32, map: *const TensorMap, barrier: u32) {
                    // SAFETY: the caller's promise is the instruction's.
                    unsafe {
                        asm!(
                            concat!(
                                "cp.async.bulk.tensor.", $rank, "d.shared::cluster.global.mbarrier::complete_tx::bytes ",
                                "[{target}], [{map}, ", $list, "], [{barrier}];"
                            ),
                            $(in(reg32) self[$i],)*
                            target = in(reg32) target, map = in(reg64) map, barrier = in(reg32) barrier,
                            options(nostack),
                        );
                    }
                }
                #[inline(always)]
                unsafe fn load_hint(self, target: u32, map: *const TensorMap, barrier: u32, policy: u64) {
                    // SAFETY: the caller's promise is the instruction's.
                    unsafe {
                        asm!(
                            concat!(
                                "cp.async.bulk.tensor.", $rank, "d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint ",
                                "[{target}], [{map}, ", $list, "], [{barrier}], {policy};"
                            ),
                            $(in(reg32) self[$i],)*
                            target = in(reg32) target, map = in(reg64) map, barrier = in(reg32) barrier,
                            policy = in(reg64) policy,
                            options(nostack),
                        );
                    }
                }
                #[inline(always)]
                unsafe fn load_multicast(self, target: u32, map: *const TensorMap, barrier: u32, ctas: u16) {
                    // SAFETY: the caller's promise is the instruction's.
                    unsafe {
                        asm!(
                            concat!(
                                "cp.async.bulk.tensor.", $rank, "d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster ",
                                "[{target}], [{map}, ", $list, "], [{barrier}], {ctas};"
                            ),
                            $(in(reg32) self[$i],)*
                            target = in(reg32) target, map = in(reg64) map, barrier = in(reg32) barrier,
                            ctas = in(reg16) ctas,
                            options(nostack),
                        );
                    }
                }
                #[inline(always)]
                unsafe fn load_multicast_hint(self, target: u32, map: *const TensorMap, barrier: u32, ctas: u16, policy: u64) {
                    // SAFETY: the caller's promise is the instruction's.
                    unsafe {
                        asm!(
                            concat!(
                                "cp.async.bulk.tensor.", $rank, "d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint ",
                                "[{target}], [{map}, ", $list, "], [{barrier}], {ctas}, {policy};"
                            ),
                            $(in(reg32) self[$i],)*
                            target = in(reg32) target, map = in(reg64) map, barrier = in(reg32) barrier,
                            ctas = in(reg16) ctas, policy = in(reg64) policy,
                            options(nostack),
                        );
                    }
                }
                #[inline(always)]
                unsafe fn store(self, map: *const TensorMap, source: u32) {
                    // SAFETY: the caller's promise is the instruction's.
                    unsafe {
                        asm!(
                            concat!("cp.async.bulk.tensor.", $rank, "d.global.shared::cta.bulk_group [{map}, ", $list, "], [{source}];"),
                            $(in(reg32) self[$i],)*
                            map = in(reg64) map, source = in(reg32) source,
                            options(nostack),
                        );
                    }
                }
                #[inline(always)]
                unsafe fn store_hint(self, map: *const TensorMap, source: u32, policy: u64) {
                    // SAFETY: the caller's promise is the instruction's.
                    unsafe {
                        asm!(
                            concat!("cp.async.bulk.tensor.", $rank, "d.global.shared::cta.bulk_group.L2::cache_hint [{map}, ", $list, "], [{source}], {policy};"),
                            $(in(reg32) self[$i],)*
                            map = in(reg64) map, source = in(reg32) source, policy = in(reg64) policy,
                            options(nostack),
                        );
                    }
                }
                #[inline(always)]
                unsafe fn reduce_add(self, map: *const TensorMap, source: u32) {
                    // SAFETY: the caller's promise is the instruction's.
                    unsafe {
                        asm!(
                            concat!("cp.reduce.async.bulk.tensor.", $rank, "d.global.shared::cta.add.bulk_group [{map}, ", $list, "], [{source}];"),
                            $(in(reg32) self[$i],)*
                            map = in(reg64) map, source = in(reg32) source,
                            options(nostack),
                        );
                    }
                }
                #[inline(always)]
                unsafe fn prefetch(self, map: *const TensorMap) {
                    // SAFETY: the caller's promise is the instruction's.
                    unsafe {
                        asm!(
                            concat!("cp.async.bulk.prefetch.tensor.", $rank, "d.L2.global [{map}, ", $list, "];"),
                            $(in(reg32) self[$i],)*
                            map = in(reg64) map,
                            options(nostack),
                        );
                    }
                }
            }
        )*};
    }

    ranks! {
        1, "{{{}}}", [0];
        2, "{{{}, {}}}", [0, 1];
        3, "{{{}, {}, {}}}", [0, 1, 2];
        4, "{{{}, {}, {}, {}}}", [0, 1, 2, 3];
        5, "{{{}, {}, {}, {}, {}}}", [0, 1, 2, 3, 4];
    }

    /// Copies a box of a tensor into shared memory; what lies outside the tensor arrives as zeros (or
    /// as the map says) and counts as bytes too.
    ///
    /// # Safety
    /// - `map` is the generic address of a valid tensor map of this rank, aligned to 64.
    /// - `target` is aligned to 128 (with a swizzle: to its pattern) and the box fits.
    /// - `barrier` is an initialised mbarrier that expects the bytes of the box.
    /// - Nobody touches the target until the barrier's phase completed.
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

    /// [`load_tensor`] into every block of the cluster whose rank's bit is set in `ctas`, at the same
    /// offset, signalled at the same offset.
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

    /// Copies a box from shared memory to a tensor; what lies outside the tensor is not written.
    ///
    /// # Safety
    /// - `map` is the generic address of a valid tensor map of this rank, aligned to 64.
    /// - `source` holds the box, is aligned as [`load_tensor`]'s target and stays unchanged until the
    ///   group was waited for.
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

    /// Adds a box in shared memory to a tensor, element by element, each addition atomic.
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

    /// Asks for a box of a tensor in L2.
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

    /// Fetches the descriptor itself, so that the first copy does not wait for it.
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

    macro_rules! bulk {
        ($(
            $name:ident($($argument:ident: $type:ty = $class:ident),*), $ptx:literal, $arguments:literal, $what:literal, [$($rule:literal),*];
        )*) => {$(
            #[doc = $what]
            ///
            /// # Safety
            /// - `bytes` is a multiple of 16; both addresses are aligned to 16.
            $(#[doc = concat!("- ", $rule)])*
            ///
            /// # PTX
            #[doc = concat!("`", $ptx, "` (sm_90)")]
            #[inline(always)]
            pub unsafe fn $name($($argument: $type),*) {
                // SAFETY: the caller's promise is the instruction's.
                unsafe {
                    asm!(concat!($ptx, $arguments, ";"), $($argument = in($class) $argument,)* options(nostack));
                }
            }
        )*};
    }

    bulk! {
        load_bulk(target: u32 = reg32, source: *const u8 = reg64, bytes: u32 = reg32, barrier: u32 = reg32),
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", " [{target}], [{source}], {bytes}, [{barrier}]",
            "Copies bytes from global to shared memory.",
            ["`barrier` is an initialised mbarrier that expects the bytes.", "Nobody touches the target until the barrier's phase completed."];
        load_bulk_hint(target: u32 = reg32, source: *const u8 = reg64, bytes: u32 = reg32, barrier: u32 = reg32, policy: u64 = reg64),
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint", " [{target}], [{source}], {bytes}, [{barrier}], {policy}",
            "[`load_bulk`] with a cache policy for L2.",
            ["As [`load_bulk`]'s; `policy` comes from [`crate::ptr`]'s policy functions."];
        load_bulk_multicast(target: u32 = reg32, source: *const u8 = reg64, bytes: u32 = reg32, barrier: u32 = reg32, ctas: u16 = reg16),
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster", " [{target}], [{source}], {bytes}, [{barrier}], {ctas}",
            "[`load_bulk`] into every block of the cluster whose rank's bit is set in `ctas`.",
            ["As [`load_bulk`]'s, for each of these blocks."];
        load_bulk_multicast_hint(target: u32 = reg32, source: *const u8 = reg64, bytes: u32 = reg32, barrier: u32 = reg32, ctas: u16 = reg16, policy: u64 = reg64),
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint", " [{target}], [{source}], {bytes}, [{barrier}], {ctas}, {policy}",
            "[`load_bulk_multicast`] with a cache policy for L2.",
            ["As [`load_bulk_multicast`]'s; `policy` comes from [`crate::ptr`]'s policy functions."];
        copy_bulk_cluster(target: u32 = reg32, source: u32 = reg32, bytes: u32 = reg32, barrier: u32 = reg32),
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes", " [{target}], [{source}], {bytes}, [{barrier}]",
            "Copies bytes from this block's shared memory to another's of the cluster.",
            ["`target` and `barrier` are mapped addresses of the same block, the barrier expects the bytes.", "Nobody touches source and target until the barrier's phase completed."];
        store_bulk(target: *mut u8 = reg64, source: u32 = reg32, bytes: u32 = reg32),
            "cp.async.bulk.global.shared::cta.bulk_group", " [{target}], [{source}], {bytes}",
            "Copies bytes from shared to global memory.",
            ["The source stays unchanged until the group was waited for."];
        store_bulk_hint(target: *mut u8 = reg64, source: u32 = reg32, bytes: u32 = reg32, policy: u64 = reg64),
            "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint", " [{target}], [{source}], {bytes}, {policy}",
            "[`store_bulk`] with a cache policy for L2.",
            ["As [`store_bulk`]'s; `policy` comes from [`crate::ptr`]'s policy functions."];
        reduce_add_bulk_f32(target: *mut f32 = reg64, source: u32 = reg32, bytes: u32 = reg32),
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", " [{target}], [{source}], {bytes}",
            "Adds `f32`s in shared memory to those in global memory, each addition atomic.",
            ["The source stays unchanged until the group was waited for."];
    }

    /// Asks for bytes of global memory in L2.
    ///
    /// # Safety
    /// - `source` points to `bytes` readable bytes of global memory; both are multiples of 16.
    ///
    /// # PTX
    /// `cp.async.bulk.prefetch.L2.global [source], bytes` (sm_90)
    #[inline(always)]
    pub unsafe fn prefetch_bulk(source: *const u8, bytes: u32) {
        // SAFETY: the caller's promise is the instruction's.
        unsafe {
            asm!("cp.async.bulk.prefetch.L2.global [{}], {};", in(reg64) source, in(reg32) bytes, options(nostack));
        }
    }

    /// Closes the bulk group of the thread's stores and reductions since the last commit.
    ///
    /// # PTX
    /// `cp.async.bulk.commit_group` (sm_90)
    #[inline(always)]
    pub fn commit_group() {
        bulk_commit_group();
    }

    /// Waits until at most `PENDING` of the thread's latest bulk groups are incomplete; what the others
    /// wrote is visible to the thread.
    ///
    /// # PTX
    /// `cp.async.bulk.wait_group PENDING` (sm_90)
    #[inline(always)]
    pub fn wait_group<const PENDING: u32>() {
        bulk_wait_group(PENDING);
    }

    /// Waits until at most `PENDING` of the thread's latest bulk groups still read their source, which
    /// may then be written again.
    ///
    /// # PTX
    /// `cp.async.bulk.wait_group.read PENDING` (sm_90)
    #[inline(always)]
    pub fn wait_group_read<const PENDING: u32>() {
        bulk_wait_group_read(PENDING);
    }
}

#[cfg(test)]
mod tests {
    use super::TensorMap;

    #[test]
    fn a_tensor_map_has_the_drivers_size() {
        assert_eq!(size_of::<TensorMap>(), 128);
        assert_eq!(align_of::<TensorMap>(), 16);
    }
}
