//! New keys and values into pages, on the GPU.

#[cfg(test)]
mod tests;

use kernels_gpu::{
    abi::{AppendParams, AppendTensor, KvStrides},
    divisor::Divisor,
    passes::append::{THREADS, VECTORS_PER_BLOCK},
    registry::{Element, Op},
};

use super::{
    DeviceArray, DevicePtr, DeviceTensor, Gpu, KvScales, Stream,
    launch::Launch,
    tensor::{COUNTED, fits},
};
use crate::{
    Error,
    kv::{LATENT_656_BYTES, by_head},
    problem::{Dtype, KvLayout, MAX_PAGE_SIZE, ProblemError, Spec},
};

/// Keys and values of a page pool in device memory; the counterpart of [`KvView`](crate::kv::KvView).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KvPool {
    /// Address of the first key of page 0.
    pub k: DevicePtr,
    /// Address of the first value of page 0.
    pub v: DevicePtr,
    /// Element type.
    pub dtype: Dtype,
    /// Pages in the pool.
    pub pages: u32,
    /// How the keys lie.
    pub k_strides: KvStrides,
    /// How the values lie.
    pub v_strides: KvStrides,
    /// What both are multiplied by.
    pub scales: KvScales,
}

impl KvPool {
    /// Keys and values in dense pools of their own.
    #[must_use]
    pub const fn new(
        spec: &Spec,
        layout: KvLayout,
        page_size: u32,
        pages: u32,
        k: DevicePtr,
        v: DevicePtr,
    ) -> Self {
        Self {
            k,
            v,
            dtype: spec.kv_dtype,
            pages,
            k_strides: layout.strides(page_size, spec.kv_heads, spec.head_dim_qk),
            v_strides: layout.strides(page_size, spec.kv_heads, spec.head_dim_v),
            scales: KvScales::One,
        }
    }

    /// With scales of 8-bit keys and values.
    #[must_use]
    pub const fn with_scales(mut self, scales: KvScales) -> Self {
        self.scales = scales;
        self
    }

    /// The one pool of [latent](Spec::latent) attention: `[pages, page_size, head_dim_qk]`.
    #[must_use]
    pub const fn latent(spec: &Spec, page_size: u32, pages: u32, pool: DevicePtr) -> Self {
        let strides = KvLayout::Nhd.strides(page_size, 1, spec.head_dim_qk);
        Self {
            k: pool,
            v: pool,
            dtype: spec.kv_dtype,
            pages,
            k_strides: strides,
            v_strides: strides,
            scales: KvScales::One,
        }
    }

    /// The one pool of latent attention whose rows carry their scales: `[pages, page_size, 656]` bytes, see
    /// [`kv::KvScales::InRow`](crate::kv::KvScales::InRow).
    #[must_use]
    pub const fn latent_656(page_size: u32, pages: u32, pool: DevicePtr) -> Self {
        let strides = KvLayout::Nhd.strides(page_size, 1, LATENT_656_BYTES);
        Self {
            k: pool,
            v: pool,
            dtype: Dtype::F8E4M3,
            pages,
            k_strides: strides,
            v_strides: strides,
            scales: KvScales::InRow,
        }
    }

    /// What each head has of a page as a page of its own: the counterpart of
    /// [`KvView::by_head`](crate::kv::KvView::by_head). `None` as there.
    #[cfg(feature = "unstable")]
    #[must_use]
    pub fn by_head(&self, kv_heads: u32) -> Option<Self> {
        let step = |s: KvStrides| s.page / s.head;
        let (k_strides, v_strides) = (by_head(self.k_strides)?, by_head(self.v_strides)?);
        let whole = matches!(self.scales, KvScales::One | KvScales::Tensor { .. });
        if !whole || step(self.k_strides) != step(self.v_strides) {
            return None;
        }
        // Behind the last page's heads the view has nothing.
        let last = self
            .pages
            .saturating_sub(1)
            .checked_mul(step(self.k_strides))?;
        Some(Self {
            pages: last.checked_add(kv_heads)?,
            k_strides,
            v_strides,
            ..*self
        })
    }

    /// Tokens of a page, which keys and values have alike.
    pub(super) fn page_size(&self) -> Result<u32, Error> {
        let page_size = self.k_strides.page_size;
        check_page_size(page_size)?;
        match self.v_strides.page_size {
            got if got == page_size => Ok(page_size),
            got => Err(Error::Extent {
                tensor: "the value pool",
                dimension: "tokens in a page",
                got: got as usize,
                rule: format!("{page_size}, as in the key pool"),
            }),
        }
    }

