//! Ways to plan a tree, beside what the planner chooses.

use tandem_attn::{
    exec::gpu::Gpu,
    plan::{DeviceDescription, JointDescription, PackRule, PlanOptions, SplitMode},
    problem::KvLayout,
};

use super::{
    run::{self, Pool, Step, Timer},
    shuffled, spec,
    trees::{HEADS, Tree},
};

type Change = fn(&mut JointDescription);

/// What is compared: a change to what the planner knows of joint tiles, how it packs and cuts.
const WAYS: [(&str, Change, PackRule, SplitMode); 7] = {
    use PackRule::{Exact, Fastest};
    use SplitMode::Makespan;
    const ANY: f64 = 1e9;
    [
        ("default", |_| (), Fastest, Makespan),
        ("any bytes", |joint| joint.bytes = ANY, Fastest, Makespan),
        ("apart", |_| (), Exact, Makespan),
        (
            "joint 64",
            |joint| (joint.bytes, joint.m) = (ANY, vec![64]),
            Fastest,
            Makespan,
        ),
        (
            "joint 128",
            |joint| (joint.bytes, joint.m) = (ANY, vec![128]),
            Fastest,
            Makespan,
        ),
        (
            "uncut",
            |joint| (joint.cut_ns, joint.apart_ns) = (1e6, 1e6),
            Fastest,
            Makespan,
        ),
        (
            "any bytes, uncut",
            |joint| (joint.bytes, joint.cut_ns, joint.apart_ns) = (ANY, 1e6, 1e6),
            Fastest,
            Makespan,
        ),
    ]
};

/// Prints a line for each tree and setting of heads: what was planned, and the time of each way.
pub fn compare(gpu: &Gpu, timer: &Timer, pool: &Pool, trees: &[Tree]) {
    let device = DeviceDescription::named("h200").expect("it is built in");
    let names = WAYS.map(|(name, ..)| name);
    println!(
        "\ntree heads | {} | what the ways launch: rows × units, states",
        names.join(", ")
    );
    // How much longer the default takes than the best way, and than the best that moves no more bytes.
    let mut behind = [0.0; WAYS.len()];
    let mut cases = 0;
    for tree in trees {
        for (q_heads, kv_heads) in HEADS {
            let spec = spec(q_heads, kv_heads);
            if tree.unique_keys() * spec.kv_bytes_per_token() > pool.bytes() as u64 {
                continue;
            }
            let batch = shuffled(tree.batch(32), 1);
            let q = run::queries(&spec, batch.total_q());
            let steps = WAYS.map(|(_, change, packing, split)| {
                let mut device = device.clone();
                change(device.decode.joint.as_mut().expect("it has joint tiles"));
                let options = PlanOptions::default()
                    .with_packing(packing)
                    .with_split(split);
                let layout = KvLayout::Nhd;
                Step::planned(gpu, (&spec, &batch), (&device, &options), pool, &q, layout)
            });
            let times = timer.medians(&steps.each_ref(), 9);
            cases += 1;
            for (sum, time) in behind.iter_mut().zip(&times) {
                *sum += (times[0] / time).ln();
            }
            let shown: Vec<String> = times.iter().map(|time| format!("{time:>6.1}")).collect();
            let launches = steps.iter().map(|step| launches(step));
            println!(
                "{:>2} {q_heads:>2}/{kv_heads:<2} | {} | {}",
                tree.id,
                shown.join(" "),
                launches.collect::<Vec<_>>().join("; "),
            );
        }
    }
    for (name, sum) in names.iter().zip(behind) {
        let mean = (sum / f64::from(cases)).exp();
        println!("{name}: default takes {mean:.3} of its time (geometric mean of {cases} cases)");
    }
}

fn launches(step: &Step<'_>) -> String {
    let plan = &step.plan;
    let groups = plan.groups.iter().map(|group| {
        let joint = plan.items_of(group).iter().any(|item| item.is_joint());
        let joint = if joint { " joint" } else { "" };
        format!("{} × {}{joint}", group.tile.m, plan.units_of(group))
    });
    let groups: Vec<String> = groups.collect();
    let megabytes = plan.traffic().bytes() as f64 / 1e6;
    format!("{} s{} {megabytes:.0} MB", groups.join(" + "), plan.slots)
}
