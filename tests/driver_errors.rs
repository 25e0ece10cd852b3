//! What goes wrong between a program and its driver, each with its own error and nothing launched: against a
//! library that stands in for the driver. A process opens one driver, so each scenario is a child process.
#![cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]

#[path = "fake_driver/failing.rs"]
mod failing;
#[path = "fake_driver/misuse.rs"]
mod misuse;
#[path = "fake_driver/needed.rs"]
mod needed;

use std::{
    ffi::c_void,
    mem,
    path::{Path, PathBuf},
    process::Command,
    ptr::{self, NonNull},
    sync::OnceLock,
};

use tandem_attn::{
    Error,
    abi::MergeRow,
    exec::gpu::{
        DeviceArray, DeviceBuffer, DeviceTensor, Gpu, Image, KvPool, LaunchSet, MODULES, Module,
        PartialStates, Stream, Swizzle, TensorMap, Workspace, WorkspaceOptions,
    },
    plan::{BatchLimits, Bound, MergeMode, Plan, PlanOptions, Planner},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    tensor::ShapeError,
};

/// Runs `test` again in a child with a driver of these settings; `true` in the child itself.
fn with_driver(test: &str, settings: &str) -> bool {
    with_library(test, settings, || fake_driver().to_owned())
}

fn with_library(test: &str, settings: &str, library: impl Fn() -> PathBuf) -> bool {
    const CHILD: &str = "TANDEM_TEST_CHILD";
    if std::env::var(CHILD).is_ok_and(|child| child == settings) {
        return true;
    }
    if std::env::var_os(CHILD).is_some() {
        return false; // the child of another scenario of the same test
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env("TANDEM_LIBCUDA", library())
        .env("TANDEM_LIBNCCL", library())
        .env("FAKE_DRIVER", settings)
        .env(CHILD, settings)
        .output()
        .unwrap();
    assert!(
        child.status.success(),
        "with {settings:?}: {}{}",
        String::from_utf8_lossy(&child.stdout),
        String::from_utf8_lossy(&child.stderr)
    );
    false
}

fn fake_driver() -> &'static Path {
    static DRIVER: OnceLock<PathBuf> = OnceLock::new();
    DRIVER.get_or_init(|| compiled_driver("fake-driver", &[]))
}

/// One of 12.0 or newer, which knows tensor maps.
fn young_driver() -> PathBuf {
    static DRIVER: OnceLock<PathBuf> = OnceLock::new();
    let compiled = || compiled_driver("fake-young-driver", &["--cfg", "young"]);
    DRIVER.get_or_init(compiled).clone()
}

/// One that also launches graphs.
fn graph_driver() -> PathBuf {
    static DRIVER: OnceLock<PathBuf> = OnceLock::new();
    let flags = ["--cfg", "young", "--cfg", "graphs"];
    let compiled = || compiled_driver("fake-graph-driver", &flags);
    DRIVER.get_or_init(compiled).clone()
}

fn compiled_driver(folder: &str, flags: &[&str]) -> PathBuf {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder);
    let out = out.join("libcuda.so.1");
    std::fs::create_dir_all(out.parent().unwrap()).unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let compiled = Command::new(rustc)
        .args([
            "--edition=2024",
            "--crate-type=cdylib",
            "--crate-name=fake_driver",
        ])
        .args(["-O", "-Cpanic=abort", "-o"])
        .arg(&out)
        .args(flags)
        .arg(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/fake_driver/lib.rs"
        ))
        .output()
        .expect("rustc runs");
    assert!(
        compiled.status.success(),
        "{}",
        String::from_utf8_lossy(&compiled.stderr)
    );
    out
}

fn launches() -> i32 {
    let function = libcuda::symbol(c"fake_launches").unwrap();
    // SAFETY: the type is that of the function in the fake driver.
    let function: extern "C" fn() -> i32 = unsafe { mem::transmute(function) };
    function()
}

#[test]
fn no_driver() {
    let nowhere = || PathBuf::from("/nowhere/libcuda.so.1");
    if with_library("no_driver", "", nowhere) {
        let error = Gpu::new(0).unwrap_err();
        let Error::NoDriver { searched, .. } = &error else {
            panic!("{error:?}")
        };
        assert_eq!(searched, &["/nowhere/libcuda.so.1"]);
        let text = error.to_string();
        assert!(
            text.contains("/nowhere/libcuda.so.1") && text.contains("TANDEM_LIBCUDA"),
            "{text}"
        );
    }
}

