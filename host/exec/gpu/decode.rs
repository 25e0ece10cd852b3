//! Decode on the GPU: one tile group of a plan.

use kernels_gpu::{
    abi::{AttentionParams, DecodeParams, KvStrides, LaunchRecord, MergeRow, QueryRow, WorkItem},
    decode::{layout::KEYS, shape},
    divisor::Divisor,
    sm90::{slim, wide},
};

use super::{
    CUstream, DeviceArray, DeviceTensor, Family, Gpu, KvPool, PartialStates, Swizzle, TensorMap,
    launch::{Launch, Prepared},
    module::{Carveout, Kernel, Modules},
    run::Step,
    tensor::VECTOR_BYTES,
};
use crate::{
    Error,
    plan::Instance,
    problem::{Dtype, ProblemError, Spec},
};

/// Bytes of an element of queries, keys, values and outputs.
const ELEMENT: u64 = 2;

/// What a launch works on: the arrays of a plan, in device memory.
#[derive(Clone, Copy, Debug)]
pub struct DecodeArrays {
    /// The items of the group, all gathered and of one part, longest first.
    pub items: DeviceArray<WorkItem>,
    /// The plan's rows.
    pub rows: DeviceArray<QueryRow>,
    /// The plan's page ids.
    pub page_ids: DeviceArray<u32>,
    /// The plan's merges.
    pub merges: DeviceArray<MergeRow>,
    /// The slots of the merges.
    pub merge_slots: DeviceArray<u32>,
    /// Where partial states go. Without slots, no row may have one.
    pub partials: PartialStates,
    /// One counter for each merge and KV head, zero before and after: the last item to arrive at a merge
    /// does it. None: somebody else merges ([`Gpu::merge_states`]).
    pub arrivals: Option<DeviceArray<u32>>,
    /// One word, zero before and after, that no other launch at the same time has.
    pub ticket: DeviceArray<u32>,
    /// Which of `items` are the launch's, where that is to change while the launch stays in a captured graph;
    /// `items` are then those of the whole plan, with room for the largest. None: all of them are.
    pub record: Option<DeviceArray<LaunchRecord>>,
}

/// How a launch goes about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeTile {
    /// Rows of a tile, at most 128: no item has more query tokens × query heads per KV head. The kernel
    /// with the smallest tile that has so many rows is taken.
    pub rows: u32,
    /// Units (items × KV heads) that a CTA claims at a time: 1, or several where they are short. (Kernels
    /// for more than 16 rows always claim one.)
    pub run: u32,
    /// The launch reads several times what L2 holds. A matter of speed alone; a record knows better.
    pub long: bool,
    /// Leaves most of each SM to a prefill, where there is such a kernel: for 8 rows of 128 elements, without
    /// soft cap, that somebody else merges.
    pub beside: bool,
}

/// Rows of the tiles that kernels are compiled for.
const ROWS: [u32; 4] = [8, 16, 64, 128];

/// One entry for each element type, head dimension, row tile, and with or without a soft cap.
const ENTRIES: [(Dtype, u32, u32, bool, &str); 48] = {
    macro_rules! entries {
        ($([$dtype:ident, $half:literal, $dim:literal, $rows:literal])*) => {[$(
            (Dtype::$dtype, $dim, $rows, false, concat!("decode_", $half, "_d", $dim, "_m", $rows)),
            (Dtype::$dtype, $dim, $rows, true, concat!("decode_", $half, "_d", $dim, "_m", $rows, "_cap")),
        )*]};
    }
    entries! {
        [BF16, "bf16", 64, 8] [BF16, "bf16", 64, 16] [BF16, "bf16", 64, 64] [BF16, "bf16", 64, 128]
        [BF16, "bf16", 128, 8] [BF16, "bf16", 128, 16] [BF16, "bf16", 128, 64] [BF16, "bf16", 128, 128]
        [BF16, "bf16", 256, 8] [BF16, "bf16", 256, 16] [BF16, "bf16", 256, 64] [BF16, "bf16", 256, 128]
        [F16, "f16", 64, 8] [F16, "f16", 64, 16] [F16, "f16", 64, 64] [F16, "f16", 64, 128]
        [F16, "f16", 128, 8] [F16, "f16", 128, 16] [F16, "f16", 128, 64] [F16, "f16", 128, 128]
        [F16, "f16", 256, 8] [F16, "f16", 256, 16] [F16, "f16", 256, 64] [F16, "f16", 256, 128]
    }
};

