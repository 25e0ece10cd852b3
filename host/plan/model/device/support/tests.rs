use kernels_gpu::registry::{KernelId, Op};

use super::*;
use crate::{
    plan::{BatchLimits, Bound, PlanOptions, Planner, pod::PodMode},
    problem::{Batch, PageTable},
    step::Rope,
};

fn h200() -> DeviceDescription {
    DeviceDescription::named("h200").unwrap()
}

fn refused(spec: &Spec) -> Unsupported {
    match h200().supports(spec) {
        Err(PlanError::Unsupported(unsupported)) => unsupported,
        other => panic!("{other:?}"),
    }
}

#[test]
fn heads_that_were_compiled_are_supported_and_others_name_the_nearest() {
    for head_dim in [64, 128, 256] {
        for dtype in [Dtype::BF16, Dtype::F16] {
            let spec = Spec::new(32, 8, head_dim).with_dtype(dtype);
            assert_eq!(h200().supports(&spec), Ok(()));
            assert_eq!(h200().supports(&spec.with_soft_cap(30.0)), Ok(()));
        }
    }
    // Some by kernels of the next larger dimension.
    for head_dim in [16, 48, 80, 96, 112, 144, 160, 192, 208, 224, 240] {
        assert_eq!(h200().supports(&Spec::new(32, 8, head_dim)), Ok(()));
    }
    let uneven = Spec::new(32, 8, 192).with_head_dim_v(128);
    assert_eq!(h200().supports(&uneven), Ok(()));
    // By decodes that take prompts, too.
    let large = Spec::new(16, 2, 512);
    assert_eq!(h200().supports(&large), Ok(()));
    assert_eq!(h200().supports(&large.with_dtype(Dtype::F16)), Ok(()));
    let wide_values = Spec::new(16, 1, 64).with_head_dim_v(512);
    assert_eq!(h200().supports(&wide_values), Ok(()));
    assert_eq!(h200().supports(&wide_values.with_dtype(Dtype::F16)), Ok(()));

    let nearest = |spec: &Spec| match refused(spec) {
        Unsupported::HeadDim { nearest, .. } => nearest,
        other => panic!("{other:?}"),
    };
    assert_eq!(nearest(&Spec::new(32, 8, 272)), Some((512, 512)));
    assert_eq!(
        nearest(&Spec::new(32, 8, 160).with_head_dim_v(112)),
        Some((192, 128))
    );
    assert_eq!(nearest(&uneven.with_soft_cap(30.0)), Some((256, 256)));
    assert_eq!(nearest(&Spec::new(32, 8, 320)), Some((512, 512)));
    assert_eq!(nearest(&large.with_soft_cap(30.0)), None);
    assert_eq!(nearest(&Spec::new(32, 8, 528)), None);
    let of = |qk| Spec::new(16, 1, qk).with_head_dim_v(512);
    assert_eq!(nearest(&of(48)), Some((64, 512)));
    assert_eq!(nearest(&of(80)), Some((512, 512)));
    assert_eq!(nearest(&wide_values.with_soft_cap(30.0)), None);
    assert_eq!(
        refused(&Spec::new(32, 8, 272)).to_string(),
        "no kernel for h200 has a head dimension of 272; supported: 64, 64 with values of 512, 80, 96, 112, 128, 192 with \
         values of 128, 256, 512, and all multiples of 16 up to 256; to use 512, the nearest, pad the heads with zeros and keep \
         the scale: Spec::with_scale(1/√272)"
    );
    for dim in (16..=256).step_by(16) {
        let spec = Spec::new(32, 8, dim);
        for dtype in [Dtype::BF16, Dtype::F8E4M3, Dtype::F8E5M2] {
            h200().supports(&spec.with_kv_dtype(dtype)).unwrap();
        }
    }
    for (spec, dims) in [(large, "512"), (wide_values, "64 with values of 512")] {
        assert_eq!(
            refused(&spec.with_kv_dtype(Dtype::F8E4M3)).to_string(),
            format!(
                "no kernel for h200 has a head dimension of {dims} with keys and values in F8E4M3; supported: 64, 128, 256, and \
                 all multiples of 16 up to 256"
            )
        );
    }
}

