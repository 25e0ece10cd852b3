//! Damages a model's files. Each must be refused with an error or be read; nothing may panic or exhaust memory.

mod common;
#[path = "../../tests/common/damage.rs"]
mod damage;
#[path = "../../tests/common/numeric.rs"]
mod numeric;

use std::fs;

use common::{FAMILIES, folder, options};
use damage::{damaged, damaged_tensors};
use half::bf16;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::{Value, json};
use tandem_engine::{Architecture, CpuBackend, Error, Text, Weights};

fn fixture(family: &str, file: &str) -> Vec<u8> {
    fs::read(folder(family).join(file)).expect("a fixture")
}

fn architecture(family: &str) -> Architecture {
    Architecture::read(&folder(family)).expect("a fixture")
}

/// Parses a family's configuration after setting one field.
fn with_field(family: &str, field: &str, value: u64) -> Result<Architecture, Error> {
    let config = serde_json::from_slice::<serde_json::Value>(&fixture(family, "config.json"));
    let mut config = config.expect("a fixture");
    config[field] = value.into();
    Architecture::from_json(&config.to_string())
}

/// Oversized configurations cause no allocation and no overflow in products of sizes.
#[test]
fn sizes_that_no_model_has_are_refused() {
    for (name, most) in [
        ("num_hidden_layers", 1 << 10),
        ("num_attention_heads", 1 << 10),
        ("num_key_value_heads", 1 << 10),
        ("hidden_size", 1 << 20),
        ("intermediate_size", 1 << 22),
        ("vocab_size", 1 << 24),
    ] {
        for value in [0, most + 1, 1 << 31, u64::from(u32::MAX)] {
            let read = with_field("llama3", name, value);
            let Err(Error::Unsupported { field, got, rule }) = read else {
                panic!("{name} = {value}: {read:?}");
            };
            assert_eq!((field, got), (name, value.to_string()));
            assert_eq!(rule, format!("supported: 1 to {most}"));
        }
    }
    let largest = with_field("llama3", "num_hidden_layers", 1 << 10).expect("it is computed");
    assert_eq!(largest.layers.len(), 1 << 10);
}

#[test]
fn windows_wider_than_any_table_are_refused() {
    let read = with_field("mistral", "sliding_window", u32::MAX.into());
    let error = read.expect_err("too wide").to_string();
    assert!(error.contains("4294967294 keys"), "{error}");
}

/// A tensor's shape is checked before memory is allocated for it.
#[test]
fn shapes_are_compared_before_memory_is_taken() {
    let weights = Weights::open(&folder("llama3")).expect("a fixture");
    let got = weights.get::<f32>("model.norm.weight", &[1 << 61, 1 << 61]);
    let Err(Error::TensorShape {
        name,
        got,
        expected,
    }) = got
    else {
        panic!("{got:?}");
    };
    assert_eq!(name, "model.norm.weight");
    assert_eq!((got.len(), expected), (1, vec![1 << 61, 1 << 61]));

    let mut hostile = architecture("llama3");
    hostile.intermediate = 1 << 60;
    let loaded = CpuBackend::load(hostile, &weights, &options(4, 16), &mut |_| {});
    let Err(Error::TensorShape { name, expected, .. }) = loaded else {
        panic!("{loaded:?}");
    };
    assert_eq!(name, "model.layers.0.mlp.gate_proj.weight");
    assert_eq!(expected[0], 1 << 60);
}

