//! Prefill and decode in one kernel, by tickets of the SM: the paper's form of POD-Attention.

use kernels_gpu::{
    abi::{GatherDecodeParams, GatherPrefillParams, PodParams},
    sm80::pod::{COUNTERS, Shape},
};

use super::{
    DeviceArray, Gpu,
    launch::{Launch, Prepared},
    module::{Carveout, Kernel, Modules},
};
use crate::{
    Error,
    problem::{Dtype, Spec},
};

/// Shared memory that the system takes of each CTA.
const RESERVED: u32 = 1024;

/// What an entry was compiled for.
struct Entry {
    shape: Shape,
    dtype: Dtype,
    kernel: Kernel,
    /// Decodes that a CTA runs side by side.
    virtual_decodes: u32,
    /// CTAs that an SM holds.
    per_multiprocessor: u32,
}

pub(super) struct Kernels(Vec<Entry>);

impl Kernels {
    /// Those that the GPU has shared memory for.
    pub(super) fn load(
        modules: &Modules,
        max_shared: u32,
        shared_per_sm: u32,
    ) -> Result<Self, Error> {
        let entries = [
            ("pod_mma_d64_bf16", Shape::D64, Dtype::BF16),
            ("pod_mma_d64_f16", Shape::D64, Dtype::F16),
            ("pod_mma_d128_bf16", Shape::D128, Dtype::BF16),
            ("pod_mma_d128_f16", Shape::D128, Dtype::F16),
        ];
        let mut loaded = Vec::with_capacity(entries.len());
        for (name, shape, dtype) in entries {
            let kernel = modules.kernel(name, Carveout::Shared, max_shared)?;
            // As many CTAs as it is made for, with as many decodes as they then have memory for.
            let share = (shared_per_sm / shape.ctas_per_sm).saturating_sub(RESERVED);
            let Some(virtual_decodes) = shape.virtual_decodes(share.min(kernel.max_dynamic_shared))
            else {
                continue;
            };
            let (threads, shared) = (shape.threads(), shape.shared_bytes(virtual_decodes));
            loaded.push(Entry {
                shape,
                dtype,
                virtual_decodes,
                per_multiprocessor: modules.blocks_per_multiprocessor(&kernel, threads, shared)?,
                kernel,
            });
        }
        Ok(Self(loaded))
    }

    fn find(&self, spec: &Spec, dtype: Dtype) -> Option<&Entry> {
        let dims = [spec.head_dim_qk, spec.head_dim_v];
        let fits =
            |entry: &&Entry| dims == [entry.shape.prefill.head_dim; 2] && entry.dtype == dtype;
        let capped = spec.variant.soft_cap.is_some();
        self.0.iter().find(fits).filter(|_| !capped)
    }
}

impl Gpu {
    /// Whether there is a kernel that has prefill and decode of these heads in one.
    pub(super) fn has_pod(&self, spec: &Spec, dtype: Dtype) -> bool {
        self.pod.find(spec, dtype).is_some()
    }

    /// The one launch of a prefill and a decode, whose checks were made. `tickets` are those of a period, none of
    /// either: as many as each has CTAs. `counters` are zero, and again after the launch.
    pub(super) fn prepare_pod(
        &self,
        spec: &Spec,
        dtype: Dtype,
        prefill: GatherPrefillParams,
        decode: GatherDecodeParams,
        tickets: [u32; 2],
        counters: DeviceArray<u32>,
    ) -> Option<Prepared<PodParams>> {
        let entry = self.pod.find(spec, dtype)?;
        assert!(counters.len >= COUNTERS as usize, "the workspace has them");
        let mut launch = Launch::new(
            self.multiprocessors * entry.per_multiprocessor.max(1),
            entry.shape.threads(),
        );
        launch.shared = entry.shape.shared_bytes(entry.virtual_decodes);
        Some(Prepared {
            kernel: entry.kernel,
            launch,
            parameters: PodParams {
                prefill,
                decode: GatherDecodeParams { team: 0, ..decode },
                counters: counters.address,
                tickets,
                virtual_decodes: entry.virtual_decodes,
                reserved: 0,
            },
        })
    }
}
