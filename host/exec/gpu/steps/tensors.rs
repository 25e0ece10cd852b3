//! What a run computes from and to.

use crate::exec::gpu::{DeviceArray, DeviceTensor, KvPool};

/// What a run computes from and to: see [`Gpu::run`](crate::gpu::Gpu::run).
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
    /// `[total_q, q_heads]` F32, natural log, where it is wanted.
    pub lse: Option<&'a DeviceTensor<2>>,
    /// `[q_heads]`: the [sinks](crate::problem::Variant::sinks) of the spec's variant. They may lie elsewhere in every
    /// run, as each layer has its own.
    pub sinks: Option<DeviceArray<f32>>,
    /// The keys of each query token, of a batch [of so many](crate::problem::Batch::of_top_k): an index of the pool's
    /// tokens each, `page × page_size + offset`; what is no token of the pool, such as −1, is none. They may be others in
    /// every run, as each layer has its own. Latent keys in rows of 656 bytes are read so.
    pub indices: Option<DeviceArray<i32>>,
    /// The bytes of what the [hooks](crate::problem::Variant::hooks) of the spec's variant are given. A captured graph
    /// keeps them: what is to change lies behind an address among them.
    pub own: &'a [u8],
    /// Where merges write, if that is not `out`: kernels of attention then write partial states alone, and no 16-bit
    /// outputs.
    pub(in crate::exec::gpu) merged: Option<&'a DeviceTensor<3>>,
    /// Where `q` and `out` have padded heads: for kernels that were compiled for the heads as they are.
    pub(in crate::exec::gpu) unpadded: Option<Unpadded>,
}

/// Queries as a run was given them, and outputs if kernels may write these: where they may not, they write padded ones
/// beside the others'.
#[derive(Clone, Copy, Debug)]
pub(in crate::exec::gpu) struct Unpadded {
    pub(in crate::exec::gpu) q: DeviceTensor<3>,
    pub(in crate::exec::gpu) out: Option<DeviceTensor<3>>,
    /// The outputs, whoever writes them.
    pub(in crate::exec::gpu) given: DeviceTensor<3>,
}

impl<'a> RunTensors<'a> {
    /// Queries and outputs of a launch, as they were given if it takes them so.
    pub(in crate::exec::gpu) fn of_launch(&self, unpadded: bool) -> [&DeviceTensor<3>; 2] {
        match &self.unpadded {
            Some(Unpadded { q, out, .. }) if unpadded => [q, out.as_ref().unwrap_or(self.out)],
            _ => [self.q, self.out],
        }
    }

    /// What every run has.
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

    /// With the log-sums.
    #[must_use]
    pub const fn with_lse(mut self, lse: &'a DeviceTensor<2>) -> Self {
        self.lse = Some(lse);
        self
    }

    /// With what the hooks of the variant are given: their [`FromLaunch::Own`](crate::variant::FromLaunch::Own).
    #[cfg(feature = "unstable")]
    #[must_use]
    pub fn with_own<T: bytemuck::Pod>(mut self, own: &'a T) -> Self {
        self.own = bytemuck::bytes_of(own);
        self
    }

    /// With the keys of each query token. The pool is given with pages of one token.
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
