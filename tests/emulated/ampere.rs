//! Decodes with Ampere's instructions of 8-bit keys and values, which they convert by integer instructions.

use bytemuck::cast;
use half::{bf16, f16};
use tandem_attn::{
    exec::emulated::{Emulated, Settings},
    kv::KvView,
    plan::{DeviceDescription, Plan, PlanOptions, Planner, SplitMode},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    tensor::{Element, F8E4M3, F8E5M2},
};

use crate::{
    no_failure,
    numeric::{Tolerance, compare, to_f64},
    problems::{Asked, ScaleNumbers, Scales, Tensors, heads, prefixed, reference_of, sinks},
    settings,
};

/// An A100.
pub fn ampere(schedule: u8, seed: u64) -> Emulated {
    let settings = Settings {
        compute: 80,
        ..settings(schedule, seed)
    };
    Emulated::new(settings).expect("the emulator")
}

/// Outputs and LSEs of a run.
pub fn run<T: Element, K: Element>(
    emulated: &Emulated,
    plan: &Plan,
    q: &[T],
    view: KvView<'_, K>,
) -> (Vec<T>, Vec<f32>) {
    let spec = &plan.spec;
    let rows = (plan.total_q * spec.q_heads) as usize;
    let mut out = vec![T::from_f32(f32::NAN); rows * spec.head_dim_v as usize];
    let mut lse = vec![f32::NAN; rows];
    let sinks = sinks(spec);
    emulated
        .run_heads(plan, q, &[view], &mut out, Some(&mut lse), &heads(&sinks))
        .expect("the run is right");
    (out, lse)
}

/// Bytes that no table points to are a NaN: one of the two of e4m3, which are NaNs of e5m2, too.
fn poison<K: Element>(pool: &mut [K], seed: u64) {
    let nan: u8 = if seed.is_multiple_of(2) { 0x7F } else { 0xFF };
    // Those of 16 bits are NaN already.
    let of_8_bits = size_of::<K>() == 1;
    let unowned = pool.iter_mut().filter(|x| of_8_bits && x.to_f32().is_nan());
    unowned.for_each(|x| *x = cast(nan));
}

fn check<T: Element, K: Element>(asked: &Asked, split: SplitMode, seed: u64) {
    check_on::<T, K>(asked, split, seed, None);
}

/// As [`check`], planned for a description of the GPU. Returns the plan.
pub fn check_on<T: Element, K: Element>(
    asked: &Asked,
    split: SplitMode,
    seed: u64,
    device: Option<&DeviceDescription>,
) -> Plan {
    let _others = no_failure();
    let emulated = ampere((seed % 3) as u8, seed);
    let device = device.cloned().unwrap_or_else(|| emulated.device());
    let spec = asked.spec.with_dtype(T::DTYPE).with_kv_dtype(K::DTYPE);
    let asked = &Asked {
        spec,
        ..asked.clone()
    };
    let mut tensors = Tensors::<T, K>::random(&spec, &asked.batch, asked.layout, seed);
    let pool = &mut tensors.parts[0];
    poison(&mut pool.k, seed);
    poison(&mut pool.v, seed);
    let numbers = ScaleNumbers::of(asked);
    let view = tensors.parts[0].view().with_scales(numbers.view());
    let plan = Planner::new().plan(
        &spec,
        &asked.batch,
        &device,
        &PlanOptions::default().with_split(split),
    );
    let plan = plan.expect("the case can be planned");
    let (out, lse) = run(&emulated, &plan, &tensors.q, view);
    let again = run(&emulated, &plan, &tensors.q, view);
    let bits = |lse: &[f32]| lse.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert!(
        bytemuck::cast_slice::<T, u8>(&out) == bytemuck::cast_slice::<T, u8>(&again.0)
            && bits(&lse) == bits(&again.1),
        "two runs differ: {asked:?}"
    );
    let sinks = sinks(&spec);
    let right = reference_of(&spec, &asked.batch, &tensors.q, &[view], &heads(&sinks));
    let right = right.expect("the tensors fit");
    let mut tolerance = Tolerance::of(T::DTYPE);
    tolerance.absolute = match T::DTYPE {
        Dtype::BF16 => 1.0 / 256.0,
        _ => 1.0 / 2048.0,
    };
    let shape = [plan.total_q, spec.q_heads, spec.head_dim_v].map(|extent| extent as usize);
    let differs = compare("out", &shape, &to_f64(&out), &right.out, tolerance);
    assert_eq!(differs, Ok(()), "{asked:?}");
    let tolerance = Tolerance {
        absolute: 2e-4,
        relative: 1e-5,
    };
    let differs = compare("lse", &shape[..2], &to_f64(&lse), &right.lse, tolerance);
    assert_eq!(differs, Ok(()), "{asked:?}");
    plan
}

