//! What the planner may choose on Hopper is what was compiled, as the static report has it.

use std::collections::BTreeSet;

use kernels_gpu::{
    decode::{self, layout::KEYS},
    sm90::{prefill, wide},
};
use tandem_attn::{
    plan::{
        DeviceDescription, Kernel, PlanError, Tile,
        tiles::{KernelReport, TileTable, check_report, solve},
    },
    problem::Spec,
};

/// A kernel of the report that takes tiles of a plan.
#[derive(Clone, Debug)]
struct Entry {
    name: String,
    kernel: Kernel,
    head_dim: u32,
    soft_cap: bool,
    report: KernelReport,
}

/// The Hopper kernels of the static report.
fn entries() -> Vec<Entry> {
    let report = include_str!("../kernels-gpu/static-report.txt");
    let lines = report.lines().filter(|line| line.starts_with("sm_90a"));
    lines.filter_map(entry).collect()
}

/// `decode_<dtype>_d<head_dim>_m<rows>[_cap]` or `prefill_<rows>x<keys>_d<head_dim>_<dtype>[_cap|_beside]`.
fn entry(line: &str) -> Option<Entry> {
    let words: Vec<_> = line.split_whitespace().collect();
    let (name, figure) = (words[1], |at: usize| {
        words[at].parse::<u32>().expect("a figure")
    });
    let parts: Vec<_> = name.split('_').collect();
    let number = |part: &str, prefix: &str| part.strip_prefix(prefix)?.parse::<u32>().ok();
    let soft_cap = parts.last() == Some(&"cap");
    let (kernel, tile, head_dim, threads, shared_bytes) = match parts[..] {
        ["decode", _, head_dim, rows] | ["decode", _, head_dim, rows, "cap"] => {
            let (head_dim, m) = (number(head_dim, "d")?, number(rows, "m")?);
            let (n, threads, shared) = match wide::Shape::find(head_dim, m, soft_cap) {
                Some(shape) => (shape.keys, shape.threads(), shape.shared_bytes()),
                None => {
                    let shape = decode::shape(head_dim, m, 227 << 10)?;
                    (KEYS, shape.threads, shape.shared_bytes)
                }
            };
            (Kernel::Decode, Tile { m, n }, head_dim, threads, shared)
        }
        // Not those that take pages of any size: plans do not ask for them by tile.
        ["prefill", tile, head_dim, _] | ["prefill", tile, head_dim, _, "cap" | "beside"]
            if tile != "mma" =>
        {
            let (m, n) = tile.split_once('x')?;
            let tile = Tile {
                m: m.parse().ok()?,
                n: n.parse().ok()?,
            };
            let head_dim = number(head_dim, "d")?;
            let shape = prefill::Shape::ALL
                .into_iter()
                .find(|s| (s.rows(), s.keys, s.head_dim) == (tile.m, tile.n, head_dim))?;
            (
                Kernel::Prefill,
                tile,
                head_dim,
                shape.threads(),
                shape.shared_bytes(),
            )
        }
        _ => return None,
    };
    Some(Entry {
        name: name.to_owned(),
        kernel,
        head_dim,
        soft_cap,
        report: KernelReport {
            entry: name.to_owned(),
            kernel,
            tile,
            threads,
            registers: figure(2),
            shared_bytes: figure(5) + shared_bytes,
            spill_bytes: figure(4),
        },
    })
}

fn spec(head_dim: u32, soft_cap: bool) -> Spec {
    let spec =
        Spec::new(32, 8, head_dim).with_head_dim_v(if head_dim == 192 { 128 } else { head_dim });
    if soft_cap {
        spec.with_soft_cap(30.0)
    } else {
        spec
    }
}

#[test]
fn descriptions_list_what_was_compiled() {
    let compiled: BTreeSet<_> = entries()
        .into_iter()
        .map(|e| (e.kernel, e.head_dim, e.soft_cap, e.report.tile))
        .collect();
    assert!(compiled.len() > 20, "{compiled:?}");
    for name in ["h200", "h100"] {
        let device = DeviceDescription::named(name).unwrap();
        let mut listed = BTreeSet::new();
        for kernel in Kernel::ALL {
            for instance in device.compiled(kernel) {
                for soft_cap in [false, true] {
                    let head_dim = instance.head_dim.expect("each is for one head dimension");
                    if instance.serves(&spec(head_dim, soft_cap)) {
                        let tile = Tile {
                            m: instance.m,
                            n: instance.n,
                        };
                        listed.insert((kernel, head_dim, soft_cap, tile));
                    }
                }
            }
        }
        assert_eq!(listed, compiled, "{name}");
    }
}

