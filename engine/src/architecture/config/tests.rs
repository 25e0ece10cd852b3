use tandem_attn::step::RopeScaling;

use crate::{Architecture, Error, Family};

/// Meta's file for Llama 3.1 8B, with the fields that `transformers` had before version 5.
const LLAMA: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "attention_bias": false, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 128256
}"#;

/// Gemma 3 4B. Fields that the text part leaves out have the family's defaults.
const GEMMA: &str = r#"{
    "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "model_type": "gemma3",
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
    "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    "vision_config": {"hidden_size": 1152}
}"#;

/// Qwen 3 0.6B.
const QWEN: &str = r#"{
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
    "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,
    "tie_word_embeddings": true, "use_sliding_window": false, "vocab_size": 151936
}"#;

fn refused(config: &str) -> String {
    Architecture::from_json(config).unwrap_err().to_string()
}

#[test]
fn old_rope_fields_are_read() {
    let llama = Architecture::from_json(LLAMA).unwrap();
    assert_eq!(llama.family, Family::Llama);
    assert_eq!((llama.kinds.len(), llama.layers.len()), (1, 32));
    assert_eq!(llama.ends, [128_001, 128_008, 128_009]);
    assert_eq!(llama.weights(), 8_029_995_008);
    let rope = llama.kinds[0].rope;
    assert_eq!((rope.dim, rope.theta), (128, 500_000.0));
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_positions: 8192,
    };
    assert_eq!(rope.scaling, scaling);
}

#[test]
fn what_a_text_part_leaves_out_is_usual() {
    let gemma = Architecture::from_json(GEMMA).unwrap();
    let spec = gemma.spec();
    assert_eq!((spec.q_heads, spec.kv_heads, spec.head_dim_qk), (8, 4, 256));
    assert_eq!(
        (gemma.vocabulary, gemma.positions, gemma.tied),
        (262_208, 131_072, true)
    );
    assert_eq!(gemma.ends, [1, 106]);
    // Five layers with a window of 1024 keys, then one without.
    assert_eq!(gemma.layers[..7], [0, 0, 0, 0, 0, 1, 0]);
    assert_eq!(gemma.kinds[0].spec.variant.window_left, Some(1023));
    assert_eq!(gemma.kinds[1].spec.variant.window_left, None);
    assert_eq!(
        (gemma.kinds[0].rope.theta, gemma.kinds[1].rope.theta),
        (1e4, 1e6)
    );
    assert_eq!(gemma.kinds[0].rope.scaling, RopeScaling::None);
    assert_eq!(
        gemma.kinds[1].rope.scaling,
        RopeScaling::Linear { factor: 8.0 }
    );
    assert_eq!(gemma.embedding_scale, 50.5); // √2560 in bf16
}

#[test]
fn windows_of_upper_layers_are_switched_on() {
    let config = |switch: &str| {
        LLAMA.replace("\"llama\"", "\"qwen2\"").replace(
            "\"vocab_size\"",
            &format!("{switch} \"max_window_layers\": 30, \"sliding_window\": 64, \"vocab_size\""),
        )
    };
    assert_eq!(Architecture::from_json(&config("")).unwrap().kinds.len(), 1);
    let on = Architecture::from_json(&config("\"use_sliding_window\": true,")).unwrap();
    assert_eq!(on.layers[28..], [0, 0, 1, 1]);
}

#[test]
fn what_would_be_computed_wrongly_is_refused() {
    let with = |from: &str, to: &str| refused(&LLAMA.replace(from, to));
    for (message, expected) in [
        (
            with("\"model_type\": \"llama\"", "\"model_type\": \"mamba\""),
            "models of type \"mamba\" are not supported; supported: llama, mistral, qwen2, qwen3, gemma3_text",
        ),
        (
            with("\"rope_type\": \"llama3\"", "\"rope_type\": \"longrope\""),
            "the model has rope_scaling.rope_type = longrope; supported: default, linear, llama3, yarn",
        ),
        (
            with("\"silu\"", "\"relu\""),
            "the model has hidden_act = relu; this family has silu",
        ),
        (
            with("\"mlp_bias\": false", "\"mlp_bias\": true"),
            "the model has mlp_bias = true; supported: feed-forward parts without biases",
        ),
        (
            refused(
                &LLAMA
                    .replace("\"llama\"", "\"mistral\"")
                    .replace("\"attention_bias\": false", "\"attention_bias\": true"),
            ),
            "the model has attention_bias = true; this family has no biases of attention",
        ),
        (
            with("\"hidden_size\": 4096, ", ""),
            "config.json has no hidden_size, and models of type \"llama\" have no default for it: add the field",
        ),
        (
            with(
                "\"mlp_bias\": false",
                "\"quantization_config\": {\"quant_method\": \"awq\"}",
            ),
            "the model has quantization_config = awq; use the model in BF16",
        ),
        (
            with("1e-05", "-1.0"),
            "the model has rms_norm_eps = -1; give a number from 0 to 1",
        ),
        (
            with("\"vocab_size\"", "\"sliding_window\": 4096, \"vocab_size\""),
            "the model has sliding_window = 4096; this family has no windows: set it to null",
        ),
        (
            refused(&GEMMA.replace("\"sliding_window\": 1024", "\"sliding_window\": 0")),
            "the model has sliding_window = 0; every key would be hidden: give at least 1, or null for no window",
        ),
    ] {
        assert_eq!(message, expected);
    }
    let ends = with("[128001, 128008, 128009]", "\"x\"");
    assert!(ends.contains("a token id or a list of them"), "{ends}");
    assert!(matches!(
        Architecture::from_json("{"),
        Err(Error::Malformed { .. })
    ));
}

