//! Compares parts of models that the fixtures lack with the formulas: partial rotary embedding, biases of attention.

mod common;

use common::{
    expected, folder, nearness, of_folder,
    reference::{changed, logits},
};
use serde_json::{Value, json};
use tandem_engine::{Architecture, CacheType, Engine, Error, Limits};

/// Least cosine between the engine's logits and those of the formulas, and the share of equal first tokens.
fn near(model: &std::path::Path, turned: usize) -> (f64, f64) {
    let prompt = expected("llama3").prompt;
    let right = logits(model, turned, &prompt);
    let backend = of_folder(model, CacheType::Auto);
    let mut engine = Engine::new(backend, Limits::default()).expect("sound limits");
    let got = engine.logits(&prompt, 13).expect("a step");
    let near = nearness(&got, &right, engine.architecture().vocabulary);
    (near.least_cosine, near.same_first)
}

fn plain_rope(config: &mut Value) {
    config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 10000.0});
}

#[test]
fn the_formulas_are_those_of_transformers() {
    let right = expected("qwen2");
    let got = logits(&folder("qwen2"), 64, &right.prompt);
    let near = nearness(&got, &right.logits, 384);
    assert!(near.least_cosine > 0.999_999, "{}", near.least_cosine);
}

#[test]
fn a_part_of_each_head_is_turned() {
    for (part, turned) in [(1.0, 64), (0.5, 32), (0.25, 16), (0.03125, 2)] {
        // As version 5 of `transformers` writes it, and as earlier versions did.
        let new = |config: &mut Value| {
            plain_rope(config);
            config["rope_parameters"]["partial_rotary_factor"] = json!(part);
        };
        let old = |config: &mut Value| {
            config["rope_parameters"] = Value::Null;
            config["partial_rotary_factor"] = json!(part);
            config["rope_theta"] = json!(10000.0);
        };
        let (new, old) = (
            changed(&folder("llama3"), new, &[]),
            changed(&folder("llama3"), old, &[]),
        );
        let [a, b] = [&new, &old].map(|of| Architecture::read(of.path()).unwrap());
        assert_eq!(a, b);
        let (least, same) = near(new.path(), turned);
        assert!(least > 0.999_99 && same == 1.0, "{part}: {least}");
        // Other parts give other texts.
        let (other, _) = near(new.path(), if turned == 64 { 32 } else { 64 });
        assert!(other < 0.999, "{part}: {other}");
    }
    for (part, got) in [(0.0, "0"), (1.5, "1.5"), (0.01, "0.01"), (-0.5, "-0.5")] {
        let wrong = |config: &mut Value| config["partial_rotary_factor"] = json!(part);
        let model = changed(&folder("llama3"), wrong, &[]);
        let refused = Architecture::read(model.path()).unwrap_err();
        let Error::Unsupported {
            field, got: named, ..
        } = refused
        else {
            panic!("{refused}");
        };
        assert_eq!((field, &named[..]), ("partial_rotary_factor", got));
    }
}

#[test]
fn biases_of_attention_are_added() {
    let all = ["q_proj", "k_proj", "v_proj", "o_proj"];
    let biased = |config: &mut Value| {
        plain_rope(config);
        config["attention_bias"] = json!(true);
    };
    let model = changed(&folder("llama3"), biased, &all);
    let (least, same) = near(model.path(), 64);
    assert!(least > 0.999_99 && same == 1.0, "{least}");
    // Without one of them there is no such model, and none is left out in silence.
    let missing = changed(&folder("llama3"), biased, &all[..3]);
    let unused = changed(&folder("llama3"), plain_rope, &all);
    for (model, part) in [(missing, "no tensor"), (unused, "does not use")] {
        let architecture = Architecture::read(model.path()).unwrap();
        let weights = tandem_engine::Weights::open(model.path()).unwrap();
        let options = common::options(4, 16);
        let loaded = tandem_engine::CpuBackend::load(architecture, &weights, &options, &mut |_| ());
        let said = loaded.unwrap_err().to_string();
        assert!(said.contains(part) && said.contains("_proj.bias"), "{said}");
    }
}