#[test]
fn the_compiler_kept_what_the_planner_relies_on() {
    let device = DeviceDescription::named("h200").unwrap();
    for head_dim in [64, 128] {
        for soft_cap in [false, true] {
            let of_heads = |e: &Entry| (e.head_dim, e.soft_cap) == (head_dim, soft_cap);
            let report: Vec<_> = entries()
                .into_iter()
                .filter(of_heads)
                .map(|e| e.report)
                .collect();
            let spec = spec(head_dim, soft_cap);
            assert_eq!(
                check_report(&device, &spec, &report),
                Ok(vec![]),
                "{head_dim} {soft_cap}"
            );
            // Where one is missing it says so.
            let tile = report[0].tile;
            let without: Vec<_> = report
                .iter()
                .filter(|line| line.tile != tile)
                .cloned()
                .collect();
            let found = check_report(&device, &spec, &without).unwrap();
            assert!(
                found
                    .iter()
                    .any(|found| found.reason.contains("not compiled")),
                "{found:?}"
            );
            // Where one is too large, too.
            let mut large = report.clone();
            large[0].registers = 255;
            large[0].threads = 512;
            large[0].spill_bytes = 8;
            let found = check_report(&device, &spec, &large).unwrap();
            assert_eq!(found.len(), 2, "{found:?}");
        }
    }
}

/// The solver's arithmetic allows every tile that really was compiled.
#[test]
fn what_was_compiled_is_feasible() {
    let device = DeviceDescription::named("h200").unwrap();
    for entry in entries() {
        let spec = spec(entry.head_dim, entry.soft_cap);
        let resources = solve(&device, &spec, entry.kernel, entry.report.tile);
        assert!(resources.is_ok(), "{}: {resources:?}", entry.name);
    }
    let too_large = Tile { m: 512, n: 256 };
    let reason = solve(&device, &spec(256, false), Kernel::Prefill, too_large).unwrap_err();
    assert!(
        reason.to_string().contains("bytes of shared memory"),
        "{reason}"
    );
    let odd = solve(
        &device,
        &spec(128, false),
        Kernel::Prefill,
        Tile { m: 96, n: 128 },
    );
    assert!(odd.unwrap_err().to_string().contains("matrix instruction"));
}

#[test]
fn tiles_follow_rows_keys_and_heads() {
    let device = DeviceDescription::named("h200").unwrap();
    let table = |spec: &Spec| TileTable::new(&device, spec, None, None).unwrap();
    let prefill = |spec: &Spec, tokens: u32| {
        let chosen = *table(spec).prefill(tokens);
        (chosen.tile.m, chosen.tile.n, chosen.pack)
    };
    let wide_group = Spec::new(64, 8, 128);
    // Short chunks pack all heads of a KV head; from there to 4096 tokens 128 rows of one head have measured
    // best, then 192 rows and eight heads.
    assert_eq!(prefill(&wide_group, 20), (128, 128, 8));
    assert_eq!(prefill(&wide_group, 1000), (128, 128, 1));
    assert_eq!(prefill(&wide_group, 5000), (192, 80, 8));
    assert_eq!(prefill(&wide_group.with_soft_cap(30.0), 5000), (128, 96, 8));
    assert_eq!(prefill(&Spec::new(64, 8, 64), 5000), (192, 112, 8));
    // Blocks of 80 keys end elsewhere than tiles of 128 tokens.
    assert_eq!(prefill(&Spec::new(64, 8, 256), 1000), (128, 80, 4));
    // The largest divisor of the group.
    assert_eq!(prefill(&Spec::new(24, 4, 128), 5000).2, 6);
    assert_eq!(prefill(&Spec::new(36, 4, 256), 5000).2, 3);
    assert_eq!(prefill(&Spec::new(44, 4, 128), 5000).2, 1);
    assert_eq!(prefill(&Spec::new(32, 32, 128), 5000).2, 1);
    // Keys of 192 and values of 128, as one model has them: prefill only, one query at a time too.
    assert_eq!(prefill(&spec(192, false), 5000), (128, 128, 4));
    assert_eq!(device.most_decode_tokens(&spec(192, false)), 0);
    assert_eq!(
        device.most_decode_tokens(&wide_group),
        device.decode_max_tokens
    );
    // Heads that nothing was compiled for get what the solver finds.
    let (m, n, _) = prefill(&Spec::new(32, 8, 192), 5000);
    assert!(m % 64 == 0 && n % 16 == 0 && m >= 64);

    // Decode: the fewest rows that cover.
    let tiles = table(&Spec::new(32, 8, 128));
    let rows: Vec<_> = [1, 2, 3, 4, 5, 16, 17, 32]
        .map(|tokens| tiles.row_tile(tokens))
        .into();
    assert_eq!(rows, [8, 8, 16, 16, 64, 64, 128, 128]);
    assert_eq!(tiles.decode_tokens(), 32);
    assert_eq!(
        (tiles.key_tile(8, 5000), tiles.key_tile(64, 5000)),
        (32, 64)
    );
    // On the A100 the key tile follows the number of keys.
    let a100 = DeviceDescription::named("a100").unwrap();
    let tiles = TileTable::new(&a100, &Spec::new(32, 8, 128), None, None).unwrap();
    let keys = [100, 1000, 10_000].map(|keys| tiles.key_tile(16, keys));
    assert!(keys.is_sorted() && keys[0] < keys[2], "{keys:?}");

    let huge = TileTable::new(&device, &Spec::new(256, 1, 128), None, None);
    assert!(matches!(
        huge,
        Err(PlanError::NoTile {
            kernel: Kernel::Decode,
            group: 256,
            ..
        })
    ));
}