#[test]
fn no_device() {
    if with_driver("no_device", "devices=0") {
        assert_eq!(
            Gpu::new(0).unwrap_err(),
            Error::NoDevice {
                ordinal: 0,
                count: 0
            }
        );
    }
    if with_driver("no_device", "devices=2") {
        assert_eq!(
            Gpu::new(2).unwrap_err(),
            Error::NoDevice {
                ordinal: 2,
                count: 2
            }
        );
        assert!(Gpu::new(1).is_ok());
    }
}

#[test]
fn a_code_that_nobody_knows() {
    if with_driver("a_code_that_nobody_knows", "init=9999") {
        let error = Gpu::new(0).unwrap_err();
        assert!(
            matches!(
                error,
                Error::Driver {
                    call: "cuInit",
                    code: 9999,
                    ..
                }
            ),
            "{error:?}"
        );
    }
}

#[test]
fn unsupported_architecture() {
    if with_driver("unsupported_architecture", "compute=75") {
        let expected = Error::UnsupportedArchitecture {
            device: "Fake GPU".into(),
            compute: (7, 5),
            built_for: vec!["sm_80", "sm_90a"],
        };
        assert_eq!(Gpu::new(0).unwrap_err(), expected);
    }
}

#[test]
fn each_gpu_gets_its_modules() {
    for (settings, arch) in [
        ("compute=80", "sm_80"),
        ("compute=89", "sm_80"),
        ("compute=90", "sm_90a"),
        ("compute=100", "sm_80"),
    ] {
        if with_driver("each_gpu_gets_its_modules", settings) {
            let gpu = Gpu::builder().compile_ptx(&mut |_| {}).build(0);
            assert_eq!(gpu.unwrap().arch(), arch);
        }
    }
}

#[test]
fn ptx_newer_than_the_driver() {
    if with_driver(
        "ptx_newer_than_the_driver",
        "cubin=200 ptx=222 version=11040",
    ) {
        let error = Gpu::builder()
            .compile_ptx(&mut |_| {})
            .build(0)
            .unwrap_err();
        let Error::PtxTooNew {
            arch: "sm_90a",
            ptx: (8, _),
            driver: (11, 4),
        } = error
        else {
            panic!("{error:?}")
        };
        assert!(error.to_string().contains("CUDA 11.4"), "{error}");
    }
}

#[test]
fn nothing_is_compiled_unless_asked_for() {
    // Refused machine code, and a generation that has none.
    for (settings, is_refused) in [
        ("cubin=200", true),
        ("cubin=209", true),
        ("compute=100", false),
    ] {
        if with_driver("nothing_is_compiled_unless_asked_for", settings) {
            let error = Gpu::new(0).unwrap_err();
            let Error::NoMachineCode { refused, .. } = &error else {
                panic!("{error:?}")
            };
            assert_eq!(refused.is_some(), is_refused, "{error}");
            assert!(error.to_string().contains("compile_ptx"), "{error}");

            let mut compiled = Vec::new();
            let gpu = Gpu::builder()
                .compile_ptx(&mut |step| compiled.push(step))
                .build(0)
                .unwrap();
            let modules = MODULES.iter().filter(|module| module.arch == gpu.arch());
            let families: Vec<_> = modules.map(|module| module.family).collect();
            assert_eq!(
                compiled.iter().map(|step| step.family).collect::<Vec<_>>(),
                families,
                "each module is announced once"
            );
            assert_eq!(compiled[0].number, 1);
            assert_eq!(compiled[0].of, families.len());
        }
    }
}

#[test]
fn damaged_kernels_are_refused() {
    if with_driver("damaged_kernels_are_refused", "compute=90") {
        let damaged = [Module {
            arch: "sm_90a",
            family: "all",
            ptx: Image::raw(b""),
            cubin: Some(Image::zstd(b"not zstd", 100)),
        }];
        let error = Gpu::builder().modules(&damaged).build(0).unwrap_err();
        assert!(matches!(error, Error::DamagedKernels { .. }), "{error:?}");
    }
}

