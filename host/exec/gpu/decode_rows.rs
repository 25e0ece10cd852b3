//! Decode by the kernels of Ampere, which gather keys and values row by row.

use kernels_gpu::{
    abi::GatherDecodeParams,
    divisor::Divisor,
    sm80::decode::{ROWS, Shape},
};

use super::{
    DecodeCall, Gpu,
    decode::attention,
    launch::{Launch, Prepared},
    module::{Carveout, Kernel, Modules},
    prefill_gather::vectors,
};
use crate::{
    Error,
    problem::{Dtype, Spec},
};

/// What an entry was compiled for, and how many CTAs of it an SM holds.
struct Entry {
    shape: Shape,
    dtype: Dtype,
    cap: bool,
    kernel: Kernel,
    per_multiprocessor: u32,
}

pub(super) struct Kernels(Vec<Entry>);

impl Kernels {
    /// Those that the GPU has shared memory for.
    pub(super) fn load(modules: &Modules, max_shared: u32) -> Result<Self, Error> {
        macro_rules! names {
            ($([$dtype:ident, $half:literal, $dim:literal])*) => {[$(
                (Dtype::$dtype, $dim, false, concat!("decode_mma_d", $dim, "_", $half)),
                (Dtype::$dtype, $dim, true, concat!("decode_mma_d", $dim, "_", $half, "_cap")),
            )*]};
        }
        let entries = names! {
            [BF16, "bf16", 64] [BF16, "bf16", 128] [BF16, "bf16", 256]
            [F16, "f16", 64] [F16, "f16", 128] [F16, "f16", 256]
        };
        let mut loaded = Vec::with_capacity(entries.len());
        for (dtype, head_dim, cap, name) in entries {
            let shape = Shape { head_dim };
            let kernel = modules.kernel(name, Carveout::Shared, max_shared)?;
            if shape.shared_bytes() > kernel.max_dynamic_shared {
                continue;
            }
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

    fn find(&self, spec: &Spec, dtype: Dtype) -> Option<&Entry> {
        let wanted = (dtype, spec.head_dim_qk, spec.variant.soft_cap.is_some());
        let mut entries = self.0.iter();
        entries.find(|entry| (entry.dtype, entry.shape.head_dim, entry.cap) == wanted)
    }
}

impl Gpu {
    /// The launch of a [`Gpu::decode`] whose checks were made.
    pub(super) fn prepare_decode_gathered(
        &self,
        call: &DecodeCall<'_>,
    ) -> Result<Prepared<GatherDecodeParams>, Error> {
        let DecodeCall {
            spec, tile, pool, ..
        } = *call;
        let group = spec.group();
        let entry = self.decode_gather.find(spec, pool.dtype);
        let Some(entry) = entry.filter(|_| group <= ROWS) else {
            return Err(Error::NoInstance {
                kernel: "decode",
                asked: format!(
                    "head dimension {}, {group} query heads per KV head",
                    spec.head_dim_qk
                ),
                there: "head dimension 64, 128 or (with 113 KB of shared memory) 256, at most 16 query heads",
            });
        };
        // Larger items are cut.
        let tile_tokens = ROWS / group;
        let cuts = (tile.rows / group).div_ceil(tile_tokens);
        let mut parameters = GatherDecodeParams {
            attention: attention(call, cuts)?,
            k_vectors: vectors("the keys", pool.k, &pool.k_strides, pool.pages)?,
            v_vectors: vectors("the values", pool.v, &pool.v_strides, pool.pages)?,
            page_size: Divisor::new(pool.k_strides.page_size),
            group: Divisor::new(group),
            kv_heads: Divisor::new(spec.kv_heads),
            cuts: Divisor::new(cuts),
            tile_tokens,
            team: 1,
            long: tile.long.into(),
            reserved: 0,
        };
        let resident = self.multiprocessors * entry.per_multiprocessor.max(1);
        let ctas = resident.min(parameters.attention.units);
        let mut launch = Launch::new(ctas, entry.shape.threads());
        launch.shared = entry.shape.shared_bytes();
        parameters.attention.leave_to_record(call.items.len);
        Ok(Prepared {
            kernel: entry.kernel,
            launch,
            parameters,
        })
    }
}