/// How a CTA of an entry is made.
#[derive(Clone, Copy, Debug)]
struct Form {
    threads: u32,
    shared_bytes: u32,
    ctas_per_sm: u32,
    /// Stages of the ring, and the most units that a CTA may claim at a time.
    stages: u32,
    run: u32,
}

/// The form of the kernel with tiles of `rows` rows, where a CTA can have `shared_bytes`.
fn form(dim: u32, rows: u32, cap: bool, shared_bytes: u32) -> Option<Form> {
    if let Some(wide) = wide::Shape::find(dim, rows, cap) {
        return (wide.shared_bytes() <= shared_bytes).then_some(Form {
            threads: wide.threads(),
            shared_bytes: wide.shared_bytes(),
            ctas_per_sm: wide.ctas_per_sm,
            stages: wide.stages,
            run: 1,
        });
    }
    shape(dim, rows, shared_bytes).map(|shape| Form {
        threads: shape.threads,
        shared_bytes: shape.shared_bytes,
        ctas_per_sm: 1,
        stages: shape.stages,
        run: shape.units / 2,
    })
}

/// The kernels that run beside a prefill.
const ENTRIES_BESIDE: [(Dtype, &str); 2] = [
    (Dtype::BF16, "decode_bf16_d128_m8_slim"),
    (Dtype::F16, "decode_f16_d128_m8_slim"),
];

/// The kernels; none on architectures that have none.
#[derive(Default)]
pub(super) struct Kernels {
    /// In the order of [`ENTRIES`].
    alone: Vec<Kernel>,
    /// In the order of [`ENTRIES_BESIDE`].
    beside: Vec<Kernel>,
}

impl Kernels {
    pub(super) fn load(modules: &Modules, max_shared: u32) -> Result<Self, Error> {
        if modules.arch() != "sm_90a" {
            return Ok(Self::default());
        }
        let kernel = |name| modules.kernel(name, Carveout::Shared, max_shared);
        let alone = ENTRIES.iter().map(|&(.., name)| kernel(name));
        let beside = ENTRIES_BESIDE.iter().map(|&(_, name)| kernel(name));
        Ok(Self {
            alone: alone.collect::<Result<_, _>>()?,
            beside: beside.collect::<Result<_, _>>()?,
        })
    }

    /// What plans can ask for.
    pub(super) fn instances(&self) -> Vec<Instance> {
        let instance = |&(_, dim, rows, cap, _): &(Dtype, u32, u32, bool, &str)| Instance {
            m: rows,
            n: wide::Shape::find(dim, rows, cap).map_or(KEYS, |wide| wide.keys),
            head_dim: Some(dim),
            head_dim_v: None,
            soft_cap: Some(cap),
        };
        let loaded = ENTRIES.iter().take(self.alone.len());
        // The same for both element types.
        let loaded = loaded.filter(|entry| entry.0 == Dtype::BF16);
        loaded.map(instance).collect()
    }

    fn find_beside(&self, dtype: Dtype) -> Option<(&Kernel, Form)> {
        let wanted = |&(d, _): &(Dtype, &str)| d == dtype;
        let kernel = self.beside.get(ENTRIES_BESIDE.iter().position(wanted)?)?;
        let form = Form {
            threads: slim::SHAPE.threads(),
            shared_bytes: slim::shared_bytes(),
            ctas_per_sm: 1,
            stages: slim::SHAPE.stages,
            run: 1,
        };
        Some((kernel, form))
    }

    fn find(&self, dtype: Dtype, dim: u32, rows: u32, cap: bool) -> Option<&Kernel> {
        let wanted = |&(d, h, r, c, _): &(Dtype, u32, u32, bool, &str)| {
            (d, h, r, c) == (dtype, dim, rows, cap)
        };
        self.alone.get(ENTRIES.iter().position(wanted)?)
    }
}