/// Prompts with heads of 256 have a prefill that fits the shared memory of Ada.
#[test]
fn heads_of_256_run_on_ampere_and_on_ada() {
    let device = |name| DeviceDescription::named(name).unwrap();
    let spec = Spec::new(32, 8, 256);
    for spec in [spec, spec.with_soft_cap(30.0), spec.with_dtype(Dtype::F16)] {
        for name in ["a100", "a6000", "rtx4090"] {
            let device = device(name);
            device.supports(&spec).unwrap();
            let mut table = PageTable::new(3, 100);
            table.push(&(0..100).collect::<Vec<_>>(), 300);
            let batch = Batch::new(vec![0, 300], table);
            let options = PlanOptions::default();
            let plan = Planner::new().plan(&spec, &batch, &device, &options);
            let plan = plan.unwrap();
            plan.verify(&batch).unwrap();
            let are_prefills = plan.groups.iter().all(|of| of.kernel == Kernel::Prefill);
            assert!(are_prefills, "{name}");
        }
    }
    // Prefills run the decodes of larger groups.
    device("a100").supports(&Spec::new(17, 1, 256)).unwrap();
    let error = device("a100").supports(&Spec::new(16, 2, 512));
    let said = error.unwrap_err().to_string();
    assert!(
        said.contains("supported: 64, 128, 256, and all multiples of 16 up to 256"),
        "{said}"
    );
}

/// Prefills with Ampere's instructions read what a launch before them widened, and zeros in the place of columns that heads do not
/// have: of any page size, and with a soft cap.
#[test]
fn prompts_on_ampere_have_all_heads_and_caches() {
    let mut table = PageTable::new(3, 100);
    table.push(&(0..100).collect::<Vec<_>>(), 300);
    let batch = Batch::new(vec![0, 200], table);
    for name in ["a100", "rtx4090"] {
        let device = DeviceDescription::named(name).unwrap();
        for dim in (16..=256).step_by(16) {
            for kv_dtype in [Dtype::BF16, Dtype::F8E4M3, Dtype::F8E5M2] {
                let spec = Spec::new(8, 2, dim).with_kv_dtype(kv_dtype);
                for spec in [spec, spec.with_soft_cap(30.0)] {
                    device.supports(&spec).unwrap();
                    let limits = BatchLimits::decodes(1, 300, 3).with_query_tokens(200);
                    let options = PlanOptions::default();
                    let bound = Bound::new(&spec, &device, &options, &limits).unwrap();
                    let options = options.with_bound(bound);
                    let plan = Planner::new().plan(&spec, &batch, &device, &options);
                    let plan = plan.unwrap();
                    plan.verify(&batch).unwrap();
                    let next = match dim {
                        ..=64 => 64,
                        65..=128 => 128,
                        _ => 256,
                    };
                    for group in &plan.groups {
                        let row = group.id.unwrap().info();
                        assert_eq!((row.op, row.head_dim), (Op::Prefill, next), "{name} {dim}");
                    }
                }
            }
        }
    }
    // On Hopper the kernels of its own are taken.
    let spec = Spec::new(8, 2, 240).with_kv_dtype(Dtype::F8E4M3);
    let plan = Planner::new().plan(&spec, &batch, &h200(), &PlanOptions::default());
    let plan = plan.unwrap();
    assert!(
        plan.groups
            .iter()
            .all(|group| group.kernel == Kernel::Decode)
    );
}

/// Decodes of heads of 256 have two warps in a CTA, or one where two do not fit. They read 8-bit keys and heads of other sizes
/// themselves.
#[test]
fn decodes_on_ampere_have_all_heads_and_caches() {
    let mut table = PageTable::new(3, 100);
    table.push(&(0..100).collect::<Vec<_>>(), 300);
    let batch = Batch::new(vec![0, 1], table);
    for (name, warps) in [("a100", 2), ("a6000", 1), ("rtx4090", 1)] {
        let device = DeviceDescription::named(name).unwrap();
        for dim in (16..=256).step_by(16) {
            for kv_dtype in [Dtype::BF16, Dtype::F8E4M3, Dtype::F8E5M2] {
                let spec = Spec::new(32, 8, dim).with_kv_dtype(kv_dtype);
                let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
                let plan = plan.unwrap();
                plan.verify(&batch).unwrap();
                for group in &plan.groups {
                    assert_eq!(group.kernel, Kernel::Decode, "{name}, {dim}, {kv_dtype:?}");
                    let row = group.id.unwrap().info();
                    assert!(row.shared_bytes <= device.shared_bytes_per_cta);
                    if dim > 128 && kv_dtype == Dtype::BF16 {
                        assert_eq!((row.threads, row.head_dim), (warps * 32, 256), "{name}");
                    }
                }
            }
        }
    }
}

