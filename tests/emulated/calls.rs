//! What the emulated GPU says of calls that are wrong.

use std::sync::PoisonError;

use half::bf16;
use tandem_attn::{
    Error,
    exec::{
        emulated::{Emulated, Settings},
        gpu::{
            Arch, DeviceBuffer, DeviceTensor, Gpu, KvPool, LaunchSet, RunTensors, WorkspaceOptions,
        },
    },
    kv::KvView,
    plan::{BatchLimits, Bound, MergeMode, Plan, PlanError, PlanOptions, Planner, Unsupported},
    problem::{Batch, KvLayout, PageTable, Spec},
    variants::{ALIBI, Slopes},
};

use crate::{FAILURE, no_failure, settings};

/// Uploads a plan, and runs it on queries that the outputs overwrite.
fn run(gpu: &Gpu, plan: &Plan, q: &DeviceTensor<3>, kv: KvPool) -> Result<(), Error> {
    let stream = gpu.stream()?;
    let mut workspace = gpu.workspace(&plan.spec, &Bound::of(plan), WorkspaceOptions::default())?;
    // SAFETY: the stream is ours, and nothing but the emulator's own memory can be touched.
    unsafe {
        workspace.upload(plan, *stream)?;
        gpu.run(&mut workspace, q, &[kv], q, None, *stream)?;
    }
    stream.synchronize()
}

/// A page beyond the pool is an error of the run that names address and instruction, and the next run is as ever.
#[test]
fn pages_outside_the_pool_are_reported() {
    let _alone = FAILURE.write().unwrap_or_else(PoisonError::into_inner);
    let emulated = Emulated::new(settings(1, 5)).expect("the emulator");
    let spec = Spec::new(4, 1, 64);
    // Pages of 3 tokens are loaded row by row: the accelerator reads zeroes outside of its tensor.
    let mut table = PageTable::new(3, 9);
    table.push(&[1, 8], 5);
    let batch = Batch::new(vec![0, 1], table);
    let plan = Planner::new()
        .plan(&spec, &batch, &emulated.device(), &PlanOptions::default())
        .expect("it can be planned");
    let (gpu, stream) = (emulated.gpu(), emulated.gpu().stream().expect("a stream"));
    let pool = DeviceBuffer::from_slice(gpu, &[bf16::ONE; 2 * 3 * 64]).expect("memory");
    let q = DeviceBuffer::from_slice(gpu, &[bf16::ONE; 4 * 64]).expect("memory");
    let address = pool.address();
    // What the caller says of the pool is not true: it has two pages.
    let kv = KvPool::new(&spec, KvLayout::Nhd, 3, 9, address, address);
    let failed = run(gpu, &plan, &q.tensor([1, 4, 64]), kv);
    let Err(Error::Driver { text, .. }) = failed else {
        panic!("{failed:?}");
    };
    assert!(
        text.contains("lie outside") && text.contains("line "),
        "{text}"
    );
    emulated.forget_failure();
    assert_eq!(stream.synchronize(), Ok(()));
}

/// Launches after a trace were recorded, too, and appeared in the next one.
#[test]
fn a_trace_has_the_launches_of_its_run() {
    // Alone: the settings are those of the process.
    let _alone = FAILURE.write().unwrap_or_else(PoisonError::into_inner);
    let emulated = Emulated::new(settings(1, 5)).expect("the emulator");
    let spec = Spec::new(4, 1, 64);
    let mut table = PageTable::new(16, 1);
    table.push(&[0], 5);
    let batch = Batch::new(vec![0, 1], table);
    let plan = Planner::new()
        .plan(&spec, &batch, &emulated.device(), &PlanOptions::default())
        .expect("it can be planned");
    let (q, pool) = ([bf16::ONE; 4 * 64], [bf16::ONE; 16 * 64]);
    let kv = KvView::new(&spec, KvLayout::Nhd, 16, &pool, &pool);
    let trace = || {
        let mut out = [bf16::ZERO; 4 * 64];
        let timelines = emulated
            .trace(&plan, &q, &[kv], &mut out, 0)
            .expect("it runs");
        timelines.len()
    };
    let launches = trace();
    assert!(launches > 0);
    let gpu = emulated.gpu();
    let [q, keys] = [&q[..], &pool].map(|values| DeviceBuffer::from_slice(gpu, values));
    let (q, keys) = (q.expect("memory"), keys.expect("memory"));
    let kv = KvPool::new(&spec, KvLayout::Nhd, 16, 1, keys.address(), keys.address());
    assert_eq!(run(gpu, &plan, &q.tensor([1, 4, 64]), kv), Ok(()));
    assert_eq!(trace(), launches);
}

