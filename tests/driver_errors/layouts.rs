//! Keys and values are read by tensor maps wherever these describe the pool, by prompts and by decodes.

use std::{ffi::c_void, mem, ptr::NonNull};

use tandem_attn::{
    abi::KvStrides,
    exec::gpu::{DeviceTensor, Gpu, KvPool, Stream},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
};

use crate::{
    driver::{planned, with_young_driver, workspace},
    layouts_of_pools::{layouts, uneven},
};

const PAGES: u32 = 80;

/// Tensor maps that a run of one request makes.
fn maps(gpu: &Gpu, spec: &Spec, queries: u32, [k, v]: [KvStrides; 2]) -> i32 {
    let symbol = libcuda::symbol(c"fake_encodes").unwrap();
    // SAFETY: the type is that of the function in the fake driver.
    let encodes = unsafe { mem::transmute::<NonNull<c_void>, extern "C" fn() -> i32>(symbol) };
    let mut table = PageTable::new(k.page_size, PAGES);
    let keys = PAGES * k.page_size;
    table.push(&(0..PAGES).collect::<Vec<_>>(), keys);
    let plan = planned(gpu, spec, &Batch::new(vec![0, queries], table));
    let mut workspace = workspace(gpu, &plan);
    let rows = |dim: u32| {
        let shape = [queries, spec.q_heads, dim].map(|extent| extent as usize);
        DeviceTensor::new(1 << 30, Dtype::BF16, shape)
    };
    let (q, out) = (rows(spec.head_dim_qk), rows(spec.head_dim_v));
    let pool = KvPool::new(spec, KvLayout::Nhd, k.page_size, PAGES, 1 << 33, 1 << 34);
    let pools = [pool.with_strides(k, v)];
    let before = encodes();
    // SAFETY: the fake driver follows no address.
    unsafe {
        workspace.upload(&plan, Stream::DEFAULT).unwrap();
        let run = gpu.run(&mut workspace, &q, &pools, &out, None, Stream::DEFAULT);
        run.unwrap_or_else(|error| panic!("{spec:?}: {error}"));
    }
    encodes() - before
}

#[test]
fn tensor_maps_describe_pools_wherever_they_can() {
    if !with_young_driver(tensor_maps_describe_pools_wherever_they_can) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let (page, heads) = (16, 4);
    for (dims, whole) in [
        ([64, 64], true),
        ([128, 128], true),
        ([192, 128], true),
        ([256, 256], true),
        ([512, 512], true),
        ([64, 512], true),
        // Padded.
        ([112, 112], false),
    ] {
        let spec = Spec::new(16, heads, dims[0]).with_head_dim_v(dims[1]);
        let dense = |layout: KvLayout| dims.map(|dim| layout.strides(page, heads, dim));
        let mut ways = layouts(page, heads, dims);
        ways.push(("heads of pages", dense(KvLayout::Hnd)));
        if whole {
            ways.extend(uneven(page, heads, dims));
        }
        for queries in [1, 300] {
            let all = maps(&gpu, &spec, queries, dense(KvLayout::Nhd));
            for (way, sides) in &ways {
                let made = maps(&gpu, &spec, queries, *sides);
                assert_eq!(made, all, "{dims:?}, {queries} queries, {way}");
            }
            if dims[0] == dims[1] && dims[0] < 512 && whole {
                // Two layouts in one pool are read row by row: maps are fewer by those of keys and values.
                let mixed = [dense(KvLayout::Nhd)[0], dense(KvLayout::Hnd)[1]];
                assert_eq!(maps(&gpu, &spec, queries, mixed), all - 2, "{dims:?}");
            }
        }
    }
}
