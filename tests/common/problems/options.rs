//! Each option of a specification, a batch, its pools and its plan, changed.

use std::fmt::Debug;

use tandem_attn::{
    kv::{KvScales, KvStrides},
    plan::{Bound, MergeMode, PackRule, PlanOptions, SplitMode, Tile, pod::PodMode},
    problem::{Batch, Compute, Dtype, KvLayout, Masks, PageTable, Spec},
    step::{Pairing, Rope},
    tensor::Element,
    variants::{ALIBI, DISTANCE_BIAS, SIGMOID},
};

use super::{super::numeric::Rng, Tensors};

/// A batch, and how its pool lies.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    pub spec: Spec,
    pub batch: Batch,
    pub layout: KvLayout,
    /// Of keys and of values, if they do not lie densely in this layout.
    pub strides: Option<[KvStrides; 2]>,
    pub scales: Scales,
}

/// Kinds of scales of 8-bit keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scales {
    One,
    Tensor,
    Head,
    Request,
    Token,
}

/// Scales of one kind for a batch of one part: powers of two, with which prefills that convert keys lose nothing.
pub struct ScaleNumbers {
    kind: Scales,
    k: Vec<f32>,
    v: Vec<f32>,
    of_token: Vec<u32>,
    strides: KvStrides,
}

impl ScaleNumbers {
    pub fn of(asked: &Asked) -> Self {
        let (table, heads) = (&asked.batch.parts[0].table, asked.spec.kv_heads);
        let requests = asked.batch.requests();
        let count = match asked.scales {
            Scales::One => 0,
            Scales::Tensor => 1,
            Scales::Head => heads,
            Scales::Request => heads * requests as u32,
            Scales::Token => heads * table.pool_pages * table.page_size,
        };
        let mut noise = Rng(21);
        let mut numbers = || {
            let power = |_| (noise.below(3) as f32 - 2.0).exp2();
            (0..count).map(power).collect()
        };
        let tokens = |request: usize| vec![request as u32; asked.batch.q_len(request) as usize];
        Self {
            kind: asked.scales,
            k: numbers(),
            v: numbers(),
            of_token: (0..requests).flat_map(tokens).collect(),
            strides: asked.layout.strides(table.page_size, heads, 1),
        }
    }

    pub fn view(&self) -> KvScales<'_> {
        let Self {
            kind,
            k,
            v,
            of_token,
            strides,
        } = self;
        match kind {
            Scales::One => KvScales::One,
            Scales::Tensor => KvScales::Tensor { k: k[0], v: v[0] },
            Scales::Head => KvScales::Head { k, v },
            Scales::Request => KvScales::Request { k, v, of_token },
            Scales::Token => KvScales::Token {
                k,
                v,
                k_strides: *strides,
                v_strides: *strides,
            },
        }
    }
}

/// Changes one thing.
type Change = fn(&mut Spec, &mut Batch);

/// Changes how the pool lies.
type PoolChange = fn(&mut Asked);

/// A batch of requests of so many queries and keys, with the pages of [`plain`] and others behind them.
fn requests(page_size: u32, of: &[(u32, u32)]) -> Batch {
    let (mut table, mut ends, mut next) = (PageTable::new(page_size, 200), vec![0], 0);
    for &(queries, keys) in of {
        let pages = keys.div_ceil(page_size);
        let ids: Vec<u32> = (next..next + pages).map(|page| page * 7 % 200).collect();
        next += pages;
        table.push(&ids, keys);
        ends.push(ends[ends.len() - 1] + queries);
    }
    Batch::new(ends, table)
}

/// What a pool may have.
pub const OF_POOLS: &[(&str, PoolChange)] = &[
    ("layout", |asked| asked.layout = KvLayout::Hnd),
    ("layout, values behind the keys of a page", |asked| {
        asked.lies(KvLayout::Hnd, |side| side.page *= 2, |side| side.page *= 2);
    }),
    ("layout, a head of nobody in each token", |asked| {
        let padded = |side: &mut KvStrides| {
            side.token += side.head;
            side.page = side.page_size * side.token;
        };
        asked.lies(KvLayout::Nhd, padded, padded);
    }),
    ("layout, gaps between pages of values", |asked| {
        asked.lies(KvLayout::Nhd, |_| (), |side| side.page += 64);
    }),
    ("layout, gaps between heads of values", |asked| {
        asked.lies(
            KvLayout::Hnd,
            |_| (),
            |side| {
                side.head += 64;
                side.page += 2 * 64;
            },
        );
    }),
    ("page_size, in the other layout", |asked| {
        asked.layout = KvLayout::Hnd;
        asked.batch = requests(5, &[(6, 57), (1, 30)]);
    }),
    ("scales, one for all", |asked| asked.scaled(Scales::Tensor)),
    ("scales of heads", |asked| asked.scaled(Scales::Head)),
    ("scales of requests", |asked| asked.scaled(Scales::Request)),
    ("scales of tokens", |asked| asked.scaled(Scales::Token)),
    ("scales of tokens, in the other layout", |asked| {
        asked.scaled(Scales::Token);
        asked.layout = KvLayout::Hnd;
    }),
    ("scales of numbers of 16 bits", |asked| {
        asked.scales = Scales::Tensor;
    }),
];

