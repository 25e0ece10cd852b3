//! New keys of latent attention into rows of 656 bytes.

use super::{Cpu, check_slots, place};
use crate::{
    Error,
    checks::{check_dtype, check_extent},
    exec::apart::check_apart,
    kv::{LATENT_656_BYTES, latent_656},
    problem::{Dtype, Integer},
    tensor::{Element, F8E4M3, TensorMut, TensorRef, with_elements},
};

impl Cpu {
    /// Quantises keys of latent attention into a pool whose [rows carry their scales](crate::kv::KvScales::InRow).
    ///
    /// - `rows`: `[tokens, 576]`, BF16, F16 or F32, with any stride of tokens
    /// - `slots`: `[tokens]`, as in [`append_paged_kv`](Self::append_paged_kv)
    /// - `pool`: `[pages, page_size, 656]` of F8E4M3, with any strides of pages and tokens
    ///
    /// The scale of 128 numbers is the smallest power of two by which the largest finite magnitude among them is at
    /// most 448, and 1 if all are zero. NaN stays NaN, infinities become the largest number.
    ///
    /// ```
    /// use tandem_attn::{
    ///     Cpu,
    ///     tensor::{F8E4M3, TensorMut, TensorRef},
    /// };
    ///
    /// // Two pages of four tokens.
    /// let (rows, mut pool) = ([3.0_f32; 576], vec![F8E4M3(0); 2 * 4 * 656]);
    /// let (rows, to) = (TensorRef::new(&rows, [1, 576])?, TensorMut::new(&mut pool, [2, 4, 656])?);
    /// Cpu::append_latent_656(&rows, &[6_i64], to)?;
    /// // 3 is 384 times 2⁻⁷.
    /// let row: Vec<u8> = pool[6 * 656..7 * 656].iter().map(|byte| byte.0).collect();
    /// assert_eq!((row[0], &row[512..516]), (0x7c, &(1.0_f32 / 128.0).to_ne_bytes()[..]));
    /// # Ok::<(), tandem_attn::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Dtype`], [`Error::Extent`], [`Error::Stride`], [`Error::IndexOutOfRange`] or [`Error::WrittenTwice`]; nothing
    /// is written then.
    pub fn append_latent_656(
        rows: &TensorRef<'_, 2>,
        slots: &[impl Integer],
        pool: TensorMut<'_, 3>,
    ) -> Result<(), Error> {
        let ([tokens, dim], [pages, page_size, bytes]) = (rows.shape(), pool.shape());
        let sources = [Dtype::BF16, Dtype::F16, Dtype::F32];
        check_dtype("rows", rows.dtype(), &sources, "BF16, F16 or F32")?;
        check_dtype("the pool", pool.dtype(), &[Dtype::F8E4M3], "F8E4M3")?;
        let (elements, row_bytes) = (latent_656::ELEMENTS, LATENT_656_BYTES as usize);
        check_extent("rows", "tokens", tokens, slots.len(), "in the slots")?;
        let (rows_hold, keys_take) = ("rows of 656 bytes hold", "keys of 576 take");
        check_extent("rows", "elements of a key", dim, elements, rows_hold)?;
        check_extent("the pool", "bytes of a token", bytes, row_bytes, keys_take)?;
        if rows.strides()[1] != 1 {
            return Err(Error::Stride {
                tensor: "rows",
                dimension: "the elements of a key",
                got: rows.strides()[1],
                rule: "1".into(),
            });
        }
        let [page, token, _] = pool.strides();
        check_apart("the pool", [pages, page_size, 1], bytes, [page, token, 0])?;
        check_slots(slots, (pages as u64).saturating_mul(page_size as u64))?;

        let mut narrow = vec![0; tokens * row_bytes];
        let taken = slots.iter().map(|&slot| place(slot).is_some());
        for ((token, row), taken) in narrow.chunks_exact_mut(row_bytes).enumerate().zip(taken) {
            if !taken {
                continue;
            }
            let mut key = [0.0; latent_656::ELEMENTS];
            with_elements!(Slice(rows.elements()), from => {
                let from = &from[token * rows.strides()[0]..];
                key.iter_mut().zip(from).for_each(|(to, x)| *to = x.to_f32());
            });
            latent_656::narrow(&key, row);
        }
        let narrow: &[F8E4M3] = bytemuck::cast_slice(&narrow);
        Cpu::append_rows(
            &TensorRef::new(narrow, [tokens, 1, row_bytes])?,
            slots,
            pool.with_axis(),
        )
    }
}
