//! Attention problems for tests: random batches, and tensors to go with them.
// Each program uses its own part of this.
#![allow(dead_code)]

use super::numeric::Rng;
use half::bf16;
use proptest::{prelude::*, sample::Index};
use tandem_attn::{
    abi::KvStrides,
    kv::{KvScales, KvView, LATENT_656_BYTES},
    plan::{DeviceDescription, JointDescription, PlanOptions, QueryStep, SplitMode},
    problem::{Batch, Compute, Dtype, KvLayout, PageTable, Part, Spec, Variant},
    reference,
    step::{Pairing, Rope, RopeScaling, Yarn},
    tensor::{Element, F8E4M3, HeadTensors, ShapeError},
    variant::FromLaunch,
    variants::{
        ALIBI, Alibi, BiasTable, DISTANCE_BIAS, DistanceBias, SIGMOID, Sigmoid, SigmoidBias, Slopes,
    },
};

/// Number of cases: `default`, or what `TANDEM_CASES` says.
pub fn cases(default: u32) -> ProptestConfig {
    let cases = std::env::var("TANDEM_CASES")
        .ok()
        .and_then(|cases| cases.parse().ok());
    ProptestConfig {
        cases: cases.unwrap_or(default),
        failure_persistence: None,
        max_shrink_iters: 2000,
        ..ProptestConfig::default()
    }
}

/// Masks and soft caps.
pub fn variant() -> impl Strategy<Value = Variant> {
    let window = prop_oneof![3 => Just(None), 2 => (0..300_u32).prop_map(Some)];
    let cap = prop_oneof![3 => Just(None), 1 => (5.0..50.0_f32).prop_map(Some)];
    (prop::bool::weighted(0.9), window, cap).prop_map(|(causal, window_left, soft_cap)| {
        let mut variant = Variant::CAUSAL;
        variant.causal = causal;
        variant.window_left = window_left;
        variant.soft_cap = soft_cap;
        variant
    })
}

/// Key lengths around the edges of chunks and pages, and beyond what one CTA loads ahead.
pub fn kv_len() -> impl Strategy<Value = u32> {
    let edge = (1..20_u32, 0..3_u32).prop_map(|(chunks, off)| chunks * 32 + off - 1);
    prop_oneof![1 => Just(0_u32), 3 => 1..70_u32, 4 => edge, 2 => 1..1500_u32]
}

/// Requests of so many keys of their own, pages shared with another, and queries.
pub fn prefixed(requests: &[(u32, usize, u32)], page: u32, one_token: bool, seed: u64) -> Batch {
    let mut noise = Rng(seed);
    let (mut tables, mut used) = (Vec::<Vec<u32>>::new(), 0);
    let (mut indptr, mut lens) = (vec![0], Vec::new());
    for &(own, shared, queries) in requests {
        let queries = if one_token { 1 } else { queries };
        let parent = noise.below(tables.len().max(1));
        let prefix = tables
            .get(parent)
            .map_or(&[][..], |other| &other[..shared.min(other.len())]);
        let mut pages = prefix.to_vec();
        let kv_len = (pages.len() as u32 * page + own).max(queries);
        let more = kv_len.div_ceil(page) - pages.len() as u32;
        pages.extend(used..used + more);
        used += more;
        tables.push(pages);
        lens.push(kv_len);
        indptr.push(indptr[indptr.len() - 1] + queries);
    }
    let mut shuffled: Vec<u32> = (0..used + 3).collect();
    noise.shuffle(&mut shuffled);
    let mut table = PageTable::new(page, used + 3);
    for (pages, &kv_len) in tables.iter().zip(&lens) {
        let pages: Vec<u32> = pages.iter().map(|&page| shuffled[page as usize]).collect();
        table.push(&pages, kv_len);
    }
    Batch::new(indptr, table)
}

fn random_row<T: Element>(noise: &mut Rng, len: usize, largest: f32) -> Vec<T> {
    (0..len)
        .map(|_| T::from_f32(noise.between(-largest, largest)))
        .collect()
}

/// The pools of one part.
#[derive(Clone, Debug)]
pub struct Pools<T> {
    pub k: Vec<T>,
    pub v: Vec<T>,
    pub k_strides: KvStrides,
    pub v_strides: KvStrides,
}

