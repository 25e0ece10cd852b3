//! What is wrong before a kernel is launched: no driver, no device, modules that it refuses or that lack a kernel.

use std::{collections::BTreeSet, path::PathBuf};

use kernels_gpu::registry::{Element, Family};
use tandem_attn::{
    Error, Hooks, HooksName,
    exec::gpu::{Gpu, Image, MODULES, Module},
    plan::{DeviceDescription, PlanError, PlanOptions, Planner, Unsupported},
    problem::{Batch, Dtype, PageTable, Spec},
    variants::ALIBI,
};

use crate::driver::{assert_fails_in, planned, with_driver, with_library};

#[test]
fn no_driver() {
    let nowhere = || PathBuf::from("/nowhere/libcuda.so.1");
    if with_library(no_driver, "", nowhere) {
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
    let none = |ordinal, count| Error::NoDevice { ordinal, count };
    if with_driver(no_device, "devices=0") {
        assert_eq!(Gpu::new(0).unwrap_err(), none(0, 0));
    }
    if with_driver(no_device, "devices=2") {
        assert_eq!(Gpu::new(2).unwrap_err(), none(2, 2));
        assert!(Gpu::new(1).is_ok());
    }
}

#[test]
fn a_code_that_nobody_knows() {
    if with_driver(a_code_that_nobody_knows, "init=9999") {
        assert_fails_in(("cuInit", 9999), &Gpu::new(0).unwrap_err());
    }
}

#[test]
fn unsupported_architecture() {
    if with_driver(unsupported_architecture, "compute=75") {
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
        if with_driver(each_gpu_gets_its_modules, settings) {
            let gpu = Gpu::builder().compile_ptx(&mut |_| {}).build(0);
            assert_eq!(gpu.unwrap().arch(), arch);
        }
    }
}

#[test]
fn ptx_newer_than_the_driver() {
    if with_driver(ptx_newer_than_the_driver, "cubin=200 ptx=222 version=11040") {
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
        if with_driver(nothing_is_compiled_unless_asked_for, settings) {
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
    if with_driver(damaged_kernels_are_refused, "compute=90") {
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
        if with_driver(a_refused_module, settings) {
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
    if with_driver(a_missing_kernel, "lacks_append=1") {
        let expected = Error::NoKernel {
            kernel: "append_paged_kv_16".into(),
            arch: "sm_90a",
        };
        assert_eq!(Gpu::new(0).unwrap_err(), expected);
    }
}

/// The library's slopes with kernels of the program.
fn variant(name: &str, families: &'static [Family]) -> Hooks {
    Hooks {
        name: HooksName::new(name).expect("a name"),
        families,
        heads: &[128],
        elements: &[Element::Bf16],
        ..ALIBI
    }
}

/// Kernels are found by the name: those of another variant would be launched.
#[test]
fn variants_of_one_name_are_refused() {
    if !with_driver(variants_of_one_name_are_refused, "compute=90") {
        return;
    }
    let [own, other] = ["own", "other"].map(|name| variant(name, &[Family::Prefill]));
    let build = |variants: &[Hooks]| {
        let mut builder = Gpu::builder();
        for hooks in variants {
            builder = builder.variant(hooks, MODULES);
        }
        builder.build(0).map(drop)
    };
    assert_eq!(build(&[own, other]), Ok(()));
    for (variants, name) in [
        (&[own, other, own][..], own.name),
        (&[variant("alibi", &[Family::Prefill])], ALIBI.name),
    ] {
        let error = build(variants).unwrap_err();
        assert_eq!(error, Error::VariantTwice { name });
        assert!(error.to_string().contains("a name of its own"), "{error}");
    }
}

/// Plans name no kernel that a variant of the program lacks. Where there is none for prompts, that is known before there is a batch.
#[test]
fn plans_name_the_kernels_that_a_variant_has() {
    use Family::*;
    if !with_driver(plans_name_the_kernels_that_a_variant_has, "compute=90") {
        return;
    }
    let all = variant("all", &[Prefill, DecodeMma, DecodeWgmma, Sm80Decode]);
    let few = variant("few", &[Prefill, DecodeMma]);
    let prompts = variant("prompts", &[Prefill]);
    let decodes = variant("decodes", &[DecodeMma, DecodeWgmma]);
    let absent = variant("absent", &[Prefill]);
    let gpu = [all, few, prompts, decodes]
        .iter()
        .fold(Gpu::builder(), |gpu, hooks| gpu.variant(hooks, MODULES));
    let gpu = gpu.build(0).unwrap();
    let spec = Spec::new(32, 8, 128);
    assert_eq!(gpu.supports(&spec), Ok(()));
    // Many requests with one prefix, which fill tiles of 64 rows and more; few; a prompt among them.
    let batches = [(96, 256, 1), (3, 2, 1), (5, 30, 700)].map(|(requests, common, queries)| {
        let mut table = PageTable::new(16, 2000);
        let mut ends = vec![0];
        for request in 0..requests {
            let own = (common + 8 * request..common + 8 * request + 8).collect::<Vec<_>>();
            let pages = [(0..common).collect::<Vec<_>>(), own].concat();
            table.push(&pages, 16 * pages.len() as u32);
            let queries = if request == 0 { queries } else { 1 };
            ends.push(ends.last().unwrap() + queries.min(16 * pages.len() as u32));
        }
        Batch::new(ends, table)
    });
    let mut families = Vec::new();
    for hooks in [&all, &few, &prompts, &ALIBI] {
        let spec = spec.with_hooks(hooks);
        assert_eq!(gpu.supports(&spec), Ok(()), "{hooks:?}");
        let mut named = BTreeSet::new();
        for batch in &batches {
            let plan = planned(&gpu, &spec, batch);
            for row in plan.groups.iter().map(|group| group.id.unwrap().info()) {
                assert!(hooks.replaces(row), "{hooks:?}: {}", row.name);
                named.insert(format!("{:?}", row.family));
            }
        }
        families.push(named.len());
    }
    assert_eq!(families, [3, 2, 1, 3]);
    let missing = gpu.supports(&spec.with_hooks(&absent));
    assert!(
        matches!(missing, Err(Error::NoVariant { .. })),
        "{missing:?}"
    );
    let options = PlanOptions::default();
    for (spec, there) in [
        (spec.with_hooks(&decodes), "none that can run prompts"),
        (Spec::new(32, 8, 64).with_hooks(&all), "128 in BF16"),
        (spec.with_hooks(&all).with_dtype(Dtype::F16), "128 in BF16"),
        (spec.with_hooks(&absent), "none that can run prompts"),
    ] {
        let lacks = Planner::new().plan(&spec, &batches[1], &gpu.device(), &options);
        let lacks = lacks.unwrap_err();
        assert!(
            matches!(lacks, PlanError::Unsupported(Unsupported::Hooks { .. })),
            "{lacks:?}"
        );
        assert!(lacks.to_string().contains(there), "{lacks}");
        if spec.variant.hooks != Some(absent.name) {
            assert_eq!(gpu.supports(&spec), Err(lacks.into()));
        }
    }
    // A description alone does not know what a program has.
    let h200 = DeviceDescription::named("h200").unwrap();
    let plan = Planner::new().plan(&spec.with_hooks(&absent), &batches[1], &h200, &options);
    assert!(plan.is_ok());
}
