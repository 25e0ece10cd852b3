//! Decode on the GPU: one tile group of a plan.

mod mapped;

use kernels_gpu::{
    abi::{AttentionParams, DecodeParams, KvStrides, LaunchRecord, MergeRow, QueryRow, WorkItem},
    common::decode::output_columns,
    divisor::Divisor,
    registry::{Arch, KernelId, KernelInfo, Loads, Op},
};

use super::{
    DeviceArray, DeviceTensor, Extras, Gpu, KvPool, KvScales, PartialStates,
    maps::{Maps, ShapeId},
    registry::check_serves,
    steps::{DecodeShapes, Parameters, Step},
    tensor::{COUNTED, VECTOR_BYTES, fits},
    vectors::vectors_of,
    walk::Walk,
};
use crate::{
    Error,
    checks::{check_dtype, check_same, extent},
    plan::launched::pairs::gain_by_pairs,
    problem::{Dtype, Padding, Quantity, Spec},
};
use mapped::{Mapped, walks};

/// A group of gathered items ([`plan::Kernel::Decode`](crate::plan::Kernel)) of one part, and the tensors that it uses.
#[derive(Clone, Copy, Debug)]
pub struct DecodeCall<'a> {
    /// The heads, of the kernel's dimensions.
    pub spec: &'a Spec,
    /// How the launch is divided.
    pub tile: DecodeTile,
    /// The group's items, longest first.
    pub items: DeviceArray<WorkItem>,
    /// The plan's rows.
    pub rows: DeviceArray<QueryRow>,
    /// The plan's page ids.
    pub page_ids: DeviceArray<u32>,
    /// The plan's merges.
    pub merges: DeviceArray<MergeRow>,
    /// The slots of the merges.
    pub merge_slots: DeviceArray<u32>,
    /// `[tokens, q_heads, head_dim]`, BF16 or F16, any token stride that is a multiple of 8.
    pub q: &'a DeviceTensor<3>,
    /// Keys and values, of the queries' type or of 8 bits; pages of a multiple of 8 tokens are read fastest.
    pub pool: &'a KvPool,
    /// As `q`. Heads of a dimension that is no multiple of 64 have 128 columns: elements from the 64th on are in the last columns.
    pub out: &'a DeviceTensor<3>,
    /// `[tokens, q_heads]` F32, dense, natural log, if wanted.
    pub lse: Option<&'a DeviceTensor<2>>,
    /// Where partial states go. Without slots, no row may have one.
    pub partials: &'a PartialStates,
    /// One counter for each merge and KV head, zero before and after the launch: the last item to arrive does the
    /// merge. None: another call merges ([`Gpu::merge_states`]). Kernels of latent heads have none, except those that
    /// [merge pieces](KernelInfo::merges_pieces): [`PieceOf::COUNTERS`](kernels_gpu::abi::PieceOf::COUNTERS) for each merge and tile.
    pub arrivals: Option<DeviceArray<u32>>,
    /// One word, zero before and after the launch. No other launch may use it at the same time.
    pub ticket: DeviceArray<u32>,
    /// In a captured graph: says which of `items` belong to this launch, for the plan at hand. `items` are then those
    /// of the whole plan, with room for the largest plan. None: all items belong to the launch.
    pub record: Option<DeviceArray<LaunchRecord>>,
    /// Further inputs of the spec's variant and the batch.
    pub extras: Extras,
}

/// How a launch is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeTile {
    /// The kernel, an [`Op::Decode`] for these heads. Kernels that share SMs with a prefill do not merge.
    pub kernel: KernelId,
    /// Maximum of query tokens × query heads per KV head of an item (except for latent heads, which may be more). A
    /// kernel that loads pages has tiles of this many rows; a kernel that loads rows cuts items to its own tiles.
    pub rows: u32,
    /// Units (items × KV heads) that a CTA claims at a time: 1, or several if they are short. Kernels for more than 16
    /// rows always claim one.
    pub run: u32,
    /// Whether the launch reads several times as many bytes as L2 holds. Affects only the speed; a record overrides it.
    pub long: bool,
}

/// The kernel that does the same for the scales of a pool, of which plans know nothing.
pub(super) fn of_pool(kernel: KernelId, pool: &KvPool) -> KernelId {
    match pool.scales {
        KvScales::Token { .. } => kernel.by_token().unwrap_or(kernel),
        _ => kernel,
    }
}

impl Gpu {
    /// The kernel that runs decodes planned for `kernel`: `kernel` itself, or the kernel that does the same row by row
    /// if `kernel` only loads pages and tensor maps cannot describe the pool (they need pages of a multiple of 8 tokens).
    #[cfg_attr(not(feature = "unstable"), doc(hidden))]
    #[must_use]
    pub fn decode_kernel(&self, kernel: KernelId, spec: &Spec, pool: &KvPool) -> KernelId {
        let loads = match kernel.info().loads {
            Loads::Pages if spec.latent => {
                pool.k_strides == pool.v_strides
                    && Walk::one(spec.head_dim_qk, pool.pages, &pool.k_strides, pool.dtype).is_ok()
            }
            Loads::Pages => Walk::whole(spec, pool).is_ok(),
            Loads::Rows | Loads::PagesOrRows => true,
        };
        let kernel = of_pool(kernel, pool);
        match loads && self.has(kernel) {
            true => kernel,
            false => {
                let there = kernel.by_rows().or_else(|| kernel.on(Arch::Sm80));
                there.unwrap_or(kernel)
            }
        }
    }