/// Queries, and the pools of each part.
#[derive(Clone, Debug)]
pub struct Tensors<Q, T> {
    pub q: Vec<Q>,
    pub parts: Vec<Pools<T>>,
}

impl<Q: Element, T: Element> Tensors<Q, T> {
    /// Random numbers where a table points to, NaN everywhere else.
    pub fn random(spec: &Spec, batch: &Batch, layout: KvLayout, seed: u64) -> Self {
        let mut noise = Rng(seed);
        // Queries large enough for some keys to stand out.
        let q = random_row(
            &mut noise,
            (batch.total_q() * spec.q_heads * spec.head_dim_qk) as usize,
            4.0,
        );
        let pools = |part: &Part| Pools::random(spec, &part.table, layout, &mut noise);
        Self {
            q,
            parts: batch.parts.iter().map(pools).collect(),
        }
    }

    pub fn views(&self) -> Vec<KvView<'_, T>> {
        self.parts.iter().map(Pools::view).collect()
    }

    pub fn reference(&self, spec: &Spec, batch: &Batch) -> reference::Output {
        let sinks = sinks(spec);
        let output = reference_of(spec, batch, &self.q, &self.views(), &heads(&sinks));
        output.expect("the tensors fit the batch")
    }
}

/// The reference with the specification's variant.
pub fn reference_of<Q: Element, T: Element>(
    spec: &Spec,
    batch: &Batch,
    q: &[Q],
    views: &[KvView<'_, T>],
    heads: &HeadTensors<'_>,
) -> Result<reference::Output, ShapeError> {
    let slopes = slopes(spec);
    match spec.variant.hooks {
        None => reference::attention_heads(spec, batch, q, views, heads),
        Some(name) if name == SIGMOID.name => {
            reference::attention_with(&sigmoid(spec), spec, batch, q, views, heads)
        }
        Some(name) if name == DISTANCE_BIAS.name => {
            let bias = distance_bias(spec, &slopes);
            reference::attention_with(&bias, spec, batch, q, views, heads)
        }
        Some(_) => reference::attention_with(&alibi(spec, &slopes), spec, batch, q, views, heads),
    }
}

/// Whether the rows of the specification's pools carry their scales.
pub fn has_rows_656(spec: &Spec) -> bool {
    let dims = (spec.head_dim_qk, spec.head_dim_v);
    spec.latent && spec.kv_dtype == Dtype::F8E4M3 && dims == (576, 512)
}

/// A key of 656 bytes: numbers of which the largest is 448, powers of two as scales that bring them to 1 or less, and the
/// last elements.
fn row_656(noise: &mut Rng) -> Vec<u8> {
    let number = |_| F8E4M3::from_f32(noise.between(-448.0, 448.0)).0;
    let mut row: Vec<u8> = (0..512).map(number).collect();
    for _ in 0..4 {
        row.extend(2.0_f32.powi(-9 - noise.below(3) as i32).to_ne_bytes());
    }
    for x in random_row::<bf16>(noise, 64, 1.0) {
        row.extend(x.to_bits().to_ne_bytes());
    }
    row
}

impl<Q: Element> Tensors<Q, F8E4M3> {
    /// Makes the scales of keys of 656 bytes smaller, so that they are no powers of two. Returns what a logit is off by at
    /// most where products of numbers and scales are rounded to bf16: 2⁻⁸ of the lengths of query and key.
    pub fn spoil_scales(&mut self, spec: &Spec, noise: &mut Rng) -> f64 {
        let length = |xs: &mut dyn Iterator<Item = f32>| xs.map(|x| x * x).sum::<f32>().sqrt();
        let mut of_keys = 0.0_f32;
        let rows = self
            .parts
            .iter_mut()
            .flat_map(|part| part.k.chunks_exact_mut(656));
        for row in rows {
            let mut of_key = 0.0;
            for group in 0..4 {
                let at = 512 + 4 * group;
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut row[at..][..4]);
                let scale = f32::from_ne_bytes(bytes.try_into().expect("four bytes"));
                // Where nothing is, NaN stays.
                if scale < 1.0 {
                    let scale = scale * noise.between(0.5, 1.0);
                    bytes.copy_from_slice(&scale.to_ne_bytes());
                    let numbers = row[128 * group..][..128].iter();
                    of_key += length(&mut numbers.map(|x| x.to_f32() * scale)).powi(2);
                }
            }
            of_keys = of_keys.max(of_key.sqrt());
        }
        let queries = self.q.chunks_exact(576);
        let of_queries = queries.map(|q| length(&mut q[..512].iter().map(|x| x.to_f32())));
        let of_queries = of_queries.fold(0.0, f32::max);
        f64::from(of_keys * of_queries * spec.scale / 256.0)
    }
}

