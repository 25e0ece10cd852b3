//! Workloads, few of them sound.

const HEADS: &str = r#""heads": 4, "kv_heads": 2, "head_dim": 64"#;
const ONE: &str = r#"{"q_len": 1, "kv_len": 9}"#;

pub fn write(put: &impl Fn(&str, &[u8])) {
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
            "q-count-2-65-trees",
            format!(
                r#""requests": [{0}, {0}, {0}, {{"q_len": 8, "kv_len": 9, "branches": 2}}]"#,
                r#"{"q_len": 4294967295, "kv_len": 4294967295, "count": 4294967295}"#
            ),
        ),
        (
            "q-2-31-trees",
            r#""requests": [{"q_len": 2147483647, "kv_len": 2147483647}, {"q_len": 8, "kv_len": 9, "branches": 2}]"#
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
        (
            "kv-400000",
            r#""requests": [{"q_len": 1, "kv_len": 400000}]"#.to_owned(),
        ),
        ("page-0", format!(r#""page_size": 0, {one}"#)),
        ("page-4097", format!(r#""page_size": 4097, {one}"#)),
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
        ("dim-272", r#""heads": 4, "kv_heads": 2, "head_dim": 272"#),
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
    for (name, levels, requests) in [
        ("levels-0", r#"{"N": [0, 5], "C": [4, 4]}"#, "2"),
        ("levels-none", r#"{"N": [], "C": []}"#, "2"),
        ("levels-short", r#"{"N": [1, 5], "C": [4]}"#, "2"),
        ("levels-fewer", r#"{"N": [5, 2], "C": [4, 5]}"#, "2"),
        ("relay-0", r#"{"N": [1, 5], "C": [4, 5]}"#, "0"),
    ] {
        let file = format!(
            r#"{{"fasttree_kernel_bench": [{levels}], "fasttree_heads": [[4, 2]], "pat_unit_test_trees": [],
                "pat_unit_test_heads": [4, 2], "relay_kernel_bench":
                {{"num_reqs": [{requests}], "context_len": [9], "prefix_len": [32], "heads": [4, 2]}}}}"#
        );
        put(&format!("{name}.json"), file.as_bytes());
    }
    put(
        "pod.json",
        br#"{"fig11": {"cases": [["m", 8, 2, 0, 192, 3, 5]]}}"#,
    );
}