    /// The kernel that reads two KV heads at a time, if there is one, the two heads are adjacent in the pool, and items of these
    /// lengths are [faster](gain_by_pairs) by it. Otherwise the given kernel.
    pub(super) fn of_pairs(
        &self,
        kernel: KernelId,
        spec: &Spec,
        pool: &KvPool,
        lengths: &[u32],
    ) -> KernelId {
        let sms = self.multiprocessors;
        let pair = kernel.of_pairs(spec.head_dim_qk).filter(|pair| {
            (self.has(*pair) && spec.kv_heads.is_multiple_of(2))
                && [pool.k_strides.head, pool.v_strides.head] == [spec.head_dim_qk; 2]
                // They load by tensor maps only.
                && walks(pair.info(), spec, pool).is_ok()
                && pool.scales.come_in_pairs()
                && gain_by_pairs(pair.info(), lengths, spec.kv_heads, sms)
        });
        pair.unwrap_or(kernel)
    }

    /// Checks a launch by `kernel` and makes its parameters.
    pub(super) fn prepare_decode(
        &self,
        kernel: KernelId,
        call: &DecodeCall<'_>,
        maps: &mut Maps,
    ) -> Result<Step, Error> {
        check(call, kernel.info())?;
        check_serves(
            kernel,
            Op::Decode,
            call.spec,
            [call.q.dtype, call.pool.dtype],
        )?;
        let kernel = self.kernel(kernel)?;
        call.pool.scales.check_kernel(kernel.info)?;
        let row = kernel.info;
        if row.latent {
            return self.prepare_latent(kernel, call, maps);
        }
        if row.loads == Loads::Rows {
            return self.prepare_decode_rows(kernel, call);
        }
        let rows = call.tile.rows;
        if rows > row.rows {
            let rule = format!("at most {}, as in {}", row.rows, row.name);
            return Err(extent("the tile", "rows", rows as usize, rule));
        }
        if row.leaves_merges && call.arrivals.is_some() {
            let rule = format!("0: {} leaves merges to others", row.name);
            return Err(extent("arrivals", "counters", call.merges.len, rule));
        }
        let (mut parameters, shapes) = parameters(call, row, maps)?;
        let ctas = parameters.attention.units.div_ceil(parameters.run);
        parameters.attention.leave_to_record(call.items.len);
        Ok(self.step(kernel, ctas, Parameters::Decode(parameters, shapes)))
    }
}

