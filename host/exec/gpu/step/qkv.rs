//! From a fused QKV projection to queries for attention, and keys and values in their pages.

use kernels_gpu::{
    abi::{KvStrides, QkvParams, ScaleParams},
    divisor::Divisor,
    passes::quantise::GIVEN,
    registry::Op,
    step::{
        VECTOR,
        qkv::{sine_bytes, threads},
    },
};

use super::{
    super::{
        AppendScales, DeviceArray, DeviceBuffer, DeviceTensor, Gpu, KvPool, Stream,
        pool::pool_slots,
        quantise::mode,
        registry::element,
        tensor::{COUNTED, check_address, fits},
    },
    check_rows, vectors,
};
use crate::{
    Error,
    checks::{check_extent, check_same},
    problem::{Dtype, Quantity, Spec},
    step::{Pairing, RmsNorm, RopeTable, StepError},
};

/// If the elements of a head are a multiple of this, they are whole pairs of vectors.
const PAIR: u32 = 2 * VECTOR;

/// The frequencies of a model in device memory.
#[derive(Debug)]
pub struct DeviceRope {
    turns: DeviceBuffer<u64>,
    dim: u32,
    pairing: Pairing,
    magnitude: f32,
}

/// Normalisation of each query and key head; the counterpart of [`cpu::QkNorm`](crate::step::cpu::QkNorm).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QkNorm {
    /// The norm.
    pub norm: RmsNorm,
    /// `[head_dim]`: weights for queries.
    pub q: DeviceTensor<1>,
    /// `[head_dim]`: weights for keys.
    pub k: DeviceTensor<1>,
}

/// The inputs of [`Gpu::qkv_step`]; the counterpart of [`cpu::QkvStep`](crate::step::cpu::QkvStep).
#[derive(Clone, Copy, Debug)]
pub struct QkvStep<'a> {
    /// `[tokens, (q_heads + 2 · kv_heads) · head_dim]` in BF16 or F16, with any token stride that is a multiple of 8: the
    /// heads of the queries, of the keys, of the values.
    pub qkv: DeviceTensor<2>,
    /// Bias: one such row, added to each row.
    pub bias: Option<DeviceTensor<1>>,
    /// Normalisation.
    pub norm: Option<QkNorm>,
    /// Rotary embedding, and the position of each token.
    pub rope: Option<(&'a DeviceRope, DeviceArray<u32>)>,
}

impl Gpu {
    /// Copies frequencies to device memory and waits for the copy. Call it once per model.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Driver`]; [`Error::NoInstance`] if the number of rotated elements is not a multiple
    /// of 16.
    pub fn rope(&self, table: &RopeTable) -> Result<DeviceRope, Error> {
        let dim = table.dim();
        if !dim.is_multiple_of(PAIR) {
            return Err(Error::NoInstance {
                kernel: "qkv_step",
                asked: format!("a rotary embedding of {dim} elements"),
                there: "multiples of 16; for any even number, use step::cpu::qkv",
            });
        }
        let (turns, magnitude) = table.parts();
        Ok(DeviceRope {
            turns: DeviceBuffer::from_slice(self, turns)?,
            dim,
            pairing: table.pairing(),
            magnitude,
        })
    }

