//! Prefills on 8-bit pages are those on converted pages.

use super::*;

/// Prefills are those of the kernel for 16 bits on a pool of the same numbers, each times the scale of its token if it has
/// one: pages of 64 keys, head after head. In a captured graph they convert the keys themselves, otherwise a launch before them
/// does if few rows see a key.
fn converted<T: Element, K: Element>(gpu: &Gpu, seed: u64, granularity: u32) {
    const PAGE: u32 = 64;
    let mut noise = Rng(seed);
    let dim = [64, 128, 256][seed as usize % 3];
    let heads = [(4, 4), (8, 2), (12, 1)][noise.below(3)];
    let mut spec = Spec::new(heads.0, heads.1, dim).with_dtype(T::DTYPE);
    if noise.below(3) == 0 {
        spec = spec.with_window_left(noise.below(200) as u32);
    }
    spec.variant.causal = noise.below(4) > 0;
    // Planning refuses e5m2 with a soft cap.
    if K::DTYPE == Dtype::F8E4M3 && granularity == 0 && noise.below(3) == 0 {
        spec = spec.with_soft_cap(20.0);
    }
    spec.variant.sinks = noise.below(3) == 0;
    let requests: Vec<_> = (0..1 + noise.below(4))
        .map(|_| {
            // Requests of up to 256 rows are decodes.
            let least = (256 / spec.group() + 1).max(70);
            let queries = least + noise.below(500) as u32;
            (1 + noise.below(700) as u32, noise.below(5), queries)
        })
        .collect();
    let batch = prefixed(&requests, PAGE, false, seed);
    let layout = KvLayout::Hnd;
    let narrow = spec.with_kv_dtype(K::DTYPE);
    let tensors = Tensors::<T, K>::random(&narrow, &batch, layout, seed);
    let case = |spec: Spec| Case {
        spec,
        batch: batch.clone(),
        layout,
        options: PlanOptions::default().with_split(SplitMode::Off),
        captured: false,
        granularity,
        powers: false,
        query_exponent: 0,
        seed,
    };
    let plan = |case: &Case| {
        let plan = Planner::new().plan(&case.spec, &batch, &gpu.device(), &case.options);
        let plan = plan.expect("it can be planned");
        let are_prefills = plan.groups.iter().all(|of| of.kernel == Kernel::Prefill);
        assert!(are_prefills, "seed {seed}: {:?}", case.spec);
        plan
    };
    let (narrow, spec) = (case(narrow), case(spec));
    let captured = Case {
        captured: true,
        ..case(narrow.spec)
    };
    let scales = Scales::random(&narrow);
    let memory = [
        Memory::new(&[&scales.k[..], &[f32::NAN]].concat()),
        Memory::new(&[&scales.v[..], &[f32::NAN]].concat()),
        Memory::new(&scales.of_token),
    ];
    let wide = Tensors::<T, T> {
        q: tensors.q.clone(),
        parts: vec![rounded(&narrow, &tensors, &scales)],
    };
    let scales = on_device(&narrow, &memory);
    let [got, again] = run_twice(gpu, &narrow, &plan(&narrow), &tensors, scales);
    let [by_itself, _] = run_twice(gpu, &captured, &plan(&narrow), &tensors, scales);
    let [right, _] = run_twice(gpu, &spec, &plan(&spec), &wide, gpu::KvScales::One);
    assert!(got == right, "seed {seed}: {:?}", narrow.spec);
    assert!(got == again, "seed {seed}: two runs differ");
    assert!(got == by_itself, "seed {seed}: a captured launch");
}

#[test]
fn prefill_of_8_bit_pages_is_that_of_converted_ones_to_the_bit() {
    let Some(gpu) = gpu("prefill_of_8_bit_pages_is_that_of_converted_ones_to_the_bit") else {
        return;
    };
    for seed in 0..cases(60).cases.into() {
        let granularity = if seed / 2 % 3 == 2 { 4 } else { 0 };
        match (seed % 2, seed % 5 == 4) {
            (0, false) => converted::<bf16, F8E4M3>(gpu, seed / 2, granularity),
            (_, false) => converted::<f16, F8E4M3>(gpu, seed / 2, granularity),
            (0, true) => converted::<bf16, F8E5M2>(gpu, seed / 2, granularity),
            (_, true) => converted::<f16, F8E5M2>(gpu, seed / 2, granularity),
        }
    }
}
