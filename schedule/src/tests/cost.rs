//! Costs, simulations and advice.

use super::*;
use crate::{
    attention::{AttentionModel, Overlap, StepShape},
    chunk::{self, Expected},
    cost::Correction,
    policy::{Orca, SarathiServe},
    sim::{AttentionSource, Simulation, simulate, standing_at},
    trace::Trace,
};
use tandem_attn::{
    plan::{DeviceDescription, Planner},
    problem::{Batch, PageTable, Spec},
};

/// The closed form agrees with the planner within a quarter on the batches that matter.
#[test]
fn the_estimate_is_close_to_the_plan() {
    // One device whose SMs a short chunk does not fill, and one with wide tiles.
    for (name, heads, cache_type) in [
        ("a100", [16, 4], CacheType::Auto),
        ("h200", [32, 8], CacheType::Auto),
        ("h200", [32, 8], CacheType::E4m3),
        ("h200", [32, 8], CacheType::E4m3Scaled),
    ] {
        close_to_the_plan(name, heads, cache_type);
    }
}

fn close_to_the_plan(name: &str, [q_heads, kv_heads]: [u32; 2], cache_type: CacheType) {
    let spec = Spec::new(q_heads, kv_heads, 128);
    let device = DeviceDescription::named(name).unwrap();
    let model = AttentionModel::with_cache_type(&device, &spec, cache_type);
    let mut planner = Planner::new();
    for (decodes, context) in [(0, 0), (8, 16_000), (32, 4096), (128, 1024)] {
        for (chunk, keys) in [
            (0, 0),
            (512, 512),
            (512, 8192),
            (2048, 2048),
            (1024, 16_384),
        ] {
            let mut shape = StepShape::decodes(decodes, context);
            let mut table = PageTable::new(16, 1 << 20);
            let mut indptr = vec![0];
            let mut page = 0;
            let mut push = |tokens: u32, keys: u32| {
                let pages: Vec<u32> = (page..page + keys.div_ceil(16)).collect();
                page += pages.len() as u32;
                table.push(&pages, keys);
                indptr.push(indptr[indptr.len() - 1] + tokens);
            };
            (0..decodes).for_each(|_| push(1, context));
            if chunk > 0 {
                push(chunk, keys);
                shape = shape.with_chunk(chunk, keys);
            }
            if shape.tokens() == 0 {
                continue;
            }
            let batch = Batch::new(indptr, table);
            let planned = model.planned(&mut planner, &batch).unwrap();
            let estimate = model.estimate(&shape);
            for (half, estimate, planned) in [
                ("prefill", estimate.prefill_ns, planned.prefill_ns),
                ("decode", estimate.decode_ns, planned.decode_ns),
            ] {
                let off = (estimate - planned).abs();
                assert!(
                    off <= 0.25 * planned + 5_000.0,
                    "{name}, {cache_type}, {decodes}×{context} + {chunk} of {keys}, {half}: {estimate} beside {planned}"
                );
            }
        }
    }
}

/// A shared prefix that each request reads costs less than separate keys, because it comes from L2, and more than a
/// packed prefix.
#[test]
fn a_prefix_that_each_reads_comes_from_l2() {
    let model = ModelDescription::named("llama-3-8b").unwrap();
    let hardware = Hardware::named("h200").unwrap();
    let cost = CostModel::new(&model, &hardware, Parallel::default()).unwrap();
    let model = cost.attention();
    let batch = |shared: u32| {
        let (mut table, mut shape) = (PageTable::new(16, 1 << 16), StepShape::default());
        for request in 0..96 {
            let page = |i| {
                if i < shared {
                    i
                } else {
                    request * 400 + 400 + i
                }
            };
            table.push(&(0..393).map(page).collect::<Vec<_>>(), 6280);
            shape.push_decode(6280);
        }
        (Batch::new((0..=96).collect(), table), shape)
    };
    let (alone, shape) = batch(0);
    assert_eq!(
        model.estimate_unpacked(&shape, &alone),
        model.estimate(&shape)
    );
    let (shared, shape) = batch(375);
    let unpacked = model.estimate_unpacked(&shape, &shared).decode_ns;
    let packed = model.planned(&mut Planner::new(), &shared).unwrap();
    assert!(unpacked < 0.6 * model.estimate(&shape).decode_ns && unpacked > 3.0 * packed.decode_ns);
    assert_eq!(
        cost.unpacked_step(&shape, &shared).linear_ns,
        cost.step(&shape).linear_ns
    );
}

