//! Every option of a specification, a batch and its pools changes the result as the reference says, or is refused.

use half::{bf16, f16};
use tandem_attn::{
    Error,
    exec::{
        emulated::Emulated,
        gpu::{Arch, DeviceBuffer, KvPool, LaunchSet, RunTensors, WorkspaceOptions},
    },
    plan::{Bound, Plan, PlanOptions, Planner},
    problem::{Dtype, KvLayout},
    tensor::{Element, F8E4M3, F8E5M2, ShapeError},
};

use crate::{
    no_failure,
    numeric::{Tolerance, compare, to_f64},
    problems::{
        Asked, ScaleNumbers, Scales, Tensors, fields, heads, own_bytes, reference_of, sinks, slopes,
    },
    settings,
};

/// Outputs and LSEs; nothing where planning or the run refuses it.
type Got = Option<(Vec<f64>, Vec<f64>)>;

fn result(emulated: &Emulated, name: &str, asked: &Asked) -> Got {
    let spec = &asked.spec;
    let (wide_q, wide_out) = (spec.q_dtype == Dtype::F32, spec.out_dtype == Dtype::F32);
    match spec.kv_dtype {
        Dtype::F8E4M3 => of::<bf16, F8E4M3, bf16>(emulated, name, asked),
        Dtype::F8E5M2 => of::<bf16, F8E5M2, bf16>(emulated, name, asked),
        Dtype::F16 => of::<f16, f16, f16>(emulated, name, asked),
        _ if wide_q => of::<f32, bf16, bf16>(emulated, name, asked),
        _ if wide_out => of::<bf16, bf16, f32>(emulated, name, asked),
        _ => of::<bf16, bf16, bf16>(emulated, name, asked),
    }
}

fn of<Q: Element, K: Element, O: Element>(emulated: &Emulated, name: &str, asked: &Asked) -> Got {
    let Asked {
        spec,
        batch,
        scales,
        ..
    } = asked;
    let device = emulated.device();
    let plan = Planner::new().plan(spec, batch, &device, &PlanOptions::default());
    let plan = plan.ok()?;
    let mut tensors = asked.tensors::<Q, K>(5);
    // Rounding loses nothing of these.
    let rounded = |q: &Q| Q::from_f32(bf16::from_f32(q.to_f32()).to_f32());
    if Q::DTYPE == Dtype::F32 {
        tensors.q = tensors.q.iter().map(rounded).collect();
    }
    let numbers = ScaleNumbers::of(asked);
    let mut views = tensors.views();
    if *scales != Scales::One {
        views[0] = views[0].with_scales(numbers.view());
    }
    let [tokens, q_heads, dim] =
        [plan.total_q, spec.q_heads, spec.head_dim_v].map(|extent| extent as usize);
    let mut out = vec![O::from_f32(f32::NAN); tokens * q_heads * dim];
    let mut lse = vec![f32::NAN; tokens * q_heads];
    let sinks = sinks(spec);
    let heads = heads(&sinks);
    let lse_out = Some(&mut lse[..]);
    let ran = match spec.variant.hooks {
        None => emulated.run_heads(&plan, &tensors.q, &views, &mut out, lse_out, &heads),
        Some(_) => {
            let options = WorkspaceOptions::default();
            on_gpu(emulated, &plan, &tensors, options).map(|got| (out, lse) = got)
        }
    };
    if let Err(error) = ran {
        let scaled = matches!(error, Error::Shape(ShapeError::Scaled { .. }));
        assert!(scaled, "{name}: {error}");
        return None;
    }
    let right = reference_of(spec, batch, &tensors.q, &views, &heads).expect("they fit");
    let mut tolerance = Tolerance::of(spec.out_dtype);
    tolerance.absolute = match K::DTYPE {
        Dtype::F16 => 1.0 / 2048.0,
        _ if *scales == Scales::One => 1.0 / 256.0,
        // Scales are up to 1, but values are not.
        _ => 1.0 / 128.0,
    };
    if spec.variant.adds_up {
        // Weights that are not normalised: several of them may be near 1.
        tolerance.absolute *= 4.0;
    }
    let mut of_lse = Tolerance {
        absolute: 2e-4,
        relative: 1e-5,
    };
    if spec.rotary.is_some() {
        // Queries and keys are rounded when they were turned.
        tolerance.absolute += 3.0 / 256.0;
        of_lse.absolute = 5.0 / 256.0;
    }
    let (got, states) = (to_f64(&out), to_f64(&lse));
    compare("out", &[tokens, q_heads, dim], &got, &right.out, tolerance)
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    compare("lse", &[tokens, q_heads], &states, &right.lse, of_lse)
        .unwrap_or_else(|error| panic!("{name}: {error}"));
    Some((got, states))
}

