//! What kernels there are, in words.

use kernels_gpu::registry::{Arch, KernelId, KernelInfo, Op};

use crate::{
    plan::model::{
        DeviceDescription,
        tiles::{runnable, serves},
    },
    problem::{Compute, Padding, Spec},
};

/// Words in a row.
pub(super) fn list<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<_> = items.into_iter().map(|item| item.to_string()).collect();
    items.join(", ")
}

impl DeviceDescription {
    /// The kernels that prompts of such a specification may run on: prefills, or decodes if no prefill reads such a cache or pads
    /// such heads.
    pub(super) fn rows_for_prompts(
        &self,
        spec: &Spec,
    ) -> impl Iterator<Item = &'static KernelInfo> + Clone {
        let (compute, of_8_bits) = (spec.compute, spec.kv_dtype.bytes() == 1);
        let pads = Padding::of(spec).is_some();
        // Prefills with Ampere's instructions read widened keys.
        let widened = of_8_bits && !Arch::Sm90a.runs_on(self.compute_capability);
        let rows = move |op| {
            let rows = runnable(self, op).map(|id| id.info());
            rows.filter(move |row| {
                row.cache.is_some() == (of_8_bits && !(widened && op == Op::Prefill))
                    && (!row.products_of_8_bits || compute == Compute::F8)
            })
        };
        let op = match rows(Op::Prefill).next() {
            Some(_) => Op::Prefill,
            None => Op::Decode,
        };
        // Heads that prefills pad do not run on decodes.
        let padded = pads && !runnable(self, Op::Prefill).any(|id| serves(self, id.info(), spec));
        let prompts =
            rows(Op::Decode).filter(move |row| (row.takes_prompts || padded) && !row.latent);
        rows(op).chain(prompts)
    }

    /// Names the head dimensions that kernels serve with heads padded by the library: an unbroken row of multiples of 16.
    pub(super) fn padded_up_to(&self, spec: &Spec) -> String {
        let served = |dim: &u32| {
            let of_dim = Spec {
                head_dim_qk: *dim,
                head_dim_v: *dim,
                ..*spec
            };
            let mut rows = self.rows_for_prompts(&of_dim);
            rows.any(|row| serves(self, row, &of_dim))
        };
        let multiples = (1..=Spec::MAX_HEAD_DIM / 16).map(|count| 16 * count);
        match multiples.take_while(served).last() {
            Some(last) => format!(", and all multiples of 16 up to {last}"),
            None => String::new(),
        }
    }

    /// The shared memory that kernels for these prompts need, if that is all that the device lacks.
    pub(super) fn too_large(&self, spec: &Spec) -> String {
        let of_prompts = KernelId::all().map(KernelId::info).filter(|row| {
            (row.op == Op::Prefill || row.op == Op::Decode && row.takes_prompts)
                && row.arch.runs_on(self.compute_capability)
                && !row.stands_in
                && serves(self, row, spec)
        });
        match of_prompts.map(|row| row.shared_bytes).min() {
            Some(needed) if needed > self.shared_bytes_per_cta => format!(
                " (kernels of these heads need {needed} bytes of shared memory for a CTA, {} has {})",
                self.name, self.shared_bytes_per_cta
            ),
            _ => String::new(),
        }
    }
}