impl<T: Element> Pools<T> {
    fn random(spec: &Spec, table: &PageTable, layout: KvLayout, noise: &mut Rng) -> Self {
        let rows_656 = has_rows_656(spec);
        let row = if rows_656 {
            LATENT_656_BYTES
        } else {
            spec.head_dim_qk
        };
        let k_strides = layout.strides(table.page_size, spec.kv_heads, row);
        let v_strides = match spec.latent {
            true => k_strides,
            false => layout.strides(table.page_size, spec.kv_heads, spec.head_dim_v),
        };
        let nan = |strides: KvStrides| {
            vec![T::from_f32(f32::NAN); (table.pool_pages * strides.page) as usize]
        };
        let mut pools = Self {
            k: nan(k_strides),
            v: if spec.latent {
                Vec::new()
            } else {
                nan(v_strides)
            },
            k_strides,
            v_strides,
        };
        let mut filled = vec![0; table.pool_pages as usize];
        for row_block in 0..table.row_blocks() {
            let mut left = table.kv_len(row_block);
            for &page in table.pages(row_block) {
                let tokens = left.min(table.page_size);
                filled[page as usize] = tokens.max(filled[page as usize]);
                left -= tokens;
            }
        }
        for (page, &tokens) in filled.iter().enumerate() {
            for (offset, head) in (0..tokens).flat_map(|t| (0..spec.kv_heads).map(move |h| (t, h)))
            {
                let start = |s: KvStrides| {
                    page * s.page as usize + (offset * s.token + head * s.head) as usize
                };
                let (k, v) = (start(k_strides), start(v_strides));
                if rows_656 {
                    let row = row_656(noise);
                    pools.k[k..][..row.len()].copy_from_slice(bytemuck::cast_slice(&row));
                    continue;
                }
                pools.k[k..][..spec.head_dim_qk as usize].copy_from_slice(&random_row(
                    noise,
                    spec.head_dim_qk as usize,
                    1.0,
                ));
                if !spec.latent {
                    pools.v[v..][..spec.head_dim_v as usize].copy_from_slice(&random_row(
                        noise,
                        spec.head_dim_v as usize,
                        1.0,
                    ));
                }
            }
        }
        pools
    }

    pub fn view(&self) -> KvView<'_, T> {
        KvView {
            k: &self.k,
            // Latent attention has no values of their own.
            v: if self.v.is_empty() { &self.k } else { &self.v },
            k_strides: self.k_strides,
            v_strides: self.v_strides,
            scales: self.scales(),
            rope: None,
        }
    }

    fn scales(&self) -> KvScales<'_> {
        match self.k_strides.token == LATENT_656_BYTES && T::DTYPE == Dtype::F8E4M3 {
            true => KvScales::InRow,
            false => KvScales::One,
        }
    }
}

/// Changes one thing.
type Change = fn(&mut Spec, &mut Batch);