#[test]
fn a_refused_module() {
    for settings in ["cubin=200 ptx=218", "cubin=2"] {
        if with_driver("a_refused_module", settings) {
            let error = Gpu::builder()
                .compile_ptx(&mut |_| {})
                .build(0)
                .unwrap_err();
            let Error::ModuleRefused {
                code: 218 | 2, log, ..
            } = &error
            else {
                panic!("{error:?}")
            };
            assert_eq!(log, "line 7: no such instruction");
        }
    }
}

#[test]
fn a_missing_kernel() {
    if with_driver("a_missing_kernel", "lacks_append=1") {
        let expected = Error::NoKernel {
            kernel: "append_paged_kv_16".into(),
            arch: "sm_90a",
        };
        assert_eq!(Gpu::new(0).unwrap_err(), expected);
    }
}

const A: u64 = 1 << 20;

/// A call of each operation, with the output (or the pool) at an address of choice.
fn call_both(gpu: &Gpu, target: u64) -> [Result<(), Error>; 2] {
    let partials = PartialStates {
        out: DeviceTensor::new(A, Dtype::F32, [4, 2, 64]),
        lse: DeviceTensor::new(A, Dtype::F32, [4, 2]),
    };
    let rows = DeviceArray::<MergeRow>::new(A, 1);
    let out = DeviceTensor::new(target, Dtype::BF16, [1, 2, 64]);
    let spec = Spec::new(2, 2, 64);
    let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 10, target, target);
    let new = DeviceTensor::new(A, Dtype::BF16, [5, 2, 64]);
    let slots = DeviceArray::new(A, 5);
    // SAFETY: the fake driver follows no address.
    unsafe {
        [
            gpu.merge_states(
                &partials,
                rows,
                DeviceArray::new(A, 4),
                &out,
                None,
                Stream::DEFAULT,
            ),
            gpu.append_paged_kv(&spec, &pool, slots, &new, &new, Stream::DEFAULT),
        ]
    }
}

#[test]
fn bad_tensors_launch_nothing() {
    if with_driver("bad_tensors_launch_nothing", "devices=1") {
        let gpu = Gpu::new(0).unwrap();
        for target in [0, A + 4] {
            for result in call_both(&gpu, target) {
                let error = result.unwrap_err();
                assert!(
                    matches!(error, Error::NullPointer { .. } | Error::Misaligned { .. }),
                    "{error:?}"
                );
            }
        }
        assert_eq!(launches(), 0);
        assert_eq!(call_both(&gpu, A), [Ok(()), Ok(())]);
        assert_eq!(launches(), 2);
    }
}

#[test]
fn a_launch_that_fails() {
    if with_driver("a_launch_that_fails", "launch=701") {
        for result in call_both(&Gpu::new(0).unwrap(), A) {
            let error = result.unwrap_err();
            assert!(
                matches!(
                    error,
                    Error::Driver {
                        call: "cuLaunchKernel",
                        code: 701,
                        ..
                    }
                ),
                "{error:?}"
            );
        }
    }
}

#[test]
fn a_launch_beyond_the_kernel() {
    if with_driver("a_launch_beyond_the_kernel", "threads=16") {
        for result in call_both(&Gpu::new(0).unwrap(), A) {
            let error = result.unwrap_err();
            assert!(
                matches!(
                    error,
                    Error::LaunchLimit {
                        got: 17..,
                        limit: 16,
                        ..
                    }
                ),
                "{error:?}"
            );
        }
        assert_eq!(launches(), 0);
    }
}

#[test]
fn a_driver_without_tensor_maps() {
    if with_driver("a_driver_without_tensor_maps", "devices=1") {
        let map = TensorMap {
            name: "k",
            address: A,
            dtype: Dtype::BF16,
            dims: &[64, 128],
            strides: &[128],
            box_dims: &[64, 64],
            swizzle: Swizzle::Bytes128,
        };
        let expected = Error::OldDriver {
            function: "cuTensorMapEncodeTiled",
            since: "12.0",
        };
        assert_eq!(map.encode().unwrap_err(), expected);
        let bad = TensorMap {
            strides: &[100],
            ..map
        };
        assert!(matches!(
            bad.encode().unwrap_err(),
            Error::TensorMap { got: 100, .. }
        ));
    }
}

