//! Small batches that run each family of kernels.

use std::{borrow::Cow, cell::RefCell};

use tandem_attn::{
    exec::gpu::{Arch, Gpu},
    plan::{MergeMode, PlanOptions, SplitMode, Tile, pod::PodMode},
    problem::{Dtype, KvLayout, Spec},
};

use crate::{
    common::{self, Rng},
    launches::{self, attention::Planned},
};

/// A batch and its plan options.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub name: &'static str,
    kv_heads: u32,
    group: u32,
    dim: u32,
    /// Elements of a value.
    dim_v: u32,
    page: u32,
    /// Numbers of keys and queries of each request.
    requests: Cow<'static, [(u32, u32)]>,
    options: PlanOptions,
    arch: Option<Arch>,
    soft_cap: Option<f32>,
    /// Heads of 576 elements whose values are the first 512 elements of the keys.
    latent: bool,
    window_left: Option<u32>,
    /// As in [`Planned`].
    shared: usize,
    trees: bool,
    seed: u64,
}

impl Scenario {
    /// Another batch for the same kernel: requests that end at edges of pages and blocks or elsewhere, few and many
    /// keys, shared prefixes, windows, masks of single tokens, various splits.
    pub fn another(&self, seed: u64) -> Self {
        let rng = RefCell::new(Rng(seed));
        let draw = |from: &[u32]| from[rng.borrow_mut().below(from.len())];
        let numbers: Vec<u32> = (1..300).collect();
        let prefills = self.requests.iter().any(|&(_, queries)| queries > 8);
        let most_queries = (8 / self.group).max(1);
        // A wide tile of one token, or of several that share a prefix.
        let wide = self.kv_heads == 2 && self.group == 40;
        let tile = wide.then_some(Tile { m: 64, n: 128 });
        // Many requests with a long shared prefix: in tiles whose rows see different keys, if there are kernels for it.
        let joint = !prefills && !self.latent && draw(&[0, 0, 1]) == 1;
        let count = if joint { 12 } else { draw(&[2, 3, 5]) };
        let requests: Vec<(u32, u32)> = (0..count)
            .map(|_| match prefills && draw(&[0, 1]) == 1 {
                true => {
                    let queries = draw(&[9, 64, 65, 127, 128, 129, draw(&numbers).max(9)]);
                    (
                        queries + draw(&[0, 1, 16, 64, 129, draw(&numbers)]),
                        queries,
                    )
                }
                false if joint => (draw(&numbers) / 4 + 2, draw(&[1, 2]).min(most_queries)),
                false => {
                    let queries = draw(&[1, 2]).min(most_queries);
                    let edge = draw(&[1, 16, 17, 64, 65, 128, 257, 768, 1024]);
                    let keys = draw(&[edge, draw(&numbers), draw(&numbers), 3 * draw(&numbers)]);
                    (keys.max(queries), queries)
                }
            })
            .collect();
        // A latent tile with the first visible key in every column of a block, alone or with one more key.
        let sweep = self.latent && seed % 20 == 7;
        let requests = match sweep {
            true => (70..134).map(|keys| (keys, 1)).collect(),
            false => requests,
        };
        let page = match self.page {
            3 => draw(&[1, 3, 5, 7]),
            page => draw(&[page, 16, 64]),
        };
        let split = match draw(&[0, 1, 2]) {
            _ if joint => SplitMode::Makespan,
            0 => SplitMode::Makespan,
            1 => SplitMode::Fixed { tokens: 3 * page },
            _ => SplitMode::Fixed {
                tokens: 64_u32.next_multiple_of(page),
            },
        };
        let merge_mode = match self.latent || draw(&[0, 1]) == 0 {
            true => MergeMode::Kernel,
            false => MergeMode::Fused,
        };
        Self {
            kv_heads: if self.latent { 1 } else { draw(&[1, 2]) },
            page,
            group: if wide { draw(&[10, 40]) } else { self.group },
            options: self
                .options
                .with_split(split)
                .with_merge_mode(merge_mode)
                .with_decode_tile(tile),
            requests: requests.into(),
            shared: if joint { 9 } else { draw(&[0, 2]) as usize },
            trees: !joint && !self.latent && draw(&[0, 1]) == 1,
            window_left: match sweep {
                true => Some(draw(&[0, 1])),
                false => (!joint && draw(&[0, 1]) == 0)
                    .then(|| draw(&[0, draw(&numbers) % 8, draw(&numbers), draw(&numbers)])),
            },
            seed,
            ..self.clone()
        }
    }
}