/// Launches of one GPU had the shared memory of the one that was used last, and its kernels were refused.
#[test]
fn a_gpu_stays_what_it_is_beside_another() {
    let _alone = FAILURE.write().unwrap_or_else(PoisonError::into_inner);
    let hopper = Emulated::new(settings(0, 5)).expect("the emulator");
    // No other test has so few multiprocessors: its kernels are loaded now, which changes the settings of the process.
    let few = Settings {
        compute: 80,
        multiprocessors: 3,
        ..settings(0, 5)
    };
    let ampere = Emulated::new(few).expect("the emulator");
    for emulated in [hopper, ampere] {
        let gpu = emulated.gpu();
        let spec = Spec::new(4, 1, 128);
        let mut table = PageTable::new(16, 5);
        table.push(&[0, 1, 2, 3, 4], 80);
        let batch = Batch::new(vec![0, 80], table);
        let plan = Planner::new()
            .plan(&spec, &batch, &emulated.device(), &PlanOptions::default())
            .expect("it can be planned");
        let ones = |count: usize| DeviceBuffer::from_slice(gpu, &vec![bf16::ONE; count]);
        let (q, pool) = (ones(80 * 4 * 128), ones(5 * 16 * 128));
        let (q, pool) = (q.expect("memory"), pool.expect("memory"));
        let kv = KvPool::new(&spec, KvLayout::Nhd, 16, 5, pool.address(), pool.address());
        assert_eq!(run(gpu, &plan, &q.tensor([80, 4, 128]), kv), Ok(()));
        assert!(q.read().expect("a copy").iter().all(|&x| x == bf16::ONE));
    }
}

/// Prompts of padded heads ran the variant's kernel, which reads no padded heads: other numbers, and NaN of unused pages.
#[test]
fn variants_by_kernels_of_ampere_have_no_padded_heads() {
    let _no_failure = no_failure();
    let emulated = Emulated::new(settings(1, 5)).expect("the emulator");
    let (gpu, device) = (emulated.gpu(), emulated.device());
    let run = |dim: u32| {
        let spec = Spec::new(8, 1, dim).with_hooks(&ALIBI);
        let mut table = PageTable::new(16, 5);
        table.push(&[0, 1, 2, 3, 4], 80);
        let batch = Batch::new(vec![0, 80], table);
        let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
        let plan = plan.expect("it can be planned for Hopper");
        let ones = |count: u32| DeviceBuffer::from_slice(gpu, &vec![bf16::ONE; count as usize]);
        let (q, pool) = (ones(80 * 8 * dim), ones(5 * 16 * dim));
        let (q, pool) = (q.expect("memory"), pool.expect("memory"));
        let kv = [KvPool::new(
            &spec,
            KvLayout::Nhd,
            16,
            5,
            pool.address(),
            pool.address(),
        )];
        let slopes = DeviceBuffer::from_slice(gpu, &[0.5_f32; 8]).expect("memory");
        let own = Slopes {
            address: slopes.address(),
        };
        let q = q.tensor([80, 8, dim as usize]);
        let tensors = RunTensors::new(&q, &kv, &q).with_own(&own);
        let options = WorkspaceOptions::default().with_arch(Arch::Sm80);
        let stream = gpu.stream()?;
        let mut workspace = gpu.workspace(&spec, &Bound::of(&plan), options)?;
        // SAFETY: the stream is ours, and all memory lives until it was waited for.
        unsafe {
            workspace.upload(&plan, *stream)?;
            gpu.run_with(&mut workspace, &tensors, *stream)?;
        }
        stream.synchronize()
    };
    assert_eq!(run(64), Ok(()));
    for dim in [48, 96] {
        let refused = run(dim);
        assert!(
            matches!(
                refused,
                Err(Error::NoInstance {
                    kernel: "prefill",
                    ..
                })
            ),
            "heads of {dim}: {refused:?}"
        );
    }
}

/// The run said that there must be no counters of arrivals, which a caller does not know of.
#[test]
fn launch_sets_merge_in_kernels_that_can() {
    let _no_failure = no_failure();
    let emulated = Emulated::new(settings(1, 5)).expect("the emulator");
    let (gpu, device) = (emulated.gpu(), emulated.device());
    let limits = BatchLimits::decodes(4, 200, 16);
    let workspace = |spec: &Spec| {
        let set = LaunchSet::decodes(&device, spec).expect("kernels");
        let set = set.with_merge_mode(MergeMode::Fused);
        let bound = Bound::new(spec, &device, &PlanOptions::default(), &limits).expect("kernels");
        gpu.workspace(spec, &bound, WorkspaceOptions::default().with_launches(set))
    };
    assert!(workspace(&Spec::new(8, 2, 128)).is_ok());
    for spec in [Spec::new(8, 2, 512), Spec::latent(16, 512, 64)] {
        let Err(Error::Plan(PlanError::Unsupported(said))) = workspace(&spec) else {
            panic!("a workspace whose runs fail");
        };
        assert!(
            matches!(said, Unsupported::Heads { .. } | Unsupported::Latent { .. }),
            "{said}"
        );
        let said = said.to_string();
        assert!(said.contains("use MergeMode::Auto"), "{said}");
    }
}
