//! Random page lists by KV head, beside requests without lists, and what attention over them is: each head of each request for itself.

use half::bf16;
use tandem_attn::{
    kv::{KvView, PagesByHead},
    problem::{Batch, KvLayout, PageTable, Spec},
    reference,
    tensor::{Element, HeadTensors},
};

use super::numeric::{Rng, Tolerance, compare, to_f64};

/// Pages, and how many keys they have.
type List = (Vec<u32>, u32);

/// A request: its new tokens, and the pages and keys of each head.
#[derive(Clone)]
struct Request {
    tokens: u32,
    of_heads: Vec<List>,
    /// Whether it is added as one whose heads read the same pages.
    whole: bool,
}

/// Requests over a pool of random keys.
pub struct Lists<T = bf16> {
    pub spec: Spec,
    pub layout: KvLayout,
    pub page_size: u32,
    pub pages: u32,
    requests: Vec<Request>,
    pub q: Vec<bf16>,
    pub pools: [Vec<T>; 2],
    /// Those of the model, if it has some.
    pub sinks: Option<Vec<f32>>,
}

impl<T: Element> Lists<T> {
    /// Requests with lists of their own for each head.
    #[allow(dead_code)] // not of all tests
    pub fn random(seed: u64) -> Self {
        Self::new(seed, None, false)
    }

    /// Such requests beside decodes and prompts whose heads read the same pages.
    pub fn mixed(seed: u64) -> Self {
        Self::new(seed, None, true)
    }

    /// The same with so many query heads for each KV head.
    #[allow(dead_code)] // not of all tests
    pub fn mixed_groups(seed: u64, group: u32) -> Self {
        Self::new(seed, Some(group), true)
    }

    fn new(seed: u64, group: Option<u32>, mixed: bool) -> Self {
        let mut rng = Rng(seed);
        let (kv_heads, few) = (1 + rng.below(4) as u32, 1 + rng.below(5) as u32);
        let group = group.unwrap_or(few);
        let dim = [64, 128][rng.below(2)];
        let spec = Spec::new(kv_heads * group, kv_heads, dim).with_kv_dtype(T::DTYPE);
        let layout = [KvLayout::Nhd, KvLayout::Hnd][rng.below(2)];
        let (page_size, pages) = ([16, 8, 5][rng.below(3)], 40);
        let mut shuffled: Vec<u32> = (0..pages).collect();
        let requests: Vec<Request> = (0..1 + rng.below(if mixed { 6 } else { 4 }))
            .map(|_| {
                let whole = mixed && rng.below(2) == 0;
                let tokens = match whole {
                    true => [1, 2, 9, 40, 77][rng.below(5)],
                    false => [1, 1, 3][rng.below(3)],
                };
                let mut list = || {
                    rng.shuffle(&mut shuffled);
                    let keys = tokens + rng.below(20 * page_size as usize) as u32;
                    let list = &shuffled[..keys.div_ceil(page_size) as usize];
                    (list.to_vec(), keys)
                };
                let of_heads = match whole {
                    true => vec![list(); kv_heads as usize],
                    false => (0..kv_heads).map(|_| list()).collect(),
                };
                Request {
                    tokens,
                    of_heads,
                    whole,
                }
            })
            .collect();
        let tokens: u32 = requests.iter().map(|request| request.tokens).sum();
        let mut floats = |count: u32| rng.floats(count as usize, -1.0, 1.0).into_iter();
        let q = floats(tokens * spec.q_heads * dim);
        let q = q.map(bf16::from_f32).collect();
        let pools = [(); 2].map(|()| {
            let pool = floats(pages * page_size * kv_heads * dim);
            pool.map(T::from_f32).collect()
        });
        Self {
            spec,
            layout,
            page_size,
            pages,
            requests,
            q,
            pools,
            sinks: None,
        }
    }

    /// The same with a sink for each query head: some outweigh all keys, and some are −∞, which is none.
    pub fn with_sinks(mut self, seed: u64) -> Self {
        self.spec = self.spec.with_sinks();
        let mut rng = Rng(seed ^ 0x51);
        let mut sinks = rng.floats(self.spec.q_heads as usize, -2.0, 8.0);
        for sink in &mut sinks {
            if rng.below(5) == 0 {
                *sink = f32::NEG_INFINITY;
            }
        }
        self.sinks = Some(sinks);
        self
    }

