//! KV caches of 8 bits on the CPU, compared with caches in f32.

mod common;

use std::{fs, path::Path};

use common::{FAMILIES, PAGES, answers, expected, folder, nearness, of_folder};
use half::bf16;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use tandem_attn::{
    kv::PageCopy,
    plan::{PlanOptions, SplitMode},
};
use tandem_engine::{
    Backend, CacheType, Engine, Error, Generation, Limits, LogitWork, Sampling, Work,
};
use tandem_schedule::StepInputs;

const OF_8_BITS: [CacheType; 2] = [CacheType::E4m3, CacheType::E4m3Scaled];

fn engine(folder: &Path, cache_type: CacheType, limits: Limits) -> Engine {
    let engine = Engine::new(of_folder(folder, cache_type), limits);
    let engine = engine.expect("limits that allow something");
    assert_eq!(engine.cache_type(), cache_type);
    engine
}

fn greedy(prompt: &[u32], answer: u32) -> Generation {
    Generation {
        ignore_ends: true,
        ..Generation::greedy(prompt.to_vec(), answer)
    }
}

/// A number of e4m3 has 4 significant bits, so rounding changes it by 2.6 % (root mean square). Each layer's attention
/// moves by about this part, and 1 − cosine is half its square: 3e-4. Measured are 1.2e-4 to 2.7e-4 in the mean over
/// positions, and 7.6e-4 to 1.0e-3 for Gemma 3, which normalises the output of attention and so enlarges its share.
#[test]
fn logits_are_as_near_as_8_bits_allow() {
    for family in FAMILIES {
        let right = expected(family);
        let most = if family == "gemma3" { 2e-3 } else { 6e-4 };
        let means = OF_8_BITS.map(|cache_type| {
            let mut engine = engine(&folder(family), cache_type, Limits::default());
            let [whole, chunks, single] = [48, 13, 1].map(|chunk| {
                let got = engine.logits(&right.prompt, chunk).unwrap();
                nearness(&got, &right.logits, engine.architecture().vocabulary)
            });
            for near in [&whole, &chunks, &single] {
                let (mean, largest) = (1.0 - near.mean_cosine, 1.0 - near.least_cosine);
                println!(
                    "{family}, {cache_type}: 1 − cosine {mean:.1e}, at most {largest:.1e}, same first {:.3}",
                    near.same_first
                );
                assert!(
                    mean < most && largest < 5.0 * most && near.same_first > 0.8,
                    "{family}, {cache_type}: 1 − cosine {mean}, at most {largest}, same first {}",
                    near.same_first
                );
                // It is 3e-13 with caches in f32.
                assert!(mean > 1e-6, "{family}, {cache_type} has no 8 bits");
            }
            whole.mean_cosine
        });
        assert!(means[1] > means[0], "{family}: scales make it worse");
    }
}

/// A copy of a model whose keys and values are multiplied by powers of two. Queries and the matrix after attention are
/// divided by them, so that the text stays the same.
fn rescaled(family: &str, of_keys: f32, of_values: f32) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a temporary folder");
    for file in ["config.json", "tokenizer.json"] {
        fs::copy(folder(family).join(file), copy.path().join(file)).expect("writable");
    }
    let bytes = fs::read(folder(family).join("model.safetensors")).expect("a fixture");
    let tensors = SafeTensors::deserialize(&bytes).expect("as made");
    let scaled: Vec<_> = tensors
        .iter()
        .map(|(name, tensor)| {
            let factors = [
                ("q_proj", 1.0 / of_keys),
                ("k_proj", of_keys),
                ("v_proj", of_values),
                ("o_proj", 1.0 / of_values),
            ];
            let factor = factors.iter().find(|(part, _)| name.contains(part));
            let factor = factor.map_or(1.0, |(_, factor)| *factor);
            assert_eq!(tensor.dtype(), Dtype::BF16);
            let numbers: Vec<bf16> = bytemuck::pod_collect_to_vec(tensor.data());
            let numbers = numbers.iter().map(|x| bf16::from_f32(x.to_f32() * factor));
            let numbers: Vec<bf16> = numbers.collect();
            (name, tensor.shape().to_vec(), numbers)
        })
        .collect();
    let views = scaled.iter().map(|(name, shape, numbers)| {
        let bytes = bytemuck::cast_slice(numbers);
        let view = TensorView::new(Dtype::BF16, shape.clone(), bytes);
        (name, view.expect("as before"))
    });
    let file = safetensors::serialize(views, None).expect("as before");
    fs::write(copy.path().join("model.safetensors"), file).expect("writable");
    copy
}

