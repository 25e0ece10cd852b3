//! Calls of single kernels, for tests and benchmarks.

use std::ptr;

use kernels_gpu::abi::MergeRow;

use super::{
    DecodeCall, DeviceArray, DeviceTensor, Gpu, PartialStates, PrefillCall, Stream,
    driver::Current, maps::Maps,
};
use crate::{Error, problem::Spec};

/// Refuses variants: the kernels of calls are without hooks.
fn refuse_hooks(kernel: &'static str, spec: &Spec) -> Result<(), Error> {
    let refused = |hooks| Error::NoInstance {
        kernel,
        asked: format!("a call with the hooks of {hooks}"),
        there: "hooks in whole plans (Gpu::run_with)",
    };
    spec.variant.hooks.map(refused).map_or(Ok(()), Err)
}

impl Gpu {
    /// Attention of a tile group of decodes over a page pool. Rows whose slot is
    /// [`DIRECT`](crate::abi::DIRECT) are written to `out` and `lse`, others to their partial state, and merged
    /// where there are `arrivals`.
    ///
    /// Takes the kernel that [`Gpu::decode_kernel`] says. Nothing is allocated and nothing waited for, so that
    /// the call can be captured in a graph.
    ///
    /// # Safety
    /// - All tensors and arrays are in this GPU's memory as described, and stay until the work on `stream`
    ///   is done. What is written is not touched by others meanwhile.
    /// - The arrays are those of a plan for the spec and the pool, and the tile's rows cover every item.
    /// - `stream` is a stream of the device's primary context, or null (the default stream).
    ///
    /// # Errors
    /// A variant for each thing that can be wrong with a tensor, before anything is launched;
    /// [`Error::NotOnDevice`] or [`Error::NoInstance`] where the GPU has no such kernel; [`Error::Driver`] if the launch fails.
    pub unsafe fn decode(&self, call: &DecodeCall<'_>, stream: Stream) -> Result<(), Error> {
        refuse_hooks("decode", call.spec)?;
        let kernel = self.decode_kernel(call.tile.kernel, call.spec, call.pool);
        let _current = Current::enter(self.context.raw())?;
        let step = self.prepare_decode(kernel, call, &mut Maps::default())?;
        // SAFETY: the caller vouches for what the parameters point to.
        unsafe { step.make(ptr::null(), stream) }
    }

    /// Runs a group of contiguous items: direct ones are written to `out` and `lse`, the others to `partials`,
    /// for [`Gpu::merge_states`] after it.
    ///
    /// Nothing is allocated and nothing waited for, so that the call can be captured in a graph.
    ///
    /// # Safety
    /// - All tensors and arrays are in this GPU's memory as described, and stay until the work on `stream`
    ///   is done. What is written is not touched by others meanwhile.
    /// - The items are those of a plan for this spec: each names tokens of `q`, keys whose pages `page_ids`
    ///   lists, pages of the pool, and slots of `partials`; none has more rows than the tile.
    /// - `stream` is a stream of the device's primary context, or null (the default stream).
    ///
    /// # Errors
    /// [`Error::NotOnDevice`] or [`Error::NoInstance`] where no kernel was compiled for the call; a variant for each thing that can be
    /// wrong with a tensor, before anything is launched; [`Error::Driver`] if the launch fails.
    pub unsafe fn prefill(&self, call: &PrefillCall<'_>, stream: Stream) -> Result<(), Error> {
        refuse_hooks("prefill", call.spec)?;
        let kernel = self.prefill_kernel(call.extras.kernel(call.kernel, call.spec)?);
        if kernel.info().products_of_8_bits {
            return Err(Error::NoInstance {
                kernel: "prefill",
                asked: format!("a call of {kernel} without a workspace"),
                there: "products of 8 bits in whole plans (Gpu::run)",
            });
        }
        let _current = Current::enter(self.context.raw())?;
        match self.prepare_prefill(kernel, call, &mut Maps::default())? {
            // SAFETY: the caller's promise.
            Some(step) => unsafe { step.make(ptr::null(), stream) },
            None => Ok(()),
        }
    }

    /// Combines the partial states of each row in the order in which its slots are listed.
    ///
    /// `out` is `[tokens, q_heads, head_dim_v]` in F16, BF16 or F32 with any token stride that is a multiple
    /// of 8; `lse`, if wanted, is dense `[tokens, q_heads]` F32 in natural log. Only the tokens that `rows`
    /// names are written. A row without slots gets output 0 and LSE −∞.
    ///
    /// The same call on the CPU is [`cpu::merge_states`](crate::exec::cpu::merge_states).
    ///
    /// # Safety
    /// - All tensors and arrays are in this GPU's memory as described, and stay until the work on `stream`
    ///   is done. What is written is not touched by others meanwhile.
    /// - Each of `rows` names a token of `out` that no other names, and a run of entries of `merge_slots`;
    ///   each of these is a slot of `partials`.
    /// - `stream` is a stream of the device's primary context, or null (the default stream). If it is being
    ///   captured, the graph is not launched after `self` or the memory is gone.
    ///
    /// # Errors
    /// A variant for each thing that can be wrong with a tensor ([`Error::NullPointer`], [`Error::Dtype`],
    /// [`Error::Extent`], …), before anything is launched; [`Error::Driver`] if the launch fails.
    pub unsafe fn merge_states(
        &self,
        partials: &PartialStates,
        rows: DeviceArray<MergeRow>,
        merge_slots: DeviceArray<u32>,
        out: &DeviceTensor<3>,
        lse: Option<&DeviceTensor<2>>,
        stream: Stream,
    ) -> Result<(), Error> {
        let step = self.prepare_merge(partials, rows, merge_slots, out, lse, None, None, None)?;
        let _current = Current::enter(self.context.raw())?;
        // SAFETY: the caller vouches for what the parameters point to.
        unsafe { step.make(ptr::null(), stream) }
    }
}
