//! Times decode steps at a given cache length and prompt steps on a GPU. Weights are random: they take as long as real
//! ones.
//!
//! `cargo run --release -p tandem-engine --features cuda --example steps -- FOLDER [REQUESTS] [KEYS] [CACHE]`, where
//! `FOLDER` has the `config.json` of a model, and `CACHE` is the type of the KV caches: auto, e4m3 or e4m3-scaled.

use std::{env, error::Error, path::Path, time::Instant};

use tandem_attn::{Error as AttentionError, exec::gpu::Gpu, problem::Dtype};
use tandem_engine::{
    Architecture, CacheType, Engine, Generation, GpuBackend, GpuOptions, Limits, Weights,
};

/// Tokens of a step, and of the prompts that are timed.
const CHUNK: u32 = 8192;
const STEPS: u32 = 40;

/// Runs the example.
pub fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args().skip(1);
    let folder = arguments.next().ok_or("name the folder of a config.json")?;
    let mut number = |usual: u32| arguments.next().map_or(Ok(usual), |text| text.parse());
    let (requests, keys) = (number(64)?, number(4096)?);
    let name = arguments.next().unwrap_or_else(|| "auto".to_owned());
    let mut known = CacheType::ALL.into_iter();
    let cache_type = known.find(|known| known.name() == name);
    let cache_type = cache_type.ok_or("the type of caches is auto, e4m3 or e4m3-scaled")?;
    let a = Architecture::read(Path::new(&folder))?;
    let gpu = match Gpu::new(0) {
        Ok(gpu) => gpu,
        Err(missing @ (AttentionError::NoDriver { .. } | AttentionError::NoDevice { .. })) => {
            println!("{missing}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let table = (a.vocabulary * a.hidden) as f64;
    let in_layers = a.weights() as f64 - table * if a.tied { 1.0 } else { 2.0 };
    let per_token = a.kv_bytes_per_token(cache_type, Dtype::BF16) as f64;
    let spec = a.spec();
    let pair = spec.flops_per_pair() as f64 * a.layers.len() as f64;

    let begin = Instant::now();
    let mut options = GpuOptions::default();
    options.step_tokens = CHUNK;
    options.step_requests = requests;
    options.cache_type = cache_type;
    options.cache_tokens = Some(requests * (keys + 2 * STEPS + 32) + CHUNK);
    let backend = GpuBackend::load(gpu, a, &Weights::random(1), &options, &mut |_| ())?;
    let limits = Limits {
        step_tokens: CHUNK,
        prefix_cache: false,
        ..Limits::default()
    };
    let mut engine = Engine::new(Box::new(backend), limits)?;
    println!("loaded in {:.1} s", begin.elapsed().as_secs_f64());
    let generation = |seed: u32, prompt: u32, answer: u32| Generation {
        ignore_ends: true,
        ..Generation::greedy(
            (0..prompt)
                .map(|token| (token * 31 + seed * 977) % 30_000)
                .collect(),
            answer,
        )
    };

    // The first prompt also pays for what libraries load lazily, so it is left out of the median.
    let mut prompts = Vec::new();
    for seed in 0..6 {
        engine.submit(generation(seed, CHUNK, 1))?;
        let begin = Instant::now();
        while !engine.is_idle() {
            engine.step(&mut |_| ())?;
        }
        prompts.push(begin.elapsed().as_secs_f64());
    }
    let time = median(&mut prompts.split_off(1));
    let chunk = f64::from(CHUNK);
    // Each query token sees half of the prompt on average.
    let flops = 2.0 * (in_layers * chunk + table) + pair * chunk * chunk / 2.0;
    println!(
        "a prompt of {CHUNK}: {:.1} ms, {:.0} TFLOP/s",
        time * 1e3,
        flops / time / 1e12
    );

    // Prompts differ, so that the prefix cache shares nothing.
    for request in 0..requests {
        engine.submit(generation(request, keys, 2 * STEPS))?;
    }
    let mut decodes = Vec::new();
    while !engine.is_idle() {
        let begin = Instant::now();
        let step = engine.step(&mut |_| ())?;
        if (step.decodes, step.tokens) == (requests, requests) {
            decodes.push(begin.elapsed().as_secs_f64());
        }
    }
    // The first three steps tune matrix products and capture graphs.
    let mut decodes = decodes.split_off(decodes.len().min(3));
    let time = median(&mut decodes);
    let bytes = 2.0 * (in_layers + table) + f64::from(requests * (keys + STEPS)) * per_token;
    println!(
        "{requests} decodes at about {keys} keys: {:.2} ms (fastest {:.2}), {:.1} GB of weights and caches at {:.0} GB/s, \
         {:.0} tokens/s",
        time * 1e3,
        decodes.first().unwrap_or(&f64::NAN) * 1e3,
        bytes / 1e9,
        bytes / time / 1e9,
        f64::from(requests) / time,
    );
    Ok(())
}

/// Sorts.
fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}