/// A text without a layer or a bias that the files have would be wrong.
#[test]
fn tensors_that_would_be_ignored_are_refused() {
    for (family, field, value, unused) in [
        (
            "llama3",
            "num_hidden_layers",
            json!(1),
            "model.layers.1.input_layernorm.weight",
        ),
        (
            "qwen2",
            "model_type",
            json!("llama"),
            "model.layers.0.self_attn.k_proj.bias",
        ),
        (
            "qwen3",
            "model_type",
            json!("llama"),
            "model.layers.0.self_attn.k_norm.weight",
        ),
    ] {
        let mut config: Value =
            serde_json::from_slice(&fixture(family, "config.json")).expect("a fixture");
        config[field] = value;
        let architecture = Architecture::from_json(&config.to_string()).expect("sound");
        let weights = Weights::open(&folder(family)).expect("a fixture");
        let loaded = CpuBackend::load(architecture, &weights, &options(4, 16), &mut |_| {});
        let Err(Error::UnusedTensor { name }) = loaded else {
            panic!("{family}: {loaded:?}");
        };
        assert_eq!(name, unused);
    }
}

/// Loads Qwen 2's fixture, whose embedding is also the matrix of the logits, with another tensor of a type.
fn with_tensor(name: &str, dtype: Dtype, change: impl FnOnce(&mut [f32])) -> Result<(), Error> {
    let bytes = fixture("qwen2", "model.safetensors");
    let tensors = SafeTensors::deserialize(&bytes).expect("as made");
    let embedding = tensors.tensor("model.embed_tokens.weight").expect("one");
    let as_made: Vec<bf16> = bytemuck::pod_collect_to_vec(embedding.data());
    let mut numbers: Vec<f32> = as_made.iter().map(|&x| x.into()).collect();
    change(&mut numbers);
    let data = match dtype {
        Dtype::F32 => bytemuck::cast_slice(&numbers).to_vec(),
        _ => bytemuck::pod_collect_to_vec(
            &numbers
                .iter()
                .map(|&x| bf16::from_f32(x))
                .collect::<Vec<_>>(),
        ),
    };
    let mut shape = embedding.shape().to_vec();
    if name.ends_with("bias") {
        shape = vec![numbers.len()];
    }
    let new = TensorView::new(dtype, shape, &data).expect("whole");
    let all = tensors.iter().chain([(name, new)]);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = safetensors::serialize(all, None).expect("as before");
    fs::write(folder.path().join("model.safetensors"), file).expect("writable");
    let weights = Weights::open(folder.path()).expect("whole");
    let loaded = CpuBackend::load(
        architecture("qwen2"),
        &weights,
        &options(4, 16),
        &mut |_| {},
    );
    loaded.map(drop)
}

/// The files may have a copy of the embedding as the matrix of the logits, but no other one.
#[test]
fn a_head_that_would_be_ignored_is_refused() {
    let head = "lm_head.weight";
    for dtype in [Dtype::BF16, Dtype::F32] {
        with_tensor(head, dtype, |_| ()).expect("a copy");
        let other = with_tensor(head, dtype, |numbers| *numbers.last_mut().unwrap() += 1.0);
        let said = other.expect_err("another head").to_string();
        assert_eq!(
            said,
            "the model has tie_word_embeddings = true; the files have a tensor lm_head.weight that differs from the embedding: \
             set the field to false to use it, or leave the tensor out of the files"
        );
    }
    let bias = with_tensor("lm_head.bias", Dtype::BF16, |_| ());
    let Err(Error::UnusedTensor { name }) = bias else {
        panic!("{bias:?}");
    };
    assert_eq!(name, "lm_head.bias");
}

/// A configuration that still parses is loaded, with weights that may not fit it.
#[test]
fn damaged_configurations_are_refused_or_read() {
    let (mut read, mut refused, mut loaded) = (0, 0, 0);
    for family in FAMILIES {
        let config = fixture(family, "config.json");
        let weights = Weights::open(&folder(family)).expect("a fixture");
        for seed in 0..2000 {
            let text = String::from_utf8_lossy(&damaged(&config, seed)).into_owned();
            let Ok(architecture) = Architecture::from_json(&text) else {
                refused += 1;
                continue;
            };
            read += 1;
            if seed.is_multiple_of(20) {
                let backend =
                    CpuBackend::load(architecture, &weights, &options(4, 16), &mut |_| {});
                loaded += u32::from(backend.is_ok());
            }
        }
    }
    assert!(
        read > 1000 && refused > 1000,
        "{read} read, {refused} refused"
    );
    assert!(loaded > 10, "{loaded} loaded");
}

