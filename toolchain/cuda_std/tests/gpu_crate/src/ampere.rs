//! Wrappers for an A100 (sm_80) and all later GPUs.

use cuda_std::{
    async_copy,
    atomic::{self, AcqRel, Acquire, Cta, Gpu, Relaxed, Release, Sys},
    barrier, convert, fence, math, mbarrier, misc, mma,
    ptr::{self, AddressSpace},
    shared, special, thread,
    warp::{self, FULL_MASK},
};

probes! {
    thread_idx_x() thread::thread_idx_x() => "%tid.x";
    thread_idx_y() thread::thread_idx_y() => "%tid.y";
    thread_idx_z() thread::thread_idx_z() => "%tid.z";
    block_dim_x() thread::block_dim_x() => "%ntid.x";
    block_dim_y() thread::block_dim_y() => "%ntid.y";
    block_dim_z() thread::block_dim_z() => "%ntid.z";
    block_idx_x() thread::block_idx_x() => "%ctaid.x";
    block_idx_y() thread::block_idx_y() => "%ctaid.y";
    block_idx_z() thread::block_idx_z() => "%ctaid.z";
    grid_dim_x() thread::grid_dim_x() => "%nctaid.x";
    grid_dim_y() thread::grid_dim_y() => "%nctaid.y";
    grid_dim_z() thread::grid_dim_z() => "%nctaid.z";
    index_1d() thread::index_1d() => "%tid.x", "%ctaid.x", "%ntid.x";
    index_2d() thread::index_2d() => "%tid.y", "%ctaid.y", "%ntid.y";
    index_3d() thread::index_3d() => "%tid.z", "%ctaid.z", "%ntid.z";
    index() thread::index() => "%tid.z", "%nctaid.x", "%nctaid.y";
    first() thread::first() => "%tid.x", "%ctaid.z";
    sync_threads() thread::sync_threads() => "bar.sync 0;";
    sync_threads_count(p: u32) thread::sync_threads_count(p) => "red.popc";
    sync_threads_and(p: u32) thread::sync_threads_and(p) => "red.and.pred";
    sync_threads_or(p: u32) thread::sync_threads_or(p) => "red.or.pred";
    nanosleep(t: u32) thread::nanosleep(t) => "nanosleep.u32";

    lane_id() warp::lane_id() => "%laneid";
    activemask() warp::activemask() => "activemask.b32";
    sync_warp(mask: u32) warp::sync_warp(mask) => "bar.warp.sync";
    warp_shuffle_xor(v: u32) warp::warp_shuffle_xor(FULL_MASK, v, 1, 32) => "shfl.sync.bfly.b32", ", 1, 31, -1;";
    warp_shuffle_xor_f32(v: f32) warp::warp_shuffle_xor(FULL_MASK, v, 2, 32) => "shfl.sync.bfly.b32", ", 2, 31, -1;";
    warp_shuffle_up(v: i32) warp::warp_shuffle_up(FULL_MASK, v, 1, 32) => "shfl.sync.up.b32", ", 1, 0, -1;";
    warp_shuffle_down(v: f32) warp::warp_shuffle_down(FULL_MASK, v, 1, 16) => "shfl.sync.down.b32", ", 1, 4127, -1;";
    warp_shuffle_idx(v: u32, lane: u32) warp::warp_shuffle_idx(FULL_MASK, v, lane, 32) => "shfl.sync.idx.b32", ", 31, -1;";
    warp_vote_any(mask: u32, v: u32) warp::warp_vote_any(mask, v > 7) => "vote.sync.any.pred";
    warp_vote_all(mask: u32, v: u32) warp::warp_vote_all(mask, v > 7) => "vote.sync.all.pred";
    warp_vote_uniform(mask: u32, v: u32) warp::warp_vote_uniform(mask, v > 7) => "vote.sync.uni.pred";
    warp_vote_ballot(mask: u32, v: u32) warp::warp_vote_ballot(mask, v > 7) => "vote.sync.ballot.b32";
    warp_match_any(mask: u32, v: u32) warp::warp_match_any(mask, v) => "match.any.sync.b32";
    warp_match_all(mask: u32, v: f32) warp::warp_match_all(mask, v) => "match.all.sync.b32";
    warp_match_any_u64(mask: u32, v: u64) warp::warp_match_any_u64(mask, v) => "match.any.sync.b64";
    warp_reduce_add(mask: u32, v: u32) warp::warp_reduce_add(mask, v) => "redux.sync.add";
    warp_reduce_min(mask: u32, v: u32) warp::warp_reduce_min(mask, v) => "redux.sync.min.u32";
    warp_reduce_max(mask: u32, v: u32) warp::warp_reduce_max(mask, v) => "redux.sync.max.u32";
    warp_reduce_min_i32(mask: u32, v: i32) warp::warp_reduce_min_i32(mask, v) => "redux.sync.min.s32";
    warp_reduce_max_i32(mask: u32, v: i32) warp::warp_reduce_max_i32(mask, v) => "redux.sync.max.s32";
    warp_reduce_and(mask: u32, v: u32) warp::warp_reduce_and(mask, v) => "redux.sync.and.b32";
    warp_reduce_or(mask: u32, v: u32) warp::warp_reduce_or(mask, v) => "redux.sync.or.b32";
    warp_reduce_xor(mask: u32, v: u32) warp::warp_reduce_xor(mask, v) => "redux.sync.xor.b32";

    bar_sync(id: u32) barrier::bar_sync(id, 64) => "bar.sync %r";
    bar_arrive(id: u32) barrier::bar_arrive(id, 64) => "bar.arrive %r";
    barrier_sync(id: u32) barrier::barrier_sync(id, 64) => "barrier.sync %r";
    barrier_arrive(id: u32) barrier::barrier_arrive(id, 64) => "barrier.arrive %r";

    clock_cycles() misc::clock() => "%clock64";
    trap(n: u32) if n == 3 { misc::trap() } => "2* trap;";
    breakpoint() misc::breakpoint() => "brkpt;";
    profiler_counter() misc::profiler_counter::<5>() => "pmevent 5;";

    smid() special::smid() => "%smid";
    nsmid() special::nsmid() => "%nsmid";
    warpid() special::warpid() => "%warpid";
    nwarpid() special::nwarpid() => "%nwarpid";
    clock() special::clock() => "%clock;";
    clock64() special::clock64() => "%clock64";
    globaltimer() special::globaltimer() => "%globaltimer";
    lanemask_eq() special::lanemask_eq() => "%lanemask_eq";
    lanemask_lt() special::lanemask_lt() => "%lanemask_lt";
    lanemask_le() special::lanemask_le() => "%lanemask_le";
    lanemask_gt() special::lanemask_gt() => "%lanemask_gt";
    lanemask_ge() special::lanemask_ge() => "%lanemask_ge";
    dynamic_smem_size() special::dynamic_smem_size() => "%dynamic_smem_size";
    total_smem_size() special::total_smem_size() => "%total_smem_size";

    dynamic_shared_mem() *shared::dynamic_shared_mem::<u32>() => "mov.u32 %r", "cvta.shared.u64";
    dynamic_shared_address() shared::dynamic_shared_address() => "cuda_std_dynamic_shared";
    shared_address_of(p: *const u32) shared::address_of(p) => "cvta.to.shared.u64";
    shared_pointer_to(a: u32) *shared::pointer_to::<u32>(a) => "cvta.shared.u64";
    shared_load_u16(a: u32) shared::load_u16(a) => "ld.shared.b16";
    shared_load_u32(a: u32) shared::load_u32(a) => "ld.shared.b32";
    shared_load_u32x2(a: u32) shared::load_u32x2(a) => "ld.shared.v2.b32";
    shared_load_u32x4(a: u32) shared::load_u32x4(a) => "ld.shared.v4.b32";
    shared_load_f32(a: u32) shared::load_f32(a) => "ld.shared.f32";
    shared_load_f32x2(a: u32) shared::load_f32x2(a) => "ld.shared.v2.f32";
    shared_load_f32x4(a: u32) shared::load_f32x4(a) => "ld.shared.v4.f32";
    shared_load_u64(a: u32) shared::load_u64(a) => "ld.shared.b64";
    shared_store_u16(a: u32, v: u16) shared::store_u16(a, v) => "st.shared.b16";
    shared_store_u32(a: u32, v: u32) shared::store_u32(a, v) => "st.shared.b32";
    shared_store_u32x2(a: u32, v: u32) shared::store_u32x2(a, [v, 1]) => "st.shared.v2.b32";
    shared_store_u32x4(a: u32, v: u32) shared::store_u32x4(a, [v, 1, 2, 3]) => "st.shared.v4.b32";
    shared_store_f32(a: u32, v: f32) shared::store_f32(a, v) => "st.shared.f32";
    shared_store_f32x2(a: u32, v: f32) shared::store_f32x2(a, [v, 1.0]) => "st.shared.v2.f32";
    shared_store_f32x4(a: u32, v: f32) shared::store_f32x4(a, [v, 1.0, 2.0, 3.0]) => "st.shared.v4.f32";
    shared_store_u64(a: u32, v: u64) shared::store_u64(a, v) => "st.shared.b64";

    to_global(p: *const u32) ptr::convert_generic_to_specific_address_space(p, AddressSpace::Global) => "2* cvta.to.global.u64";
    to_shared(p: *const u32) ptr::convert_generic_to_specific_address_space(p, AddressSpace::Shared) => "cvta.to.shared.u64";
    to_constant(p: *const u32) ptr::convert_generic_to_specific_address_space(p, AddressSpace::Constant) => "cvta.to.const.u64";
    to_local(p: *const u32) ptr::convert_generic_to_specific_address_space(p, AddressSpace::Local) => "cvta.to.local.u64";
    from_global(p: *const u32) ptr::convert_specific_address_space_to_generic(p, AddressSpace::Global) => "cvta.global.u64";
    from_shared(p: *const u32) ptr::convert_specific_address_space_to_generic(p, AddressSpace::Shared) => "cvta.shared.u64";
    from_constant(p: *const u32) ptr::convert_specific_address_space_to_generic(p, AddressSpace::Constant) => "cvta.const.u64";
    from_local(p: *const u32) ptr::convert_specific_address_space_to_generic(p, AddressSpace::Local) => "cvta.local.u64";
    is_global(p: *const u32) ptr::is_in_address_space(p, AddressSpace::Global) => "isspacep.global";
    is_shared(p: *const u32) ptr::is_in_address_space(p, AddressSpace::Shared) => "isspacep.shared";
    is_constant(p: *const u32) ptr::is_in_address_space(p, AddressSpace::Constant) => "isspacep.const";
    is_local(p: *const u32) ptr::is_in_address_space(p, AddressSpace::Local) => "isspacep.local";
    evict_first_policy() ptr::evict_first_policy() => "createpolicy.fractional.L2::evict_first.b64";
    evict_last_policy() ptr::evict_last_policy() => "createpolicy.fractional.L2::evict_last.b64";
    evict_unchanged_policy() ptr::evict_unchanged_policy() => "createpolicy.fractional.L2::evict_unchanged.b64";
    load_u16(p: *const u16) ptr::load_u16(p) => "ld.global.b16";
    load_u32(p: *const u32) ptr::load_u32(p) => "ld.global.b32";
    load_u32x2(p: *const u32) ptr::load_u32x2(p) => "ld.global.v2.b32";
    load_u32x4(p: *const u32) ptr::load_u32x4(p) => "ld.global.v4.b32";
    load_u64(p: *const u64) ptr::load_u64(p) => "ld.global.b64";
    load_f32(p: *const f32) ptr::load_f32(p) => "ld.global.f32";
    load_f32x2(p: *const f32) ptr::load_f32x2(p) => "ld.global.v2.f32";
    load_f32x4(p: *const f32) ptr::load_f32x4(p) => "ld.global.v4.f32";
    load_volatile_u32(p: *const u32) ptr::load_volatile_u32(p) => "ld.volatile.global.u32";
    load_nc_u16(p: *const u16) ptr::load_nc_u16(p) => "ld.global.nc.b16";
    load_nc_u32(p: *const u32) ptr::load_nc_u32(p) => "ld.global.nc.b32";
    load_nc_u32x2(p: *const u32) ptr::load_nc_u32x2(p) => "ld.global.nc.v2.b32";
    load_nc_u32x4(p: *const u32) ptr::load_nc_u32x4(p) => "ld.global.nc.v4.b32";
    load_nc_u64(p: *const u64) ptr::load_nc_u64(p) => "ld.global.nc.b64";
    load_nc_f32(p: *const f32) ptr::load_nc_f32(p) => "ld.global.nc.f32";
    load_nc_f32x2(p: *const f32) ptr::load_nc_f32x2(p) => "ld.global.nc.v2.f32";
    load_nc_f32x4(p: *const f32) ptr::load_nc_f32x4(p) => "ld.global.nc.v4.f32";
    load_stream_u32(p: *const u32) ptr::load_stream_u32(p) => "ld.global.nc.L1::no_allocate.b32";
    load_stream_u32x2(p: *const u32) ptr::load_stream_u32x2(p) => "ld.global.nc.L1::no_allocate.v2.b32";
    load_stream_u32x4(p: *const u32) ptr::load_stream_u32x4(p) => "ld.global.nc.L1::no_allocate.v4.b32";
    load_stream_f32(p: *const f32) ptr::load_stream_f32(p) => "ld.global.nc.L1::no_allocate.f32";
    load_stream_f32x2(p: *const f32) ptr::load_stream_f32x2(p) => "ld.global.nc.L1::no_allocate.v2.f32";
    load_stream_f32x4(p: *const f32) ptr::load_stream_f32x4(p) => "ld.global.nc.L1::no_allocate.v4.f32";
    load_hint_u32(p: *const u32, l2: u64) ptr::load_hint_u32(p, l2) => "ld.global.nc.L1::no_allocate.L2::cache_hint.b32";
    load_hint_u32x2(p: *const u32, l2: u64) ptr::load_hint_u32x2(p, l2) => "ld.global.nc.L1::no_allocate.L2::cache_hint.v2.b32";
    load_hint_u32x4(p: *const u32, l2: u64) ptr::load_hint_u32x4(p, l2) => "ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32";
    load_hint_f32x4(p: *const f32, l2: u64) ptr::load_hint_f32x4(p, l2) => "ld.global.nc.L1::no_allocate.L2::cache_hint.v4.f32";
    store_u16(p: *mut u16, v: u16) ptr::store_u16(p, v) => "st.global.b16";
    store_u32(p: *mut u32, v: u32) ptr::store_u32(p, v) => "st.global.b32";
    store_u32x2(p: *mut u32, v: u32) ptr::store_u32x2(p, [v, 1]) => "st.global.v2.b32";
    store_u32x4(p: *mut u32, v: u32) ptr::store_u32x4(p, [v, 1, 2, 3]) => "st.global.v4.b32";
    store_u64(p: *mut u64, v: u64) ptr::store_u64(p, v) => "st.global.b64";
    store_f32(p: *mut f32, v: f32) ptr::store_f32(p, v) => "st.global.f32";
    store_f32x2(p: *mut f32, v: f32) ptr::store_f32x2(p, [v, 1.0]) => "st.global.v2.f32";
    store_f32x4(p: *mut f32, v: f32) ptr::store_f32x4(p, [v, 1.0, 2.0, 3.0]) => "st.global.v4.f32";
    store_stream_u32(p: *mut u32, v: u32) ptr::store_stream_u32(p, v) => "st.global.cs.b32";
    store_stream_u32x2(p: *mut u32, v: u32) ptr::store_stream_u32x2(p, [v, 1]) => "st.global.cs.v2.b32";
    store_stream_u32x4(p: *mut u32, v: u32) ptr::store_stream_u32x4(p, [v, 1, 2, 3]) => "st.global.cs.v4.b32";
    store_stream_f32x2(p: *mut f32, v: f32) ptr::store_stream_f32x2(p, [v, 1.0]) => "st.global.cs.v2.f32";
    store_stream_f32x4(p: *mut f32, v: f32) ptr::store_stream_f32x4(p, [v, 1.0, 2.0, 3.0]) => "st.global.cs.v4.f32";
    store_hint_u32x4(p: *mut u32, v: u32, l2: u64) ptr::store_hint_u32x4(p, [v, 1, 2, 3], l2) => "st.global.L2::cache_hint.v4.b32";
    store_hint_f32x4(p: *mut f32, v: f32, l2: u64) ptr::store_hint_f32x4(p, [v, 1.0, 2.0, 3.0], l2) => "st.global.L2::cache_hint.v4.f32";
    prefetch_l1(p: *const u8) ptr::prefetch_l1(p) => "prefetch.global.L1 [";
    prefetch_l2(p: *const u8) ptr::prefetch_l2(p) => "prefetch.global.L2 [";
    prefetch_l2_evict_last(p: *const u8) ptr::prefetch_l2_evict_last(p) => "prefetch.global.L2::evict_last [";

    fence_acq_rel_cta() fence::acq_rel_cta() => "fence.acq_rel.cta;";
    fence_acq_rel_gpu() fence::acq_rel_gpu() => "fence.acq_rel.gpu;";
    fence_acq_rel_sys() fence::acq_rel_sys() => "fence.acq_rel.sys;";
    fence_sc_cta() fence::sc_cta() => "fence.sc.cta;";
    fence_sc_gpu() fence::sc_gpu() => "fence.sc.gpu;";
    fence_sc_sys() fence::sc_sys() => "fence.sc.sys;";
    threadfence_block() fence::threadfence_block() => "membar.cta;";
    threadfence() fence::threadfence() => "membar.gl;";
    threadfence_system() fence::threadfence_system() => "membar.sys;";

    copy_ca(a: u32, p: *const u8) async_copy::copy_ca::<4>(a, p) => "cp.async.ca.shared.global [";
    copy_ca_8(a: u32, p: *const u8) async_copy::copy_ca::<8>(a, p) => "cp.async.ca.shared.global [", ", 8;";
    copy_ca_zfill(a: u32, p: *const u8, n: u32) async_copy::copy_ca_zfill::<16>(a, p, n) => "cp.async.ca.shared.global [", ", 16, %r";
    copy_cg(a: u32, p: *const u8) async_copy::copy_cg(a, p) => "cp.async.cg.shared.global [", ", 16;";
    copy_cg_zfill(a: u32, p: *const u8, n: u32) async_copy::copy_cg_zfill(a, p, n) => "cp.async.cg.shared.global [", ", 16, %r";
    copy_cg_l2_128(a: u32, p: *const u8) async_copy::copy_cg_l2_128(a, p) => "cp.async.cg.shared.global.L2::128B [";
    copy_cg_l2_128_zfill(a: u32, p: *const u8, n: u32) async_copy::copy_cg_l2_128_zfill(a, p, n) => "cp.async.cg.shared.global.L2::128B [", ", 16, %r";
    copy_cg_hint(a: u32, p: *const u8, l2: u64) async_copy::copy_cg_hint(a, p, l2) => "cp.async.cg.shared.global.L2::cache_hint [", ", 16, %rd";
    copy_cg_hint_zfill(a: u32, p: *const u8, n: u32, l2: u64) async_copy::copy_cg_hint_zfill(a, p, n, l2) => "cp.async.cg.shared.global.L2::cache_hint [", ", 16, %r";
    copy_cg_hint_l2_128(a: u32, p: *const u8, l2: u64) async_copy::copy_cg_hint_l2_128(a, p, l2) => "cp.async.cg.shared.global.L2::cache_hint.L2::128B [";
    copy_cg_hint_l2_128_zfill(a: u32, p: *const u8, n: u32, l2: u64) async_copy::copy_cg_hint_l2_128_zfill(a, p, n, l2) => "cp.async.cg.shared.global.L2::cache_hint.L2::128B [", ", 16, %r";
    copy_commit_group() async_copy::commit_group() => "cp.async.commit_group;";
    copy_wait_group() async_copy::wait_group::<2>() => "cp.async.wait_group 2;";
    copy_wait_all() async_copy::wait_all() => "cp.async.wait_all;";
    copy_mbarrier_arrive(b: u32) async_copy::mbarrier_arrive(b) => "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [";

    mbarrier_init(b: u32) mbarrier::init(b, 3) => "mbarrier.init.shared::cta.b64 [";
    mbarrier_inval(b: u32) mbarrier::inval(b) => "mbarrier.inval.shared::cta.b64 [";
    mbarrier_arrive_state(b: u32) mbarrier::arrive_state(b) => "mbarrier.arrive.shared::cta.b64 %rd";
    // ptxas 13.0 crashes if the state does not come from an arrival.
    mbarrier_test_wait_state(b: u32) { let state = mbarrier::arrive_state(b); mbarrier::test_wait_state(b, state) }
        => "mbarrier.test_wait.shared::cta.b64 p, [";
    mbarrier_test_wait(b: u32, p: u32) mbarrier::test_wait(b, p) => "mbarrier.test_wait.parity.shared::cta.b64 p, [";
    mbarrier_wait_sm80(b: u32, p: u32) mbarrier::wait_sm80(b, p) => "mbarrier.test_wait.parity.shared::cta.b64 p, [", "bra WAIT;";

    fetch_add(p: *mut u32, v: u32) atomic::fetch_add::<AcqRel, Gpu, _>(p, v) => "atom.acq_rel.gpu.global.add.u32";
    fetch_add_u64(p: *mut u64, v: u64) atomic::fetch_add::<Relaxed, Gpu, _>(p, v) => "atom.relaxed.gpu.global.add.u64";
    fetch_add_f32(p: *mut f32, v: f32) atomic::fetch_add::<Relaxed, Cta, _>(p, v) => "atom.relaxed.cta.global.add.f32";
    fetch_min(p: *mut u32, v: u32) atomic::fetch_min::<Acquire, Gpu, _>(p, v) => "atom.acquire.gpu.global.min.u32";
    fetch_min_i32(p: *mut i32, v: i32) atomic::fetch_min::<Release, Sys, _>(p, v) => "atom.release.sys.global.min.s32";
    fetch_max(p: *mut u32, v: u32) atomic::fetch_max::<Release, Gpu, _>(p, v) => "atom.release.gpu.global.max.u32";
    fetch_max_u64(p: *mut u64, v: u64) atomic::fetch_max::<Relaxed, Sys, _>(p, v) => "atom.relaxed.sys.global.max.u64";
    fetch_and(p: *mut u32, v: u32) atomic::fetch_and::<AcqRel, Cta, _>(p, v) => "atom.acq_rel.cta.global.and.b32";
    fetch_or(p: *mut u64, v: u64) atomic::fetch_or::<Acquire, Cta, _>(p, v) => "atom.acquire.cta.global.or.b64";
    fetch_xor(p: *mut u32, v: u32) atomic::fetch_xor::<Release, Cta, _>(p, v) => "atom.release.cta.global.xor.b32";
    fetch_inc(p: *mut u32, v: u32) atomic::fetch_inc::<AcqRel, Gpu, _>(p, v) => "atom.acq_rel.gpu.global.inc.u32";
    exchange(p: *mut u32, v: u32) atomic::exchange::<AcqRel, Sys, _>(p, v) => "atom.acq_rel.sys.global.exch.b32";
    compare_exchange(p: *mut u32, v: u32) atomic::compare_exchange::<AcqRel, Gpu, _>(p, v, 1) => "atom.acq_rel.gpu.global.cas.b32";
    compare_exchange_u64(p: *mut u64, v: u64) atomic::compare_exchange::<Acquire, Sys, _>(p, v, 1) => "atom.acquire.sys.global.cas.b64";
    reduce_add(p: *mut f32, v: f32) atomic::reduce_add::<Relaxed, Gpu, _>(p, v) => "red.relaxed.gpu.global.add.f32";
    reduce_add_u32(p: *mut u32, v: u32) atomic::reduce_add::<Release, Gpu, _>(p, v) => "red.release.gpu.global.add.u32";
    reduce_min(p: *mut u32, v: u32) atomic::reduce_min::<Relaxed, Cta, _>(p, v) => "red.relaxed.cta.global.min.u32";
    reduce_max(p: *mut i32, v: i32) atomic::reduce_max::<Release, Sys, _>(p, v) => "red.release.sys.global.max.s32";
    reduce_or(p: *mut u32, v: u32) atomic::reduce_or::<Release, Cta, _>(p, v) => "red.release.cta.global.or.b32";
    atomic_load(p: *const u32) atomic::load::<Acquire, Gpu, _>(p) => "ld.acquire.gpu.global.b32";
    atomic_load_relaxed(p: *const f32) atomic::load::<Relaxed, Sys, _>(p) => "ld.relaxed.sys.global.f32";
    atomic_store(p: *mut u64, v: u64) atomic::store::<Release, Gpu, _>(p, v) => "st.release.gpu.global.b64";
    atomic_store_relaxed(p: *mut u32, v: u32) atomic::store::<Relaxed, Cta, _>(p, v) => "st.relaxed.cta.global.b32";
    shared_fetch_add_u32(a: u32, v: u32) atomic::shared::fetch_add_u32(a, v) => "atom.acq_rel.cta.shared.add.u32";
    shared_fetch_add_relaxed_u32(a: u32, v: u32) atomic::shared::fetch_add_relaxed_u32(a, v) => "atom.relaxed.cta.shared.add.u32";
    shared_fetch_max_relaxed_u32(a: u32, v: u32) atomic::shared::fetch_max_relaxed_u32(a, v) => "atom.relaxed.cta.shared.max.u32";
    shared_load_relaxed_u32(a: u32) atomic::shared::load_relaxed_u32(a) => "ld.relaxed.cta.shared.u32";
    shared_fetch_add_f32(a: u32, v: f32) atomic::shared::fetch_add_f32(a, v) => "atom.acq_rel.cta.shared.add.f32";
    shared_fetch_max_u32(a: u32, v: u32) atomic::shared::fetch_max_u32(a, v) => "atom.acq_rel.cta.shared.max.u32";
    shared_fetch_max_i32(a: u32, v: i32) atomic::shared::fetch_max_i32(a, v) => "atom.acq_rel.cta.shared.max.s32";
    shared_fetch_min_u32(a: u32, v: u32) atomic::shared::fetch_min_u32(a, v) => "atom.acq_rel.cta.shared.min.u32";
    shared_fetch_and_u32(a: u32, v: u32) atomic::shared::fetch_and_u32(a, v) => "atom.acq_rel.cta.shared.and.b32";
    shared_fetch_or_u32(a: u32, v: u32) atomic::shared::fetch_or_u32(a, v) => "atom.acq_rel.cta.shared.or.b32";
    shared_exchange_u32(a: u32, v: u32) atomic::shared::exchange_u32(a, v) => "atom.acq_rel.cta.shared.exch.b32";
    shared_compare_exchange_u32(a: u32, v: u32) atomic::shared::compare_exchange_u32(a, v, 1) => "atom.acq_rel.cta.shared.cas.b32";

    ldmatrix_x1(a: u32) mma::ldmatrix_x1(a) => "ldmatrix.sync.aligned.m8n8.x1.shared.b16";
    ldmatrix_x2(a: u32) mma::ldmatrix_x2(a) => "ldmatrix.sync.aligned.m8n8.x2.shared.b16";
    ldmatrix_x4(a: u32) mma::ldmatrix_x4(a) => "ldmatrix.sync.aligned.m8n8.x4.shared.b16";
    ldmatrix_x1_trans(a: u32) mma::ldmatrix_x1_trans(a) => "ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16";
    ldmatrix_x2_trans(a: u32) mma::ldmatrix_x2_trans(a) => "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16";
    ldmatrix_x4_trans(a: u32) mma::ldmatrix_x4_trans(a) => "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16";
    movmatrix_trans(a: u32) mma::movmatrix_trans(a) => "movmatrix.sync.aligned.m8n8.trans.b16";
    m16n8k16_bf16(d: [f32; 4], a: [u32; 4], b: [u32; 2]) { let mut d = d; mma::m16n8k16_bf16(&mut d, a, b); d }
        => "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32";
    m16n8k16_f16(d: [f32; 4], a: [u32; 4], b: [u32; 2]) { let mut d = d; mma::m16n8k16_f16(&mut d, a, b); d }
        => "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32";
    m16n8k8_bf16(d: [f32; 4], a: [u32; 2], b: [u32; 1]) { let mut d = d; mma::m16n8k8_bf16(&mut d, a, b); d }
        => "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32";
    m16n8k8_f16(d: [f32; 4], a: [u32; 2], b: [u32; 1]) { let mut d = d; mma::m16n8k8_f16(&mut d, a, b); d }
        => "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32";

    f32x2_to_bf16x2(a: f32, b: f32) convert::f32x2_to_bf16x2(a, b) => "cvt.rn.bf16x2.f32";
    f32x2_to_f16x2(a: f32, b: f32) convert::f32x2_to_f16x2(a, b) => "cvt.rn.f16x2.f32";
    f32x2_to_bf16x2_relu(a: f32, b: f32) convert::f32x2_to_bf16x2_relu(a, b) => "cvt.rn.relu.bf16x2.f32";
    bf16x2_to_f32(a: u32) convert::bf16x2_to_f32(a) => "shl.b32", "and.b32";
    f16x2_to_f32(a: u32) convert::f16x2_to_f32(a) => "2* cvt.f32.f16";
    f32_to_bf16(a: f32) convert::f32_to_bf16(a) => "cvt.rn.bf16.f32";
    f32_to_f16(a: f32) convert::f32_to_f16(a) => "cvt.rn.f16.f32";
    bf16_to_f32(a: u16) convert::bf16_to_f32(a) => "shl.b32";
    f16_to_f32(a: u16) convert::f16_to_f32(a) => "cvt.f32.f16";

    ex2(x: f32) math::ex2(x) => "ex2.approx.ftz.f32";
    lg2(x: f32) math::lg2(x) => "lg2.approx.ftz.f32";
    rcp(x: f32) math::rcp(x) => "rcp.approx.ftz.f32";
    rsqrt(x: f32) math::rsqrt(x) => "rsqrt.approx.ftz.f32";
    sqrt(x: f32) math::sqrt(x) => "sqrt.approx.ftz.f32";
    sin(x: f32) math::sin(x) => "sin.approx.ftz.f32";
    cos(x: f32) math::cos(x) => "cos.approx.ftz.f32";
    tanh(x: f32) math::tanh(x) => "tanh.approx.f32";
    fma(a: f32, b: f32, c: f32) math::fma(a, b, c) => "fma.rn.f32";
    ex2_f16x2(x: u32) math::ex2_f16x2(x) => "ex2.approx.f16x2";
    tanh_f16x2(x: u32) math::tanh_f16x2(x) => "tanh.approx.f16x2";
    add_f16x2(a: u32, b: u32) math::add_f16x2(a, b) => "add.rn.f16x2";
    mul_f16x2(a: u32, b: u32) math::mul_f16x2(a, b) => "mul.rn.f16x2";
    fma_f16x2(a: u32, b: u32, c: u32) math::fma_f16x2(a, b, c) => "fma.rn.f16x2";
    fma_bf16x2(a: u32, b: u32, c: u32) math::fma_bf16x2(a, b, c) => "fma.rn.bf16x2";
    max_f16x2(a: u32, b: u32) math::max_f16x2(a, b) => "max.f16x2";
    max_bf16x2(a: u32, b: u32) math::max_bf16x2(a, b) => "max.bf16x2";
    div_u32(a: u32, b: u32) math::div_u32(a, b) => "div.u32";
    shift_right(a: u32, places: u32) math::shift_right(a, places) => "shr.u32";
    mul_high_u32(a: u32, b: u32) math::mul_high_u32(a, b) => "mul.hi.u32";
}
