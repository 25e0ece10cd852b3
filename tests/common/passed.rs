//! Pages that every window has passed: an engine may have freed them, and nothing may read them.
// Each program uses its own part of this.
#![allow(dead_code)]

use std::collections::HashSet;

use tandem_attn::{
    plan::{PlanOptions, SplitMode},
    problem::{Batch, Compute, Dtype, Spec},
    step::Rope,
    tensor::Element,
};

use super::problems::{Tensors, prefixed};

/// Keys and queries of requests: decodes, and prompts.
pub const DECODES: &[(u32, usize, u32)] = &[(330, 0, 1), (200, 0, 3)];
pub const PROMPTS: &[(u32, usize, u32)] = &[(330, 0, 70), (210, 0, 20)];

/// Batches with windows, of pages of several sizes.
pub fn batches(requests: &[(u32, usize, u32)]) -> impl Iterator<Item = Batch> + '_ {
    [16, 8, 3]
        .into_iter()
        .map(|page| prefixed(requests, page, false, 3))
}

/// With fixed splits, and without.
pub fn options(batch: &Batch) -> [PlanOptions; 2] {
    let options = PlanOptions::default();
    let tokens = 24 * batch.parts[0].table.page_size;
    [options, options.with_split(SplitMode::Fixed { tokens })]
}

/// Specifications by the type of their pools: 16 bits, and e4m3.
pub fn specs() -> [Vec<Spec>; 2] {
    let spec = Spec::new(4, 1, 128);
    let of_8_bits = spec.with_kv_dtype(Dtype::F8E4M3);
    let specs = [
        vec![
            spec,
            spec.with_rotary(Rope::new(128, 1e4)),
            Spec::new(4, 1, 512),
            Spec::latent(8, 512, 64),
        ],
        vec![of_8_bits, of_8_bits.with_compute(Compute::F8)],
    ];
    specs.map(|specs| {
        let windows = |spec: Spec| [20, 50].map(|window| spec.with_window_left(window));
        specs.into_iter().flat_map(windows).collect()
    })
}

/// Makes all keys and values NaN that lie in pages before all windows. There are some.
pub fn spoil<Q: Element, T: Element>(tensors: &mut Tensors<Q, T>, spec: &Spec, batch: &Batch) {
    let table = &batch.parts[0].table;
    let window = spec.variant.window_left.expect("a window");
    let (mut all, mut seen) = (HashSet::new(), HashSet::new());
    for request in 0..table.row_blocks() {
        let first = (table.kv_len(request) - batch.q_len(request)).saturating_sub(window);
        let pages = table.pages(request);
        all.extend(pages.iter().copied());
        seen.extend(pages[(first / table.page_size) as usize..].iter().copied());
    }
    let pools = &mut tensors.parts[0];
    let mut passed = 0;
    for &page in all.difference(&seen) {
        for (pool, stride) in [
            (&mut pools.k, pools.k_strides.page),
            (&mut pools.v, pools.v_strides.page),
        ] {
            let begin = page as usize * stride as usize;
            if let Some(page) = pool.get_mut(begin..begin + stride as usize) {
                page.fill(T::from_f32(f32::NAN));
            }
        }
        passed += 1;
    }
    assert!(passed > 0);
}