/// They would be missing in the report.
#[test]
fn requests_that_never_arrive_are_refused() {
    let cost = cost();
    // The last ones are infinite in nanoseconds.
    for at_s in [f64::INFINITY, f64::NAN, 1.1e10, 1e304, -1e304] {
        let mut trace = Trace::uniform(3, 100, 2);
        trace.arrivals[2].at_s = at_s;
        let simulation = Simulation::new(&cost, Limits::default(), SarathiServe);
        let error = simulate(&trace, simulation).unwrap_err().to_string();
        assert!(error.contains("arrivals[2] is at"), "{error}");
    }
}

#[test]
fn simulating_with_plans_gives_nearly_the_same() {
    let trace = Trace::uniform(12, 2000, 40).with_poisson_arrivals(4.0, 3);
    let cost = cost();
    let limits = Limits {
        step_tokens: 512,
        ..Limits::default()
    };
    let run = |attention| {
        let mut simulation = Simulation::new(&cost, limits, SarathiServe);
        simulation.attention = attention;
        simulate(&trace, simulation).unwrap()
    };
    let (estimate, planned) = (
        run(AttentionSource::Estimate),
        run(AttentionSource::Planner),
    );
    assert_eq!((estimate.finished, planned.finished), (12, 12));
    let ratio = estimate.latency.mean() / planned.latency.mean();
    assert!((ratio - 1.0).abs() < 0.05, "{ratio}");
}

#[test]
fn a_simulation_accounts_for_every_token() {
    let trace = Trace::uniform(50, 700, 30).with_poisson_arrivals(20.0, 1);
    let cost = cost();
    for name in policy::NAMES {
        let policy = policy::by_name(name, &options()).unwrap();
        let report = simulate(
            &trace,
            Simulation::with_policy(&cost, Limits::default(), policy),
        );
        let report = report.unwrap();
        assert_eq!(
            (report.finished, report.refused, report.stuck),
            (50, 0, 0),
            "{name}"
        );
        assert_eq!(report.computed_tokens, 50 * (700 + 29), "{name}");
        assert_eq!(report.tbt.samples().len(), 50 * 29, "{name}");
        assert!(report.busy <= 1.0 && report.ttft.quantile(0.5) <= report.latency.quantile(0.5));
    }
}

/// Two stages with one request each: spans of a stage are ordered and do not overlap, and the requests' bubbles equal
/// the gaps between spans.
#[test]
fn pipeline_stages_do_one_step_at_a_time() {
    let model = ModelDescription::named("llama-3-8b").unwrap();
    let hardware = Hardware::named("a100").unwrap();
    let parallel = Parallel {
        tensor: 1,
        pipeline: 4,
    };
    let cost = CostModel::new(&model, &hardware, parallel).unwrap();
    let limits = Limits {
        step_requests: 4,
        running: 16,
        ..Limits::default()
    };
    let trace = Trace::uniform(40, 900, 12);
    let mut simulation = Simulation::new(&cost, limits, Orca::new(1));
    simulation.timeline = 0..u64::MAX;
    let report = simulate(&trace, simulation).unwrap();
    assert_eq!(report.finished, 40);
    let mut busy = 0.0;
    for stage in 0..4 {
        let spans: Vec<_> = report
            .timeline
            .iter()
            .filter(|span| span.stage == stage)
            .collect();
        assert_eq!(spans.len() as u64, report.steps);
        assert!(
            spans
                .windows(2)
                .all(|pair| pair[0].end_s <= pair[1].begin_s)
        );
        busy += spans
            .iter()
            .map(|span| span.end_s - span.begin_s)
            .sum::<f64>();
    }
    assert!((busy / 4.0 / report.makespan_s - report.busy).abs() < 1e-9);
    assert!(report.bubble.quantile(0.5) > 0.0);
}

