//! Compares trends of the SARATHI and POD-Attention papers with the simulator.
//!
//! `cargo test -p tandem-schedule --test papers -- --nocapture` prints the tables of docs/notes/scheduling.md. If
//! `TANDEM_TRACES` names a folder with `pod_arxiv_sample.csv` and `mooncake_conversation.jsonl`, the tests simulate
//! those, too.

use std::{path::PathBuf, time::Instant};

use tandem_schedule::{
    Hardware, Limits, ModelDescription,
    attention::{Overlap, StepShape},
    chunk::{Expected, recommend},
    cost::{CostModel, Parallel},
    metrics::Report,
    policy::{Orca, Policy, PrefillFirst, Sarathi, SarathiServe},
    sim::{Simulation, simulate},
    trace::{Random, Trace, Zipf},
};

fn cost(model: &str, hardware: &str, tensor: u32, pipeline: u32) -> CostModel {
    let model = ModelDescription::named(model).unwrap();
    let hardware = Hardware::named(hardware).unwrap();
    CostModel::new(&model, &hardware, Parallel { tensor, pipeline }).unwrap()
}

fn step_ms(cost: &CostModel, shape: &StepShape) -> f64 {
    cost.step(shape).last_stage_ns() / 1e6
}

fn prompt(tokens: u32) -> StepShape {
    StepShape {
        sampled: 1,
        ..StepShape::default()
    }
    .with_chunk(tokens, tokens)
}

/// SARATHI, Table 2: LLaMA-13B on an A6000, milliseconds.
#[test]
fn piggybacked_decodes_cost_a_tenth() {
    let cost = cost("llama-13b", "a6000", 1, 1);
    let prefill_only = step_ms(&cost, &prompt(1024));
    let decode_only = step_ms(&cost, &StepShape::decodes(4, 1024));
    let hybrid = StepShape {
        sampled: 4,
        ..StepShape::decodes(3, 1024)
    };
    let together = step_ms(&cost, &hybrid.with_chunk(1021, 1021));
    let (alone, riding) = (decode_only / 4.0, (together - prefill_only) / 3.0);
    println!("Table 2              paper    here");
    println!("prefill only        234.8   {prefill_only:6.1}");
    println!("decode only          49.96  {decode_only:6.2}");
    println!("decode-maximal      238.4   {together:6.1}");
    println!("decode, per token    12.49  {alone:6.2}");
    println!("riding, per token     1.2   {riding:6.2}");
    println!("ratio                10.4   {:6.1}", alone / riding);
    assert!((8.0..13.0).contains(&(alone / riding)));
    assert!((prefill_only / 234.8 - 1.0).abs() < 0.1 && (decode_only / 49.96 - 1.0).abs() < 0.1);
}

/// SARATHI, Figure 7: one token above a multiple of the tile costs as much as a whole tile.
#[test]
fn one_token_above_a_tile_costs_a_tile() {
    let cost = cost("llama-13b", "a6000", 1, 1);
    let [at_128, at_256, at_257] = [128, 256, 257].map(|tokens| step_ms(&cost, &prompt(tokens)));
    println!("Figure 7         paper    here");
    println!("128 tokens       55.0   {at_128:6.1}");
    println!("256 tokens       69.8   {at_256:6.1}");
    println!("257 tokens       92.33  {at_257:6.2}");
    println!(
        "256 → 257       +32 %   {:+5.0} %",
        100.0 * (at_257 / at_256 - 1.0)
    );
    assert!((1.22..1.40).contains(&(at_257 / at_256)));
    for (here, paper) in [(at_128, 55.0), (at_256, 69.8), (at_257, 92.33)] {
        assert!((here / paper - 1.0).abs() < 0.15, "{here} {paper}");
    }
}

fn limits(batch: u32) -> Limits {
    Limits {
        step_tokens: u32::MAX,
        step_requests: batch,
        running: batch,
        prefix_cache: false,
        ..Limits::default()
    }
}

