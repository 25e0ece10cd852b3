//! Compares all families on a GPU with `transformers`: logits, texts from graphs, requests together and preempted.

mod common;

use std::path::Path;

use common::{
    FAMILIES, ODD_VOCABULARY, adjusted, answers, expected, expected_text, folder, logits, nearness,
    odd_logits, of_folder, of_odd_vocabulary, reference,
};
use tandem_attn::{
    Error as AttentionError,
    exec::gpu::Gpu,
    plan::{PlanOptions, SplitMode},
    problem::Spec,
};
use tandem_engine::{
    Architecture, Backend, CacheType, Engine, Event, Generation, GpuBackend, GpuOptions, Limits,
    LogProbs, LogitRules, Penalties, Sampling, Weights,
};

/// The GPU; none if there is none, unless the environment requires one.
fn gpu() -> Option<Gpu> {
    match Gpu::new(0) {
        Ok(gpu) => Some(gpu),
        Err(missing @ (AttentionError::NoDriver { .. } | AttentionError::NoDevice { .. })) => {
            assert!(
                std::env::var_os("TANDEM_REQUIRE_GPU").is_none(),
                "{missing}"
            );
            println!("skipped: {missing}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn engine(gpu: Gpu, family: &str, graphs: bool) -> Engine {
    let backend = backend(gpu, family, CacheType::Auto, graphs);
    Engine::new(backend, Limits::default()).expect("limits that allow something")
}

/// Answers to prompts that the engine serves together, with the log-probabilities that they ask for.
fn scored(engine: &mut Engine, asked: &[Generation]) -> Vec<Vec<(u32, Option<LogProbs>)>> {
    let requests = asked.iter().map(|one| engine.submit(one.clone()));
    let requests: Vec<_> = requests.map(|one| one.expect("it fits")).collect();
    let mut given = vec![Vec::new(); asked.len()];
    while !engine.is_idle() {
        let step = engine.step(&mut |event| {
            if let Event::Token {
                request,
                token,
                log_probs,
            } = event
            {
                let index = requests.iter().position(|&one| one == request);
                given[index.expect("one of them")].push((token, log_probs));
            }
        });
        step.expect("a step");
    }
    given
}

fn planning(mut backend: Box<dyn Backend>, planned: PlanOptions) -> Engine {
    backend.plan_with(planned).expect("there are kernels");
    Engine::new(backend, Limits::default()).expect("limits that allow something")
}

fn backend(gpu: Gpu, family: &str, cache_type: CacheType, graphs: bool) -> Box<dyn Backend> {
    backend_of(gpu, &folder(family), 64, cache_type, graphs)
}

fn backend_of(
    gpu: Gpu,
    folder: &Path,
    step_tokens: u32,
    cache_type: CacheType,
    graphs: bool,
) -> Box<dyn Backend> {
    let mut options = GpuOptions::default();
    options.step_tokens = step_tokens;
    options.graphs = graphs;
    options.cache_type = cache_type;
    backend_with(gpu, folder, options)
}

fn backend_with(gpu: Gpu, folder: &Path, mut options: GpuOptions) -> Box<dyn Backend> {
    options.cache_tokens = Some(1024);
    loaded(gpu, folder, options)
}

fn loaded(gpu: Gpu, folder: &Path, options: GpuOptions) -> Box<dyn Backend> {
    let architecture = Architecture::read(folder).expect("a fixture");
    let weights = Weights::open(folder).expect("a fixture");
    let backend = GpuBackend::load(gpu, architecture, &weights, &options, &mut |_| ());
    Box::new(backend.expect("a fixture"))
}

/// The types of caches for which the GPU has kernels.
fn cache_types(gpu: &Gpu) -> Vec<CacheType> {
    let spec = Spec::new(4, 2, 64);
    let has = |of: &CacheType| gpu.supports(&of.spec(spec)).is_ok();
    CacheType::ALL.into_iter().filter(has).collect()
}

#[test]
fn logits_are_as_near_as_those_of_transformers_in_bf16() {
    for family in FAMILIES {
        let Some(gpu) = gpu() else { return };
        let (right, theirs) = (expected(family), expected_text(family).bf16);
        let mut engine = engine(gpu, family, true);
        for chunk in [48, 13, 1] {
            let got = engine.logits(&right.prompt, chunk).unwrap();
            let near = nearness(&got, &right.logits, engine.architecture().vocabulary);
            println!(
                "{family} in chunks of {chunk}: cosine {:.6} at least {:.6}, same first {:.4}; transformers in bf16 {:.6}, \
                 {:.6}, {:.4}",
                near.mean_cosine,
                near.least_cosine,
                near.same_first,
                theirs.mean_cosine,
                theirs.least_cosine,
                theirs.same_first
            );
            // At most twice the distance of `transformers` in bf16 from its f32 results.
            assert!(
                1.0 - near.mean_cosine < 2.0 * (1.0 - theirs.mean_cosine),
                "{family}: {}",
                near.mean_cosine
            );
            assert!(
                1.0 - near.least_cosine < 3.0 * (1.0 - theirs.least_cosine),
                "{family}: {}",
                near.least_cosine
            );
            assert!(
                near.same_first >= theirs.same_first.min(0.95) - 0.03,
                "{family}: {}",
                near.same_first
            );
        }
    }
}

/// The inputs of a step lie in one buffer, and kernels read some of them in vectors.
#[test]
fn the_largest_step_may_have_any_number_of_tokens() {
    let right = expected("qwen2");
    let greedy = Generation {
        ignore_ends: true,
        ..Generation::greedy(right.prompt.clone(), right.greedy.len() as u32)
    };
    for step_tokens in [1, 30, 61, 62, 63] {
        for graphs in [false, true] {
            let Some(gpu) = gpu() else { return };
            let model = folder("qwen2");
            let backend = backend_of(gpu, &model, step_tokens, CacheType::Auto, graphs);
            let limits = Limits {
                step_tokens,
                ..Limits::default()
            };
            let mut engine = Engine::new(backend, limits).expect("sound limits");
            assert_eq!(
                answers(&mut engine, std::slice::from_ref(&greedy)),
                std::slice::from_ref(&right.greedy),
                "{step_tokens} tokens, graphs: {graphs}"
            );
        }
    }
}

#[test]
fn pages_of_no_or_too_many_tokens_are_refused() {
    let model = folder("llama3");
    let weights = Weights::open(&model).expect("a fixture");
    for page_size in [0, 4097] {
        let Some(gpu) = gpu() else { return };
        let architecture = Architecture::read(&model).expect("a fixture");
        let mut options = GpuOptions::default();
        options.page_size = page_size;
        let refused = GpuBackend::load(gpu, architecture, &weights, &options, &mut |_| ());
        let said = refused.expect_err("no such pages").to_string();
        let rule = format!("is {page_size}: give 1 to 4096 tokens");
        assert!(said.contains(&rule), "{said}");
    }
}

/// Kernels adjust logits, also in steps that begin before the host knows the token before them, and restore them for
/// log-probabilities.
#[test]
fn rules_change_what_is_drawn_and_not_the_log_probabilities() {
    const NEW: u32 = 12;
    let prompt = expected("llama3").prompt;
    let rules = |presence, frequency, repetition, bias: &[(u32, f32)]| LogitRules {
        penalties: Penalties {
            presence,
            frequency,
            repetition,
        },
        bias: bias.to_vec(),
    };
    let asked: Vec<_> = [
        rules(0.0, 0.0, 1.0, &[]),
        rules(2.0, 0.0, 1.0, &[]),
        rules(0.0, -1.5, 1.0, &[(7, 1.0)]),
        rules(0.5, 0.5, 3.0, &[]),
        rules(0.0, 0.0, 1.0, &[(77, 100.0)]),
    ]
    .into_iter()
    .enumerate()
    .map(|(index, rules)| Generation {
        rules,
        log_probs: (index > 0).then_some(5 * index as u32),
        ignore_ends: index == 3,
        min_new_tokens: NEW,
        ..Generation::greedy(prompt[..20 + index].to_vec(), NEW)
    })
    .collect();
    for graphs in [false, true] {
        let [mut together, mut one] = match [gpu(), gpu()] {
            [Some(a), Some(b)] => [a, b].map(|gpu| engine(gpu, "llama3", graphs)),
            _ => return,
        };
        let given = scored(&mut together, &asked);
        assert!(given[4].iter().all(|(token, _)| *token == 77));
        for (asked, given) in asked.iter().zip(&given) {
            assert_eq!(given.len(), NEW as usize);
            let tokens: Vec<u32> = given.iter().map(|(token, _)| *token).collect();
            for (at, (token, log_probs)) in given.iter().enumerate() {
                // Products of other shapes differ a little in bf16.
                let adjusted = adjusted(&mut one, asked, &tokens[..at]);
                let largest = adjusted.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let drawn = adjusted[*token as usize];
                assert!(drawn > largest - 0.1, "{drawn} of {largest}, {asked:?}");
                assert_eq!(log_probs.is_some(), asked.log_probs.is_some());
                let Some(log_probs) = log_probs else { continue };
                let raw = logits(&mut one, &[&asked.prompt[..], &tokens[..at]].concat());
                let log_sum = raw.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
                let near = |token: u32, got: f32| {
                    (f64::from(raw[token as usize]) - log_sum - f64::from(got)).abs() < 0.1
                };
                assert!(near(*token, log_probs.token), "{token}: {log_probs:?}");
                assert_eq!(log_probs.top.len(), asked.log_probs.unwrap() as usize);
                assert!(log_probs.top.iter().all(|one| near(one.token, one.value)));
                assert!(log_probs.top.is_sorted_by(|a, b| a.value >= b.value));
            }
        }
    }
}

/// Rows of logits then do not follow each other without gaps.
#[test]
fn the_size_of_the_vocabulary_need_not_be_a_multiple_of_8() {
    let model = of_odd_vocabulary();
    let (right, theirs) = (expected("llama3"), expected_text("llama3").bf16);
    let several: Vec<_> = (0..3)
        .map(|seed| Generation {
            sampling: Sampling {
                temperature: 1.0,
                seed,
                ..Sampling::GREEDY
            },
            ignore_ends: true,
            ..Generation::greedy(right.prompt.clone(), 8)
        })
        .collect();
    let mut texts = Vec::new();
    for graphs in [false, true] {
        let Some(gpu) = gpu() else { return };
        let backend = backend_of(gpu, model.path(), 64, CacheType::Auto, graphs);
        let mut engine = Engine::new(backend, Limits::default()).expect("sound limits");
        let got = engine
            .logits(&right.prompt, 13)
            .expect("rows of any length");
        let near = nearness(&got, &odd_logits(&right), ODD_VOCABULARY);
        assert!(
            1.0 - near.mean_cosine < 2.0 * (1.0 - theirs.mean_cosine),
            "{}",
            near.mean_cosine
        );
        texts.push(answers(&mut engine, &several));
    }
    assert!(texts[0].iter().all(|text| text.len() == 8), "{texts:?}");
    assert_eq!(texts[0], texts[1], "launched, and from graphs");
}

/// Rounding to 8 bits and rounding to bf16 add up. The bounds are twice the sum of both distances, which were measured
/// apart: 8 bits on the CPU in f32, and bf16 by `transformers`.
#[test]
fn caches_of_8_bits_are_as_near_as_on_the_cpu() {
    for family in FAMILIES {
        let Some(there) = gpu() else { return };
        let (right, theirs) = (expected(family), expected_text(family).bf16);
        for cache_type in cache_types(&there) {
            if !cache_type.is_8_bit() {
                continue;
            }
            let on_cpu = of_folder(&folder(family), cache_type);
            let mut on_cpu = Engine::new(on_cpu, Limits::default()).unwrap();
            let vocabulary = on_cpu.architecture().vocabulary;
            let rounded = on_cpu.logits(&right.prompt, 48).unwrap();
            let least = nearness(&rounded, &right.logits, vocabulary);
            let Some(gpu) = gpu() else { return };
            let on_gpu = backend(gpu, family, cache_type, true);
            let mut on_gpu = Engine::new(on_gpu, Limits::default()).unwrap();
            for chunk in [48, 13, 1] {
                let got = on_gpu.logits(&right.prompt, chunk).unwrap();
                let near = nearness(&got, &right.logits, vocabulary);
                let to_cpu = nearness(&got, &rounded, vocabulary);
                println!(
                    "{family}, {cache_type}, chunks of {chunk}: cosine {:.6} at least {:.6}; on the CPU {:.6}, {:.6}; to the \
                     CPU {:.6}, {:.6}",
                    near.mean_cosine,
                    near.least_cosine,
                    least.mean_cosine,
                    least.least_cosine,
                    to_cpu.mean_cosine,
                    to_cpu.least_cosine
                );
                let allowed = (1.0 - least.mean_cosine) + (1.0 - theirs.mean_cosine);
                assert!(
                    1.0 - near.mean_cosine < 2.0 * allowed
                        && 1.0 - to_cpu.mean_cosine < 2.0 * allowed,
                    "{family}, {cache_type}: {}, {}",
                    near.mean_cosine,
                    to_cpu.mean_cosine
                );
            }
        }
    }
}

/// Pages whose size is no multiple of 8 are loaded key by key.
#[test]
fn caches_have_pages_of_any_size() {
    let (right, theirs) = (expected("llama3"), expected_text("llama3").bf16);
    let greedy = Generation {
        ignore_ends: true,
        ..Generation::greedy(right.prompt.clone(), 20)
    };
    let Some(there) = gpu() else { return };
    for cache_type in cache_types(&there) {
        let of_pages = |page_size, graphs| {
            let mut options = GpuOptions::default();
            options.page_size = page_size;
            options.step_tokens = 64;
            options.graphs = graphs;
            options.cache_type = cache_type;
            let backend = backend_with(gpu().expect("as above"), &folder("llama3"), options);
            Engine::new(backend, Limits::default()).expect("sound limits")
        };
        let mut of_16 = of_pages(16, true);
        let vocabulary = of_16.architecture().vocabulary;
        let of_16 = of_16.logits(&right.prompt, 13).unwrap();
        for page_size in [1, 5] {
            let mut engine = of_pages(page_size, true);
            for chunk in [48, 13, 1] {
                let got = engine.logits(&right.prompt, chunk).unwrap();
                let near = nearness(&got, &of_16, vocabulary);
                println!(
                    "{cache_type}, pages of {page_size}, chunks of {chunk}: {:.6}",
                    near.mean_cosine
                );
                assert!(
                    1.0 - near.mean_cosine < 2.0 * (1.0 - theirs.mean_cosine),
                    "{cache_type}, {page_size}"
                );
            }
            let texts = [true, false].map(|graphs| {
                answers(
                    &mut of_pages(page_size, graphs),
                    std::slice::from_ref(&greedy),
                )
            });
            assert_eq!(texts[0], texts[1], "{cache_type}, pages of {page_size}");
        }
    }
}

#[test]
fn copied_pages_hold_the_same_bits() {
    let Some(there) = gpu() else { return };
    for (cache_type, graphs) in cache_types(&there)
        .into_iter()
        .flat_map(|of| [(of, false), (of, true)])
    {
        let Some(gpu) = gpu() else { return };
        let mut backend = backend(gpu, "llama3", cache_type, graphs);
        common::copied_pages_hold_the_same_bits(&mut *backend);
    }
}

#[test]
fn graphs_write_what_launches_write() {
    for family in FAMILIES {
        let prompts = expected(family).prompt;
        // Seven requests, so that graphs are padded. Lengths differ, so that they end one after the other.
        let generations: Vec<_> = (0..7)
            .map(|index| Generation {
                sampling: Sampling {
                    temperature: f32::from(u8::from(index % 2 == 1)),
                    seed: index,
                    ..Sampling::GREEDY
                },
                ignore_ends: true,
                ..Generation::greedy(
                    prompts[..20 + 3 * index as usize].to_vec(),
                    10 + 2 * index as u32,
                )
            })
            .collect();
        // Decodes with fixed splits use other kernels.
        let fixed = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 256 });
        let Some(there) = gpu() else { return };
        for (planned, cache_type) in [PlanOptions::default(), fixed]
            .into_iter()
            .flat_map(|planned| cache_types(&there).into_iter().map(move |of| (planned, of)))
        {
            let [launched, replayed] = [false, true].map(|graphs| {
                let mut engine = planning(backend(gpu()?, family, cache_type, graphs), planned);
                Some(answers(&mut engine, &generations))
            });
            for (answer, generation) in replayed.iter().flatten().zip(&generations) {
                assert_eq!(answer.len(), generation.max_new_tokens as usize);
            }
            assert_eq!(launched, replayed, "{family}, {cache_type}");
        }
    }
}

#[test]
fn greedy_text_is_that_of_transformers_where_the_lead_is_clear() {
    // In these families each greedy token leads by more than rounding to bf16 changes.
    for family in ["qwen2", "qwen3"] {
        let Some(gpu) = gpu() else { return };
        let right = expected(family);
        let greedy = Generation {
            ignore_ends: true,
            ..Generation::greedy(right.prompt.clone(), right.greedy.len() as u32)
        };
        assert_eq!(
            answers(&mut engine(gpu, family, true), &[greedy]),
            [right.greedy],
            "{family}"
        );
    }
}

/// Prompts in one piece, without pages of others. With fixed splits attention depends on the request only, each product has one
/// algorithm for all numbers of rows, and norms have one kernel. Log-probabilities differ where a logit does by a bit.
#[test]
fn with_fixed_splits_texts_do_not_depend_on_the_batch() {
    let planned = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 256 });
    for family in FAMILIES {
        let prompt = expected(family).prompt;
        let asked: Vec<_> = (0..64)
            .map(|index| Generation {
                sampling: Sampling {
                    temperature: f32::from(u8::from(index % 4 == 3)),
                    seed: index as u64,
                    ..Sampling::GREEDY
                },
                log_probs: (index % 2 == 0).then_some(5),
                ignore_ends: true,
                ..Generation::greedy(
                    prompt[index % 16..][..1 + 7 * index % 30].to_vec(),
                    5 + index as u32 % 13,
                )
            })
            .collect();
        // The first step of all has more rows than the GPU has SMs.
        assert!(asked.iter().map(|one| one.prompt.len()).sum::<usize>() > 512);
        for graphs in [false, true] {
            let Some(gpu) = gpu() else { return };
            let mut options = GpuOptions::default();
            options.graphs = graphs;
            options.step_tokens = 2048;
            options.cache_tokens = Some(8192);
            let mut backend = loaded(gpu, &folder(family), options);
            backend.plan_with(planned).expect("there are kernels");
            let limits = Limits {
                prefix_cache: false,
                ..Limits::default()
            };
            let mut engine = Engine::new(backend, limits).expect("sound limits");
            let alone: Vec<_> = asked
                .iter()
                .flat_map(|one| scored(&mut engine, std::slice::from_ref(one)))
                .collect();
            for count in [1, 3, 17, 64] {
                let together = scored(&mut engine, &asked[..count]);
                for (index, (together, alone)) in together.iter().zip(&alone).enumerate() {
                    assert_eq!(alone.len(), asked[index].max_new_tokens as usize);
                    assert!(
                        together == alone,
                        "{family}, graphs: {graphs}, request {index} of {count}:\n{together:?}\nalone\n{alone:?}"
                    );
                }
            }
        }
    }
}

