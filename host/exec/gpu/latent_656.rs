//! Quantises new keys of latent attention into rows of 656 bytes, on the GPU.

use bytemuck::Zeroable;
use kernels_gpu::{
    abi::{QuantiseParams, QuantiseTensor},
    divisor::Divisor,
    passes::latent_656::{ELEMENTS, KEYS, THREADS},
    registry::Op,
};

use super::{
    DeviceArray, DeviceTensor, Gpu, KvPool, KvScales, Stream,
    launch::Launch,
    pool::pool_slots,
    registry::element,
    tensor::{COUNTED, VECTOR_BYTES, fits},
    vectors::vectors,
};
use crate::{
    Error,
    exec::apart::check_pool,
    kv::LATENT_656_BYTES,
    problem::{Dtype, Quantity},
};

/// Elements that a lane loads (16 bits each) or stores (8 bits each) at a time.
const VECTOR: usize = 8;

impl Gpu {
    /// Quantises keys of latent attention into a pool whose [rows carry their scales](crate::kv::KvScales::InRow).
    ///
    /// `rows` is `[tokens, 576]`, BF16 or F16, with rows on 16-byte boundaries; `slots` are as in
    /// [`append_paged_kv`](Self::append_paged_kv). Scales are powers of two, as
    /// [`Cpu::append_latent_656`](crate::Cpu::append_latent_656) has them, which is the same call on the CPU.
    ///
    /// # Safety
    /// As [`append_paged_kv`](Self::append_paged_kv).
    ///
    /// # Errors
    /// A variant for each thing that can be wrong with a tensor, before anything is launched;
    /// [`Error::NotOnDevice`] before Hopper, [`Error::Driver`] if the launch fails.
    pub unsafe fn append_latent_656(
        &self,
        pool: &KvPool,
        slots: DeviceArray<u32>,
        rows: &DeviceTensor<2>,
        stream: Stream,
    ) -> Result<(), Error> {
        let params = parameters(pool, slots, rows)?;
        let kernel = self.pass(Op::QuantiseLatent, element(rows.dtype))?;
        let launch = Launch::new(params.rows.div_ceil(KEYS), THREADS);
        // SAFETY: the kernel takes `QuantiseParams`, and the caller vouches for what they point to.
        unsafe { self.launch(kernel, &launch, &params, stream) }
    }
}

/// Checks the call and makes the parameters of the launch.
fn parameters(
    pool: &KvPool,
    slots: DeviceArray<u32>,
    rows: &DeviceTensor<2>,
) -> Result<QuantiseParams, Error> {
    let page_size = pool.page_size()?;
    if pool.scales != KvScales::InRow || pool.dtype != Dtype::F8E4M3 {
        return Err(Error::NoInstance {
            kernel: "append",
            asked: format!(
                "latent keys into a pool of {:?} with {:?}",
                pool.dtype, pool.scales
            ),
            there: "rows with their scales (KvPool::latent_656); for other scales, use append_quantised",
        });
    }
    rows.check_16_bits("rows")?;
    let tokens = slots.len;
    slots.check_address("slots", 4)?;
    rows.check_extent("rows", "tokens", 0, tokens, "in the slots")?;
    let held = "rows of 656 bytes hold";
    rows.check_extent("rows", "elements of a key", 1, ELEMENTS as usize, held)?;
    rows.check_dense("rows", 1)?;
    rows.check_address("rows", VECTOR_BYTES)?;
    let [source_token, _] = rows.strides;
    if !source_token.is_multiple_of(VECTOR) {
        return Err(Error::Stride {
            tensor: "rows",
            dimension: "tokens",
            got: source_token,
            rule: format!("a multiple of {VECTOR}"),
        });
    }
    vectors(
        "the KV pool",
        pool.k,
        &pool.k_strides,
        [pool.pages, 1],
        pool.dtype,
    )?;
    check_pool(
        "the KV pool",
        pool.pages,
        1,
        LATENT_656_BYTES,
        pool.k_strides,
    )?;
    Ok(QuantiseParams {
        slots: slots.address,
        k: QuantiseTensor {
            source: rows.address,
            pool: pool.k,
            source_token: fits(
                Quantity::Stride("a stride"),
                source_token / VECTOR,
                u32::MAX,
            )?,
            page: pool.k_strides.page / VECTOR as u32,
            token: pool.k_strides.token / VECTOR as u32,
            ..QuantiseTensor::zeroed()
        },
        pool_slots: pool_slots(pool.pages, page_size)?,
        rows: fits(Quantity::Batch("new tokens"), tokens, COUNTED)?,
        page_size: Divisor::new(page_size),
        kv_heads: Divisor::new(1),
        ..QuantiseParams::zeroed()
    })
}