#[test]
fn damaged_tokenizers_are_refused_or_read() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let put =
        |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).expect("writable");
    let names = [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ];
    let (mut read, mut refused) = (0, 0);
    for seed in 0..200_usize {
        for (at, name) in names.into_iter().enumerate() {
            let whole = fixture("llama3", name);
            let is_hit = at == seed % names.len();
            put(
                name,
                &if is_hit {
                    damaged(&whole, seed as u64)
                } else {
                    whole
                },
            );
        }
        match Text::read(folder.path()) {
            Ok(text) => {
                read += 1;
                let _ = text
                    .encode("some words", true)
                    .map(|tokens| text.decode(&tokens));
            }
            Err(_) => refused += 1,
        }
    }
    assert!(read > 20 && refused > 20, "{read} read, {refused} refused");
}

#[test]
fn a_folder_without_weights_says_what_it_may_have() {
    let folder = tempfile::tempdir().unwrap();
    let said = Weights::open(folder.path()).unwrap_err().to_string();
    let both = "neither model.safetensors nor model.safetensors.index.json: add";
    assert!(said.contains(both), "{said}");
}

/// `transformers` takes the file, and this engine takes the shards of the index: one of them may be left of an older model.
#[test]
fn a_file_beside_shards_is_refused_unless_the_index_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let put =
        |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).expect("writable");
    let index = "model.safetensors.index.json";
    for name in [
        index,
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ] {
        put(name, &fixture("qwen3", name));
    }
    Weights::open(folder.path()).expect("as made");
    let single = "model.safetensors";
    put(single, &fixture("qwen2", single));
    let said = Weights::open(folder.path()).unwrap_err().to_string();
    let both = "model.safetensors.index.json: it does not name model.safetensors, which is there, too: delete the one of both \
                that is old";
    assert!(said.ends_with(both), "{said}");
    put(
        index,
        br#"{"weight_map": {"model.norm.weight": "model.safetensors"}}"#,
    );
    Weights::open(folder.path()).expect("the file alone");
}

/// What a clone without Git LFS and an interrupted download leave behind.
#[test]
fn files_that_are_not_whole_say_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 8960\n";
    fs::write(folder.path().join("model.safetensors"), pointer).unwrap();
    fs::write(folder.path().join("tokenizer.json"), pointer).unwrap();
    let weights = Weights::open(folder.path()).map(|_| ());
    let text = Text::read(folder.path()).map(|_| ());
    for read in [weights, text] {
        let error = read.expect_err("a pointer").to_string();
        assert!(error.contains("`git lfs pull`"), "{error}");
    }
    let whole = fixture("llama3", "model.safetensors");
    let half = &whole[..whole.len() / 2];
    fs::write(folder.path().join("model.safetensors"), half).unwrap();
    let read = Weights::open(folder.path()).map(|_| ());
    let error = read.expect_err("half of a file").to_string();
    let size = format!("no whole safetensors file of {} bytes", half.len());
    assert!(error.contains(&size), "{error}");
}

#[test]
fn damaged_weights_are_refused_or_read() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let architecture = architecture("llama3");
    let whole = fixture("llama3", "model.safetensors");
    let (mut opened, mut refused) = (0, 0);
    for seed in 0..600 {
        fs::write(
            folder.path().join("model.safetensors"),
            damaged_tensors(&whole, seed),
        )
        .expect("writable");
        match Weights::open(folder.path()) {
            Ok(weights) => {
                opened += 1;
                let _ =
                    CpuBackend::load(architecture.clone(), &weights, &options(4, 16), &mut |_| {});
            }
            Err(_) => refused += 1,
        }
    }
    assert!(
        opened > 20 && refused > 100,
        "{opened} opened, {refused} refused"
    );
}
