//! Random prompts with block masks, and what attention over them is: a mask by token, head and key.

use half::bf16;
use tandem_attn::{
    kv::{BlockMask, BlockSparse, KvView, MaskedHeads},
    problem::{Batch, KvLayout, PageTable, Spec},
    reference,
    tensor::{Element, HeadTensors},
    variant::{Hook, Pair, Real, Standard, Variant, VariantParams},
};

use super::numeric::{Rng, Tolerance, compare, to_f64};

/// A prompt, or a chunk of one.
pub struct Prompt {
    pub tokens: u32,
    pub keys: u32,
    pub pages: Vec<u32>,
    pub masks: Vec<BlockMask>,
}

/// Prompts over a pool of random keys.
pub struct Prompts {
    pub spec: Spec,
    pub layout: KvLayout,
    pub page_size: u32,
    pub pages: u32,
    pub masked: MaskedHeads,
    pub prompts: Vec<Prompt>,
    pub q: Vec<bf16>,
    pub pools: [Vec<bf16>; 2],
}

impl Prompts {
    pub fn random(seed: u64) -> Self {
        let mut rng = Rng(seed);
        let (kv_heads, group) = (1 + rng.below(3) as u32, 1 + rng.below(4) as u32);
        let dim = [64, 128][rng.below(2)];
        let mut spec = Spec::new(kv_heads * group, kv_heads, dim);
        spec.variant.causal = rng.below(4) > 0;
        let layout = [KvLayout::Nhd, KvLayout::Hnd][rng.below(2)];
        let masked = [
            MaskedHeads::All,
            MaskedHeads::KvHead,
            MaskedHeads::QueryHead,
        ][rng.below(3)];
        let page_size = [16, 64, 8][rng.below(3)];
        let masks = match masked {
            MaskedHeads::KvHead => kv_heads,
            MaskedHeads::QueryHead => kv_heads * group,
            _ => 1,
        };
        let (mut prompts, mut used) = (Vec::new(), 0);
        for _ in 0..1 + rng.below(2) {
            // Whole blocks and others, chunks that begin anywhere.
            let tokens = [128_u32, 300, 65, 256, 1][rng.below(5)];
            let keys = tokens + [0, 128, 77, 256][rng.below(4)];
            let rows = [64, 128][rng.below(2)];
            let pages = keys.div_ceil(page_size);
            let mut mask = || {
                let one_in = 1 + rng.below(4);
                let mut sees = Vec::new();
                for _ in 0..tokens.div_ceil(rows) * keys.div_ceil(128) {
                    sees.push(rng.below(one_in) == 0);
                }
                let of_row = keys.div_ceil(128);
                let sees = |query, key| sees[(query * of_row + key) as usize];
                BlockMask::from_fn(rows, tokens, keys, sees).expect("blocks of 64 or 128")
            };
            prompts.push(Prompt {
                masks: (0..masks).map(|_| mask()).collect(),
                tokens,
                keys,
                pages: (used..used + pages).collect(),
            });
            used += pages;
        }
        let mut shuffled: Vec<u32> = (0..used).collect();
        rng.shuffle(&mut shuffled);
        for page in prompts.iter_mut().flat_map(|prompt| &mut prompt.pages) {
            *page = shuffled[*page as usize];
        }
        let tokens: u32 = prompts.iter().map(|prompt| prompt.tokens).sum();
        let mut floats = |count: u32| -> Vec<bf16> {
            let values = rng.floats(count as usize, -1.0, 1.0);
            values.into_iter().map(bf16::from_f32).collect()
        };
        Self {
            q: floats(tokens * spec.q_heads * dim),
            pools: [(); 2].map(|()| floats(used * page_size * kv_heads * dim)),
            spec,
            layout,
            page_size,
            pages: used,
            masked,
            prompts,
        }
    }

    pub fn tokens(&self) -> usize {
        self.q.len() / (self.spec.q_heads * self.spec.head_dim_qk) as usize
    }

    pub fn view(&self) -> KvView<'_, bf16> {
        let [k, v] = &self.pools;
        KvView::new(&self.spec, self.layout, self.page_size, k, v)
    }

    pub fn sparse(&self) -> BlockSparse {
        let strides = self.view().k_strides;
        let mut sparse = BlockSparse::new(&self.spec, strides, self.pages, self.masked)
            .expect("a plain variant");
        for Prompt {
            tokens,
            keys,
            pages,
            masks,
        } in &self.prompts
        {
            sparse
                .push(*tokens, pages, *keys, masks)
                .expect("good masks");
        }
        sparse
    }

    /// `[tokens, q_heads, dim]` and `[tokens, q_heads]` in f64.
    pub fn right(&self) -> reference::Output {
        let mut table = PageTable::new(self.page_size, self.pages);
        let mut indptr = vec![0];
        for prompt in &self.prompts {
            table.push(&prompt.pages, prompt.keys);
            indptr.push(indptr[indptr.len() - 1] + prompt.tokens);
        }
        let variant = Blocked {
            standard: Standard(self.spec.variant_params()),
            prompts: self,
        };
        let batch = Batch::new(indptr, table);
        let heads = HeadTensors::default();
        reference::attention_with(
            &variant,
            &self.spec,
            &batch,
            &self.q,
            &[self.view()],
            &heads,
        )
        .expect("they fit")
    }

    /// Compares outputs and LSEs, these one run after the other: those of a GPU have weights of 16 bits.
    pub fn check<O: Element>(&self, out: &[O], lse: &[f32], on_gpu: bool) -> Result<(), String> {
        let right = self.right();
        let (tokens, heads) = (self.tokens(), self.spec.q_heads as usize);
        let of_run = self.sparse().spec().q_heads as usize;
        let by_token: Vec<f32> = (0..tokens * heads)
            .map(|at| (at / heads, at % heads))
            .map(|(token, head)| {
                let of_runs = head / of_run * tokens * of_run;
                lse[of_runs + token * of_run + head % of_run]
            })
            .collect();
        let shape = [tokens, heads, self.spec.head_dim_v as usize];
        let mut tolerance = Tolerance::of(O::DTYPE);
        if on_gpu {
            tolerance.absolute = 1.0 / 256.0;
        }
        compare("out", &shape, &to_f64(out), &right.out, tolerance)?;
        let tolerance = Tolerance {
            absolute: 2e-4,
            relative: 1e-5,
        };
        compare(
            "lse",
            &shape[..2],
            &to_f64(&by_token),
            &right.lse,
            tolerance,
        )
    }
}

/// The masks, asked key by key.
#[derive(Clone, Copy)]
struct Blocked<'a> {
    standard: Standard<false>,
    prompts: &'a Prompts,
}

impl Variant for Blocked<'_> {
    fn params(&self) -> &VariantParams {
        self.standard.params()
    }

    fn logit<R: Real>(&self, dot: R, at: Pair) -> impl Hook<R> {
        self.standard.logit(dot, at)
    }

    fn visible(&self, at: Pair) -> impl Hook<bool> {
        let mut token = at.token;
        for prompt in &self.prompts.prompts {
            if token < prompt.tokens {
                let heads = self.prompts.spec.q_heads as usize / prompt.masks.len();
                let mask = &prompt.masks[at.head as usize / heads];
                return mask.sees(token / mask.rows(), at.key / BlockMask::KEYS);
            }
            token -= prompt.tokens;
        }
        unreachable!("every token is of a prompt")
    }
}
