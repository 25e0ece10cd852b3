//! Prompts of plans for Ampere and Ada, whatever the GPU: on pages of 16 and 8 bits, with heads of 256 and with heads between
//! those of the kernels. Compared with attention in f64, and with a second run to the bit.

use tandem_attn::{
    plan::{DeviceDescription, PlanOptions, SplitMode, pod::PodMode},
    problem::{Dtype, KvLayout, Spec},
};

use crate::{
    common::{Rng, gpu, problems::cases},
    launches::attention::{self, Planned},
};

/// Prompts with this head dimension; the seed draws the rest.
fn planned(head_dim: u32, seed: u64) -> Planned {
    let mut rng = Rng(seed);
    let mut pick = |from: &[u32]| from[rng.below(from.len())];
    let (kv_heads, group) = (pick(&[1, 2, 3]), pick(&[1, 2, 4, 7, 20]));
    let mut spec = Spec::new(kv_heads * group, kv_heads, head_dim);
    let eight_bits = [Dtype::F8E4M3, Dtype::F8E5M2];
    if pick(&[0, 1]) == 1 {
        spec = spec.with_dtype(Dtype::F16);
    }
    if pick(&[0, 1]) == 1 {
        spec = spec.with_kv_dtype(eight_bits[pick(&[0, 0, 1]) as usize]);
    }
    if pick(&[0, 0, 1]) == 1 {
        spec = spec.with_soft_cap(20.0);
    }
    if pick(&[0, 0, 1]) == 1 {
        spec = spec.with_window_left(pick(&[0, 40, 300]));
    }
    if pick(&[0, 0, 1]) == 1 {
        spec = spec.with_sinks();
    }
    let trees = pick(&[0, 0, 1]) == 1;
    if pick(&[0, 0, 1]) == 1 && !trees && spec.variant.window_left.is_none() {
        spec = spec.non_causal();
    }
    let requests = (0..pick(&[1, 2, 5]))
        .map(|_| {
            let queries = pick(&[30, 65, 128, 400]);
            (queries + pick(&[0, 1, 77, 1000]), queries)
        })
        .collect();
    let split = match pick(&[0, 1]) {
        0 => SplitMode::Makespan,
        // Chunks are whole pages of any of these sizes.
        _ => SplitMode::Fixed { tokens: 240 },
    };
    Planned {
        spec,
        requests,
        shared: pick(&[0, 3]) as usize,
        device: DeviceDescription::named(["a100", "rtx4090"][pick(&[0, 1]) as usize])
            .expect("it is built in"),
        options: PlanOptions::default()
            .with_pod(PodMode::Serial)
            .with_split(split),
        trees,
        pieces: false,
        by_token: spec.kv_dtype.bytes() == 1 && pick(&[0, 0, 1]) == 1,
        arch: None,
        page: pick(&[16, 1, 5, 48]),
        layout: [KvLayout::Nhd, KvLayout::Hnd][pick(&[0, 1]) as usize],
        seed,
    }
}

#[test]
fn prompts_for_ampere_are_the_reference_and_two_runs_the_same() {
    let name = "prompts_for_ampere_are_the_reference_and_two_runs_the_same";
    let Some(gpu) = gpu(name) else {
        return;
    };
    for seed in 0..u64::from(cases(96).cases) {
        // Every third with a dimension of the kernels.
        let dims = match seed % 3 {
            0 => [64, 128, 256][seed as usize / 3 % 3],
            _ => 16 * (1 + seed as u32 % 16),
        };
        let planned = planned(dims, seed);
        let run = |checked| {
            attention::run(gpu, &planned, checked)
                .unwrap_or_else(|error| panic!("seed {seed}, {:?}: {error}", planned.spec))
        };
        assert!(run(true) == run(false), "seed {seed}: two runs differ");
    }
}