/// Prompts have kernels of their own if there are any; decodes are padded.
#[test]
fn heads_between_those_of_kernels_are_padded_where_no_kernel_has_them() {
    let dims = |spec: &Spec| {
        let mut table = PageTable::new(16, 600);
        table.push(&(0..300).collect::<Vec<_>>(), 4800);
        table.push(&(300..600).collect::<Vec<_>>(), 4800);
        let batch = Batch::new(vec![0, 4800, 4801], table);
        let options = PlanOptions::default().with_pod(PodMode::Serial);
        let plan = Planner::new()
            .plan(spec, &batch, &h200(), &options)
            .unwrap();
        let mut dims: Vec<_> = plan
            .groups
            .iter()
            .map(|group| {
                let row = group.id.unwrap().info();
                (row.op == Op::Prefill, row.head_dim, row.rows)
            })
            .collect();
        dims.sort_unstable();
        dims
    };
    for dim in [80, 96, 112] {
        let spec = Spec::new(32, 8, dim);
        assert_eq!(dims(&spec), [(false, 128, 8), (true, dim, 192)]);
        assert_eq!(
            dims(&spec.with_sinks()),
            [(false, 128, 8), (true, dim, 192)]
        );
        assert_eq!(
            dims(&spec.with_soft_cap(30.0)),
            [(false, 128, 8), (true, 128, 192)]
        );
    }
    assert_eq!(
        dims(&Spec::new(32, 8, 160)),
        [(false, 256, 8), (true, 256, 128)]
    );
}

/// Prefills that share SMs with decodes pad heads of 96, those alone do not.
#[test]
fn padded_products_count_where_prefills_run_beside_decodes() {
    let fused = |head_dim: u32, prompt: u32, decodes: u32| {
        let mut table = PageTable::new(16, 40_000);
        let mut ends = vec![0];
        for request in 0..=decodes {
            let (queries, keys) = if request == 0 {
                (prompt, prompt)
            } else {
                (1, 4096)
            };
            let first = request * 600;
            table.push(&(first..first + keys / 16).collect::<Vec<_>>(), keys);
            ends.push(ends[request as usize] + queries);
        }
        let batch = Batch::new(ends, table);
        let plan = Planner::new()
            .plan(
                &Spec::new(32, 8, head_dim),
                &batch,
                &h200(),
                &PlanOptions::default(),
            )
            .unwrap();
        plan.pod.expect("a hybrid batch").mode == PodMode::Fused
    };
    assert!(fused(128, 8192, 32));
    assert!(!fused(96, 8192, 32));
    assert!(fused(96, 4096, 64));
}

#[test]
fn element_types_without_a_kernel_are_named() {
    let spec = Spec::new(32, 8, 128);
    let all = refused(&spec.with_dtype(Dtype::F32));
    let keys = refused(&spec.with_kv_dtype(Dtype::F32));
    for dtype in [Dtype::F8E4M3, Dtype::F8E5M2] {
        assert_eq!(h200().supports(&spec.with_kv_dtype(dtype)), Ok(()));
    }
    let cap = spec.with_kv_dtype(Dtype::F8E5M2).with_soft_cap(30.0);
    assert_eq!(
        refused(&cap).to_string(),
        "no kernel for h200 takes keys and values (with a soft cap) in F8E5M2: convert to BF16, F16 or F8E4M3, or plan for the CPU, which \
         takes every type"
    );
    assert!(matches!(
        all,
        Unsupported::Dtype {
            tensor: "keys and values",
            got: Dtype::F32,
            ..
        }
    ));
    assert!(matches!(
        keys,
        Unsupported::Dtype {
            tensor: "keys and values",
            got: Dtype::F32,
            ..
        }
    ));
    let mixed = refused(&spec.with_kv_dtype(Dtype::F16));
    assert!(matches!(
        mixed,
        Unsupported::DtypesDiffer {
            got: Dtype::F16,
            expected: Dtype::BF16,
            ..
        }
    ));
    // Beside keys of fewer bits queries are rounded, and outputs are merged, also where heads are padded.
    for kv_dtype in [Dtype::BF16, Dtype::F16, Dtype::F8E4M3] {
        let mut wide = spec.with_kv_dtype(kv_dtype);
        (wide.q_dtype, wide.out_dtype) = (Dtype::F32, Dtype::F32);
        assert_eq!(h200().supports(&wide), Ok(()));
        (wide.head_dim_qk, wide.head_dim_v) = (80, 80);
        assert_eq!(h200().supports(&wide), Ok(()));
    }
    // The CPU takes them all.
    let cpu = DeviceDescription::named("cpu").unwrap();
    for dtype in [Dtype::F32, Dtype::F16] {
        assert_eq!(cpu.supports(&Spec::new(4, 2, 80).with_dtype(dtype)), Ok(()));
    }
    // What is wrong at all is said first.
    assert!(matches!(
        cpu.supports(&Spec::new(4, 3, 80)),
        Err(PlanError::Problem(_))
    ));
}

