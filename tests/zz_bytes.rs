#[path = "common/trees.rs"]
mod trees;
use tandem_attn::{plan::*, problem::Spec};
use trees::{HEADS, trees};
#[test]
fn bytes() {
    let device = DeviceDescription::named("h200").unwrap();
    let mut free = device.clone();
    free.decode.joint.as_mut().unwrap().bytes = 1e9;
    for tree in trees() {
        for (qh, kh) in HEADS {
            let spec = Spec::new(qh, kh, 128);
            let batch = tree.batch(16);
            let p = |d: &DeviceDescription, packing, split| {
                Planner::new()
                    .plan(
                        &spec,
                        &batch,
                        d,
                        &PlanOptions {
                            packing,
                            split,
                            ..PlanOptions::default()
                        },
                    )
                    .unwrap()
            };
            let mb =
                |d: &DeviceDescription, r| p(d, r, SplitMode::Off).traffic().bytes() as f64 / 1e6;
            let show = |pl: &Plan| {
                pl.groups
                    .iter()
                    .map(|g| {
                        format!(
                            "m{}:{}{}",
                            g.tile.m,
                            pl.units_of(g),
                            if pl.items_of(g).iter().any(|i| i.is_joint()) {
                                "J"
                            } else {
                                ""
                            }
                        )
                    })
                    .collect::<Vec<_>>()
                    .join(",")
            };
            let t = p(&device, PackRule::Fastest, SplitMode::Off);
            let (a, b) = (
                p(&free, PackRule::Fastest, SplitMode::Makespan),
                p(&device, PackRule::Fastest, SplitMode::Makespan),
            );
            let lim = mb(&device, PackRule::Exact)
                .min(mb(&device, PackRule::PatPaper))
                .min(mb(&device, PackRule::PatPublished));
            let u = tree.unique_keys() as f64 * spec.kv_bytes_per_token() as f64 / 1e6;
            let over = t.traffic().bytes() as f64 / 1e6 > lim * 1.000001
                || tree.widest(&spec) <= 128 && t.traffic().kv_bytes as f64 / 1e6 > u * 1.05;
            println!(
                "{} {qh}/{kh} w{} u{u:.1} free {:.1} now {:.1} lim {lim:.1} | {} s{} -> {} s{} {}",
                tree.id,
                tree.widest(&spec),
                mb(&free, PackRule::Fastest),
                mb(&device, PackRule::Fastest),
                show(&a),
                a.slots,
                show(&b),
                b.slots,
                if over { "OVER" } else { "" }
            );
        }
    }
}