fn scenario(name: &'static str, group: u32, dim: u32, requests: &'static [(u32, u32)]) -> Scenario {
    Scenario {
        name,
        kv_heads: 1,
        group,
        dim,
        dim_v: dim,
        page: 16,
        requests: requests.into(),
        options: PlanOptions::default(),
        arch: None,
        soft_cap: None,
        latent: false,
        window_left: None,
        shared: 0,
        trees: false,
        seed: 0,
    }
}

fn latent(name: &'static str, heads: u32, page: u32, requests: &'static [(u32, u32)]) -> Scenario {
    Scenario {
        latent: true,
        page,
        ..scenario(name, heads, 576, requests)
    }
}

fn options(split: SplitMode, merge_mode: MergeMode, pod: PodMode) -> PlanOptions {
    PlanOptions::default()
        .with_split(split)
        .with_merge_mode(merge_mode)
        .with_pod(pod)
}

/// In tiles of few rows, even if so many units for so few SMs are faster in wider ones.
fn in_tiles(m: u32) -> PlanOptions {
    PlanOptions::default().with_decode_tile(Some(Tile { m, n: 32 }))
}

const DECODES: &[(u32, u32)] = &[(70, 1), (33, 1), (1, 1)];
/// More keys than fit in a ring of stages.
const LONG: &[(u32, u32)] = &[(2100, 1), (33, 1), (1, 1)];
/// More units than a CTA announces ahead. Most have more keys than are loaded ahead, some have a block of one warp.
const MANY: &[(u32, u32)] = &[
    (300, 1),
    (290, 1),
    (280, 1),
    (270, 1),
    (310, 1),
    (260, 1),
    (2100, 1),
    (40, 1),
    (20, 1),
    (7, 1),
];
const CHUNK: &[(u32, u32)] = &[(150, 70)];
/// More tiles than CTAs.
const CHUNKS: &[(u32, u32)] = &[(300, 200), (280, 150), (70, 70)];
const LATENT: &[(u32, u32)] = &[(200, 1), (64, 1), (129, 1), (3, 1)];
/// Requests with several blocks, and with one, which only one of two consumers gets.
const LATENTS: &[(u32, u32)] = &[
    (300, 1),
    (164, 1),
    (229, 1),
    (3, 1),
    (500, 1),
    (20, 1),
    (32, 1),
    (9, 1),
    (17, 1),
];
const NEW_TOKENS: &[(u32, u32)] = &[(150, 4), (70, 2)];
/// The first keys of a window and the last keys of a token are anywhere in a block.
const WINDOWED: &[(u32, u32)] = &[(150, 3), (70, 2), (33, 1)];
const HYBRID: &[(u32, u32)] = &[(130, 64), (40, 1), (90, 1)];