#[test]
fn composing_ahead_computes_the_same_and_lets_arrivals_wait_a_step() {
    let cost = cost();
    let trace = Trace::uniform(40, 900, 20).with_poisson_arrivals(8.0, 3);
    let limits = Limits {
        step_tokens: 256,
        ..Limits::default()
    };
    let [waiting, ahead] = [false, true].map(|ahead| {
        let mut simulation = Simulation::new(&cost, limits, SarathiServe);
        simulation.ahead = ahead;
        simulate(&trace, simulation).unwrap()
    });
    assert_eq!(waiting.finished, ahead.finished);
    assert_eq!(waiting.generated_tokens, ahead.generated_tokens);
    assert_eq!(waiting.computed_tokens, ahead.computed_tokens);
    assert!(waiting.ttft.mean() < ahead.ttft.mean());
    assert!(ahead.ttft.mean() < waiting.ttft.mean() + 3.0 * waiting.tbt.mean());
}

#[test]
fn a_window_of_a_trace_is_as_the_whole_has_it() {
    let cost = cost();
    let trace = Trace::uniform(400, 900, 60).with_poisson_arrivals(8.0, 3);
    let limits = Limits {
        step_tokens: 256,
        ..Limits::default()
    };
    let simulation = || Simulation::new(&cost, limits, SarathiServe);
    let whole = simulate(&trace, simulation()).unwrap();
    let from = standing_at(&trace, simulation(), 20.0).unwrap();
    let going_on = from.arrivals.iter().filter(|a| a.request.computed > 0);
    assert!(going_on.count() > 2);
    assert!(from.arrivals.is_sorted_by_key(|a| a.at_s));
    let mut windowed = simulation();
    windowed.until_s = Some(10.0);
    let window = simulate(&from, windowed).unwrap();
    assert_eq!(window.makespan_s, 10.0);
    let per_s =
        |report: &crate::metrics::Report| report.generated_tokens as f64 / report.makespan_s;
    assert!((per_s(&window) / per_s(&whole) - 1.0).abs() < 0.15);
    assert!((window.tbt.mean() / whole.tbt.mean() - 1.0).abs() < 0.25);
    assert!(window.ttft.mean() < 2.0 * whole.ttft.mean());
}

/// Requests that wait when a window begins have come before it: their times are not from its begin.
#[test]
fn requests_that_wait_when_a_window_begins_have_not_arrived_in_it() {
    let cost = cost();
    // Three times as many as the machine serves.
    let trace = Trace::uniform(400, 900, 60).with_poisson_arrivals(40.0, 3);
    let limits = Limits {
        step_tokens: 256,
        ..Limits::default()
    };
    let simulation = || Simulation::new(&cost, limits, SarathiServe);
    let from = standing_at(&trace, simulation(), 5.0).unwrap();
    let of_before = || from.arrivals.iter().filter(|a| a.at_s < 0.0);
    assert!(of_before().filter(|a| a.request.computed == 0).count() > 20);
    assert!(of_before().all(|a| a.at_s >= -5.0));
    assert!(from.arrivals.is_sorted_by_key(|a| a.at_s));
    // The last requests have arrived by then.
    let arrived = from.arrivals.len() - of_before().count();
    let whole = simulate(&from, simulation()).unwrap();
    assert_eq!(whole.finished, from.arrivals.len());
    assert_eq!(whole.ttft.samples().len(), arrived);
    assert_eq!(whole.latency.samples().len(), arrived);
}

