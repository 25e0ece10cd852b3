//! Every wrapper compiles to its instruction, and ptxas accepts them all.
//!
//! `gpu_crate` has an entry per wrapper, with the expected PTX in a comment of its body. It is built once
//! per architecture. Without a compiler for the GPU, the tests print a message and check nothing; without ptxas or
//! cuobjdump, this applies to those on machine code.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use cuda_builder::{Assembler, Compiler, CudaBuilder, CudaModule, NvvmArch, build_all, ptx};

fn gpu_crate() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu_crate")
}

/// The modules for an A100 and for Hopper; `None` if there is no compiler for the GPU. The target
/// directory is shared with the kernels' own build, so that `core` is compiled once for each architecture and version.
fn modules() -> Option<&'static [CudaModule; 2]> {
    static MODULES: OnceLock<Option<[CudaModule; 2]>> = OnceLock::new();
    let modules = MODULES.get_or_init(|| {
        if let Err(error) = Compiler::find() {
            eprintln!("skipped, no compiler for the GPU: {error}");
            return None;
        }
        // `st.async` is of PTX 8.1.
        let archs = [(NvvmArch::Compute80, 0), (NvvmArch::Compute90a, 1)];
        let built = build_all(archs.map(|(arch, minor)| {
            CudaBuilder::new(gpu_crate())
                .arch(arch)
                .ptx_version(8, minor)
                .target_dir(Path::new(env!("CARGO_TARGET_TMPDIR")).join("../cuda-builder"))
        }))
        .unwrap_or_else(|error| panic!("{error}"));
        Some(built.try_into().expect("two architectures"))
    });
    modules.as_ref()
}

/// The lines of an entry, with comments separate and single spaces.
struct Body {
    name: String,
    instructions: Vec<String>,
    comments: Vec<String>,
}

fn bodies(module: &CudaModule) -> Vec<Body> {
    let lines = |text: &str| -> Vec<String> {
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        text.lines().map(words).collect()
    };
    ptx::entries(&module.ptx)
        .into_iter()
        .map(|entry| {
            let (comments, instructions) = lines(&module.ptx[entry.body.clone()])
                .into_iter()
                .partition(|line| line.starts_with("//"));
            Body {
                name: entry.name.to_owned(),
                instructions,
                comments,
            }
        })
        .collect()
}

fn body(module: &CudaModule, name: &str) -> Body {
    bodies(module)
        .into_iter()
        .find(|body| body.name == name)
        .unwrap_or_else(|| panic!("no entry {name} for {}", module.arch))
}

impl Body {
    fn count(&self, text: &str) -> usize {
        let lines = self.instructions.iter();
        lines.map(|line| line.matches(text).count()).sum()
    }

    /// The expectations in an entry's comments: how often each text must occur.
    fn expectations(&self) -> Vec<(usize, &str)> {
        let texts = self
            .comments
            .iter()
            .filter_map(|line| line.strip_prefix("// expect "));
        texts
            .map(|text| match text.split_once("* ") {
                Some((count, text)) => (count.parse().expect("a count"), text),
                None => (1, text),
            })
            .collect()
    }
}

#[test]
fn every_wrapper_becomes_its_instruction() {
    let Some(modules) = modules() else { return };
    for (module, at_least) in modules.iter().zip([200, 300]) {
        let mut failures = Vec::new();
        let mut checked = 0;
        for body in bodies(module) {
            for (expected, text) in body.expectations() {
                checked += 1;
                let found = body.count(text);
                if found != expected {
                    failures.push(format!(
                        "{}: {found} of {expected} {text:?} in\n{}",
                        body.name,
                        body.instructions.join("\n")
                    ));
                }
            }
        }
        assert!(
            failures.is_empty(),
            "{}: {}",
            module.arch,
            failures.join("\n\n")
        );
        assert!(
            checked >= at_least,
            "{}: only {checked} expectations",
            module.arch
        );
    }
}

#[test]
fn ptxas_takes_everything_without_a_remark() {
    let Some(modules) = modules() else { return };
    if Assembler::find(&gpu_crate()).unwrap().is_none() {
        eprintln!("skipped: no ptxas here");
        return;
    }
    for module in modules {
        let cubin = module.cubin.as_ref().expect("ptxas was found");
        assert_eq!(cubin.notices, Vec::<String>::new(), "{}", module.arch);
        for entry in &cubin.resources {
            assert_eq!((entry.spill_stores, entry.spill_loads), (0, 0), "{entry:?}");
        }
    }
}

#[test]
fn slices_arrive_as_pointer_and_length() {
    let Some(modules) = modules() else { return };
    for module in modules {
        let entries = ptx::entries(&module.ptx);
        let entry = entries.iter().find(|entry| entry.name == "slices").unwrap();
        let types: Vec<&str> = module.ptx[entry.parameters.clone()]
            .lines()
            .filter_map(|line| line.trim().strip_prefix(".param "))
            .map(|parameter| parameter.split_whitespace().next().unwrap())
            .collect();
        assert_eq!(
            types,
            [".u64", ".u64", ".f32", ".u64", ".u64"],
            "{}",
            module.arch
        );
    }
}

