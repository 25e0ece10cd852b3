//! New keys and values of 16 bits into pages of 8.

use kernels_gpu::{
    abi::{KvStrides, QuantiseParams, QuantiseTensor, ScaleParams},
    divisor::Divisor,
    passes::quantise::{COMPUTED, GIVEN, GIVEN_BY_TOKEN, NUMBERS, THREADS},
    registry::Op,
};

use super::{
    DeviceArray, DevicePtr, DeviceTensor, Gpu, KvPool, KvScales, Stream,
    launch::Launch,
    pool::{pool_slots, pool_strides},
    registry::{element, format},
    scales::{KEYS, VALUES},
    tensor::{COUNTED, VECTOR_BYTES, check_address, fits},
};
use crate::{
    Error,
    checks::{check_same, extent},
    exec::apart::{check_apart, check_own_values, check_pool},
    problem::{Dtype, Quantity, Spec},
};

/// The source of the scales when keys and values are appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AppendScales {
    /// The scales of the pool are used.
    Given,
    /// A scale is computed for each token and head, such that its largest number becomes the largest of the type. It is
    /// written to the scales of the pool, which must be [`KvScales::Token`].
    Computed,
}

impl Gpu {
    /// Quantises the keys and values of new tokens into a page pool of F8E4M3 or F8E5M2: they are multiplied by the reciprocal
    /// of their scale in f32, rounded to nearest, and clamped to the largest finite number. NaN stays NaN.
    ///
    /// `k`, `v` (BF16 or F16) and `slots` are as in [`append_paged_kv`](Self::append_paged_kv), with rows on 16-byte
    /// boundaries; rows of the pool begin at multiples of 8 bytes. Of [`KvScales::Request`] the `of_token` is that of
    /// the new tokens.
    ///
    /// Keys of [latent](Spec::latent) attention have no values of their own: append them with
    /// [`append_rows_quantised`](Self::append_rows_quantised), or with [`append_latent_656`](Self::append_latent_656).
    ///
    /// The same call on the CPU is [`Cpu::append_quantised`](crate::Cpu::append_quantised).
    ///
    /// # Safety
    /// As [`append_paged_kv`](Self::append_paged_kv).
    ///
    /// # Errors
    /// A variant for each thing that can be wrong with a tensor, before anything is launched; [`Error::Driver`] if the
    /// launch fails.
    #[expect(
        clippy::too_many_arguments,
        reason = "those of append_paged_kv and the scales"
    )]
    pub unsafe fn append_quantised(
        &self,
        spec: &Spec,
        pool: &KvPool,
        scales: AppendScales,
        slots: DeviceArray<u32>,
        k: &DeviceTensor<3>,
        v: &DeviceTensor<3>,
        stream: Stream,
    ) -> Result<(), Error> {
        let params = parameters(spec, pool, scales, slots, [k, v])?;
        // SAFETY: the caller's promises.
        unsafe { self.quantise(&params, k.dtype, 2, stream) }
    }

    /// Quantises the keys or the values of new tokens into their pool of F8E4M3 or F8E5M2.
    ///
    /// - `rows`: `[tokens, kv_heads, head_dim]`, as in [`append_quantised`](Self::append_quantised)
    /// - `scales`: F32, `[1]` or `[kv_heads]`; none: 1
    /// - `slots`: `[tokens]`, as there
    /// - `pool`: `[pages, page_size, kv_heads, head_dim]`, whatever its order in memory
    ///
    /// The same call on the CPU is [`Cpu::append_rows_quantised`](crate::Cpu::append_rows_quantised).
    ///
    /// # Safety
    /// As [`append_paged_kv`](Self::append_paged_kv).
    ///
    /// # Errors
    /// As [`append_quantised`](Self::append_quantised).
    pub unsafe fn append_rows_quantised(
        &self,
        rows: &DeviceTensor<3>,
        scales: Option<&DeviceTensor<1>>,
        slots: DeviceArray<u32>,
        pool: &DeviceTensor<4>,
        stream: Stream,
    ) -> Result<(), Error> {
        let params = row_parameters(rows, scales, slots, pool)?;
        // SAFETY: the caller's promises.
        unsafe { self.quantise(&params, rows.dtype, 1, stream) }
    }

    /// Launches the kernel for keys and values, or only for the first of them.
    ///
    /// # Safety
    /// As [`append_paged_kv`](Self::append_paged_kv), for what the parameters point to.
    unsafe fn quantise(
        &self,
        params: &QuantiseParams,
        dtype: Dtype,
        sides: u32,
        stream: Stream,
    ) -> Result<(), Error> {
        let kernel = self.pass(Op::Quantise, element(dtype))?;
        let lanes = params.k.lanes_log.max(params.v.lanes_log);
        let threads = fits(
            Quantity::Batch("threads"),
            (params.rows as usize) << lanes,
            COUNTED,
        )?;
        let mut launch = Launch::new(threads.div_ceil(THREADS), THREADS);
        launch.grid[1] = sides;
        // SAFETY: the kernel takes `QuantiseParams`, and the caller vouches for what they point to.
        unsafe { self.launch(kernel, &launch, params, stream) }
    }
}