#[test]
fn the_context_of_the_thread_stays() {
    if with_driver("the_context_of_the_thread_stays", "devices=1") {
        let current = || {
            let mut context = libcuda::Context::NULL;
            // SAFETY: writes one pointer.
            let _ = unsafe { libcuda::cuCtxGetCurrent(&mut context) };
            context.as_raw().addr()
        };
        let gpu = Gpu::new(0).unwrap();
        assert_eq!(
            current(),
            77,
            "none was current before, so the primary one is now"
        );
        // SAFETY: the fake driver only stores it.
        let _ = unsafe {
            libcuda::cuCtxSetCurrent(libcuda::Context::from_raw(ptr::without_provenance_mut(5)))
        };
        assert!(Gpu::new(0).is_ok());
        assert_eq!(call_both(&gpu, A), [Ok(()), Ok(())]);
        assert_eq!(current(), 5, "another one was current, and is again");
        gpu.make_current().unwrap();
        assert_eq!(current(), 77);
    }
}

#[test]
fn a_run_is_refused_before_anything_is_launched() {
    if !with_driver(
        "a_run_is_refused_before_anything_is_launched",
        "threads=1024",
    ) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(8, 2, 128);
    let plan = |spec: &Spec| {
        let mut table = PageTable::new(16, 20);
        table.push(&[7, 3], 20);
        table.push(&[1, 2, 4, 5, 6, 8], 90);
        let batch = Batch::new(vec![0, 1, 41], table);
        let options = PlanOptions::default();
        Planner::new()
            .plan(spec, &batch, &gpu.device(), &options)
            .unwrap()
    };
    let whole = plan(&spec);
    let mut workspace = gpu
        .workspace(&spec, &Bound::of(&whole), WorkspaceOptions::default())
        .unwrap();
    let q = DeviceTensor::new(1 << 30, Dtype::BF16, [41, 8, 128]);
    let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 20, 1 << 30, 1 << 30);
    let stream = Stream::DEFAULT;
    let run = |workspace: &mut Workspace, q: &DeviceTensor<3>, pools: &[KvPool]| {
        // SAFETY: nothing is there to be touched.
        unsafe { gpu.run(workspace, q, pools, q, None, stream) }
    };
    assert_eq!(run(&mut workspace, &q, &[pool]), Err(Error::NoPlan));
    // SAFETY: as above.
    let error = unsafe { workspace.upload(&plan(&Spec::new(4, 2, 128)), stream) }.unwrap_err();
    assert!(matches!(error, Error::OtherSpec { .. }), "{error}");
    // SAFETY: as above.
    unsafe { workspace.upload(&whole, stream) }.unwrap();
    let error = run(&mut workspace, &q, &[]).unwrap_err();
    assert_eq!(
        error,
        Error::Pools {
            got: 0,
            expected: 1
        }
    );
    let mut few = pool;
    few.pages = 8;
    let error = run(&mut workspace, &q, &[few]).unwrap_err();
    assert!(error.to_string().contains("at least 9"), "{error}");
    let mut eight_bits = pool;
    eight_bits.dtype = Dtype::F8E4M3;
    let error = run(&mut workspace, &q, &[eight_bits]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the KV pool is F8E4M3 and the spec's KV is BF16: convert one of them"
    );
    let one_row = KvPool::latent(&spec, 16, 20, 1 << 30);
    let error = run(&mut workspace, &q, &[one_row]).unwrap_err();
    let (part, kv_heads) = (0, 2);
    assert_eq!(error, ShapeError::OneHead { part, kv_heads }.into());
    let f16 = DeviceTensor::new(1 << 30, Dtype::F16, [41, 8, 128]);
    let error = run(&mut workspace, &f16, &[pool]).unwrap_err();
    assert!(matches!(error, Error::DtypesDiffer { .. }), "{error}");
    // This driver knows no tensor maps: all launches are checked before the first is made.
    let error = run(&mut workspace, &q, &[pool]).unwrap_err();
    assert!(matches!(error, Error::OldDriver { .. }), "{error}");
    assert_eq!(launches(), 0);
}

