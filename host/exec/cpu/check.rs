//! Checks of the arguments of a run against its plan.

use kernels_gpu::abi::KvStrides;

use super::unit::Pools;
use crate::{
    Error,
    checks::{check_extent, check_least},
    kv::{KvTensors, KvView},
    plan::Plan,
    problem::{Dtype, Quantity},
    tensor::{Element, ShapeError, Slice, TensorMut, TensorRef},
};

pub(in crate::exec) fn check<Q: Element, T: Element, O: Element>(
    plan: &Plan,
    q: &[Q],
    kv: &[KvView<'_, T>],
    out: &[O],
    lse: Option<&[f32]>,
) -> Result<(), Error> {
    plan.spec.check()?;
    let spec = &plan.spec;
    check_dtypes(&[
        ("q", Q::DTYPE, spec.q_dtype),
        ("kv", T::DTYPE, spec.kv_dtype),
        ("out", O::DTYPE, spec.out_dtype),
    ])?;
    let heads = plan.total_q as usize * spec.q_heads as usize;
    let lengths = [
        (
            "q",
            q.len(),
            "[total_q, q_heads, head_dim_qk]",
            heads * spec.head_dim_qk as usize,
        ),
        (
            "out",
            out.len(),
            "[total_q, q_heads, head_dim_v]",
            heads * spec.head_dim_v as usize,
        ),
        (
            "lse",
            lse.map_or(heads, <[f32]>::len),
            "[total_q, q_heads]",
            heads,
        ),
    ];
    for (name, got, shape, expected) in lengths {
        ShapeError::length(name, got, shape, expected)?;
    }
    check_parts(plan, kv.len())?;
    for (index, (view, part)) in kv.iter().zip(&plan.parts).enumerate() {
        let pages = plan.pool_pages(part);
        let (spec, tokens) = (&spec.times(part.heads), plan.total_q / part.heads);
        view.check(spec, index, part.page_size, pages)?;
        let pages = [part.page_size, pages];
        view.scales
            .check(spec.kv_dtype, index, spec.kv_heads, tokens, pages)?;
    }
    Ok(())
}

/// Checks tensors whose types are known only at run time. Returns their pools.
pub(super) fn check_tensors<'a>(
    plan: &Plan,
    q: &TensorRef<'_, 3>,
    kv: &[KvTensors<'a>],
    out: &TensorMut<'_, 3>,
    lse: Option<&[f32]>,
) -> Result<Vec<Pools<'a>>, Error> {
    plan.spec.check()?;
    let spec = &plan.spec;
    check_dtypes(&[
        ("q", q.dtype(), spec.q_dtype),
        ("out", out.dtype(), spec.out_dtype),
    ])?;
    let (tokens, heads) = (plan.total_q as usize, spec.q_heads as usize);
    for (tensor, shape, strides, dim) in [
        ("q", q.shape(), q.strides(), spec.head_dim_qk),
        ("out", out.shape(), out.strides(), spec.head_dim_v),
    ] {
        let expected = [tokens, heads, dim as usize];
        let names = ["tokens", "query heads", "elements in a head"];
        check_shape(tensor, &names, &shape, &expected)?;
        check_together(tensor, shape[2], strides[2])?;
    }
    // One thread writes each token. It owns the memory from the token's first element to that of the next token.
    let ([_, heads_of_out, dim], [token, head, _]) = (out.shape(), out.strides());
    let stride = |dimension, got, least: usize| Error::Stride {
        tensor: "out",
        dimension,
        got,
        rule: format!("at least {least}, so that they do not overlap"),
    };
    if heads_of_out > 1 && head < dim {
        return Err(stride("heads", head, dim));
    }
    let row = (heads_of_out - 1) * head + dim;
    if tokens > 1 && token < row {
        return Err(stride("tokens", token, row));
    }
    if let Some(lse) = lse {
        ShapeError::length("lse", lse.len(), "[total_q, q_heads]", tokens * heads)?;
    }
    check_parts(plan, kv.len())?;
    let pools = kv
        .iter()
        .zip(&plan.parts)
        .enumerate()
        .map(|(index, (kv, part))| {
            check_dtypes(&[
                ("k", kv.k.dtype(), spec.kv_dtype),
                ("v", kv.v.dtype(), spec.kv_dtype),
            ])?;
            let pages = plan.pool_pages(part);
            let of_part = [part.page_size, pages];
            let (spec, tokens) = (&spec.times(part.heads), plan.total_q / part.heads);
            kv.scales
                .check(spec.kv_dtype, index, spec.kv_heads, tokens, of_part)?;
            let strides = |tensor, pool: &TensorRef<'_, 4>, dim: u32| {
                let dim = kv.scales.row_elements(spec, spec.kv_dtype, dim)?;
                let [got, page_size, heads, got_dim] = pool.shape();
                let names = ["tokens in a page", "KV heads", "elements in a head"];
                let expected = [part.page_size, spec.kv_heads, dim].map(|extent| extent as usize);
                check_shape(tensor, &names, &[page_size, heads, got_dim], &expected)?;
                let why = ", for the plan's page ids";
                check_least(tensor, "pages", got, pages as usize, why)?;
                kv_strides(tensor, pool)
            };
            let pools = Pools {
                k_strides: strides("the key pool", &kv.k, spec.head_dim_qk)?,
                v_strides: strides("the value pool", &kv.v, spec.head_dim_v)?,
                k: kv.k.elements(),
                v: kv.v.elements(),
                scales: kv.scales,
                rope: None,
            };
            let first = |slice: Slice<'_>| slice.bytes().as_ptr();
            let one = first(pools.k) == first(pools.v) && pools.k_strides == pools.v_strides;
            if spec.latent && !one {
                return Err(ShapeError::NotLatent { part: index }.into());
            }
            Ok(pools)
        });
    pools.collect()
}