    /// Its elements are those of the specification.
    pub(super) fn check_dtype(&self, spec: &Spec) -> Result<(), Error> {
        match self.dtype {
            got if got == spec.kv_dtype => Ok(()),
            got => Err(Error::DtypesDiffer {
                tensor: "the KV pool",
                got,
                other: "the spec's KV",
                expected: spec.kv_dtype,
            }),
        }
    }

    /// With pages that lie otherwise: keys and values in one pool, one layer out of many.
    #[must_use]
    pub const fn with_strides(mut self, k: KvStrides, v: KvStrides) -> Self {
        self.k_strides = k;
        self.v_strides = v;
        self
    }
}

impl Gpu {
    /// Copies the keys and values of new tokens into a page pool.
    ///
    /// `k` is `[tokens, kv_heads, head_dim_qk]` and `v` is `[tokens, kv_heads, head_dim_v]`, both of the pool's
    /// element type, with any strides over tokens and heads that keep rows on 8-byte boundaries (16-byte ones
    /// are faster). `slots` says where each token goes, as `page × page_size + offset`; a token whose slot is
    /// not in the pool, such as [`NO_SLOT`](crate::abi::NO_SLOT), is left out.
    ///
    /// The same call on the CPU is [`Cpu::append_paged_kv`](crate::Cpu::append_paged_kv).
    ///
    /// # Safety
    /// - All tensors and arrays are in this GPU's memory as described, and stay until the work on `stream`
    ///   is done. The pool is not touched by others meanwhile.
    /// - No two tokens go to one slot.
    /// - `stream` is a stream of the device's primary context, or null (the default stream). If it is being
    ///   captured, the graph is not launched after `self` or the memory is gone.
    ///
    /// # Errors
    /// A variant for each thing that can be wrong with a tensor ([`Error::NullPointer`],
    /// [`Error::DtypesDiffer`], [`Error::Extent`], …), before anything is launched; [`Error::Driver`] if the
    /// launch fails.
    pub unsafe fn append_paged_kv(
        &self,
        spec: &Spec,
        pool: &KvPool,
        slots: DeviceArray<u32>,
        k: &DeviceTensor<3>,
        v: &DeviceTensor<3>,
        stream: Stream,
    ) -> Result<(), Error> {
        let parameters = parameters(spec, pool, slots, k, v)?;
        // SAFETY: the caller's promises.
        unsafe { self.append(parameters, 2, stream) }
    }

    /// Copies rows of new tokens, keys or values, into the pool that holds them.
    ///
    /// - `rows`: `[tokens, kv_heads, head_dim]`, with strides as in [`append_paged_kv`](Self::append_paged_kv)
    /// - `slots`: `[tokens]`, as there
    /// - `pool`: `[pages, page_size, kv_heads, head_dim]`, whatever its order in memory
    ///
    /// The same call on the CPU is [`Cpu::append_rows`](crate::Cpu::append_rows).
    ///
    /// # Safety
    /// As [`append_paged_kv`](Self::append_paged_kv).
    ///
    /// # Errors
    /// As [`append_paged_kv`](Self::append_paged_kv).
    pub unsafe fn append_rows(
        &self,
        rows: &DeviceTensor<3>,
        slots: DeviceArray<u32>,
        pool: &DeviceTensor<4>,
        stream: Stream,
    ) -> Result<(), Error> {
        let parameters = row_parameters(rows, slots, pool)?;
        // SAFETY: the caller's promises.
        unsafe { self.append(parameters, 1, stream) }
    }

    /// Launches the kernel for keys and values, or for the first of them alone.
    ///
    /// # Safety
    /// As [`append_paged_kv`](Self::append_paged_kv), for what the parameters point to.
    unsafe fn append(
        &self,
        (params, vector_bytes): (AppendParams, u32),
        sides: u32,
        stream: Stream,
    ) -> Result<(), Error> {
        let kernel = self.pass(Op::Append { vector_bytes }, Element::Any)?;
        let vectors = params.k.vectors.max(params.v.vectors);
        let mut launch = Launch::new(vectors.div_ceil(VECTORS_PER_BLOCK), THREADS);
        launch.grid[1] = sides;
        // SAFETY: the kernel takes `AppendParams`, and the caller vouches for what they point to.
        unsafe { self.launch(kernel, &launch, &params, stream) }
    }
}

/// Keys and values for rows that have both, and scales.
pub(super) fn in_rows() -> Error {
    Error::NoInstance {
        kernel: "append",
        asked: "keys and values into rows that carry their scales".into(),
        there: "append_latent_656 for such rows",
    }
}