/// What a variant lacks is named.
#[test]
fn variants_name_what_there_is_of_them() {
    let spec = Spec::new(8, 2, 128);
    let sigmoid = spec.with_hooks(&crate::variants::SIGMOID);
    assert_eq!(h200().supports(&sigmoid), Ok(()));
    assert_eq!(
        refused(&sigmoid.with_dtype(Dtype::F16)).to_string(),
        "no kernel for h200 computes the variant \"sigmoid\" for a head dimension of 128 in F16 with keys in F16; supported: \
         128 in BF16; compile others with `variant_kernels!` in your own crate"
    );
    let of_8_bits = refused(&sigmoid.with_kv_dtype(Dtype::F8E4M3)).to_string();
    assert!(
        of_8_bits.ends_with("with keys in F8E4M3; supported: keys in BF16 or F16"),
        "{of_8_bits}"
    );
    let latent = Spec::latent(16, 512, 64).with_hooks(&crate::variants::SIGMOID);
    assert!(
        refused(&latent)
            .to_string()
            .contains("with a variant of hooks")
    );
    let a100 = DeviceDescription::named("a100").unwrap();
    let error = a100.supports(&sigmoid).unwrap_err().to_string();
    assert!(error.contains("none that can run prompts"), "{error}");
}

/// The table of docs/guide/own-variant.md.
#[test]
fn variants_of_a_program_have_these_heads_and_types() {
    let a100 = DeviceDescription::named("a100").unwrap();
    let own = |mut spec: Spec| {
        spec.variant.hooks = kernels_gpu::HooksName::new("own");
        [&h200(), &a100].map(|device| device.supports(&spec).is_ok())
    };
    for dim in (16..=512).step_by(16) {
        let expected = [dim <= 256; 2];
        for dtype in [Dtype::BF16, Dtype::F16] {
            assert_eq!(
                own(Spec::new(8, 2, dim).with_dtype(dtype)),
                expected,
                "{dim}"
            );
        }
    }
    let spec = Spec::new(8, 2, 128);
    assert_eq!(own(spec.with_window_left(100)), [true; 2]);
    assert_eq!(own(spec.non_causal()), [true; 2]);
    assert_eq!(own(spec.with_sinks()), [true; 2]);
    assert_eq!(own(spec.with_soft_cap(30.0)), [false; 2]);
    assert_eq!(own(spec.with_kv_dtype(Dtype::F8E4M3)), [false; 2]);
    assert_eq!(
        own(spec.with_rotary(crate::step::Rope::new(128, 1e4))),
        [false; 2]
    );
    assert_eq!(own(Spec::latent(16, 512, 64)), [false; 2]);
}

