//! Records of launch sets, and plans that a set has no launch for.

use kernels_gpu::registry::Arch;

use super::*;
use crate::{
    exec::gpu::launch_plan::tests::{launch_plan, plan, plan_of, plan_with},
    plan::{MergeMode, Planner, PodMode},
    problem::{Batch, PageTable},
};

#[test]
fn a_launch_set_has_a_record_for_each_launch_or_says_what_is_missing() {
    let decodes = plan(&[1, 1], MergeMode::Kernel);
    let device = DeviceDescription::named("h200").unwrap();
    let set = LaunchSet::decodes(&device, &decodes.spec).unwrap();
    let mut records = vec![LaunchRecord::default(); set.keys().len() + 1];
    set.records(&launch_plan(&decodes), &mut records).unwrap();
    let items: u32 = records[..set.keys().len()].iter().map(|r| r.count).sum();
    assert_eq!(items, decodes.items.len() as u32);
    assert_eq!(records[set.keys().len()].count, decodes.merges.len() as u32);

    let hybrid = plan(&[1, 100], MergeMode::Kernel);
    let error = set
        .records(&launch_plan(&hybrid), &mut records)
        .unwrap_err();
    assert!(matches!(error, Error::NotCaptured { .. }), "{error}");
    let all = LaunchSet::all(&device, &hybrid.spec).unwrap();
    let mut records = vec![LaunchRecord::default(); all.keys().len() + 1];
    all.records(&launch_plan(&hybrid), &mut records).unwrap();
    let own = LaunchSet::new().and(&hybrid);
    own.records(&launch_plan(&hybrid), &mut records).unwrap();
    assert_eq!(own.clone().and(&hybrid), own);
}

/// Tiles of two sizes, and one kernel that would cut both: one of the two launches would be lost.
#[test]
fn a_launch_of_the_set_does_one_of_the_plans() {
    let mut options = PlanOptions::default().with_pod(PodMode::Serial);
    options.merge_mode = MergeMode::Kernel;
    let plan = plan_with(&[1, 1, 4, 4], &options);
    let launches = launch_plan(&plan);
    let keys: Vec<_> = launches.launches.iter().map(|launch| launch.key).collect();
    let ampere = keys[0].kernel.on(Arch::Sm80).expect("it has one");
    let cut = |key: &LaunchKey| {
        key.kernel.info().rows <= ampere.info().rows
            && key.kernel.on(Arch::Sm80) == Some(ampere)
            && key.pack == keys[0].pack
    };
    assert!(keys.len() == 2 && keys.iter().all(cut), "{keys:?}");
    let set = LaunchSet::new().with(LaunchKey {
        kernel: ampere,
        ..keys[0]
    });
    let mut records = [LaunchRecord::default(); 2];
    let error = set.records(&launches, &mut records);
    assert!(matches!(error, Err(Error::NotCaptured { .. })), "{error:?}");
    // One of them alone is cut.
    let one = plan_with(&[1, 1], &options);
    set.records(&launch_plan(&one), &mut records).unwrap();
    assert_eq!(records[0].count, one.items.len() as u32);
}

/// With fixed splits, decodes alone take kernels that share SMs, too.
#[test]
fn plans_with_fixed_splits_have_launches() {
    let device = DeviceDescription::named("h200").unwrap();
    let options = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 4096 });
    let of = |queries: &[u32]| plan_with(queries, &options.with_pod(PodMode::Fused));
    for queries in [&[1, 1][..], &[1, 8, 500], &[1, 1, 500], &[30, 100, 5000]] {
        let plan = of(queries);
        let set = LaunchSet::all(&device, &plan.spec).unwrap();
        let mut records = vec![LaunchRecord::default(); set.keys().len() + 1];
        set.records(&launch_plan(&plan), &mut records).unwrap();
        let items: u32 = records[..set.keys().len()].iter().map(|r| r.count).sum();
        assert_eq!(items, plan.items.len() as u32, "{queries:?}");
    }
    let decodes = of(&[1, 2, 8]);
    let set = LaunchSet::decodes_with(&device, &decodes.spec, &options).unwrap();
    let mut records = vec![LaunchRecord::default(); set.keys().len() + 1];
    set.records(&launch_plan(&decodes), &mut records).unwrap();
    // Those of plans whose decodes merge themselves have other kernels.
    let merging = PlanOptions::default().with_merge_mode(MergeMode::Fused);
    let serial = merging.with_pod(PodMode::Serial);
    let set = LaunchSet::decodes_with(&device, &decodes.spec, &serial).unwrap();
    let mut records = vec![LaunchRecord::default(); set.keys().len() + 1];
    let error = set.records(&launch_plan(&decodes), &mut records);
    assert!(matches!(error, Err(Error::NotCaptured { .. })), "{error:?}");
}

