//! Builds a small GPU crate. Needs a compiler for the GPU; inspects machine code if ptxas is available.

use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
    time::{Duration, Instant},
};

use cuda_builder::{
    Assembler, CudaBuilder, CudaBuilderError, CudaModule, NvvmArch, build_all, ptx,
};

fn gpu_crate() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu_crate")
}

/// A builder that shares its target directory, and so the compiled `core`, with the kernels' own build.
fn builder(arch: NvvmArch) -> CudaBuilder {
    CudaBuilder::new(gpu_crate())
        .arch(arch)
        .target_dir(target_dir())
}

fn target_dir() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("../cuda-builder")
}

/// The modules, built once for all tests: first for the A100, then for Hopper.
fn modules() -> &'static [CudaModule] {
    static MODULES: OnceLock<Vec<CudaModule>> = OnceLock::new();
    MODULES.get_or_init(|| {
        build_all([NvvmArch::Compute80, NvvmArch::Compute90a].map(builder))
            .unwrap_or_else(|error| panic!("{error}"))
    })
}

fn hopper() -> &'static CudaModule {
    &modules()[1]
}

fn body<'a>(module: &'a CudaModule, name: &str) -> &'a str {
    let entries = ptx::entries(&module.ptx);
    let entry = entries
        .iter()
        .find(|entry| entry.name == name)
        .unwrap_or_else(|| panic!("no {name}"));
    &module.ptx[entry.body.clone()]
}

#[test]
fn each_architecture_gets_its_own_code() {
    for (module, arch, has_clusters) in [
        (&modules()[0], "sm_80", false),
        (&modules()[1], "sm_90a", true),
    ] {
        assert_eq!(module.arch.sm(), arch);
        assert!(
            module.ptx.contains(&format!(".target {arch}\n")),
            "{}",
            module.ptx
        );
        let clustered = ptx::entries(&module.ptx)
            .iter()
            .any(|entry| entry.name == "clustered");
        assert_eq!(clustered, has_clusters, "cfg(target_feature) on {arch}");
    }
}

#[test]
fn code_for_an_older_architecture_serves_a_newer_one() {
    let older = &modules()[0];
    let hopper = builder(NvvmArch::Compute90a).compile_for(NvvmArch::Compute80);
    let module = hopper.build().unwrap();
    assert_eq!(module.arch, NvvmArch::Compute90a);
    assert_eq!(
        module.ptx,
        older.ptx.replace(".target sm_80\n", ".target sm_90a\n")
    );
    assert_ne!(module.ptx_path, older.ptx_path);
    if let (Some(cubin), Some(older)) = (&module.cubin, &older.cubin) {
        assert_ne!(cubin.bytes, older.bytes, "machine code of the same GPU");
    }
}

#[test]
fn launch_bounds_and_tensor_map_alignment_reach_the_ptx() {
    let ptx = &hopper().ptx;
    assert!(
        ptx.contains(")\n.maxntid 256, 1, 1\n.minnctapersm 2\n{"),
        "{ptx}"
    );
    assert!(
        ptx.contains(")\n.maxntid 64, 1, 1\n.reqnctapercluster 2, 1, 1\n{"),
        "{ptx}"
    );
    assert!(
        ptx.contains(".param .align 64 .b8 bounded_param_0"),
        "{ptx}"
    );
}

#[test]
fn a_barrier_between_divergent_branches_stays_one() {
    for module in modules() {
        let body = body(module, "barrier_between_branches");
        let barriers = ptx::count_instructions(body, |opcode| opcode.starts_with("bar"));
        assert_eq!(barriers, 1, "{}:\n{body}", module.arch);
    }
}

#[test]
fn machine_code_keeps_arrays_in_registers() {
    if Assembler::find(&gpu_crate()).unwrap().is_none() {
        eprintln!("skipped: no ptxas here, `cargo xtask setup` brings one");
        return;
    }
    for module in modules() {
        let cubin = module.cubin.as_ref().expect("ptxas was found");
        assert!(cubin.bytes.starts_with(b"\x7fELF"));
        assert_eq!(cubin.notices, Vec::<String>::new());
        let names: Vec<_> = cubin
            .resources
            .iter()
            .map(|entry| entry.name.as_str())
            .collect();
        let listed = ptx::entries(&module.ptx).len();
        assert_eq!(names.len(), listed, "{names:?}");
        let entry = cubin
            .resources
            .iter()
            .find(|entry| entry.name == "register_arrays")
            .unwrap();
        assert_eq!(
            (entry.stack, entry.spill_stores, entry.spill_loads),
            (0, 0, 0),
            "{entry:?}"
        );
        assert!(entry.registers >= 64, "{entry:?}");
        let entry = cubin
            .resources
            .iter()
            .find(|entry| entry.name == "barrier_between_branches")
            .unwrap();
        assert_eq!(entry.barriers, 1, "{entry:?}");
    }
}

