//! Prefill items: the choice of the kernel, and the launches of Hopper's kernels.

mod maps;

use bytemuck::Zeroable;
use kernels_gpu::{
    abi::{AttentionParams, ConvertParams, LaunchRecord, PageCoordinates, PrefillParams, WorkItem},
    divisor::Divisor,
    registry::{Arch, KernelId, KernelInfo, Loads, Op},
};

use super::{
    DeviceArray, DeviceTensor, Extras, Gpu, KvPool, PartialStates,
    maps::Maps,
    registry::check_serves,
    steps::{Parameters, PrefillShapes, Source, Step},
    tensor::{COUNTED, VECTOR_BYTES, fits},
    vectors::vectors_of,
    walk::{Columns, Walk},
};
use crate::{
    Error,
    checks::{check_same, extent},
    problem::{Quantity, Spec},
};
use maps::{query_map, walks};

/// A group of contiguous items ([`plan::Kernel::Prefill`](crate::plan::Kernel)) and the tensors that it uses.
#[derive(Clone, Copy, Debug)]
pub struct PrefillCall<'a> {
    /// The heads.
    pub spec: &'a Spec,
    /// The kernel, an [`Op::Prefill`] for these heads.
    pub kernel: KernelId,
    /// Maximum of query tokens × packed query heads of an item. Hopper kernels have tiles of this many rows; Ampere
    /// kernels cut items to their own tiles.
    pub rows: u32,
    /// Query heads of a KV head that share a tile: a divisor of the group.
    pub pack: u32,
    /// The group's items, longest first.
    pub items: DeviceArray<WorkItem>,
    /// The plan's page ids.
    pub page_ids: DeviceArray<u32>,
    /// `[tokens, q_heads, head_dim]`, any token stride that is a multiple of 8.
    pub q: &'a DeviceTensor<3>,
    /// Keys and values; pages of a multiple of 8 tokens are read fastest.
    pub pool: &'a KvPool,
    /// `[tokens, q_heads, head_dim_v]` of the queries' type.
    pub out: &'a DeviceTensor<3>,
    /// `[tokens, q_heads]` F32, natural log, if wanted.
    pub lse: Option<&'a DeviceTensor<2>>,
    /// Where items with a slot write their partial states; required if there are any.
    pub partials: Option<&'a PartialStates>,
    /// One number that is 0 before the launch, and again after it.
    pub ticket: DeviceArray<u32>,
    /// As [`DecodeCall::record`](super::DecodeCall::record).
    pub record: Option<DeviceArray<LaunchRecord>>,
    /// As [`DecodeCall::extras`](super::DecodeCall::extras).
    pub extras: Extras,
}

impl Gpu {
    /// The kernel that runs prefills planned for `kernel`: `kernel` itself, or if it is not loaded the Ampere kernel
    /// that does the same.
    #[cfg_attr(not(feature = "unstable"), doc(hidden))]
    #[must_use]
    pub fn prefill_kernel(&self, kernel: KernelId) -> KernelId {
        match self.has(kernel) {
            true => kernel,
            false => kernel.on(Arch::Sm80).unwrap_or(kernel),
        }
    }

    /// Checks a launch by `kernel` and makes its parameters. None without items.
    pub(super) fn prepare_prefill(
        &self,
        kernel: KernelId,
        call: &PrefillCall<'_>,
        maps: &mut Maps,
    ) -> Result<Option<Step>, Error> {
        check_serves(
            kernel,
            Op::Prefill,
            call.spec,
            [call.q.dtype, call.pool.dtype],
        )?;
        let kernel = self.kernel(kernel)?;
        call.pool.scales.check_kernel(kernel.info)?;
        if call.items.len == 0 {
            return Ok(None);
        }
        if kernel.info.loads == Loads::Rows {
            return self.prepare_prefill_rows(kernel, call).map(Some);
        }
        let row = kernel.info;
        if call.rows > row.rows || call.pack > row.rows {
            let got = call.rows.max(call.pack) as usize;
            let rule = format!("at most {}, as in {}", row.rows, row.name);
            return Err(extent("the tile", "rows", got, rule));
        }
        let (mut parameters, shapes) = parameters(call, row, maps)?;
        let ctas = parameters.attention.units;
        parameters.attention.leave_to_record(call.items.len);
        let parameters = Parameters::Prefill(parameters, shapes);
        Ok(Some(self.step(kernel, ctas, parameters)))
    }
}

