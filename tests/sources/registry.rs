//! The kernels are written down once: what the static report has, what is built, what device descriptions say and what
//! plans name follow the registry.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use kernels_gpu::registry::{Arch, Entry, KERNELS, KernelId, Op, Sm, entries};
use tandem_attn::{
    plan::{DeviceDescription, PlanError, tiles::TileTable},
    problem::{Compute, Dtype, Spec},
};

/// Registers and spilled bytes of each kernel of the static report, by architecture and name.
fn report() -> BTreeMap<(&'static str, &'static str), [u32; 2]> {
    let report = include_str!("../../kernels-gpu/static-report.txt");
    let lines = report.lines().filter(|line| line.starts_with("sm_"));
    lines
        .map(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            let figure = |at: usize| words[at].parse::<u32>().expect("a figure");
            ((words[0], words[1]), [figure(2), figure(4)])
        })
        .collect()
}

#[test]
fn the_static_report_has_the_kernels_of_the_registry() {
    let compiled: BTreeSet<_> = report().into_keys().collect();
    let of_arch = |arch, entry: &Entry| match entry.kernel.info().arch {
        Arch::Sm80 => true,
        Arch::Sm90a => arch == "sm_90a",
    };
    let entries = ["sm_80", "sm_90a"].into_iter().flat_map(|arch| {
        let entries = entries().filter(move |entry| of_arch(arch, entry));
        entries.map(move |entry| (arch, entry.name))
    });
    let compiled = compiled
        .into_iter()
        .map(|(arch, name)| (arch, name.to_string()));
    assert_eq!(compiled.collect::<BTreeSet<_>>(), entries.collect());
}

/// The build and cargo know families by their names alone.
#[test]
fn families_are_modules_and_features() {
    let families: BTreeSet<_> = entries().map(|entry| entry.family.name()).collect();
    let build = include_str!("../../build/modules.rs").lines();
    let modules = build.filter_map(|line| line.strip_prefix("    (\"")?.split('"').next());
    assert_eq!(modules.collect::<BTreeSet<_>>(), families);
    let manifest = include_str!("../../kernels-gpu/Cargo.toml").split("\n[");
    let features = manifest.filter_map(|section| section.strip_prefix("features]\n"));
    let features = features
        .flat_map(str::lines)
        .filter_map(|line| line.split_once(" = "));
    // Two features are no families: serialisation, and what variants instantiate.
    let of_families = features
        .map(|(name, _)| name)
        .filter(|name| !["serde", "hooks"].contains(name));
    assert_eq!(of_families.collect::<BTreeSet<_>>(), families);
}

/// The compiler kept within what rows say, and spilled nothing but a little where a row is at its limit.
#[test]
fn the_compiler_kept_what_the_planner_relies_on() {
    let mut spilling = Vec::new();
    let entries: BTreeMap<_, _> = entries().map(|entry| (entry.name, entry.kernel)).collect();
    for ((arch, name), [registers, spills]) in report() {
        let row = entries[name].info();
        assert!(
            registers <= row.registers,
            "{arch} {name}: {registers} of {}",
            row.registers
        );
        // Prefills in 8 bits spill most of what a tile takes, and with heads of 256 four outputs of a block, with a soft cap more
        // (docs/notes/fp8.md).
        // With a soft cap and sinks the producers of 192 rows spill up to 508 bytes; their consumers spill nothing.
        // Beside a prefill, the producers of 8-bit decodes have 32 registers: the warp that claims units spills, a few words for
        // each unit, and those that copy single keys, about ten words for each block. Main loops spill nothing.
        // Of tiles of 64 rows on 8-bit keys, two CTAs of three warpgroups fit an SM with 80 registers: mostly the producers spill, and
        // with a soft cap or scales of tokens also the consumers, about 30 words for each block.
        // Of latent attention, one kernel's warp that claims units spills a word, which it reads once for each unit.
        let most = match row.op {
            _ if row.products_of_8_bits && row.head_dim > 128 => 1300,
            _ if row.products_of_8_bits => 700,
            Op::Decode if row.latent => 8,
            Op::Decode if row.co_resident && row.cache.is_some() => 710,
            // The warp that claims units of 16 rows spills a few words for each.
            Op::Decode if row.co_resident && row.rows == 16 => 40,
            Op::Decode if row.co_resident => 0,
            Op::Decode if row.rows == 64 && row.cache.is_some() => 900,
            Op::Prefill if row.rows == 192 && row.cap && row.extras => 510,
            _ => 350,
        };
        if spills > most {
            spilling.push((arch, name, spills));
        }
    }
    assert!(spilling.is_empty(), "{spilling:?}");
}