/// A specification with 8-bit products gets them, or is refused with what there is: it is not computed in another type.
#[test]
fn products_of_8_bits_are_there_or_refused() {
    let narrow = |dim| {
        Spec::new(32, 8, dim)
            .with_kv_dtype(Dtype::F8E4M3)
            .with_compute(Compute::F8)
    };
    for (dtype, dim) in [
        (Dtype::BF16, 128),
        (Dtype::F16, 128),
        (Dtype::BF16, 256),
        (Dtype::F16, 256),
    ] {
        let spec = Spec {
            q_dtype: dtype,
            out_dtype: dtype,
            ..narrow(dim)
        };
        assert_eq!(h200().supports(&spec), Ok(()));
        assert_eq!(
            h200().supports(&spec.with_soft_cap(30.0).with_sinks()),
            Ok(())
        );
        for (compute, of_8_bits) in [(Compute::F8, true), (Compute::F16, false)] {
            let kernels = alone(&h200(), &spec.with_compute(compute), Op::Prefill);
            let right = |id: &KernelId| id.info().products_of_8_bits == of_8_bits;
            assert!(
                !kernels.is_empty() && kernels.iter().all(right),
                "{kernels:?}"
            );
        }
    }

    let hooked = narrow(128).with_hooks(&crate::variants::ALIBI);
    let latent = Spec::latent(128, 512, 64).with_compute(Compute::F8);
    for other in [
        narrow(64),
        narrow(128).with_kv_dtype(Dtype::F8E5M2),
        narrow(80),
        narrow(128).with_head_dim_v(64),
        hooked,
        latent,
        Spec::new(32, 8, 128).with_compute(Compute::F8),
    ] {
        assert!(
            matches!(refused(&other), Unsupported::Compute { .. }),
            "{other:?}"
        );
    }
    assert_eq!(
        refused(&narrow(64)).to_string(),
        "no prefill kernel for h200 has products of 8 bits for a head dimension of 64, keys and values in F8E4M3 and this \
         variant; supported: keys and values in F8E4M3 with a head dimension of 128 or 256, without hooks; otherwise use Compute::F16"
    );
    for device in ["a100", "cpu"] {
        let device = DeviceDescription::named(device).unwrap();
        let error = device.supports(&narrow(128)).unwrap_err();
        assert!(matches!(error, PlanError::Unsupported(_)), "{error}");
    }
}

#[test]
fn planning_and_sizing_refuse_what_no_kernel_does() {
    let mut table = PageTable::new(16, 10);
    table.push(&[3], 9);
    let batch = Batch::new(vec![0, 1], table);
    let (device, limits) = (h200(), BatchLimits::decodes(1, 16, 16));
    let refused = |spec: &Spec, options: &PlanOptions| {
        let plan = Planner::new()
            .plan(spec, &batch, &device, options)
            .unwrap_err();
        let bound = Bound::new(spec, &device, options, &limits).unwrap_err();
        assert_eq!(plan, bound);
        plan.to_string()
    };
    let default = PlanOptions::default();
    let spec = Spec::new(32, 8, 128);
    let by_dim = refused(&Spec::new(32, 8, 272), &default);
    assert!(by_dim.contains("a head dimension of 272"), "{by_dim}");
    let by_type = refused(&spec.with_dtype(Dtype::F32), &default);
    assert!(by_type.contains("keys and values in F32"), "{by_type}");
    let tile = |m, n| default.with_decode_tile(Tile { m, n });
    assert_eq!(
        refused(&spec, &tile(7, 13)),
        "no Decode kernel for h200 has tiles of 7×13 at head dimension 128; supported: 8×32, 16×32, 64×64, 128×128; or \
         leave the choice to the planner"
    );
    assert!(
        Planner::new()
            .plan(&spec, &batch, &device, &tile(16, 32))
            .is_ok()
    );
    // Ampere has one kernel for decodes.
    let a100 = DeviceDescription::named("a100").unwrap();
    let on_a100 = |tile| Planner::new().plan(&spec, &batch, &a100, &tile);
    let other = on_a100(tile(32, 64)).unwrap_err().to_string();
    assert!(other.contains("supported: 16×32"), "{other}");
    assert!(on_a100(tile(16, 32)).is_ok());
}

