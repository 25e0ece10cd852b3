//! `tandem attend` against attention computed here, in f64, from the very tensors of the file.

mod common;

use std::{collections::HashMap, path::Path};

use common::{files, run};
use half::bf16;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use tandem_attn::tensor::{Element, F8E4M3};

const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const DIM: usize = 32;
const PAGE: usize = 4;
const PAGES: usize = 20;

/// Requests as query tokens, keys and pages; the second shares pages with the first, the third is empty.
const REQUESTS: [(usize, usize, &[usize]); 4] = [
    (5, 18, &[7, 3, 11, 0, 19]),
    (1, 13, &[7, 3, 11, 2]),
    (0, 0, &[]),
    (3, 3, &[5]),
];

#[derive(Clone, Copy, PartialEq)]
enum Layout {
    Nhd,
    Hnd,
}

/// A file to be, as tensors and metadata.
#[derive(Clone)]
struct Input {
    tensors: HashMap<&'static str, (Dtype, Vec<usize>, Vec<u8>)>,
    metadata: HashMap<String, String>,
}

impl Input {
    fn write(&self, path: &Path) {
        let views = self.tensors.iter().map(|(name, (dtype, shape, bytes))| {
            (
                *name,
                TensorView::new(*dtype, shape.clone(), bytes).expect("a sound tensor"),
            )
        });
        let metadata = Some(self.metadata.clone());
        std::fs::write(path, safetensors::serialize(views, metadata).unwrap()).unwrap();
    }

    fn with_metadata(mut self, pairs: &[(&str, &str)]) -> Self {
        let pairs = pairs
            .iter()
            .map(|&(name, value)| (name.to_owned(), value.to_owned()));
        self.metadata.extend(pairs);
        self
    }
}

fn bytes_of(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        _ => values
            .iter()
            .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
            .collect(),
    }
}

fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(seed);
    // bf16 holds all of these exactly.
    (0..len)
        .map(|_| f32::from(random.i8(-100..100)) / 64.0)
        .collect()
}