/// Scales follow the size of keys and values: powers of two do not change a bit. Without scales, large keys are cut off at
/// 448 and small values become 0.
#[test]
fn scales_keep_what_is_beyond_the_range_of_e4m3() {
    let right = expected("llama3");
    let logits = |folder: &Path, cache_type| {
        let mut engine = engine(folder, cache_type, Limits::default());
        engine.logits(&right.prompt, 48).unwrap()
    };
    let original = logits(&folder("llama3"), CacheType::E4m3Scaled);
    let vocabulary = 384;
    for (of_keys, of_values) in [(4096.0, 1.0), (1.0, 1.0 / 4096.0), (1.0 / 4096.0, 4096.0)] {
        let copy = rescaled("llama3", of_keys, of_values);
        let wide = logits(copy.path(), CacheType::Auto);
        let near = nearness(&wide, &right.logits, vocabulary);
        assert!(near.least_cosine > 0.999_99, "the copy is another model");
        let scaled = logits(copy.path(), CacheType::E4m3Scaled);
        assert!(
            scaled == original,
            "keys × {of_keys}, values × {of_values}: scales change the numbers"
        );
        let [plain, scaled] = [logits(copy.path(), CacheType::E4m3), scaled]
            .map(|got| 1.0 - nearness(&got, &right.logits, vocabulary).mean_cosine);
        println!(
            "keys × {of_keys}, values × {of_values}: 1 − cosine {plain:.1e}, with scales {scaled:.1e}"
        );
        assert!(
            plain > 20.0 * scaled,
            "keys × {of_keys}, values × {of_values}: {plain} beside {scaled} with scales"
        );
    }
}

/// With fixed splits, attention sums in the same order in every batch.
#[test]
fn texts_do_not_depend_on_the_batch() {
    for (family, cache_type) in FAMILIES.iter().flat_map(|f| OF_8_BITS.map(|of| (f, of))) {
        let prompt = expected(family).prompt;
        let mut batch: Vec<_> = [(48, 24), (37, 24), (5, 16), (1, 3)]
            .map(|(keep, answer)| greedy(&prompt[..keep], answer))
            .into();
        batch[1].sampling = Sampling {
            temperature: 4.0,
            seed: 7,
            ..Sampling::GREEDY
        };
        let planned = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 32 });
        let with = |limits| {
            let mut backend = of_folder(&folder(family), cache_type);
            backend.plan_with(planned).expect("no step is under way");
            Engine::new(backend, limits).expect("limits that allow something")
        };
        // Chunks of prompts together with decodes, and beginnings of prompts that are computed once.
        let mut together = with(Limits {
            step_tokens: 20,
            ..Limits::default()
        });
        let given = answers(&mut together, &batch);
        for (generation, given) in batch.iter().zip(given) {
            let mut alone = with(Limits::default());
            let alone = answers(&mut alone, std::slice::from_ref(generation));
            assert_eq!(alone, [given], "{family}, {cache_type}");
        }
        together.clear_cache();
        assert_eq!(together.composer().pool().free_pages(), PAGES, "{family}");
    }
}