/// By decodes alone and by prefills alone, whose kernels have checks of their own.
#[test]
fn outputs_do_not_overlap_and_log_sums_are_floats() {
    let test = "outputs_do_not_overlap_and_log_sums_are_floats";
    if !with_library(test, "threads=1024", young_driver) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(8, 2, 128);
    for queries in [1, 40] {
        let mut table = PageTable::new(16, 20);
        table.push(&[1, 2, 4, 5, 6, 8], 90);
        table.push(&[7, 3, 9, 10, 11], 80);
        let batch = Batch::new(vec![0, queries, 2 * queries], table);
        let options = PlanOptions::default();
        let plan = Planner::new()
            .plan(&spec, &batch, &gpu.device(), &options)
            .unwrap();
        let mut workspace = gpu
            .workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default())
            .unwrap();
        let stream = Stream::DEFAULT;
        // SAFETY: nothing is there to be touched.
        unsafe { workspace.upload(&plan, stream) }.unwrap();
        let tokens = 2 * queries as usize;
        let right = DeviceTensor::new(1 << 30, Dtype::BF16, [tokens, 8, 128]);
        let lse = DeviceTensor::new(1 << 31, Dtype::F32, [tokens, 8]);
        let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 20, 1 << 30, 1 << 30);
        let mut run = |pool: KvPool, out: &DeviceTensor<3>, lse: &DeviceTensor<2>| {
            // SAFETY: as above.
            unsafe { gpu.run(&mut workspace, &right, &[pool], out, Some(lse), stream) }
        };
        let before = launches();
        for stride in [0, 8 * 128 - 8] {
            let error = run(pool, &right.with_stride(0, stride), &lse).unwrap_err();
            assert!(
                matches!(error, Error::Stride { tensor: "out", .. }),
                "{error}"
            );
        }
        let half = DeviceTensor {
            dtype: Dtype::F16,
            ..lse
        };
        let error = run(pool, &right, &half).unwrap_err();
        assert!(
            matches!(error, Error::Dtype { tensor: "lse", .. }),
            "{error}"
        );
        let mut other = pool;
        other.v_strides.page_size = 32;
        let error = run(other, &right, &lse).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("32") && text.contains("16, as in the plan"),
            "{text}"
        );
        assert_eq!(launches(), before);
        run(pool, &right, &lse).unwrap();
    }
}

/// What is captured while a plan has one part is also for plans with two.
#[test]
fn a_launch_set_wants_pools_for_all_its_parts() {
    let test = "a_launch_set_wants_pools_for_all_its_parts";
    if !with_library(test, "threads=1024", young_driver) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(8, 2, 128);
    let mut table = PageTable::new(16, 20);
    table.push(&[1, 2, 3], 40);
    table.push(&[1, 2, 4], 45);
    let whole = Batch::new(vec![0, 1, 2], table);
    let batches = [whole.share_prefixes(), whole];
    let plan = |batch: &Batch| {
        let options = PlanOptions::default().with_merge_mode(MergeMode::Kernel);
        let plan = Planner::new().plan(&spec, batch, &gpu.device(), &options);
        plan.unwrap()
    };
    let [two_parts, one_part] = batches.each_ref().map(plan);
    let set = LaunchSet::new().and(&two_parts).and(&one_part);
    let options = WorkspaceOptions::default().with_launches(set);
    let bound = Bound {
        page_ids: 6,
        ..Bound::of(&two_parts)
    };
    let mut workspace = gpu.workspace(&spec, &bound, options).unwrap();
    let stream = Stream::DEFAULT;
    let q = DeviceTensor::new(1 << 30, Dtype::BF16, [2, 8, 128]);
    let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 20, 1 << 30, 1 << 30);
    // SAFETY: nothing is there to be touched.
    unsafe { workspace.upload(&one_part, stream) }.unwrap();
    let mut run = |pools: &[KvPool]| {
        // SAFETY: as above.
        unsafe { gpu.run(&mut workspace, &q, pools, &q, None, stream) }
    };
    let (got, expected) = (1, 2);
    assert_eq!(run(&[pool]), Err(Error::Pools { got, expected }));
    assert_eq!(run(&[pool; 2]), Ok(()));
}