#[test]
fn decodes_of_8_bit_pages_are_the_reference() {
    let all = [
        Scales::One,
        Scales::Tensor,
        Scales::Head,
        Scales::Request,
        Scales::Token,
    ];
    let mut seed = 0;
    for dim in [64, 128, 256] {
        for (scales, cap, e5m2) in all.map(|scales| (scales, None, false)).into_iter().chain([
            (Scales::Head, Some(20.0), false),
            (Scales::Request, None, true),
        ]) {
            seed += 1;
            let mut spec = Spec::new([6, 4, 16][seed as usize % 3], 2, dim);
            if seed % 3 == 2 {
                spec = Spec::new(16, 1, dim);
            }
            spec.variant.soft_cap = cap;
            spec.variant.window_left = (seed % 5 == 4).then_some(40);
            spec.variant.sinks = seed % 4 == 1;
            let page = [16, 8, 3][seed as usize / 2 % 3];
            let asked = Asked {
                spec,
                batch: prefixed(&[(90, 0, 1), (45, 2, 2), (130, 0, 1)], page, false, seed),
                layout: [KvLayout::Nhd, KvLayout::Hnd][seed as usize % 2],
                strides: None,
                scales,
            };
            let split = match seed % 2 {
                0 => SplitMode::Makespan,
                _ => SplitMode::Fixed { tokens: 4 * page },
            };
            match (e5m2, seed % 3) {
                (false, 0) => check::<f16, F8E4M3>(&asked, split, seed),
                (false, _) => check::<bf16, F8E4M3>(&asked, split, seed),
                (true, 0) => check::<f16, F8E5M2>(&asked, split, seed),
                (true, _) => check::<bf16, F8E5M2>(&asked, split, seed),
            }
        }
    }
}

/// Heads between those of the kernels, which copy no byte behind the end of a row: it is a NaN of the next head, or of no
/// head. Prompts, too.
#[test]
fn padded_heads_are_the_reference() {
    let dims = [16, 32, 48, 80, 96, 112, 144, 160, 176, 192, 208, 224, 240];
    for (seed, dim) in (0..).zip(dims) {
        let mut spec = Spec::new(
            [4, 6, 3][seed as usize % 3],
            [2, 2, 1][seed as usize % 3],
            dim,
        );
        spec.variant.soft_cap = (seed % 4 == 3).then_some(20.0);
        spec.variant.sinks = seed % 3 == 1;
        let page = [16, 8, 3][seed as usize / 2 % 3];
        let asked = |scales| Asked {
            spec,
            batch: prefixed(&[(60, 0, 1), (45, 2, 2), (70, 0, 20)], page, false, seed),
            layout: [KvLayout::Nhd, KvLayout::Hnd][seed as usize % 2],
            strides: None,
            scales,
        };
        let split = match seed % 2 {
            0 => SplitMode::Makespan,
            _ => SplitMode::Fixed { tokens: 4 * page },
        };
        match seed % 2 {
            0 => check::<f16, f16>(&asked(Scales::One), split, seed),
            _ => check::<bf16, bf16>(&asked(Scales::One), split, seed),
        }
        let scales = match spec.variant.soft_cap {
            Some(_) => Scales::Head,
            None => [Scales::Token, Scales::Request][seed as usize % 2],
        };
        check::<bf16, F8E4M3>(&asked(scales), split, seed);
    }
}

