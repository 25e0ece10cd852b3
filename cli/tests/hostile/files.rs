//! What hostile calls are given: a directory of inputs, most of them wrong.

use std::{fs, path::Path};

const HEADS: &str = r#""heads": 4, "kv_heads": 2, "head_dim": 64"#;
const ONE: &str = r#"{"q_len": 1, "kv_len": 9}"#;

/// Writes all of them.
pub fn write(directory: &Path) {
    let put =
        |name: &str, content: &[u8]| fs::write(directory.join(name), content).expect("writable");
    workloads(&put);
    traces(&put);
    descriptions(&put);
    tensors(&put);
    results(&put);
    fs::create_dir(directory.join("dir")).expect("writable");
    fs::hard_link(directory.join("ok.json"), directory.join("hard.json")).expect("a link");
    std::os::unix::fs::symlink("ok.json", directory.join("soft.json")).expect("a link");
    std::os::unix::fs::symlink("loop.json", directory.join("loop.json")).expect("a link");
}

fn workloads(put: &impl Fn(&str, &[u8])) {
    let with = |fields: &str| format!("{{{HEADS}, {fields}}}");
    let one = format!(r#""requests": [{ONE}]"#);
    put("ok.json", with(&one).as_bytes());
    put("bom.json", format!("\u{feff}{}", with(&one)).as_bytes());
    put("crlf.json", with(&one).replace(", ", ",\r\n").as_bytes());
    put("empty.json", b"");
    put("spaces.json", b" \n\t ");
    put("null.json", b"null");
    put("list.json", b"[]");
    put("text.json", b"\"text\"");
    put("binary.json", &[0, 159, 146, 150, 255, 0, 1]);
    put("utf16.json", &[255, 254, b'{', 0, b'}', 0]);
    put("half.json", &with(&one).as_bytes()[..40]);
    put("two.json", format!("{0}{0}", with(&one)).as_bytes());
    put("deep.json", "[".repeat(100_000).as_bytes());
    put("deep-object.json", "{\"a\":".repeat(100_000).as_bytes());
    put(
        "nested.json",
        format!("{}1{}", "[".repeat(120), "]".repeat(120)).as_bytes(),
    );
    put(
        "long-line.json",
        format!("{{\"name\": \"{}\", 3}}", "x".repeat(100_000)).as_bytes(),
    );
    let cases = |count: usize| vec![format!(r#"{{"name": "x", {one}}}"#); count].join(",");
    put(
        "cases.json",
        with(&format!(r#""cases": [{}]"#, cases(3))).as_bytes(),
    );
    put("no-cases.json", with(r#""cases": []"#).as_bytes());
    put(
        "case-in-case.json",
        with(r#""cases": [{"cases": []}]"#).as_bytes(),
    );
    for (name, fields) in [
        (
            "escape",
            format!(r#""name": "a\u001b[31mred\u0007\n\r\tb\u202e", {one}"#),
        ),
        (
            "long-name",
            format!(r#""name": "{}", {one}"#, "name ".repeat(2000)),
        ),
        ("empty-name", format!(r#""name": "", {one}"#)),
        ("unknown-field", format!(r#""heads2": 3, {one}"#)),
        ("none", r#""requests": []"#.to_owned()),
        (
            "count-0",
            r#""requests": [{"q_len": 1, "kv_len": 9, "count": 0}]"#.to_owned(),
        ),
        (
            "q-0",
            r#""requests": [{"q_len": 0, "kv_len": 9}]"#.to_owned(),
        ),
        (
            "all-0",
            r#""requests": [{"q_len": 0, "kv_len": 0}]"#.to_owned(),
        ),
        (
            "q-more",
            r#""requests": [{"q_len": 10, "kv_len": 9}]"#.to_owned(),
        ),
        (
            "negative",
            r#""requests": [{"q_len": -1, "kv_len": 9}]"#.to_owned(),
        ),
        (
            "fraction",
            r#""requests": [{"q_len": 1.5, "kv_len": 9}]"#.to_owned(),
        ),
        (
            "huge-number",
            r#""requests": [{"q_len": 1, "kv_len": 1e400}]"#.to_owned(),
        ),
        (
            "kv-2-29",
            r#""page_size": 128, "requests": [{"q_len": 1, "kv_len": 536870912}]"#.to_owned(),
        ),
        (
            "kv-2-31",
            r#""page_size": 128, "requests": [{"q_len": 1, "kv_len": 2147483648}]"#.to_owned(),
        ),
        (
            "kv-2-32",
            r#""page_size": 128, "requests": [{"q_len": 1, "kv_len": 4294967295}]"#.to_owned(),
        ),
        (
            "q-2-31",
            r#""page_size": 128, "requests": [{"q_len": 2147483647, "kv_len": 2147483647}]"#
                .to_owned(),
        ),
        (
            "count-2-32",
            r#""requests": [{"q_len": 1, "kv_len": 9, "count": 4294967295}]"#.to_owned(),
        ),
        (
            "count-2-20",
            r#""requests": [{"q_len": 1, "kv_len": 9, "count": 1048576}]"#.to_owned(),
        ),
        (
            "pages-2-26",
            r#""page_size": 1, "requests": [{"q_len": 1, "kv_len": 1048576, "count": 64}]"#
                .to_owned(),
        ),
        ("page-0", format!(r#""page_size": 0, {one}"#)),
        ("page-129", format!(r#""page_size": 129, {one}"#)),
        ("page-7", format!(r#""page_size": 7, {one}"#)),
        ("dtype", format!(r#""dtype": "f64", {one}"#)),
        ("f32", format!(r#""dtype": "f32", {one}"#)),
        ("f8", format!(r#""kv_dtype": "f8e4m3", {one}"#)),
        (
            "window",
            format!(r#""variant": {{"window_left": -5}}, {one}"#),
        ),
        (
            "window-0",
            format!(r#""variant": {{"window_left": 0}}, {one}"#),
        ),
        (
            "cap-nan",
            format!(r#""variant": {{"logits_soft_cap": "nan"}}, {one}"#),
        ),
        (
            "cap-negative",
            format!(r#""variant": {{"logits_soft_cap": -1}}, {one}"#),
        ),
        (
            "cap-0",
            format!(r#""variant": {{"logits_soft_cap": 0}}, {one}"#),
        ),
        (
            "scale-huge",
            format!(r#""variant": {{"sm_scale": 1e39}}, {one}"#),
        ),
        (
            "tree-short",
            r#""tree": {"nodes_per_level": [1, 2], "tokens_per_level": [3]}"#.to_owned(),
        ),
        (
            "tree-empty",
            r#""tree": {"nodes_per_level": [], "tokens_per_level": []}"#.to_owned(),
        ),
        (
            "tree-0",
            r#""tree": {"nodes_per_level": [0, 2], "tokens_per_level": [3, 4]}"#.to_owned(),
        ),
        (
            "tree-fewer",
            r#""tree": {"nodes_per_level": [4, 2], "tokens_per_level": [3, 4]}"#.to_owned(),
        ),
        (
            "tree-huge",
            r#""tree": {"nodes_per_level": [1, 4294967295], "tokens_per_level": [3, 4]}"#
                .to_owned(),
        ),
        (
            "tree-sum",
            r#""tree": {"nodes_per_level": [1, 2], "tokens_per_level": [4294967295, 4]}"#
                .to_owned(),
        ),
        (
            "tree-deep",
            format!(
                r#""tree": {{"nodes_per_level": {:?}, "tokens_per_level": {:?}}}"#,
                vec![1; 4000],
                vec![1; 4000]
            ),
        ),
    ] {
        put(&format!("{name}.json"), with(&fields).as_bytes());
    }
    for (name, heads) in [
        ("heads-0", r#""heads": 0, "kv_heads": 2, "head_dim": 64"#),
        ("kv-heads-0", r#""heads": 4, "kv_heads": 0, "head_dim": 64"#),
        ("heads-3-2", r#""heads": 3, "kv_heads": 2, "head_dim": 64"#),
        (
            "heads-max",
            r#""heads": 4294967295, "kv_heads": 4294967295, "head_dim": 64"#,
        ),
        ("dim-0", r#""heads": 4, "kv_heads": 2, "head_dim": 0"#),
        ("dim-96", r#""heads": 4, "kv_heads": 2, "head_dim": 96"#),
        (
            "dim-max",
            r#""heads": 4, "kv_heads": 2, "head_dim": 4294967295"#,
        ),
        ("no-heads", r#""kv_heads": 2, "head_dim": 64"#),
    ] {
        put(
            &format!("{name}.json"),
            format!("{{{heads}, {one}}}").as_bytes(),
        );
    }
    put(
        "pat.json",
        br#"[{"id": 1, "tree": "1,2_4", "heads": "64/8"}]"#,
    );
    put(
        "pat-huge.json",
        br#"[{"id": 1, "tree": "1,4294967295_4,4", "heads": "64/8"}]"#,
    );
    put(
        "pat-heads.json",
        br#"[{"id": 1, "tree": "1,2_4,4", "heads": "0/0"}]"#,
    );
    put(
        "pod.json",
        br#"{"fig11": {"cases": [["m", 8, 2, 0, 192, 3, 5]]}}"#,
    );
}

fn traces(put: &impl Fn(&str, &[u8])) {
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

fn descriptions(put: &impl Fn(&str, &[u8])) {
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
        ("device-m", "/decode/m", serde_json::json!([u32::MAX])),
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

/// A safetensors file: a header and data.
fn safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

/// The step of a request of one token with 3 keys on a page of 4, by its tensors' names, types and shapes.
fn step(
    metadata: &str,
    change: impl Fn(&str, &str, Vec<u64>) -> Option<(String, Vec<u64>)>,
) -> Vec<u8> {
    let (mut header, mut at) = (Vec::new(), 0);
    for (name, dtype, shape) in [
        ("q", "F32", vec![1, 2, 16]),
        ("k_cache", "F32", vec![1, 4, 1, 16]),
        ("v_cache", "F32", vec![1, 4, 1, 16]),
        ("qo_indptr", "I32", vec![2]),
        ("kv_indptr", "I32", vec![2]),
        ("kv_indices", "I32", vec![1]),
        ("kv_last_page_len", "I32", vec![1]),
    ] {
        let Some((dtype, shape)) = change(name, dtype, shape) else {
            continue;
        };
        let bytes = shape.iter().product::<u64>() * if dtype == "F16" { 2 } else { 4 };
        let end = at + bytes;
        header.push(format!(
            r#""{name}": {{"dtype": "{dtype}", "shape": {shape:?}, "data_offsets": [{at}, {end}]}}"#
        ));
        at = end;
    }
    let header = format!(
        r#"{{"__metadata__": {{{metadata}}}, {}}}"#,
        header.join(", ")
    );
    let mut file = safetensors(&header, at as usize);
    // The index arrays are the last in the file: 0 1, 0 1, 0, 3.
    let len = file.len();
    if at >= 24 {
        for (word, value) in [(5, 1), (3, 1), (1, 3)] {
            file[len - 4 * word] = value;
        }
    }
    file
}

fn tensors(put: &impl Fn(&str, &[u8])) {
    let same = |_: &str, dtype: &str, shape: Vec<u64>| Some((dtype.to_owned(), shape));
    put("ok.st", &step("", same));
    put("hnd.st", &step(r#""layout": "HND""#, same));
    for (name, metadata) in [
        ("meta-layout", r#""layout": "XYZ""#),
        ("meta-window", r#""window_left": "-5""#),
        (
            "meta-window-huge",
            r#""window_left": "99999999999999999999""#,
        ),
        ("meta-cap", r#""logits_soft_cap": "nan""#),
        ("meta-cap-negative", r#""logits_soft_cap": "-1""#),
        ("meta-scale", r#""sm_scale": "inf""#),
        ("meta-causal", r#""causal": "maybe""#),
        ("meta-alias", r#""softcap": "3""#),
    ] {
        put(&format!("{name}.st"), &step(metadata, same));
    }
    for missing in ["q", "k_cache", "qo_indptr", "kv_indices"] {
        let without =
            |name: &str, dtype: &str, shape| (name != missing).then(|| (dtype.to_owned(), shape));
        put(&format!("no-{missing}.st"), &step("", without));
    }
    let shaped = |of: &'static str, new: Vec<u64>| {
        step("", move |name, dtype, shape| {
            Some((
                dtype.to_owned(),
                if name == of { new.clone() } else { shape },
            ))
        })
    };
    put("q-flat.st", &shaped("q", vec![32]));
    put("q-empty.st", &shaped("q", vec![0, 2, 16]));
    put("q-odd.st", &shaped("q", vec![1, 3, 16]));
    put("k-pages.st", &shaped("k_cache", vec![2, 4, 1, 16]));
    put("indptr-short.st", &shaped("qo_indptr", vec![1]));
    put("indptr-long.st", &shaped("qo_indptr", vec![9]));
    put("indices-none.st", &shaped("kv_indices", vec![0]));
    let typed = |of: &'static str, new: &'static str| {
        step("", move |name, dtype, shape| {
            Some((if name == of { new } else { dtype }.to_owned(), shape))
        })
    };
    put("q-int.st", &typed("q", "I32"));
    put("v-f16.st", &typed("v_cache", "F16"));
    put("indices-float.st", &typed("kv_indices", "F32"));
    let ok = step("", same);
    put("short.st", &ok[..ok.len() - 1]);
    put("longer.st", &[&ok[..], b"x"].concat());
    put("header-only.st", &ok[..100]);
    put("seven.st", &ok[..7]);
    put("empty.st", b"");
    put("no-header.st", &u64::MAX.to_le_bytes());
    put("big-header.st", &safetensors("{", 0));
    put("not-json.st", &safetensors("this is no json", 10));
    put(
        "huge.st",
        &safetensors(
            r#"{"q": {"dtype": "F32", "shape": [4611686018427387904], "data_offsets": [0, 18446744073709551615]}}"#,
            0,
        ),
    );
    put(
        "overflow.st",
        &safetensors(
            r#"{"q": {"dtype": "F32", "shape": [4294967296, 4294967296, 4294967296], "data_offsets": [0, 16]}}"#,
            16,
        ),
    );
    put(
        "backwards.st",
        &safetensors(
            r#"{"q": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}"#,
            8,
        ),
    );
    put(
        "terabyte.st",
        &safetensors(
            r#"{"q": {"dtype": "F32", "shape": [1, 1, 1099511627776], "data_offsets": [0, 4398046511104]}}"#,
            0,
        ),
    );
}

fn results(put: &impl Fn(&str, &[u8])) {
    let stats = |median: &str, runs: &str| {
        format!(
            r#"{{"median_us": {median}, "q1_us": 1.0, "q3_us": 3.0, "min_us": 0.5, "runs": {runs}}}"#
        )
    };
    let file = |case: &str, bytes: &str, flops: &str, stats: &str| {
        format!(
            r#"{{"format": "tandem-results-1", "program": "t", "date": "d",
            "machine": {{"backend": "cpu", "name": "n\u001b[2J", "details": "x"}},
            "ceilings": {{"read_bytes_per_s": 1e9, "copy_bytes_per_s": 1e9, "flops_per_s": 1e9}}, "options": [],
            "results": [{{"case": "{case}", "implementation": "tandem", "heads": "h", "page_size": 1, "requests": 1,
            "query_tokens": 1, "bytes": {bytes}, "flops": {flops}, "plan": null, "flushed": {stats}, "warm": null,
            "errors": null, "skipped": null}}]}}"#
        )
    };
    put(
        "r.json",
        file("c", "10", "20", &stats("2.0", "9")).as_bytes(),
    );
    put(
        "r-bom.json",
        format!("\u{feff}{}", file("c", "10", "20", &stats("2.0", "9"))).as_bytes(),
    );
    put(
        "r-few.json",
        file("c", "10", "20", &stats("9.0", "3")).as_bytes(),
    );
    put(
        "r-other.json",
        file("d", "10", "20", &stats("2.0", "9")).as_bytes(),
    );
    put(
        "r-escape.json",
        file(r"c\u001b[31m", "10", "20", &stats("2.0", "9")).as_bytes(),
    );
    put(
        "r-max.json",
        file(
            "c",
            "18446744073709551615",
            "18446744073709551615",
            &stats("1e300", "9"),
        )
        .as_bytes(),
    );
    put(
        "r-tiny.json",
        file("c", "1", "18446744073709551615", &stats("1e-300", "9")).as_bytes(),
    );
    put(
        "r-0-bytes.json",
        file("c", "0", "0", &stats("2.0", "9")).as_bytes(),
    );
    put(
        "r-0-runs.json",
        file("c", "10", "20", &stats("2.0", "0")).as_bytes(),
    );
    put(
        "r-zero.json",
        file("c", "10", "20", &stats("0", "9")).as_bytes(),
    );
    put(
        "r-negative.json",
        file("c", "-10", "20", &stats("2.0", "9")).as_bytes(),
    );
    put("r-null.json", file("c", "10", "20", "null").as_bytes());
    let format = file("c", "10", "20", &stats("2.0", "9")).replace("results-1", "results-9");
    put("r-format.json", format.as_bytes());
    put("r-none.json", br#"{"format": "tandem-results-1", "program": "t", "date": "d", "machine": {"backend": "cpu",
        "name": "n", "details": "x"}, "ceilings": {"read_bytes_per_s": 1, "copy_bytes_per_s": 1, "flops_per_s": 1},
        "options": [], "results": []}"#);
}
