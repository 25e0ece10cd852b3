//! Writing new keys and values to pages, on the GPU.

mod parameters;
#[cfg(test)]
mod tests;

use kernels_gpu::{
    abi::AppendParams,
    passes::append::{THREADS, VECTORS_PER_BLOCK},
    registry::{Element, Op},
};

use self::parameters::{parameters, row_parameters};
use super::{DeviceArray, DeviceTensor, Gpu, KvPool, Stream, launch::Launch};
use crate::{Error, problem::Spec};

impl Gpu {
    /// Copies the keys and values of new tokens into a page pool.
    ///
    /// `k` is `[tokens, kv_heads, head_dim_qk]` and `v` is `[tokens, kv_heads, head_dim_v]`, both of the pool's
    /// element type, with any strides over tokens and heads that keep rows on 8-byte boundaries (16-byte ones
    /// are faster). `slots` says where each token goes, as `page × page_size + offset`; a token whose slot is
    /// not in the pool, such as `u32::MAX`, is left out.
    ///
    /// Keys of [latent](Spec::latent) attention have no values of their own: append them with
    /// [`append_rows`](Self::append_rows) (once for each of [two pools](KvPool::latent_parts)), or with
    /// [`append_latent_656`](Self::append_latent_656). For a pool of 8 bits and keys of 16 see
    /// [`append_quantised`](Self::append_quantised).
    ///
    /// The same call on the CPU is [`Cpu::append_paged_kv`](crate::Cpu::append_paged_kv).
    ///
    /// # Safety
    /// - All tensors and arrays are in this GPU's memory as described, until the work on `stream`
    ///   is done. Nothing else reads or writes the pool meanwhile.
    /// - No two tokens go to one slot.
    /// - `stream` is a stream of the device's primary context, or null (the default stream). If it is being
    ///   captured, the graph is not launched after `self` was dropped or the memory was freed.
    ///
    /// # Errors
    /// A variant for each thing that can be wrong with a tensor ([`Error::NullPointer`],
    /// [`Error::DtypesDiffer`], [`Error::Extent`], …), before anything is launched; [`Error::Driver`] if the
    /// launch fails.
    pub unsafe fn append_paged_kv(
        &self,
        spec: &Spec,
        pool: &KvPool,
        slots: DeviceArray<u32>,
        k: &DeviceTensor<3>,
        v: &DeviceTensor<3>,
        stream: Stream,
    ) -> Result<(), Error> {
        let parameters = parameters(spec, pool, slots, k, v)?;
        // SAFETY: the caller's promises.
        unsafe { self.append(parameters, 2, stream) }
    }

    /// Copies the keys or the values of new tokens into their pool.
    ///
    /// - `rows`: `[tokens, kv_heads, head_dim]`, with strides as in [`append_paged_kv`](Self::append_paged_kv)
    /// - `slots`: `[tokens]`, as there
    /// - `pool`: `[pages, page_size, kv_heads, head_dim]`, whatever its order in memory
    ///
    /// The same call on the CPU is [`Cpu::append_rows`](crate::Cpu::append_rows).
    ///
    /// # Safety
    /// As [`append_paged_kv`](Self::append_paged_kv).
    ///
    /// # Errors
    /// As [`append_paged_kv`](Self::append_paged_kv).
    pub unsafe fn append_rows(
        &self,
        rows: &DeviceTensor<3>,
        slots: DeviceArray<u32>,
        pool: &DeviceTensor<4>,
        stream: Stream,
    ) -> Result<(), Error> {
        let parameters = row_parameters(rows, slots, pool)?;
        // SAFETY: the caller's promises.
        unsafe { self.append(parameters, 1, stream) }
    }

    /// Launches the kernel for keys and values, or only for the first of them.
    ///
    /// # Safety
    /// As [`append_paged_kv`](Self::append_paged_kv), for what the parameters point to.
    unsafe fn append(
        &self,
        (params, vector_bytes): (AppendParams, u32),
        sides: u32,
        stream: Stream,
    ) -> Result<(), Error> {
        let kernel = self.pass(Op::Append { vector_bytes }, Element::Any)?;
        let vectors = params.k.vectors.max(params.v.vectors);
        let mut launch = Launch::new(vectors.div_ceil(VECTORS_PER_BLOCK), THREADS);
        launch.grid[1] = sides;
        // SAFETY: the kernel takes `AppendParams`, and the caller vouches for what they point to.
        unsafe { self.launch(kernel, &launch, &params, stream) }
    }
}

/// The error of an append of keys and values to rows that contain their scales.
pub(super) fn in_rows() -> Error {
    Error::NoInstance {
        kernel: "append",
        asked: "keys and values into rows that carry their scales".into(),
        there: "such rows in append_latent_656",
    }
}