    /// Prepares a fused QKV projection for attention in one launch: adds the bias, normalises the heads of queries and
    /// keys, applies the rotary embedding, appends keys and values to their pages, and writes the queries to `q`.
    ///
    /// `q` is `[tokens, q_heads, head_dim]` of the projection's type, with strides that are multiples of 8. It may be the
    /// query part of the projection itself (in place). The pool has the projection's type, or F8E4M3, with
    /// rows at multiples of 8 elements. `slots` are as in [`append_paged_kv`](Self::append_paged_kv). The queries of a token
    /// are written even if its slot says that its keys and values are not. `scales` is the source of the scales of 8-bit pages; for
    /// other pages use [`AppendScales::Given`].
    ///
    /// The same call on the CPU is [`cpu::qkv`](crate::step::cpu::qkv).
    ///
    /// # Safety
    /// As [`append_paged_kv`](Self::append_paged_kv). No output overlaps another argument, except for queries that are
    /// written in place.
    ///
    /// # Errors
    /// A variant for each thing that can be wrong with a tensor, before anything is launched; [`Error::Driver`] if the
    /// launch fails.
    #[expect(
        clippy::too_many_arguments,
        reason = "those of append_quantised and the queries"
    )]
    pub unsafe fn qkv_step(
        &self,
        spec: &Spec,
        step: &QkvStep<'_>,
        slots: DeviceArray<u32>,
        q: &DeviceTensor<3>,
        pool: &KvPool,
        scales: AppendScales,
        stream: Stream,
    ) -> Result<(), Error> {
        let mut params = parameters(spec, step, slots, q, pool, scales)?;
        let all = spec.total_heads() as u32;
        // A thread handles two heads, which share its sines, if threads for single heads would more than fill the GPU.
        let alone = (slots.len as u64 * u64::from(all)) << params.lanes_log;
        let heads = match alone <= u64::from(self.multiprocessors) * FILLED {
            true => 1,
            false => 2,
        };
        // Two query heads, or a key head and its value head.
        params.groups = Divisor::new(match heads {
            1 => all,
            _ => spec.q_heads.div_ceil(2) + spec.kv_heads,
        });
        let of_token = params.groups.get() << params.lanes_log;
        let count = slots.len.saturating_mul(of_token as usize);
        let count = fits(
            Quantity::Batch("tokens × heads × head dimension / 16"),
            count,
            COUNTED,
        )?;
        let quantises = pool.dtype != step.qkv.dtype;
        let kernel = self.pass(Op::QkvStep { heads, quantises }, element(step.qkv.dtype))?;
        let mut launch = self.step_launch(count.div_ceil(threads(heads)), threads(heads));
        if heads == 2 && params.turns != 0 {
            launch.shared = sine_bytes(params.lanes_log, params.groups.get(), params.turned);
        }
        // SAFETY: the kernel takes `QkvParams`, and the caller vouches for what they point to.
        unsafe { self.launch(kernel, &launch, &params, stream) }
    }
}

/// Threads per SM that have enough loads in flight.
const FILLED: u64 = 512;

