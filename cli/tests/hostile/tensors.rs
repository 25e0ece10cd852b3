//! Files of tensors, whole and broken.

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

pub fn write(put: &impl Fn(&str, &[u8])) {
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
