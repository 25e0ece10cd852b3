//! Pools of latent keys in two parts: what is both key and value, and what only the keys have.

use super::{DevicePtr, KvPool, KvScales, RopePart};
use crate::{
    Error,
    checks::check_extent,
    kv::latent_parts::{check_parts, dense_parts},
    problem::Spec,
};

impl KvPool {
    /// The two pools of [latent](Spec::latent) attention: the latent part of the keys, which is also the values,
    /// `[pages, page_size, head_dim_v]`, and the rest, `[pages, page_size, head_dim_qk - head_dim_v]`. The counterpart of
    /// [`KvView::latent_parts`](crate::kv::KvView::latent_parts).
    ///
    /// Pools with other strides: [`with_strides`](Self::with_strides), and those of the field `rope`. New keys are appended by
    /// [`Gpu::append_rows`](super::Gpu::append_rows), once for each pool.
    ///
    /// ```
    /// # use tandem_attn::{gpu::KvPool, problem::Spec};
    /// let (latent, rope) = (0x7f00_0000_0000, 0x7f00_1000_0000);
    /// let pool = KvPool::latent_parts(&Spec::latent(16, 512, 64), 64, 1000, latent, rope);
    /// assert_eq!((pool.k, pool.k_strides.token), (latent, 512));
    /// assert_eq!(pool.rope.map(|rope| rope.strides.page), Some(64 * 64));
    /// ```
    #[must_use]
    pub const fn latent_parts(
        spec: &Spec,
        page_size: u32,
        pages: u32,
        latent: DevicePtr,
        rope: DevicePtr,
    ) -> Self {
        let [strides, of_rope] = dense_parts(spec, page_size);
        Self {
            rope: Some(RopePart {
                pool: rope,
                strides: of_rope,
            }),
            ..Self::of(spec.kv_dtype, pages, [latent; 2], [strides; 2]).of_heads(spec, 1)
        }
    }

    /// Checks that a specification's keys can be in two pools, if those of this part are.
    pub(super) fn check_rope(&self, spec: &Spec, part: usize) -> Result<(), Error> {
        let Some(rope) = self.rope else {
            return Ok(());
        };
        check_parts(spec, self.scales == KvScales::InRow, part)?;
        let [of_rope, of_k] = [rope.strides, self.k_strides].map(|of| of.page_size as usize);
        let (tokens, other) = ("tokens in a page", "in the other pool");
        check_extent("the rope pool", tokens, of_rope, of_k, other)
    }
}