impl Gpu {
    /// Attention of a tile group of decodes over a page pool.
    ///
    /// `q` and `out` are `[tokens, q_heads, head_dim]` in the pool's element type, with any token stride that
    /// is a multiple of 8; `lse`, if wanted, is dense `[tokens, q_heads]` F32 in natural log. Rows whose slot
    /// is [`DIRECT`](crate::abi::DIRECT) are written to `out`, others to their partial state, and merged where
    /// `arrays.arrivals` is given.
    ///
    /// Head dimensions are 64, 128 and 256, types BF16 and F16, and at most 16 query heads share a KV head. Takes
    /// the family that [`Gpu::decode_family`] says.
    ///
    /// # Safety
    /// - All tensors and arrays are in this GPU's memory as described, and stay until the work on `stream`
    ///   is done. What is written is not touched by others meanwhile.
    /// - The arrays are those of a plan for `spec` and the pool, and `tile.rows` covers every item.
    /// - `stream` is a stream of the device's primary context, or null (the default stream).
    ///
    /// # Errors
    /// A variant for each thing that can be wrong with a tensor, before anything is launched;
    /// [`Error::UnsupportedArchitecture`] or [`Error::NoInstance`] where the GPU has no such kernel;
    /// [`Error::Driver`] if the launch fails.
    #[expect(clippy::too_many_arguments, reason = "tensors in, tensors out")]
    pub unsafe fn decode(
        &self,
        spec: &Spec,
        tile: DecodeTile,
        arrays: &DecodeArrays,
        pool: &KvPool,
        q: &DeviceTensor<3>,
        out: &DeviceTensor<3>,
        lse: Option<&DeviceTensor<2>>,
        stream: CUstream,
    ) -> Result<(), Error> {
        let family = self.decode_family(spec, pool);
        // SAFETY: the caller's promise.
        unsafe { self.decode_on(family, spec, tile, arrays, pool, q, out, lse, stream) }
    }

    /// The kernels that suit a pool best: [`Family::Sm90`] on Hopper, where tensor maps can describe the pool
    /// (pages of a multiple of 8 tokens), else [`Family::Sm80`]. Joint items are for the former alone.
    #[must_use]
    pub fn decode_family(&self, spec: &Spec, pool: &KvPool) -> Family {
        let mapped = pool.k_strides == pool.v_strides
            && Walk::new(spec, pool.pages, &pool.k_strides).is_ok();
        if mapped && !self.decode.alone.is_empty() {
            Family::Sm90
        } else {
            Family::Sm80
        }
    }

    /// [`Gpu::decode`] by the kernels of a family. Those of [`Family::Sm80`] take pages of any size and cut items to
    /// their tiles, but no joint ones.
    ///
    /// # Safety
    /// - As [`Gpu::decode`]'s.
    ///
    /// # Errors
    /// As [`Gpu::decode`].
    #[expect(clippy::too_many_arguments, reason = "as `decode`, and the family")]
    pub unsafe fn decode_on(
        &self,
        family: Family,
        spec: &Spec,
        tile: DecodeTile,
        arrays: &DecodeArrays,
        pool: &KvPool,
        q: &DeviceTensor<3>,
        out: &DeviceTensor<3>,
        lse: Option<&DeviceTensor<2>>,
        stream: CUstream,
    ) -> Result<(), Error> {
        let step = self.prepare_decode(family, spec, tile, arrays, pool, q, out, lse)?;
        // SAFETY: the caller vouches for what the parameters point to.
        unsafe { self.launch_step(&step, stream) }
    }

    /// All checks of [`decode_on`](Self::decode_on), and the launch that they allow.
    #[expect(clippy::too_many_arguments, reason = "as `decode_on`")]
    pub(super) fn prepare_decode(
        &self,
        family: Family,
        spec: &Spec,
        tile: DecodeTile,
        arrays: &DecodeArrays,
        pool: &KvPool,
        q: &DeviceTensor<3>,
        out: &DeviceTensor<3>,
        lse: Option<&DeviceTensor<2>>,
    ) -> Result<Step, Error> {
        check(spec, arrays, pool, q, out, lse)?;
        if spec.group() > tile.rows {
            let rule = format!("at least {}, the query heads of a KV head", spec.group());
            return Err(extent("the tile", "rows", tile.rows as usize, rule));
        }
        if family == Family::Sm80 {
            let attention = |pieces| attention(spec, pieces, arrays, pool, q, out, lse);
            let mut prepared = self.prepare_decode_gathered(spec, tile, pool, attention)?;
            let attention = &mut prepared.parameters.attention;
            attention.leave_to_record(arrays.items.len);
            return Ok(Step::DecodeGather(prepared));
        }
        let dim = spec.head_dim_qk;
        let cap = spec.variant.soft_cap.is_some();
        if self.decode.alone.is_empty() {
            return Err(Error::UnsupportedArchitecture {
                device: self.name.clone(),
                compute: self.compute,
                built_for: vec!["sm_90a"],
            });
        }
        let rows = tile.rows as usize;
        let covers = ROWS.into_iter().find(|&rows| rows >= tile.rows);
        let unmerged = arrays.arrivals.is_none();
        let beside = tile.beside && dim == 128 && tile.rows <= 8 && !cap && unmerged;
        let beside = beside
            .then(|| self.decode.find_beside(pool.dtype))
            .flatten();
        let kernel = beside.or_else(|| {
            let rows = covers?;
            let kernel = self.decode.find(pool.dtype, dim, rows, cap)?;
            Some((kernel, form(dim, rows, cap, kernel.max_dynamic_shared)?))
        });
        let Some((kernel, form)) = kernel else {
            return Err(extent("the tile", "rows", rows, "at most 128"));
        };
        let mut parameters = parameters(spec, tile, &form, arrays, pool, q, out, lse)?;
        let ctas = parameters.attention.units.div_ceil(parameters.run);
        let resident = self.multiprocessors * form.ctas_per_sm;
        let mut launch = Launch::new(ctas.min(resident), form.threads);
        launch.shared = form.shared_bytes;
        parameters.attention.leave_to_record(arrays.items.len);
        Ok(Step::Decode(Prepared {
            kernel: *kernel,
            launch,
            parameters,
        }))
    }
}

