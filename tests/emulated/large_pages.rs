//! Pages of more tokens than a tile has keys. Plans cut their keys inside of them.

use half::{bf16, f16};
use tandem_attn::{
    exec::emulated::{Emulated, Settings},
    plan::{PlanOptions, Planner, SplitMode, pod::PodMode},
    problem::{KvLayout, Spec},
    tensor::{F8E4M3, F8E5M2},
};

use crate::{
    no_failure,
    plans::{Case, check, check_on},
    problems::prefixed,
    settings,
};

/// Requests of so many keys of their own, pages shared with an earlier one, and queries.
fn case(page: u32, heads: [u32; 3], requests: &[(u32, usize, u32)], split: SplitMode) -> Case {
    let [q_heads, kv_heads, head_dim] = heads;
    Case {
        spec: Spec::new(q_heads, kv_heads, head_dim),
        batch: prefixed(requests, page, false, page.into()),
        options: PlanOptions::default().with_split(split),
        layout: match page % 3 {
            0 => KvLayout::Nhd,
            _ => KvLayout::Hnd,
        },
        schedule: (page % 3) as u8,
        seed: page.into(),
    }
}

/// Where the plan's items begin, in tokens of a page.
fn beginnings(case: &Case, of_gpu: &Settings) -> Vec<u32> {
    let _others = no_failure();
    let emulated = Emulated::new(of_gpu.clone()).expect("the emulator");
    let plan = Planner::new()
        .plan(&case.spec, &case.batch, &emulated.device(), &case.options)
        .expect("the case can be planned");
    let page = case.batch.parts[0].table.page_size;
    let items = plan.items.iter();
    items.map(|item| item.kv_begin % page).collect()
}

#[test]
fn decodes_are_cut_inside_of_pages() {
    for (page, keys) in [(512, 5000), (784, 5000), (4096, 4090), (1001, 5000)] {
        let case = case(page, [8, 1, 128], &[(keys, 0, 1)], SplitMode::Makespan);
        let many = Settings {
            multiprocessors: 132,
            ..settings(case.schedule, case.seed)
        };
        let begins = beginnings(&case, &many);
        assert!(begins.iter().any(|&begin| begin > 0), "{page}: {begins:?}");
        check_on::<bf16, bf16>(&case, many.clone()).unwrap();
        check_on::<bf16, F8E4M3>(&case, many).unwrap();
    }
}

#[test]
fn requests_share_large_pages() {
    for page in [256, 528] {
        let requests = [(300, 0, 1), (5, 1, 1), (40, 1, 1), (9, 1, 1), (70, 2, 1)];
        for split in [SplitMode::Makespan, SplitMode::Fixed { tokens: page }] {
            check::<f16, f16>(&case(page, [16, 1, 64], &requests, split)).unwrap();
        }
    }
}

#[test]
fn prompts_and_hybrids_read_large_pages() {
    for page in [256, 1000, 1001] {
        for pod in [PodMode::Serial, PodMode::Fused] {
            let requests = [(300, 0, 70), (500, 0, 1), (20, 1, 3)];
            let mut case = case(page, [4, 1, 128], &requests, SplitMode::Makespan);
            case.options = case.options.with_pod(pod);
            check::<bf16, bf16>(&case).unwrap();
            case.spec = case.spec.with_window_left(150);
            check::<bf16, bf16>(&case).unwrap();
        }
    }
}

#[test]
fn ampere_reads_large_pages() {
    let requests = [(300, 0, 40), (700, 0, 1), (20, 1, 3)];
    for page in [256, 600] {
        let case = case(page, [4, 2, 64], &requests, SplitMode::Makespan);
        let ampere = Settings {
            compute: 80,
            ..settings(case.schedule, case.seed)
        };
        check_on::<bf16, bf16>(&case, ampere.clone()).unwrap();
        check_on::<bf16, F8E5M2>(&case, ampere).unwrap();
    }
}
