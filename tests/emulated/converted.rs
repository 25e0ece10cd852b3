//! Prompts on 8-bit pages are those on 16-bit pages of the same numbers, to the bit.

use half::bf16;
use tandem_attn::{
    exec::emulated::Emulated,
    plan::{Kernel, PlanOptions, Planner, SplitMode},
    problem::{KvLayout, Spec},
    tensor::{Element, F8E4M3, F8E5M2},
};

use crate::{
    no_failure,
    passed_pages::run,
    problems::{Pools, Tensors, prefixed},
    settings,
};

fn check<K: Element>(spec: Spec, page: u32, layout: KvLayout, seed: u64) {
    let _others = no_failure();
    let emulated = Emulated::new(settings((seed % 3) as u8, seed)).expect("the emulator");
    let narrow = spec.with_kv_dtype(K::DTYPE);
    // Fewer rows than 256 would be decodes.
    let batch = prefixed(&[(140, 0, 70), (90, 1, 80)], page, false, seed);
    let tensors = Tensors::<bf16, K>::random(&narrow, &batch, layout, seed);
    let side = |side: &[K]| side.iter().map(|x| bf16::from_f32(x.to_f32())).collect();
    let widened = |pools: &Pools<K>| Pools {
        k: side(&pools.k),
        v: side(&pools.v),
        k_strides: pools.k_strides,
        v_strides: pools.v_strides,
    };
    let wide = Tensors {
        q: tensors.q.clone(),
        parts: tensors.parts.iter().map(widened).collect(),
    };
    let options = PlanOptions::default().with_split(SplitMode::Off);
    let planned = |spec: &Spec| {
        let plan = Planner::new().plan(spec, &batch, &emulated.device(), &options);
        let plan = plan.expect("it can be planned");
        let prefills = plan
            .groups
            .iter()
            .all(|group| group.kernel == Kernel::Prefill);
        assert!(prefills, "{spec:?}: {plan}");
        plan
    };
    let got = run(&emulated, &planned(&narrow), &tensors);
    let right = run(&emulated, &planned(&spec), &wide);
    assert!(got == right, "{narrow:?}, pages of {page}, {layout:?}");
}

#[test]
fn prompts_of_8_bit_pages_are_those_of_16_bit_pages_to_the_bit() {
    for (seed, dim) in (0..).zip([64, 128, 256, 64, 128, 256]) {
        let mut spec = Spec::new(8, 2, dim);
        spec.variant.sinks = seed % 2 == 1;
        spec.variant.window_left = (seed % 3 == 2).then_some(30);
        // Converted pages have 64 keys. Blocks of keys end at other ones where pages are shorter.
        let page = [64, 128][seed as usize / 2 % 2];
        let layout = [KvLayout::Nhd, KvLayout::Hnd][seed as usize % 2];
        check::<F8E5M2>(spec, page, layout, seed);
        check::<F8E4M3>(spec, page, layout, seed);
        spec.variant.soft_cap = Some(20.0);
        check::<F8E4M3>(spec, page, layout, seed);
    }
}
