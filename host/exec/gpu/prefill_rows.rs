//! Prefill by kernels that load keys and values row by row.

use kernels_gpu::{
    abi::{GatherPrefillParams, KvStrides},
    divisor::Divisor,
};

use super::{
    Gpu, KvPool, PrefillCall,
    module::Kernel,
    prefill::{attention, check},
    steps::{Parameters, Step},
    tensor::{VECTOR_BYTES, check_address},
};
use crate::{
    Error,
    problem::{Dtype, ProblemError},
};

impl Gpu {
    pub(super) fn prepare_prefill_rows(
        &self,
        kernel: &Kernel,
        call: &PrefillCall<'_>,
    ) -> Result<Step, Error> {
        let mut parameters = parameters(call, kernel.info.rows)?;
        let launch = self.resident(kernel, parameters.attention.units);
        parameters.attention.leave_to_record(call.items.len);
        Ok(Step {
            kernel: *kernel,
            launch,
            part: 0,
            parameters: Parameters::PrefillRows(parameters),
        })
    }
}

/// All checks; the parameters of the launch.
fn parameters(call: &PrefillCall<'_>, rows: u32) -> Result<GatherPrefillParams, Error> {
    check(call)?;
    let (spec, pool, pack) = (call.spec, call.pool, call.pack);
    if pack > rows {
        return Err(Error::Extent {
            tensor: "rows of a tile",
            dimension: "packed query heads",
            got: pack as usize,
            rule: format!("at most {}", rows),
        });
    }
    let tile_tokens = rows / pack;
    let cuts = (call.rows / pack).div_ceil(tile_tokens).max(1);
    let [k_vectors, v_vectors] = vectors_of(pool)?;
    Ok(GatherPrefillParams {
        attention: attention(call, cuts)?,
        k_vectors,
        v_vectors,
        page_size: Divisor::new(pool.k_strides.page_size),
        pack: Divisor::new(pack),
        cuts: Divisor::new(cuts),
        heads: Divisor::new(spec.q_heads / pack),
        heads_per_kv_head: Divisor::new(spec.group() / pack),
        tile_tokens,
    })
}

/// [`vectors`] of a pool's keys, and of its values.
pub(super) fn vectors_of(pool: &KvPool) -> Result<[KvStrides; 2], Error> {
    let of = |tensor, address, strides| vectors(tensor, address, strides, pool.pages, pool.dtype);
    Ok([
        of("the key pool", pool.k, &pool.k_strides)?,
        of("the value pool", pool.v, &pool.v_strides)?,
    ])
}

/// Strides in vectors, if rows begin at vectors and all of the pool can be counted in them.
pub(super) fn vectors(
    tensor: &'static str,
    address: u64,
    strides: &KvStrides,
    pages: u32,
    dtype: Dtype,
) -> Result<KvStrides, Error> {
    let elements = VECTOR_BYTES / dtype.bytes();
    check_address(tensor, address, pages == 0, VECTOR_BYTES)?;
    for (dimension, got) in [
        ("pages", strides.page),
        ("tokens", strides.token),
        ("heads", strides.head),
    ] {
        if !got.is_multiple_of(elements) {
            return Err(Error::Stride {
                tensor,
                dimension,
                got: got as usize,
                rule: format!("a multiple of {elements}"),
            });
        }
    }
    let (got, limit) = (
        u64::from(pages) * u64::from(strides.page / elements),
        u64::from(u32::MAX),
    );
    if got > limit {
        let what = "vectors of 16 bytes in the KV pool";
        return Err(ProblemError::TooLarge { what, got, limit }.into());
    }
    Ok(KvStrides {
        page: strides.page / elements,
        token: strides.token / elements,
        head: strides.head / elements,
        page_size: strides.page_size,
    })
}