/// Outputs and LSEs of a run with the hooks' data, in a workspace with these options.
fn on_gpu<Q: Element, K: Element, O: Element>(
    emulated: &Emulated,
    plan: &Plan,
    tensors: &Tensors<Q, K>,
    options: WorkspaceOptions,
) -> Result<(Vec<O>, Vec<f32>), Error> {
    let (gpu, spec, pool) = (emulated.gpu(), &plan.spec, &tensors.parts[0]);
    let (page_size, pages) = (
        pool.k_strides.page_size,
        pool.k.len() as u32 / pool.k_strides.page,
    );
    let [k, v] = [&pool.k, &pool.v].map(|side| DeviceBuffer::from_slice(gpu, side));
    let (k, v, q) = (k?, v?, DeviceBuffer::from_slice(gpu, &tensors.q)?);
    let kv = [KvPool::new(
        spec,
        KvLayout::Nhd,
        page_size,
        pages,
        k.address(),
        v.address(),
    )
    .with_strides(pool.k_strides, pool.v_strides)];
    let rows = |dim: u32| [plan.total_q, spec.q_heads, dim].map(|extent| extent as usize);
    let of_out = rows(spec.head_dim_v);
    let out = vec![O::from_f32(f32::NAN); of_out.iter().product()];
    let lse = vec![f32::NAN; of_out[0] * of_out[1]];
    let out = DeviceBuffer::from_slice(gpu, &out)?;
    let lse = DeviceBuffer::from_slice(gpu, &lse)?;
    let (of_q, of_lse) = (
        q.tensor(rows(spec.head_dim_qk)),
        lse.tensor([of_out[0], of_out[1]]),
    );
    let of_out = out.tensor(of_out);
    let slopes = DeviceBuffer::from_slice(gpu, &slopes(spec))?;
    let own = own_bytes(spec, slopes.address());
    let mut given = RunTensors::new(&of_q, &kv, &of_out).with_lse(&of_lse);
    given.own = &own;
    let stream = gpu.stream()?;
    let mut workspace = gpu.workspace(spec, &Bound::of(plan), options)?;
    // SAFETY: the stream is ours, and all memory lives until it was waited for.
    unsafe {
        workspace.upload(plan, *stream)?;
        gpu.run_with(&mut workspace, &given, *stream)?;
    }
    stream.synchronize()?;
    Ok((out.read()?, lse.read()?))
}

/// The options of a workspace: other kernels, one set of launches for all plans, and checks, which change nothing.
#[test]
fn each_option_of_a_workspace_counts() {
    let _others = no_failure();
    let emulated = Emulated::new(settings(0, 3)).expect("the emulator");
    let plain = Asked::plain(Dtype::BF16);
    let all = Asked::all(Dtype::BF16).into_iter();
    let mut prompts = all.filter(|(name, _)| *name == "qo_indptr, a prompt alone");
    let (_, prompt) = prompts.next().expect("it is an option");
    let (spec, device) = (&plain.spec, emulated.device());
    assert_eq!(
        fields(&WorkspaceOptions::default()),
        ["arch", "launches", "checks"]
    );
    let run = |asked: &Asked, workspace: WorkspaceOptions| {
        let options = PlanOptions::default();
        let plan = Planner::new().plan(spec, &asked.batch, &device, &options);
        let tensors = asked.tensors::<bf16, bf16>(5);
        let plan = plan.expect("it can be planned");
        let (out, lse) = on_gpu::<_, _, bf16>(&emulated, &plan, &tensors, workspace)?;
        let right = tensors.reference(spec, &asked.batch);
        let mut tolerance = Tolerance::of(Dtype::BF16);
        tolerance.absolute = 1.0 / 256.0;
        compare("out", &[out.len()], &to_f64(&out), &right.out, tolerance).expect("it is right");
        Ok::<_, Error>((out, lse))
    };
    let default = WorkspaceOptions::default();
    let plainly = run(&plain, default.clone()).expect("it runs");
    let checked = run(&plain, default.clone().with_checks(true)).expect("it runs");
    assert!(checked == plainly, "checks change nothing");
    let of_ampere = run(&plain, default.clone().with_arch(Arch::Sm80)).expect("it runs");
    assert!(
        of_ampere != plainly,
        "kernels of Ampere add in another order"
    );
    let all = LaunchSet::all(&device, spec).expect("there are kernels");
    let decodes = LaunchSet::decodes(&device, spec).expect("there are kernels");
    for (asked, launches, fits) in [
        (&plain, &all, true),
        (&plain, &decodes, true),
        (&prompt, &all, true),
        (&prompt, &decodes, false),
    ] {
        let ran = run(asked, default.clone().with_launches(launches.clone()));
        assert_eq!(ran.err().is_none(), fits, "{launches:?}");
    }
}

#[test]
fn each_option_counts_or_is_refused() {
    let _others = no_failure();
    let emulated = Emulated::new(settings(0, 3)).expect("the emulator");
    let plain = Asked::plain(Dtype::BF16);
    let plainly = result(&emulated, "nothing", &plain).expect("nothing is special");
    for (name, asked) in Asked::all(Dtype::BF16) {
        let changed = result(&emulated, name, &asked);
        if name == "q_dtype" {
            continue;
        }
        // Elements that lie elsewhere are the same elements.
        let same = changed.as_ref() == Some(&plainly);
        assert_eq!(same, name.starts_with("layout"), "{name}");
        let kinds = [
            "ancestors ",
            "masks ",
            "sink_tokens ",
            "head_dim",
            "compute",
            "hooks without",
            "adds_up ",
            "sinks without",
            "rotary, wider",
            "scales of numbers of 16 bits",
            "pool_pages ",
            "heads ",
            "indptr ",
            "q_indptr past",
            "qo_indptr of more queries",
        ];
        let refused = kinds.iter().any(|kind| name.starts_with(kind));
        assert_eq!(changed.is_none(), refused, "{name}");
    }
}