pub fn scenarios() -> Vec<Scenario> {
    let cut = SplitMode::Fixed { tokens: 32 };
    let serial = PodMode::Serial;
    vec![
        Scenario {
            kv_heads: 2,
            ..scenario("decode, 8 rows", 4, 64, DECODES)
        },
        Scenario {
            options: in_tiles(16),
            ..scenario("decode, 16 rows", 12, 128, DECODES)
        },
        scenario("decode, 64 rows", 40, 64, LONG),
        scenario("decode, 128 rows", 100, 64, DECODES),
        Scenario {
            window_left: Some(40),
            ..scenario("new tokens, 64 rows, a window", 20, 64, WINDOWED)
        },
        Scenario {
            soft_cap: Some(20.0),
            ..scenario("decode with a soft cap", 8, 64, DECODES)
        },
        Scenario {
            options: options(cut, MergeMode::Fused, serial),
            ..scenario("decode, fused merges", 4, 64, LONG)
        },
        Scenario {
            options: options(cut, MergeMode::Kernel, serial),
            ..scenario("decode, merges by a kernel", 4, 64, DECODES)
        },
        Scenario {
            page: 3,
            ..scenario("decode, odd pages", 4, 64, DECODES)
        },
        Scenario {
            arch: Some(Arch::Sm80),
            ..scenario("decode, Ampere", 4, 64, DECODES)
        },
        Scenario {
            kv_heads: 2,
            ..scenario("decode, heads of 512", 8, 512, DECODES)
        },
        Scenario {
            options: options(cut, MergeMode::Kernel, serial),
            ..scenario("new tokens, heads of 512, cut", 8, 512, NEW_TOKENS)
        },
        Scenario {
            kv_heads: 2,
            dim_v: 512,
            ..scenario("decode, keys of 64 and values of 512", 8, 64, DECODES)
        },
        Scenario {
            dim_v: 512,
            options: options(cut, MergeMode::Kernel, serial),
            ..scenario(
                "new tokens, keys of 64 and values of 512, cut",
                8,
                64,
                NEW_TOKENS,
            )
        },
        latent("latent, 64 heads", 64, 64, LATENT),
        latent("latent, 128 heads", 128, 16, LATENT),
        latent("latent, odd heads", 3, 8, LATENT),
        latent("latent, pages of 1", 64, 1, LATENT),
        latent("latent, few heads on pages of 1", 16, 1, LATENT),
        latent("latent, pages of 12, new tokens", 16, 12, NEW_TOKENS),
        latent("latent, new tokens", 16, 32, NEW_TOKENS),
        Scenario {
            options: options(cut, MergeMode::Kernel, serial),
            ..latent("latent, cut", 16, 16, LATENT)
        },
        latent("latent, many units", 64, 64, LATENTS),
        latent("latent, many units of few heads", 16, 64, LATENTS),
        latent("latent, many units on odd pages", 64, 12, LATENTS),
        latent(
            "latent, many units of few heads on odd pages",
            16,
            1,
            LATENTS,
        ),
        Scenario {
            kv_heads: 2,
            options: in_tiles(8),
            ..scenario("decode, many units", 4, 64, MANY)
        },
        Scenario {
            kv_heads: 2,
            ..scenario("decode, many units of 64 rows", 40, 64, MANY)
        },
        Scenario {
            page: 3,
            kv_heads: 2,
            // Hopper's kernels load such pages, too.
            arch: Some(Arch::Sm80),
            ..scenario("decode, many units on odd pages", 4, 64, MANY)
        },
        Scenario {
            kv_heads: 2,
            ..scenario("decodes and a prompt, heads of 240", 4, 240, HYBRID)
        },
        scenario("prefill, many tiles", 2, 64, CHUNKS),
        Scenario {
            arch: Some(Arch::Sm80),
            ..scenario("prefill, many tiles, Ampere", 2, 64, CHUNKS)
        },
        scenario("prefill, 64", 2, 64, CHUNK),
        scenario("prefill, 128", 2, 128, CHUNK),
        scenario("prefill, 256", 1, 256, CHUNK),
        Scenario {
            soft_cap: Some(20.0),
            ..scenario("prefill with a soft cap", 2, 128, CHUNK)
        },
        Scenario {
            page: 3,
            ..scenario("prefill, odd pages", 2, 64, CHUNK)
        },
        Scenario {
            arch: Some(Arch::Sm80),
            ..scenario("prefill, Ampere", 2, 64, CHUNK)
        },
        Scenario {
            options: options(SplitMode::Makespan, MergeMode::Fused, PodMode::Streams),
            ..scenario("hybrid, two streams", 4, 128, HYBRID)
        },
        Scenario {
            options: options(SplitMode::Makespan, MergeMode::Kernel, PodMode::Tickets),
            arch: Some(Arch::Sm80),
            ..scenario("hybrid, one kernel", 4, 64, HYBRID)
        },
    ]
}

/// A long request before short ones, in whole units. The CTA with the long one finishes long after the others have done
/// the rest.
const LONG_AND_SHORT: &[(u32, u32)] =
    &[(5000, 1), (300, 1), (300, 1), (300, 1), (300, 1), (300, 1)];
/// The same for latent heads. A short request takes no longer than loading its keys.
const LATENT_LONG_AND_SHORT: &[(u32, u32)] =
    &[(3200, 1), (300, 1), (300, 1), (300, 1), (300, 1), (300, 1)];

/// Kernels whose CTAs claim units one after the other, each with such a batch.
pub fn claims() -> Vec<(&'static str, Scenario)> {
    let whole = options(SplitMode::Off, MergeMode::Kernel, PodMode::Serial);
    let decode = |name, group| scenario(name, group, 64, LONG_AND_SHORT);
    let latent = |name, heads, page| latent(name, heads, page, LATENT_LONG_AND_SHORT);
    let of = |entry, scenario| {
        let options = whole;
        (
            entry,
            Scenario {
                options,
                ..scenario
            },
        )
    };
    vec![
        of("decode_8x32_d64_bf16", decode("claims, 8 rows", 4)),
        of("decode_64x128_d64_bf16", decode("claims, 64 rows", 40)),
        of("mla_64x32_bf16", latent("claims, latent", 64, 64)),
        of(
            "mla_16x64_bf16",
            latent("claims, latent, few heads", 16, 64),
        ),
        of(
            "mla_rows_64x32_bf16",
            latent("claims, latent, odd pages", 64, 4),
        ),
    ]
}

