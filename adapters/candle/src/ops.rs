//! The calls of a layer, as custom operations of candle.

use std::sync::Arc;

use candle_core::{
    CpuStorage, CustomOp3, DType, DeviceLocation, InplaceOp2, Layout, Result, Shape, Tensor, bail,
};
use tandem_attn::{
    plan::Plan,
    problem::{Dtype, KvLayout, Spec},
};

use crate::{
    cpu,
    layout::reads_in_place,
    step::{Attention, Backend, Layer, Step},
    tables::integers,
};

/// Computes attention of a step's queries to a paged cache.
///
/// - `q`: `[queries, q_heads, head_dim]`, the requests of the step one after the other
/// - `k_cache`, `v_cache`: `[blocks, block_size, kv_heads, head_dim]`, or with the middle axes exchanged, as the layer
///   says; keys of the step's tokens are in them already ([`reshape_and_cache`])
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
        [.., heads, dim] => [heads, dim].map(|extent| u32::try_from(extent).unwrap_or(u32::MAX)),
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
    let mut spec = Spec::new(q_heads, kv_heads, head_dim)
        .with_head_dim_v(head_dim_v)
        .with_dtype(dtype("q", q)?)
        .with_kv_dtype(dtype("k", k)?)
        .with_scale(layer.scale);
    spec.variant.causal = layer.causal;
    spec.variant.window_left = layer.window_left;
    spec.variant.soft_cap = layer.soft_cap;
    if spec.kv_dtype.bytes() != 1 && layer.kv_scales.is_some() {
        bail!(
            "the layer has scales, and k is {:?}: only caches of F8E4M3 have scales",
            k.dtype()
        );
    }
    check_scales(layer.kv_scales)?;
    let op = Attend {
        plan: step.plan(&spec)?,
        attention: step.attention.clone(),
        scales: layer.kv_scales,
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

/// Copies the keys and values of new tokens into a paged cache.
///
/// - `k`, `v`: `[tokens, kv_heads, head_dim]`
/// - `k_cache`, `v_cache`: as in [`paged_attention`], written in place
/// - `slots`: `[tokens]`, `block × block_size + offset` each, of I64, I32 or U32; −1 leaves a token out
///
/// # Errors
/// If the tensors do not match. On the CPU, also if a slot is outside of the cache or occurs twice. On a GPU, tokens
/// whose slots are outside of the cache are left out.
pub fn reshape_and_cache(
    k: &Tensor,
    v: &Tensor,
    k_cache: &Tensor,
    v_cache: &Tensor,
    slots: &Tensor,
    layout: KvLayout,
) -> Result<()> {
    append(k, v, [k_cache, v_cache], slots, layout, None)
}

/// Like [`reshape_and_cache`], into a cache of F8E4M3: values are divided by the layer's scales, rounded to nearest,
/// and saturated.
///
/// On a GPU, `k` and `v` are BF16 or F16; on the CPU they may also be F32.
///
/// # Errors
/// As [`reshape_and_cache`]; also if the caches are not F8E4M3.
pub fn reshape_and_quantise(
    k: &Tensor,
    v: &Tensor,
    k_cache: &Tensor,
    v_cache: &Tensor,
    slots: &Tensor,
    layer: &Layer,
) -> Result<()> {
    let scales = layer.kv_scales.unwrap_or([1.0; 2]);
    check_scales(Some(scales))?;
    append(k, v, [k_cache, v_cache], slots, layer.layout, Some(scales))
}

/// Other scales would make every key or value 0, infinite or NaN.
fn check_scales(scales: Option<[f32; 2]>) -> Result<()> {
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

/// Copies rows; with scales, quantises them.
fn append(
    k: &Tensor,
    v: &Tensor,
    [k_cache, v_cache]: [&Tensor; 2],
    slots: &Tensor,
    layout: KvLayout,
    scales: Option<[f32; 2]>,
) -> Result<()> {
    let k_cache = by_token("k_cache", k_cache, layout)?;
    let v_cache = by_token("v_cache", v_cache, layout)?;
    // Checks everything that follows from shapes before one of the two caches is written.
    if k_cache.dims()[..3] != v_cache.dims()[..3] {
        bail!(
            "k_cache is {:?} and v_cache is {:?}: blocks, their tokens and heads must be the same",
            k_cache.shape(),
            v_cache.shape()
        );
    }
    for (name, rows, cache) in [("k", k, &k_cache), ("v", v, &v_cache)] {
        let ((tokens, heads, dim), (.., of_cache, cached)) = (rows.dims3()?, cache.dims4()?);
        let dtype = scales.map_or(rows.dtype(), |_| DType::F8E4M3);
        if cache.dtype() != dtype && (scales.is_some() || cache.dtype() == DType::F8E4M3) {
            bail!(
                "{name} is {:?} and its cache {:?}: reshape_and_quantise is for caches of F8E4M3, reshape_and_cache for \
                 those of the rows' type",
                rows.dtype(),
                cache.dtype()
            );
        }
        if (heads, dim) != (of_cache, cached) || cache.dtype() != dtype {
            bail!(
                "{name} has {heads} heads of {dim} in {:?}, and its cache {of_cache} of {cached} in {:?}",
                rows.dtype(),
                cache.dtype()
            );
        }
        if slots.dims() != [tokens] {
            bail!(
                "{name} has {tokens} tokens, and the slots are {:?}: each token has one",
                slots.shape()
            );
        }
    }
    // Candle compares the devices of cache and rows only. A kernel that reads memory of another GPU would destroy its
    // context.
    let (of_slots, of_rows) = (slots.device().location(), k.device().location());
    if of_slots != of_rows && slots.device().is_cuda() {
        bail!(
            "the slots are on {of_slots:?} and the rows on {of_rows:?}: bring them to one device"
        );
    }
    let mut op = Append {
        attention: Attention::new(k.device())?,
        slots: Slots::new(slots)?,
        scale: scales.map(|[k, _]| k),
    };
    k_cache.inplace_op2(k, &op)?;
    op.scale = scales.map(|[_, v]| v);
    v_cache.inplace_op2(v, &op)
}

/// A view of a cache as `[blocks, block_size, kv_heads, head_dim]`.
fn by_token(name: &str, cache: &Tensor, layout: KvLayout) -> Result<Tensor> {
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

fn dtype(name: &str, tensor: &Tensor) -> Result<Dtype> {
    Ok(match tensor.dtype() {
        DType::F32 => Dtype::F32,
        DType::BF16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        DType::F8E4M3 => Dtype::F8E4M3,
        other => {
            bail!("{name} is {other:?}: attention takes F32, BF16 and F16, and caches of F8E4M3")
        }
    })
}

/// The operation from queries, keys and values to outputs.
struct Attend {
    attention: Attention,
    plan: Arc<Plan>,
    scales: Option<[f32; 2]>,
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
            Backend::Cpu(cpu) => cpu::attend(
                cpu,
                &self.plan,
                self.scales,
                [(q, q_layout), (k, k_layout), (v, v_layout)],
            ),
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
            Backend::Cuda(backend) => backend.attend(
                &self.plan,
                self.scales,
                [(q, q_layout), (k, k_layout), (v, v_layout)],
            ),
            Backend::Cpu(_) => bail!("the step is of the CPU, and the tensors are on a GPU"),
        }
    }
}

/// Slots of new tokens.
enum Slots {
    Host(Vec<i64>),
    /// U32, dense.
    #[cfg(feature = "cuda")]
    Device(Tensor),
}

impl Slots {
    fn new(slots: &Tensor) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if slots.device().is_cuda() {
            // −1 becomes a number beyond any pool.
            return Ok(Self::Device(slots.to_dtype(DType::U32)?.contiguous()?));
        }
        integers(slots).map(Self::Host)
    }
}