fn extent(
    tensor: &'static str,
    dimension: &'static str,
    got: usize,
    rule: impl Into<String>,
) -> Error {
    Error::Extent {
        tensor,
        dimension,
        got,
        rule: rule.into(),
    }
}

/// Everything that does not depend on the GPU.
fn check(
    spec: &Spec,
    arrays: &DecodeArrays,
    pool: &KvPool,
    q: &DeviceTensor<3>,
    out: &DeviceTensor<3>,
    lse: Option<&DeviceTensor<2>>,
) -> Result<(), Error> {
    spec.check()?;
    let dim = spec.head_dim_qk as usize;
    if !matches!(dim, 64 | 128 | 256) || spec.head_dim_v != spec.head_dim_qk {
        return Err(extent(
            "the pool",
            "elements in a head",
            dim,
            "64, 128 or 256, the same for keys and values",
        ));
    }
    if !matches!(pool.dtype, Dtype::BF16 | Dtype::F16) {
        return Err(Error::Dtype {
            tensor: "the pool",
            got: pool.dtype,
            expected: "BF16 or F16",
        });
    }
    let (partials, heads) = (&arrays.partials, spec.q_heads as usize);
    for (tensor, got) in [("q", q.dtype), ("out", out.dtype)] {
        if got != pool.dtype {
            return Err(Error::DtypesDiffer {
                tensor,
                got,
                other: "the pool",
                expected: pool.dtype,
            });
        }
    }
    for (tensor, got) in [
        ("partial_out", Some(partials.out.dtype)),
        ("partial_lse", Some(partials.lse.dtype)),
        ("lse", lse.map(|lse| lse.dtype)),
    ] {
        if let Some(got) = got.filter(|&got| got != Dtype::F32) {
            return Err(Error::Dtype {
                tensor,
                got,
                expected: "F32",
            });
        }
    }

    let of_spec = "in the specification";
    for (name, tensor) in [("q", q), ("out", out), ("partial_out", &partials.out)] {
        tensor.check_extent(name, "heads", 1, heads, of_spec)?;
        tensor.check_extent(name, "elements in a head", 2, dim, of_spec)?;
        tensor.check_dense(name, 1)?;
        tensor.check_address(name, VECTOR_BYTES)?;
        if !tensor.strides[0].is_multiple_of(8) {
            return Err(Error::Stride {
                tensor: name,
                dimension: "tokens",
                got: tensor.strides[0],
                rule: "a multiple of 8".into(),
            });
        }
    }
    out.check_extent("out", "tokens", 0, q.shape[0], "in q")?;
    partials.out.check_dense("partial_out", 0)?;
    for (name, tensor, tokens) in [
        ("partial_lse", Some(&partials.lse), partials.out.shape[0]),
        ("lse", lse, q.shape[0]),
    ] {
        let Some(tensor) = tensor else { continue };
        tensor.check_extent(name, "tokens", 0, tokens, "in the outputs")?;
        tensor.check_extent(name, "heads", 1, heads, of_spec)?;
        tensor.check_dense(name, 0)?;
        tensor.check_address(name, 4)?;
    }

    arrays.items.check_address("items", 8)?;
    arrays.rows.check_address("rows", 16)?;
    arrays.page_ids.check_address("page_ids", 4)?;
    arrays.merges.check_address("merges", 16)?;
    arrays.merge_slots.check_address("merge_slots", 4)?;
    arrays.ticket.check_address("ticket", 4)?;
    if let Some(record) = arrays.record {
        record.check_address("record", 16)?;
    }
    if arrays.ticket.len == 0 {
        return Err(extent("ticket", "words", 0, "1"));
    }
    if let Some(arrivals) = arrays.arrivals {
        arrivals.check_address("arrivals", 4)?;
        let needed = arrays.merges.len * spec.kv_heads as usize;
        if arrivals.len < needed {
            let rule = format!("{needed}, one for each merge and KV head");
            return Err(extent("arrivals", "counters", arrivals.len, rule));
        }
    }
    Ok(())
}