    /// What a run is given for each query head.
    pub fn heads(&self) -> HeadTensors<'_> {
        let none = HeadTensors::default();
        let sinks = self.sinks.as_deref();
        sinks.map_or(none, |sinks| none.with_sinks(sinks))
    }

    /// The requests with lists, as the first tokens.
    #[allow(dead_code)] // of tests on a GPU
    pub fn without_whole(&self) -> Self
    where
        T: Clone,
    {
        let requests = self.requests.iter().filter(|request| !request.whole);
        let requests: Vec<Request> = requests.cloned().collect();
        let tokens: u32 = requests.iter().map(|request| request.tokens).sum();
        let elements = tokens * self.spec.q_heads * self.spec.head_dim_qk;
        Self {
            requests,
            q: self.q[..elements as usize].to_vec(),
            pools: self.pools.clone(),
            sinks: self.sinks.clone(),
            ..*self
        }
    }

    pub fn view(&self) -> KvView<'_, T> {
        let [k, v] = &self.pools;
        KvView::new(&self.spec, self.layout, self.page_size, k, v)
    }

    pub fn by_head(&self) -> PagesByHead {
        let mut lists = PagesByHead::new(&self.spec, self.view().k_strides, self.pages)
            .expect("a plain variant");
        for request in &self.requests {
            let of_heads = request.of_heads.iter();
            let of_heads: Vec<_> = of_heads.map(|(pages, keys)| (&pages[..], *keys)).collect();
            let pushed = match request.whole {
                true => lists.push_whole(request.tokens, of_heads[0].0, of_heads[0].1),
                false => lists.push(request.tokens, &of_heads),
            };
            pushed.expect("good lists");
        }
        lists
    }

    /// `[tokens, q_heads, dim]` and `[tokens, q_heads]` in f64, from keys that are gathered head by head.
    pub fn right(&self) -> (Vec<f64>, Vec<f64>) {
        let Spec {
            q_heads,
            kv_heads,
            head_dim_qk: dim,
            ..
        } = self.spec;
        let (group, view) = (self.spec.group() as usize, self.view());
        let (row, dim) = (q_heads as usize * dim as usize, dim as usize);
        let mut out = vec![f64::NAN; self.q.len()];
        let mut lse = vec![f64::NAN; self.q.len() / dim];
        let mut one = Spec::new(group as u32, 1, dim as u32).with_kv_dtype(T::DTYPE);
        one.variant.sinks = self.sinks.is_some();
        let mut first = 0;
        for Request {
            tokens, of_heads, ..
        } in &self.requests
        {
            for head in 0..kv_heads {
                let (pages, keys) = &of_heads[head as usize];
                let gather = |value: bool| -> Vec<T> {
                    let of_key = |key: u32| {
                        let (page, offset) =
                            (pages[(key / self.page_size) as usize], key % self.page_size);
                        match value {
                            false => view.key(page, offset, head, dim as u32),
                            true => view.value(page, offset, head, dim as u32),
                        }
                    };
                    (0..*keys).flat_map(of_key).copied().collect()
                };
                let (k, v) = (gather(false), gather(true));
                let mut table = PageTable::new(1, *keys);
                table.push(&(0..*keys).collect::<Vec<_>>(), *keys);
                let batch = Batch::new(vec![0, *tokens], table);
                let at = |token: usize| (first + token) * row + head as usize * group * dim;
                let q: Vec<bf16> = (0..*tokens as usize)
                    .flat_map(|token| &self.q[at(token)..][..group * dim])
                    .copied()
                    .collect();
                let kv = KvView::new(&one, KvLayout::Nhd, 1, &k, &v);
                let sinks = self.sinks.as_ref();
                let heads = HeadTensors::default();
                let heads = sinks.map_or(heads, |sinks| {
                    heads.with_sinks(&sinks[head as usize * group..][..group])
                });
                let right = reference::attention_heads(&one, &batch, &q, &[kv], &heads);
                let right = right.expect("they fit");
                for token in 0..*tokens as usize {
                    let to = at(token);
                    out[to..][..group * dim]
                        .copy_from_slice(&right.out[token * group * dim..][..group * dim]);
                    lse[to / dim..][..group].copy_from_slice(&right.lse[token * group..][..group]);
                }
            }
            first += *tokens as usize;
        }
        (out, lse)
    }

    /// Compares outputs and LSEs: those of a GPU have weights of 16 bits.
    pub fn check<O: Element>(&self, out: &[O], lse: &[f32], on_gpu: bool) -> Result<(), String> {
        let right = self.right();
        let (tokens, heads) = (
            lse.len() / self.spec.q_heads as usize,
            self.spec.q_heads as usize,
        );
        let shape = [tokens, heads, self.spec.head_dim_v as usize];
        let mut tolerance = Tolerance::of(O::DTYPE);
        if on_gpu {
            tolerance.absolute = 1.0 / 256.0;
        }
        compare("out", &shape, &to_f64(out), &right.0, tolerance)?;
        let tolerance = Tolerance {
            absolute: 2e-4,
            relative: 1e-5,
        };
        compare("lse", &shape[..2], &to_f64(lse), &right.1, tolerance)
    }
}