#[test]
fn an_empty_list_of_ends_hides_no_other() {
    let ends = |config: &str, generation: Option<&str>| {
        let path = std::path::Path::new("config.json");
        super::parse(path, config, generation).unwrap().ends
    };
    let of_config = [128_001, 128_008, 128_009];
    let empty = Some(r#"{"eos_token_id": []}"#);
    assert_eq!(ends(LLAMA, Some(r#"{"eos_token_id": [5]}"#)), [5]);
    assert_eq!(ends(LLAMA, empty), of_config);
    let with_empty = LLAMA.replace("[128001, 128008, 128009]", "[]");
    assert!(ends(&with_empty, empty).is_empty());
    let inner = GEMMA
        .replace("\"eos_token_id\": [1, 106]", "\"eos_token_id\": []")
        .replace(
            "\"hidden_size\": 2560",
            "\"eos_token_id\": 1, \"hidden_size\": 2560",
        );
    assert_eq!(ends(&inner, None), [1]);
}

/// As the model cards of Qwen 2.5 and 3 say: `max_position_embeddings` stays, and `rope_scaling` is added.
#[test]
fn yarn_adds_positions() {
    let positions = |scaling: &str, positions: u32| {
        let config = QWEN
            .replace("null", scaling)
            .replace("40960", &positions.to_string());
        Architecture::from_json(&config).unwrap().positions
    };
    let yarn = r#"{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}"#;
    assert_eq!(positions("null", 40960), 40960);
    assert_eq!(positions(yarn, 40960), 131_072);
    assert_eq!(positions(yarn, 262_144), 262_144, "the larger one");
    assert_eq!(positions(r#"{"type": "yarn", "factor": 2.5}"#, 1000), 2500);
    let new = LLAMA.replace("\"llama3\"}", "\"yarn\"}");
    let new = new.replace("\"rope_scaling\"", "\"rope_parameters\"");
    let new = new.replace("131072", "8192");
    assert_eq!(Architecture::from_json(&new).unwrap().positions, 65_536);
    // Linear scaling and Llama 3's are part of the training, and `max_position_embeddings` counts them.
    let linear = r#"{"rope_type": "linear", "factor": 4.0}"#;
    assert_eq!(positions(linear, 40960), 40960);
    let llama = LLAMA.replace("131072", "8192");
    assert_eq!(Architecture::from_json(&llama).unwrap().positions, 8192);
}

/// `transformers` reads it beside the other fields of the model, too, if the rotary embedding is the same in all layers.
#[test]
fn original_positions_beside_the_scaling_count() {
    let scaling = "{\"rope_type\": \"yarn\", \"factor\": 4.0}";
    let beside = |positions: u32| {
        let field = format!("\"original_max_position_embeddings\": {positions}, \"vocab_size\"");
        move |config: &str| config.replace("\"vocab_size\"", &field)
    };
    for name in ["rope_scaling", "rope_parameters"] {
        let fields = format!("\"{name}\": {scaling}");
        let config = beside(16384)(&QWEN.replace("\"rope_scaling\": null", &fields));
        let read = Architecture::from_json(&config).unwrap();
        let RopeScaling::Yarn(yarn) = read.kinds[0].rope.scaling else {
            panic!("{:?}", read.kinds[0].rope);
        };
        assert_eq!((yarn.original_positions, read.positions), (16384, 65536));
    }
    // Meta's file has it within.
    let same = Architecture::from_json(&beside(8192)(LLAMA)).unwrap();
    assert_eq!(same, Architecture::from_json(LLAMA).unwrap());
    assert_eq!(
        refused(&beside(4096)(LLAMA)),
        "the model has original_max_position_embeddings = 4096; that of the scaling is 8192: give one of them"
    );
    let by_kind =
        format!("\"rope_parameters\": {{\"full_attention\": {scaling}}}, \"sliding_window\"");
    let gemma = GEMMA.replace("\"sliding_window\"", &by_kind);
    let gemma = gemma.replace(
        "\"rope_scaling\": {\"factor\": 8.0, \"rope_type\": \"linear\"}, ",
        "",
    );
    let gemma = gemma.replace(
        "\"hidden_size\": 2560",
        "\"hidden_size\": 2560, \"max_position_embeddings\": 131072",
    );
    assert!(Architecture::from_json(&gemma).is_ok());
    let gemma = gemma.replace(
        "\"hidden_size\": 2560",
        "\"hidden_size\": 2560, \"original_max_position_embeddings\": 8192",
    );
    assert_eq!(
        refused(&gemma),
        "the model has original_max_position_embeddings = 8192; rope_parameters are given for each kind of layer: give it there"
    );
}

/// `transformers` 4 wrote both names of the scaling type, and some programs write both names of the activation.
#[test]
fn a_field_under_both_of_its_names_is_read() {
    let both = LLAMA
        .replace(
            "\"rope_type\": \"llama3\"",
            "\"rope_type\": \"llama3\", \"type\": \"llama3\"",
        )
        .replace("\"silu\"", "\"silu\", \"hidden_activation\": \"silu\"");
    let [one, both] = [LLAMA, &both].map(|config| Architecture::from_json(config).unwrap());
    assert_eq!(one, both);
    let old = LLAMA.replace("\"rope_type\"", "\"type\"");
    assert_eq!(Architecture::from_json(&old).unwrap(), one);
    let two = LLAMA.replace(
        "\"rope_type\": \"llama3\"",
        "\"rope_type\": \"llama3\", \"type\": \"yarn\"",
    );
    assert_eq!(
        refused(&two),
        "the model has rope_scaling.type = yarn; rope_type is llama3: give one of them"
    );
}

/// The fields of `transformers` 5, and older fields that an edited file may still contain.
#[test]
fn old_rope_fields_beside_the_new_ones_count() {
    let (head, rest) = LLAMA.split_once("\"rope_scaling\"").unwrap();
    let (_, tail) = rest.split_once("500000.0").unwrap();
    let llama = |rope: &str| format!("{head}{rope}{tail}");
    let rope = |fields: &str| {
        let read = Architecture::from_json(&llama(fields));
        let rope = read.unwrap().kinds[0].rope;
        (rope.theta, rope.scaling)
    };
    // The base may also be outside of `rope_parameters`.
    assert_eq!(
        rope("\"rope_parameters\": {\"rope_type\": \"default\"}, \"rope_theta\": 500000.0"),
        (500_000.0, RopeScaling::None)
    );
    assert_eq!(
        rope("\"rope_parameters\": {\"rope_theta\": 1000000.0}, \"rope_theta\": 500000.0"),
        (1_000_000.0, RopeScaling::None)
    );
    // A scaling that only the old fields have would be lost.
    let lost = llama(
        "\"rope_parameters\": {\"rope_theta\": 1000000.0}, \"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 4.0}",
    );
    assert_eq!(
        refused(&lost),
        "the model has rope_scaling = linear; rope_parameters says otherwise: give one of them"
    );
    let linear = "{\"rope_type\": \"linear\", \"factor\": 4.0, \"rope_theta\": 1000000.0}";
    assert_eq!(
        rope(&format!(
            "\"rope_parameters\": {linear}, \"rope_scaling\": {linear}"
        )),
        (1_000_000.0, RopeScaling::Linear { factor: 4.0 })
    );
}

#[test]
fn what_layers_with_a_window_leave_out_is_usual() {
    let gemma = |rope: &str| {
        let config = GEMMA.replace(
            "\"rope_scaling\": {\"factor\": 8.0, \"rope_type\": \"linear\"}",
            rope,
        );
        let gemma = Architecture::from_json(&config).unwrap();
        [1, 0].map(|kind: usize| {
            let rope = gemma.kinds[kind].rope;
            (rope.theta, rope.scaling)
        })
    };
    let linear = RopeScaling::Linear { factor: 8.0 };
    let full = "\"full_attention\": {\"rope_type\": \"linear\", \"factor\": 8.0}";
    for (rope, local) in [
        (
            format!(
                "\"rope_parameters\": {{{full}, \"sliding_attention\": {{\"rope_type\": \"default\"}}}}"
            ),
            1e4,
        ),
        (format!("\"rope_parameters\": {{{full}}}"), 1e4),
        (
            format!("\"rope_parameters\": {{{full}}}, \"rope_local_base_freq\": 5000.0"),
            5e3,
        ),
    ] {
        assert_eq!(
            gemma(&rope),
            [(1e6, linear), (local, RopeScaling::None)],
            "{rope}"
        );
    }
}

/// If the file has no window, the family's applies; `null` means no window.
#[test]
fn windows_that_are_left_out_are_usual() {
    let window = |config: &str| {
        let read = Architecture::from_json(config).unwrap();
        read.kinds[0].spec.variant.window_left
    };
    let mistral = LLAMA.replace("\"llama\"", "\"mistral\"");
    assert_eq!(window(&mistral), Some(4095));
    let with = |value: &str| {
        let field = format!("\"sliding_window\": {value}, \"vocab_size\"");
        mistral.replace("\"vocab_size\"", &field)
    };
    assert_eq!(window(&with("null")), None);
    assert_eq!(window(&with("64")), Some(63));
    assert_eq!(
        window(&GEMMA.replace(", \"sliding_window\": 1024", "")),
        Some(4095)
    );
    assert_eq!(window(LLAMA), None);
}

#[test]
fn an_error_names_the_file_that_has_it() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), LLAMA).unwrap();
    std::fs::write(folder.path().join("generation_config.json"), "{").unwrap();
    let error = Architecture::read(folder.path()).unwrap_err().to_string();
    assert!(error.contains("generation_config.json: "), "{error}");
}