/// Each option of a specification or a batch, changed: from a causal batch with several queries to a request.
pub const OPTIONS: &[(&str, Change)] = &[
    ("causal", |spec, _| spec.variant.causal = false),
    ("window_left", |spec, _| spec.variant.window_left = Some(5)),
    ("soft_cap", |spec, _| spec.variant.soft_cap = Some(2.0)),
    ("sinks", |spec, _| spec.variant.sinks = true),
    ("hooks", |spec, _| *spec = spec.with_hooks(&ALIBI)),
    ("hooks with a table", |spec, _| {
        *spec = spec.with_hooks(&DISTANCE_BIAS)
    }),
    ("hooks without a softmax", |spec, _| {
        *spec = spec.with_hooks(&SIGMOID)
    }),
    ("weights that add up without hooks", |spec, _| {
        spec.variant.adds_up = true
    }),
    ("sinks without a softmax", |spec, _| {
        *spec = spec.with_hooks(&SIGMOID).with_sinks()
    }),
    ("rotary", |spec, _| {
        spec.rotary = Some(Rope::new(64, 10_000.0))
    }),
    ("rotary of neighbours, in part", |spec, _| {
        let rope = Rope::new(32, 10_000.0).with_pairing(Pairing::Interleaved);
        spec.rotary = Some(rope);
    }),
    ("rotary, wider than heads", |spec, _| {
        spec.rotary = Some(Rope::new(1026, 10_000.0))
    }),
    ("scale", |spec, _| spec.scale *= 0.5),
    ("q_heads", |spec, _| spec.q_heads *= 2),
    ("kv_heads", |spec, _| spec.kv_heads = 1),
    ("head_dim_qk", |spec, _| spec.head_dim_qk = 128),
    ("head_dim_v", |spec, _| spec.head_dim_v = 48),
    ("q_dtype", |spec, _| spec.q_dtype = Dtype::F32),
    ("kv_dtype", |spec, _| spec.kv_dtype = Dtype::F8E4M3),
    ("out_dtype", |spec, _| spec.out_dtype = Dtype::F32),
    ("compute", |spec, _| spec.compute = Compute::F8),
    ("ancestors", |_, batch| {
        let queries = batch.total_q() as usize;
        batch.ancestors = vec![!0b10; queries];
    }),
    ("ancestors of other queries", |_, batch| {
        batch.ancestors = vec![!0b10; 1]
    }),
    ("ancestors without a causal mask", |spec, batch| {
        spec.variant.causal = false;
        batch.ancestors = vec![!0b10; batch.total_q() as usize];
    }),
    ("keys_after", |_, batch| {
        let row_blocks = batch.parts[0].row_blocks();
        batch.parts[0].keys_after = vec![3; row_blocks];
    }),
    ("last_page_len", |_, batch| {
        batch.parts[0].table.last_page_len[0] -= 1
    }),
    ("indices", |_, batch| {
        batch.parts[0].table.indices.swap(0, 3)
    }),
];

/// A causal batch that [`OPTIONS`] change.
pub fn plain(dtype: Dtype) -> (Spec, Batch) {
    let mut table = PageTable::new(16, 12);
    table.push(&[4, 1, 7, 2], 57);
    table.push(&[9, 3], 30);
    let batch = Batch::new(vec![0, 6, 7], table);
    (Spec::new(8, 2, 64).with_dtype(dtype), batch)
}

/// Sinks for a spec that has them, the same everywhere.
pub fn sinks(spec: &Spec) -> Option<Vec<f32>> {
    let random = || Rng(7).floats(spec.q_heads as usize, -2.0, 6.0);
    spec.variant.sinks.then(random)
}

/// What the spec has for each head.
pub fn heads(sinks: &Option<Vec<f32>>) -> HeadTensors<'_> {
    let none = HeadTensors::default();
    sinks
        .as_deref()
        .map_or(none, |sinks| none.with_sinks(sinks))
}

/// Slopes of each head, as models have them: from 1/2 down to 1/256. For biases by distance their table.
pub fn slopes(spec: &Spec) -> Vec<f32> {
    if spec.variant.hooks == Some(DISTANCE_BIAS.name) {
        return Rng(13).floats(spec.q_heads as usize * BIASES, -3.0, 3.0);
    }
    let slope = |head| (-8.0 * (head + 1) as f32 / spec.q_heads as f32).exp2();
    (0..spec.q_heads).map(slope).collect()
}

/// The hooks of that name with these slopes, which outlive it.
pub fn alibi(spec: &Spec, slopes: &[f32]) -> Alibi {
    let address = slopes.as_ptr() as u64;
    Alibi::from_launch(spec.variant_params(), &Slopes { address })
}