/// How the accelerator walks a pool: two ways to reach a head, see [`DecodeParams`].
struct Walk {
    half_per_head: u32,
    page_per_page: u32,
    page_per_head: u32,
    dims: [u64; 5],
    strides: [u64; 4],
}

impl Walk {
    fn new(spec: &Spec, pages: u32, s: &KvStrides) -> Result<Self, Error> {
        let (dim, kv_heads) = (spec.head_dim_qk, u64::from(spec.kv_heads));
        let stride = |dimension, got: u32, rule: &str| Error::Stride {
            tensor: "the pool",
            dimension,
            got: got as usize,
            rule: rule.into(),
        };
        if s.page_size == 0 || !s.page_size.is_multiple_of(8) {
            let rule = "a multiple of 8";
            return Err(extent(
                "the pool",
                "tokens in a page",
                s.page_size as usize,
                rule,
            ));
        }
        let bytes = |elements: u32| u64::from(elements) * ELEMENT;
        let halves = u64::from(dim / 64);
        let groups = u64::from(s.page_size / 8);
        if s.head == dim {
            return Ok(Self {
                half_per_head: dim / 64,
                page_per_page: 1,
                page_per_head: 0,
                dims: [64, 8, halves * kv_heads, groups, pages.max(1).into()],
                strides: [bytes(s.token), 128, 8 * bytes(s.token), bytes(s.page)],
            });
        }
        if s.head == 0 || !s.page.is_multiple_of(s.head) {
            return Err(stride("pages", s.page, "a multiple of that between heads"));
        }
        let heads_per_page = s.page / s.head;
        let places = u64::from(pages.max(1) - 1) * u64::from(heads_per_page) + kv_heads;
        Ok(Self {
            half_per_head: 0,
            page_per_page: heads_per_page,
            page_per_head: 1,
            dims: [64, 8, halves, groups, places],
            strides: [bytes(s.token), 128, 8 * bytes(s.token), bytes(s.head)],
        })
    }

    fn map(
        &self,
        name: &'static str,
        address: u64,
        dtype: Dtype,
        halves: u32,
        piece_tokens: u32,
    ) -> Result<[u64; 16], Error> {
        TensorMap {
            name,
            address,
            dtype,
            dims: &self.dims,
            strides: &self.strides,
            box_dims: &[64, 8, halves, piece_tokens / 8, 1],
            swizzle: Swizzle::Bytes128,
        }
        .encode()
    }
}

#[expect(clippy::too_many_arguments, reason = "as `decode`")]
fn parameters(
    spec: &Spec,
    tile: DecodeTile,
    form: &Form,
    arrays: &DecodeArrays,
    pool: &KvPool,
    q: &DeviceTensor<3>,
    out: &DeviceTensor<3>,
    lse: Option<&DeviceTensor<2>>,
) -> Result<DecodeParams, Error> {
    if pool.k_strides != pool.v_strides {
        return Err(Error::Stride {
            tensor: "the values",
            dimension: "tokens, heads or pages",
            got: pool.v_strides.token as usize,
            rule: format!("as the keys': {:?}", pool.k_strides),
        });
    }
    let walk = Walk::new(spec, pool.pages, &pool.k_strides)?;
    let page_size = pool.k_strides.page_size;
    // The largest power of two that divides page and chunk.
    let piece_tokens = (1 << page_size.trailing_zeros()).min(KEYS);
    let halves = spec.head_dim_qk / 64;
    let outside = fits("pages × KV heads", walk.dims[4] as usize)?;
    Ok(DecodeParams {
        k_map: walk.map("k", pool.k, pool.dtype, halves, piece_tokens)?,
        v_map: walk.map("v", pool.v, pool.dtype, halves, piece_tokens)?,
        attention: attention(spec, 1, arrays, pool, q, out, lse)?,
        group: Divisor::new(spec.group()),
        kv_heads: Divisor::new(spec.kv_heads),
        page_size: Divisor::new(page_size),
        piece_tokens,
        half_per_head: walk.half_per_head,
        page_per_page: walk.page_per_page,
        page_per_head: walk.page_per_head,
        stages: form.stages,
        run: tile.run.clamp(1, form.run),
        outside,
        long: tile.long.into(),
        reserved: 0,
    })
}