/// The parameters for rows of one tensor, in the place of the keys.
fn row_parameters(
    rows: &DeviceTensor<3>,
    scales: Option<&DeviceTensor<1>>,
    slots: DeviceArray<u32>,
    pool: &DeviceTensor<4>,
) -> Result<QuantiseParams, Error> {
    let [pages, _, heads, dim] = pool.shape;
    let narrow = |what, got| fits(what, got, u32::MAX);
    let strides = pool_strides(pool)?;
    let format = format(pool.dtype)?;
    slots.check_address("slots", 4)?;
    let (mut address, mut scale_strides) = (0, KvStrides::default());
    if let Some(scales) = scales {
        scales.check_f32("scales")?;
        scales.check_address("scales", 4)?;
        if scales.shape[0] != 1 {
            scales.check_extent("scales", "KV heads", 0, heads, "in the pool, or one")?;
            scale_strides.head = narrow(Quantity::Stride("a stride of scales"), scales.strides[0])?;
        }
        address = scales.address;
    }
    let side = Side {
        name: "rows",
        pool_name: "the pool",
        source: rows,
        dim: narrow(Quantity::Heads("elements in a head"), dim)?,
        given_by: "in the pool",
        pool: pool.address,
        strides,
        scales: address,
        scale_strides,
    };
    let pages = narrow(Quantity::Pool("pages"), pages)?;
    let kv_heads = narrow(Quantity::Heads("KV heads"), heads)?;
    check_pool("the pool", pages, kv_heads, side.dim, strides)?;
    let side = side.parameters(slots.len, heads)?;
    Ok(QuantiseParams {
        slots: slots.address,
        of_token: 0,
        k: side,
        v: side,
        pool_slots: pool_slots(pages, strides.page_size)?,
        rows: fits(
            Quantity::Batch("new tokens × KV heads"),
            slots.len.saturating_mul(heads),
            COUNTED,
        )?,
        mode: GIVEN,
        page_size: Divisor::new(strides.page_size),
        kv_heads: Divisor::new(kv_heads.max(1)),
        format,
    })
}

/// The source of an append's scales, as kernel parameters.
pub(super) fn mode(scales: AppendScales, pool: &KvPool) -> Result<u32, Error> {
    match (scales, &pool.scales) {
        (_, KvScales::InRow) => Err(super::append::in_rows()),
        (AppendScales::Computed, KvScales::Token { k, v }) => {
            for (name, scales) in [(KEYS, k), (VALUES, v)] {
                check_apart(name, scales.shape, 1, scales.strides)?;
            }
            Ok(COMPUTED)
        }
        (AppendScales::Computed, _) => Err(Error::NoInstance {
            kernel: "append",
            asked: "computed scales for a pool without scales by token".into(),
            there: "computed scales for pools with KvScales::Token",
        }),
        (AppendScales::Given, KvScales::Token { .. }) => Ok(GIVEN_BY_TOKEN),
        (AppendScales::Given, _) => Ok(GIVEN),
    }
}

