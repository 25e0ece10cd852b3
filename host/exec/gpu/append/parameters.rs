//! Checks an append call, and makes the parameters of its launch.

use kernels_gpu::{
    abi::{AppendParams, AppendTensor, KvStrides},
    divisor::Divisor,
};

use super::in_rows;
use crate::{
    Error,
    checks::{check_least, check_same},
    exec::{
        apart::{check_own_values, check_pool},
        gpu::{
            DeviceArray, DevicePtr, DeviceTensor, KvPool, KvScales,
            pool::{pool_slots, pool_strides},
            tensor::{COUNTED, fits},
        },
    },
    problem::{Dtype, Quantity, Spec},
};

/// Keys or values of one call.
struct Side<'a> {
    name: &'static str,
    pool_name: &'static str,
    source: &'a DeviceTensor<3>,
    pool: DevicePtr,
    strides: KvStrides,
    head_dim: u32,
}

/// Checks the call. Returns the parameters of the launch and the bytes of a vector.
pub(super) fn parameters(
    spec: &Spec,
    pool: &KvPool,
    slots: DeviceArray<u32>,
    k: &DeviceTensor<3>,
    v: &DeviceTensor<3>,
) -> Result<(AppendParams, u32), Error> {
    if pool.scales == KvScales::InRow {
        return Err(in_rows());
    }
    pool.page_size()?;
    check_own_values(spec, "append_rows with the keys alone")?;
    pool.check_dtype(spec)?;
    let sides = [
        Side {
            name: "k",
            pool_name: "the key pool",
            source: k,
            pool: pool.k,
            strides: pool.k_strides,
            head_dim: spec.head_dim_qk,
        },
        Side {
            name: "v",
            pool_name: "the value pool",
            source: v,
            pool: pool.v,
            strides: pool.v_strides,
            head_dim: spec.head_dim_v,
        },
    ];
    for side in &sides {
        side.check(spec.kv_heads as usize, pool.dtype, slots.len)?;
    }
    pool.check_heads(spec)?;
    both_parameters(&sides, pool.pages, slots)
}

/// The same for rows of one tensor.
pub(super) fn row_parameters(
    rows: &DeviceTensor<3>,
    slots: DeviceArray<u32>,
    pool: &DeviceTensor<4>,
) -> Result<(AppendParams, u32), Error> {
    let [pages, _, heads, head_dim] = pool.shape;
    let side = Side {
        name: "rows",
        pool_name: "the pool",
        source: rows,
        pool: pool.address,
        strides: pool_strides(pool)?,
        head_dim: fits(Quantity::Heads("elements in a head"), head_dim, u32::MAX)?,
    };
    side.check(heads, pool.dtype, slots.len)?;
    both_parameters(
        &[side],
        fits(Quantity::Pool("pages"), pages, u32::MAX)?,
        slots,
    )
}