impl Asked {
    /// With the strides of a layout, each side changed.
    fn lies(&mut self, layout: KvLayout, k: fn(&mut KvStrides), v: fn(&mut KvStrides)) {
        let (page_size, spec) = (self.batch.parts[0].table.page_size, &self.spec);
        let strides = layout.strides(page_size, spec.kv_heads, spec.head_dim_qk);
        let mut sides = [strides; 2];
        k(&mut sides[0]);
        v(&mut sides[1]);
        self.strides = Some(sides);
    }

    /// [`Tensors::random`] for it.
    pub fn tensors<Q: Element, K: Element>(&self, seed: u64) -> Tensors<Q, K> {
        let mut tensors = Tensors::random(&self.spec, &self.batch, self.layout, seed);
        if let Some(strides) = self.strides {
            for (pool, part) in tensors.parts.iter_mut().zip(&self.batch.parts) {
                *pool = pool.relaid(&self.spec, part.table.pool_pages, strides);
            }
        }
        tensors
    }

    fn scaled(&mut self, scales: Scales) {
        self.scales = scales;
        self.spec.kv_dtype = Dtype::F8E4M3;
    }

    /// None of them.
    pub fn plain(dtype: Dtype) -> Self {
        let (spec, batch) = plain(dtype);
        Self {
            spec,
            batch,
            layout: KvLayout::Nhd,
            strides: None,
            scales: Scales::One,
        }
    }

    /// All of them: each option of a specification or a batch, and of pools.
    pub fn all(dtype: Dtype) -> Vec<(&'static str, Self)> {
        let plain = Self::plain(dtype);
        let of_specs = OPTIONS.iter().map(|(name, change)| {
            let mut changed = plain.clone();
            change(&mut changed.spec, &mut changed.batch);
            (*name, changed)
        });
        let of_pools = OF_POOLS.iter().map(|(name, change)| {
            let mut changed = plain.clone();
            change(&mut changed);
            (*name, changed)
        });
        of_specs.chain(of_pools).collect()
    }
}

/// Changes one thing of a plan.
type PlanChange = fn(&mut PlanOptions);

/// Each option of the planner, changed.
pub const PLAN_OPTIONS: &[(&str, PlanChange)] = &[
    ("packing", |options| options.packing = PackRule::Off),
    ("split", |options| options.split = SplitMode::Off),
    ("split, fixed", |options| {
        options.split = SplitMode::Fixed { tokens: 512 }
    }),
    ("decode_tile", |options| {
        options.decode_tile = Some(Tile { m: 64, n: 64 })
    }),
    ("decode_tile that no kernel has", |options| {
        options.decode_tile = Some(Tile { m: 63, n: 64 })
    }),
    ("merge_mode", |options| {
        options.merge_mode = MergeMode::Fused
    }),
    ("pod", |options| options.pod = PodMode::Serial),
    ("prefill_ctas", |options| options.prefill_ctas = Some(20)),
    ("bound", |options| options.bound = Some(Bound::default())),
];

/// The fields of a struct, by what it prints: a test outside of the library cannot name all of a struct that may grow.
pub fn fields(value: &impl Debug) -> Vec<String> {
    let text = format!("{value:#?}");
    let of_line = |line: &str| {
        let field = line.strip_prefix("    ")?.split_once(": ")?.0;
        (!field.starts_with(' ')).then(|| field.to_owned())
    };
    text.lines().filter_map(of_line).collect()
}

/// What others are fields of.
const CONTAINERS: [&str; 3] = ["variant", "parts", "table"];

/// Fields that no option begins with the name of.
pub fn unlisted() -> Vec<String> {
    let (spec, batch) = plain(Dtype::BF16);
    let part = &batch.parts[0];
    let names = OPTIONS.iter().map(|option| option.0);
    let names: Vec<_> = names
        .chain(OF_POOLS.iter().map(|option| option.0))
        .chain(PLAN_OPTIONS.iter().map(|option| option.0))
        .collect();
    let all = [
        fields(&spec),
        fields(&spec.variant),
        fields(&batch),
        fields(part),
        fields(&part.table),
        fields(&PlanOptions::default()),
    ]
    .concat();
    assert!(all.len() > 30, "{all:?}");
    let listed = |field: &str| {
        let is_it = |name: &&str| name.split([' ', ',']).next() == Some(field);
        CONTAINERS.contains(&field) || names.iter().any(is_it)
    };
    all.into_iter().filter(|field| !listed(field)).collect()
}

