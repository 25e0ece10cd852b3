//! Which keys are converted, and where tiles find them.

use proptest::prelude::*;

use super::*;
use crate::{
    plan::{
        DeviceDescription, Kernel, PlanOptions, Planner, SplitMode, conversion::most_pages,
        pod::PodMode,
    },
    problem::{Batch, Dtype, PageTable, Part, Spec},
};

#[test]
fn pages_are_converted_once_and_no_more_than_are_seen() {
    let mut table = PageTable::new(16, 1000);
    // 200 keys of which 160 are a prefix, twice; and a decode.
    let prefix: Vec<u32> = (100..110).collect();
    table.push(&[&prefix[..], &[7, 8, 9]].concat(), 200);
    table.push(&[&prefix[..], &[17, 18, 19]].concat(), 200);
    table.push(&[1, 2], 20);
    let batch = Batch::new(vec![0, 100, 200, 201], table);
    let device = DeviceDescription::named("h200").unwrap();
    let plan = |spec: &Spec| {
        let plan = Planner::new().plan(spec, &batch, &device, &PlanOptions::default());
        plan.unwrap()
    };
    let spec = Spec::new(8, 2, 128).with_kv_dtype(Dtype::F8E4M3);
    let converted = |plan: &Plan| {
        let mut conversion = Conversion::default();
        for group in &plan.groups {
            let mut items = plan.items_of(group).to_vec();
            items.retain(|item| !item.is_gathered());
            let before = items.clone();
            conversion.add(plan, &mut items);
            for item in &items {
                let same = |before: &&WorkItem| before.rows_begin == item.rows_begin;
                let before = before.iter().find(same).unwrap();
                for key in before.kv_begin..before.kv_end {
                    let id =
                        conversion.ids[item.table.wrapping_add(key / ConvertedPage::KEYS) as usize];
                    let page = conversion.pages[id as usize];
                    let in_page = key - page.key;
                    assert!(u32::from(page.first) <= in_page && in_page < page.end.into());
                    let id = |table: u32| plan.page_ids[(table + key / 16) as usize];
                    assert_eq!(id(page.table), id(before.table));
                }
            }
        }
        conversion
    };
    let causal = plan(&spec);
    let conversion = converted(&causal);
    // Two pages of 64 of the prefix, and two of each.
    assert_eq!((conversion.pages.len(), conversion.ids.len()), (6, 8));
    assert_eq!(most_pages(&causal), 8);
    assert_eq!(conversion.pages[0].key, 192);
    let window = plan(&spec.with_window_left(10));
    assert_eq!(converted(&window).ids.len(), 6);
    assert_eq!(most_pages(&window), 6);
    assert_eq!(most_pages(&plan(&Spec::new(8, 2, 128))), 0);
}

/// Keys before all windows become zeros, and requests that see other keys of a page do not share it.
#[test]
fn keys_before_all_windows_are_not_converted() {
    let mut table = PageTable::new(16, 100);
    let prefix: Vec<u32> = (10..30).collect();
    table.push(&[&prefix[..], &[7]].concat(), 330);
    table.push(&[&prefix[..], &[17, 18]].concat(), 345);
    let batch = Batch::new(vec![0, 100, 200], table);
    let device = DeviceDescription::named("h200").unwrap();
    let spec = Spec::new(8, 2, 128)
        .with_kv_dtype(Dtype::F8E4M3)
        .with_window_left(20);
    let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
    let plan = plan.unwrap();
    let mut items: Vec<WorkItem> = plan.items.clone();
    let mut conversion = Conversion::default();
    conversion.add(&plan, &mut items);
    let mut first = Vec::new();
    for page in conversion.pages.iter().filter(|page| page.first > 0) {
        first.push(page.key + u32::from(page.first));
    }
    first.sort_unstable();
    // The first queries stand at 230 and 245.
    assert_eq!(first, [210, 225]);
    // The page of keys 256 to 320 is that of both.
    let of_both = |page: &&ConvertedPage| page.key == 256;
    assert_eq!(conversion.pages.iter().filter(of_both).count(), 1);
}

