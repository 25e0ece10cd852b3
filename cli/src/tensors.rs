//! Queries, keys and values of a batch, in the element types of its specification.

use bytemuck::{Zeroable, allocation::try_zeroed_vec};
use half::{bf16, f16};
use rayon::prelude::*;
use tandem_attn::{
    Error,
    kv::{KvScales, KvView, LATENT_656_BYTES},
    problem::{Batch, Dtype, KvLayout, Spec},
    reference,
    tensor::{Element, F8E4M3, F8E5M2, HeadTensors},
};

use crate::{
    Failure,
    hooks::{Numbers, Own},
    table::scaled,
    with_hooks,
};

/// A tensor of any element type.
#[derive(Clone, Debug)]
pub enum Tensor {
    /// IEEE half precision.
    F16(Vec<f16>),
    /// bfloat16.
    Bf16(Vec<bf16>),
    /// IEEE single precision.
    F32(Vec<f32>),
    /// 8-bit float, 4 exponent bits.
    F8E4M3(Vec<F8E4M3>),
    /// 8-bit float, 5 exponent bits.
    F8E5M2(Vec<F8E5M2>),
}

/// Runs `$body` with `$x` bound to the vector inside of a [`Tensor`].
#[macro_export]
macro_rules! with_tensor {
    ($tensor:expr, $x:ident => $body:expr) => {
        match $tensor {
            $crate::tensors::Tensor::F16($x) => $body,
            $crate::tensors::Tensor::Bf16($x) => $body,
            $crate::tensors::Tensor::F32($x) => $body,
            $crate::tensors::Tensor::F8E4M3($x) => $body,
            $crate::tensors::Tensor::F8E5M2($x) => $body,
        }
    };
}

/// Runs `$body` with keys and values as vectors of one type.
#[macro_export]
macro_rules! with_keys_and_values {
    ($k:expr, $v:expr, |$a:ident, $b:ident| $body:expr) => {{
        use $crate::tensors::Tensor;
        match ($k, $v) {
            (Tensor::F16($a), Tensor::F16($b)) => $body,
            (Tensor::Bf16($a), Tensor::Bf16($b)) => $body,
            (Tensor::F32($a), Tensor::F32($b)) => $body,
            (Tensor::F8E4M3($a), Tensor::F8E4M3($b)) => $body,
            (Tensor::F8E5M2($a), Tensor::F8E5M2($b)) => $body,
            _ => Err($crate::Failure::Input(
                "keys and values are of two types: convert one of them".to_owned(),
            )),
        }
    }};
}

impl Tensor {
    /// A tensor of zeros.
    ///
    /// # Errors
    /// [`Failure::Input`] for unsupported types, or if memory is exhausted.
    pub fn zeros(dtype: Dtype, len: usize) -> Result<Self, Failure> {
        Ok(match dtype {
            Dtype::F16 => Self::F16(zeros(len)?),
            Dtype::BF16 => Self::Bf16(zeros(len)?),
            Dtype::F32 => Self::F32(zeros(len)?),
            Dtype::F8E4M3 => Self::F8E4M3(zeros(len)?),
            Dtype::F8E5M2 => Self::F8E5M2(zeros(len)?),
            other => {
                return Err(Failure::Input(format!(
                    "tensors of {other:?} are not supported here"
                )));
            }
        })
    }

    /// A tensor of random numbers between −`largest` and `largest`.
    ///
    /// # Errors
    /// As [`zeros`](Self::zeros).
    pub fn random(dtype: Dtype, len: usize, largest: f32, seed: u64) -> Result<Self, Failure> {
        let mut tensor = Self::zeros(dtype, len)?;
        with_tensor!(&mut tensor, values => fill(values, largest, seed));
        Ok(tensor)
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        with_tensor!(self, values => values.len())
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element type.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        match self {
            Self::F16(_) => Dtype::F16,
            Self::Bf16(_) => Dtype::BF16,
            Self::F32(_) => Dtype::F32,
            Self::F8E4M3(_) => Dtype::F8E4M3,
            Self::F8E5M2(_) => Dtype::F8E5M2,
        }
    }

