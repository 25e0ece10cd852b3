//! Attention, as a custom operation of candle.

use std::sync::Arc;

use candle_core::{
    CpuStorage, CustomOp3, DType, DeviceLocation, Layout, Result, Shape, Tensor, bail,
};
use tandem_attn::{plan::Plan, problem::KvLayout};

use crate::{
    cpu,
    layer::{Layer, attended},
    layout::reads_in_place,
    step::{Attention, Backend, Step},
};

/// Computes attention of a step's queries to a paged cache.
///
/// - `q`: `[queries, q_heads, head_dim]`, the requests of the step one after the other
/// - `k_cache`, `v_cache`: `[blocks, block_size, kv_heads, head_dim]`, or with the middle axes exchanged, as the layer
///   says; keys of the step's tokens are in them already ([`reshape_and_cache`](crate::reshape_and_cache))
///
/// The result is `[queries, q_heads, head_dim_v]`, dense, of the queries' type. The output of a query that sees no key
/// is 0.
///
/// # Errors
/// If tensors, step and layer do not match, or if there is no kernel for the heads.
pub fn paged_attention(
    q: &Tensor,
    k_cache: &Tensor,
    v_cache: &Tensor,
    step: &Step,
    layer: &Layer,
) -> Result<Tensor> {
    if let Some(keys) = step.packed() {
        bail!("the step is of {keys} packed keys without a cache: use varlen_attention");
    }
    let (k, v) = (
        by_token("k_cache", k_cache, layer.layout)?,
        by_token("v_cache", v_cache, layer.layout)?,
    );
    attend(q, &k, &v, step, layer)
}

/// Computes attention to keys and values whose last two axes are heads and elements.
pub fn attend(q: &Tensor, k: &Tensor, v: &Tensor, step: &Step, layer: &Layer) -> Result<Tensor> {
    let heads = |tensor: &Tensor| match *tensor.dims() {
        [.., heads, dim] => [heads, dim],
        _ => [0; 2],
    };
    let _ = q.dims3()?;
    for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
        check_device(name, tensor.device().location(), step.attention.0.location)?;
    }
    let ([q_heads, head_dim], [kv_heads, of_keys], [_, head_dim_v]) =
        (heads(q), heads(k), heads(v));
    // A kernel gets only addresses and trusts the specification, so check types and shapes here.
    if k.dtype() != v.dtype() {
        bail!(
            "v is {:?} and k is {:?}: keys and values have one type",
            v.dtype(),
            k.dtype()
        );
    }
    if of_keys != head_dim {
        bail!("q has heads of {head_dim} and k of {of_keys}: they must be equal");
    }
    let spec = layer
        .spec(q_heads, kv_heads, head_dim, q.dtype())?
        .with_head_dim_v(u32::try_from(head_dim_v).unwrap_or(u32::MAX))
        .with_kv_dtype(attended("k", k.dtype())?);
    if spec.kv_dtype.bytes() != 1 && layer.kv_scales.is_some() {
        bail!(
            "the layer has scales, and k is {:?}: only caches of F8E4M3 have scales",
            k.dtype()
        );
    }
    check_scales(layer.kv_scales)?;
    if let Some(sinks) = &layer.sinks {
        check_device(
            "sinks",
            sinks.device().location(),
            step.attention.0.location,
        )?;
        check_sinks(sinks, q_heads)?;
    }
    let op = Attend {
        plan: step.plan(&spec)?,
        attention: step.attention.clone(),
        scales: layer.kv_scales,
        sinks: layer.sinks.clone(),
    };
    if q.device().is_cuda() && !reads_in_place(q.layout())? {
        // `contiguous` would leave a tensor alone that only begins at the wrong address.
        return q.force_contiguous()?.apply_op3_no_bwd(k, v, &op);
    }
    q.apply_op3_no_bwd(k, v, &op)
}

/// A kernel on one GPU that reads memory of another would destroy its context, or read over the link between them.
fn check_device(name: &str, of: DeviceLocation, step: DeviceLocation) -> Result<()> {
    if of != step {
        bail!(
            "{name} is on {of:?} and the step of {step:?}: make the step with an Attention of the tensors' device"
        );
    }
    Ok(())
}

