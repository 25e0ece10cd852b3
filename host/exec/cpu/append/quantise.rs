//! New keys and values of 16 or 32 bits into pages of 8.

use kernels_gpu::{
    abi::KvStrides,
    passes::quantise::{LARGEST, SMALLEST},
};

use super::{Cpu, check_dtype, check_heads, check_slots, place};
use crate::{
    Error,
    exec::apart::{check_pool, check_sides},
    kv::{AppendScales, KvScales, KvViewMut, ScaleAt},
    problem::{Dtype, Integer, ProblemError, Spec},
    tensor::{Element, F8E4M3, F8E5M2, ShapeError, TensorMut, TensorRef, with_elements},
};

impl Cpu {
    /// Quantises the keys and values of new tokens (`[tokens, kv_heads, head_dim]` each) into a page pool of 8 bits: they are
    /// multiplied by the reciprocal of their scale in f32, rounded to nearest, and clamped to the largest finite number. NaN
    /// stays NaN.
    ///
    /// `slots` are as in [`append_paged_kv`](Self::append_paged_kv).
    ///
    /// ```
    /// use tandem_attn::{
    ///     Cpu,
    ///     kv::{AppendScales, KvScales, KvViewMut},
    ///     problem::{Dtype, KvLayout, Spec},
    ///     tensor::{Element, F8E4M3},
    /// };
    ///
    /// let spec = Spec::new(1, 1, 16).with_kv_dtype(Dtype::F8E4M3);
    /// let (mut k, mut v) = ([F8E4M3(0); 2 * 4 * 16], [F8E4M3(0); 2 * 4 * 16]); // two pages of four tokens
    /// let mut pool = KvViewMut::new(&spec, KvLayout::Nhd, 4, &mut k, &mut v);
    /// let scales = AppendScales::Given(KvScales::Tensor { k: 0.5, v: 2.0 });
    /// Cpu::append_quantised(&spec, 2, &[6], &[1.0_f32; 16], &[1.0; 16], &mut pool, scales)?;
    /// assert_eq!((k[6 * 16].to_f32(), v[6 * 16].to_f32()), (2.0, 0.5));
    /// # Ok::<(), tandem_attn::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Dtype`] for a pool that has not 8 bits, [`Error::DtypesDiffer`] for one that has not the type of the spec's keys and
    /// values, [`Error::Shape`], [`Error::Stride`], [`Error::IndexOutOfRange`] or [`Error::WrittenTwice`]; [`Error::NoInstance`] for rows
    /// that carry their scales, which [`append_latent_656`](Self::append_latent_656) writes, and for other latent attention. Nothing
    /// is written then.
    pub fn append_quantised<S: Element, T: Element>(
        spec: &Spec,
        pool_pages: u32,
        slots: &[impl Integer],
        k: &[S],
        v: &[S],
        pool: &mut KvViewMut<'_, T>,
        mut scales: AppendScales<'_>,
    ) -> Result<(), Error> {
        let page_size = pool.k_strides.page_size;
        if page_size == 0 {
            return Err(ProblemError::PageSize { part: 0, got: 0 }.into());
        }
        check_heads(spec, "append_rows_quantised with the keys alone")?;
        if T::DTYPE.bytes() != 1 {
            return Err(Error::Dtype {
                tensor: "the KV pool",
                got: T::DTYPE,
                expected: "F8E4M3 or F8E5M2",
            });
        }
        if matches!(scales, AppendScales::Given(KvScales::InRow)) {
            return Err(Error::NoInstance {
                kernel: "append",
                asked: "keys and values into rows that carry their scales".into(),
                there: "such rows in append_latent_656",
            });
        }
        check_dtype(spec, T::DTYPE)?;
        pool.view().check(spec, 0, page_size, pool_pages)?;
        check_sides(spec, pool_pages, [pool.k_strides, pool.v_strides])?;
        let (tokens, heads) = (slots.len(), spec.kv_heads);
        for (name, got, dim) in [
            ("k", k.len(), spec.head_dim_qk),
            ("v", v.len(), spec.head_dim_v),
        ] {
            let expected = tokens * heads as usize * dim as usize;
            ShapeError::length(name, got, "[tokens, kv_heads, head_dim]", expected)?;
        }
        view(&scales).check(T::DTYPE, 0, heads, tokens as u32, [page_size, pool_pages])?;
        if let AppendScales::Computed {
            k_strides,
            v_strides,
            ..
        } = &scales
        {
            check_pool("the scales of keys", pool_pages, heads, 1, *k_strides)?;
            check_pool("the scales of values", pool_pages, heads, 1, *v_strides)?;
        }
        check_slots(slots, u64::from(pool_pages) * u64::from(page_size))?;

        let sides = [
            (k, spec.head_dim_qk, &mut *pool.k, pool.k_strides),
            (v, spec.head_dim_v, &mut *pool.v, pool.v_strides),
        ];
        for (side, (rows, dim, pool, strides)) in sides.into_iter().enumerate() {
            let rows = rows.chunks_exact(dim as usize).enumerate();
            for (index, row) in rows {
                let (token, head) = (index as u32 / heads, index as u32 % heads);
                let Some(slot) = place(slots[token as usize]) else {
                    continue;
                };
                // A pool may have more tokens than 32 bits count, but not more pages.
                let of_page = slot % i128::from(page_size);
                let (page, offset) = ((slot / i128::from(page_size)) as u32, of_page as u32);
                let at = ScaleAt {
                    token,
                    head,
                    page,
                    offset,
                };
                let scale = match &mut scales {
                    AppendScales::Given(scales) => scales.at(heads, at)[side],
                    AppendScales::Computed {
                        k,
                        v,
                        k_strides,
                        v_strides,
                    } => {
                        let (to, of) = match side {
                            0 => (&mut **k, *k_strides),
                            _ => (&mut **v, *v_strides),
                        };
                        let scale = scale_of(row, T::DTYPE);
                        to[start(of, page, offset, head)] = scale;
                        scale
                    }
                };
                let (inverse, at) = (1.0 / scale, start(strides, page, offset, head));
                let to = &mut pool[at..at + dim as usize];
                to.iter_mut()
                    .zip(row)
                    .for_each(|(to, x)| *to = T::from_f32(x.to_f32() * inverse));
            }
        }
        Ok(())
    }
}