/// Decodes copy the rows of such heads one by one, prompts need tensor maps or a kernel of their own.
#[test]
fn prompts_of_heads_between_those_of_kernels_need_pages_of_a_multiple_of_8() {
    let plan = |spec: Spec, page_size: u32, q_len: u32, device: &str| {
        let mut table = PageTable::new(page_size, 100);
        table.push(&(0..60_u32.div_ceil(page_size)).collect::<Vec<_>>(), 60);
        let device = DeviceDescription::named(device).unwrap();
        let (batch, options) = (Batch::new(vec![0, q_len], table), PlanOptions::default());
        Planner::new().plan(&spec, &batch, &device, &options)
    };
    // No tensor map describes these: decodes take their prompts.
    for head_dim in [224, 240] {
        for (page_size, q_len) in [(16, 1), (5, 1), (16, 30), (5, 30)] {
            let plan = plan(Spec::new(14, 2, head_dim), page_size, q_len, "h200").unwrap();
            assert!(
                plan.groups
                    .iter()
                    .all(|group| group.kernel == Kernel::Decode)
            );
        }
    }
    for head_dim in [16, 48, 80, 96, 112, 144, 208] {
        let spec = Spec::new(14, 2, head_dim);
        for q_len in [1, 30] {
            assert!(plan(spec, 16, q_len, "h200").is_ok());
            assert!(plan(spec, 5, q_len, "cpu").is_ok());
        }
        assert!(plan(spec, 5, 1, "h200").is_ok());
        // Prompts of some of these heads have kernels of their own, which take pages of any size.
        let own = matches!(head_dim, 80 | 96 | 112);
        match plan(spec, 5, 30, "h200") {
            Ok(_) => assert!(own, "{head_dim}"),
            Err(refused) => assert_eq!(
                (own, refused.to_string()),
                (
                    false,
                    format!(
                        "no kernel for h200 with a head dimension of {head_dim} reads pages of 5 tokens: use a page size \
                         that is a multiple of 8"
                    )
                )
            ),
        }
        // Of 8 bits, decodes copy heads row by row, and take prompts, too.
        let of_8_bits = spec.with_kv_dtype(Dtype::F8E4M3);
        for (page_size, q_len) in [(16, 1), (5, 1), (16, 30), (5, 30)] {
            plan(of_8_bits, page_size, q_len, "h200").unwrap();
        }
    }
}

#[test]
fn all_query_heads_of_a_kv_head_decode_from_pages_of_any_size() {
    for (heads, head_dim, dtype) in [
        (32, 128, Dtype::BF16),
        (128, 128, Dtype::BF16),
        (17, 256, Dtype::BF16),
        (64, 80, Dtype::BF16),
        (16, 256, Dtype::F8E4M3),
        (64, 64, Dtype::F8E4M3),
        (64, 80, Dtype::F8E4M3),
    ] {
        let mut table = PageTable::new(1, 100);
        table.push(&(0..60).collect::<Vec<_>>(), 60);
        let spec = Spec::new(heads, 1, head_dim).with_kv_dtype(dtype);
        let batch = Batch::new(vec![0, 1], table);
        let plan = Planner::new().plan(&spec, &batch, &h200(), &PlanOptions::default());
        let groups = plan.unwrap().groups;
        assert!(
            groups.iter().all(|group| group.kernel == Kernel::Decode),
            "{spec:?}"
        );
    }
}

/// An earlier version planned such a batch and ignored its ancestors.
#[test]
fn latent_heads_take_no_ancestors_on_a_gpu() {
    let mut table = PageTable::new(16, 10);
    table.push(&[3], 9);
    let batch = Batch::new(vec![0, 2], table);
    let trees = batch.clone().with_ancestors(vec![0b101, 0b11]);
    let (spec, options) = (Spec::latent(16, 512, 64), PlanOptions::default());
    let plan = |batch: &Batch, device: &str| {
        let device = DeviceDescription::named(device).unwrap();
        Planner::new().plan(&spec, batch, &device, &options)
    };
    assert!(plan(&batch, "h200").is_ok() && plan(&trees, "cpu").is_ok());
    let refused = plan(&trees, "h200").unwrap_err();
    assert!(refused.to_string().contains("with ancestors"), "{refused}");
    let limits = BatchLimits::decodes(1, 16, 16).with_trees(true);
    let sized = Bound::new(&spec, &h200(), &options, &limits);
    assert_eq!(sized, Err(refused));
}

#[test]
fn latent_heads_are_supported_on_hopper_and_refused_elsewhere() {
    let spec = Spec::latent(128, 512, 64);
    assert_eq!(h200().supports(&spec), Ok(()));
    for refused in [
        spec.with_soft_cap(30.0),
        Spec::latent(128, 448, 64),
        Spec::latent(129, 512, 64).with_soft_cap(1.0),
    ] {
        let error = h200().supports(&refused);
        assert!(
            matches!(
                error,
                Err(PlanError::Unsupported(Unsupported::Latent { .. }))
            ),
            "{error:?}"
        );
    }
    let a100 = DeviceDescription::named("a100").unwrap();
    let error = a100.supports(&spec).unwrap_err().to_string();
    assert!(error.contains("latent attention at all"), "{error}");

    // In rows of 656 bytes.
    let of_8_bits = spec.with_kv_dtype(Dtype::F8E4M3);
    assert_eq!(h200().supports(&of_8_bits), Ok(()));
    let of_f16 = spec.with_dtype(Dtype::F16).with_kv_dtype(Dtype::F8E4M3);
    let error = h200().supports(&of_f16).unwrap_err().to_string();
    assert!(error.contains("KvScales::InRow) beside BF16"), "{error}");
}

