//! Decode by kernels that load keys and values row by row.

use kernels_gpu::{abi::GatherDecodeParams, divisor::Divisor};

use super::{
    DecodeCall, Gpu,
    decode::attention,
    module::Kernel,
    prefill_rows::vectors_of,
    steps::{Parameters, Step},
};
use crate::Error;

impl Gpu {
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
        let attention = attention(call, cuts)?;
        let [k_vectors, v_vectors] = vectors_of(pool, spec.kv_heads)?;
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
            reserved: 0,
        };
        let ctas = parameters.attention.units;
        parameters.attention.leave_to_record(call.items.len);
        Ok(self.step(kernel, ctas, Parameters::DecodeRows(parameters)))
    }
}