/// Sigmoid weights, about one for all keys together.
pub fn sigmoid(spec: &Spec) -> Sigmoid {
    Sigmoid::from_launch(spec.variant_params(), &SIGMOID_BIAS)
}

const SIGMOID_BIAS: SigmoidBias = SigmoidBias { bias: -5.0 };

/// Biases by distance from this table, which outlives them.
pub fn distance_bias(spec: &Spec, table: &[f32]) -> DistanceBias {
    let table = bias_table(spec, table.as_ptr() as u64);
    DistanceBias::from_launch(spec.variant_params(), &table)
}

/// Biases of a head: fewer than there are keys, also to the right of a query.
const BIASES: usize = 50;

fn bias_table(spec: &Spec, address: u64) -> BiasTable {
    let first = if spec.variant.causal { 0 } else { -20 };
    let len = spec.q_heads as usize * BIASES;
    BiasTable::new(address, len, spec.q_heads, first).expect("a table for these heads")
}

/// What a run gives the hooks of a specification, whose numbers lie at an address.
pub fn own_bytes(spec: &Spec, address: u64) -> Vec<u8> {
    match spec.variant.hooks {
        None => Vec::new(),
        Some(name) if name == SIGMOID.name => bytemuck::bytes_of(&SIGMOID_BIAS).to_vec(),
        Some(name) if name == DISTANCE_BIAS.name => {
            bytemuck::bytes_of(&bias_table(spec, address)).to_vec()
        }
        Some(_) => bytemuck::bytes_of(&Slopes { address }).to_vec(),
    }
}

/// Other hooks of the library in the place of linear biases, for some of the problems and where there are kernels.
pub fn vary_hooks(spec: &mut Spec, seed: u64) {
    if spec.variant.hooks.is_none() || seed % 4 < 2 {
        return;
    }
    if spec.head_dim_qk == 128 && !spec.variant.sinks && spec.q_dtype == Dtype::BF16 {
        *spec = spec.with_hooks(&SIGMOID);
    } else if spec.head_dim_qk <= 64 && spec.q_dtype == Dtype::BF16 {
        *spec = spec.with_hooks(&DISTANCE_BIAS);
    }
}

/// For each query token which of the last keys it sees: trees of drafted tokens, or any of them.
pub fn ancestors(batch: &Batch, seed: u64) -> Vec<u64> {
    let mut rng = Rng(seed);
    let mut words = Vec::new();
    for request in 0..batch.requests() {
        let tokens = batch.q_len(request);
        match rng.below(3) {
            0 if tokens <= 64 => {
                let parents: Vec<_> = (0..tokens)
                    .map(|token| {
                        rng.below(token as usize + 1)
                            .checked_sub(1)
                            .map(|at| at as u32)
                    })
                    .collect();
                words.extend(Batch::ancestors_of(&parents));
            }
            1 => words.extend((0..tokens).map(|_| rng.bits())),
            _ => words.extend((0..tokens).map(|_| u64::MAX)),
        }
    }
    words
}

/// A rotary embedding of heads of so many elements: any pairs, part of a head, frequencies as they are or scaled. Half-split
/// parts are multiples of 32 elements, as kernels have them.
pub fn rotary(head_dim: u32, seed: u64) -> Rope {
    let mut rng = Rng(seed);
    let pairing = [Pairing::HalfSplit, Pairing::Interleaved][rng.below(2)];
    let step = match pairing {
        Pairing::HalfSplit => 32.min(head_dim),
        Pairing::Interleaved => 2,
    };
    let dim = match rng.below(2) {
        0 => head_dim,
        _ => step * (1 + rng.below((head_dim / step) as usize) as u32),
    };
    let dim = dim / step * step;
    let scaling = match rng.below(4) {
        0 => RopeScaling::None,
        1 => RopeScaling::Linear { factor: 4.0 },
        2 => RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_positions: 64,
        },
        _ => RopeScaling::Yarn(Yarn::new(4.0, 128)),
    };
    let theta = [10_000.0, 500_000.0][rng.below(2)];
    Rope::new(dim, theta)
        .with_pairing(pairing)
        .with_scaling(scaling)
}

