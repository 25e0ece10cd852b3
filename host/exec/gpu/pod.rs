//! Prefill and decode in one kernel, by tickets of the SM: POD-Attention as in the paper.

use kernels_gpu::{
    abi::{GatherDecodeParams, GatherPrefillParams, PodParams},
    registry::{KernelId, Op, Sm},
    sm80::pod::{COUNTERS, Shape},
};

use super::{
    DeviceArray, Gpu,
    launch::Launch,
    module::Kernel,
    registry::check_serves,
    steps::{Parameters, Step},
};
use crate::{Error, problem::Spec};

impl Gpu {
    /// The kernel with prefill and decode for these heads, if the GPU has one, and the number of decodes that a CTA
    /// runs side by side.
    pub(super) fn pod(&self, spec: &Spec) -> Option<(&Kernel, u32)> {
        let spec = &spec.on_kernels();
        let serves = |id: &KernelId| {
            id.info().op == Op::Pod
                && check_serves(*id, Op::Pod, spec, [spec.q_dtype, spec.kv_dtype]).is_ok()
        };
        let kernel = self.kernels.get(KernelId::all().find(serves)?)?;
        // The number of CTAs per SM that the kernel is made for, with as many decodes as their memory then allows.
        let shape = Shape::new(kernel.info.head_dim, kernel.info.keys);
        let share = (self.shared_per_sm / shape.ctas_per_sm).saturating_sub(Sm::RESERVED);
        let decodes = shape.virtual_decodes(share.min(kernel.max_dynamic_shared))?;
        Some((kernel, decodes))
    }

    /// The single launch of a prefill and a decode, which were checked. `tickets` are the numbers of prefill and decode
    /// CTAs in a period; if both are 0, they are in proportion to the CTAs that each needs. `counters` are zero before
    /// and after the launch.
    pub(super) fn prepare_pod(
        &self,
        (kernel, virtual_decodes): (&Kernel, u32),
        prefill: GatherPrefillParams,
        decode: GatherDecodeParams,
        tickets: [u32; 2],
        counters: DeviceArray<u32>,
    ) -> Result<Step, Error> {
        assert!(counters.len >= COUNTERS as usize, "the workspace has them");
        let shape = Shape::new(kernel.info.head_dim, kernel.info.keys);
        let shared = shape.shared_bytes(virtual_decodes);
        let ctas = self.multiprocessors * kernel.resident(shared)?;
        let mut launch = Launch::new(ctas, kernel.info.threads);
        launch.shared = shared;
        Ok(Step {
            kernel: *kernel,
            launch,
            part: 0,
            heads: 1,
            parameters: Parameters::Pod(PodParams {
                prefill,
                decode: GatherDecodeParams { team: 0, ..decode },
                counters: counters.address,
                tickets,
                virtual_decodes,
                reserved: 0,
            }),
        })
    }
}
