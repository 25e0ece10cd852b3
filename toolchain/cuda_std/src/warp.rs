//! Warps: lanes, votes, shuffles, reductions.
//!
//! `mask` contains the participating lanes, usually [`FULL_MASK`]. All of them must execute the call
//! with the same mask, and none may have exited: that is the safety rule of the whole module.

/// All 32 lanes.
pub const FULL_MASK: u32 = u32::MAX;

#[allow(improper_ctypes)]
unsafe extern "C" {
    #[link_name = "llvm.nvvm.read.ptx.sreg.laneid"]
    safe fn sreg_laneid() -> u32;
    #[link_name = "llvm.nvvm.activemask"]
    safe fn intrinsic_activemask() -> u32;
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn bar_warp_sync(mask: u32);
    #[link_name = "llvm.nvvm.shfl.sync.bfly.i32"]
    fn shfl_bfly(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.up.i32"]
    fn shfl_up(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.down.i32"]
    fn shfl_down(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.shfl.sync.idx.i32"]
    fn shfl_idx(mask: u32, value: u32, lane: u32, clamp: u32) -> u32;
    #[link_name = "llvm.nvvm.vote.any.sync"]
    fn vote_any(mask: u32, predicate: bool) -> bool;
    #[link_name = "llvm.nvvm.vote.all.sync"]
    fn vote_all(mask: u32, predicate: bool) -> bool;
    #[link_name = "llvm.nvvm.vote.uni.sync"]
    fn vote_uni(mask: u32, predicate: bool) -> bool;
    #[link_name = "llvm.nvvm.vote.ballot.sync"]
    fn vote_ballot(mask: u32, predicate: bool) -> u32;
    #[link_name = "llvm.nvvm.match.any.sync.i32"]
    fn match_any_32(mask: u32, value: u32) -> u32;
    #[link_name = "llvm.nvvm.match.any.sync.i64"]
    fn match_any_64(mask: u32, value: u64) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.add"]
    fn redux_add(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.umin"]
    fn redux_umin(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.umax"]
    fn redux_umax(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.min"]
    fn redux_min(value: i32, mask: u32) -> i32;
    #[link_name = "llvm.nvvm.redux.sync.max"]
    fn redux_max(value: i32, mask: u32) -> i32;
    #[link_name = "llvm.nvvm.redux.sync.and"]
    fn redux_and(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.or"]
    fn redux_or(value: u32, mask: u32) -> u32;
    #[link_name = "llvm.nvvm.redux.sync.xor"]
    fn redux_xor(value: u32, mask: u32) -> u32;
}

/// Intrinsics that return pairs. Only one ABI returns them in LLVM's form; since Rust 1.100 it has another name.
macro_rules! intrinsics_with_pairs {
    ($abi:literal) => {
        #[allow(improper_ctypes)]
        unsafe extern $abi {
            #[link_name = "llvm.nvvm.elect.sync"]
            fn intrinsic_elect(mask: u32) -> (u32, bool);
            #[link_name = "llvm.nvvm.match.all.sync.i32p"]
            fn match_all_32(mask: u32, value: u32) -> (u32, bool);
        }
    };
}

#[cfg(not(llvm_intrinsic_abi))]
intrinsics_with_pairs!("unadjusted");
#[cfg(llvm_intrinsic_abi)]
intrinsics_with_pairs!("llvm-intrinsic");

/// The thread's lane in its warp, `0..32`.
///
/// # PTX
/// `mov.u32 d, %laneid`
#[inline(always)]
#[must_use]
pub fn lane_id() -> u32 {
    sreg_laneid()
}

/// The lanes that execute this together at the moment. The result depends on how the compiler arranged
/// the branches around it, so it does not replace a known mask.
///
/// # PTX
/// `activemask.b32 d`
#[inline(always)]
#[must_use]
pub fn activemask() -> u32 {
    intrinsic_activemask()
}

/// Waits for the lanes of `mask`; orders their accesses to memory.
///
/// # Safety
/// - Every lane of `mask` executes this with the same mask; none has exited.
///
/// # PTX
/// `bar.warp.sync mask`
#[inline(always)]
pub unsafe fn sync_warp(mask: u32) {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { bar_warp_sync(mask) }
}

/// A 32-bit value that can be exchanged between lanes.
pub trait Lane: Copy {
    /// The bits.
    fn to_lane(self) -> u32;
    /// The value of these bits.
    fn from_lane(bits: u32) -> Self;
}

impl Lane for u32 {
    #[inline(always)]
    fn to_lane(self) -> u32 {
        self
    }
    #[inline(always)]
    fn from_lane(bits: u32) -> Self {
        bits
    }
}

impl Lane for i32 {
    #[inline(always)]
    fn to_lane(self) -> u32 {
        self as u32
    }
    #[inline(always)]
    fn from_lane(bits: u32) -> Self {
        bits as i32
    }
}

impl Lane for f32 {
    #[inline(always)]
    fn to_lane(self) -> u32 {
        self.to_bits()
    }
    #[inline(always)]
    fn from_lane(bits: u32) -> Self {
        f32::from_bits(bits)
    }
}

macro_rules! shuffles {
    ($($name:ident = $intrinsic:ident, $mode:literal, $clamp:literal, $lane:ident, $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// `width` (a power of two, at most 32) divides the warp into segments. A lane whose source is outside
        /// of its segment gets its own value back.
        ///
        /// # Safety
        /// - Every lane of `mask` executes this with the same mask; none has exited.
        /// - The source lane is in `mask`.
        ///
        /// # PTX
        #[doc = concat!("`shfl.sync.", $mode, ".b32 d, a, b, c, mask`")]
        #[inline(always)]
        #[must_use]
        pub unsafe fn $name<T: Lane>(mask: u32, value: T, $lane: u32, width: u32) -> T {
            let control = ((32 - width) << 8) | $clamp;
            // SAFETY: the caller's promise is the instruction's.
            T::from_lane(unsafe { $intrinsic(mask, value.to_lane(), $lane, control) })
        }
    )*};
}

shuffles! {
    warp_shuffle_xor = shfl_bfly, "bfly", 31, lane_mask, "The value of lane `lane ^ lane_mask`.";
    warp_shuffle_up = shfl_up, "up", 0, delta, "The value of lane `lane - delta`.";
    warp_shuffle_down = shfl_down, "down", 31, delta, "The value of lane `lane + delta`.";
    warp_shuffle_idx = shfl_idx, "idx", 31, source, "The value of lane `source`, modulo `width`.";
}

macro_rules! votes {
    ($($name:ident = $intrinsic:ident, $mode:literal, $result:ty, $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// # Safety
        /// - Every lane of `mask` executes this with the same mask; none has exited.
        ///
        /// # PTX
        #[doc = concat!("`vote.sync.", $mode, " d, p, mask`")]
        #[inline(always)]
        #[must_use]
        pub unsafe fn $name(mask: u32, predicate: bool) -> $result {
            // SAFETY: the caller's promise is the instruction's.
            unsafe { $intrinsic(mask, predicate) }
        }
    )*};
}

votes! {
    warp_vote_any = vote_any, "any.pred", bool, "Whether the predicate holds in any lane of `mask`.";
    warp_vote_all = vote_all, "all.pred", bool, "Whether the predicate holds in every lane of `mask`.";
    warp_vote_uniform = vote_uni, "uni.pred", bool, "Whether the predicate is the same in all lanes of `mask`.";
    warp_vote_ballot = vote_ballot, "ballot.b32", u32, "The lanes of `mask` whose predicate holds.";
}

/// The lanes of `mask` that hold the same value.
///
/// # Safety
/// - Every lane of `mask` executes this with the same mask; none has exited.
///
/// # PTX
/// `match.any.sync.b32 d, a, mask`
#[inline(always)]
#[must_use]
pub unsafe fn warp_match_any<T: Lane>(mask: u32, value: T) -> u32 {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { match_any_32(mask, value.to_lane()) }
}

/// Whether all lanes of `mask` hold the same value.
///
/// # Safety
/// - Every lane of `mask` executes this with the same mask; none has exited.
///
/// # PTX
/// `match.all.sync.b32 d|p, a, mask`
#[inline(always)]
#[must_use]
pub unsafe fn warp_match_all<T: Lane>(mask: u32, value: T) -> bool {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { match_all_32(mask, value.to_lane()).1 }
}

/// The lanes of `mask` that hold the same 64-bit value.
///
/// # Safety
/// - Every lane of `mask` executes this with the same mask; none has exited.
///
/// # PTX
/// `match.any.sync.b64 d, a, mask`
#[inline(always)]
#[must_use]
pub unsafe fn warp_match_any_u64(mask: u32, value: u64) -> u32 {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { match_any_64(mask, value) }
}

macro_rules! reductions {
    ($($name:ident = $intrinsic:ident, $type:ty, $mode:literal, $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// # Safety
        /// - Every lane of `mask` executes this with the same mask; none has exited.
        ///
        /// # PTX
        #[doc = concat!("`redux.sync.", $mode, " d, a, mask` (sm_80)")]
        #[inline(always)]
        #[must_use]
        pub unsafe fn $name(mask: u32, value: $type) -> $type {
            // SAFETY: the caller's promise is the instruction's.
            unsafe { $intrinsic(value, mask) }
        }
    )*};
}

reductions! {
    warp_reduce_add = redux_add, u32, "add.s32", "The sum over the lanes of `mask`, wrapping.";
    warp_reduce_min = redux_umin, u32, "min.u32", "The smallest value among the lanes of `mask`.";
    warp_reduce_max = redux_umax, u32, "max.u32", "The largest value among the lanes of `mask`.";
    warp_reduce_min_i32 = redux_min, i32, "min.s32", "The smallest value among the lanes of `mask`.";
    warp_reduce_max_i32 = redux_max, i32, "max.s32", "The largest value among the lanes of `mask`.";
    warp_reduce_and = redux_and, u32, "and.b32", "The bits set in all lanes of `mask`.";
    warp_reduce_or = redux_or, u32, "or.b32", "The bits set in any lane of `mask`.";
    warp_reduce_xor = redux_xor, u32, "xor.b32", "The exclusive or over the lanes of `mask`.";
}

/// Elects one lane of `mask`. Returns true in that lane only.
///
/// # Safety
/// - Every lane of `mask` executes this with the same mask; none has exited.
///
/// # PTX
/// `elect.sync _|p, mask` (sm_90)
#[inline(always)]
#[must_use]
pub unsafe fn elect_sync(mask: u32) -> bool {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { intrinsic_elect(mask).1 }
}