/// Two prompts have two pages in common, which are computed for the first of them.
#[test]
fn pages_that_are_used_again_hold_the_same_bits() {
    let prompt = expected("llama3").prompt;
    let with_end = |end: u32| [&prompt[..32], &[end, end + 1, end + 2]].concat();
    for cache_type in CacheType::ALL {
        // The common beginning is one chunk in all runs.
        let limits = |prefix_cache| Limits {
            step_tokens: 32,
            prefix_cache,
            ..Limits::default()
        };
        let last = |engine: Engine| engine.into_backend().unwrap().logits().unwrap();
        let asked = [greedy(&with_end(9), 12)];
        let mut alone = engine(&folder("llama3"), cache_type, limits(false));
        let right = (answers(&mut alone, &asked), last(alone));

        let mut again = engine(&folder("llama3"), cache_type, limits(true));
        answers(&mut again, &[greedy(&with_end(90), 5)]);
        let given = answers(&mut again, &asked);
        assert_eq!(again.composer().cached_tokens(), 32, "{cache_type}");
        let got = (given, last(again));
        assert!(got == right, "{cache_type}: {:?}, {:?}", got.0, right.0);
    }
}

/// A copied page has the numbers and the scales of the other.
#[test]
fn copied_pages_hold_the_same_bits() {
    for cache_type in CacheType::ALL {
        let mut backend = of_folder(&folder("llama3"), cache_type);
        common::copied_pages_hold_the_same_bits(&mut *backend);
        let outside = PageCopy { from: 0, to: PAGES };
        let work = Work {
            inputs: &StepInputs::default(),
            copies: &[outside],
            rows: &[],
            draws: &[],
            drawn: &[],
            logits: LogitWork::default(),
        };
        let refused = backend.begin(&work);
        assert!(refused.is_err(), "{cache_type}: there is no such page");
    }
}

/// Preempted requests write their pages again.
#[test]
fn answers_survive_preemption() {
    let prompt = expected("llama3").prompt;
    for cache_type in OF_8_BITS {
        let all = [48, 40, 32, 24, 16, 8].map(|keep| greedy(&prompt[..keep], 200));
        let mut engine = engine(&folder("llama3"), cache_type, Limits::default());
        let together = answers(&mut engine, &all);
        assert!(engine.composer().lost_tokens() > 0);
        for (one, together) in all.into_iter().zip(together) {
            assert_eq!(answers(&mut engine, &[one]), [together], "{cache_type}");
        }
    }
}

/// A backend that converts few keys of prompt chunks at a time.
struct Narrow(Box<dyn Backend>, u32);

impl Backend for Narrow {
    common::of_the_backend_within!();

    fn chunk_keys(&self) -> u32 {
        self.1
    }

    fn begin(&mut self, work: &Work<'_>) -> Result<(), Error> {
        let batch = &work.inputs.batch;
        let chunks = (0..batch.requests()).filter(|&request| batch.q_len(request) > 1);
        let keys: Vec<u64> = chunks.map(|request| batch.kv_len(request)).collect();
        assert!(
            keys.len() <= 1 || keys.iter().sum::<u64>() <= self.1.into(),
            "{keys:?}"
        );
        self.0.begin(work)
    }
}

/// Kernels for 8-bit caches convert the keys of prompt chunks, common beginnings included, and have room for a number of
/// them.
#[test]
fn a_step_has_no_more_keys_of_chunks_than_the_backend_converts() {
    let prompt = expected("llama3").prompt;
    let asked = [1, 2, 3, 4, 5, 6].map(|end| greedy(&[&prompt[..40], &[end, 7, 8]].concat(), 4));
    let [few, any] = [100, u32::MAX].map(|keys| {
        let backend = of_folder(&folder("llama3"), CacheType::E4m3);
        let backend = Box::new(Narrow(backend, keys));
        let mut engine = Engine::new(backend, Limits::default()).unwrap();
        answers(&mut engine, &asked[..1]);
        let before = engine.steps();
        (answers(&mut engine, &asked), engine.steps() - before)
    });
    assert_eq!(few.0, any.0);
    // Six requests of 43 keys: two in a step.
    assert_eq!((few.1, any.1), (6, 4));
}