#[test]
fn measurements_correct_the_model() {
    let plain = cost();
    let (at_128, at_512) = (plain.linear_ns(128), plain.linear_ns(512));
    let json = format!(
        "{{\"linear\": [{{\"at\": 128, \"measured_ns\": {}}}, {{\"at\": 512, \"measured_ns\": {}}}]}}",
        at_128 * 1.2,
        at_512 * 1.4
    );
    let correction = Correction::from_json(&json).unwrap();
    let corrected = cost().with_correction(&correction);
    let ratio = |tokens| corrected.linear_ns(tokens) / plain.linear_ns(tokens);
    for (tokens, expected) in [(64, 1.2), (128, 1.2), (320, 1.3), (512, 1.4), (4096, 1.4)] {
        assert!(
            (ratio(tokens) - expected).abs() < 1e-9,
            "{tokens}: {}",
            ratio(tokens)
        );
    }
    let json = "{\"decode\": [{\"at\": 1000, \"measured_ns\": 2000}], \"pod_loss\": 0.5, \
                \"rest\": [{\"at\": 8, \"measured_ns\": 5000000}]}";
    let slower = cost().with_correction(&Correction::from_json(json).unwrap());
    let shape = StepShape::decodes(8, 4096);
    let (before, after) = (plain.step(&shape), slower.step(&shape));
    assert!((after.attention_ns / before.attention_ns - 2.0).abs() < 1e-9);
    assert!((after.elementwise_ns + after.head_ns - 5e6).abs() < 1.0);
    // Chunks have their own correction, and the measured loss applies.
    let chunk = StepShape::default().with_chunk(512, 4096);
    assert_eq!(
        plain.step(&chunk).attention_ns,
        slower.step(&chunk).attention_ns
    );
    let hybrid = slower
        .with_overlap(Overlap::POD)
        .step(&shape.with_chunk(512, 4096));
    let (decode_ns, prefill_ns) = (after.attention_ns, plain.step(&chunk).attention_ns);
    let joined = decode_ns.max(prefill_ns) + 0.5 * decode_ns.min(prefill_ns);
    assert!((hybrid.attention_ns / joined - 1.0).abs() < 1e-9);
    assert!(Correction::from_json("{\"linear\": [{\"at\": 0, \"measured_ns\": 1}]}").is_err());
    assert!(Correction::from_json("{\"pod_loss\": 2}").is_err());
}

#[test]
fn hybrid_steps_have_a_correction_of_their_own() {
    let json = "{\"hybrid\": [1.25, 1.5]}";
    let correction = Correction::from_json(json).unwrap();
    let (plain, corrected) = (cost(), cost().with_correction(&correction));
    let [decodes, chunk] = [
        StepShape::decodes(8, 4096),
        StepShape::default().with_chunk(512, 4096),
    ];
    for shape in [&decodes, &chunk] {
        assert_eq!(corrected.step(shape), plain.step(shape));
    }
    let hybrid = decodes.with_chunk(512, 4096);
    for (overlap, ratio) in [(Overlap::Serial, 1.25), (Overlap::POD, 1.5)] {
        let time = |cost: &CostModel| {
            let cost = cost.clone().with_overlap(overlap);
            cost.step(&hybrid).last_stage_ns()
        };
        assert!((time(&corrected) / time(&plain) - ratio).abs() < 1e-9);
    }
    for wrong in ["[0.4, 1]", "[1, 2.5]", "[1]"] {
        assert!(Correction::from_json(&format!("{{\"hybrid\": {wrong}}}")).is_err());
    }
}