/// Runs a batch of [`claims`] with all warps in parallel and realistic times of copies and products. Returns an error
/// if the first CTA, which has the long request, claimed another unit that a free CTA could have begun.
pub fn leaves_to_others(gpu: &Gpu, scenario: &Scenario) -> Result<(), String> {
    /// Ends tracing even if a launch fails.
    struct Traced(extern "C" fn(i32));
    impl Drop for Traced {
        fn drop(&mut self) {
            self.0(-1);
        }
    }
    let symbol = |name| libcuda::symbol(name).expect("the emulated driver");
    let trace = symbol(c"ptx_driver_trace");
    // SAFETY: the function in the emulated driver has this type.
    let trace: extern "C" fn(i32) = unsafe { std::mem::transmute(trace) };
    let loaded = symbol(c"ptx_driver_loaded");
    // SAFETY: as above.
    let loaded: extern "C" fn() -> u64 = unsafe { std::mem::transmute(loaded) };
    loaded();
    let traced = Traced(trace);
    trace(0);
    run(gpu, scenario)?;
    drop(traced);
    let key = match scenario.latent {
        true => 576 * 2,
        false => 2 * 64 * 2,
    };
    let [(long, _), (short, _), ..] = scenario.requests[..] else {
        panic!("{}: a long request and short ones", scenario.name);
    };
    // Besides its keys it loads its queries, page ids, and the rest of a block: each is less than a short request.
    let (loaded, longest) = (loaded(), u64::from(long) * key);
    let most = longest + u64::from(short) * key * 3 / 4;
    match (longest..most).contains(&loaded) {
        true => Ok(()),
        false => Err(format!(
            "the CTA with the long request loaded {loaded} bytes: {longest} are its own"
        )),
    }
}

/// Kernels that the scenarios must have launched.
pub const EXPECTED: &[&str] = &[
    "decode_8x32_d64_bf16",
    "decode_16x32_d128_bf16",
    "decode_64x128_d64_bf16",
    "decode_128x128_d64_bf16",
    "decode_8x32_d64_bf16_cap",
    "decode_64x64_d512_bf16",
    "decode_64x64_d64x512_bf16",
    "sm80_decode_16x32_d64_bf16",
    "mla_16x64_bf16",
    "mla_64x32_bf16",
    "mla_rows_16x64_bf16",
    "mla_rows_64x32_bf16",
    "merge_few_bf16",
    "prefill_128x128_d64_bf16",
    "prefill_192x112_d64_bf16",
    "sm80_prefill_128x128_d64_bf16",
    "sm80_pod_128x128_d64_bf16",
];

/// Runs a scenario. An error describes what is wrong with the results.
pub fn run(gpu: &Gpu, scenario: &Scenario) -> Result<(), String> {
    let mut spec = Spec::new(
        scenario.kv_heads * scenario.group,
        scenario.kv_heads,
        scenario.dim,
    )
    .with_head_dim_v(scenario.dim_v);
    if scenario.latent {
        spec = Spec::latent(scenario.group, 512, 64);
    }
    spec.variant.window_left = scenario.window_left;
    if let Some(cap) = scenario.soft_cap {
        spec = spec.with_soft_cap(cap);
    }
    let planned = Planned {
        spec: spec.with_dtype(Dtype::BF16),
        requests: scenario.requests.to_vec(),
        device: gpu.device(),
        options: scenario.options,
        shared: scenario.shared,
        trees: scenario.trees,
        by_token: false,
        arch: scenario.arch,
        page: scenario.page,
        layout: KvLayout::Nhd,
        seed: scenario.seed,
        pieces: false,
    };
    launches::attention::run(gpu, &planned, true).map(|_| ())
}

pub fn emulated() -> Gpu {
    let gpu = common::load().expect("the emulated GPU");
    gpu.make_current().unwrap();
    gpu
}

pub fn run_claims() {
    let gpu = emulated();
    for (entry, scenario) in claims() {
        eprintln!("claims of {entry}");
        leaves_to_others(&gpu, &scenario).unwrap_or_else(|text| panic!("{entry}: {text}"));
    }
}

pub fn run_all() {
    let gpu = emulated();
    let only = std::env::var("PTX_DRIVER_SCENARIOS").unwrap_or_default();
    for scenario in scenarios() {
        if !scenario.name.contains(&only) {
            continue;
        }
        eprintln!("scenario {}", scenario.name);
        run(&gpu, &scenario).unwrap_or_else(|text| panic!("{}: {text}", scenario.name));
    }
}