/// A specification with a rotary embedding gets it, or is refused with what there is.
#[test]
fn rotary_embeddings_are_there_or_refused() {
    let interleaved = |dim| Rope::new(dim, 1e4).with_pairing(Pairing::Interleaved);
    for head_dim in [64, 128] {
        for dtype in [Dtype::BF16, Dtype::F16] {
            let spec = Spec::new(32, 8, head_dim).with_dtype(dtype);
            for rope in [
                Rope::new(head_dim, 1e4),
                Rope::new(32, 1e4),
                interleaved(head_dim),
                interleaved(6),
            ] {
                let spec = spec.with_rotary(rope).with_sinks().with_window_left(100);
                assert_eq!(h200().supports(&spec), Ok(()), "{rope:?}");
                // By kernels that turn, and prefills of Hopper behind a launch that does.
                let decodes = alone(&h200(), &spec, Op::Decode);
                assert!(!decodes.is_empty() && decodes.iter().all(|id| id.info().turns));
                assert!(!alone(&h200(), &spec, Op::Prefill).is_empty());
            }
        }
    }
    let spec = Spec::new(8, 2, 64).with_rotary(Rope::new(64, 1e4));
    let without = Spec {
        rotary: None,
        ..spec
    };
    let decodes = alone(&h200(), &without, Op::Decode);
    assert!(decodes.iter().all(|id| !id.info().turns));
    let wide = Spec {
        kv_heads: 1,
        q_heads: 16,
        ..spec
    };
    let float = Spec {
        q_dtype: Dtype::F32,
        ..spec
    };
    for other in [
        spec.with_soft_cap(30.0),
        spec.with_hooks(&crate::variants::ALIBI),
        spec.with_kv_dtype(Dtype::F8E4M3),
        spec.with_rotary(Rope::new(16, 1e4)),
        Spec::new(8, 2, 256).with_rotary(interleaved(64)),
        Spec::new(8, 2, 96).with_rotary(interleaved(64)),
        Spec::new(8, 2, 128)
            .with_head_dim_v(64)
            .with_rotary(interleaved(64)),
        wide,
        float,
    ] {
        assert!(
            matches!(refused(&other), Unsupported::Rotary { .. }),
            "{other:?}"
        );
    }
    assert_eq!(
        refused(&wide).to_string(),
        "no kernel for h200 applies rotary embeddings with 16 query heads per KV head (supported: up to 8); apply them \
         before attention (for keys when appending, Gpu::qkv_step) and remove `rotary` from the Spec, or plan for the CPU"
    );
    let a100 = DeviceDescription::named("a100").unwrap();
    let error = a100.supports(&spec).unwrap_err().to_string();
    assert!(
        error.contains("applies rotary embeddings at all"),
        "{error}"
    );
    let cpu = DeviceDescription::named("cpu").unwrap();
    assert_eq!(cpu.supports(&spec.with_soft_cap(30.0)), Ok(()));
}

/// The CPU takes tiles of any size but none of no rows or keys, which once made the planner divide by zero.
#[test]
fn tiles_without_rows_or_keys_are_refused() {
    let mut device = DeviceDescription::named("cpu").unwrap();
    device.sms = 8;
    let spec = Spec::new(8, 2, 64);
    let mut table = PageTable::new(16, 1000);
    table.push(&(0..1000).collect::<Vec<_>>(), 16_000);
    let batch = Batch::new(vec![0, 1], table);
    let plan = |m, n| {
        let options = PlanOptions {
            decode_tile: Some(Tile { m, n }),
            ..PlanOptions::default()
        };
        Planner::new().plan(&spec, &batch, &device, &options)
    };
    for (m, n) in [(32, 0), (0, 64), (32, u32::MAX), (u32::MAX, 64)] {
        let error = plan(m, n).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("1 to 65536 rows and keys"), "{text}");
    }
    assert_eq!(plan(32, 64).unwrap().verify(&batch), Ok(()));
}