#[test]
fn caches_of_8_bits_hold_more_tokens_and_are_read_faster() {
    let model = ModelDescription::named("llama-3-8b").unwrap();
    let on = |hardware: &str, cache_type| {
        let hardware = Hardware::named(hardware).unwrap();
        let cost = CostModel::new(&model, &hardware, Parallel::default()).unwrap();
        cost.with_cache_type(cache_type)
    };
    let [auto, e4m3, scaled] = CacheType::ALL.map(|cache_type| on("h200", cache_type).unwrap());
    assert_eq!(
        [&auto, &e4m3, &scaled].map(CostModel::kv_bytes_per_token),
        [131_072, 65_536, 67_584]
    );
    assert!(e4m3.pages(16).abs_diff(2 * auto.pages(16)) <= 1);
    assert!(scaled.pages(16) < e4m3.pages(16) && scaled.pages(16) > 19 * auto.pages(16) / 10);
    let shape = StepShape::decodes(64, 4096);
    let attention = |cost: &CostModel| cost.step(&shape).attention_ns;
    let (auto, e4m3, scaled) = (attention(&auto), attention(&e4m3), attention(&scaled));
    // Measured: 0.54 of 16 bits, and 1.04 of that with scales of each token (`docs/notes/fp8.md`).
    assert!((0.48..0.6).contains(&(e4m3 / auto)), "{}", e4m3 / auto);
    assert!((1.01..1.06).contains(&(scaled / e4m3)), "{}", scaled / e4m3);
    // Kernels with Ampere's instructions have them, too.
    assert!(on("a100", CacheType::E4m3Scaled).is_ok());
    // No kernel holds so many heads for each KV head, in 8 bits and of a size without kernels of its own.
    let wide = ModelDescription {
        q_heads: 256,
        kv_heads: 1,
        head_dim: 80,
        ..model.clone()
    };
    let cost = CostModel::new(
        &wide,
        &Hardware::named("h200").unwrap(),
        Parallel::default(),
    );
    let cost = cost.unwrap();
    let error = cost.clone().with_cache_type(CacheType::E4m3).unwrap_err();
    assert!(
        matches!(
            error,
            ScheduleError::CacheType {
                cache_type: CacheType::E4m3,
                ..
            }
        ),
        "{error}"
    );
    let text = error.to_string();
    assert!(text.contains("h200") && text.contains("auto"), "{text}");
    assert!(cost.with_cache_type(CacheType::Auto).is_ok());
}

/// The engine refuses these, so their simulation would be of what cannot be served.
#[test]
fn caches_of_8_bits_are_simulated_where_the_engine_has_them() {
    let model = ModelDescription::named("llama-3-8b").unwrap();
    for (hardware, q_heads, kv_heads, head_dim, reason) in [
        ("h200", 32, 8, 80, "heads of 80 in 8 bits"),
        ("h200", 71, 1, 64, "71 query heads"),
        ("a100", 32, 1, 128, "32 query heads"),
        ("h200", 64, 1, 128, ""),
        ("a100", 32, 8, 80, ""),
    ] {
        let model = ModelDescription {
            q_heads,
            kv_heads,
            head_dim,
            ..model.clone()
        };
        let named = Hardware::named(hardware).unwrap();
        let cost = CostModel::new(&model, &named, Parallel::default()).unwrap();
        for cache_type in [CacheType::E4m3, CacheType::E4m3Scaled] {
            match cost.clone().with_cache_type(cache_type) {
                Ok(_) => assert_eq!(reason, "", "{q_heads}/{kv_heads} d{head_dim}"),
                Err(error) => {
                    let text = error.to_string();
                    assert!(!reason.is_empty() && text.contains(reason), "{text}");
                    assert!(text.contains(hardware) && text.contains("auto"), "{text}");
                }
            }
        }
    }
}