/// Pages of this pool are read row by row, by kernels whose tiles have one table. A graph of them once took plans with
/// joint tiles and left those out.
#[test]
fn a_graph_without_joint_tiles_takes_no_plan_that_has_them() {
    let test = "a_graph_without_joint_tiles_takes_no_plan_that_has_them";
    if !with_library(test, "threads=1024", young_driver) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(4, 2, 64);
    let mut device = gpu.device();
    device.sms = 1;
    let plan = |second: &[u32]| {
        let mut table = PageTable::new(16, 20);
        table.push(&[1, 2, 3], 39);
        table.push(second, 38);
        let batch = Batch::new(vec![0, 1, 2], table);
        let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
        plan.unwrap()
    };
    let [apart, joint] = [plan(&[4, 5, 6]), plan(&[1, 2, 6])];
    let is_joint = |plan: &Plan| plan.items.iter().any(|item| item.is_joint());
    assert!(!is_joint(&apart) && is_joint(&joint), "{joint}");
    let set = LaunchSet::new().and(&apart).and(&joint);
    let options = WorkspaceOptions::default().with_launches(set);
    let bound = Bound {
        items: 10,
        rows: 10,
        page_ids: 10,
        merges: 10,
        slots: 10,
        ..Bound::default()
    };
    let mut workspace = gpu.workspace(&spec, &bound, options).unwrap();
    let q = DeviceTensor::new(1 << 30, Dtype::BF16, [2, 4, 64]);
    let mut strides = KvLayout::Hnd.strides(16, 2, 64);
    strides.page += 48;
    let pool = KvPool::new(&spec, KvLayout::Hnd, 16, 20, 1 << 30, 1 << 30);
    let pool = pool.with_strides(strides, strides);
    let stream = Stream::DEFAULT;
    // SAFETY: nothing is there to be touched.
    unsafe {
        workspace.upload(&joint, stream).unwrap();
        let error = gpu.run(&mut workspace, &q, &[pool], &q, None, stream);
        assert!(matches!(error, Err(Error::NoInstance { .. })), "{error:?}");
        workspace.upload(&apart, stream).unwrap();
        gpu.run(&mut workspace, &q, &[pool], &q, None, stream)
            .unwrap();
        let error = workspace.upload(&joint, stream).unwrap_err();
        assert!(matches!(error, Error::NotCaptured { .. }), "{error}");
        assert!(error.to_string().contains("joint tiles"), "{error}");
        workspace.upload(&apart, stream).unwrap();
    }
}