/// Keys or values of one call.
struct Side<'a> {
    name: &'static str,
    pool_name: &'static str,
    source: &'a DeviceTensor<3>,
    pool: DevicePtr,
    strides: KvStrides,
    head_dim: u32,
}

/// All checks; the parameters of the launch, and the bytes of a vector.
fn parameters(
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
    both_parameters(&sides, pool.pages, slots)
}

/// The same for rows of one tensor.
fn row_parameters(
    rows: &DeviceTensor<3>,
    slots: DeviceArray<u32>,
    pool: &DeviceTensor<4>,
) -> Result<(AppendParams, u32), Error> {
    let [pages, page_size, heads, head_dim] = pool.shape;
    let page_size = fits("tokens in a page", page_size, u32::MAX)?;
    check_page_size(page_size)?;
    pool.check_dense("the pool", 3)?;
    let [page, token, head, _] = pool.strides;
    let stride = |got| fits("a stride of the pool", got, u32::MAX);
    let side = Side {
        name: "rows",
        pool_name: "the pool",
        source: rows,
        pool: pool.address,
        strides: KvStrides {
            page: stride(page)?,
            token: stride(token)?,
            head: stride(head)?,
            page_size,
        },
        head_dim: fits("elements in a head", head_dim, u32::MAX)?,
    };
    side.check(heads, pool.dtype, slots.len)?;
    both_parameters(&[side], fits("pages", pages, u32::MAX)?, slots)
}

pub(super) fn check_page_size(got: u32) -> Result<(), ProblemError> {
    match got {
        1..=MAX_PAGE_SIZE => Ok(()),
        _ => Err(ProblemError::PageSize { part: 0, got }),
    }
}

/// The parameters for one side or two that were checked, and the bytes of a vector.
fn both_parameters(
    sides: &[Side<'_>],
    pages: u32,
    slots: DeviceArray<u32>,
) -> Result<(AppendParams, u32), Error> {
    let (first, last) = (&sides[0], &sides[sides.len() - 1]);
    slots.check_address("slots", 4)?;
    let page_size = first.strides.page_size;
    let pool_slots = u64::from(pages) * u64::from(page_size);
    if pool_slots >= u64::from(Divisor::LIMIT) {
        return Err(ProblemError::TooLarge {
            what: "tokens in the pool",
            got: pool_slots,
            limit: u64::from(Divisor::LIMIT) - 1,
        }
        .into());
    }
    let vector = match sides.iter().try_for_each(|side| side.check_vectors(16)) {
        Ok(()) => 16,
        Err(_) => {
            sides.iter().try_for_each(|side| side.check_vectors(8))?;
            8
        }
    };
    let params = AppendParams {
        slots: slots.address,
        pool_slots: pool_slots as u32,
        page_size: Divisor::new(page_size),
        k: first.parameters(vector)?,
        v: last.parameters(vector)?,
    };
    Ok((params, vector))
}

impl Side<'_> {
    fn check(&self, heads: usize, dtype: Dtype, tokens: usize) -> Result<(), Error> {
        let Self { name, source, .. } = *self;
        if source.dtype != dtype {
            return Err(Error::DtypesDiffer {
                tensor: name,
                got: source.dtype,
                other: "the KV pool",
                expected: dtype,
            });
        }
        let dim = self.head_dim as usize;
        if heads == 0 {
            return Err(Error::Extent {
                tensor: name,
                dimension: "KV heads",
                got: 0,
                rule: "at least 1".into(),
            });
        }
        source.check_extent(name, "tokens", 0, tokens, "there are slots")?;
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

    /// Whether all rows start at multiples of `bytes` and are multiples of it long.
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
        let vectors_per_token = fits("KV heads × head dimension", per_token, COUNTED)?;
        let [source_token, source_head, _] = self.source.strides;
        // Heads that follow each other on both sides are one long row.
        let dim = self.head_dim as usize;
        let one_row = heads == 1 || source_head == dim && self.strides.head as usize == dim;
        Ok(AppendTensor {
            source: self.source.address,
            pool: self.pool,
            source_token: fits("the token stride", in_vectors(source_token), u32::MAX)?,
            source_head: fits("the head stride", in_vectors(source_head), u32::MAX)?,
            page: in_vectors(self.strides.page as usize) as u32,
            token: in_vectors(self.strides.token as usize) as u32,
            head: in_vectors(self.strides.head as usize) as u32,
            vectors: fits(
                "new tokens × KV heads × head dimension",
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
