//! Decodes in graphs: what the launches of a set without work cost in a layer.

use tandem_attn::{
    exec::gpu::{Gpu, LaunchSet, WorkspaceOptions},
    plan::{MergeMode, PlanOptions, Planner, pod::PodMode},
    problem::KvLayout,
};

use super::{
    run::{Pool, Step, Timer, queries},
    shuffled, spec, without_prefixes,
};

/// Microseconds of a layer in a graph: of the plan alone, with all launches of a set, and with those that it needs.
pub fn measure(gpu: &Gpu, timer: &Timer, pool: &Pool) {
    let (device, spec) = (gpu.device(), spec(32, 8));
    let options = PlanOptions::default()
        .with_merge_mode(MergeMode::Kernel)
        .with_pod(PodMode::Serial);
    let set = LaunchSet::decodes_with(&device, &spec, &options).expect("there are kernels");
    println!(
        "\n{:<20} {:>8} {:>6} {:>9} {:>9} {:>9}",
        "a layer in a graph", "launches", "in set", "plan µs", "set", "needed"
    );
    for (name, lens) in [
        ("1 × 256", vec![256; 1]),
        ("16 × 256", vec![256; 16]),
        ("1 × 1024", vec![1024; 1]),
        ("16 × 1024", vec![1024; 16]),
        ("64 × 1024", vec![1024; 64]),
        ("64 × 8192", vec![8192; 64]),
    ] {
        let batch = shuffled(without_prefixes(&lens, 16), 1);
        let plan = Planner::new().plan(&spec, &batch, &device, &options);
        let plan = plan.expect("can be planned");
        let q = queries(&spec, plan.total_q);
        let in_set = |set: Option<&LaunchSet>| {
            let options = WorkspaceOptions::default().with_launches(set.cloned());
            Step::new(gpu, plan.clone(), &batch, pool, &q, KvLayout::Nhd, options)
        };
        let ways = [in_set(None), in_set(Some(&set)), in_set(Some(&set))];
        ways[2].launch_only_needed();
        let [alone, all, needed] = ways.each_ref().map(|step| timer.graph(step));
        let launches = plan.groups.len() + plan.merges.len().min(1);
        println!(
            "{name:<20} {launches:>8} {:>6} {alone:>9.2} {all:>9.2} {needed:>9.2}",
            set.keys().len() + 1
        );
    }
}