    /// The bytes in memory.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        with_tensor!(self, values => bytemuck::cast_slice(values))
    }

    /// The value at an index.
    #[must_use]
    pub fn get(&self, index: usize) -> f32 {
        with_tensor!(self, values => values[index].to_f32())
    }

    /// A copy of a range of elements.
    #[must_use]
    pub fn slice(&self, range: std::ops::Range<usize>) -> Self {
        match self {
            Self::F16(values) => Self::F16(values[range].to_vec()),
            Self::Bf16(values) => Self::Bf16(values[range].to_vec()),
            Self::F32(values) => Self::F32(values[range].to_vec()),
            Self::F8E4M3(values) => Self::F8E4M3(values[range].to_vec()),
            Self::F8E5M2(values) => Self::F8E5M2(values[range].to_vec()),
        }
    }
}

/// Uses zeroed pages of the system, so that memory is not touched before it is used.
fn zeros<T: Zeroable>(len: usize) -> Result<Vec<T>, Failure> {
    try_zeroed_vec(len).map_err(|()| {
        let bytes = len as f64 * size_of::<T>() as f64;
        Failure::Input(format!(
            "there is no memory for a tensor of {}",
            scaled(bytes, "B")
        ))
    })
}

/// Length of the repeated random sequence. It is prime, so that repetitions do not align with rows and pages.
const PERIOD: usize = 1_048_573;

fn fill<T: Element>(values: &mut [T], largest: f32, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let drawn = values.len().min(PERIOD);
    for value in &mut values[..drawn] {
        *value = T::from_f32(largest * (2.0 * random.f32() - 1.0));
    }
    let (drawn, rest) = values.split_at_mut(drawn);
    rest.par_chunks_mut(PERIOD)
        .for_each(|piece| piece.copy_from_slice(&drawn[..piece.len()]));
}

/// Sinks, if the specification has them: a few exceed all keys, and some are negligible.
#[must_use]
pub fn sinks(spec: &Spec) -> Option<Vec<f32>> {
    let sink = |head: u32| (head % 9) as f32 - 2.0;
    let sinks = || (0..spec.sinks() as u32).map(sink).collect();
    spec.variant.sinks.then(sinks)
}

/// The tensors per head that a run needs.
#[must_use]
pub fn heads(sinks: &Option<Vec<f32>>) -> HeadTensors<'_> {
    let none = HeadTensors::default();
    sinks
        .as_deref()
        .map_or(none, |sinks| none.with_sinks(sinks))
}

/// The inputs of a batch.
#[derive(Clone, Debug)]
pub struct Tensors {
    /// `[total_q, q_heads, head_dim_qk]`.
    pub q: Tensor,
    /// The pool of keys.
    pub k: Tensor,
    /// The pool of values.
    pub v: Tensor,
    /// Layout of the pools.
    pub layout: KvLayout,
    /// Scales of 8-bit keys and values; none if all are 1.
    pub scales: Option<Scales>,
    /// The keys of each query token as places in the pool, for a plan that does not name them; −1 is none.
    pub indices: Option<Vec<i32>>,
    /// Numbers of heads in the place of those that this program chooses.
    pub given: Given,
    /// The numbers that a workload gives for its hooks.
    pub numbers: Numbers,
}

/// Numbers of heads that an input file has.
#[derive(Clone, Debug, Default)]
pub struct Given {
    /// One for each query head.
    pub sinks: Option<Vec<f32>>,
    /// One for each query head.
    pub slopes: Option<Vec<f32>>,
}

/// What has a scale of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScaledBy {
    /// All keys, and all values.
    Tensor,
    /// A KV head.
    Head,
    /// A request and KV head: `[requests, kv_heads]`.
    Request {
        /// The request of each query token.
        of_token: Vec<u32>,
    },
    /// A token and KV head, in the layout of the pools.
    Token,
}