/// `q`, keys and values as numbers.
struct Numbers {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

fn input(layout: Layout, dtype: Dtype) -> (Input, Numbers) {
    let tokens: usize = REQUESTS.iter().map(|request| request.0).sum();
    let pool = PAGES * PAGE * KV_HEADS * DIM;
    let numbers = Numbers {
        q: numbers(tokens * HEADS * DIM, 1),
        k: numbers(pool, 2),
        v: numbers(pool, 3),
    };
    let cache = match layout {
        Layout::Nhd => vec![PAGES, PAGE, KV_HEADS, DIM],
        Layout::Hnd => vec![PAGES, KV_HEADS, PAGE, DIM],
    };
    let ints = |values: Vec<usize>| {
        let bytes = values
            .iter()
            .flat_map(|&x| (x as i32).to_le_bytes())
            .collect();
        (Dtype::I32, vec![values.len()], bytes)
    };
    let running = |of: fn(&(usize, usize, &[usize])) -> usize| {
        let mut sums = vec![0];
        sums.extend(REQUESTS.iter().scan(0, |sum, request| {
            *sum += of(request);
            Some(*sum)
        }));
        sums
    };
    let last = REQUESTS
        .iter()
        .map(|&(_, keys, pages)| keys - pages.len().saturating_sub(1) * PAGE);
    let tensors = HashMap::from([
        (
            "q",
            (dtype, vec![tokens, HEADS, DIM], bytes_of(&numbers.q, dtype)),
        ),
        (
            "k_cache",
            (dtype, cache.clone(), bytes_of(&numbers.k, dtype)),
        ),
        ("v_cache", (dtype, cache, bytes_of(&numbers.v, dtype))),
        ("qo_indptr", ints(running(|request| request.0))),
        ("kv_indptr", ints(running(|request| request.2.len()))),
        (
            "kv_indices",
            ints(
                REQUESTS
                    .iter()
                    .flat_map(|request| request.2.to_vec())
                    .collect(),
            ),
        ),
        ("kv_last_page_len", ints(last.collect())),
    ]);
    let metadata = match layout {
        Layout::Nhd => HashMap::new(),
        Layout::Hnd => HashMap::from([("layout".to_owned(), "HND".to_owned())]),
    };
    (Input { tensors, metadata }, numbers)
}

/// What the metadata may change.
#[derive(Clone, Copy)]
struct Variant {
    causal: bool,
    window_left: Option<usize>,
    cap: Option<f64>,
    scale: f64,
    sinks: Option<[f64; HEADS]>,
    slopes: Option<[f64; HEADS]>,
    /// Factors of keys and of values, by request.
    by_request: [[[f64; KV_HEADS]; REQUESTS.len()]; 2],
}

/// Outputs and LSEs by the definition: plain loops over the numbers of the file.
fn attention(layout: Layout, numbers: &Numbers, variant: Variant) -> (Vec<f64>, Vec<f64>) {
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    let mut token = 0;
    for (request, (queries, keys, pages)) in REQUESTS.into_iter().enumerate() {
        for query in 0..queries {
            let position = keys - queries + query;
            for head in 0..HEADS {
                let kv_head = head / (HEADS / KV_HEADS);
                let [of_keys, of_values] = variant.by_request.map(|of| of[request][kv_head]);
                let row = |key: usize| {
                    let (page, offset) = (pages[key / PAGE], key % PAGE);
                    let index = match layout {
                        Layout::Nhd => (page * PAGE + offset) * KV_HEADS + kv_head,
                        Layout::Hnd => (page * KV_HEADS + kv_head) * PAGE + offset,
                    };
                    index * DIM..(index + 1) * DIM
                };
                let q = &numbers.q[(token * HEADS + head) * DIM..][..DIM];
                let seen: Vec<usize> = (0..keys)
                    .filter(|&key| !variant.causal || key <= position)
                    .filter(|&key| variant.window_left.is_none_or(|w| key + w >= position))
                    .collect();
                let logits: Vec<f64> = seen
                    .iter()
                    .map(|&key| {
                        let k = &numbers.k[row(key)];
                        let dot: f64 = q
                            .iter()
                            .zip(k)
                            .map(|(&q, &k)| f64::from(q) * f64::from(k))
                            .sum();
                        let distance = position as f64 - key as f64;
                        let bias = variant.slopes.map_or(0.0, |slopes| slopes[head] * distance);
                        let logit = dot * of_keys * variant.scale - bias;
                        variant.cap.map_or(logit, |cap| cap * (logit / cap).tanh())
                    })
                    .collect();
                let of_sink = variant.sinks.map_or(0.0, |sinks| sinks[head].exp());
                let sum = of_sink + logits.iter().map(|logit| logit.exp()).sum::<f64>();
                for dim in 0..DIM {
                    let terms = seen.iter().zip(&logits);
                    let total: f64 = terms
                        .map(|(&key, logit)| logit.exp() * f64::from(numbers.v[row(key)][dim]))
                        .sum();
                    out.push(of_values * total / sum);
                }
                lse.push(sum.ln());
            }
            token += 1;
        }
    }
    (out, lse)
}

fn check(layout: Layout, dtype: Dtype, metadata: &[(&str, &str)], variant: Variant) {
    let (input, numbers) = input(layout, dtype);
    check_file(
        layout,
        dtype,
        &input.with_metadata(metadata),
        &numbers,
        variant,
    );
}

/// What the command computes from a file is attention over these numbers.
fn check_file(layout: Layout, dtype: Dtype, input: &Input, numbers: &Numbers, variant: Variant) {
    let directory = tempfile::tempdir().unwrap();
    input.write(&directory.path().join("in.safetensors"));
    let said = run(
        directory.path(),
        &[
            "attend",
            "--input",
            "in.safetensors",
            "--output",
            "out.safetensors",
        ],
    );
    assert_eq!(said.code, 0, "{}", said.stderr);
    assert!(!said.stdout.contains("not read"), "{}", said.stdout);
    let bytes = std::fs::read(directory.path().join("out.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (right_out, right_lse) = attention(layout, numbers, variant);
    let o = file.tensor("o").unwrap();
    assert_eq!((o.dtype(), o.shape()), (dtype, &[9, HEADS, DIM][..]));
    let got: Vec<f64> = match dtype {
        Dtype::F32 => o
            .data()
            .chunks_exact(4)
            .map(|x| f32::from_le_bytes(x.try_into().unwrap()).into())
            .collect(),
        _ => o
            .data()
            .chunks_exact(2)
            .map(|x| bf16::from_le_bytes(x.try_into().unwrap()).to_f64())
            .collect(),
    };
    let tolerance = if dtype == Dtype::F32 { 2e-6 } else { 6e-3 };
    for (index, (got, right)) in got.iter().zip(&right_out).enumerate() {
        assert!(
            (got - right).abs() < tolerance,
            "o[{index}] is {got}, right is {right}"
        );
    }
    let lse = file.tensor("lse").unwrap();
    assert_eq!((lse.dtype(), lse.shape()), (Dtype::F32, &[9, HEADS][..]));
    for (index, (got, right)) in lse.data().chunks_exact(4).zip(&right_lse).enumerate() {
        let got = f64::from(f32::from_le_bytes(got.try_into().unwrap()));
        assert!(
            (got - right).abs() < 1e-5,
            "lse[{index}] is {got}, right is {right}"
        );
    }
}

fn plain() -> Variant {
    Variant {
        causal: true,
        window_left: None,
        cap: None,
        scale: 1.0 / (DIM as f64).sqrt(),
        sinks: None,
        slopes: None,
        by_request: [[[1.0; KV_HEADS]; REQUESTS.len()]; 2],
    }
}

#[test]
fn both_layouts_are_right() {
    for layout in [Layout::Nhd, Layout::Hnd] {
        for dtype in [Dtype::F32, Dtype::BF16] {
            check(layout, dtype, &[], plain());
        }
    }
}

#[test]
fn metadata_is_heeded() {
    for layout in [Layout::Nhd, Layout::Hnd] {
        check(
            layout,
            Dtype::F32,
            &[("causal", "false")],
            Variant {
                causal: false,
                ..plain()
            },
        );
        check(
            layout,
            Dtype::F32,
            &[("window_left", "4")],
            Variant {
                window_left: Some(4),
                ..plain()
            },
        );
        check(
            layout,
            Dtype::F32,
            &[
                ("window_left", "-1"),
                ("format", "pt"),
                ("pos_encoding_mode", "NONE"),
                ("rope_theta", "1e4"),
                ("window_right", "-1"),
                ("k_scale", "1.0"),
                ("v_scale", "NONE"),
            ],
            plain(),
        );
        check(
            layout,
            Dtype::F32,
            &[("pos_encoding_mode", "0"), ("rope_scale", "2")],
            plain(),
        );
        check(
            layout,
            Dtype::F32,
            &[("logits_soft_cap", "2.5")],
            Variant {
                cap: Some(2.5),
                ..plain()
            },
        );
        check(
            layout,
            Dtype::F32,
            &[("sm_scale", "0.5")],
            Variant {
                scale: 0.5,
                ..plain()
            },
        );
    }
}

const SINKS: [f32; HEADS] = [0.5, -2.0, 3.0, 1.0, 0.0, -0.25];
const SLOPES: [f32; HEADS] = [0.5, 0.25, 0.125, 1.0, 0.0, 0.75];

/// A tensor in f32.
fn floats(values: &[f32]) -> (Dtype, Vec<usize>, Vec<u8>) {
    (Dtype::F32, vec![values.len()], bytes_of(values, Dtype::F32))
}

#[test]
fn sinks_and_slopes_are_heeded() {
    let sinks = Some(SINKS.map(f64::from));
    let slopes = Some(SLOPES.map(f64::from));
    for (layout, dtype) in [(Layout::Nhd, Dtype::F32), (Layout::Hnd, Dtype::BF16)] {
        for (has_sinks, has_slopes) in [(true, false), (false, true), (true, true)] {
            let (mut file, numbers) = input(layout, dtype);
            let mut variant = plain();
            if has_sinks {
                file.tensors.insert("sinks", floats(&SINKS));
                variant.sinks = sinks;
            }
            if has_slopes {
                // bf16 holds them exactly.
                let (_, shape, _) = floats(&SLOPES);
                let slopes_16 = (Dtype::BF16, shape, bytes_of(&SLOPES, Dtype::BF16));
                file.tensors.insert("alibi_slopes", slopes_16);
                variant.slopes = slopes;
            }
            check_file(layout, dtype, &file, &numbers, variant);
        }
    }
}

/// The file with 8-bit keys and values, and the numbers that these are.
fn in_8_bits(layout: Layout) -> (Input, Numbers) {
    let (mut file, mut numbers) = input(layout, Dtype::F32);
    for (name, values) in [("k_cache", &mut numbers.k), ("v_cache", &mut numbers.v)] {
        let stored: Vec<F8E4M3> = values.iter().map(|&x| F8E4M3::from_f32(x)).collect();
        *values = stored.iter().map(|x| x.to_f32()).collect();
        let (dtype, _, bytes) = file.tensors.get_mut(name).unwrap();
        (*dtype, *bytes) = (Dtype::F8_E4M3, stored.iter().map(|x| x.0).collect());
    }
    (file, numbers)
}

/// Multiplies the keys or values of each KV head.
fn multiply(layout: Layout, values: &mut [f32], scales: [f32; KV_HEADS]) {
    for (row, values) in values.chunks_exact_mut(DIM).enumerate() {
        let head = match layout {
            Layout::Nhd => row % KV_HEADS,
            Layout::Hnd => row / PAGE % KV_HEADS,
        };
        values.iter_mut().for_each(|x| *x *= scales[head]);
    }
}

#[test]
fn scales_are_heeded() {
    for layout in [Layout::Nhd, Layout::Hnd] {
        let check =
            |tensors: &[(&'static str, &[f32])], metadata: &[(&str, &str)], scales: [_; 2]| {
                let (file, mut numbers) = in_8_bits(layout);
                let mut file = file.with_metadata(metadata);
                for &(name, values) in tensors {
                    file.tensors.insert(name, floats(values));
                }
                multiply(layout, &mut numbers.k, scales[0]);
                multiply(layout, &mut numbers.v, scales[1]);
                check_file(layout, Dtype::F32, &file, &numbers, plain());
            };
        check(&[], &[], [[1.0; 2]; 2]);
        check(
            &[],
            &[("k_scale", "0.5"), ("v_scale", "0.25")],
            [[0.5; 2], [0.25; 2]],
        );
        check(&[("k_scale", &[1.5])], &[], [[1.5; 2], [1.0; 2]]);
        check(
            &[("v_scale", &[0.5, 0.75])],
            &[("k_scale", "2")],
            [[2.0; 2], [0.5, 0.75]],
        );
        check(
            &[("k_scale", &[0.25, 2.0]), ("v_scale", &[0.5, 0.125])],
            &[],
            [[0.25, 2.0], [0.5, 0.125]],
        );
    }
    // Of 16 bits, a scale of 1 changes nothing.
    let (mut file, numbers) = input(Layout::Nhd, Dtype::BF16);
    file.tensors.insert("k_scale", floats(&[1.0, 1.0]));
    check_file(Layout::Nhd, Dtype::BF16, &file, &numbers, plain());
}

/// Scales of requests, which share pages, and of tokens, also beside fewer scales of the others.
#[test]
fn scales_of_requests_and_of_tokens_are_heeded() {
    let powers = |count: usize, seed: u64| -> Vec<f32> {
        let mut random = fastrand::Rng::with_seed(seed);
        (0..count)
            .map(|_| [0.25, 0.5, 1.0, 1.5][random.usize(..4)])
            .collect()
    };
    let tensor = |shape: &[usize], values: &[f32]| {
        (Dtype::F32, shape.to_vec(), bytes_of(values, Dtype::F32))
    };
    for layout in [Layout::Nhd, Layout::Hnd] {
        let by_request = [REQUESTS.len(), KV_HEADS];
        let of_requests = powers(REQUESTS.len() * KV_HEADS, 5);
        let (mut file, numbers) = in_8_bits(layout);
        file.tensors
            .insert("k_scale", tensor(&by_request, &of_requests));
        file.tensors.insert("v_scale", floats(&[0.5, 2.0]));
        let mut variant = plain();
        for request in 0..REQUESTS.len() {
            for head in 0..KV_HEADS {
                variant.by_request[0][request][head] =
                    of_requests[request * KV_HEADS + head].into();
                variant.by_request[1][request][head] = [0.5, 2.0][head];
            }
        }
        check_file(layout, Dtype::F32, &file, &numbers, variant);

        let by_token = match layout {
            Layout::Nhd => [PAGES, PAGE, KV_HEADS],
            Layout::Hnd => [PAGES, KV_HEADS, PAGE],
        };
        for of_keys in [true, false] {
            let (mut file, mut numbers) = in_8_bits(layout);
            let mut of_tokens = powers(PAGES * PAGE * KV_HEADS, 6);
            let (by_token_name, by_head_name) = match of_keys {
                true => ("k_scale", "v_scale"),
                false => ("v_scale", "k_scale"),
            };
            let (by_token_numbers, by_head_numbers) = match of_keys {
                true => (&mut numbers.k, &mut numbers.v),
                false => (&mut numbers.v, &mut numbers.k),
            };
            for (row, scale) in by_token_numbers.chunks_exact_mut(DIM).zip(&of_tokens) {
                row.iter_mut().for_each(|x| *x *= scale);
            }
            multiply(layout, by_head_numbers, [0.5, 2.0]);
            // Page 1 is of no request, and of page 5 the last token is of none.
            let of_page = PAGE * KV_HEADS;
            of_tokens[of_page..2 * of_page].fill(f32::NAN);
            of_tokens[5 * of_page + of_page - 1] = 0.0;
            file.tensors
                .insert(by_token_name, tensor(&by_token, &of_tokens));
            file.tensors.insert(by_head_name, floats(&[0.5, 2.0]));
            check_file(layout, Dtype::F32, &file, &numbers, plain());
        }
    }
}

/// Other programs keep their own results in the file.
#[test]
fn tensors_and_metadata_that_are_not_read_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let (mut input, _) = input(Layout::Nhd, Dtype::F32);
    for name in ["expected", "kv_scales"] {
        let tensor = (Dtype::F32, vec![1], vec![0; 4]);
        input.tensors.insert(name, tensor);
    }
    let input = input.with_metadata(&[("format", "pt"), ("casual", "false")]);
    input.write(&directory.path().join("in.safetensors"));
    let call = "attend --input in.safetensors --output out.safetensors";
    let said = run(
        directory.path(),
        &call.split_whitespace().collect::<Vec<_>>(),
    );
    assert_eq!(said.code, 0, "{}", said.stderr);
    assert!(
        said.stdout.ends_with(
            "\n2 tensors of the input not read: expected, kv_scales\n1 name of the metadata not read: casual\n"
        ),
        "{}",
        said.stdout
    );
}

/// A change to a sound file, and what the message says about it.
type Slip = (fn(&mut Input), &'static str);

#[test]
fn bad_files_get_one_line_and_write_nothing() {
    fn ints(input: &mut Input, name: &'static str, change: fn(&mut [i32])) {
        let bytes = &mut input.tensors.get_mut(name).unwrap().2;
        let mut values: Vec<i32> = bytes
            .chunks_exact(4)
            .map(|x| i32::from_le_bytes(x.try_into().unwrap()))
            .collect();
        change(&mut values);
        *bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    }
    fn note(input: &mut Input, name: &str, value: &str) {
        input.metadata.insert(name.to_owned(), value.to_owned());
    }
    let slips: [Slip; 44] = [
        (
            |i| drop(i.tensors.remove("kv_indices")),
            "there is no tensor \"kv_indices\"",
        ),
        (
            |i| i.tensors.get_mut("q").unwrap().1 = vec![9 * HEADS, DIM],
            "q has shape [54, 32]",
        ),
        (
            |i| i.tensors.get_mut("q").unwrap().0 = Dtype::I32,
            "q is I32",
        ),
        (
            |i| i.tensors.get_mut("kv_indices").unwrap().0 = Dtype::F32,
            "kv_indices is F32",
        ),
        (
            |i| i.tensors.get_mut("v_cache").unwrap().1 = vec![PAGES, KV_HEADS, PAGE, DIM],
            "v_cache 20 of 2",
        ),
        (
            |i| i.tensors.get_mut("k_cache").unwrap().1 = vec![PAGES, PAGE, 2 * KV_HEADS, DIM / 2],
            "32 and k_cache of 16",
        ),
        (
            |i| ints(i, "qo_indptr", |x| x[4] = 8),
            "qo_indptr ends at 8 and q has 9",
        ),
        (
            |i| ints(i, "qo_indptr", |x| x[1] = 7),
            "qo_indptr[2] is 6, below the 7",
        ),
        (
            |i| {
                let indptr = i.tensors.get_mut("qo_indptr").unwrap();
                indptr.1 = vec![4];
                drop(indptr.2.drain(12..16));
            },
            "cut into 3 requests, but its table has 4: give one entry more than requests in qo_indptr and in kv_indptr",
        ),
        (
            |i| ints(i, "kv_indices", |x| x[2] = 20),
            "page id 20 at kv_indices[2] is outside the pool of 20",
        ),
        (
            |i| ints(i, "kv_indices", |x| x[2] = -1),
            "kv_indices[2] is -1",
        ),
        (
            |i| ints(i, "kv_last_page_len", |x| x[3] = 1),
            "3 queries and only 1 keys",
        ),
        (|i| note(i, "layout", "NDH"), "metadata layout is \"NDH\""),
        (
            |i| note(i, "sm_scale", "big"),
            "metadata sm_scale is \"big\"",
        ),
        (|i| note(i, "Window-Left", "3"), "write \"window_left\""),
        (|i| note(i, "softcap", "3"), "write \"logits_soft_cap\""),
        (
            |i| note(i, "k_scale", "0.5"),
            "k_scale is there and k_cache is F32: only 8-bit keys and values have scales",
        ),
        (
            |i| note(i, "v_scale", "one"),
            "metadata v_scale is \"one\": give a number",
        ),
        (
            |i| note(i, "v_scale", "-1"),
            "v_scale has -1: give positive numbers",
        ),
        (|i| note(i, "K-Scale", "2"), "write \"k_scale\""),
        (|i| note(i, "q_scale", "2"), "q_scale is there"),
        (
            |i| {
                note(i, "k_scale", "2");
                drop(i.tensors.insert("k_scale", floats(&[2.0])));
            },
            "k_scale is there as a tensor and in the metadata",
        ),
        (
            |i| {
                let by_request = (Dtype::F32, vec![4, 2], bytes_of(&[2.0; 8], Dtype::F32));
                drop(i.tensors.insert("k_scale", by_request));
                let bytes = bytes_of(&[2.0; PAGES * PAGE * 2], Dtype::F32);
                let by_token = (Dtype::F32, vec![PAGES, PAGE, 2], bytes);
                drop(i.tensors.insert("v_scale", by_token));
                for name in ["k_cache", "v_cache"] {
                    let (dtype, _, bytes) = i.tensors.get_mut(name).unwrap();
                    (*dtype, *bytes) = (Dtype::F8_E4M3, vec![0; bytes.len() / 4]);
                }
            },
            "give both alike",
        ),
        (
            |i| {
                let bytes = bytes_of(&[f32::INFINITY; PAGES * PAGE * 2], Dtype::F32);
                let by_token = (Dtype::F32, vec![PAGES, PAGE, 2], bytes);
                drop(i.tensors.insert("v_scale", by_token));
            },
            "v_scale has inf: give finite numbers",
        ),
        (
            |i| drop(i.tensors.insert("k_scale", floats(&[2.0; 3]))),
            "k_scale has shape [3]: give one, or one for each KV head ([2]), for each request and head ([4, 2]) or for each token and head ([20, 4, 2])",
        ),
        (
            |i| drop(i.tensors.insert("sinks", floats(&[3e38; HEADS]))),
            "give numbers of at most 2.3e38",
        ),
        // With queries of zeros these gave outputs that are no numbers.
        (
            |i| note(i, "sm_scale", "3e38"),
            "times log2 e it must be finite",
        ),
        (
            |i| note(i, "logits_soft_cap", "1e-39"),
            "logits_soft_cap is 1e-39: give 1.2e-38 to 2.3e38",
        ),
        (
            |i| {
                note(i, "sm_scale", "1e3");
                note(i, "logits_soft_cap", "2e-38");
            },
            "no less than sm_scale / 1.1e38",
        ),
        (
            |i| drop(i.tensors.insert("alibi_slopes", floats(&[-1e38; HEADS]))),
            "give numbers of at most 1e28",
        ),
        (
            |i| drop(i.tensors.insert("alibi_slopes", floats(&[f32::NAN; HEADS]))),
            "alibi_slopes has NaN: give finite numbers",
        ),
        (
            |i| {
                drop(
                    i.tensors
                        .insert("sinks", (Dtype::I32, vec![HEADS], vec![0; 4 * HEADS])),
                )
            },
            "sinks is I32: convert it to F32",
        ),
        (
            |i| {
                note(i, "logits_soft_cap", "5");
                drop(i.tensors.insert("alibi_slopes", floats(&SLOPES)));
            },
            "alibi_slopes and logits_soft_cap are there",
        ),
        (
            |i| note(i, "pos_encoding_mode", "ALIBI"),
            "computed without it",
        ),
        // FlashInfer's numbers of the modes; 1 is ROPE_LLAMA.
        (
            |i| note(i, "pos_encoding_mode", "1"),
            "pos_encoding_mode is there",
        ),
        (|i| note(i, "custom_mask", "1"), "custom_mask is there"),
        (|i| note(i, "sinks", "1"), "sinks is in the metadata"),
        (
            |i| note(i, "alibi_slopes", "1"),
            "alibi_slopes is in the metadata",
        ),
        (|i| note(i, "rope_theta", "1e4"), "rope_theta is there"),
        (|i| note(i, "window_right", "0"), "window_right is there"),
        (
            |i| {
                drop(
                    i.tensors
                        .insert("sinks", (Dtype::F32, vec![5], vec![0; 20])),
                )
            },
            "sinks has shape [5]: give one for each query head",
        ),
        (
            |i| {
                drop(
                    i.tensors
                        .insert("attn_mask", (Dtype::F32, vec![1], vec![0; 4])),
                )
            },
            "attn_mask is there",
        ),
        (
            |i| {
                let cache = i.tensors.remove("k_cache").unwrap();
                drop(i.tensors.insert("ckv_cache", cache));
            },
            "ckv_cache is there, a tensor of latent attention",
        ),
        (
            |i| {
                let indptr = i.tensors.get_mut("qo_indptr").unwrap();
                (indptr.1, indptr.2) = (vec![0], Vec::new());
            },
            "qo_indptr is empty",
        ),
    ];
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("in.safetensors");
    let attend = [
        "attend",
        "--input",
        "in.safetensors",
        "--output",
        "out.safetensors",
    ];
    let expect = |message: &str| {
        let said = run(directory.path(), &attend);
        assert_eq!(said.code, 2, "{message}: {}", said.stderr);
        assert!(
            said.stderr.starts_with("error: in.safetensors: "),
            "{}",
            said.stderr
        );
        assert!(said.stderr.contains(message), "{message}: {}", said.stderr);
        assert_eq!(said.stderr.trim_end().lines().count(), 1, "{}", said.stderr);
        assert_eq!(files(directory.path()), ["in.safetensors"]);
    };
    for (slip, message) in slips {
        let (mut input, _) = input(Layout::Nhd, Dtype::F32);
        slip(&mut input);
        input.write(&path);
        expect(message);
    }
    let (input, _) = input(Layout::Nhd, Dtype::F32);
    input.write(&path);
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    expect("not a whole safetensors file");
    std::fs::write(&path, b"{}").unwrap();
    expect("not a whole safetensors file");
}

#[test]
fn the_emulator_is_refused_for_what_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("in.safetensors");
    input(Layout::Nhd, Dtype::F32).0.write(&file);
    let attend = "attend --input in.safetensors --output out.safetensors --backend emulated";
    let said = run(directory.path(), &attend.split(' ').collect::<Vec<_>>());
    assert_eq!(said.code, 2);
    let says = "only `tandem trace`";
    assert!(said.stderr.contains(says), "{}", said.stderr);
    assert_eq!(files(directory.path()), ["in.safetensors"]);
}
