//! Write access to pools.

use kernels_gpu::abi::KvStrides;

use super::{
    KvView,
    rows::{pages_in, row},
};
use crate::{
    problem::{KvLayout, Spec},
    tensor::{Element, ShapeError},
};

/// Write access to the keys and values of a page pool.
#[derive(Debug)]
pub struct KvViewMut<'a, T> {
    /// The keys, starting with the first key of page 0.
    pub k: &'a mut [T],
    /// The values, starting with the first value of page 0.
    pub v: &'a mut [T],
    /// Strides of `k`.
    pub k_strides: KvStrides,
    /// Strides of `v`.
    pub v_strides: KvStrides,
}

impl<'a, T: Element> KvViewMut<'a, T> {
    /// Keys and values in dense pools of their own.
    #[must_use]
    pub const fn new(
        spec: &Spec,
        layout: KvLayout,
        page_size: u32,
        k: &'a mut [T],
        v: &'a mut [T],
    ) -> Self {
        let k_strides = layout.strides(page_size, spec.kv_heads, spec.head_dim_qk);
        let v_strides = layout.strides(page_size, spec.kv_heads, spec.head_dim_v);
        Self {
            k,
            v,
            k_strides,
            v_strides,
        }
    }

    /// The same pool with read access.
    #[must_use]
    pub const fn view(&self) -> KvView<'_, T> {
        KvView::of([self.k, self.v], [self.k_strides, self.v_strides])
    }

    /// Copies page `from` to page `to` for all heads, as a [`PageCopy`](super::PageCopy) requires. Scales of tokens are not
    /// part of this view: copy those of the page, too.
    ///
    /// # Errors
    /// [`ShapeError::NoPage`] if one of them is not in the pool; nothing is written then.
    pub fn copy_page(&mut self, spec: &Spec, from: u32, to: u32) -> Result<(), ShapeError> {
        let tensors = [
            (&mut *self.k, self.k_strides, spec.head_dim_qk),
            (&mut *self.v, self.v_strides, spec.head_dim_v),
        ];
        for (pool, strides, head_dim) in &tensors {
            let pages = pages_in(pool.len(), *strides, spec.kv_heads, *head_dim);
            if let Some(got) = [from, to].into_iter().find(|&page| page >= pages) {
                return Err(ShapeError::NoPage { got, pages });
            }
        }
        for (pool, strides, head_dim) in tensors {
            for offset in 0..strides.page_size {
                for head in 0..spec.kv_heads {
                    let source = row(strides, from, offset, head, head_dim);
                    pool.copy_within(source, row(strides, to, offset, head, head_dim).start);
                }
            }
        }
        Ok(())
    }
}