fn fits(what: &'static str, got: usize) -> Result<u32, ProblemError> {
    u32::try_from(got)
        .ok()
        .filter(|&got| got < Divisor::LIMIT)
        .ok_or(ProblemError::TooLarge {
            what,
            got: got as u64,
            limit: u64::from(Divisor::LIMIT) - 1,
        })
}

/// What all decode kernels take, for items that come in so many pieces.
fn attention(
    spec: &Spec,
    pieces: u32,
    arrays: &DecodeArrays,
    pool: &KvPool,
    q: &DeviceTensor<3>,
    out: &DeviceTensor<3>,
    lse: Option<&DeviceTensor<2>>,
) -> Result<AttentionParams, Error> {
    let per_item = spec.kv_heads as usize * pieces as usize;
    Ok(AttentionParams {
        q: q.address,
        k: pool.k,
        v: pool.v,
        out: out.address,
        lse: lse.map_or(0, |lse| lse.address),
        items: arrays.items.address,
        rows: arrays.rows.address,
        page_ids: arrays.page_ids.address,
        merges: arrays.merges.address,
        merge_slots: arrays.merge_slots.address,
        partial_out: arrays.partials.out.address,
        partial_lse: arrays.partials.lse.address,
        arrivals: arrays.arrivals.map_or(0, |arrivals| arrivals.address),
        ticket: arrays.ticket.address,
        record: arrays.record.map_or(0, |record| record.address),
        units: fits("units", arrays.items.len.saturating_mul(per_item))?,
        q_heads: spec.q_heads,
        kv_heads: spec.kv_heads,
        group: spec.group(),
        k_strides: pool.k_strides,
        v_strides: pool.v_strides,
        q_token_stride: fits("the token stride of q", q.strides[0])?,
        out_token_stride: fits("the token stride of out", out.strides[0])?,
        variant: spec.variant_params(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::KvLayout;

    fn walk(layout: KvLayout, page_size: u32) -> Result<Walk, Error> {
        let spec = Spec::new(32, 8, 128);
        Walk::new(&spec, 100, &layout.strides(page_size, 8, 128))
    }

    #[test]
    fn both_layouts_are_walked() {
        let nhd = walk(KvLayout::Nhd, 16).unwrap();
        assert_eq!(nhd.dims, [64, 8, 16, 2, 100]);
        assert_eq!(nhd.strides, [2048, 128, 16384, 32768]);
        assert_eq!(
            (nhd.half_per_head, nhd.page_per_page, nhd.page_per_head),
            (2, 1, 0)
        );
        let hnd = walk(KvLayout::Hnd, 24).unwrap();
        assert_eq!(hnd.dims, [64, 8, 2, 3, 800]);
        assert_eq!(hnd.strides, [256, 128, 2048, 6144]);
        assert_eq!(
            (hnd.half_per_head, hnd.page_per_page, hnd.page_per_head),
            (0, 8, 1)
        );
    }

    #[test]
    fn pages_that_break_a_group_of_8_are_refused() {
        for page_size in [1, 4, 12] {
            let error = walk(KvLayout::Nhd, page_size).err().expect("is refused");
            assert!(error.to_string().contains("a multiple of 8"), "{error}");
        }
    }

    #[test]
    fn every_entry_has_a_shape() {
        for (dtype, dim, rows, cap, name) in ENTRIES {
            assert!(form(dim, rows, cap, 227 << 10).is_some(), "{name}");
            let half = if dtype == Dtype::F16 { "f16" } else { "bf16" };
            let cap = if cap { "_cap" } else { "" };
            assert_eq!(name, format!("decode_{half}_d{dim}_m{rows}{cap}"));
        }
    }
}
