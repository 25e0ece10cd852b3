//! Records of launch sets, and plans that a set has no launch for.

use kernels_gpu::registry::Arch;

use super::*;
use crate::{
    exec::gpu::launch_plan::tests::{launch_plan, plan, plan_with},
    plan::{MergeMode, PodMode},
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
    // Those of other plans have other kernels.
    let serial = PlanOptions::default().with_pod(PodMode::Serial);
    let set = LaunchSet::decodes_with(&device, &decodes.spec, &serial).unwrap();
    let mut records = vec![LaunchRecord::default(); set.keys().len() + 1];
    let error = set.records(&launch_plan(&decodes), &mut records);
    assert!(matches!(error, Err(Error::NotCaptured { .. })), "{error:?}");
}
