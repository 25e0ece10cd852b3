//! How long steps take on a GPU: decodes at a length, and prompts. Weights are random, and cost what real ones cost.
//!
//! `cargo run --release -p tandem-engine --features cuda --example steps -- FOLDER [REQUESTS] [KEYS]`, where `FOLDER` has
//! the `config.json` of a model.

use std::{env, error::Error, path::Path, time::Instant};

use tandem_attn::{Error as AttentionError, exec::gpu::Gpu, problem::Dtype};
use tandem_engine::{Architecture, Engine, Generation, GpuBackend, GpuOptions, Limits, Weights};

const STEPS: usize = 40;

/// Runs the example.
pub fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let folder = arguments.next().ok_or("name the folder of a config.json")?;
    let mut number = |usual: u32| arguments.next().map_or(Ok(usual), |text| text.parse());
    let (requests, keys) = (number(64)?, number(4096)?);
    let architecture = Architecture::read(Path::new(&folder))?;
    let gpu = match Gpu::new(0) {
        Ok(gpu) => gpu,
        Err(missing @ (AttentionError::NoDriver { .. } | AttentionError::NoDevice { .. })) => {
            println!("{missing}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let weights = 2.0 * architecture.weights() as f64;
    let per_token = architecture.kv_bytes_per_token(Dtype::BF16) as f64;
    let begin = Instant::now();
    let mut options = GpuOptions::default();
    options.step_tokens = 8192;
    options.step_requests = requests;
    options.cache_tokens = requests * (keys + 2 * STEPS as u32 + 32) + 8192;
    let backend = GpuBackend::load(
        gpu,
        architecture,
        &Weights::random(1),
        &options,
        &mut |_| (),
    )?;
    let limits = Limits {
        step_tokens: 8192,
        prefix_cache: false,
        ..Limits::default()
    };
    let mut engine = Engine::new(Box::new(backend), limits)?;
    println!(
        "{:.1} GB of weights loaded in {:.1} s",
        weights / 1e9,
        begin.elapsed().as_secs_f64()
    );

    // The same prompt length for all; tokens differ, so that nothing is shared.
    let generation = |request: u32| Generation {
        ignore_ends: true,
        ..Generation::greedy(
            (0..keys)
                .map(|token| (token * 31 + request * 977) % 30_000)
                .collect(),
            2 * STEPS as u32,
        )
    };
    for request in 0..requests {
        engine.submit(generation(request))?;
    }
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    while !engine.is_idle() {
        let begin = Instant::now();
        let step = engine.step(&mut |_| ())?;
        let time = begin.elapsed().as_secs_f64();
        match (step.decodes, step.tokens) {
            (decodes, _) if decodes == requests => decode.push(time),
            (0, 8192) => prefill.push(time),
            _ => {}
        }
    }
    let median = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
    };
    let all = decode.len();
    // The first ones load and capture.
    let mut decode = decode.split_off(all.min(3));
    let bytes = weights + f64::from(requests * (keys + STEPS as u32)) * per_token;
    let time = median(&mut decode);
    println!(
        "{requests} decodes at about {keys} keys: {:.3} ms, {:.1} GB of weights and caches at {:.0} GB/s, {:.0} tokens/s \
         (median of {} steps)",
        time * 1e3,
        bytes / 1e9,
        bytes / time / 1e9,
        f64::from(requests) / time,
        decode.len()
    );
    let time = median(&mut prefill);
    println!(
        "8192 tokens of prompts of {keys}: {:.1} ms, {:.0} TFLOP/s in matrices alone (median of {} steps)",
        time * 1e3,
        weights * 8192.0 / time / 1e12,
        prefill.len()
    );
    Ok(())
}