/// The places in the set of what a plan needs; the merging kernel is behind the last key.
fn needed(set: &LaunchSet, plan: &Plan) -> Vec<usize> {
    let mut launches = LaunchPlan::default();
    launches.fill(plan, set.merge_mode).unwrap();
    let mut records = vec![LaunchRecord::default(); set.keys().len() + 1];
    set.records(&launches, &mut records).unwrap();
    let needed = set.needed(&records);
    let places = (0..=set.keys().len()).filter(|&place| needed.has(place));
    places.collect()
}

#[test]
fn a_plan_needs_the_launches_that_have_work() {
    let decodes = plan(&[1, 1], MergeMode::Kernel);
    let (device, spec) = (DeviceDescription::named("h200").unwrap(), decodes.spec);
    let set = LaunchSet::decodes(&device, &spec).unwrap();
    let merges = set.keys().len();
    assert!(merges > 2 && !decodes.merges.is_empty(), "{decodes}");
    let places = |plan: &Plan| {
        let launches = launch_plan(plan).launches.into_iter();
        let place = |launch: GroupLaunch| set.keys().iter().position(|key| *key == launch.key);
        launches.map(move |launch| place(launch).unwrap())
    };
    let of_decodes: Vec<_> = places(&decodes).chain([merges]).collect();
    assert_eq!(of_decodes.len(), 2);
    assert_eq!(needed(&set, &decodes), of_decodes);
    // Larger tiles, and some more of them.
    let drafts = plan(&[1, 1, 4, 8], MergeMode::Kernel);
    let mut of_drafts: Vec<_> = places(&drafts).chain([merges]).collect();
    of_drafts.sort_unstable();
    assert!(of_drafts.len() > 2 && of_drafts != of_decodes, "{drafts}");
    assert_eq!(needed(&set, &drafts), of_drafts);
    // Decodes that merge themselves leave nothing to the merging kernel, and short ones have nothing to merge.
    let fused = set.clone().with_merge_mode(MergeMode::Fused);
    let merging = plan(&[1, 1], MergeMode::Fused);
    assert!(!merging.merges.is_empty());
    assert_eq!(
        needed(&fused, &merging),
        places(&merging).collect::<Vec<_>>()
    );
    // Kernels that share SMs, which few keys take, leave their states to it.
    assert_eq!(needed(&fused, &decodes), of_decodes);
    let short = plan_of(&[(1, 64); 8], &PlanOptions::default());
    assert!(short.merges.is_empty(), "{short}");
    assert_eq!(needed(&set, &short), places(&short).collect::<Vec<_>>());
    assert!(needed(&set, &Plan::empty(spec)).is_empty());
}

/// The launch of the set does the work, not the one that the plan names.
#[test]
fn a_plan_needs_the_launch_that_cuts_its_tiles() {
    let decodes = plan(&[1, 1], MergeMode::Kernel);
    let named = launch_plan(&decodes).launches[0].key;
    let kernel = named.kernel.on(Arch::Sm80).expect("it has one");
    let other = LaunchKey { part: 1, ..named };
    let set = LaunchSet::new().with(other);
    let set = set.with(LaunchKey { kernel, ..named });
    assert_eq!(needed(&set, &decodes), [1, 2]);
}

/// A prefill and a decode in one launch, of which a plan may have only one.
#[test]
fn a_plan_that_needs_half_of_a_pair_needs_both() {
    let options = PlanOptions::default().with_pod(PodMode::Tickets);
    let hybrid = plan_with(&[1, 1, 500], &options);
    let set = LaunchSet::new().and(&hybrid);
    assert_eq!(set.pairs.len(), 1, "{hybrid}");
    let [prefill, decode] = set.pairs[0];
    let mut records = vec![LaunchRecord::default(); set.keys().len() + 1];
    for place in [prefill, decode] {
        records.fill(LaunchRecord::default());
        records[place].count = 1;
        let needed = set.needed(&records);
        let both = needed.has(prefill) && needed.has(decode);
        assert!(both && !needed.has(set.keys().len()));
    }
    records.fill(LaunchRecord::default());
    assert_eq!(set.needed(&records), LaunchSubset::NONE);
}

