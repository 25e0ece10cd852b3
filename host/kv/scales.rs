//! Scales of 8-bit keys and values.

use kernels_gpu::abi::KvStrides;

use super::{
    latent_656::{ELEMENTS, LATENT_656_BYTES, NUMBERS},
    rows::{check_rows, row},
};
use crate::{
    problem::{Dtype, Spec},
    tensor::ShapeError,
};

/// Scales of an 8-bit pool: a key or value is a stored number times a scale.
///
/// All scales must be positive and finite; this is not checked. A variant's hooks on keys and values see stored numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum KvScales<'a> {
    /// A scale of 1.
    #[default]
    One,
    /// One scale for all keys, and one for all values.
    Tensor {
        /// Of keys.
        k: f32,
        /// Of values.
        v: f32,
    },
    /// One scale for each KV head.
    Head {
        /// `[kv_heads]`, of keys.
        k: &'a [f32],
        /// `[kv_heads]`, of values.
        v: &'a [f32],
    },
    /// One scale for each request and KV head. The request is that of the query. If several requests read the same keys, such as
    /// a shared prefix, each uses its own scales.
    Request {
        /// `[requests, kv_heads]`, of keys.
        k: &'a [f32],
        /// `[requests, kv_heads]`, of values.
        v: &'a [f32],
        /// `[total_q]`: the request of each query token.
        of_token: &'a [u32],
    },
    /// One scale for each token and KV head: `[pages, page_size, kv_heads]` in any order, so that scales can be stored
    /// inside the pages.
    Token {
        /// Scales of keys, starting with the first key of page 0.
        k: &'a [f32],
        /// Scales of values, starting with the first value of page 0.
        v: &'a [f32],
        /// Strides of `k`, in scales.
        k_strides: KvStrides,
        /// Strides of `v`, in scales.
        v_strides: KvStrides,
    },
    /// Each row of a [latent](Spec::latent) pool in F8E4M3 has 656 bytes: 512 numbers, an
    /// f32 scale for each 128 of them, and the last 64 elements of the key in bf16. The value of a number is its product
    /// with its scale, which may be rounded to bf16 or f16. Scales that are powers of two lose nothing, unless the scales of one key
    /// differ by a factor of more than 2²¹. Strides count bytes; hooks see the products.
    InRow,
}

/// The source of the scales when keys and values are appended.
#[derive(Debug)]
#[non_exhaustive]
pub enum AppendScales<'a> {
    /// The caller gives them. Those of [`KvScales::Request`] are for the requests of the new tokens.
    Given(KvScales<'a>),
    /// A scale is computed for each token and head, such that its largest number becomes the largest of the type. Scales are
    /// written as [`KvScales::Token`] reads them: `[pages, page_size, kv_heads]` in any order, for a dense pool with the
    /// strides `KvStrides { page: page_size * kv_heads, token: kv_heads, head: 1, page_size }`.
    Computed {
        /// Output: scales of keys, starting with the first key of page 0.
        k: &'a mut [f32],
        /// Output: scales of values, starting with the first value of page 0.
        v: &'a mut [f32],
        /// How `k` lies, in scales.
        k_strides: KvStrides,
        /// How `v` lies, in scales.
        v_strides: KvStrides,
    },
}

/// What a scale is looked up by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScaleAt {
    /// The query token.
    pub(crate) token: u32,
    /// The KV head.
    pub(crate) head: u32,
    /// Page of the key.
    pub(crate) page: u32,
    /// Offset of the key in the page.
    pub(crate) offset: u32,
}

/// Checks that there are rows that [contain their scales](KvScales::InRow) for these heads.
pub(crate) fn check_in_row(spec: &Spec, dtype: Dtype) -> Result<(), ShapeError> {
    let heads = (spec.head_dim_qk, spec.head_dim_v) == (ELEMENTS as u32, NUMBERS as u32);
    if spec.latent && heads && dtype == Dtype::F8E4M3 {
        return Ok(());
    }
    Err(ShapeError::NoRows656 {
        latent: spec.latent,
        head_dim_qk: spec.head_dim_qk,
        head_dim_v: spec.head_dim_v,
        dtype,
    })
}

impl KvScales<'_> {
    /// Elements of a row in the pool, if a key (or value) has `dim` elements.
    pub(crate) fn row_elements(
        &self,
        spec: &Spec,
        dtype: Dtype,
        dim: u32,
    ) -> Result<u32, ShapeError> {
        match self {
            Self::InRow => check_in_row(spec, dtype).map(|()| LATENT_656_BYTES),
            _ => Ok(dim),
        }
    }

    /// Whether each key has scales of its own.
    pub(crate) const fn by_key(&self) -> bool {
        matches!(self, Self::Token { .. } | Self::InRow)
    }

    /// Scales of a key and of its value, for a query.
    #[inline]
    pub(crate) fn at(&self, kv_heads: u32, at: ScaleAt) -> [f32; 2] {
        let ScaleAt {
            token,
            head,
            page,
            offset,
        } = at;
        match *self {
            // Reading a row already applies its scales.
            Self::One | Self::InRow => [1.0; 2],
            Self::Tensor { k, v } => [k, v],
            Self::Head { k, v } => [k[head as usize], v[head as usize]],
            Self::Request { k, v, of_token } => {
                let index = (of_token[token as usize] * kv_heads + head) as usize;
                [k[index], v[index]]
            }
            Self::Token {
                k,
                v,
                k_strides,
                v_strides,
            } => {
                let place = |strides| row(strides, page, offset, head, 1).start;
                [k[place(k_strides)], v[place(v_strides)]]
            }
        }
    }

    /// Checks that there is a scale for every key of a part.
    pub(crate) fn check(
        &self,
        dtype: Dtype,
        part: usize,
        kv_heads: u32,
        total_q: u32,
        [page_size, pages]: [u32; 2],
    ) -> Result<(), ShapeError> {
        if !matches!(self, Self::One) && dtype.bytes() != 1 {
            return Err(ShapeError::Scaled { dtype });
        }
        let length = ShapeError::length;
        let heads = kv_heads as usize;
        match *self {
            Self::One | Self::Tensor { .. } | Self::InRow => Ok(()),
            Self::Head { k, v } => {
                length("scales of keys", k.len(), "[kv_heads]", heads)?;
                length("scales of values", v.len(), "[kv_heads]", heads)
            }
            Self::Request { k, v, of_token } => {
                length(
                    "requests of tokens",
                    of_token.len(),
                    "[total_q]",
                    total_q as usize,
                )?;
                let shape = "[requests, kv_heads]";
                let requests = k.len() / heads;
                length("scales of keys", k.len(), shape, requests * heads)?;
                length("scales of values", v.len(), shape, k.len())?;
                let past = of_token
                    .iter()
                    .position(|&request| request as usize >= requests);
                past.map_or(Ok(()), |token| {
                    Err(ShapeError::NoRequest {
                        token,
                        got: of_token[token],
                        requests,
                    })
                })
            }
            Self::Token {
                k,
                v,
                k_strides,
                v_strides,
            } => {
                let pages = [page_size, pages];
                let check = |tensor, pool: &[f32], strides| {
                    check_rows(part, (tensor, pool.len()), strides, pages, kv_heads, 1)
                };
                check("scales of keys", k, k_strides)?;
                check("scales of values", v, v_strides)
            }
        }
    }
}
