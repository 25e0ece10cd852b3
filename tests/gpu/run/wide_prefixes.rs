//! Prefixes that prefills read beside the keys that each decode has of its own.

use half::{bf16, f16};
use tandem_attn::{
    exec::gpu::Gpu,
    plan::{Kernel, PlanOptions, pod::PodMode},
    problem::{Batch, KvLayout, PageTable, Spec},
    tensor::Element,
};

use super::{Case, check_as_it_is, hopper};
use crate::common::Rng;

/// Decodes behind prefixes of so many keys, so many each, with 1 to 60 keys of their own; and one behind none.
pub fn batch(page_size: u32, prefixes: &[(u32, u32)], seed: u64) -> Batch {
    let mut random = Rng(seed);
    let mut requests = Vec::new();
    let mut next = 0;
    for &(keys, count) in prefixes {
        let common: Vec<u32> = (next..next + keys / page_size).collect();
        next += keys / page_size;
        for _ in 0..count {
            let own = 1 + random.below(60) as u32;
            let mut pages = common.clone();
            pages.extend(next..next + own.div_ceil(page_size));
            next += own.div_ceil(page_size);
            requests.push((pages, keys + own));
        }
    }
    let last = 40_u32.div_ceil(page_size);
    requests.push(((next..next + last).collect(), 40));
    let mut table = PageTable::new(page_size, next + last);
    for (pages, keys) in &requests {
        table.push(pages, *keys);
    }
    Batch::new((0..=requests.len() as u32).collect(), table)
}

fn check<T: Element>(
    gpu: &Gpu,
    (q_heads, kv_heads, dim): (u32, u32, u32),
    prefixes: &[(u32, u32)],
    [page_size, sms]: [u32; 2],
) {
    let mut spec = Spec::new(q_heads, kv_heads, dim).with_dtype(T::DTYPE);
    spec.variant.sinks = sms == 8;
    let case = Case {
        spec,
        batch: batch(page_size, prefixes, 5),
        layout: KvLayout::Nhd,
        options: PlanOptions::default().with_pod(PodMode::Fused),
        arch: None,
        sms,
        in_set: false,
        seed: 7,
    };
    let plan = case.plan(gpu);
    let kernels = Kernel::ALL.map(|kernel| plan.groups.iter().any(|group| group.kernel == kernel));
    assert_eq!(kernels, [true; 2], "{plan}");
    check_as_it_is::<T>(gpu, &case).unwrap();
    let captured = Case {
        in_set: true,
        ..case
    };
    check_as_it_is::<T>(gpu, &captured).unwrap();
}

#[test]
fn prefixes_beside_other_keys_are_the_reference() {
    let Some(gpu) = hopper("prefixes_beside_other_keys_are_the_reference") else {
        return;
    };
    for page_size in [16, 1] {
        check::<bf16>(gpu, (4, 1, 128), &[(272, 40)], [page_size, 132]);
        check::<f16>(gpu, (14, 2, 128), &[(400, 19), (256, 37)], [page_size, 132]);
        check::<bf16>(gpu, (8, 1, 128), &[(1024, 16)], [page_size, 8]);
        check::<bf16>(gpu, (8, 2, 64), &[(272, 40)], [page_size, 132]);
    }
}