/// Checks the call and makes the parameters of the launch, except those that depend on the heads per thread.
fn parameters(
    spec: &Spec,
    step: &QkvStep<'_>,
    slots: DeviceArray<u32>,
    q: &DeviceTensor<3>,
    pool: &KvPool,
    scales: AppendScales,
) -> Result<QkvParams, Error> {
    let dim = spec.fused_head_dim()?;
    spec.check_fused_heads()?;
    if dim == 0 || !dim.is_multiple_of(PAIR) || dim > 32 * PAIR {
        return Err(Error::HeadDim {
            tensor: "qkv",
            got: dim as usize,
            multiple: PAIR as usize,
        });
    }
    let (tokens, heads) = (slots.len, spec.total_heads());
    let (dtype, row) = (step.qkv.dtype, heads * dim as usize);
    let (of_slots, of_spec) = ("in the slots", "in the specification");
    check_rows("qkv", &step.qkv, dtype)?;
    step.qkv
        .check_extent("qkv", "tokens", 0, tokens, of_slots)?;
    let dimension = "elements in the heads of a token";
    step.qkv.check_extent("qkv", dimension, 1, row, of_spec)?;
    check_rows("q", q, dtype)?;
    q.check_extent("q", "tokens", 0, tokens, of_slots)?;
    q.check_extent("q", "query heads", 1, spec.q_heads as usize, of_spec)?;
    q.check_extent("q", "elements in a head", 2, dim as usize, of_spec)?;
    slots.check_address("slots", 4)?;
    let address = |name, tensor: Option<DeviceTensor<1>>, expected: usize| {
        let Some(tensor) = tensor else { return Ok(0) };
        check_rows(name, &tensor, dtype)?;
        tensor.check_extent(name, "elements", 0, expected, of_spec)?;
        Ok::<u64, Error>(tensor.address)
    };
    let norm = step.norm.map_or(RmsNorm::new(0.0), |norm| norm.norm);
    let weights = |of: fn(QkNorm) -> DeviceTensor<1>| step.norm.map(of);
    let lanes = dim / PAIR;
    // Without a rotary embedding, a thread's vectors are half a head apart, so that neighbouring threads read
    // neighbouring bytes.
    let (mut turned, mut turns, mut positions, mut magnitude, mut interleaved) =
        (lanes, 0, 0, 1.0, 0);
    if let Some((rope, of_tokens)) = step.rope {
        StepError::rope_dim(rope.dim, dim)?;
        of_tokens.check_address("positions", 4)?;
        check_extent("positions", "tokens", of_tokens.len, tokens, of_slots)?;
        (turned, turns, positions) = (rope.dim / PAIR, rope.turns.address(), of_tokens.address);
        (magnitude, interleaved) = (
            rope.magnitude,
            u32::from(rope.pairing == Pairing::Interleaved),
        );
    }
    let target = Target::new(spec, pool, dtype, scales, tokens)?;
    Ok(QkvParams {
        source: step.qkv.address,
        q: q.address,
        k: pool.k,
        v: pool.v,
        slots: slots.address,
        bias: address("the bias", step.bias, row)?,
        q_weight: address(
            "the weights of queries",
            weights(|norm| norm.q),
            dim as usize,
        )?,
        k_weight: address("the weights of keys", weights(|norm| norm.k), dim as usize)?,
        turns,
        positions,
        scales: target.scales,
        reserved: [0; 2],
        k_strides: target.strides[0],
        v_strides: target.strides[1],
        source_token: vectors("qkv", step.qkv.strides[0])?,
        q_token: vectors("q", q.strides[0])?,
        q_head: vectors("q", q.strides[1])?,
        tokens: fits(Quantity::Batch("tokens"), tokens, COUNTED)?,
        q_heads: spec.q_heads,
        kv_heads: spec.kv_heads,
        lanes,
        lanes_log: lanes.next_power_of_two().trailing_zeros(),
        turned,
        interleaved,
        magnitude,
        eps: norm.eps,
        offset: norm.offset,
        inverse_dim: 1.0 / dim as f32,
        mode: target.mode,
        pool_slots: target.slots,
        page_size: Divisor::new(pool.k_strides.page_size),
        groups: Divisor::new(1),
    })
}

/// Where keys and values go.
struct Target {
    /// In vectors.
    strides: [KvStrides; 2],
    scales: ScaleParams,
    mode: u32,
    slots: u32,
}

impl Target {
    fn new(
        spec: &Spec,
        pool: &KvPool,
        dtype: Dtype,
        scales: AppendScales,
        tokens: usize,
    ) -> Result<Self, Error> {
        let page_size = pool.page_size()?;
        pool.check_dtype(spec)?;
        pool.check_heads(spec)?;
        pool.check_apart(spec)?;
        if pool.dtype != Dtype::F8E4M3 {
            check_same("the KV pool", pool.dtype, "qkv", dtype)?;
        }
        let bytes = VECTOR * pool.dtype.bytes();
        check_address("the key pool", pool.k, tokens == 0, bytes)?;
        check_address("the value pool", pool.v, tokens == 0, bytes)?;
        let of_scales = pool.scale_parameters(spec, tokens)?;
        Ok(Self {
            strides: [in_vectors(pool.k_strides)?, in_vectors(pool.v_strides)?],
            scales: of_scales,
            mode: match pool.dtype == dtype && scales == AppendScales::Given {
                true => GIVEN,
                false => mode(scales, pool)?,
            },
            slots: pool_slots(pool.pages, page_size)?,
        })
    }
}

fn in_vectors(strides: KvStrides) -> Result<KvStrides, Error> {
    let of_pool = |got: u32| vectors("the KV pool", got as usize);
    Ok(KvStrides {
        page: of_pool(strides.page)?,
        token: of_pool(strides.token)?,
        head: of_pool(strides.head)?,
        ..strides
    })
}