/// Checks that tensors are on one GPU if one of them is on a GPU.
pub fn check_same_gpu((first, a): (&str, &Tensor), (second, b): (&str, &Tensor)) -> Result<()> {
    let (of_a, of_b) = (a.device().location(), b.device().location());
    if of_a != of_b && (a.device().is_cuda() || b.device().is_cuda()) {
        bail!("{first} is on {of_a:?} and {second} on {of_b:?}: bring them to one device");
    }
    Ok(())
}

/// Other scales would make every key or value 0, infinite or NaN.
pub fn check_scales(scales: Option<[f32; 2]>) -> Result<()> {
    match scales {
        Some([k, v])
            if [k, v]
                .iter()
                .any(|scale| !(*scale > 0.0 && scale.is_finite())) =>
        {
            bail!(
                "the layer's scales are {k} for keys and {v} for values: give positive finite numbers"
            )
        }
        _ => Ok(()),
    }
}

fn check_sinks(sinks: &Tensor, q_heads: usize) -> Result<()> {
    if sinks.dtype() != DType::F32 {
        bail!(
            "the layer's sinks are {:?}: convert them once with to_dtype(DType::F32)",
            sinks.dtype()
        );
    }
    if sinks.dims() != [q_heads] {
        bail!(
            "the layer's sinks are {:?}, and q has {q_heads} heads: each head has one",
            sinks.shape()
        );
    }
    if !sinks.is_contiguous() {
        bail!("the layer's sinks do not lie side by side: copy them once with contiguous()");
    }
    Ok(())
}

/// A view of a cache as `[blocks, block_size, kv_heads, head_dim]`.
pub fn by_token(name: &str, cache: &Tensor, layout: KvLayout) -> Result<Tensor> {
    if cache.rank() != 4 {
        bail!(
            "{name} is {:?}: a cache is [blocks, block_size, kv_heads, head_dim], or with KvLayout::Hnd \
             [blocks, kv_heads, block_size, head_dim]",
            cache.shape()
        );
    }
    match layout {
        KvLayout::Nhd => Ok(cache.clone()),
        KvLayout::Hnd => cache.transpose(1, 2),
    }
}

/// The operation from queries, keys and values to outputs.
pub struct Attend {
    attention: Attention,
    pub plan: Arc<Plan>,
    pub scales: Option<[f32; 2]>,
    pub sinks: Option<Tensor>,
}

impl CustomOp3 for Attend {
    fn name(&self) -> &'static str {
        "tandem-attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        match &self.attention.0.backend {
            Backend::Cpu(cpu) => {
                cpu::attend(cpu, self, [(q, q_layout), (k, k_layout), (v, v_layout)])
            }
            #[cfg(feature = "cuda")]
            Backend::Cuda(_) => bail!("the step is of a GPU, and the tensors are on the CPU"),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &candle_core::CudaStorage,
        q_layout: &Layout,
        k: &candle_core::CudaStorage,
        k_layout: &Layout,
        v: &candle_core::CudaStorage,
        v_layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        match &self.attention.0.backend {
            Backend::Cuda(backend) => {
                backend.attend(self, [(q, q_layout), (k, k_layout), (v, v_layout)])
            }
            Backend::Cpu(_) => bail!("the step is of the CPU, and the tensors are on a GPU"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without the check, kernels ran on the step's GPU with addresses of the other one.
    #[test]
    fn tensors_of_another_gpu_are_refused() {
        let [zero, one] = [0, 1].map(|gpu_id| DeviceLocation::Cuda { gpu_id });
        assert!(check_device("q", zero, zero).is_ok());
        for (of, step) in [(one, zero), (DeviceLocation::Cpu, zero)] {
            let said = check_device("k", of, step).unwrap_err().to_string();
            assert!(
                said.starts_with("k is on ") && said.contains("gpu_id: 0"),
                "{said}"
            );
        }
    }
}