/// Throughput of requests of `sequence` tokens at a P:D ratio, `batch` concurrently, as in SARATHI's single-GPU
/// evaluation.
fn throughput(
    cost: &CostModel,
    sequence: u32,
    batch: u32,
    ratio: f64,
    policy: impl Policy + 'static,
) -> f64 {
    let generated = (f64::from(sequence) / (1.0 + ratio)).round().max(1.0) as u32;
    let trace = Trace::uniform(batch as usize * 20, sequence - generated, generated);
    let mut simulation = Simulation::new(cost, limits(batch), policy);
    // The paper's batch sizes fit memory. The pool is not under test, so make it large.
    simulation.pages = Some(1 << 20);
    let report = simulate(&trace, simulation).unwrap();
    assert_eq!((report.finished, report.stuck), (batch as usize * 20, 0));
    report.tokens_per_s()
}

/// Gain of SARATHI over separate steps for prefills and decodes, with one batch of requests after the other.
fn gain(cost: &CostModel, sequence: u32, batch: u32, ratio: f64, chunk: u32) -> f64 {
    throughput(cost, sequence, batch, ratio, Sarathi::new(chunk, 128))
        / throughput(cost, sequence, batch, ratio, PrefillFirst)
}

/// SARATHI, Table 4: peak gains with chunks of 256.
#[test]
fn throughput_gains_are_those_of_the_paper() {
    let rows = [
        ("llama-13b", "a6000", 1024, 6, 50.0, 1.33),
        ("llama-13b", "a6000", 2048, 6, 50.0, 1.26),
        ("llama-13b", "a6000", 3072, 6, 50.0, 1.22),
        ("llama-33b", "a100", 1024, 10, 28.0, 1.25),
        ("llama-33b", "a100", 2048, 5, 63.0, 1.22),
        ("llama-33b", "a100", 3072, 3, 127.0, 1.14),
    ];
    println!("Table 4                                    paper   here");
    let mut off = Vec::new();
    for (model, hardware, sequence, batch, ratio, paper) in rows {
        let cost = cost(model, hardware, 1, 1);
        let here = gain(&cost, sequence, batch, ratio, 256);
        println!(
            "{model} {hardware:5} {sequence} batch {batch:2} P:D {ratio:5}  {paper:5.2}  {here:5.2}"
        );
        if (here - paper).abs() > 0.1 {
            off.push((model, sequence, here, paper));
        }
    }
    assert!(off.is_empty(), "{off:?}");
}

/// SARATHI, Table 4: the P:D ratios of the peak gains, where a step of 256 tokens has B − 1 decodes.
#[test]
fn prompts_and_decodes_run_out_together_at_the_ratios_of_the_paper() {
    let cost = cost("llama-13b", "a6000", 1, 1);
    for (requests, paper) in [(6, 50.0), (5, 63.0), (3, 127.0), (10, 28.0)] {
        let expected = Expected {
            prompt: 1000,
            generated: 20,
            requests,
            target_ns: None,
        };
        let candidates = recommend(&cost, &expected).candidates;
        let of_256 = candidates.iter().find(|candidate| candidate.chunk == 256);
        let here = of_256.expect("two tiles").best_ratio;
        assert!((here - paper).abs() < 0.7, "B {requests}: {here} {paper}");
    }
}

/// SARATHI, Figure 9: the gain peaks where chunks and decodes are used up together, P:D = C / (B − 1).
#[test]
fn the_best_ratio_is_chunk_over_decodes() {
    let cost = cost("llama-13b", "a6000", 1, 1);
    println!("best P:D       C/(B−1)   here  gain there");
    for (chunk, batch) in [(256, 18), (512, 18), (256, 6)] {
        let expected = f64::from(chunk) / f64::from(batch - 1);
        let ratios: Vec<f64> = (-8..=8).map(|i| expected * 1.12_f64.powi(i)).collect();
        let gains = ratios
            .iter()
            .map(|&ratio| gain(&cost, 1024, batch, ratio, chunk));
        let (best, peak) = ratios
            .iter()
            .zip(gains)
            .max_by(|a, b| a.1.total_cmp(&b.1))
            .unwrap();
        println!("C {chunk} B {batch:2}  {expected:9.1}  {best:6.1}  {peak:5.2}");
        assert!(
            (0.65..1.55).contains(&(best / expected)),
            "{best} {expected}"
        );
        assert!(peak > 1.1);
    }
}

