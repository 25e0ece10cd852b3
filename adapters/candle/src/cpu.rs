//! CPU backend: passes candle's storages to the core as tensors.

use std::slice;

use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};
use tandem_attn::{
    Cpu,
    half::{bf16, f16},
    kv::{KvScales, KvTensors},
    problem::Dtype,
    tensor::{F8E4M3, HeadTensors, TensorMut, TensorRef},
};

use crate::{layout::Axes, ops::Attend, wrap};

/// A storage, and the layout of the tensor in it.
type Part<'a> = (&'a CpuStorage, &'a Layout);

fn read<const RANK: usize>(storage: &CpuStorage, axes: Axes<RANK>) -> Result<TensorRef<'_, RANK>> {
    let Axes {
        first,
        shape,
        strides,
    } = axes;
    let tensor = match storage {
        CpuStorage::F32(elements) => TensorRef::strided(from(elements, first), shape, strides),
        CpuStorage::BF16(elements) => TensorRef::strided(from(elements, first), shape, strides),
        CpuStorage::F16(elements) => TensorRef::strided(from(elements, first), shape, strides),
        CpuStorage::F8E4M3(elements) => {
            // SAFETY: both types consist of one byte, and every value is valid.
            let elements: &[F8E4M3] =
                unsafe { slice::from_raw_parts(elements.as_ptr().cast(), elements.len()) };
            TensorRef::strided(from(elements, first), shape, strides)
        }
        _ => bail!("attention takes F32, BF16 and F16, and caches of F8E4M3"),
    };
    tensor.map_err(wrap)
}

/// The elements from `first` on. A tensor without elements may begin anywhere.
fn from<T>(elements: &[T], first: usize) -> &[T] {
    elements.get(first..).unwrap_or(&[])
}

fn write(storage: &mut CpuStorage, axes: Axes<4>) -> Result<TensorMut<'_, 4>> {
    fn from<T>(elements: &mut [T], first: usize) -> &mut [T] {
        elements.get_mut(first..).unwrap_or(&mut [])
    }
    let Axes {
        first,
        shape,
        strides,
    } = axes;
    let tensor = match storage {
        CpuStorage::F32(elements) => TensorMut::strided(from(elements, first), shape, strides),
        CpuStorage::BF16(elements) => TensorMut::strided(from(elements, first), shape, strides),
        CpuStorage::F16(elements) => TensorMut::strided(from(elements, first), shape, strides),
        CpuStorage::F8E4M3(elements) => {
            let len = elements.len();
            // SAFETY: as in `read`; the new slice keeps the borrow of the elements.
            let elements: &mut [F8E4M3] =
                unsafe { slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), len) };
            TensorMut::strided(from(elements, first), shape, strides)
        }
        _ => bail!("caches are of F32, BF16, F16 and F8E4M3"),
    };
    tensor.map_err(wrap)
}

/// Computes attention into a dense tensor of the queries' type.
pub fn attend(cpu: &Cpu, run: &Attend, [q, k, v]: [Part<'_>; 3]) -> Result<(CpuStorage, Shape)> {
    let plan = &*run.plan;
    let (spec, page_size) = (&plan.spec, plan.parts[0].page_size as usize);
    let shape = [plan.total_q, spec.q_heads, spec.head_dim_v].map(|extent| extent as usize);
    let elements = shape.iter().product();
    let q = read(q.0, Axes::of(q.1)?)?;
    let kv = KvTensors {
        k: read(k.0, Axes::pages(k.1, page_size)?)?,
        v: read(v.0, Axes::pages(v.1, page_size)?)?,
        scales: run
            .scales
            .map_or(KvScales::One, |[k, v]| KvScales::Tensor { k, v }),
    };
    let sinks = run.sinks.as_ref().map(Tensor::to_vec1::<f32>).transpose()?;
    let heads = HeadTensors::default();
    let heads = match &sinks {
        Some(sinks) => heads.with_sinks(sinks),
        None => heads,
    };
    macro_rules! run {
        ($element:ty, $zero:expr, $storage:ident) => {{
            let mut out: Vec<$element> = vec![$zero; elements];
            let to = TensorMut::new(&mut out, shape).map_err(wrap)?;
            cpu.run_tensors_heads(plan, &q, &[kv], to, None, &heads)
                .map_err(wrap)?;
            CpuStorage::$storage(out)
        }};
    }
    let out = match spec.out_dtype {
        Dtype::F32 => run!(f32, 0.0, F32),
        Dtype::BF16 => run!(bf16, bf16::ZERO, BF16),
        Dtype::F16 => run!(f16, f16::ZERO, F16),
        other => bail!("candle has no outputs of {other:?}"),
    };
    Ok((out, Shape::from(shape.to_vec())))
}

/// Copies rows of new tokens to their slots.
pub fn append(
    (cache, cache_layout): (&mut CpuStorage, &Layout),
    (rows, rows_layout): Part<'_>,
    slots: &[i64],
    scale: Option<f32>,
) -> Result<()> {
    let rows = read(rows, Axes::of(rows_layout)?)?;
    let cache = write(cache, Axes::of(cache_layout)?)?;
    match scale {
        Some(scale) => Cpu::append_rows_quantised(&rows, &[scale], slots, cache),
        None => Cpu::append_rows(&rows, slots, cache),
    }
    .map_err(wrap)
}