/// The strides of a pool's pages, as plans and kernels count them.
fn kv_strides(tensor: &'static str, pool: &TensorRef<'_, 4>) -> Result<KvStrides, Error> {
    let ([_, page_size, _, dim], strides) = (pool.shape(), pool.strides());
    check_together(tensor, dim, strides[3])?;
    let narrow = |stride: usize| {
        let what = Quantity::Stride("a stride of the KV pool");
        u32::try_from(stride).map_err(|_| what.too_large(stride as u64, u32::MAX.into()))
    };
    Ok(KvStrides {
        page: narrow(strides[0])?,
        token: narrow(strides[1])?,
        head: narrow(strides[2])?,
        page_size: narrow(page_size)?,
    })
}

fn check_dtypes(dtypes: &[(&'static str, Dtype, Dtype)]) -> Result<(), ShapeError> {
    match dtypes.iter().find(|(_, got, expected)| got != expected) {
        Some(&(name, got, expected)) => Err(ShapeError::Dtype {
            name,
            got,
            expected,
        }),
        None => Ok(()),
    }
}

fn check_shape(
    tensor: &'static str,
    names: &[&'static str; 3],
    shape: &[usize; 3],
    expected: &[usize; 3],
) -> Result<(), Error> {
    let of = "in the plan";
    (0..3).try_for_each(|axis| check_extent(tensor, names[axis], shape[axis], expected[axis], of))
}

pub(super) fn check_together(tensor: &'static str, extent: usize, got: usize) -> Result<(), Error> {
    if got == 1 || extent <= 1 {
        return Ok(());
    }
    Err(Error::Stride {
        tensor,
        dimension: "the elements of a head",
        got,
        rule: "1".into(),
    })
}

fn check_parts(plan: &Plan, got: usize) -> Result<(), ShapeError> {
    let expected = plan.parts.len();
    if got != expected {
        return Err(ShapeError::Parts { got, expected });
    }
    (plan.parts.iter().enumerate()).try_for_each(|(index, part)| {
        // Plans may come from a file.
        if part.heads == 0
            || !plan.total_q.is_multiple_of(part.heads)
            || part.heads.checked_mul(plan.spec.q_heads).is_none()
        {
            return Err(ShapeError::PartHeads {
                part: index,
                heads: part.heads,
            });
        }
        ShapeError::named(index, part.page_size, plan.pool_pages(part))
    })
}