/// The parameters for keys, values or both, which were checked, and the bytes of a vector.
fn both_parameters(
    sides: &[Side<'_>],
    pages: u32,
    slots: DeviceArray<u32>,
) -> Result<(AppendParams, u32), Error> {
    let (first, last) = (&sides[0], &sides[sides.len() - 1]);
    slots.check_address("slots", 4)?;
    for side in sides {
        let heads = fits(Quantity::Heads("KV heads"), side.source.shape[1], u32::MAX)?;
        check_pool(side.pool_name, pages, heads, side.head_dim, side.strides)?;
    }
    let page_size = first.strides.page_size;
    let pool_slots = pool_slots(pages, page_size)?;
    let vector = match sides.iter().try_for_each(|side| side.check_vectors(16)) {
        Ok(()) => 16,
        Err(_) => {
            sides.iter().try_for_each(|side| side.check_vectors(8))?;
            8
        }
    };
    let params = AppendParams {
        slots: slots.address,
        pool_slots,
        page_size: Divisor::new(page_size),
        k: first.parameters(vector)?,
        v: last.parameters(vector)?,
    };
    Ok((params, vector))
}

impl Side<'_> {
    fn check(&self, heads: usize, dtype: Dtype, tokens: usize) -> Result<(), Error> {
        let Self { name, source, .. } = *self;
        if dtype.bytes() == 1 && source.dtype.bytes() == 2 {
            return Err(Error::NoInstance {
                kernel: "append",
                asked: format!("{name} in {:?} into a pool of {dtype:?}", source.dtype),
                there: "one type for both; append_quantised (append_rows_quantised) converts to 8 bits",
            });
        }
        check_same(name, source.dtype, "the KV pool", dtype)?;
        let dim = self.head_dim as usize;
        check_least(name, "KV heads", heads, 1, "")?;
        source.check_extent(name, "tokens", 0, tokens, "in the slots")?;
        source.check_extent(name, "KV heads", 1, heads, "the pool has")?;
        source.check_extent(name, "elements in a head", 2, dim, "the pool has")?;
        if dim == 0 || !dim.is_multiple_of(8) {
            return Err(Error::HeadDim {
                tensor: name,
                got: dim,
                multiple: 8,
            });
        }
        source.check_dense(name, 2)?;
        if self.pool == 0 && !source.is_empty() {
            return Err(Error::NullPointer {
                tensor: self.pool_name,
            });
        }
        source.check_address(name, 1)
    }

    /// Whether the starts and the lengths of all rows are multiples of `bytes`.
    fn check_vectors(&self, bytes: u32) -> Result<(), Error> {
        let element = self.source.dtype.bytes();
        if !(self.head_dim * element).is_multiple_of(bytes) {
            return Err(Error::HeadDim {
                tensor: self.name,
                got: self.head_dim as usize,
                multiple: (bytes / element) as usize,
            });
        }
        for (tensor, address) in [
            (self.name, self.source.address),
            (self.pool_name, self.pool),
        ] {
            if !address.is_multiple_of(bytes.into()) {
                return Err(Error::Misaligned {
                    tensor,
                    address,
                    align: bytes,
                });
            }
        }
        let [source_token, source_head, _] = self.source.strides;
        let strides = [
            (self.name, "tokens", source_token),
            (self.name, "heads", source_head),
            (self.pool_name, "pages", self.strides.page as usize),
            (self.pool_name, "tokens", self.strides.token as usize),
            (self.pool_name, "heads", self.strides.head as usize),
        ];
        for (tensor, dimension, got) in strides {
            if !(got * element as usize).is_multiple_of(bytes as usize) {
                return Err(Error::Stride {
                    tensor,
                    dimension,
                    got,
                    rule: format!("a multiple of {}", bytes / element),
                });
            }
        }
        Ok(())
    }

    fn parameters(&self, vector: u32) -> Result<AppendTensor, Error> {
        let [tokens, heads, _] = self.source.shape;
        let element = self.source.dtype.bytes() as usize;
        let in_vectors = |elements: usize| elements * element / vector as usize;
        let per_head = in_vectors(self.head_dim as usize);
        let per_token = heads * per_head;
        let vectors_per_token = fits(
            Quantity::Heads("KV heads × head dimension"),
            per_token,
            COUNTED,
        )?;
        let [source_token, source_head, _] = self.source.strides;
        // Heads that are contiguous in source and pool are copied as one long row.
        let dim = self.head_dim as usize;
        let one_row = heads == 1 || source_head == dim && self.strides.head as usize == dim;
        Ok(AppendTensor {
            source: self.source.address,
            pool: self.pool,
            source_token: fits(
                Quantity::Stride("the token stride"),
                in_vectors(source_token),
                u32::MAX,
            )?,
            source_head: fits(
                Quantity::Stride("the head stride"),
                in_vectors(source_head),
                u32::MAX,
            )?,
            page: in_vectors(self.strides.page as usize) as u32,
            token: in_vectors(self.strides.token as usize) as u32,
            head: in_vectors(self.strides.head as usize) as u32,
            vectors: fits(
                Quantity::Batch("new tokens × KV heads × head dimension"),
                tokens.saturating_mul(per_token),
                COUNTED,
            )?,
            vectors_per_token: Divisor::new(vectors_per_token),
            vectors_per_head: Divisor::new(if one_row {
                vectors_per_token
            } else {
                per_head as u32
            }),
        })
    }
}