/// The seven batches of `docs/notes/fp8.md`: µs of the prefill and of the decode alone, and of both on separate SMs.
#[test]
fn the_loss_with_caches_of_8_bits_is_the_measured_one() {
    let measured = [
        [260.0, 473.0, 666.0],
        [194.0, 424.0, 623.0],
        [180.0, 205.0, 350.0],
        [628.0, 218.0, 826.0],
        [795.0, 209.0, 988.0],
        [95.0, 212.0, 278.0],
        [522.0, 257.0, 719.0_f64],
    ];
    let losses = measured.map(|[prefill, decode, both]| {
        let (shorter, longer) = (prefill.min(decode), prefill.max(decode));
        (both - longer) / shorter
    });
    let mean = losses.iter().sum::<f64>() / losses.len() as f64;
    for of in [CacheType::E4m3, CacheType::E4m3Scaled] {
        let Overlap::Pod { loss } = Overlap::pod(of) else {
            panic!("{of} has no loss");
        };
        assert!((loss - mean).abs() < 0.005, "{of}: {loss}, measured {mean}");
    }
    assert_eq!(Overlap::pod(CacheType::Auto), Overlap::POD);
}

/// They made a panic, or times that are no numbers.
#[test]
fn a_correction_has_numbers_of_tokens_and_times_that_can_be() {
    for list in ["linear", "prefill", "decode", "rest"] {
        for (at, measured_ns) in [
            ("0.4", "1000"),
            ("1e300", "1000"),
            ("8", "1e300"),
            ("8", "0.1"),
            ("-8", "1000"),
        ] {
            let json =
                format!("{{\"{list}\": [{{\"at\": {at}, \"measured_ns\": {measured_ns}}}]}}");
            let error = Correction::from_json(&json).unwrap_err().to_string();
            assert!(error.contains(&format!("`{list}`")), "{error}");
        }
        let point = |at| format!("{{\"at\": {at}, \"measured_ns\": 1000}}");
        let twice = format!("{{\"{list}\": [{}, {}]}}", point(8), point(8));
        let error = Correction::from_json(&twice).unwrap_err().to_string();
        assert!(error.contains("ascend"), "{error}");
        // The largest numbers still give times.
        let far = format!("{{\"{list}\": [{}]}}", point(1 << 24));
        let far = cost().with_correction(&Correction::from_json(&far).unwrap());
        let shape = StepShape::decodes(8, 4096).with_chunk(512, 4096);
        assert!(far.step(&shape).last_stage_ns().is_finite(), "{list}");
    }
    for list in ["linear", "rest"] {
        let json = format!("{{\"{list}\": [{{\"at\": 4294967295, \"measured_ns\": 1000}}]}}");
        assert!(Correction::from_json(&json).is_err(), "{list}");
    }
}

#[test]
fn a_correction_is_for_the_caches_with_which_it_was_measured() {
    let model = ModelDescription::named("llama-3-8b").unwrap();
    let hardware = Hardware::named("h200").unwrap();
    let cost = CostModel::new(&model, &hardware, Parallel::default()).unwrap();
    let costs = CacheType::ALL.map(|of| cost.clone().with_cache_type(of).unwrap());
    for measured in CacheType::ALL {
        let correction = Correction {
            cache_type: measured,
            ..Correction::default()
        };
        let json = serde_json::to_string(&correction).unwrap();
        assert_eq!(
            json.contains("cache_type"),
            measured.is_8_bit(),
            "older files lack the field"
        );
        assert_eq!(Correction::from_json(&json).unwrap(), correction);
        for cost in &costs {
            let checked = correction.check(cost);
            assert_eq!(checked.is_ok(), cost.cache_type() == measured);
            if let Err(error) = checked {
                assert!(error.to_string().contains(measured.name()), "{error}");
            }
        }
    }
    assert!(Correction::from_json("{\"cache_type\": \"e3m4\"}").is_err());
}