/// Scales of 8-bit keys and values.
#[derive(Clone, Debug, PartialEq)]
pub struct Scales {
    /// What has a scale.
    pub by: ScaledBy,
    /// Of keys.
    pub k: Vec<f32>,
    /// Of values, as many.
    pub v: Vec<f32>,
}

/// A view of the pools of a specification: one pool if it is latent.
pub fn kv_view<'a, T: Element>(
    spec: &Spec,
    layout: KvLayout,
    page_size: u32,
    k: &'a [T],
    v: &'a [T],
) -> KvView<'a, T> {
    match spec.latent {
        true if has_rows_656(spec) => KvView::latent_656(page_size, k),
        true => KvView::latent(spec, page_size, k),
        false => KvView::new(spec, layout, page_size, k, v),
    }
}

/// The specification of a part of so many heads ([`Part::heads`](tandem_attn::problem::Part::heads)).
#[must_use]
pub const fn of_part(spec: &Spec, heads: u32) -> Spec {
    let mut of_part = *spec;
    of_part.q_heads *= heads;
    of_part.kv_heads *= heads;
    of_part
}

/// Whether keys are stored with their scales in rows of 656 bytes, as DeepSeek's heads in F8E4M3.
#[must_use]
pub fn has_rows_656(spec: &Spec) -> bool {
    let dims = (spec.head_dim_qk, spec.head_dim_v);
    spec.latent && spec.kv_dtype == Dtype::F8E4M3 && dims == (576, 512)
}

/// Number of elements of a key in its pool.
#[must_use]
pub fn key_elements(spec: &Spec) -> usize {
    match has_rows_656(spec) {
        true => LATENT_656_BYTES as usize,
        false => spec.head_dim_qk as usize,
    }
}

/// Rows of 656 bytes with numbers, scales and 16-bit elements.
fn rows_656(keys: usize, seed: u64) -> Result<Tensor, Failure> {
    let row = LATENT_656_BYTES as usize;
    let mut rows = Tensor::random(Dtype::F8E4M3, keys * row, 1.0, seed)?;
    if let Tensor::F8E4M3(bytes) = &mut rows {
        // Scales are powers of two, as append makes them; others might be rounded. The 16-bit elements are 1 and −1.
        let scales: [f32; 4] = [1.0, 0.5, 1.0, 0.25];
        let scales = scales.map(f32::to_ne_bytes).concat();
        let ones = [0x3f80_u16, 0xbf80].map(u16::to_ne_bytes).concat();
        let rest = scales.into_iter().chain(ones.into_iter().cycle());
        let rest: Vec<_> = rest.take(row - 512).map(F8E4M3).collect();
        bytes
            .par_chunks_exact_mut(row)
            .for_each(|row| row[512..].copy_from_slice(&rest));
    }
    Ok(rows)
}

impl Tensors {
    /// Random tensors. Queries are large enough for some keys to stand out.
    ///
    /// # Errors
    /// If an element type is not supported.
    pub fn random(
        spec: &Spec,
        batch: &Batch,
        layout: KvLayout,
        seed: u64,
    ) -> Result<Self, Failure> {
        let table = &batch.parts[0].table;
        let tokens = table.pool_pages as usize * table.page_size as usize;
        let rows = tokens * spec.kv_heads as usize;
        let queries = batch.total_q() as usize * spec.q_heads as usize;
        let (dim_qk, dim_v) = (spec.head_dim_qk as usize, spec.head_dim_v as usize);
        Ok(Self {
            q: Tensor::random(spec.q_dtype, queries * dim_qk, 4.0, seed)?,
            k: match has_rows_656(spec) {
                true => rows_656(rows, seed + 1)?,
                false => Tensor::random(spec.kv_dtype, rows * dim_qk, 1.0, seed + 1)?,
            },
            v: match spec.latent {
                // A latent pool contains the values in the keys.
                true => Tensor::zeros(spec.kv_dtype, 0)?,
                false => Tensor::random(spec.kv_dtype, rows * dim_v, 1.0, seed + 2)?,
            },
            layout,
            scales: None,
            indices: None,
            given: Given::default(),
            numbers: Numbers::default(),
        })
    }

