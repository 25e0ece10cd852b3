//! Scales of 8-bit keys and values in an input file.

use std::collections::HashMap;

use safetensors::SafeTensors;
use tandem_attn::problem::{Batch, KvLayout, Spec};

use super::heads::{NOTHING, numbers_of};
use crate::tensors::{ScaledBy, Scales};

/// The names of the scales of keys and of values.
const NAMES: [&str; 2] = ["k_scale", "v_scale"];

/// What scales are for.
pub(super) struct Batched<'a> {
    pub(super) spec: &'a Spec,
    pub(super) batch: &'a Batch,
    pub(super) layout: KvLayout,
}

/// What has a scale of its own.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Each {
    Tensor,
    Head,
    Request,
    Token,
}

/// The scales of keys and values, in the same form. None if all are 1.
pub(super) fn read(
    file: &SafeTensors<'_>,
    metadata: &HashMap<String, String>,
    of: &Batched<'_>,
) -> Result<Option<Scales>, String> {
    let [k, v] = NAMES.map(|name| of.scale(file, metadata, name));
    let ((of_k, k), (of_v, v)) = (k?, v?);
    let is_one = |scales: &[f32]| scales.iter().all(|&scale| scale == 1.0);
    let Some(name) = [&k, &v]
        .into_iter()
        .zip(NAMES)
        .find_map(|(scales, name)| (!is_one(scales)).then_some(name))
    else {
        return Ok(None);
    };
    let spec = of.spec;
    if spec.kv_dtype.bytes() != 1 {
        return Err(format!(
            "{name} is there and k_cache is {:?}: only 8-bit keys and values have scales; multiply sm_scale by k_scale, and o by \
             v_scale",
            spec.kv_dtype
        ));
    }
    let of_both = match (of_k, of_v) {
        (a, b) if a == b => a,
        (Each::Tensor, other) | (other, Each::Tensor) => other,
        (Each::Head, other) | (other, Each::Head) => other,
        _ => {
            return Err(
                "k_scale and v_scale: one has a number for each request and the other for each token: give both alike"
                    .to_owned(),
            );
        }
    };
    let by = match of_both {
        Each::Tensor => ScaledBy::Tensor,
        Each::Head => ScaledBy::Head,
        Each::Request => ScaledBy::Request {
            of_token: of.requests_of_tokens(),
        },
        Each::Token => ScaledBy::Token,
    };
    let (k, v) = (of.spread(k, of_k, of_both), of.spread(v, of_v, of_both));
    Ok(Some(Scales { by, k, v }))
}

impl Batched<'_> {
    /// Pages of the pool and tokens in a page, by KV head.
    fn extents(&self) -> [usize; 3] {
        let table = &self.batch.parts[0].table;
        [table.pool_pages, table.page_size, self.spec.kv_heads].map(|extent| extent as usize)
    }

    /// The scales of one name, from a tensor or from the metadata.
    fn scale(
        &self,
        file: &SafeTensors<'_>,
        metadata: &HashMap<String, String>,
        name: &str,
    ) -> Result<(Each, Vec<f32>), String> {
        let note = metadata.get(name).filter(|note| *note != NOTHING);
        let (each, scales) = match (file.tensor(name), note) {
            (Err(_), None) => (Each::Tensor, vec![1.0]),
            (Ok(view), None) => {
                let each = self.form(name, view.shape())?;
                (each, numbers_of(&view, name)?)
            }
            (Err(_), Some(text)) => {
                let number = text.trim().parse();
                let number =
                    number.map_err(|_| format!("metadata {name} is {text:?}: give a number"))?;
                (Each::Tensor, vec![number])
            }
            (Ok(_), Some(_)) => {
                return Err(format!(
                    "{name} is there as a tensor and in the metadata: leave one out"
                ));
            }
        };
        let scales = match each {
            Each::Token => self.without_unused(scales),
            _ => scales,
        };
        let wrong = |scale: &&f32| !(scale.is_normal() && **scale > 0.0);
        match scales.iter().find(wrong) {
            Some(scale) if !scale.is_finite() => {
                Err(format!("{name} has {scale}: give finite numbers"))
            }
            Some(scale) => Err(format!("{name} has {scale}: give positive numbers")),
            None => Ok((each, scales)),
        }
    }

    fn form(&self, name: &str, shape: &[usize]) -> Result<Each, String> {
        let [pages, page_size, kv_heads] = self.extents();
        let by_token = match self.layout {
            KvLayout::Nhd => [pages, page_size, kv_heads],
            KvLayout::Hnd => [pages, kv_heads, page_size],
        };
        let by_request = [self.batch.requests(), kv_heads];
        match *shape {
            [] | [1] => Ok(Each::Tensor),
            [heads] if heads == kv_heads => Ok(Each::Head),
            _ if shape == by_request => Ok(Each::Request),
            _ if shape == by_token => Ok(Each::Token),
            _ => Err(format!(
                "{name} has shape {shape:?}: give one, or one for each KV head ([{kv_heads}]), for each request and head \
                 ({by_request:?}) or for each token and head ({by_token:?})"
            )),
        }
    }

    /// Scales of tokens, of which those that no request has become 1: nothing needs to be there.
    fn without_unused(&self, mut scales: Vec<f32>) -> Vec<f32> {
        let [pages, page_size, kv_heads] = self.extents();
        let mut filled = vec![0; pages];
        let table = &self.batch.parts[0].table;
        for request in 0..self.batch.requests() {
            let mut left = table.kv_len(request) as usize;
            for &page in table.pages(request) {
                let tokens = left.min(page_size);
                filled[page as usize] = tokens.max(filled[page as usize]);
                left -= tokens;
            }
        }
        let of_pages = scales.chunks_exact_mut(page_size * kv_heads);
        for (scales, &filled) in of_pages.zip(&filled) {
            for (at, scale) in scales.iter_mut().enumerate() {
                let token = match self.layout {
                    KvLayout::Nhd => at / kv_heads,
                    KvLayout::Hnd => at % page_size,
                };
                if token >= filled {
                    *scale = 1.0;
                }
            }
        }
        scales
    }

    /// The request of each query token.
    fn requests_of_tokens(&self) -> Vec<u32> {
        let requests = 0..self.batch.requests() as u32;
        let of_request = |request: u32| {
            let tokens = self.batch.q_len(request as usize) as usize;
            std::iter::repeat_n(request, tokens)
        };
        requests.flat_map(of_request).collect()
    }

    /// The same scales, one for each of something smaller.
    fn spread(&self, scales: Vec<f32>, from: Each, to: Each) -> Vec<f32> {
        let [pages, page_size, kv_heads] = self.extents();
        if from == to {
            return scales;
        }
        let of_heads = match from {
            Each::Tensor => vec![scales[0]; kv_heads],
            _ => scales,
        };
        match (to, self.layout) {
            (Each::Request, _) => of_heads.repeat(self.batch.requests()),
            (Each::Token, KvLayout::Nhd) => of_heads.repeat(pages * page_size),
            (Each::Token, KvLayout::Hnd) => {
                let of_head = |&scale| std::iter::repeat_n(scale, page_size);
                let of_page: Vec<_> = of_heads.iter().flat_map(of_head).collect();
                of_page.repeat(pages)
            }
            (Each::Tensor | Each::Head, _) => of_heads,
        }
    }
}
