//! Queries and pools of random numbers, and the reference on them.

use half::bf16;
use tandem_attn::{
    abi::KvStrides,
    kv::{KvScales, KvView, LATENT_656_BYTES},
    problem::{Batch, Dtype, KvLayout, PageTable, Part, Spec},
    reference,
    tensor::{Element, F8E4M3, HeadTensors, ShapeError},
    variants::{DISTANCE_BIAS, SIGMOID},
};

use super::{
    super::numeric::Rng,
    variants::{alibi, distance_bias, heads, sigmoid, sinks, slopes},
};

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
    pub fn random(spec: &Spec, table: &PageTable, layout: KvLayout, noise: &mut Rng) -> Self {
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

    /// The same keys and values with other strides, and NaN everywhere else.
    pub fn relaid(&self, spec: &Spec, pages: u32, [k_strides, v_strides]: [KvStrides; 2]) -> Self {
        let side = |elements: &[T], dim: u32, from: KvStrides, to: KvStrides| {
            let mut laid = vec![T::from_f32(f32::NAN); (pages * to.page) as usize];
            for index in 0..pages * from.page_size * spec.kv_heads {
                let (token, head) = (index / spec.kv_heads, index % spec.kv_heads);
                let (page, token) = (token / from.page_size, token % from.page_size);
                let at = |s: KvStrides| {
                    let first = page * s.page + token * s.token + head * s.head;
                    first as usize..(first + dim) as usize
                };
                laid[at(to)].copy_from_slice(&elements[at(from)]);
            }
            laid
        };
        Self {
            k: side(&self.k, spec.head_dim_qk, self.k_strides, k_strides),
            v: side(&self.v, spec.head_dim_v, self.v_strides, v_strides),
            k_strides,
            v_strides,
        }
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