/// A graph keeps the tensors and pools of its runs. It was once launched for plans with more tokens, and the kernels read and
/// wrote behind the tensors.
#[test]
fn a_graph_takes_no_plan_beyond_its_tensors_and_pools() {
    let test = "a_graph_takes_no_plan_beyond_its_tensors_and_pools";
    if !with_library(test, "threads=1024", graph_driver) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let (spec, device) = (Spec::new(8, 2, 128), gpu.device());
    let limits = BatchLimits::decodes(8, 200, 16);
    let mut options = PlanOptions::default();
    let bound = Bound::new(&spec, &device, &options, &limits).unwrap();
    options.bound = Some(bound);
    let plan = |page: u32, requests: u32, first_page: u32| {
        let mut table = PageTable::new(page, 100);
        for request in 0..requests {
            table.push(&[first_page + request], page);
        }
        let batch = Batch::new((0..=requests).collect(), table);
        let plan = Planner::new().plan(&spec, &batch, &device, &options);
        plan.unwrap()
    };
    let set =
        WorkspaceOptions::default().with_launches(LaunchSet::decodes(&device, &spec).unwrap());
    let workspace = || gpu.workspace(&spec, &bound, set.clone()).unwrap();
    let [mut one, mut other] = [workspace(), workspace()];
    let stream = gpu.stream().unwrap();
    let tensor = |tokens| DeviceTensor::new(1 << 30, Dtype::BF16, [tokens, 8, 128]);
    let pool = |pages| KvPool::new(&spec, KvLayout::Nhd, 16, pages, 1 << 30, 1 << 30);
    let refused = |what, planned, captured| {
        Err(Error::BeyondGraph {
            what,
            planned,
            captured,
        })
    };
    // SAFETY: nothing is there to be touched.
    unsafe {
        one.upload(&plan(16, 2, 0), *stream).unwrap();
        other.upload(&plan(16, 2, 0), *stream).unwrap();
        let layers = |stream| {
            let run = |workspace: &mut Workspace, tokens, pages| {
                let q = tensor(tokens);
                gpu.run(workspace, &q, &[pool(pages)], &q, None, stream)
            };
            run(&mut one, 4, 50)?;
            run(&mut one, 4, 60)?;
            run(&mut other, 3, 50)
        };
        let graph = stream.capture(layers).unwrap();
        let alone = stream.capture(|stream| {
            let q = tensor(8);
            gpu.run(&mut one, &q, &[pool(50)], &q, None, stream)
        });
        let alone = alone.unwrap();

        let before = launches();
        one.upload(&plan(16, 5, 0), *stream).unwrap();
        assert_eq!(graph.launch(*stream), refused("query tokens", 5, 4));
        assert_eq!(launches(), before);
        // Another graph of the same workspace has the room.
        assert_eq!(alone.launch(*stream), Ok(()));
        one.upload(&plan(16, 4, 0), *stream).unwrap();
        assert_eq!(graph.launch(*stream), Ok(()));
        other.upload(&plan(16, 4, 0), *stream).unwrap();
        assert_eq!(graph.launch(*stream), refused("query tokens", 4, 3));
        other.upload(&plan(16, 0, 0), *stream).unwrap();
        assert_eq!(graph.launch(*stream), Ok(()));
        one.upload(&plan(16, 1, 50), *stream).unwrap();
        assert_eq!(graph.launch(*stream), refused("pages of a KV pool", 51, 50));
        one.upload(&plan(8, 1, 0), *stream).unwrap();
        assert_eq!(graph.launch(*stream), refused("tokens in a page", 8, 16));
        // An upload that was refused leaves no plan, as for `Gpu::run`.
        let foreign = Plan::empty(Spec::new(4, 2, 128));
        one.upload(&foreign, *stream).unwrap_err();
        assert_eq!(graph.launch(*stream), Err(Error::NoPlan));
        one.upload(&plan(16, 1, 49), *stream).unwrap();
        assert_eq!(graph.launch(*stream), Ok(()));
        assert_eq!(launches(), before + 4);

        let count = 100_000;
        let start = std::time::Instant::now();
        for _ in 0..count {
            graph.launch(*stream).unwrap();
        }
        let each = start.elapsed().as_nanos() / count;
        println!("{each} ns of host time a launch of a graph of three runs");
        assert!(each < 20_000, "{each} ns");
    }
}

#[test]
fn a_workspace_wants_memory() {
    if with_driver("a_workspace_wants_memory", "threads=1024 memory=2") {
        let gpu = Gpu::new(0).unwrap();
        let bound = Bound {
            items: 1,
            ..Bound::default()
        };
        let error = gpu
            .workspace(&Spec::new(8, 2, 128), &bound, WorkspaceOptions::default())
            .unwrap_err();
        assert!(
            matches!(
                error,
                Error::Driver {
                    call: "cuMemAlloc",
                    code: 2,
                    ..
                }
            ),
            "{error}"
        );
    }
}

