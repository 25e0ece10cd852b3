//! The prefill kernels of Hopper: which there are, and which suits a call.

use kernels_gpu::sm90::prefill::Shape;

use super::PrefillCall;
use crate::{
    Error,
    exec::gpu::module::{Carveout, Kernel, Modules},
    plan::Instance,
    problem::{Dtype, Spec},
};

const ENTRIES: [(&str, Shape); 22] = [
    ("prefill_128x128_d128_bf16", Shape::D128),
    ("prefill_128x128_d128_f16", Shape::D128),
    ("prefill_128x96_d128_bf16_cap", Shape::D128_CAP),
    ("prefill_128x96_d128_f16_cap", Shape::D128_CAP),
    ("prefill_192x80_d128_bf16", Shape::D128_WIDE),
    ("prefill_192x80_d128_f16", Shape::D128_WIDE),
    ("prefill_128x80_d128_bf16_beside", Shape::D128_BESIDE),
    ("prefill_128x80_d128_f16_beside", Shape::D128_BESIDE),
    ("prefill_128x64_d128_bf16_beside", Shape::D128_GENTLE),
    ("prefill_128x64_d128_f16_beside", Shape::D128_GENTLE),
    ("prefill_128x128_d64_bf16", Shape::D64),
    ("prefill_128x128_d64_f16", Shape::D64),
    ("prefill_128x128_d64_bf16_cap", Shape::D64),
    ("prefill_128x128_d64_f16_cap", Shape::D64),
    ("prefill_192x112_d64_bf16", Shape::D64_WIDE),
    ("prefill_192x112_d64_f16", Shape::D64_WIDE),
    ("prefill_128x128_d192_bf16", Shape::D192),
    ("prefill_128x128_d192_f16", Shape::D192),
    ("prefill_128x80_d256_bf16", Shape::D256),
    ("prefill_128x80_d256_f16", Shape::D256),
    ("prefill_128x64_d256_bf16_cap", Shape::D256_CAP),
    ("prefill_128x64_d256_f16_cap", Shape::D256_CAP),
];

/// What an entry was compiled for.
pub struct Entry {
    pub shape: Shape,
    dtype: Dtype,
    cap: bool,
    pub kernel: Kernel,
}

pub struct Kernels(Vec<Entry>);

impl Kernels {
    /// None where the architecture has no such kernels.
    pub fn load(modules: &Modules, max_shared: u32) -> Result<Self, Error> {
        let mut loaded = Vec::with_capacity(ENTRIES.len());
        for (name, shape) in ENTRIES {
            // All of an SM's memory for shared memory, so that a memory-bound kernel can run beside.
            let kernel = match modules.kernel(name, Carveout::Shared, max_shared) {
                Ok(kernel) => kernel,
                Err(Error::NoKernel { .. }) => break,
                Err(error) => return Err(error),
            };
            loaded.push(Entry {
                shape,
                dtype: if name.contains("_bf16") {
                    Dtype::BF16
                } else {
                    Dtype::F16
                },
                cap: name.contains("_cap"),
                kernel,
            });
        }
        Ok(Self(loaded))
    }

    /// What plans can ask for.
    pub fn instances(&self) -> Vec<Instance> {
        let instance = |entry: &Entry| Instance {
            m: entry.shape.rows(),
            n: entry.shape.keys,
            head_dim: Some(entry.shape.head_dim),
            head_dim_v: Some(entry.shape.value_dim).filter(|&dim| dim != entry.shape.head_dim),
            soft_cap: Some(entry.cap),
        };
        // The same for both element types.
        let loaded = self.0.iter().filter(|entry| entry.dtype == Dtype::BF16);
        loaded.map(instance).collect()
    }

    pub fn find(&self, call: &PrefillCall<'_>) -> Result<&Entry, Error> {
        let dims = [call.spec.head_dim_qk, call.spec.head_dim_v];
        let cap = call.spec.variant.soft_cap.is_some();
        let fits = |entry: &&Entry| {
            entry.shape.rows() == call.tile.m
                && [entry.shape.head_dim, entry.shape.value_dim] == dims
                && entry.dtype == call.q.dtype
                && entry.cap == cap
        };
        let mut fitting = self.0.iter().filter(fits);
        // With these very blocks of keys if there is one; else as it runs best alone.
        fitting
            .clone()
            .find(|entry| entry.shape.keys == call.tile.n)
            .or_else(|| fitting.find(|entry| !entry.shape.beside))
            .ok_or_else(|| Error::NoInstance {
                kernel: "prefill",
                asked: format!(
                    "{} rows, head dimension {}, {:?}{}",
                    call.tile.m,
                    named(call.spec),
                    call.q.dtype,
                    if cap { ", soft cap" } else { "" }
                ),
                there: "on Hopper: 128 or 192 rows (with a soft cap or from head dimension 192 on only 128), \
                        head dimension 64, 128, 256 or without a cap 192 with values of 128, BF16 or F16",
            })
    }
}

/// The head dimensions of a spec, as one number where they are one.
pub fn named(spec: &Spec) -> String {
    match (spec.head_dim_qk, spec.head_dim_v) {
        (qk, v) if qk == v => qk.to_string(),
        (qk, v) => format!("{qk} with values of {v}"),
    }
}
