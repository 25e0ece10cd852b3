//! Scales of 8-bit keys and values in a GPU's memory.

use tandem_attn::{
    exec::gpu::{DeviceArray, DeviceTensor, KvPool, KvScales},
    problem::{Dtype, KvLayout, Spec},
};

use super::Memory;
use crate::{
    Failure,
    tensors::{ScaledBy, Scales},
};

/// Scales that were copied to the GPU.
pub(super) struct OnGpu {
    by: By,
    k: Memory,
    v: Memory,
    /// Of keys, and as many of values.
    count: usize,
}

enum By {
    Tensor,
    Head,
    /// The request of each query token.
    Request(Memory, usize),
    Token,
}

impl OnGpu {
    pub(super) fn of(scales: Option<&Scales>) -> Result<Option<Self>, Failure> {
        let Some(Scales { by, k, v }) = scales else {
            return Ok(None);
        };
        let by = match by {
            ScaledBy::Tensor => By::Tensor,
            ScaledBy::Head => By::Head,
            ScaledBy::Request { of_token } => By::Request(Memory::of(of_token)?, of_token.len()),
            ScaledBy::Token => By::Token,
        };
        Ok(Some(Self {
            by,
            k: Memory::of(k)?,
            v: Memory::of(v)?,
            count: k.len(),
        }))
    }

    /// The scales of a pool of these heads in this layout.
    pub(super) fn of_pool(&self, spec: &Spec, pool: &KvPool, layout: KvLayout) -> KvScales {
        let both = [&self.k, &self.v].map(Memory::address);
        let heads = spec.kv_heads as usize;
        match &self.by {
            By::Tensor => {
                let [k, v] = both.map(|address| DeviceTensor::new(address, Dtype::F32, [1]));
                KvScales::Tensor { k, v }
            }
            By::Head => {
                let [k, v] = both.map(|address| DeviceTensor::new(address, Dtype::F32, [heads]));
                KvScales::Head { k, v }
            }
            By::Request(of_token, tokens) => {
                let shape = [self.count / heads, heads];
                let [k, v] = both.map(|address| DeviceTensor::new(address, Dtype::F32, shape));
                let of_token = DeviceArray::new(of_token.address(), *tokens);
                KvScales::Request { k, v, of_token }
            }
            By::Token => {
                let page_size = pool.k_strides.page_size;
                let strides = layout.strides(page_size, spec.kv_heads, 1);
                let shape = [pool.pages, page_size, spec.kv_heads].map(|extent| extent as usize);
                let [k, v] = both.map(|address| {
                    DeviceTensor::new(address, Dtype::F32, shape)
                        .with_stride(0, strides.page as usize)
                        .with_stride(1, strides.token as usize)
                        .with_stride(2, strides.head as usize)
                });
                KvScales::Token { k, v }
            }
        }
    }
}