/// From layer to layer only addresses change: launches are made once, and tensor maps once for each tensor.
#[test]
fn layers_share_what_was_made_for_the_first() {
    let test = "layers_share_what_was_made_for_the_first";
    if !with_library(test, "threads=1024", young_driver) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(32, 8, 128);
    let mut table = PageTable::new(16, 400);
    table.push(&(0..100).collect::<Vec<_>>(), 1600);
    table.push(&(100..400).collect::<Vec<_>>(), 4800);
    let batch = Batch::new(vec![0, 1, 301], table);
    let options = PlanOptions::default();
    let plan = Planner::new().plan(&spec, &batch, &gpu.device(), &options);
    let plan = plan.unwrap();
    let bound = Bound::of(&plan);
    let mut workspace = gpu
        .workspace(&spec, &bound, WorkspaceOptions::default())
        .unwrap();
    let stream = Stream::DEFAULT;
    // SAFETY: nothing is there to be touched, here and below.
    unsafe { workspace.upload(&plan, stream) }.unwrap();
    let symbol = |name| libcuda::symbol(name).unwrap();
    // SAFETY: the types are those of the functions in the fake driver.
    let (encodes, word) = unsafe {
        (
            mem::transmute::<NonNull<c_void>, extern "C" fn() -> i32>(symbol(c"fake_encodes")),
            mem::transmute::<NonNull<c_void>, extern "C" fn(usize) -> u64>(symbol(
                c"fake_first_word",
            )),
        )
    };
    let q = DeviceTensor::new(1 << 30, Dtype::BF16, [301, 32, 128]);
    let pool = |layer: u64| {
        let [k, v] = [2 * layer, 2 * layer + 1].map(|at| (1 << 33) + at * (1 << 24));
        KvPool::new(&spec, KvLayout::Nhd, 16, 400, k, v)
    };
    let mut run = |q: &DeviceTensor<3>, layer: u64| {
        let before = (encodes(), launches());
        let done = unsafe { gpu.run(&mut workspace, q, &[pool(layer)], q, None, stream) };
        let after = (encodes(), launches());
        done.map(|()| (after.0 - before.0, after.1 - before.1))
    };
    let merging = usize::from(!plan.merges.is_empty());
    let count = (plan.groups.len() + merging) as i32;
    let (made, launched) = run(&q, 0).unwrap();
    // Outputs lie where the queries do, and pages are described to prefill as they are to decode.
    assert!(plan.groups.len() == 2 && made == 3, "{made} maps, {plan}");
    assert_eq!(launched, count);
    // Another layer has other keys and values.
    assert_eq!(run(&q, 1), Ok((2, count)));
    assert_eq!(run(&q, 0), Ok((0, count)));
    assert_eq!(run(&q, 1), Ok((0, count)));
    // The prefill's first parameter is the map of the queries, decode's that of the keys.
    let words = || {
        (0..count as usize)
            .map(|back| word(back))
            .collect::<Vec<_>>()
    };
    let [k, q_map] = [pool(1).k, q.address];
    assert!(
        words().contains(&k) && words().contains(&q_map),
        "{:?}",
        words()
    );
    let other = DeviceTensor {
        address: q.address + 4096,
        ..q
    };
    run(&other, 0).unwrap();
    let k = pool(0).k;
    assert!(
        words().contains(&k) && words().contains(&other.address),
        "{:?}",
        words()
    );
    // What is wrong with an address is said as it is the first time, and nothing is launched.
    let odd = DeviceTensor {
        address: q.address + 2,
        ..q
    };
    let before = launches();
    let wrong = run(&odd, 0).unwrap_err();
    assert!(matches!(wrong, Error::Misaligned { .. }), "{wrong}");
    assert_eq!(launches(), before);
    assert_eq!(run(&q, 0).unwrap().1, count);

    let runs = 20_000;
    let start = std::time::Instant::now();
    for layer in 0..runs {
        run(&q, layer % 32).unwrap();
    }
    let each = start.elapsed().as_nanos() as u64 / runs;
    println!("{each} ns of host time a run of {count} launches");
    assert!(each < 100_000, "{each} ns");
}

/// More bytes than a number of bytes can say: the product must not wrap to a small one.
#[test]
fn device_buffers_have_no_more_bytes_than_can_be_counted() {
    if with_driver("device_buffers_have_no_more_bytes_than_can_be_counted", "") {
        let gpu = Gpu::new(0).unwrap();
        let most = usize::MAX / size_of::<u32>();
        for got in [most + 1, most + 2, usize::MAX] {
            let expected = Error::Extent {
                tensor: "a device buffer",
                dimension: "elements",
                got,
                rule: format!("at most {most} of 4 bytes each"),
            };
            assert_eq!(
                DeviceBuffer::<u32>::zeroed(&gpu, got).unwrap_err(),
                expected
            );
        }
        let buffer = DeviceBuffer::<f32>::zeroed(&gpu, 6).unwrap();
        assert_eq!(buffer.tensor([2, 3]).shape, [2, 3]);
        for shape in [[2, 4], [1 << 63, 2], [usize::MAX, usize::MAX]] {
            let tensor = std::panic::catch_unwind(|| buffer.tensor(shape));
            let said = tensor.unwrap_err().downcast::<String>().unwrap();
            assert!(said.contains("in a buffer of 6 elements"), "{said}");
        }
    }
}