/// Sinks for some of the problems, and masks of the last keys.
pub fn enrich(spec: &mut Spec, batch: &mut Batch, seed: u64) {
    spec.variant.sinks = seed % 3 == 1;
    if batch.parts.len() > 1 {
        // Row blocks of several requests, which know no distances.
        return;
    }
    if spec.variant.soft_cap.is_none() && spec.head_dim_qk <= 128 && seed % 7 == 3 {
        *spec = spec.with_hooks(&ALIBI);
    }
    if spec.variant.causal && seed % 5 < 2 {
        *batch = batch.clone().with_ancestors(ancestors(batch, seed));
    }
}

/// One request of a random batch: where it leaves the table of an earlier one, how far it goes on alone, and
/// its queries.
#[derive(Clone, Debug)]
struct Request {
    parent: Index,
    shared: Index,
    own: u32,
    queries: u32,
}

fn request() -> impl Strategy<Value = Request> {
    let own = prop_oneof![1 => Just(0u32), 8 => 0u32..40, 3 => 0u32..200, 1 => 0u32..700];
    let queries =
        prop_oneof![2 => Just(0u32), 8 => Just(1), 5 => 1u32..12, 3 => 1u32..70, 1 => 1u32..200];
    (any::<Index>(), any::<Index>(), own, queries).prop_map(|(parent, shared, own, queries)| {
        Request {
            parent,
            shared,
            own,
            queries,
        }
    })
}

/// Batches whose tables share prefixes as a prefix cache hands them out, on shuffled pages; of one part, or
/// of several.
pub fn batch() -> impl Strategy<Value = Batch> {
    batch_of(prop::collection::vec(request(), 0..7))
}

fn batch_of(requests: impl Strategy<Value = Vec<Request>>) -> impl Strategy<Value = Batch> {
    let page_size = prop_oneof![Just(1u32), Just(3), Just(16), Just(64)];
    (page_size, requests, any::<u64>()).prop_map(|(page_size, requests, seed)| {
        let mut tables: Vec<(Vec<u32>, u32)> = Vec::new();
        let mut used = 0;
        let mut qo_indptr = vec![0];
        for Request {
            parent,
            shared,
            own,
            queries,
        } in &requests
        {
            let mut pages = Vec::new();
            if let Some((parent, parent_len)) = tables.get(parent.index(tables.len().max(1))) {
                pages.extend_from_slice(
                    &parent[..shared.index((parent_len / page_size) as usize + 1)],
                );
            }
            let kv_len = (pages.len() as u32 * page_size + own).max(*queries);
            let more = kv_len.div_ceil(page_size) - pages.len() as u32;
            pages.extend(used..used + more);
            used += more;
            tables.push((pages, kv_len));
            qo_indptr.push(qo_indptr[qo_indptr.len() - 1] + queries);
        }
        let shuffled = shuffled_pages(used + 3, seed);
        let mut table = PageTable::new(page_size, used + 3);
        for (pages, kv_len) in &tables {
            let pages: Vec<u32> = pages.iter().map(|&page| shuffled[page as usize]).collect();
            table.push(&pages, *kv_len);
        }
        Batch::new(qo_indptr, table)
    })
}

fn shuffled_pages(pages: u32, seed: u64) -> Vec<u32> {
    let mut noise = Rng(seed);
    let mut keyed: Vec<(u32, u32)> = (0..pages)
        .map(|page| (noise.between(0.0, 1.0).to_bits(), page))
        .collect();
    keyed.sort_unstable();
    keyed.into_iter().map(|(_, page)| page).collect()
}

/// A problem without its tensors.
#[derive(Clone, Debug)]
pub struct Problem {
    pub spec: Spec,
    pub batch: Batch,
    pub layout: KvLayout,
    pub device: DeviceDescription,
    pub options: PlanOptions,
    pub seed: u64,
}