/// Each option of a specification or a batch, changed: from a causal batch with several queries to a request.
pub const OPTIONS: &[(&str, Change)] = &[
    ("causal", |spec, _| spec.variant.causal = false),
    ("window_left", |spec, _| spec.variant.window_left = Some(5)),
    ("soft_cap", |spec, _| spec.variant.soft_cap = Some(2.0)),
    ("sinks", |spec, _| spec.variant.sinks = true),
    ("sink_tokens", |spec, _| {
        (spec.variant.sinks, spec.variant.sink_tokens) = (true, 3)
    }),
    ("sink_tokens of none", |spec, _| {
        (spec.variant.sinks, spec.variant.sink_tokens) = (true, 0)
    }),
    ("sink_tokens without sinks", |spec, _| {
        spec.variant.sink_tokens = 3
    }),
    ("hooks", |spec, _| *spec = spec.with_hooks(&ALIBI)),
    ("hooks with a table", |spec, _| {
        *spec = spec.with_hooks(&DISTANCE_BIAS)
    }),
    ("hooks without a softmax", |spec, _| {
        *spec = spec.with_hooks(&SIGMOID)
    }),
    ("hooks, sigmoid weights of heads of 128", |spec, _| {
        *spec = Spec::new(8, 2, 128).with_dtype(spec.q_dtype);
        *spec = spec.with_hooks(&SIGMOID);
    }),
    ("adds_up without hooks", |spec, _| {
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
    ("kv_dtype, e5m2", |spec, _| spec.kv_dtype = Dtype::F8E5M2),
    ("q_dtype and others, f16", |spec, _| {
        *spec = spec.with_dtype(Dtype::F16)
    }),
    ("out_dtype", |spec, _| spec.out_dtype = Dtype::F32),
    ("latent", |spec, _| {
        *spec = Spec::latent(8, 512, 64).with_dtype(spec.q_dtype)
    }),
    ("latent, in rows of 656 bytes", |spec, _| {
        let latent = Spec::latent(8, 512, 64).with_dtype(spec.q_dtype);
        *spec = latent.with_kv_dtype(Dtype::F8E4M3);
    }),
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
    ("masks", |_, batch| batch.masks = odd_keys(batch)),
    ("masks, without a causal mask", |spec, batch| {
        spec.variant.causal = false;
        batch.masks = odd_keys(batch);
    }),
    ("masks of other queries", |_, batch| {
        batch.masks.push_open(batch.total_q() + 1)
    }),
    ("masks beside ancestors", |_, batch| {
        batch.ancestors = vec![!0b10; batch.total_q() as usize];
        batch.masks = odd_keys(batch);
    }),
    ("heads of a part whose tokens have one", |_, batch| {
        batch.parts[0].heads = 3
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
    ("page_size", |_, batch| {
        *batch = requests(3, &[(6, 57), (1, 30)])
    }),
    ("pool_pages without those of the table", |_, batch| {
        batch.parts[0].table.pool_pages = 5
    }),
    ("indptr of more pages than there are", |_, batch| {
        batch.parts[0].table.indptr[2] += 1
    }),
    ("q_indptr past the queries", |_, batch| {
        batch.parts[0].q_indptr[2] += 1
    }),
    ("q_indptr of fewer queries", |_, batch| {
        batch.parts[0].q_indptr[2] -= 1
    }),
    (
        "qo_indptr, requests without queries and without keys",
        |_, batch| *batch = requests(16, &[(0, 20), (6, 57), (0, 0), (1, 30)]),
    ),
    ("qo_indptr, decodes alone", |_, batch| {
        *batch = requests(16, &[(1, 57), (1, 30), (1, 1)])
    }),
    ("qo_indptr, a prompt alone", |_, batch| {
        *batch = requests(16, &[(70, 70)])
    }),
    ("qo_indptr of more queries than keys", |_, batch| {
        *batch = requests(16, &[(6, 5)])
    }),
];

/// Each query sees every other key.
fn odd_keys(batch: &Batch) -> Masks {
    let mut masks = Masks::default();
    for request in 0..batch.requests() {
        let keys = batch.kv_len(request) as u32;
        masks.push(batch.q_len(request), keys, |query, key| {
            (query + key) % 2 == 0
        });
    }
    masks
}

/// A causal batch that [`OPTIONS`] change.
pub fn plain(dtype: Dtype) -> (Spec, Batch) {
    let mut table = PageTable::new(16, 12);
    table.push(&[4, 1, 7, 2], 57);
    table.push(&[9, 3], 30);
    let batch = Batch::new(vec![0, 6, 7], table);
    (Spec::new(8, 2, 64).with_dtype(dtype), batch)
}
