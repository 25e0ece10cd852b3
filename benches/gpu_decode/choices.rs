//! Ways to plan a tree, beside what the planner chooses.

use tandem_attn::{
    exec::gpu::Gpu,
    plan::{
        DecodeDescription, DeviceDescription, JointDescription, PackRule, PlanOptions, SplitMode,
    },
    problem::KvLayout,
};

use super::{
    run::{self, Pool, Step, Timer},
    shuffled, spec,
    trees::{HEADS, Tree},
};

type Change = fn(&mut DecodeDescription);

fn joint(decode: &mut DecodeDescription) -> &mut JointDescription {
    decode.joint.as_mut().expect("an H200 has joint tiles")
}

/// What is compared: a change to what the planner knows of joint tiles, how it packs and cuts.
const WAYS: [(&str, Change, PackRule, SplitMode); 7] = {
    use PackRule::{Exact, Fastest};
    use SplitMode::Makespan;
    const ANY: f64 = 1e9;
    [
        ("default", |_| (), Fastest, Makespan),
        (
            "any bytes",
            |decode| joint(decode).bytes = ANY,
            Fastest,
            Makespan,
        ),
        ("apart", |_| (), Exact, Makespan),
        (
            "joint 64",
            |decode| (decode.rows, joint(decode).bytes) = (vec![8, 16, 64], ANY),
            Fastest,
            Makespan,
        ),
        (
            "joint 128",
            |decode| (decode.rows, joint(decode).bytes) = (vec![8, 16, 128], ANY),
            Fastest,
            Makespan,
        ),
        (
            "uncut",
            |decode| (joint(decode).cut_ns, joint(decode).apart_ns) = (1e6, 1e6),
            Fastest,
            Makespan,
        ),
        (
            "any bytes, uncut",
            |decode| {
                let joint = joint(decode);
                (joint.bytes, joint.cut_ns, joint.apart_ns) = (ANY, 1e6, 1e6);
            },
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
                change(&mut device.decode);
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
