//! Prefill and decode by kernels that load keys and values row by row.

use kernels_gpu::{
    abi::{GatherDecodeParams, GatherPrefillParams},
    divisor::Divisor,
    registry::KernelInfo,
};

use super::{
    DecodeCall, Gpu, PrefillCall, decode,
    module::Kernel,
    prefill,
    steps::{Parameters, Source, Step},
    tensor::VECTOR_BYTES,
    vectors::vectors_of,
};
use crate::{
    Error,
    checks::extent,
    problem::{Dtype, Padding},
};

/// Vectors of a key of a decode by this kernel, which perhaps pads it, and from one slab of it to the next.
fn slabs(row: &KernelInfo, padding: Option<Padding>, dtype: Dtype) -> [u16; 2] {
    /// Bytes of a slab.
    const SLAB: u32 = 128;
    let bytes = dtype.bytes();
    let (dim, step) = match padding {
        // Slabs of 8 bits follow each other.
        Some(padding) if bytes > 1 => (padding.dim, padding.step * bytes),
        Some(padding) => (padding.dim, SLAB),
        None => (row.head_dim, SLAB),
    };
    // At most 512 bytes.
    [dim * bytes, step].map(|bytes| (bytes / VECTOR_BYTES) as u16)
}

impl Gpu {
    /// Checks the call and makes its launch.
    pub(super) fn prepare_prefill_rows(
        &self,
        kernel: &Kernel,
        call: &PrefillCall<'_>,
    ) -> Result<Step, Error> {
        prefill::check(call)?;
        let (spec, pool, pack) = (call.spec, call.pool, call.pack);
        let rows = kernel.info.rows;
        if pack > rows {
            let (got, rule) = (pack as usize, format!("at most {rows}"));
            return Err(extent("rows of a tile", "packed query heads", got, rule));
        }
        let tile_tokens = rows / pack;
        let cuts = (call.rows / pack).div_ceil(tile_tokens).max(1);
        let [k_vectors, v_vectors] = vectors_of(pool, spec.kv_heads)?;
        let mut parameters = GatherPrefillParams {
            attention: prefill::attention(call, cuts)?,
            k_vectors,
            v_vectors,
            page_size: Divisor::new(pool.k_strides.page_size),
            pack: Divisor::new(pack),
            cuts: Divisor::new(cuts),
            heads: Divisor::new(spec.q_heads / pack),
            heads_per_kv_head: Divisor::new(spec.group() / pack),
            tile_tokens,
            columns: match call.extras.padding {
                Some(padding) => [2 * padding.dim, padding.slabs, 2 * padding.step],
                None => [2 * spec.head_dim_qk, spec.head_dim_qk / 64, 128],
            },
            reserved: 0,
        };
        let ctas = parameters.attention.units;
        parameters.attention.leave_to_record(call.items.len);
        let parameters = Parameters::PrefillRows(parameters, Source::Pool);
        Ok(self.step(kernel, ctas, parameters))
    }

    /// The launch of a [`Gpu::decode`] that was checked.
    pub(super) fn prepare_decode_rows(
        &self,
        kernel: &Kernel,
        call: &DecodeCall<'_>,
    ) -> Result<Step, Error> {
        let DecodeCall {
            spec, tile, pool, ..
        } = *call;
        let (group, rows) = (spec.group(), kernel.info.rows);
        if group > rows {
            return Err(Error::NoInstance {
                kernel: "decode",
                asked: format!("{group} query heads per KV head with the instructions of Ampere"),
                there: "at most 16",
            });
        }
        // Items that are larger than a tile are cut.
        let tile_tokens = rows / group;
        let cuts = (tile.rows / group).div_ceil(tile_tokens);
        let attention = decode::attention(call, cuts)?;
        let [k_vectors, v_vectors] = vectors_of(pool, spec.kv_heads)?;
        let [vectors, slab_step] = slabs(kernel.info, call.extras.padding, pool.dtype);
        let mut parameters = GatherDecodeParams {
            attention,
            k_vectors,
            v_vectors,
            page_size: Divisor::new(pool.k_strides.page_size),
            group: Divisor::new(group),
            kv_heads: Divisor::new(spec.kv_heads),
            cuts: Divisor::new(cuts),
            tile_tokens,
            team: 1,
            long: tile.long.into(),
            vectors,
            slab_step,
        };
        let ctas = parameters.attention.units;
        parameters.attention.leave_to_record(call.items.len);
        Ok(self.step(kernel, ctas, Parameters::DecodeRows(parameters)))
    }
}
