//! Prefills of 8-bit keys: what they convert, and the pool that they then read.

use kernels_gpu::{
    abi::{ConvertParams, PrefillParams},
    common::cache,
    divisor::Divisor,
};

use super::{KvPool, Workspace, prefill_rows::vectors, steps::check_pool};
use crate::{
    Error,
    plan::conversion::PAGE,
    problem::{Dtype, KvLayout},
};

/// What the kernel calls the elements of a pool.
fn format(dtype: Dtype) -> Result<u32, Error> {
    match dtype {
        Dtype::F8E4M3 => Ok(cache::E4M3),
        Dtype::F8E5M2 => Ok(cache::E5M2),
        got => Err(Error::Dtype {
            tensor: "the KV pool",
            got,
            expected: "F8E4M3 or F8E5M2, as the plan's",
        }),
    }
}

impl Workspace {
    /// The pool of converted keys and values; of a plan without prefills it has no pages.
    pub(super) fn converted_pool(&self) -> KvPool {
        let spec = self.spec.with_kv_dtype(self.spec.q_dtype);
        let [k, v, ..] = self.converted();
        KvPool::new(&spec, KvLayout::Hnd, PAGE, self.bound.converted_pages, k, v)
    }

    /// Has a prefill of converted pages convert those of a pool of 8 bits: the launch's own entries of the list.
    pub(super) fn convert_for(
        &self,
        params: &mut PrefillParams,
        pool: &KvPool,
        pages: std::ops::Range<u32>,
        tokens: usize,
    ) -> Result<(), Error> {
        let spec = &self.spec;
        let [to_k, to_v, done, control] = self.converted();
        params.attention.scales = pool.scales.parameters(spec, pool, tokens)?;
        params.convert = ConvertParams {
            k: pool.k,
            v: pool.v,
            to_k,
            to_v,
            list: self.conversions().address,
            page_ids: self.page_ids().address,
            done,
            control,
            k_strides: vectors("k pool", pool.k, &pool.k_strides, pool.pages, pool.dtype)?,
            v_strides: vectors("v pool", pool.v, &pool.v_strides, pool.pages, pool.dtype)?,
            page_size: Divisor::new(pool.k_strides.page_size),
            first_page: pages.start,
            pages: pages.len() as u32,
            format: format(pool.dtype)?,
            reserved: [0; 2],
        };
        check_pool(pool)
    }
}