/// The requests of a step can use no more than a fraction of the memory.
#[test]
fn caches_have_room_for_the_longest_requests_of_a_step() {
    for cache_type in CacheType::ALL {
        let Some(gpu) = gpu() else { return };
        if !cache_types(&gpu).contains(&cache_type) {
            continue;
        }
        let mut options = GpuOptions::default();
        options.cache_type = cache_type;
        let backend = loaded(gpu, &folder("llama3"), options);
        let longest = backend.architecture().positions;
        assert_eq!(backend.pages() * backend.page_size(), 64 * longest);
        let engine = Engine::new(backend, Limits::default()).expect("sound limits");
        assert_eq!(engine.request_tokens(), longest);
    }
}

/// The bias after attention is added by the product, in launched steps and in graphs.
#[test]
fn biases_and_partial_rotary_embeddings_are_those_of_the_formulas() {
    let all = ["q_proj", "k_proj", "v_proj", "o_proj"];
    for (part, turned, biases) in [(0.5, 32, &[][..]), (1.0, 64, &all), (0.25, 16, &all)] {
        let change = |config: &mut serde_json::Value| {
            config["rope_parameters"] = serde_json::json!({
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": part,
            });
            config["attention_bias"] = (!biases.is_empty()).into();
        };
        let model = reference::changed(&folder("llama3"), change, biases);
        let prompt = expected("llama3").prompt;
        let right = reference::logits(model.path(), turned, &prompt);
        for graphs in [false, true] {
            let Some(gpu) = gpu() else { return };
            let backend = backend_of(gpu, model.path(), 64, CacheType::Auto, graphs);
            let mut engine = Engine::new(backend, Limits::default()).expect("sound limits");
            for chunk in [48, 13, 1] {
                let got = engine.logits(&prompt, chunk).unwrap();
                let near = nearness(&got, &right, engine.architecture().vocabulary);
                assert!(
                    near.least_cosine > 0.9995,
                    "{part}, {chunk}: {}",
                    near.least_cosine
                );
            }
        }
    }
}
