//! Ways to plan a tree, beside what the planner chooses.

use tandem_attn::{
    exec::gpu::{Gpu, WorkspaceOptions},
    plan::{
        DecodeDescription, Join, JointDescription, PackRule, PlanOptions, Planner, Rules,
        SplitMode, pod::PodMode,
    },
    problem::KvLayout,
};

use super::{
    common::Rng,
    run::{self, Pool, Step, Timer},
    shuffled, spec,
    trees::{HEADS, Tree},
};

const PAPER: &str = "paper";

/// Of the ways, so many are packing rules.
const RULES: usize = 4;

/// Prefixes are never read by prefills.
const DECODES: &str = "decodes alone";

type Change = fn(&mut DecodeDescription);

fn joint(decode: &mut DecodeDescription) -> &mut JointDescription {
    decode.joint.as_mut().expect("an H200 has joint tiles")
}

/// What is compared: a change to what the planner knows of joint tiles, how it packs and cuts. First the packing rules.
const WAYS: [(&str, Change, PackRule, SplitMode); 9] = {
    use PackRule::{Exact, Fastest};
    use SplitMode::Makespan;
    const ANY: f64 = 1e9;
    [
        ("default", |_| (), Fastest, Makespan),
        ("apart", |_| (), Exact, Makespan),
        // Its planner has the rule of PAT's paper.
        (PAPER, |_| (), Fastest, Makespan),
        (DECODES, |_| (), Fastest, Makespan),
        (
            "any bytes",
            |decode| joint(decode).bytes = ANY,
            Fastest,
            Makespan,
        ),
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
    let device = gpu.device();
    let names = WAYS.map(|(name, ..)| name);
    println!(
        "\ntree heads, nodes and keys by level | {} | times the best rule, the best way | what the ways launch: rows × units, states",
        names.join(", ")
    );
    // How much longer the default takes than the best way, and than the best that moves no more bytes.
    let mut behind = [0.0; WAYS.len()];
    let (mut cases, mut missed) = (0, Vec::new());
    for tree in trees {
        for (q_heads, kv_heads) in HEADS {
            let spec = spec(q_heads, kv_heads);
            if tree.unique_keys() * spec.kv_bytes_per_token() > pool.bytes() as u64 {
                continue;
            }
            let batch = shuffled(tree.batch(32), 1);
            let q = run::queries(&spec, batch.total_q());
            let steps = WAYS.map(|(name, change, packing, split)| {
                let mut device = device.clone();
                change(&mut device.decode);
                let options = PlanOptions::default()
                    .with_packing(packing)
                    .with_split(split);
                let options = match name {
                    DECODES => options.with_pod(PodMode::Serial),
                    _ => options,
                };
                let rules = Rules {
                    join: (name == PAPER).then_some(Join::has_many_rows),
                    ..Rules::default()
                };
                let plan = Planner::with_rules(rules).plan(&spec, &batch, &device, &options);
                let (plan, layout) = (plan.expect("can be planned"), KvLayout::Nhd);
                let options = WorkspaceOptions::default();
                Step::new(gpu, plan, &batch, pool, &q, layout, options)
            });
            let times = timer.medians(&steps.each_ref(), 9);
            cases += 1;
            for (sum, time) in behind.iter_mut().zip(&times) {
                *sum += (times[0] / time).ln();
            }
            let [of_rules, of_all] = [RULES, WAYS.len()].map(|ways| {
                let best = times[..ways].iter().copied().reduce(f64::min);
                times[0] / best.unwrap_or(f64::NAN)
            });
            if of_rules > 1.03 {
                missed.push(format!("{} {q_heads}/{kv_heads} {of_rules:.2}", tree.id));
            }
            let shown: Vec<String> = times.iter().map(|time| format!("{time:>6.1}")).collect();
            let launches = steps.iter().map(|step| run::launches(step));
            println!(
                "{:>2} {q_heads:>2}/{kv_heads:<2} {:?} {:?} | {} | {of_rules:.2} {of_all:.2} | {}",
                tree.id,
                tree.nodes,
                tree.keys,
                shown.join(" "),
                launches.collect::<Vec<_>>().join("; "),
            );
        }
    }
    println!(
        "more than 3 % behind the best rule in {} of {cases} cases: {}",
        missed.len(),
        missed.join(", ")
    );
    for (name, sum) in names.iter().zip(behind) {
        let mean = (sum / f64::from(cases)).exp();
        println!("{name}: default takes {mean:.3} of its time (geometric mean of {cases} cases)");
    }
}

/// Trees of a seed: two to five levels, children spread evenly over the level above, keys by pages of 32.
pub fn random(count: usize, seed: u64) -> Vec<Tree> {
    const KEYS: [u32; 14] = [
        32, 64, 96, 160, 224, 320, 480, 640, 800, 1024, 1600, 2048, 3072, 6016,
    ];
    const FAN_OUT: [u32; 10] = [2, 3, 4, 5, 6, 8, 12, 16, 40, 160];
    const MOST_KEYS: u64 = 400_000;
    let mut rng = Rng(seed);
    let mut trees = Vec::new();
    while trees.len() < count {
        let levels = 2 + rng.below(4);
        let mut nodes = vec![[1, 1, 1, 2, 4, 6][rng.below(6)]];
        let mut keys = vec![KEYS[rng.below(KEYS.len())]];
        for level in 1..levels {
            let fan_out = FAN_OUT[rng.below(FAN_OUT.len())];
            // A few more, so that nodes have different numbers of children.
            let more = rng.below(nodes[level - 1] as usize) as u32;
            nodes.push(nodes[level - 1] * fan_out + more);
            keys.push(KEYS[rng.below(KEYS.len())]);
        }
        let tree = Tree {
            id: trees.len() as u32 + 1,
            nodes,
            keys,
            published: Vec::new(),
        };
        let leaves = *tree.nodes.last().unwrap();
        if (8..=1000).contains(&leaves) && tree.unique_keys() <= MOST_KEYS {
            trees.push(tree);
        }
    }
    trees
}