/// The operation that copies rows of one tensor to their slots.
struct Append {
    attention: Attention,
    slots: Slots,
    /// Scale, if rows are quantised.
    scale: Option<f32>,
}

impl InplaceOp2 for Append {
    fn name(&self) -> &'static str {
        "tandem-append"
    }

    fn cpu_fwd(
        &self,
        cache: &mut CpuStorage,
        cache_layout: &Layout,
        rows: &CpuStorage,
        rows_layout: &Layout,
    ) -> Result<()> {
        match (&self.attention.0.backend, &self.slots) {
            (Backend::Cpu(_), Slots::Host(slots)) => cpu::append(
                (cache, cache_layout),
                (rows, rows_layout),
                slots,
                self.scale,
            ),
            #[cfg(feature = "cuda")]
            _ => bail!("the cache is on the CPU, and the rows or the slots are on a GPU"),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        cache: &mut candle_core::CudaStorage,
        cache_layout: &Layout,
        rows: &candle_core::CudaStorage,
        rows_layout: &Layout,
    ) -> Result<()> {
        match (&self.attention.0.backend, &self.slots) {
            (Backend::Cuda(backend), Slots::Device(slots)) => backend.append(
                (cache, cache_layout),
                (rows, rows_layout),
                slots,
                self.scale,
            ),
            _ => bail!("the cache is on a GPU, and the rows or the slots are on the CPU"),
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