    /// With the numbers that a workload gives for its hooks.
    #[must_use]
    pub const fn with_numbers(mut self, numbers: Numbers) -> Self {
        self.numbers = numbers;
        self
    }

    /// Adds random scales per token, for 8-bit keys and values: 1/4, 1/2 or 1. Prefills round the product of a key and its scale to
    /// 16 bits, which is exact then, so results can be compared with f64.
    ///
    /// # Errors
    /// If memory is exhausted.
    pub fn with_token_scales(mut self, spec: &Spec, seed: u64) -> Result<Self, Failure> {
        let rows = self.k.len() / key_elements(spec);
        let random = |seed| -> Result<Vec<f32>, Failure> {
            let mut scales = zeros::<f32>(rows)?;
            fill(&mut scales, 0.5, seed);
            let power = |scale: &mut f32| *scale = ((2.0 * *scale).round() - 1.0).exp2();
            scales.iter_mut().for_each(power);
            Ok(scales)
        };
        self.scales = Some(Scales {
            by: ScaledBy::Token,
            k: random(seed)?,
            v: random(seed + 1)?,
        });
        Ok(self)
    }

    /// Sinks, if the specification has them: those that are given, or some that this program chooses.
    #[must_use]
    pub fn sinks(&self, spec: &Spec) -> Option<Vec<f32>> {
        self.given.sinks.clone().or_else(|| sinks(spec))
    }

    /// The data of the specification's hooks, likewise.
    #[must_use]
    pub fn own(&self, spec: &Spec) -> Option<Own> {
        let given = self.given.slopes.clone().map(Own::Slopes);
        given.or_else(|| Own::of(spec, self.numbers))
    }

    /// The scales of keys and values.
    #[must_use]
    pub fn scales(&self, spec: &Spec, page_size: u32) -> KvScales<'_> {
        let Some(Scales { by, k, v }) = &self.scales else {
            return match has_rows_656(spec) {
                true => KvScales::InRow,
                false => KvScales::One,
            };
        };
        match by {
            ScaledBy::Tensor => KvScales::Tensor { k: k[0], v: v[0] },
            ScaledBy::Head => KvScales::Head { k, v },
            ScaledBy::Request { of_token } => KvScales::Request { k, v, of_token },
            ScaledBy::Token => {
                let strides = self.layout.strides(page_size, spec.kv_heads, 1);
                KvScales::Token {
                    k,
                    v,
                    k_strides: strides,
                    v_strides: strides,
                }
            }
        }
    }

    /// Attention by its definition in f64, of other queries on these pools.
    ///
    /// # Errors
    /// If tensors and batch do not fit each other.
    pub fn reference(
        &self,
        spec: &Spec,
        batch: &Batch,
        q: &Tensor,
    ) -> Result<reference::Output, Failure> {
        let page_size = batch.parts[0].table.page_size;
        with_keys_and_values!(&self.k, &self.v, |k, v| {
            let view = kv_view(spec, self.layout, page_size, k, v)
                .with_scales(self.scales(spec, page_size));
            let sinks = self.sinks(spec);
            let heads = heads(&sinks);
            let own = self.own(spec);
            with_tensor!(q, q => match &own {
                Some(own) => with_hooks!(own, spec, variant => {
                    reference::attention_with(variant, spec, batch, q, &[view], &heads)
                }),
                None => reference::attention_heads(spec, batch, q, &[view], &heads),
            })
            .map_err(|error| Failure::from(Error::from(error)))
        })
    }
}