/// SARATHI, §5.3: GPT-3 on 64 A100s.
#[test]
fn uniform_steps_keep_a_pipeline_full() {
    let pipeline = cost("gpt-3", "a100", 8, 8);
    let tensor = cost("gpt-3", "a100", 8, 1);
    println!(
        "largest batch at 4K tokens: {} a micro-batch, {} with tensor parallelism only (paper: 27, 11)",
        pipeline.max_requests(4096) / 8,
        tensor.max_requests(4096)
    );
    let requests = 10_000;
    let trace = Trace::zipf(requests, &Zipf::new(1024, 4096, 0.4).unwrap(), 10.0, 1);
    let staged = |policy: Box<dyn Policy>| {
        let limits = Limits {
            running: 27 * 8,
            ..limits(27)
        };
        let mut simulation = Simulation::with_policy(&pipeline, limits, policy);
        simulation.pages = Some(1 << 20);
        simulate(&trace, simulation).unwrap()
    };
    let orca = staged(Box::new(Orca::new(1)));
    let sarathi = staged(Box::new(Sarathi::new(256, 128)));
    // Eight replicas, each with an eighth of the requests.
    let mut share = trace.clone();
    let mut index = 0;
    share.arrivals.retain(|_| {
        index += 1;
        index % 8 == 0
    });
    let mut simulation = Simulation::new(&tensor, limits(11), Orca::new(1));
    simulation.pages = Some(1 << 20);
    let replica = simulate(&share, simulation).unwrap();
    let bubbles = orca.bubble.quantile(0.5) / sarathi.bubble.quantile(0.5);
    let over_orca = orca.makespan_s / sarathi.makespan_s;
    let over_tensor = replica.makespan_s / sarathi.makespan_s;
    println!("§5.3, {requests} requests            paper   here");
    println!("median bubble time, lower by   6.29  {bubbles:6.2}");
    println!("over Orca-style                1.91  {over_orca:6.2}");
    println!("over tensor parallel only      1.48  {over_tensor:6.2}");
    println!(
        "tensor parallel over Orca      1.28  {:6.2}",
        orca.makespan_s / replica.makespan_s
    );
    println!(
        "stages busy: Orca {:.2}, SARATHI {:.2}",
        orca.busy, sarathi.busy
    );
    assert!(bubbles >= 4.0 && over_orca >= 1.5 && over_tensor >= 1.3);
}

/// Lengths similar to POD's arXiv workload: 4K to 32K tokens, with means of 9.5K prompt and 470 generated tokens.
fn like_arxiv(requests: usize) -> Trace {
    let mut random = Random::new(11);
    let mut csv = String::from("num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n");
    for _ in 0..requests {
        let total = (4096.0 + 5000.0 * random.exponential()).min(32_768.0);
        let decodes = (40.0 + 430.0 * random.exponential()).min(total / 4.0);
        csv += &format!(
            "{:.1},{decodes:.1},{total:.1},0\n",
            (total - decodes).floor()
        );
    }
    Trace::parse(&csv, "synthetic").unwrap()
}

/// Results of vLLM's original scheduler, of Sarathi-Serve with chunks of 1024, and of the latter with POD.
fn three_systems(trace: &Trace) -> [Report; 3] {
    let serial = cost("llama-3-8b", "a100", 2, 1);
    let pod = serial.clone().with_overlap(Overlap::POD);
    let limits = |step_tokens| Limits {
        step_tokens,
        prefix_cache: false,
        ..Limits::default()
    };
    [
        simulate(
            trace,
            Simulation::new(&serial, limits(32_768), PrefillFirst),
        )
        .unwrap(),
        simulate(trace, Simulation::new(&serial, limits(1024), SarathiServe)).unwrap(),
        simulate(trace, Simulation::new(&pod, limits(1024), SarathiServe)).unwrap(),
    ]
}

fn print_systems(reports: &[Report; 3], rate: f64) {
    println!(
        "{rate:.2} requests/s   TTFT p50    p99   TBT p50    p99   latency p50    p99   stalls 200 ms 500 ms"
    );
    for (name, report) in ["vLLM (original)", "Sarathi", "Sarathi+POD"]
        .iter()
        .zip(reports)
    {
        let [ttft, tbt, latency] =
            [&report.ttft, &report.tbt, &report.latency].map(|of| of.summary());
        println!(
            "{name:15} {:10.2} {:6.2} {:9.3} {:6.3} {:13.1} {:6.1} {:14.1} {:6.1}",
            ttft.p50,
            ttft.p99,
            tbt.p50,
            tbt.p99,
            latency.p50,
            latency.p99,
            100.0 * report.stalled[0],
            100.0 * report.stalled[1],
        );
    }
}