/// By kernels of one warp. Prompts, too.
#[test]
fn heads_of_256_on_ada_are_the_reference() {
    let mut device = DeviceDescription::named("rtx4090").expect("it is built in");
    device.sms = 8;
    for (seed, dim) in (0..).zip([256, 256, 144, 240]) {
        let mut spec = Spec::new([4, 6][seed as usize % 2], 2, dim);
        spec.variant.soft_cap = (seed % 2 == 1).then_some(20.0);
        spec.variant.sinks = seed == 2;
        let asked = Asked {
            spec,
            batch: prefixed(&[(60, 0, 1), (45, 2, 2), (170, 0, 20)], 8, false, seed),
            layout: KvLayout::Nhd,
            strides: None,
            scales: Scales::One,
        };
        let split = match seed % 2 {
            0 => SplitMode::Makespan,
            _ => SplitMode::Fixed { tokens: 32 },
        };
        match seed % 2 {
            0 => check_on::<f16, f16>(&asked, split, seed, Some(&device)),
            _ => check_on::<bf16, bf16>(&asked, split, seed, Some(&device)),
        };
    }
}

/// Each of the 256 numbers as a value that has all the weight, and as an element of a key that alone counts: the output and
/// the LSE are the number.
fn every_number<K: Element>(dim: u32) {
    let _others = no_failure();
    let emulated = ampere(0, 1);
    let mut spec = Spec::new(1, 1, dim).with_kv_dtype(K::DTYPE);
    spec.scale = 1.0;
    let mut table = PageTable::new(1, 256);
    (0..256).for_each(|code| table.push(&[code], 1));
    let batch = Batch::new((0..=256).collect(), table);
    let plan = Planner::new().plan(&spec, &batch, &emulated.device(), &PlanOptions::default());
    let plan = plan.expect("it can be planned");
    let width = dim as usize;
    // Neighbours of the number are others: each lane converts four at a time.
    let code = |at: usize| (at / width + at % width * 7) as u8;
    let v: Vec<K> = (0..256 * width).map(|at| cast(code(at))).collect();
    let mut k = vec![cast::<u8, K>(0); 256 * width];
    let mut q = vec![bf16::ZERO; 256 * width];
    for number in 0..256 {
        let at = number * width + number % width;
        k[at] = cast(number as u8);
        q[at] = bf16::ONE;
    }
    let view = KvView::new(&spec, KvLayout::Nhd, 1, &k, &v);
    let (out, lse) = run(&emulated, &plan, &q, view);
    let same = |got: f32, number: f32| got == number || got.is_nan() && number.is_nan();
    for (number, got) in lse.iter().enumerate() {
        let right = cast::<u8, K>(number as u8).to_f32();
        // ln 2 · log2 e is 1 but for a rounding.
        let near = same(*got, right) || (got - right).abs() <= 2e-7 * right.abs();
        // A row that is NaN, or infinitely large, has no other number to show.
        assert!(
            near || !right.is_finite() && !got.is_finite(),
            "{number}: {got}, not {right}"
        );
    }
    for (at, got) in out.iter().enumerate() {
        // Where the key is NaN or infinite, all outputs are NaN.
        if lse[at / width].is_finite() {
            let right = cast::<u8, K>(code(at)).to_f32();
            assert!(
                same(got.to_f32(), right),
                "{:#x}: {got}, not {right}",
                code(at)
            );
        }
    }
}

