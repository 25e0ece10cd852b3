//! The launches that convert keys and values for prefills.

use std::ops::Range;

use kernels_gpu::{
    abi::{ConvertParams, ConvertedPage, LaunchRecord, ScaleParams, TurnParams, WidenParams},
    common::cache,
    divisor::Divisor,
    passes::{turn::PIECES, widen::NUMBERS},
    registry::Op,
};

use crate::{
    Error,
    exec::gpu::{
        DeviceArray, Gpu, KvPool, KvScales, Workspace,
        prefill::describes_values,
        registry::{element, format},
        steps::{Parameters, Step},
        vectors::vectors_of,
    },
    problem::{Compute, KvLayout, Spec},
};

impl Workspace {
    /// The pool of converted keys and values, for a part of so many heads. It has no pages if the plan has no prefills.
    pub(super) fn converted_pool(&self, heads: u32) -> KvPool {
        let spec = match self.spec.compute {
            Compute::F16 => self.spec.with_kv_dtype(self.spec.on_kernels().q_dtype),
            Compute::F8 => self.spec,
        };
        let spec = spec.times(heads);
        let [k, v, ..] = self.converted();
        KvPool::new(
            &spec,
            KvLayout::Hnd,
            ConvertedPage::KEYS,
            self.bound.converted_pages / heads,
            k,
            v,
        )
    }

    /// The parameters that convert entries of the list, for a part of so many heads.
    pub(super) fn conversion_of(
        &self,
        pool: &KvPool,
        heads: u32,
        pages: Range<u32>,
    ) -> Result<ConvertParams, Error> {
        pool.check_addresses()?;
        pool.check_dtype(&self.spec)?;
        let [to_k, to_v, done, control] = self.converted();
        let [k_strides, v_strides] = vectors_of(pool, self.spec.kv_heads * heads)?;
        Ok(ConvertParams {
            k: pool.k,
            v: pool.v,
            to_k,
            to_v,
            list: self.conversions().address,
            page_ids: self.page_ids().address,
            done,
            control,
            k_strides,
            v_strides,
            page_size: Divisor::new(pool.k_strides.page_size),
            first_page: pages.start,
            pages: pages.len() as u32,
            format: match self.spec.rotary {
                Some(_) => cache::BITS16,
                None => format(pool.dtype)?,
            },
            reserved: [0; 2],
        })
    }
}

impl Gpu {
    /// The launch that widens the keys of a prefill, each by the scale of its token if tokens have scales.
    pub(super) fn prepare_widen(
        &self,
        workspace: &Workspace,
        (pool, heads): (&KvPool, u32),
        pages: Range<u32>,
        record: Option<DeviceArray<LaunchRecord>>,
        tokens: usize,
    ) -> Result<Step, Error> {
        let of_part = workspace.spec.times(heads);
        let spec = &Spec {
            head_dim_qk: of_part.head_dim_qk,
            head_dim_v: of_part.head_dim_v,
            ..of_part.on_kernels()
        };
        let pieces = pages.len() as u32 * spec.kv_heads * 2;
        let params = WidenParams {
            convert: workspace.conversion_of(pool, heads, pages)?,
            scales: match pool.scales {
                KvScales::Token { .. } => pool.scale_parameters(spec, tokens / heads as usize)?,
                _ => ScaleParams::default(),
            },
            vectors: spec.head_dim_qk / NUMBERS,
            reserved: 0,
            record: record.map_or(0, |record| record.address),
            kv_heads: Divisor::new(spec.kv_heads),
            vectors_log: (spec.head_dim_qk / NUMBERS)
                .next_power_of_two()
                .trailing_zeros(),
        };
        let kernel = self.pass(Op::Widen, element(spec.q_dtype))?;
        Ok(self.step(kernel, pieces, Parameters::Widen(params)))
    }

    /// The launch that applies the rotary embedding to the keys of a prefill.
    pub(super) fn prepare_turn(
        &self,
        workspace: &Workspace,
        pool: &KvPool,
        pages: Range<u32>,
        record: Option<DeviceArray<LaunchRecord>>,
    ) -> Result<Step, Error> {
        let spec = &workspace.spec;
        let pieces = (pages.len() as u32).saturating_mul(PIECES);
        let mut convert = workspace.conversion_of(pool, 1, pages)?;
        if describes_values(pool, spec) {
            convert.to_v = 0;
        }
        let params = TurnParams {
            convert,
            rotary: workspace.rotary(),
            record: record.map_or(0, |record| record.address),
            kv_heads: spec.kv_heads,
            lanes_log: (spec.head_dim_qk / 16).trailing_zeros(),
        };
        let kernel = self.pass(Op::Turn, element(spec.kv_dtype))?;
        Ok(self.step(kernel, pieces, Parameters::Turn(params)))
    }
}
