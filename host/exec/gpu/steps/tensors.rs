//! The tensors of a run.

use crate::exec::gpu::{DeviceArray, DeviceTensor, KvPool};

/// The tensors of a run: see [`Gpu::run`](crate::gpu::Gpu::run).
///
/// ```
/// use tandem_attn::{gpu::{DeviceArray, DeviceTensor, RunTensors}, problem::Dtype};
///
/// let q = DeviceTensor::new(0x7f00_0000_0000, Dtype::BF16, [17, 64, 64]);
/// let out = DeviceTensor::new(0x7f00_1000_0000, Dtype::BF16, [17, 64, 64]);
/// let sinks = DeviceArray::<f32>::new(0x7f00_2000_0000, 64);
/// let tensors = RunTensors::new(&q, &[], &out).with_sinks(sinks);
/// assert_eq!(tensors.lse, None);
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RunTensors<'a> {
    /// `[total_q, q_heads, head_dim_qk]`, any token stride that is a multiple of 8.
    pub q: &'a DeviceTensor<3>,
    /// One for each part of the batch.
    pub pools: &'a [KvPool],
    /// `[total_q, q_heads, head_dim_v]`, likewise.
    pub out: &'a DeviceTensor<3>,
    /// LSE: `[total_q, q_heads]` F32, natural log, if it is needed.
    pub lse: Option<&'a DeviceTensor<2>>,
    /// `[q_heads]`: the [sinks](crate::problem::Variant::sinks) of the spec's variant. Each run can have another address, as
    /// each layer has its own sinks. For page lists by KV head, those of the model
    /// ([`Variant::sink_tokens`](crate::problem::Variant::sink_tokens)).
    pub sinks: Option<DeviceArray<f32>>,
    /// The keys of each query token, for a batch of [`Batch::of_top_k`](crate::problem::Batch::of_top_k). Each index is that of
    /// a token in the pool, `page × page_size + offset`; other values, such as −1, mean no key. Each run can have other indices,
    /// as each layer has its own. Only latent keys in rows of 656 bytes are read in this way.
    pub indices: Option<DeviceArray<i32>>,
    /// The bytes of the data of the variant's [hooks](crate::problem::Variant::hooks). A captured graph
    /// keeps these bytes; put data that changes behind a device address among them.
    pub own: &'a [u8],
    /// Where merges write, if not to `out`. Attention kernels then write only partial states, and no 16-bit outputs.
    pub(in crate::exec::gpu) merged: Option<&'a DeviceTensor<3>>,
    /// The unpadded tensors, if `q` and `out` have padded heads: for kernels that were compiled for the heads as they
    /// are.
    pub(in crate::exec::gpu) unpadded: Option<Unpadded>,
}

/// The queries that a run was given, and the outputs if kernels may write to them directly. If not, they write padded
/// outputs, as other kernels of the run do.
#[derive(Clone, Copy, Debug)]
pub(in crate::exec::gpu) struct Unpadded {
    pub(in crate::exec::gpu) q: DeviceTensor<3>,
    pub(in crate::exec::gpu) out: Option<DeviceTensor<3>>,
    /// The outputs that the run was given.
    pub(in crate::exec::gpu) given: DeviceTensor<3>,
}

impl<'a> RunTensors<'a> {
    /// Queries and outputs of a launch: with `unpadded`, those that the run was given, as far as possible.
    pub(in crate::exec::gpu) fn of_launch(&self, unpadded: bool) -> [&DeviceTensor<3>; 2] {
        match &self.unpadded {
            Some(Unpadded { q, out, .. }) if unpadded => [q, out.as_ref().unwrap_or(self.out)],
            _ => [self.q, self.out],
        }
    }

    /// The tensors that every run has.
    #[must_use]
    pub const fn new(
        q: &'a DeviceTensor<3>,
        pools: &'a [KvPool],
        out: &'a DeviceTensor<3>,
    ) -> Self {
        Self {
            q,
            pools,
            out,
            lse: None,
            sinks: None,
            indices: None,
            own: &[],
            merged: None,
            unpadded: None,
        }
    }

    /// With the LSEs.
    #[must_use]
    pub const fn with_lse(mut self, lse: &'a DeviceTensor<2>) -> Self {
        self.lse = Some(lse);
        self
    }

    /// With the data of the variant's hooks: their [`FromLaunch::Own`](crate::variant::FromLaunch::Own).
    #[cfg(feature = "unstable")]
    #[must_use]
    pub fn with_own<T: bytemuck::Pod>(mut self, own: &'a T) -> Self {
        self.own = bytemuck::bytes_of(own);
        self
    }

    /// With the keys of each query token. Give the pool with pages of one token.
    #[must_use]
    pub const fn with_indices(mut self, indices: DeviceArray<i32>) -> Self {
        self.indices = Some(indices);
        self
    }

    /// With sinks.
    #[must_use]
    pub const fn with_sinks(mut self, sinks: DeviceArray<f32>) -> Self {
        self.sinks = Some(sinks);
        self
    }
}