/// Whether tensor maps describe the values of a pool where they are.
pub(super) fn describes_values(pool: &KvPool, spec: &Spec) -> bool {
    let columns = Columns::whole(spec.head_dim_v, pool.dtype);
    Walk::new(
        spec.kv_heads,
        columns,
        pool.pages,
        &pool.v_strides,
        pool.dtype,
    )
    .is_ok()
}

/// Checks everything that does not depend on how keys are loaded.
pub(super) fn check(call: &PrefillCall<'_>) -> Result<(), Error> {
    let PrefillCall {
        spec, q, pool, out, ..
    } = *call;
    let (q_heads, head_dim) = (spec.q_heads as usize, spec.head_dim_qk as usize);
    let value_dim = (spec.head_dim_v + call.extras.gap) as usize;
    pool.check_rope(spec, 0)?;
    let in_spec = "in the spec";
    q.check_extent("q", "query heads", 1, q_heads, in_spec)?;
    q.check_extent("q", "elements in a head", 2, head_dim, in_spec)?;
    out.check_extent("out", "tokens", 0, q.shape[0], "in q")?;
    out.check_extent("out", "query heads", 1, q_heads, in_spec)?;
    out.check_extent("out", "elements in a head", 2, value_dim, in_spec)?;
    check_same("out", out.dtype, "q", q.dtype)?;
    if call.kernel.info().cache.is_none() {
        check_same("the KV pool", pool.dtype, "q", q.dtype)?;
    }
    for (name, tensor) in [("q", q), ("out", out)] {
        tensor.check_dense(name, 1)?;
        tensor.check_address(name, VECTOR_BYTES)?;
        tensor.check_rows(name)?;
    }
    if let Some(lse) = call.lse {
        lse.check_f32("lse")?;
        lse.check_extent("lse", "tokens", 0, q.shape[0], "in q")?;
        lse.check_extent("lse", "query heads", 1, q_heads, in_spec)?;
        lse.check_dense("lse", 0)?;
        lse.check_address("lse", 4)?;
    }
    if let Some(partials) = call.partials {
        let of = "in the spec";
        partials.check_f32(None)?;
        partials
            .out
            .check_extent("partial_out", "query heads", 1, q_heads, of)?;
        partials
            .out
            .check_extent("partial_out", "elements in a head", 2, value_dim, of)?;
        partials.out.check_dense("partial_out", 0)?;
        partials.out.check_address("partial_out", VECTOR_BYTES)?;
        let slots = partials.out.shape[0];
        let lse = &partials.lse;
        lse.check_extent("partial_lse", "tokens", 0, slots, "in the outputs")?;
        lse.check_extent("partial_lse", "query heads", 1, q_heads, of)?;
        partials.lse.check_dense("partial_lse", 0)?;
        partials.lse.check_address("partial_lse", 4)?;
    }
    call.extras.check(spec, q.shape[0])?;
    call.items.check_address("items", 8)?;
    call.page_ids.check_address("page_ids", 4)?;
    call.ticket.check_address("ticket", 4)?;
    if let Some(record) = call.record {
        record.check_address("record", 16)?;
    }
    if call.ticket.len == 0 {
        return Err(extent("ticket", "words", 0, "1"));
    }
    if call.pack == 0 || !spec.group().is_multiple_of(call.pack) {
        let got = call.pack as usize;
        let rule = format!("a divisor of the group, {}", spec.group());
        return Err(extent("rows of a tile", "packed query heads", got, rule));
    }

    Ok(())
}

