//! Every attention kernel and every merge of the registry, each brought to run by a plan that needs it.

use half::{bf16, f16};
use tandem_attn::{
    exec::gpu::{Arch, Family, Gpu, KernelId, KernelInfo},
    plan::{MergeMode, PlanOptions, QueryStep, SplitMode, Tile, pod::PodMode},
    problem::{Dtype, Spec},
};

use crate::scenarios::{Planned, run_planned};

/// What no plan launches. They run in tests of their own, on a GPU.
const NOT_PLANNED: [&str; 8] = [
    "append_paged_kv_16",
    "append_paged_kv_8",
    "ceiling_multiply",
    "ceiling_read",
    "merge_few_f32",
    "merge_long_f32",
    "merge_states_f32",
    "overlap_loops",
];

/// Kernels that must be launched: all but those, those of the step around attention, which `tests/gpu_step` brings to
/// run, and those of 8-bit caches, which `tests/gpu_fp8.rs` does.
pub fn expected() -> impl Iterator<Item = &'static str> {
    let planned = KernelId::all().map(KernelId::info).filter(|row| {
        row.family != Family::Step && !NOT_PLANNED.contains(&row.name) && !row.name.contains("e4m3")
    });
    planned.map(|row| row.name)
}

fn spec(row: &KernelInfo, group: u32) -> Spec {
    let dtype = match row.name.contains("bf16") {
        true => Dtype::BF16,
        false => Dtype::F16,
    };
    let spec = match row.latent {
        true => Spec::latent(group, row.value_dim, row.head_dim - row.value_dim),
        false => Spec::new(group, 1, row.head_dim).with_head_dim_v(row.value_dim),
    };
    let spec = spec.with_dtype(dtype);
    match row.cap {
        true => spec.with_soft_cap(20.0),
        false => spec,
    }
}

/// A batch that a kernel computes a part of.
fn planned(gpu: &Gpu, row: &KernelInfo) -> Option<Planned> {
    let tile = Tile {
        m: row.rows,
        n: row.keys,
    };
    let (decode, prefill) = (row.name.contains("decode_"), row.name.contains("prefill_"));
    let options = PlanOptions::default().with_pod(PodMode::Serial);
    let mut planned = Planned {
        spec: spec(row, 2),
        requests: &[(90, 40)],
        device: gpu.device(),
        options,
        trees: false,
        arch: (row.arch == Arch::Sm80).then_some(Arch::Sm80),
        page: 16,
    };
    if row.name.contains("_pod_") || row.co_resident {
        planned.spec = spec(row, 4);
        planned.requests = &[(70, 40), (60, 1), (90, 1)];
        planned.options = options.with_pod(PodMode::Fused);
        let configs = &mut planned.device.pod.configs;
        // The decode that goes with a prefill is found by the prefill.
        configs.retain(|config| match row.co_resident {
            true => !config.by_tickets && (decode || config.prefill == tile),
            false => config.by_tickets,
        });
        if decode && row.name.ends_with("stages2") {
            configs.remove(0);
        }
        configs.truncate(1);
        // One kernel that takes turns by tickets replaces the plan's two.
        planned.arch = (!row.co_resident).then_some(Arch::Sm80);
    } else if row.name.starts_with("pad_") {
        planned.spec = Spec::new(4, 1, 80);
        planned.arch = None;
    } else if decode {
        planned.spec = spec(row, row.rows.min(100));
        planned.requests = &[(70, 1), (33, 1), (1, 1)];
        if row.arch == Arch::Sm90a {
            planned.options = options.with_decode_tile(tile);
        } else {
            planned.spec = spec(row, 8);
        }
    } else if row.latent {
        planned.spec = spec(row, 100);
        planned.requests = &[(150, 1), (33, 2), (1, 1)];
        planned.page = if row.stands_in { 4 } else { 16 };
    } else if prefill {
        planned.device.prefill.by_q_len = vec![QueryStep {
            head_dim: None,
            up_to: None,
            rows: row.rows,
            pack: None,
        }];
        if row.stands_in {
            planned.spec = planned.spec.with_sinks();
            planned.trees = true;
        }
    } else if row.name.starts_with("merge_") {
        let of = |kind| row.name.starts_with(kind);
        planned.spec = Spec::new(4, 1, 64).with_dtype(spec(row, 1).q_dtype);
        planned.requests = match (of("merge_long"), of("merge_few")) {
            (true, _) => &[(600, 70), (33, 33)],
            (_, true) => &[(70, 1), (33, 1), (1, 1)],
            _ => &[(70, 70), (33, 33), (90, 90)],
        };
        planned.options = options
            .with_split(SplitMode::Fixed { tokens: 32 })
            .with_merge_mode(MergeMode::Kernel);
    } else {
        return None;
    }
    Some(planned)
}

pub fn run_all(gpu: &Gpu) {
    for name in expected() {
        let row = KernelId::named(name).expect("it is one").info();
        let planned = planned(gpu, row).unwrap_or_else(|| panic!("nothing here runs {}", row.name));
        let result = match planned.spec.q_dtype {
            Dtype::F16 => run_planned::<f16>(gpu, &planned),
            _ => run_planned::<bf16>(gpu, &planned),
        };
        result.unwrap_or_else(|text| panic!("{}: {text}", row.name));
    }
}