/// It was applied to any, and gave wrong times without a word.
#[test]
fn a_correction_is_for_the_model_and_the_machine_with_which_it_was_measured() {
    let new = |model: &ModelDescription, hardware: &str, tensor, pipeline| {
        let parallel = Parallel { tensor, pipeline };
        CostModel::new(model, &Hardware::named(hardware).unwrap(), parallel).unwrap()
    };
    let model = ModelDescription::named("llama-3-8b").unwrap();
    let cost = new(&model, "h200", 1, 1);
    let correction = Correction {
        origin: Some(cost.origin()),
        ..Correction::default()
    };
    let json = serde_json::to_string(&correction).unwrap();
    let correction = Correction::from_json(&json).unwrap();
    let mut renamed = model.clone();
    renamed.name = "mine".to_owned();
    assert_eq!(correction.check(&cost), Ok(()));
    assert_eq!(correction.check(&new(&renamed, "h200", 1, 1)), Ok(()));
    let mut shallow = model.clone();
    shallow.layers = 16;
    let yi = ModelDescription::named("yi-6b").unwrap();
    for (other, said) in [
        (
            new(&yi, "h200", 1, 1),
            "model llama-3-8b, and this is for model yi-6b",
        ),
        (
            new(&shallow, "h200", 1, 1),
            "model llama-3-8b of another shape",
        ),
        (
            new(&model, "h100", 1, 1),
            "device h200, and this is for device h100",
        ),
        (
            new(&model, "h200", 2, 1),
            "tensor 1, and this is for tensor 2",
        ),
        (
            new(&model, "h200", 1, 4),
            "pipeline 1, and this is for pipeline 4",
        ),
    ] {
        let error = correction.check(&other).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
        // Older files do not say what they were measured with.
        assert_eq!(Correction::default().check(&other), Ok(()));
    }
}

#[test]
fn costs_know_when_a_model_does_not_fit() {
    let model = ModelDescription::named("llama-3-70b").unwrap();
    let hardware = Hardware::named("a100").unwrap();
    let new = |tensor, pipeline| CostModel::new(&model, &hardware, Parallel { tensor, pipeline });
    assert!(new(1, 1).unwrap_err().to_string().contains("141.1 GB"));
    assert!(
        new(3, 1)
            .unwrap_err()
            .to_string()
            .contains("64 query heads")
    );
    assert!(new(4, 100).unwrap_err().to_string().contains("80 layers"));
    let (tp4, tp8) = (new(4, 1).unwrap(), new(8, 1).unwrap());
    assert!(tp8.pages(16) > tp4.pages(16));
    let shape = StepShape::decodes(16, 1000).with_chunk(496, 496);
    let (tp4, tp8) = (tp4.step(&shape), tp8.step(&shape));
    assert!(tp8.linear_ns < tp4.linear_ns && tp8.communication_ns > tp4.communication_ns);
    let (whole, staged) = (
        new(4, 1).unwrap().step(&shape),
        new(4, 4).unwrap().step(&shape),
    );
    assert!((whole.linear_ns / staged.linear_ns - 4.0).abs() < 1e-9 && staged.send_ns > 0.0);
}

/// A stage has whole layers. The largest stage determines the pace and the memory.
#[test]
fn layers_that_do_not_divide_make_one_stage_longer() {
    let model = ModelDescription::named("llama-3-8b").unwrap();
    let hardware = Hardware::named("h200").unwrap();
    let new = |layers, pipeline| {
        let model = ModelDescription {
            layers,
            ..model.clone()
        };
        let parallel = Parallel {
            tensor: 1,
            pipeline,
        };
        CostModel::new(&model, &hardware, parallel).unwrap()
    };
    let shape = StepShape::decodes(16, 1000).with_chunk(496, 496);
    // Stages of 7, 7, 6, 6 and 6 layers.
    let (uneven, even) = (new(32, 5), new(35, 5));
    assert_eq!(uneven.step(&shape), even.step(&shape));
    assert_eq!(uneven.pages(16), even.pages(16));
    assert_eq!(uneven.swap_ns(8, 16), even.swap_ns(8, 16));
    assert_ne!(uneven.step(&shape), new(32, 4).step(&shape));
}