/// Checks the call and makes the parameters of the launch.
fn parameters(
    spec: &Spec,
    pool: &KvPool,
    scales: AppendScales,
    slots: DeviceArray<u32>,
    [k, v]: [&DeviceTensor<3>; 2],
) -> Result<QuantiseParams, Error> {
    let page_size = pool.page_size()?;
    let format = format(pool.dtype)?;
    pool.check_dtype(spec)?;
    pool.check_heads(spec)?;
    let (tokens, heads) = (slots.len, spec.kv_heads as usize);
    slots.check_address("slots", 4)?;
    let mode = mode(scales, pool)?;
    check_own_values(spec, "append_rows_quantised with the keys alone")?;
    let of_scales = pool.scale_parameters(spec, tokens)?;
    pool.check_apart(spec)?;
    let ScaleParams {
        of_token,
        k_strides,
        v_strides,
        ..
    } = of_scales;
    let side =
        |[name, pool_name]: [_; 2], source, dim, address, strides, scales, scale_strides| Side {
            name,
            pool_name,
            source,
            dim,
            given_by: "in the specification",
            pool: address,
            strides,
            scales,
            scale_strides,
        };
    let (qk, value) = (spec.head_dim_qk, spec.head_dim_v);
    let [keys, values] = [["k", "the key pool"], ["v", "the value pool"]];
    let k_side = side(keys, k, qk, pool.k, pool.k_strides, of_scales.k, k_strides);
    let v_side = side(
        values,
        v,
        value,
        pool.v,
        pool.v_strides,
        of_scales.v,
        v_strides,
    );
    check_same("v", v.dtype, "k", k.dtype)?;
    Ok(QuantiseParams {
        slots: slots.address,
        of_token,
        k: k_side.parameters(tokens, heads)?,
        v: v_side.parameters(tokens, heads)?,
        pool_slots: pool_slots(pool.pages, page_size)?,
        rows: fits(
            Quantity::Batch("new tokens × KV heads"),
            tokens.saturating_mul(heads),
            COUNTED,
        )?,
        mode,
        page_size: Divisor::new(page_size),
        kv_heads: Divisor::new(spec.kv_heads.max(1)),
        format,
    })
}

/// Keys or values.
struct Side<'a> {
    name: &'static str,
    pool_name: &'static str,
    source: &'a DeviceTensor<3>,
    dim: u32,
    /// What says the numbers of heads and of their elements, in words.
    given_by: &'static str,
    pool: DevicePtr,
    strides: KvStrides,
    scales: u64,
    scale_strides: KvStrides,
}

impl Side<'_> {
    fn parameters(&self, tokens: usize, heads: usize) -> Result<QuantiseTensor, Error> {
        let Self {
            name,
            source,
            given_by,
            ..
        } = *self;
        source.check_16_bits(name)?;
        source.check_extent(name, "tokens", 0, tokens, "in the slots")?;
        source.check_extent(name, "KV heads", 1, heads, given_by)?;
        source.check_extent(name, "elements in a head", 2, self.dim as usize, given_by)?;
        source.check_dense(name, 2)?;
        source.check_address(name, VECTOR_BYTES)?;
        check_address(self.pool_name, self.pool, source.is_empty(), 8)?;
        // A row must fit in a warp.
        if !self.dim.is_multiple_of(NUMBERS) || self.dim > 32 * NUMBERS {
            let rule = format!("a multiple of {NUMBERS} up to {}", 32 * NUMBERS);
            return Err(extent(name, "elements in a head", self.dim as usize, rule));
        }
        let [source_token, source_head, _] = source.strides;
        let vectors = |tensor, dimension, got: usize| -> Result<u32, Error> {
            if !got.is_multiple_of(NUMBERS as usize) {
                return Err(Error::Stride {
                    tensor,
                    dimension,
                    got,
                    rule: format!("a multiple of {NUMBERS}"),
                });
            }
            Ok(fits(Quantity::Stride("a stride"), got, u32::MAX)? / NUMBERS)
        };
        let pool = self.pool_name;
        Ok(QuantiseTensor {
            source: source.address,
            pool: self.pool,
            scales: self.scales,
            scale_strides: self.scale_strides,
            source_token: vectors(name, "tokens", source_token)?,
            source_head: vectors(name, "heads", source_head)?,
            page: vectors(pool, "pages", self.strides.page as usize)?,
            token: vectors(pool, "tokens", self.strides.token as usize)?,
            head: vectors(pool, "heads", self.strides.head as usize)?,
            vectors: self.dim / NUMBERS,
            lanes_log: (self.dim / NUMBERS).next_power_of_two().trailing_zeros(),
            reserved: 0,
        })
    }
}

#[cfg(test)]
mod tests;