impl Cpu {
    /// Quantises the keys or the values of new tokens into their 8-bit pool. The time depends on the number of new tokens only.
    ///
    /// - `rows`, `slots`, `pool`: as in [`append_rows`](Self::append_rows)
    /// - `scales`: one scale, or one for each KV head; empty: 1
    ///
    /// ```
    /// use tandem_attn::{
    ///     Cpu,
    ///     tensor::{Element, F8E4M3, TensorMut, TensorRef},
    /// };
    ///
    /// let (rows, mut pool) = ([3.0_f32; 16], vec![F8E4M3(0); 2 * 4 * 16]); // two pages of four tokens
    /// let (rows, to) = (TensorRef::new(&rows, [1, 1, 16])?, TensorMut::new(&mut pool, [2, 4, 1, 16])?);
    /// Cpu::append_rows_quantised(&rows, &[0.5], &[6_i64], to)?;
    /// assert_eq!(pool[6 * 16].to_f32(), 6.0);
    /// # Ok::<(), tandem_attn::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`append_rows`](Self::append_rows); [`Error::Dtype`] if the pool is not of 8 bits, [`Error::Shape`] if the number
    /// of scales is wrong.
    pub fn append_rows_quantised(
        rows: &TensorRef<'_, 3>,
        scales: &[f32],
        slots: &[impl Integer],
        pool: TensorMut<'_, 4>,
    ) -> Result<(), Error> {
        let ([tokens, heads, dim], [token, head, element]) = (rows.shape(), rows.strides());
        if scales.len() > 1 {
            ShapeError::length("scales", scales.len(), "[1] or [kv_heads]", heads)?;
        }
        let inverse = |head: usize| match scales {
            [] => 1.0,
            [one] => 1.0 / one,
            _ => 1.0 / scales[head],
        };
        let places = (0..tokens * heads * dim).map(|index| {
            let (at, head_of) = (index / dim % heads, index / dim / heads);
            (head_of * token + at * head + index % dim * element, at)
        });
        macro_rules! quantised {
        ($to:ident) => {{
            let narrow: Vec<$to> = with_elements!(Slice(rows.elements()), from => {
                let number = |(at, head): (usize, usize)| from[at].to_f32() * inverse(head);
                places.map(|place| $to::from_f32(number(place))).collect()
            });
            Cpu::append_rows(&TensorRef::new(&narrow, rows.shape())?, slots, pool)
        }};
    }
        match pool.dtype() {
            Dtype::F8E4M3 => quantised!(F8E4M3),
            Dtype::F8E5M2 => quantised!(F8E5M2),
            got => Err(Error::Dtype {
                tensor: "the KV pool",
                got,
                expected: "F8E4M3 or F8E5M2",
            }),
        }
    }
}

/// All given scales, to be checked.
fn view<'a>(scales: &'a AppendScales<'_>) -> KvScales<'a> {
    match scales {
        AppendScales::Given(scales) => *scales,
        AppendScales::Computed {
            k,
            v,
            k_strides,
            v_strides,
        } => KvScales::Token {
            k,
            v,
            k_strides: *k_strides,
            v_strides: *v_strides,
        },
    }
}

/// The scale that makes the largest finite number of a row the largest of the type.
fn scale_of<S: Element>(row: &[S], dtype: Dtype) -> f32 {
    let largest_of_type = match dtype {
        Dtype::F8E5M2 => 57344.0,
        _ => LARGEST,
    };
    let magnitudes = row
        .iter()
        .map(|x| x.to_f32().abs())
        .filter(|x| x.is_finite());
    match magnitudes.fold(0.0, f32::max) {
        0.0 => 1.0,
        largest => (largest / largest_of_type).max(SMALLEST),
    }
}

const fn start(strides: KvStrides, page: u32, offset: u32, head: u32) -> usize {
    page as usize * strides.page as usize
        + offset as usize * strides.token as usize
        + head as usize * strides.head as usize
}
