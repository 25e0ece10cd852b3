//! Traces, and descriptions of devices, models and machines.

pub fn traces(put: &impl Fn(&str, &[u8])) {
    put(
        "ok.csv",
        b"num_prefill_tokens,num_decode_tokens\n100,5\n200,7\n",
    );
    put(
        "bom.csv",
        "\u{feff}num_prefill_tokens,num_decode_tokens\n100,5\n".as_bytes(),
    );
    put(
        "crlf.csv",
        b"num_prefill_tokens,num_decode_tokens\r\n100,5\r\n",
    );
    put("header.csv", b"num_prefill_tokens,num_decode_tokens\n");
    put(
        "zero.csv",
        b"num_prefill_tokens,num_decode_tokens\n100,5\n0,7\n",
    );
    put(
        "zero-new.csv",
        b"num_prefill_tokens,num_decode_tokens\n100,0\n",
    );
    put(
        "negative.csv",
        b"num_prefill_tokens,num_decode_tokens\n-100,5\n",
    );
    put("nan.csv", b"num_prefill_tokens,num_decode_tokens\nnan,5\n");
    put(
        "huge.csv",
        b"num_prefill_tokens,num_decode_tokens\n1e300,5\n",
    );
    put(
        "large.csv",
        b"num_prefill_tokens,num_decode_tokens\n2147483647,2147483647\n",
    );
    put("other.csv", b"a,b\n1,2\n");
    let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
    for (name, line) in [
        ("azure", "2023-11-16 18:17:03.9799600,10,5"),
        ("month", "2023-13-46 18:17:03,10,5"),
        ("february", "2023-02-29 18:17:03,10,5"),
        ("hour", "2023-11-16 25:17:03,10,5"),
        ("year", "99999999999999999-11-16 18:17:03,10,5"),
        ("clock", "2023-11-16 nan:17:03,10,5"),
        ("azure-zero", "2023-11-16 18:17:03,0,5"),
    ] {
        put(
            &format!("{name}.csv"),
            format!("{azure}{line}\n").as_bytes(),
        );
    }
    for (name, line) in [
        (
            "mooncake",
            r#"{"timestamp": 1, "input_length": 10, "output_length": 5, "hash_ids": [1]}"#,
        ),
        (
            "mooncake-zero",
            r#"{"timestamp": 1, "input_length": 10, "output_length": 0, "hash_ids": [1]}"#,
        ),
        (
            "mooncake-few",
            r#"{"timestamp": 1, "input_length": 9999, "output_length": 5, "hash_ids": [1]}"#,
        ),
        (
            "mooncake-max",
            r#"{"timestamp": 1, "input_length": 4294967295, "output_length": 4294967295}"#,
        ),
        (
            "mooncake-time",
            r#"{"timestamp": -1e308, "input_length": 10, "output_length": 5}"#,
        ),
        (
            "mooncake-nan",
            r#"{"timestamp": "nan", "input_length": 10, "output_length": 5}"#,
        ),
        ("mooncake-half", r#"{"timestamp": 1, "input_le"#),
    ] {
        put(&format!("{name}.jsonl"), format!("{line}\n").as_bytes());
    }
}

pub fn write(put: &impl Fn(&str, &[u8])) {
    use tandem_attn::plan::DeviceDescription;
    use tandem_schedule::{Hardware, ModelDescription};
    let device = serde_json::to_value(DeviceDescription::named("h200").unwrap()).unwrap();
    let model = serde_json::to_value(ModelDescription::named("yi-6b").unwrap()).unwrap();
    let machine = serde_json::to_value(Hardware::named("h200").unwrap()).unwrap();
    let changed = |of: &serde_json::Value, path: &str, value: serde_json::Value| {
        let mut of = of.clone();
        *of.pointer_mut(path).expect("a field") = value;
        of.to_string()
    };
    put("device.json", device.to_string().as_bytes());
    for (name, path, value) in [
        ("device-sms-0", "/sms", serde_json::json!(0)),
        ("device-sms-max", "/sms", serde_json::json!(u32::MAX)),
        ("device-sms-many", "/sms", serde_json::json!(65536)),
        (
            "device-ctas",
            "/decode/ctas_per_sm",
            serde_json::json!(u32::MAX),
        ),
        (
            "device-ctas-prefill",
            "/prefill/ctas_per_sm",
            serde_json::json!(u32::MAX),
        ),
        (
            "device-share",
            "/decode/tiles/0/share",
            serde_json::json!(u32::MAX),
        ),
        ("device-slow", "/flops_per_ns", serde_json::json!(1e-300)),
        (
            "device-rows",
            "/prefill/by_q_len/0/rows",
            serde_json::json!(0),
        ),
        (
            "device-loss",
            "/pod/streams_loss",
            serde_json::json!(-1e300),
        ),
    ] {
        put(
            &format!("{name}.json"),
            changed(&device, path, value).as_bytes(),
        );
    }
    put("model.json", model.to_string().as_bytes());
    for (name, path, value) in [
        ("model-layers-0", "/layers", serde_json::json!(0)),
        ("model-layers", "/layers", serde_json::json!(u32::MAX)),
        ("model-hidden", "/hidden", serde_json::json!(u32::MAX)),
        ("model-ffn", "/ffn", serde_json::json!(u32::MAX)),
        ("model-vocab", "/vocab", serde_json::json!(u32::MAX)),
        (
            "model-matrices",
            "/ffn_matrices",
            serde_json::json!(u32::MAX),
        ),
        ("model-dim", "/head_dim", serde_json::json!(u32::MAX)),
        ("model-heads", "/q_heads", serde_json::json!(1 << 24)),
    ] {
        put(
            &format!("{name}.json"),
            changed(&model, path, value).as_bytes(),
        );
    }
    put("machine.json", machine.to_string().as_bytes());
    for (name, path, value) in [
        (
            "machine-memory",
            "/memory_bytes",
            serde_json::json!(u64::MAX),
        ),
        ("machine-memory-0", "/memory_bytes", serde_json::json!(0)),
        ("machine-tile", "/gemm/tiles", serde_json::json!([u32::MAX])),
        (
            "machine-slow",
            "/gemm/flops_per_ns",
            serde_json::json!(1e-300),
        ),
        (
            "machine-latency",
            "/link/latency_ns",
            serde_json::json!(-1e300),
        ),
    ] {
        put(
            &format!("{name}.json"),
            changed(&machine, path, value).as_bytes(),
        );
    }
    put("correction.json", br#"{"linear": [[1, -1]]}"#);
}