/// Each part of a batch has launches of its own.
#[test]
fn a_plan_needs_no_launches_of_parts_that_it_lacks() {
    let mut table = PageTable::new(16, 1000);
    for own in [90, 91] {
        let shared = 0..80;
        table.push(&shared.chain([own]).collect::<Vec<_>>(), 1290);
    }
    let whole = Batch::new(vec![0, 1, 2], table);
    let spec = Spec::new(32, 8, 128);
    let device = DeviceDescription::named("h200").unwrap();
    let plan = |batch: &Batch| {
        let options = PlanOptions::default().with_merge_mode(MergeMode::Kernel);
        let plan = Planner::new().plan(&spec, batch, &device, &options);
        plan.unwrap()
    };
    let [two_parts, one_part] = [&whole.clone().share_prefixes(), &whole].map(plan);
    let set = LaunchSet::new().and(&two_parts).and(&one_part);
    let of_part = |plan: &Plan, part| {
        let places = needed(&set, plan).into_iter();
        let of_part = |&place: &usize| set.keys.get(place).is_some_and(|key| key.part == part);
        places.filter(of_part).count()
    };
    assert!(of_part(&two_parts, 0) > 0 && of_part(&two_parts, 1) > 0);
    assert!(of_part(&one_part, 0) > 0 && of_part(&one_part, 1) == 0);
}

/// Heads for which no two kernels share SMs: prefill and decode of a hybrid batch are one kernel.
#[test]
fn all_launches_include_those_of_hybrid_batches_in_one_kernel() {
    for (q_heads, kv_heads, dim, tokens, decodes) in [
        (64, 4, 64, 512, 128),
        (128, 8, 64, 512, 128),
        (32, 2, 64, 512, 128),
    ] {
        let spec = Spec::new(q_heads, kv_heads, dim);
        for (name, pod) in [("h200", PodMode::Auto), ("h100", PodMode::Fused)] {
            let device = DeviceDescription::named(name).unwrap();
            let mut requests = vec![(1, 1000); decodes + 1];
            requests[0].0 = tokens;
            let mut table = PageTable::new(16, 100_000);
            let mut qo_indptr = vec![0];
            for (index, &(tokens, keys)) in requests.iter().enumerate() {
                let first = 100 * index as u32;
                table.push(&(first..first + 63).collect::<Vec<_>>(), keys);
                qo_indptr.push(qo_indptr[index] + tokens);
            }
            let batch = Batch::new(qo_indptr, table);
            let options = PlanOptions::default().with_pod(pod);
            let plan = Planner::new().plan(&spec, &batch, &device, &options);
            let plan = plan.unwrap();
            assert_eq!(plan.pod.unwrap().mode, PodMode::Tickets, "{name} {spec:?}");
            let set = LaunchSet::all(&device, &spec).unwrap();
            let mut records = vec![LaunchRecord::default(); set.keys().len() + 1];
            set.records(&launch_plan(&plan), &mut records).unwrap();
            // They are one launch, as in a set of this plan.
            let of_pair = |set: &LaunchSet| {
                set.pairs
                    .iter()
                    .map(|pair| pair.map(|at| set.keys[at]))
                    .collect::<Vec<_>>()
            };
            assert_eq!(of_pair(&set), of_pair(&LaunchSet::new().and(&plan)));
            assert_eq!(set.clone().and(&plan), set);
            let with_prompts = set.with_prompts_of_heads(4);
            let prompts = with_prompts.keys().iter().filter(|key| key.part == 1);
            let of_ampere = |key: &LaunchKey| key.kernel.info().arch == Arch::Sm80;
            assert!(prompts.clone().count() > 0 && !prompts.copied().any(|key| of_ampere(&key)));
        }
    }
    // Where two kernels share SMs, they come first. On Ampere graphs of prefills are refused.
    for (name, spec) in [
        ("h200", Spec::new(32, 8, 128)),
        ("a100", Spec::new(64, 4, 128)),
    ] {
        let device = DeviceDescription::named(name).unwrap();
        let set = LaunchSet::all(&device, &spec).unwrap();
        assert!(set.pairs.is_empty(), "{name}: {set:?}");
    }
}

#[test]
fn invalid_specifications_are_refused() {
    let device = DeviceDescription::named("h200").unwrap();
    let mut spec = Spec::new(8, 2, 128);
    spec.kv_heads = 0;
    for set in [
        LaunchSet::decodes(&device, &spec),
        LaunchSet::all(&device, &spec),
    ] {
        assert!(matches!(set, Err(Error::Problem(_))), "{set:?}");
    }
}