/// Shares and residency in the descriptions are those of the kernels that are taken.
#[test]
fn descriptions_agree_with_the_kernels() {
    let spec = Spec::new(32, 8, 128);
    for name in ["h200", "h100", "a100", "a6000", "rtx4090"] {
        let device = DeviceDescription::named(name).unwrap();
        let sm = Sm {
            shared_bytes: device.shared_bytes_per_sm,
            registers: device.registers_per_sm,
        };
        let tiles = TileTable::new(&device, &spec, None).unwrap();
        let ctas = |id: Option<KernelId>| id.expect("it is a GPU").info().ctas_on(&sm);
        let decodes = tiles.decodes().iter().map(|choice| ctas(choice.kernel));
        let most = decodes.clone().min().unwrap();
        assert_eq!(device.decode.ctas_per_sm, most, "decodes on {name}");
        for step in tiles.prefills() {
            // Fewer where the cost model is to count a CTA as having the SM's tensor cores to itself, as those of an
            // A100 are: few tiles leave the second place of an SM empty, and the first is then as fast as two.
            let most = ctas(step.kernel);
            assert!(
                (1..=most).contains(&device.prefill.ctas_per_sm),
                "prefills on {name}"
            );
        }
    }
}

/// Every name is made in one place, by its family's table. Those of attention kernels are not written out at all.
#[test]
fn no_name_of_a_kernel_is_written_out_twice() {
    let mut files = Vec::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for folder in ["host", "kernels-gpu/src", "build", "xtask/src", "cli/src"] {
        sources(&root.join(folder), &mut files);
    }
    assert!(files.len() > 100, "{}", files.len());
    let texts: Vec<_> = files
        .iter()
        .map(|path| fs::read_to_string(path).unwrap())
        .collect();
    for row in &KERNELS {
        let quoted = format!("{:?}", row.name);
        let count = |(path, text): (&PathBuf, &String)| {
            let count = text.matches(&quoted).count();
            (count > 0).then(|| format!("{} has {count}", path.display()))
        };
        let places: Vec<_> = files.iter().zip(&texts).filter_map(count).collect();
        let once = matches!(&places[..], [place] if place.ends_with(" has 1"));
        let fine = places.is_empty() || once && !row.is_attention();
        assert!(fine, "{quoted}: {places:?}");
    }
}