pub fn spec() -> impl Strategy<Value = Spec> {
    let heads = prop_oneof![
        Just((1u32, 1u32)),
        Just((4, 1)),
        Just((6, 2)),
        Just((8, 1)),
        Just((16, 1)),
        Just((4, 4))
    ];
    let dims = prop_oneof![
        Just((16u32, 16u32)),
        Just((32, 32)),
        Just((128, 128)),
        Just((48, 80)),
        Just((80, 16))
    ];
    let window = prop_oneof![2 => Just(None), 1 => (0u32..60).prop_map(Some)];
    let cap = prop_oneof![2 => Just(None), 1 => (1.0f32..30.0).prop_map(Some)];
    (heads, dims, any::<bool>(), window, cap, any::<bool>()).prop_map(
        |((q_heads, kv_heads), (qk, v), causal, window, cap, latent)| {
            let mut spec = Spec::new(q_heads, kv_heads, qk).with_head_dim_v(v);
            spec.variant.causal = causal;
            spec.variant.window_left = window;
            spec.variant.soft_cap = cap;
            // Of the heads that it may be true for.
            spec.latent = kv_heads == 1 && v <= qk && latent;
            spec
        },
    )
}

/// Any problem: one part or several, any mask, all ways to split.
pub fn problem() -> impl Strategy<Value = Problem> {
    problem_of(spec(), batch())
}

/// The same with few and short requests and narrow heads, for many cases.
pub fn small_problem() -> impl Strategy<Value = Problem> {
    let own = prop_oneof![1 => Just(0u32), 6 => 0u32..20, 1 => 0u32..90];
    let queries = prop_oneof![1 => Just(0u32), 6 => Just(1), 4 => 1u32..10];
    let request = (any::<Index>(), any::<Index>(), own, queries).prop_map(
        |(parent, shared, own, queries)| Request {
            parent,
            shared,
            own,
            queries,
        },
    );
    let narrow = spec().prop_map(|mut spec| {
        spec.head_dim_qk = spec.head_dim_qk.min(32);
        spec.head_dim_v = spec.head_dim_v.min(32);
        spec
    });
    problem_of(narrow, batch_of(prop::collection::vec(request, 0..4)))
}

fn problem_of(
    spec: impl Strategy<Value = Spec>,
    batch: impl Strategy<Value = Batch>,
) -> impl Strategy<Value = Problem> {
    let layout = prop_oneof![Just(KvLayout::Nhd), Just(KvLayout::Hnd)];
    let split = prop_oneof![
        Just(SplitMode::Makespan),
        (1u32..4).prop_map(|times| SplitMode::Fixed { tokens: times * 48 }),
        Just(SplitMode::Off),
    ];
    (
        spec,
        batch,
        layout,
        device(),
        split,
        any::<bool>(),
        any::<u64>(),
    )
        .prop_map(|(spec, mut batch, layout, device, split, composed, seed)| {
            if composed && spec.variant.window_left.is_none() {
                batch = batch.share_prefixes();
            }
            let page_size = batch.parts[0].table.page_size;
            let split = match split {
                SplitMode::Fixed { tokens } => SplitMode::Fixed {
                    tokens: tokens.next_multiple_of(page_size),
                },
                other => other,
            };
            let options = PlanOptions::default().with_split(split);
            Problem {
                spec,
                batch,
                layout,
                device,
                options,
                seed,
            }
        })
}

/// The CPU with so many workers, cut into small tiles or not, so that small batches are split and merged.
fn device() -> impl Strategy<Value = DeviceDescription> {
    (
        1u32..60,
        prop_oneof![Just(8u32), Just(16), Just(64)],
        1u32..9,
        1u32..5,
        any::<bool>(),
        prop_oneof![2 => Just(None), 1 => Just(Some(0.0)), 3 => Just(Some(1e9))],
    )
        .prop_map(|(workers, m, tokens, pack, small, joint)| {
            let mut device = DeviceDescription::named("cpu").expect("it is built in");
            device.sms = workers;
            device.decode.joint = joint.map(|apart_ns| JointDescription {
                cut_ns: apart_ns,
                apart_ns,
                behind_ns: apart_ns,
                bytes: 1e9,
            });
            if small {
                device.decode_max_tokens = tokens;
                device.decode.rows = vec![16];
                let step = |up_to, rows, pack| QueryStep {
                    head_dim: None,
                    compute: None,
                    up_to,
                    rows,
                    pack,
                };
                device.prefill.by_q_len =
                    vec![step(Some(32), 48, None), step(None, m.max(16), Some(pack))];
            }
            device
        })
}