#[test]
fn options_change_the_code_and_building_again_is_quick() {
    let plain = hopper();
    let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join("twice.ptx");
    let twice = builder(NvvmArch::Compute90a)
        .features(["twice"])
        .generate_line_info(true)
        .copy_to(&copy);
    let built = twice
        .clone()
        .build()
        .unwrap_or_else(|error| panic!("{error}"));
    assert_ne!(body(&built, "bounded"), body(plain, "bounded"));
    assert!(built.ptx.contains(".loc") && !plain.ptx.contains(".loc"));
    assert_eq!(std::fs::read_to_string(&copy).unwrap(), built.ptx);

    // Neither build may have overwritten the other's result. The fastest of several runs counts, because the machine
    // may be busy.
    let unchanged = || {
        let start = Instant::now();
        let again = builder(NvvmArch::Compute90a).build().unwrap();
        assert_eq!(again.ptx, plain.ptx);
        assert_eq!(again.cubin, plain.cubin);
        start.elapsed()
    };
    let quickest = (0..5).map(|_| unchanged()).min().unwrap();
    assert!(
        quickest < Duration::from_secs(2),
        "{quickest:?} with nothing to do"
    );
}

#[test]
fn the_sources_are_those_of_the_crate_and_give_no_warning() {
    assert_eq!(hopper().warnings, "");
    let sources = &hopper().sources;
    for expected in ["src/lib.rs", "Cargo.toml"] {
        assert!(sources.contains(&gpu_crate().join(expected)), "{sources:?}");
    }
    let own = |path: &PathBuf| path.starts_with(env!("CARGO_MANIFEST_DIR"));
    // Cargo's settings above the crate change what is compiled.
    let settings = |path: &PathBuf| path.ends_with(".cargo/config.toml");
    assert!(sources.iter().any(settings), "{sources:?}");
    assert!(
        sources.iter().all(|path| own(path) || settings(path)),
        "{sources:?}"
    );
}

/// Dependencies are compiled without the features, which must not be the end.
#[test]
fn a_crate_may_need_a_feature() {
    let module = CudaBuilder::new(gpu_crate().join("needs_feature"))
        .features(["needed"])
        .target_dir(target_dir())
        .build()
        .unwrap_or_else(|error| panic!("{error}"));
    assert!(module.ptx.contains(".entry nothing"), "{}", module.ptx);
}

#[test]
fn checks_are_there_when_asked_for() {
    let checked = builder(NvvmArch::Compute80).release(false).build().unwrap();
    let has_check = |module| body(module, "sum").contains("panic");
    assert!(
        !has_check(&modules()[0]) && has_check(&checked),
        "{}",
        checked.ptx
    );
}

#[test]
fn ptx_that_was_removed_comes_back() {
    let module = builder(NvvmArch::Compute80).release(false).build().unwrap();
    std::fs::remove_dir_all(module.ptx_path.parent().unwrap()).unwrap();
    let again = builder(NvvmArch::Compute80).release(false).build().unwrap();
    assert_eq!(again.ptx, module.ptx);
}

#[test]
fn a_build_that_fails_leaves_no_record() {
    let module = builder(NvvmArch::Compute80)
        .module("failing")
        .build_args(["--features=no-such-feature"]);
    module.clone().build().unwrap_err();
    let folders = std::fs::read_dir(target_dir().join("sm_80"))
        .unwrap()
        .flatten();
    let own = folders.map(|folder| folder.path()).find(|folder| {
        let name = folder.file_name().unwrap().to_string_lossy();
        name.starts_with("gpu_crate-failing-")
    });
    let own = own.unwrap();
    std::fs::write(own.join("module.s"), "of an edit that was undone").unwrap();
    let record = own.join("made-from.json");
    std::fs::write(&record, "{}").unwrap();
    module.build().unwrap_err();
    assert!(!record.exists());
}

#[test]
fn code_that_does_not_compile_shows_the_diagnostics() {
    let error = builder(NvvmArch::Compute80)
        .build_args(["--features=no-such-feature"])
        .build()
        .unwrap_err();
    let CudaBuilderError::BuildFailed { diagnostics, .. } = &error else {
        panic!("{error}")
    };
    assert!(diagnostics.contains("no-such-feature"), "{diagnostics}");
}