/// POD-Attention, Tables 5 and 6: checks which system is best in which metric.
fn check_systems([vllm, sarathi, pod]: &[Report; 3]) {
    for report in [vllm, sarathi, pod] {
        assert_eq!((report.refused, report.stuck), (0, 0));
    }
    let metrics = |report: &Report| {
        let [ttft, tbt, latency] =
            [&report.ttft, &report.tbt, &report.latency].map(|of| of.summary());
        [
            ttft.p50,
            ttft.p99,
            tbt.p50,
            tbt.p99,
            latency.p50,
            latency.p99,
        ]
    };
    assert!(vllm.ttft.quantile(0.5) < pod.ttft.quantile(0.5));
    assert!(vllm.stalled[0] > 0.95, "{:?}", vllm.stalled);
    assert!(sarathi.stalled[0] < 0.1 && pod.stalled[0] <= sarathi.stalled[0]);
    for (pod, sarathi) in metrics(pod).iter().zip(metrics(sarathi)) {
        assert!(*pod < sarathi, "{pod} {sarathi}");
    }
}

/// Requests per second of Sarathi-Serve if all requests arrive at 0. The paper's rates are near the capacity of its
/// systems, and the simulated machine has a different capacity.
fn capacity(trace: &Trace) -> f64 {
    let cost = cost("llama-3-8b", "a100", 2, 1);
    let limits = Limits {
        step_tokens: 1024,
        prefix_cache: false,
        ..Limits::default()
    };
    let report = simulate(trace, Simulation::new(&cost, limits, SarathiServe)).unwrap();
    report.requests_per_s()
}

/// Ranks the systems at 85 and 95 % of the capacity.
fn rank_near_capacity(lengths: &Trace) {
    let capacity = capacity(lengths);
    println!("capacity {capacity:.2} requests/s");
    for part in [0.85, 0.95] {
        let rate = part * capacity;
        let reports = three_systems(&lengths.clone().with_poisson_arrivals(rate, 5));
        print_systems(&reports, rate);
        check_systems(&reports);
    }
}

#[test]
fn pod_improves_sarathi_on_every_metric() {
    rank_near_capacity(&like_arxiv(1000));
}

fn trace(name: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("TANDEM_TRACES");
    if folder.is_none() {
        eprintln!("skipped: TANDEM_TRACES names no folder with {name}");
    }
    folder.map(|folder| PathBuf::from(folder).join(name))
}

#[test]
fn the_arxiv_trace_ranks_the_systems_alike() {
    let Some(path) = trace("pod_arxiv_sample.csv") else {
        return;
    };
    let lengths = Trace::read(path).unwrap().first(2048);
    // The paper's rates, for the record: they do not load the simulated machine fully.
    for rate in [0.85, 0.95] {
        print_systems(
            &three_systems(&lengths.clone().with_poisson_arrivals(rate, 5)),
            rate,
        );
    }
    rank_near_capacity(&lengths);
}

#[test]
fn the_mooncake_trace_is_simulated_in_seconds() {
    let Some(path) = trace("mooncake_conversation.jsonl") else {
        return;
    };
    let trace = Trace::read(path).unwrap();
    let requests = trace.arrivals.len();
    let cost = cost("llama-3-8b", "h200", 1, 1);
    let begin = Instant::now();
    let limits = Limits {
        step_tokens: 2048,
        ..Limits::default()
    };
    let report = simulate(&trace, Simulation::new(&cost, limits, SarathiServe)).unwrap();
    let took = begin.elapsed();
    println!(
        "{requests} requests, {} steps, {:.0} s of serving in {:.2} s; {:.0} % of the prompt tokens cached",
        report.steps,
        report.makespan_s,
        took.as_secs_f64(),
        100.0 * report.cached_tokens as f64 / report.prompt_tokens as f64,
    );
    assert_eq!(
        (report.finished + report.refused, report.stuck),
        (requests, 0)
    );
}
