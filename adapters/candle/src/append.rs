//! Copies of new keys and values to their slots, as custom operations of candle.

use candle_core::{CpuStorage, DType, InplaceOp2, Layout, Result, Tensor, bail};
use tandem_attn::problem::KvLayout;

#[cfg(any(feature = "cuda", test))]
use crate::tables::check_integers;
use crate::{
    cpu,
    layer::Layer,
    ops::{by_token, check_same_gpu, check_scales},
    step::{Attention, Backend},
    tables::integers,
};

/// Copies the keys and values of new tokens into a paged cache.
///
/// - `k`, `v`: `[tokens, kv_heads, head_dim]`
/// - `k_cache`, `v_cache`: as in [`paged_attention`](crate::paged_attention), written in place
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
    // Candle compares the devices of each cache and its rows only. A kernel that reads memory of another GPU would destroy
    // its context.
    for (name, tensor) in [
        ("v", v),
        ("k_cache", &k_cache),
        ("v_cache", &v_cache),
        ("slots", slots),
    ] {
        check_same_gpu(("k", k), (name, tensor))?;
    }
    // The driver neither allocates nor launches nothing.
    if slots.elem_count() == 0 {
        return Ok(());
    }
    let op = |slots, scale| {
        let attention = Attention::new(k.device())?;
        Ok::<_, candle_core::Error>(Append {
            attention,
            slots,
            scale,
        })
    };
    let [of_k, of_v] = [0, 1].map(|side| scales.map(|scales| scales[side]));
    // The copy itself checks strides and types. With none of the tokens of v, it checks them before keys are written.
    let slots = Slots::new(slots)?;
    v_cache.inplace_op2(&v.narrow(0, 0, 0)?, &op(slots.none()?, of_v)?)?;
    let mut op = op(slots, of_k)?;
    k_cache.inplace_op2(k, &op)?;
    op.scale = of_v;
    v_cache.inplace_op2(v, &op)
}

/// Slots in 32 bits. Read without a sign, those that do not fit and −1 are numbers beyond any pool. So I32 stays as it is;
/// candle has no conversion of it to U32 on GPUs.
#[cfg(any(feature = "cuda", test))]
fn in_32_bits(slots: &Tensor) -> Result<Tensor> {
    check_integers(slots)?;
    match slots.dtype() {
        DType::I64 => slots
            .clamp(-1_i64, i64::from(u32::MAX))?
            .to_dtype(DType::U32),
        _ => Ok(slots.clone()),
    }
}

/// Slots of new tokens.
enum Slots {
    Host(Vec<i64>),
    /// U32 or I32, dense.
    #[cfg(feature = "cuda")]
    Device(Tensor),
}

impl Slots {
    fn new(slots: &Tensor) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if slots.device().is_cuda() {
            return Ok(Self::Device(in_32_bits(slots)?.contiguous()?));
        }
        integers(slots).map(Self::Host)
    }

    /// Those of none of the tokens.
    fn none(&self) -> Result<Self> {
        match self {
            Self::Host(_) => Ok(Self::Host(Vec::new())),
            #[cfg(feature = "cuda")]
            Self::Device(slots) => slots.narrow(0, 0, 0).map(Self::Device),
        }
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
    use candle_core::Device;

    use super::*;

    /// A slot above 2³² was taken modulo 2³² on GPUs, and slots of floating-point numbers were rounded.
    #[test]
    fn slots_of_64_bits_do_not_wrap() -> Result<()> {
        let far = 1_i64 << 32;
        let slots = Tensor::new(&[5, -1, far + 5, 5 - far, far - 1], &Device::Cpu)?;
        let most = u32::MAX;
        let got = in_32_bits(&slots)?.to_vec1::<u32>()?;
        assert_eq!(got, [5, most, most, most, most]);
        let slots = Tensor::new(&[7_i32, -1], &Device::Cpu)?;
        assert_eq!(in_32_bits(&slots)?.to_vec1::<i32>()?, [7, -1]);
        let error = in_32_bits(&Tensor::new(&[1.5_f32], &Device::Cpu)?).unwrap_err();
        assert!(
            error.to_string().contains("give U32, I32 or I64"),
            "{error}"
        );
        Ok(())
    }
}
