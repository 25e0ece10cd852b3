//! Operations on single tokens: normalisation, gates, embeddings.

use rayon::prelude::*;

use super::{normalise, rows_of};
use crate::{
    Error,
    step::{Activation, RmsNorm},
    tensor::{Element, ShapeError},
};

/// Normalises the rows of `x` (`[tokens, width]`, where `weight` is `[width]`) into `out`.
///
/// With a `residual` (`[tokens, width]`) the rows are first added to it. It keeps the rounded sums, and these are normalised.
///
/// ```
/// use tandem_attn::step::{RmsNorm, cpu::rms_norm};
///
/// let (mut residual, mut out) = ([1.0_f32, -1.0], [0.0; 2]);
/// rms_norm(RmsNorm::new(0.0), &[2.0, -2.0], &[1.0, 0.5], Some(&mut residual), &mut out)?;
/// assert_eq!((residual, out), ([3.0, -3.0], [1.0, -0.5]));
/// # Ok::<(), tandem_attn::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`], [`Error::Extent`]; nothing is written then.
pub fn rms_norm<T: Element>(
    norm: RmsNorm,
    x: &[T],
    weight: &[T],
    residual: Option<&mut [T]>,
    out: &mut [T],
) -> Result<(), Error> {
    let width = weight.len();
    rows_of("x", x.len(), width)?;
    ShapeError::length("out", out.len(), "[tokens, width]", x.len())?;
    let finish = |out: &mut [T], scratch: &mut [f32]| {
        normalise(norm, scratch, weight);
        out.iter_mut()
            .zip(scratch)
            .for_each(|(out, x)| *out = T::from_f32(*x));
    };
    let rows = out.par_chunks_mut(width).zip(x.par_chunks(width));
    let scratch = || vec![0.0_f32; width];
    let Some(residual) = residual else {
        rows.for_each_init(scratch, |scratch, (out, x)| {
            scratch
                .iter_mut()
                .zip(x)
                .for_each(|(to, x)| *to = x.to_f32());
            finish(out, scratch);
        });
        return Ok(());
    };
    ShapeError::length("the residual", residual.len(), "[tokens, width]", x.len())?;
    let rows = rows.zip(residual.par_chunks_mut(width));
    rows.for_each_init(scratch, |scratch, ((out, x), residual)| {
        for ((to, x), residual) in scratch.iter_mut().zip(x).zip(residual) {
            *residual = T::from_f32(residual.to_f32() + x.to_f32());
            *to = residual.to_f32();
        }
        finish(out, scratch);
    });
    Ok(())
}

/// Applies the activation to the first half of each row of `gate_up` (`[tokens, 2 · width]`), multiplies it by the second half, and
/// writes the product to `out` (`[tokens, width]`).
///
/// ```
/// use tandem_attn::step::{Activation, cpu::gate};
///
/// let mut out = [0.0_f32; 2];
/// gate(Activation::Silu, &[0.0, 40.0, 7.0, 2.0], 2, &mut out)?;
/// assert_eq!(out, [0.0, 80.0]);
/// # Ok::<(), tandem_attn::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`], [`Error::Extent`]; nothing is written then.
pub fn gate<T: Element>(
    activation: Activation,
    gate_up: &[T],
    width: usize,
    out: &mut [T],
) -> Result<(), Error> {
    let tokens = rows_of("out", out.len(), width)?;
    let expected = tokens * 2 * width;
    ShapeError::length("gate_up", gate_up.len(), "[tokens, 2 · width]", expected)?;
    let rows = out.par_chunks_mut(width).zip(gate_up.par_chunks(2 * width));
    rows.for_each(|(out, row)| {
        let (gates, ups) = row.split_at(width);
        for ((out, gate), up) in out.iter_mut().zip(gates).zip(ups) {
            *out = T::from_f32(activation.of(gate.to_f32()) * up.to_f32());
        }
    });
    Ok(())
}

/// The rows of `table` (`[vocabulary, width]`) that `ids` name, multiplied by `scale`, into `out` (`[tokens, width]`).
///
/// ```
/// use tandem_attn::step::cpu::embed;
///
/// let mut out = [0.0_f32; 4];
/// embed(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 2, &[2, 0], 10.0, &mut out)?;
/// assert_eq!(out, [50.0, 60.0, 10.0, 20.0]);
/// # Ok::<(), tandem_attn::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`], [`Error::Extent`], [`Error::IndexOutOfRange`]; nothing is written then.
pub fn embed<T: Element>(
    table: &[T],
    width: usize,
    ids: &[u32],
    scale: f32,
    out: &mut [T],
) -> Result<(), Error> {
    let vocabulary = rows_of("the table", table.len(), width)?;
    let expected = ids.len() * width;
    ShapeError::length("out", out.len(), "[tokens, width]", expected)?;
    if let Some(index) = ids.iter().position(|&id| id as usize >= vocabulary) {
        return Err(Error::IndexOutOfRange {
            array: "ids",
            index,
            got: ids[index].into(),
            limit: vocabulary as u64,
            of: "rows of the table",
        });
    }
    let rows = out.par_chunks_mut(width).zip(ids);
    rows.for_each(|(out, &id)| {
        let row = &table[id as usize * width..][..width];
        if scale == 1.0 {
            out.copy_from_slice(row);
        } else {
            let scaled = |x: &T| T::from_f32(x.to_f32() * scale);
            out.iter_mut()
                .zip(row)
                .for_each(|(out, x)| *out = scaled(x));
        }
    });
    Ok(())
}