/// A GPU whose query heads read two KV heads needs both.
#[test]
fn tensor_parallelism_divides_kv_heads_or_copies_them() {
    let model = ModelDescription {
        q_heads: 40,
        kv_heads: 8,
        ..ModelDescription::named("llama-3-8b").unwrap()
    };
    let hardware = Hardware::named("h200").unwrap();
    for tensor in 1..=40 {
        let parallel = Parallel {
            tensor,
            pipeline: 1,
        };
        let made = CostModel::new(&model, &hardware, parallel);
        assert_eq!(made.is_ok(), [1, 2, 4, 8, 40].contains(&tensor), "{tensor}");
        if let (Err(error), 0) = (made, 40 % tensor) {
            assert!(error.to_string().contains("8 KV heads"), "{error}");
        }
    }
}

#[test]
fn advice_follows_the_workload() {
    let expected = |prompt, generated, target_ns| Expected {
        prompt,
        generated,
        requests: 18,
        target_ns,
    };
    let cost = cost();
    let advice = chunk::recommend(&cost, &expected(4000, 40, None));
    assert!(advice.chunk.is_multiple_of(128) && advice.gain > 1.0 && advice.reasons.len() >= 5);
    let fewer_decodes = chunk::recommend(&cost, &expected(4000, 4, None));
    assert!(fewer_decodes.chunk >= advice.chunk);
    let target = 40e6;
    let quick = chunk::recommend(&cost, &expected(4000, 40, Some(target)));
    let chosen = quick
        .candidates
        .iter()
        .find(|c| c.chunk == quick.chunk)
        .unwrap();
    assert!(chosen.keeps_target && chosen.step_ns <= target);
    let impossible = chunk::recommend(&cost, &expected(4000, 40, Some(1.0)));
    assert!(
        impossible
            .reasons
            .iter()
            .any(|reason| reason.starts_with("No chunk size"))
    );
    assert_eq!(impossible.chunk, impossible.candidates[0].chunk);
}

/// A pipeline computes a step in each of its stages.
#[test]
fn advice_foresees_the_throughput_of_a_pipeline() {
    let model = ModelDescription::named("llama-3-8b").unwrap();
    let hardware = Hardware::named("a100").unwrap();
    for pipeline in [1, 2, 4] {
        let parallel = Parallel {
            tensor: 1,
            pipeline,
        };
        let cost = CostModel::new(&model, &hardware, parallel).unwrap();
        let expected = Expected {
            prompt: 2000,
            generated: 100,
            requests: 24,
            target_ns: None,
        };
        let advice = chunk::recommend(&cost, &expected);
        let chosen = advice.candidates.iter().find(|c| c.chunk == advice.chunk);
        let limits = Limits {
            step_tokens: advice.chunk,
            step_requests: 24,
            running: 24 * pipeline,
            ..Limits::default()
        };
        let policy = crate::policy::Sarathi::new(advice.chunk, cost.tile());
        let trace = Trace::uniform(400, 2000, 100);
        let report = simulate(&trace, Simulation::new(&cost, limits, policy)).unwrap();
        let ratio = chosen.unwrap().tokens_per_s / report.tokens_per_s();
        assert!((0.85..1.15).contains(&ratio), "{pipeline}: {ratio}");
        assert!(advice.gain > 1.0 && advice.gain < 2.0, "{}", advice.gain);
    }
}

#[test]
fn an_adaptive_chunk_follows_the_requests_that_finish() {
    let expected = Expected {
        prompt: 200,
        generated: 400,
        requests: 32,
        target_ns: None,
    };
    let cost = cost();
    let mut chunk = ChunkSize::adaptive(cost.clone(), expected);
    let first = chunk.tokens(&Workload::default());
    assert_eq!(first, chunk::recommend(&cost, &expected).chunk);
    let now = Workload {
        requests: 100,
        prompt_tokens: 800_000,
        generated_tokens: 1_000,
    };
    let then = chunk.tokens(&now);
    let long = Expected {
        prompt: 8000,
        generated: 10,
        ..expected
    };
    assert_eq!(then, chunk::recommend(&cost, &long).chunk);
    assert!(then > first, "{then} {first}");
}