/// Decodes read keys in the middle of a table, because their requests are not next to each other: prefills convert these
/// keys, too, and the bound counts them.
#[test]
fn keys_between_two_prefixes_of_a_table_are_counted() {
    // 33 requests have three common levels, 14 have two of these, and 33 among the 14 have one.
    let [root, both, run] = [0..500, 500..625, 625..685].map(|pages| pages.collect::<Vec<u32>>());
    let mut table = PageTable::new(16, 800);
    for request in 0..80_u32 {
        let pages = match request {
            0..33 => [&root[..], &both, &run].concat(),
            _ if request % 2 == 0 && request < 61 => [&root[..], &both].concat(),
            _ => root.clone(),
        };
        let pages = [&pages[..], &[700 + request]].concat();
        table.push(&pages, pages.len() as u32 * 16);
    }
    let batch = Batch::new((0..=80).collect(), table);
    let device = DeviceDescription::named("h200").unwrap();
    let spec = Spec::new(32, 8, 128).with_kv_dtype(Dtype::F8E4M3);
    let options = PlanOptions::default().with_pod(PodMode::Fused);
    let plan = Planner::new()
        .plan(&spec, &batch, &device, &options)
        .unwrap();
    let prefills = plan.items.iter().filter(|item| !item.is_gathered());
    let of_first = prefills.clone().filter(|item| item.table == 0);
    let between = |item: &WorkItem| item.kv_begin < 10_000 && item.kv_end > 8000;
    assert!(!of_first.clone().any(between), "{plan}");
    assert_eq!(of_first.clone().map(|item| item.kv_begin).min(), Some(0));
    assert_eq!(of_first.map(|item| item.kv_end).max(), Some(10_960));
    let mut conversion = Conversion::default();
    let mut items: Vec<WorkItem> = prefills.copied().collect();
    conversion.add(&plan, &mut items);
    assert!(conversion.pages.len() as u32 <= most_pages(&plan));
    assert_eq!(conversion.ids.len() as u32, most_pages(&plan));
}

/// Requests of queries and keys, in parts: the keys of the first part come before those of the second.
fn composed(requests: &[[u32; 3]], page_size: u32) -> Batch {
    let (mut indptr, mut next) = (vec![0], 0);
    let mut parts = [(); 2].map(|()| Part::new(vec![0], PageTable::new(page_size, 1 << 20)));
    for &[queries, before, own] in requests {
        let end = indptr[indptr.len() - 1] + queries;
        indptr.push(end);
        for (part, keys) in parts.iter_mut().zip([before, own]) {
            let pages = keys.div_ceil(page_size);
            let pages: Vec<u32> = (next..next + pages).collect();
            next += pages.len() as u32;
            part.table.push(&pages, keys);
            part.q_indptr.push(end);
        }
        parts[0].keys_after.push(own);
    }
    Batch::composed(indptr, parts.to_vec())
}

/// Ids that the launches of a plan list.
fn listed(plan: &Plan) -> u32 {
    let mut conversion = Conversion::default();
    for group in plan
        .groups
        .iter()
        .filter(|group| group.kernel == Kernel::Prefill)
    {
        for part in 0..plan.parts.len() as u32 {
            let of_part = plan.items_of(group).iter().filter(|item| item.part == part);
            let mut items: Vec<WorkItem> = of_part.copied().collect();
            conversion.add(plan, &mut items);
        }
    }
    conversion.ids.len() as u32
}

/// With a window, the last query tokens of a prompt see no key of a part that lies far before them. These keys were converted, but
/// not counted.
#[test]
fn keys_that_only_the_first_tokens_see_are_counted() {
    let spec = Spec::new(8, 2, 128)
        .with_kv_dtype(Dtype::F8E4M3)
        .with_window_left(128);
    let device = DeviceDescription::named("h200").unwrap();
    let batch = composed(&[[512, 256, 512]], 16);
    let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
    let plan = plan.unwrap();
    // Keys 128 to 256 of the first part, and all 512 of the second.
    assert_eq!((listed(&plan), most_pages(&plan)), (2 + 8, 2 + 8));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 1 } else { 500 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_converted_page_is_counted(
        requests in prop::collection::vec([1..600_u32, 0..2000_u32, 0..1000_u32], 1..8),
        window in prop::option::weighted(0.8, 0..1500_u32),
        page_size in prop::sample::select(vec![1_u32, 16, 64]),
        causal in prop::bool::weighted(0.8),
        fixed in prop::bool::weighted(0.3),
        pod in prop::sample::select(vec![PodMode::Auto, PodMode::Serial, PodMode::Fused]),
    ) {
        let mut spec = Spec::new(8, 2, 128).with_kv_dtype(Dtype::F8E4M3);
        (spec.variant.causal, spec.variant.window_left) = (causal, window);
        let requests: Vec<_> = requests.iter().map(|&[q, before, own]| [q, before, own.max(q)]).collect();
        let device = DeviceDescription::named("h200").unwrap();
        let split = match fixed {
            true => SplitMode::Fixed { tokens: 192 },
            false => SplitMode::Makespan,
        };
        let options = PlanOptions::default().with_split(split).with_pod(pod);
        let batch = composed(&requests, page_size);
        let plan = Planner::new().plan(&spec, &batch, &device, &options).unwrap();
        prop_assert_eq!(listed(&plan), most_pages(&plan));
    }
}