/// Parameters of all prefill kernels, for `cuts` tiles per item and `pack` heads per unit.
pub(super) fn attention(call: &PrefillCall<'_>, cuts: u32) -> Result<AttentionParams, Error> {
    let PrefillCall {
        spec, q, pool, out, ..
    } = *call;
    let units = call.items.len * (spec.q_heads / call.pack) as usize * cuts as usize;
    Ok(AttentionParams {
        items: call.items.address,
        page_ids: call.page_ids.address,
        partial_out: call.partials.map_or(0, |partials| partials.out.address),
        partial_lse: call.partials.map_or(0, |partials| partials.lse.address),
        ticket: call.ticket.address,
        record: call.record.map_or(0, |record| record.address),
        units: fits(Quantity::Batch("items × query heads"), units, COUNTED)?,
        ..call.extras.parameters(spec, q, pool, out, call.lse)?
    })
}

/// Checks the call and makes the parameters of the launch.
fn parameters(
    call: &PrefillCall<'_>,
    row: &KernelInfo,
    maps: &mut Maps,
) -> Result<(PrefillParams, PrefillShapes), Error> {
    check(call)?;
    let (pool, spec) = (call.pool, call.spec);
    let values = call.extras.values.as_ref().unwrap_or(pool);
    let (k_strides, v_strides) = (&pool.k_strides, &values.v_strides);
    let mut attention = attention(call, 1)?;
    attention.v = values.v;
    let walks = walks(call, row)?;
    let mut box_tokens = match &walks {
        Some(_) => maps::box_tokens(k_strides.page_size, row.keys),
        // Converted pages are loaded whole.
        None if row.products_of_8_bits => k_strides.page_size,
        // Keys are loaded row by row.
        None => {
            [attention.k_strides, attention.v_strides] = vectors_of(pool, spec.kv_heads)?;
            1
        }
    };
    if call.extras.values.is_some() {
        box_tokens = maps::box_tokens(v_strides.page_size, box_tokens);
    }
    let (mut k_map, mut v_map) = ([0; 16], [0; 16]);
    let (mut coordinates, mut pages) = ([PageCoordinates::default(); 2], None);
    if let Some([k, v]) = walks {
        coordinates = [k.at, v.at];
        let shape = |walk: &Walk| walk.whole_heads(pool.dtype, box_tokens);
        let (k_shape, v_shape);
        (k_shape, k_map) = maps.make("the key pool", pool.k, shape(&k))?;
        (v_shape, v_map) = maps.make("the value pool", values.v, shape(&v))?;
        pages = Some([k_shape, v_shape]);
    }
    let rows = PrefillParams::query_box_rows(row.query_stages == 1, row.rows, call.pack);
    let shape = query_map(call.q, call, rows);
    let (q, q_map) = maps.make("q", call.q.address, shape)?;
    let shape = query_map(call.out, call, row.rows);
    let (out, out_map) = maps.make("out", call.out.address, shape)?;
    let parameters = PrefillParams {
        q_map,
        k_map,
        v_map,
        out_map,
        attention,
        pages: coordinates[0],
        items: call.items.len as u32,
        box_tokens,
        pack: Divisor::new(call.pack),
        page_size: Divisor::new(k_strides.page_size),
        gap: call.extras.gap,
        kv_heads_together: call.extras.kv_heads_together,
        convert: ConvertParams::zeroed(),
        rotary: call.extras.rotary.of_queries(),
        value_pages: coordinates[1],
        value_page_size: Divisor::new(v_strides.page_size),
        values_apart: call.extras.values.is_some().into(),
    };
    let source = Source::Pool;
    let shapes = PrefillShapes {
        q,
        out,
        pages,
        source,
        unpadded: false,
    };
    Ok((parameters, shapes))
}
