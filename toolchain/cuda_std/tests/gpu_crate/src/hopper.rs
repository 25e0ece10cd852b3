//! Wrappers for Hopper (sm_90a), except `wgmma`.

use cuda_std::{
    cluster, convert, fence, griddep, math, mbarrier, mma, setmaxnreg,
    tma::{self, TensorMap},
    warp,
};

probes! {
    elect_sync(mask: u32) warp::elect_sync(mask) => "elect.sync %r";
    griddep_wait() griddep::wait() => "griddepcontrol.wait;";
    griddep_launch_dependents() griddep::launch_dependents() => "griddepcontrol.launch_dependents;";

    cluster_arrive() cluster::arrive() => "barrier.cluster.arrive.aligned;";
    cluster_arrive_relaxed() cluster::arrive_relaxed() => "barrier.cluster.arrive.relaxed.aligned;";
    cluster_wait() cluster::wait() => "barrier.cluster.wait.aligned;";
    cluster_sync() cluster::sync() => "barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;";
    cluster_cta_idx_x() cluster::cta_idx_x() => "%cluster_ctaid.x";
    cluster_cta_idx_y() cluster::cta_idx_y() => "%cluster_ctaid.y";
    cluster_cta_idx_z() cluster::cta_idx_z() => "%cluster_ctaid.z";
    cluster_cta_dim_x() cluster::cta_dim_x() => "%cluster_nctaid.x";
    cluster_cta_dim_y() cluster::cta_dim_y() => "%cluster_nctaid.y";
    cluster_cta_dim_z() cluster::cta_dim_z() => "%cluster_nctaid.z";
    cluster_cta_rank() cluster::cta_rank() => "%cluster_ctarank";
    cluster_cta_count() cluster::cta_count() => "%cluster_nctarank";
    cluster_idx_x() cluster::cluster_idx_x() => "%clusterid.x";
    cluster_idx_y() cluster::cluster_idx_y() => "%clusterid.y";
    cluster_idx_z() cluster::cluster_idx_z() => "%clusterid.z";
    cluster_dim_x() cluster::cluster_dim_x() => "%nclusterid.x";
    cluster_dim_y() cluster::cluster_dim_y() => "%nclusterid.y";
    cluster_dim_z() cluster::cluster_dim_z() => "%nclusterid.z";
    cluster_map_shared_rank(a: u32, rank: u32) cluster::map_shared_rank(a, rank) => "mapa.shared::cluster.u32";
    cluster_load(a: u32) cluster::load(a) => "ld.shared::cluster.b32";
    cluster_store(a: u32, v: u32) cluster::store(a, v) => "st.shared::cluster.b32";
    cluster_store_u64(a: u32, v: u64) cluster::store_u64(a, v) => "st.shared::cluster.b64";
    cluster_store_u64_async(a: u32, v: u64, b: u32) cluster::store_u64_async(a, v, b) => "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64";

    fence_acq_rel_cluster() fence::acq_rel_cluster() => "fence.acq_rel.cluster;";
    fence_proxy_async() fence::proxy_async() => "fence.proxy.async;";
    fence_proxy_async_shared() fence::proxy_async_shared() => "fence.proxy.async.shared::cta;";
    fence_proxy_async_global() fence::proxy_async_global() => "fence.proxy.async.global;";
    fence_mbarrier_init() fence::mbarrier_init() => "fence.mbarrier_init.release.cluster;";

    mbarrier_arrive(b: u32) mbarrier::arrive(b) => "mbarrier.arrive.shared::cta.b64 _, [";
    mbarrier_arrive_count(b: u32, n: u32) mbarrier::arrive_count(b, n) => "mbarrier.arrive.shared::cta.b64 _, [";
    mbarrier_expect_tx(b: u32, n: u32) mbarrier::expect_tx(b, n) => "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [";
    mbarrier_arrive_expect_tx(b: u32, n: u32) mbarrier::arrive_expect_tx(b, n) => "mbarrier.arrive.expect_tx.shared::cta.b64 _, [";
    mbarrier_arrive_cluster(b: u32) mbarrier::arrive_cluster(b) => "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [";
    mbarrier_arrive_count_cluster(b: u32, n: u32) mbarrier::arrive_count_cluster(b, n) => "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [";
    mbarrier_arrive_expect_tx_cluster(b: u32, n: u32) mbarrier::arrive_expect_tx_cluster(b, n)
        => "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [";
    mbarrier_arrive_remote(b: u32, rank: u32) mbarrier::arrive_remote(b, rank)
        => "mapa.shared::cluster.u32", "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [";
    mbarrier_try_wait(b: u32, p: u32) mbarrier::try_wait(b, p) => "mbarrier.try_wait.parity.shared::cta.b64 p, [";
    mbarrier_try_wait_cluster(b: u32, p: u32) mbarrier::try_wait_cluster(b, p) => "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [";
    mbarrier_wait(b: u32, p: u32) mbarrier::wait(b, p) => "mbarrier.try_wait.parity.shared::cta.b64 p, [", "bra WAIT;";
    mbarrier_wait_cluster(b: u32, p: u32) mbarrier::wait_cluster(b, p) => "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [", "bra WAIT;";
    // Two waits in one entry: the label of each must be local.
    mbarrier_two_waits(b: u32, p: u32) { mbarrier::wait(b, p); mbarrier::wait(b + 8, p) } => "2* bra WAIT;";

    load_tensor_1d(a: u32, m: *const TensorMap, c: i32, b: u32) tma::load_tensor(a, m, [c], b)
        => "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [";
    load_tensor_2d(a: u32, m: *const TensorMap, c: i32, b: u32) tma::load_tensor(a, m, [c, 1], b)
        => "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [";
    load_tensor_3d(a: u32, m: *const TensorMap, c: i32, b: u32) tma::load_tensor(a, m, [c, 1, 2], b)
        => "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [";
    load_tensor_4d(a: u32, m: *const TensorMap, c: i32, b: u32) tma::load_tensor(a, m, [c, 1, 2, 3], b)
        => "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [";
    load_tensor_5d(a: u32, m: *const TensorMap, c: i32, b: u32) tma::load_tensor(a, m, [c, 1, 2, 3, 4], b)
        => "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [";
    load_tensor_hint(a: u32, m: *const TensorMap, c: i32, b: u32, l2: u64) {
        tma::load_tensor_hint(a, m, [c], b, l2);
        tma::load_tensor_hint(a, m, [c, 1], b, l2);
        tma::load_tensor_hint(a, m, [c, 1, 2], b, l2);
        tma::load_tensor_hint(a, m, [c, 1, 2, 3], b, l2);
        tma::load_tensor_hint(a, m, [c, 1, 2, 3, 4], b, l2)
    } => "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [",
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [",
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [",
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [",
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [";
    load_tensor_multicast(a: u32, m: *const TensorMap, c: i32, b: u32, ctas: u16) {
        tma::load_tensor_multicast(a, m, [c], b, ctas);
        tma::load_tensor_multicast(a, m, [c, 1], b, ctas);
        tma::load_tensor_multicast(a, m, [c, 1, 2], b, ctas);
        tma::load_tensor_multicast(a, m, [c, 1, 2, 3], b, ctas);
        tma::load_tensor_multicast(a, m, [c, 1, 2, 3, 4], b, ctas)
    } => "5* mbarrier::complete_tx::bytes.multicast::cluster [";
    load_tensor_multicast_hint(a: u32, m: *const TensorMap, c: i32, b: u32, ctas: u16, l2: u64) {
        tma::load_tensor_multicast_hint(a, m, [c], b, ctas, l2);
        tma::load_tensor_multicast_hint(a, m, [c, 1], b, ctas, l2);
        tma::load_tensor_multicast_hint(a, m, [c, 1, 2], b, ctas, l2);
        tma::load_tensor_multicast_hint(a, m, [c, 1, 2, 3], b, ctas, l2);
        tma::load_tensor_multicast_hint(a, m, [c, 1, 2, 3, 4], b, ctas, l2)
    } => "5* mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [";
    store_tensor(m: *const TensorMap, c: i32, a: u32) {
        tma::store_tensor(m, [c], a);
        tma::store_tensor(m, [c, 1], a);
        tma::store_tensor(m, [c, 1, 2], a);
        tma::store_tensor(m, [c, 1, 2, 3], a);
        tma::store_tensor(m, [c, 1, 2, 3, 4], a)
    } => "cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [",
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [",
        "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [",
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [",
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [";
    store_tensor_hint(m: *const TensorMap, c: i32, a: u32, l2: u64) {
        tma::store_tensor_hint(m, [c], a, l2);
        tma::store_tensor_hint(m, [c, 1], a, l2);
        tma::store_tensor_hint(m, [c, 1, 2], a, l2);
        tma::store_tensor_hint(m, [c, 1, 2, 3], a, l2);
        tma::store_tensor_hint(m, [c, 1, 2, 3, 4], a, l2)
    } => "5* global.shared::cta.bulk_group.L2::cache_hint [";
    reduce_add_tensor(m: *const TensorMap, c: i32, a: u32) {
        tma::reduce_add_tensor(m, [c], a);
        tma::reduce_add_tensor(m, [c, 1], a);
        tma::reduce_add_tensor(m, [c, 1, 2], a);
        tma::reduce_add_tensor(m, [c, 1, 2, 3], a);
        tma::reduce_add_tensor(m, [c, 1, 2, 3, 4], a)
    } => "5* global.shared::cta.add.bulk_group [";
    prefetch_tensor(m: *const TensorMap, c: i32) {
        tma::prefetch_tensor(m, [c]);
        tma::prefetch_tensor(m, [c, 1]);
        tma::prefetch_tensor(m, [c, 1, 2]);
        tma::prefetch_tensor(m, [c, 1, 2, 3]);
        tma::prefetch_tensor(m, [c, 1, 2, 3, 4])
    } => "5* cp.async.bulk.prefetch.tensor.";
    prefetch_tensor_map(m: *const TensorMap) tma::prefetch_tensor_map(m) => "prefetch.tensormap [";
    load_bulk(a: u32, p: *const u8, n: u32, b: u32) tma::load_bulk(a, p, n, b)
        => "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [";
    load_bulk_hint(a: u32, p: *const u8, n: u32, b: u32, l2: u64) tma::load_bulk_hint(a, p, n, b, l2)
        => "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [";
    load_bulk_multicast(a: u32, p: *const u8, n: u32, b: u32, ctas: u16) tma::load_bulk_multicast(a, p, n, b, ctas)
        => "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [";
    load_bulk_multicast_hint(a: u32, p: *const u8, n: u32, b: u32, ctas: u16, l2: u64) tma::load_bulk_multicast_hint(a, p, n, b, ctas, l2)
        => "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [";
    copy_bulk_cluster(a: u32, s: u32, n: u32, b: u32) tma::copy_bulk_cluster(a, s, n, b)
        => "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [";
    store_bulk(p: *mut u8, a: u32, n: u32) tma::store_bulk(p, a, n) => "cp.async.bulk.global.shared::cta.bulk_group [";
    store_bulk_hint(p: *mut u8, a: u32, n: u32, l2: u64) tma::store_bulk_hint(p, a, n, l2)
        => "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [";
    reduce_add_bulk_f32(p: *mut f32, a: u32, n: u32) tma::reduce_add_bulk_f32(p, a, n)
        => "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [";
    prefetch_bulk(p: *const u8, n: u32) tma::prefetch_bulk(p, n) => "cp.async.bulk.prefetch.L2.global [";
    bulk_commit_group() tma::commit_group() => "cp.async.bulk.commit_group;";
    bulk_wait_group() tma::wait_group::<1>() => "cp.async.bulk.wait_group 1;";
    bulk_wait_group_read() tma::wait_group_read::<1>() => "cp.async.bulk.wait_group.read 1;";

    stmatrix_x1(a: u32, v: u32) mma::stmatrix_x1(a, [v]) => "stmatrix.sync.aligned.m8n8.x1.shared.b16";
    stmatrix_x2(a: u32, v: u32) mma::stmatrix_x2(a, [v, 1]) => "stmatrix.sync.aligned.m8n8.x2.shared.b16";
    stmatrix_x4(a: u32, v: u32) mma::stmatrix_x4(a, [v, 1, 2, 3]) => "stmatrix.sync.aligned.m8n8.x4.shared.b16";
    stmatrix_x1_trans(a: u32, v: u32) mma::stmatrix_x1_trans(a, [v]) => "stmatrix.sync.aligned.m8n8.x1.trans.shared.b16";
    stmatrix_x2_trans(a: u32, v: u32) mma::stmatrix_x2_trans(a, [v, 1]) => "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16";
    stmatrix_x4_trans(a: u32, v: u32) mma::stmatrix_x4_trans(a, [v, 1, 2, 3]) => "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16";

    f32x2_to_e4m3x2(a: f32, b: f32) convert::f32x2_to_e4m3x2(a, b) => "cvt.rn.satfinite.e4m3x2.f32";
    f32x2_to_e5m2x2(a: f32, b: f32) convert::f32x2_to_e5m2x2(a, b) => "cvt.rn.satfinite.e5m2x2.f32";
    e4m3x2_to_f16x2(a: u16) convert::e4m3x2_to_f16x2(a) => "cvt.rn.f16x2.e4m3x2";
    e5m2x2_to_f16x2(a: u16) convert::e5m2x2_to_f16x2(a) => "cvt.rn.f16x2.e5m2x2";
    ex2_bf16x2(x: u32) math::ex2_bf16x2(x) => "ex2.approx.ftz.bf16x2";
    tanh_bf16x2(x: u32) math::tanh_bf16x2(x) => "tanh.approx.bf16x2";
    add_bf16x2(a: u32, b: u32) math::add_bf16x2(a, b) => "add.rn.bf16x2";
    mul_bf16x2(a: u32, b: u32) math::mul_bf16x2(a, b) => "mul.rn.bf16x2";
}

/// Launch bounds make ptxas honour `setmaxnreg`.
#[cuda_std::kernel(max_threads = 256, min_blocks = 1)]
pub unsafe fn set_max_registers(out: *mut u32) {
    unsafe {
        core::arch::asm!(
            "// expect setmaxnreg.inc.sync.aligned.u32 240;",
            options(nomem)
        );
        core::arch::asm!(
            "// expect setmaxnreg.dec.sync.aligned.u32 40;",
            options(nomem)
        );
        if cuda_std::thread::thread_idx_x() < 128 {
            setmaxnreg::decrease::<40>();
            *out = 1;
        } else {
            setmaxnreg::increase::<240>();
            *out.add(1) = 2;
        }
    }
}
