//! Prefill items by the kernels of Ampere, which gather keys and values row by row.

use kernels_gpu::{
    abi::{GatherPrefillParams, KvStrides},
    divisor::Divisor,
    sm80::prefill::Shape,
};

use super::{
    Gpu, PrefillCall,
    launch::{Launch, Prepared},
    module::{Carveout, Kernel, Modules},
    prefill::{attention, check, kernels::named},
    tensor::{VECTOR_BYTES, check_address},
};
use crate::{
    Error,
    problem::{Dtype, ProblemError},
};

/// What an entry was compiled for.
struct Entry {
    shape: Shape,
    dtype: Dtype,
    cap: bool,
    kernel: Kernel,
    /// CTAs that an SM holds.
    per_multiprocessor: u32,
}

pub(super) struct Kernels(Vec<Entry>);

impl Kernels {
    pub(super) fn load(modules: &Modules, max_shared: u32) -> Result<Self, Error> {
        use Dtype::{BF16, F16};
        let entries = [
            ("prefill_mma_128x64_d128_bf16", Shape::D128, BF16, false),
            ("prefill_mma_128x64_d128_bf16_cap", Shape::D128, BF16, true),
            ("prefill_mma_128x64_d128_f16", Shape::D128, F16, false),
            ("prefill_mma_128x64_d128_f16_cap", Shape::D128, F16, true),
            ("prefill_mma_128x128_d64_bf16", Shape::D64, BF16, false),
            ("prefill_mma_128x128_d64_bf16_cap", Shape::D64, BF16, true),
            ("prefill_mma_128x128_d64_f16", Shape::D64, F16, false),
            ("prefill_mma_128x128_d64_f16_cap", Shape::D64, F16, true),
        ];
        let mut loaded = Vec::with_capacity(entries.len());
        for (name, shape, dtype, cap) in entries {
            let kernel = modules.kernel(name, Carveout::Shared, max_shared)?;
            let (threads, shared) = (shape.threads(), shape.shared_bytes());
            loaded.push(Entry {
                shape,
                dtype,
                cap,
                per_multiprocessor: modules.blocks_per_multiprocessor(&kernel, threads, shared)?,
                kernel,
            });
        }
        Ok(Self(loaded))
    }

    fn find(&self, call: &PrefillCall<'_>) -> Result<&Entry, Error> {
        let dims = [call.spec.head_dim_qk, call.spec.head_dim_v];
        let cap = call.spec.variant.soft_cap.is_some();
        self.0
            .iter()
            .find(|entry| {
                dims == [entry.shape.head_dim; 2] && entry.dtype == call.q.dtype && entry.cap == cap
            })
            .ok_or_else(|| Error::NoInstance {
                kernel: "prefill",
                asked: format!("head dimension {}, {:?}", named(call.spec), call.q.dtype),
                there: "head dimension 64 or 128, BF16 or F16",
            })
    }
}

impl Gpu {
    pub(super) fn prepare_gathered(
        &self,
        call: &PrefillCall<'_>,
    ) -> Result<Option<Prepared<GatherPrefillParams>>, Error> {
        let entry = self.prefill_gather.find(call)?;
        if call.items.len == 0 {
            return Ok(None);
        }
        let mut parameters = parameters(call, &entry.shape)?;
        // A CTA that does not find room would begin its first unit when the others have done the rest.
        let resident = self.multiprocessors * entry.per_multiprocessor.max(1);
        let ctas = resident.min(parameters.attention.units);
        let mut launch = Launch::new(ctas, entry.shape.threads());
        launch.shared = entry.shape.shared_bytes();
        parameters.attention.leave_to_record(call.items.len);
        Ok(Some(Prepared {
            kernel: entry.kernel,
            launch,
            parameters,
        }))
    }
}

/// All checks; the parameters of the launch.
fn parameters(call: &PrefillCall<'_>, shape: &Shape) -> Result<GatherPrefillParams, Error> {
    check(call)?;
    let (spec, pool, pack) = (call.spec, call.pool, call.pack);
    if pack > shape.rows() {
        return Err(Error::Extent {
            tensor: "rows of a tile",
            dimension: "packed query heads",
            got: pack as usize,
            rule: format!("at most {}", shape.rows()),
        });
    }
    let tile_tokens = shape.rows() / pack;
    let cuts = (call.tile.m / pack).div_ceil(tile_tokens).max(1);
    let k_vectors = vectors("k pool", pool.k, &pool.k_strides, pool.pages)?;
    let v_vectors = vectors("v pool", pool.v, &pool.v_strides, pool.pages)?;
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

/// Strides in vectors, if rows begin at vectors and all of the pool can be counted in them.
pub(super) fn vectors(
    tensor: &'static str,
    address: u64,
    strides: &KvStrides,
    pages: u32,
) -> Result<KvStrides, Error> {
    const ELEMENTS: u32 = VECTOR_BYTES / 2;
    check_address(tensor, address, pages == 0, VECTOR_BYTES)?;
    for (dimension, got) in [
        ("pages", strides.page),
        ("tokens", strides.token),
        ("heads", strides.head),
    ] {
        if !got.is_multiple_of(ELEMENTS) {
            return Err(Error::Stride {
                tensor,
                dimension,
                got: got as usize,
                rule: format!("a multiple of {ELEMENTS}"),
            });
        }
    }
    let (got, limit) = (
        u64::from(pages) * u64::from(strides.page / ELEMENTS),
        u64::from(u32::MAX),
    );
    if got > limit {
        let what = "vectors of 16 bytes in the KV pool";
        return Err(ProblemError::TooLarge { what, got, limit }.into());
    }
    Ok(KvStrides {
        page: strides.page / ELEMENTS,
        token: strides.token / ELEMENTS,
        head: strides.head / ELEMENTS,
        page_size: strides.page_size,
    })
}