#[test]
fn launch_bounds_are_evaluated_and_reach_the_ptx() {
    let Some(modules) = modules() else { return };
    for module in modules {
        for name in ["fill_u32", "fill_f32"] {
            let bounds = ".maxntid 256, 1, 1\n.minnctapersm 2\n";
            let entry = module.ptx.split(&format!(".entry {name}(")).nth(1).unwrap();
            let head = entry.split('{').next().unwrap();
            assert!(head.contains(bounds), "{}: {head}", module.arch);
        }
    }
}

#[test]
fn each_shared_array_is_its_own() {
    let Some(modules) = modules() else { return };
    for module in modules {
        let body = body(module, "shared_arrays");
        let names: Vec<&str> = body
            .instructions
            .iter()
            .filter_map(|line| line.split("mov.u32 %r").nth(1))
            .filter_map(|operands| operands.split(", ").nth(1))
            .filter(|name| name.starts_with("shared_array_"))
            .collect();
        assert_eq!(names.len(), 2, "{names:?}");
        assert_ne!(names[0], names[1]);
        for name in names {
            let declaration = format!(".shared .align 4 .b8 {}[512];", name.trim_end_matches(';'));
            assert_eq!(module.ptx.matches(&declaration).count(), 1, "{declaration}");
        }
    }
}

#[test]
fn tensor_maps_are_aligned_and_read_in_place() {
    let Some(modules) = modules() else { return };
    for module in modules {
        assert!(
            module
                .ptx
                .contains(".param .align 64 .b8 tensor_maps_param_0[144]")
        );
        let body = body(module, "tensor_maps");
        assert_eq!(
            body.count("mov.b64 t, tensor_maps_param_0; cvta.param.u64"),
            1
        );
        assert_eq!(
            body.count(".local"),
            0,
            "the parameter was copied to the stack"
        );
    }
}

#[test]
fn a_panic_is_a_trap_that_formats_nothing() {
    let Some(modules) = modules() else { return };
    for module in modules {
        assert!(!module.ptx.contains("fmt9Formatter"), "{}", module.arch);
        assert!(!module.ptx.contains("vprintf"), "{}", module.arch);
    }
}

#[test]
fn products_stay_together_and_accumulators_in_place() {
    let Some([_, hopper]) = modules() else { return };
    let body = body(hopper, "consumer_loop");
    assert_eq!(body.count("wgmma.mma_async.sync.aligned.m64n128k16"), 24);
    assert_eq!(body.count("wgmma.fence.sync.aligned"), 2);
    assert_eq!(body.count("wgmma.commit_group.sync.aligned"), 3);
    assert_eq!(body.count(".local"), 0);

    // From the first product of the loop to the wait there is only address arithmetic. A `mov` of a 32-bit
    // register there would be a copy of an accumulator.
    let lines: Vec<&str> = body.instructions.iter().map(String::as_str).collect();
    let fence = lines
        .iter()
        .rposition(|line| line.starts_with("wgmma.fence"))
        .unwrap();
    let wait = fence
        + lines[fence..]
            .iter()
            .position(|line| line.starts_with("wgmma.wait_group"))
            .unwrap();
    let copies: Vec<_> = lines[fence..wait]
        .iter()
        .filter(|line| line.starts_with("mov.b32 %r"))
        .collect();
    assert!(copies.is_empty(), "{copies:?}");

    // The softmax is between the waits.
    let second = wait
        + 1
        + lines[wait + 1..]
            .iter()
            .position(|line| line.starts_with("wgmma.wait_group"))
            .unwrap();
    let between = lines[wait..second]
        .iter()
        .filter(|line| line.starts_with("ex2.approx"))
        .count();
    assert_eq!(between, 66);
}

#[test]
fn machine_code_runs_the_softmax_under_the_products() {
    let Some([_, hopper]) = modules() else { return };
    let Some(assembler) = Assembler::find(&gpu_crate()).unwrap() else {
        eprintln!("skipped: no ptxas here");
        return;
    };
    let cuobjdump = assembler.ptxas.with_file_name("cuobjdump");
    if !cuobjdump.is_file() {
        eprintln!("skipped: no {}", cuobjdump.display());
        return;
    }
    let cubin = hopper.cubin.as_ref().expect("ptxas was found");
    let output = Command::new(&cuobjdump)
        .args(["--dump-sass", "--function", "consumer_loop"])
        .arg(&cubin.path)
        .output()
        .unwrap();
    let sass = String::from_utf8(output.stdout).unwrap();
    let code: Vec<&str> = sass.lines().collect();
    let first = position(&code, 0, "WARPGROUP.DEPBAR.LE gsb0, 0x1");
    let second = position(&code, first, "WARPGROUP.DEPBAR.LE gsb0, 0x0");
    let count = |text: &str| {
        code[first..second]
            .iter()
            .filter(|line| line.contains(text))
            .count()
    };
    assert_eq!(count("MUFU.EX2"), 66);
    assert_eq!(count("HGMMA"), 0);

    let begin = position(&code, 0, "HGMMA");
    let arrivals = code[begin..first]
        .iter()
        .filter(|line| line.contains("WARPGROUP.ARRIVE"))
        .count();
    assert_eq!(arrivals, 1, "products of one loop were serialised");
}

fn position(code: &[&str], from: usize, text: &str) -> usize {
    let found = code[from..].iter().position(|line| line.contains(text));
    from + found.unwrap_or_else(|| panic!("no {text}"))
}