/// Checks everything that does not depend on the GPU.
fn check(call: &DecodeCall<'_>, row: &KernelInfo) -> Result<(), Error> {
    let DecodeCall {
        spec,
        q,
        pool,
        out,
        lse,
        partials,
        ..
    } = *call;
    spec.check()?;
    pool.check_rope(spec, 0)?;
    if spec.rotary.is_some() && call.extras.rotary.turns == 0 {
        return Err(Error::NoInstance {
            kernel: "decode",
            asked: "a rotary embedding in a single call".into(),
            there: "a rotary embedding in plans (Gpu::run), whose workspace has the frequencies",
        });
    }
    let (dim, value_dim) = (spec.head_dim_qk as usize, spec.head_dim_v as usize);
    if !spec.latent && (spec.head_dim_qk, spec.head_dim_v) != (row.head_dim, row.value_dim) {
        let rule = match row.head_dim == row.value_dim {
            true => format!("{} for keys and values, as in {}", row.head_dim, row.name),
            false => format!(
                "{} for keys and {} for values, as in {}",
                row.head_dim, row.value_dim, row.name
            ),
        };
        return Err(extent("the pool", "elements in a head", dim, rule));
    }
    let columns = match spec.latent {
        true => value_dim,
        false => output_columns(spec.head_dim_v) as usize,
    };
    let (other, dtype, possible) = match pool.dtype.bytes() == 1 {
        true => ("q", q.dtype, "BF16 or F16"),
        false => ("the pool", pool.dtype, "BF16, F16, F8E4M3 or F8E5M2"),
    };
    check_dtype(other, dtype, &[Dtype::BF16, Dtype::F16], possible)?;
    check_same("q", q.dtype, other, dtype)?;
    check_same("out", out.dtype, other, dtype)?;
    let heads = spec.q_heads as usize;
    partials.check_f32(lse)?;

    let of_spec = "in the specification";
    for (name, tensor, dim) in [
        ("q", q, dim),
        ("out", out, columns),
        ("partial_out", &partials.out, columns),
    ] {
        tensor.check_extent(name, "heads", 1, heads, of_spec)?;
        tensor.check_extent(name, "elements in a head", 2, dim, of_spec)?;
        tensor.check_dense(name, 1)?;
        tensor.check_address(name, VECTOR_BYTES)?;
        tensor.check_rows(name)?;
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

    call.extras.check(spec, q.shape[0])?;
    call.items.check_address("items", 8)?;
    call.rows.check_address("rows", 16)?;
    call.page_ids.check_address("page_ids", 4)?;
    call.merges.check_address("merges", 16)?;
    call.merge_slots.check_address("merge_slots", 4)?;
    call.ticket.check_address("ticket", 4)?;
    if let Some(record) = call.record {
        record.check_address("record", 16)?;
    }
    if call.ticket.len == 0 {
        return Err(extent("ticket", "words", 0, "1"));
    }
    if let Some(arrivals) = call.arrivals {
        arrivals.check_address("arrivals", 4)?;
        let needed = call.merges.len * spec.kv_heads as usize;
        if arrivals.len < needed {
            let rule = format!("{needed}, one for each merge and KV head");
            return Err(extent("arrivals", "counters", arrivals.len, rule));
        }
    }
    if spec.group() > call.tile.rows && !spec.latent {
        let rule = format!("at least {}, the query heads of a KV head", spec.group());
        return Err(extent("the tile", "rows", call.tile.rows as usize, rule));
    }
    Ok(())
}

fn parameters(
    call: &DecodeCall<'_>,
    row: &KernelInfo,
    maps: &mut Maps,
) -> Result<(DecodeParams, DecodeShapes), Error> {
    let DecodeCall {
        spec, tile, pool, ..
    } = *call;
    let own_heads = call
        .extras
        .padding
        .is_none_or(|padding| row.head_dim == padding.dim);
    let padding = call.extras.padding.filter(|_| !own_heads);
    let mapped = match Mapped::new(call, row, padding) {
        Err(_) if row.loads == Loads::PagesOrRows => None,
        mapped => Some(mapped?),
    };
    let mapping = mapped.unwrap_or(Mapped::BY_ROWS);
    let map = |maps: &mut Maps, tensor, address, index: usize| match &mapping.shapes {
        Some(shapes) => maps
            .make(tensor, address, shapes[index])
            .map(|(id, map)| (Some(id), map)),
        None => Ok((None, [0; 16])),
    };
    let (k_shape, k_map) = map(maps, "the key pool", pool.k, 0)?;
    let (v_shape, v_map) = map(maps, "the value pool", pool.v, 1)?;
    let [k_vectors, v_vectors] = match mapping.shapes {
        Some(_) => [KvStrides::default(); 2],
        None => vectors_of(pool, spec.kv_heads)?,
    };
    let slabs = padding.or_else(|| Padding::of_row(spec.head_dim_qk));
    let slabs = slabs.expect("kernels have heads of whole slabs, or pad them");
    let vectors = |elements: u32| elements * pool.dtype.bytes() / VECTOR_BYTES;
    let mut attention = attention(call, 1)?;
    attention.units /= row.kv_heads;
    attention.group *= row.kv_heads;
    let parameters = DecodeParams {
        k_map,
        v_map,
        attention,
        group: Divisor::new(spec.group()),
        kv_heads: Divisor::new(spec.kv_heads / row.kv_heads),
        page_size: Divisor::new(pool.k_strides.page_size),
        piece_tokens: mapping.piece_tokens,
        k_vectors,
        v_vectors,
        slab_step: vectors(slabs.step),
        vectors: vectors(slabs.dim),
        half_per_head: mapping.steps[0],
        page_per_page: mapping.steps[1],
        page_per_head: mapping.steps[2],
        stages: row.stages,
        run: tile.run.clamp(1, row.run),
        outside: mapping.outside,
        long: tile.long.into(),
        out_columns: output_columns(spec.head_dim_v),
        early: 0,
        reserved: 0,
        rotary: call.extras.rotary,
    };
    let shapes = DecodeShapes {
        maps: k_shape.zip(v_shape).map(<[ShapeId; 2]>::from),
        unpadded: call.extras.padding.is_some() && own_heads,
        writes_unpadded: false,
    };
    Ok((parameters, shapes))
}

/// Parameters of all decode kernels, for items in `pieces` pieces.
pub(super) fn attention(call: &DecodeCall<'_>, pieces: u32) -> Result<AttentionParams, Error> {
    let DecodeCall {
        spec,
        q,
        pool,
        out,
        lse,
        partials,
        ..
    } = *call;
    let per_item = spec.kv_heads as usize * pieces as usize;
    Ok(AttentionParams {
        items: call.items.address,
        rows: call.rows.address,
        page_ids: call.page_ids.address,
        merges: call.merges.address,
        merge_slots: call.merge_slots.address,
        partial_out: partials.out.address,
        partial_lse: partials.lse.address,
        arrivals: call.arrivals.map_or(0, |arrivals| arrivals.address),
        ticket: call.ticket.address,
        record: call.record.map_or(0, |record| record.address),
        units: fits(
            Quantity::Batch("units"),
            call.items.len.saturating_mul(per_item),
            COUNTED,
        )?,
        ..call.extras.parameters(spec, q, pool, out, lse)?
    })
}