#[test]
fn every_number_of_8_bits_is_converted_exactly() {
    for dim in [64, 128, 256] {
        every_number::<F8E4M3>(dim);
        every_number::<F8E5M2>(dim);
    }
}

/// Keys that a mask hides are NaN, in lines that others share: they change no bit. Keys of other requests, too.
#[test]
fn hidden_keys_that_are_nan_change_nothing() {
    let _others = no_failure();
    let emulated = ampere(2, 3);
    for dim in [64, 128, 256] {
        let spec = Spec::new(4, 1, dim)
            .with_kv_dtype(Dtype::F8E4M3)
            .with_window_left(20);
        let batch = prefixed(&[(70, 0, 1), (41, 0, 1)], 16, false, 4);
        let mut tensors = Tensors::<bf16, F8E4M3>::random(&spec, &batch, KvLayout::Nhd, 9);
        let plan = Planner::new().plan(&spec, &batch, &emulated.device(), &PlanOptions::default());
        let plan = plan.expect("it can be planned");
        poison(&mut tensors.parts[0].k, 0);
        poison(&mut tensors.parts[0].v, 1);
        let right = run(&emulated, &plan, &tensors.q, tensors.parts[0].view());
        // Every key before the windows.
        let table = &batch.parts[0].table;
        for request in 0..2 {
            let hidden = table.kv_len(request) - 21;
            for key in 0..hidden {
                let page = table.pages(request)[(key / 16) as usize];
                let at = ((page * 16 + key % 16) * dim) as usize;
                tensors.parts[0].k[at..at + dim as usize].fill(F8E4M3(0x7F));
            }
        }
        let got = run(&emulated, &plan, &tensors.q, tensors.parts[0].view());
        assert!(right.0.iter().all(|x| x.is_finite()));
        assert!(right == got, "{dim}");
    }
}

/// The last key of a draft is NaN, and only its last token sees it.
#[test]
fn a_key_that_is_nan_is_that_of_the_tokens_that_see_it() {
    let _others = no_failure();
    let emulated = ampere(1, 5);
    for dim in [64, 128, 256] {
        let spec = Spec::new(4, 1, dim).with_kv_dtype(Dtype::F8E4M3);
        let batch = prefixed(&[(70, 0, 3)], 16, false, 4);
        let mut tensors = Tensors::<bf16, F8E4M3>::random(&spec, &batch, KvLayout::Nhd, 9);
        let plan = Planner::new().plan(&spec, &batch, &emulated.device(), &PlanOptions::default());
        let plan = plan.expect("it can be planned");
        poison(&mut tensors.parts[0].v, 0);
        let right = run(&emulated, &plan, &tensors.q, tensors.parts[0].view());
        let table = &batch.parts[0].table;
        let key = table.kv_len(0) - 1;
        let at = ((table.pages(0)[(key / 16) as usize] * 16 + key % 16) * dim) as usize;
        tensors.parts[0].k[at + dim as usize - 3] = F8E4M3(0xFF);
        let got = run(&emulated, &plan, &tensors.q, tensors.parts[0].view());
        let seen = 2 * 4 * dim as usize;
        assert!(right.0[..seen] == got.0[..seen], "{dim}");
        assert!(right.0.iter().all(|x| x.is_finite()));
        assert!(got.0[seen..].iter().all(|x| x.is_nan()), "{dim}");
    }
}

/// No decode kernel has e5m2 with a soft cap: prefills run such decodes, whose keys a launch before them widens.
#[test]
fn decodes_of_e5m2_with_a_soft_cap_are_the_reference() {
    let mut spec = Spec::new(8, 2, 128);
    spec.variant.soft_cap = Some(20.0);
    let asked = Asked {
        spec,
        batch: prefixed(&[(70, 0, 1), (50, 2, 1)], 16, false, 5),
        layout: KvLayout::Nhd,
        strides: None,
        scales: Scales::Head,
    };
    check::<bf16, F8E5M2>(&asked, SplitMode::Makespan, 3);
}