fn sources(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

#[test]
fn a_kernel_has_a_counterpart_of_ampere_or_none() {
    let decodes = KernelId::all().filter(|id| id.info().op == Op::Decode);
    // Ampere applies no rotary embedding, and has no latent keys of 8 bits, no outputs of 512 and no heads of 80 and 96.
    let lacks = |id: &KernelId| {
        let row = id.info();
        let of_hopper = row.arch != Arch::Sm80 && row.takes_prompts;
        let paired = row.kv_heads > 1 && row.cache.is_none();
        of_hopper || row.turns || row.latent && row.cache.is_some() || paired
    };
    let (lacking, others): (Vec<_>, Vec<_>) = decodes.partition(lacks);
    assert!(lacking.iter().all(|id| id.on(Arch::Sm80).is_none()));
    for id in others {
        let ampere = id.on(Arch::Sm80).expect("decodes of all heads have one");
        let (a, b) = (id.info(), ampere.info());
        assert_eq!(
            (a.element, a.cache, a.head_dim, a.cap, a.by_token),
            (b.element, b.cache, b.head_dim, b.cap, b.by_token)
        );
        assert_eq!(b.arch, Arch::Sm80);
    }
}

fn spec(head_dim: u32) -> Spec {
    Spec::new(32, 8, head_dim).with_head_dim_v(if head_dim == 192 { 128 } else { head_dim })
}

#[test]
fn tiles_follow_rows_keys_and_heads() {
    let device = DeviceDescription::named("h200").unwrap();
    let table = |spec: &Spec| TileTable::new(&device, spec, None).unwrap();
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
    assert_eq!(prefill(&wide_group.with_soft_cap(30.0), 5000), (192, 80, 8));
    assert_eq!(prefill(&Spec::new(64, 8, 64), 5000), (192, 112, 8));
    // Heads of 256 and products of 8 bits have tiles of 128 rows only.
    assert_eq!(prefill(&Spec::new(64, 8, 256), 1000), (128, 80, 8));
    assert_eq!(prefill(&Spec::new(28, 4, 256), 5000), (128, 80, 7));
    let f8 = |spec: Spec| spec.with_kv_dtype(Dtype::F8E4M3).with_compute(Compute::F8);
    assert_eq!(prefill(&f8(wide_group), 1000), (128, 256, 8));
    assert_eq!(prefill(&f8(Spec::new(64, 4, 128)), 20), (128, 256, 16));
    assert_eq!(prefill(&f8(Spec::new(64, 4, 128)), 1000), (128, 256, 8));
    assert_eq!(prefill(&f8(Spec::new(64, 8, 256)), 1000), (128, 128, 8));
    // The largest divisor of the group.
    assert_eq!(prefill(&Spec::new(24, 4, 128), 5000).2, 6);
    assert_eq!(prefill(&Spec::new(36, 4, 256), 5000).2, 3);
    assert_eq!(prefill(&Spec::new(44, 4, 128), 5000).2, 1);
    assert_eq!(prefill(&Spec::new(32, 32, 128), 5000).2, 1);
    // Keys of 192 and values of 128, as one model has them: prefill only, one query at a time too.
    assert_eq!(prefill(&spec(192), 5000), (128, 128, 4));
    assert!(!table(&spec(192)).has_decodes());
    assert!(table(&wide_group).has_decodes());

    // Decode: the fewest rows that cover.
    let tiles = table(&Spec::new(32, 8, 128));
    let rows: Vec<_> = [1, 2, 3, 4, 5, 16, 17, 32]
        .map(|tokens| tiles.row_tile(tokens))
        .into();
    assert_eq!(rows, [8, 8, 16, 16, 64, 64, 128, 128]);
    assert_eq!(tiles.decode_tokens(), 32);
    let keys = |m| tiles.decode(m).map(|choice| choice.tile.n);
    assert_eq!((keys(8), keys(64), keys(32)), (Some(32), Some(64), None));

    // Heads that nothing was compiled for.
    let none = TileTable::new(&device, &Spec::new(32, 8, 272), None);
    assert!(
        matches!(none, Err(PlanError::NoTile { largest: 0, .. })),
        "{none:?}"
    );
}

#[test]
fn ampere_and_ada_plan_with_the_kernels_that_exist() {
    for name in ["a100", "a6000", "rtx4090"] {
        let device = DeviceDescription::named(name).unwrap();
        let tiles = TileTable::new(&device, &Spec::new(32, 8, 128), None).unwrap();
        let [decode] = tiles.decodes() else {
            panic!("{name}: {tiles:?}")
        };
        let name_of = |id: Option<KernelId>| id.unwrap().info().name;
        assert_eq!(name_of(decode.kernel), "sm80_decode_16x32_d128_bf16");
        for tokens in [20, 1000, 100_000] {
            let prefill = tiles.prefill(tokens);
            assert_eq!(name_of(prefill.kernel), "sm80_prefill_128x64_d128_bf16");
        }
    }
}
