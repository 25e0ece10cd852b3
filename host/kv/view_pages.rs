//! Views of the same memory with other pages.

use kernels_gpu::abi::KvStrides;

#[cfg(feature = "unstable")]
use super::by_head::by_head;
use super::{KvScales, KvView, RopePart};
use crate::tensor::Element;

impl<T: Element> KvView<'_, T> {
    /// The same memory as pages of one token, for token-level parts: token `t` of page `p` is page
    /// `p · page_size + t`. This is possible only if tokens are evenly spaced, as in [`KvLayout::Nhd`](crate::problem::KvLayout::Nhd);
    /// otherwise the result is `None`.
    #[must_use]
    pub fn by_token(&self) -> Option<Self> {
        let by_token = |s: KvStrides| {
            (s.page == s.page_size * s.token).then_some(KvStrides {
                page: s.token,
                page_size: 1,
                ..s
            })
        };
        let (k_strides, v_strides) = (by_token(self.k_strides)?, by_token(self.v_strides)?);
        let scales = match self.scales {
            KvScales::Token {
                k,
                v,
                k_strides,
                v_strides,
            } => KvScales::Token {
                k,
                v,
                k_strides: by_token(k_strides)?,
                v_strides: by_token(v_strides)?,
            },
            other => other,
        };
        let rope = match self.rope {
            None => None,
            Some(RopePart { pool, strides }) => Some(RopePart {
                pool,
                strides: by_token(strides)?,
            }),
        };
        Some(Self {
            scales,
            k_strides,
            v_strides,
            rope,
            ..*self
        })
    }

    /// The same memory with the part of a page that belongs to one head as a page of its own, for page lists by head
    /// (`PagesByHead`). `None` if the heads of a page are not evenly spaced, keys and values have different strides, scales are
    /// not per tensor, or keys are in two pools.
    #[cfg(feature = "unstable")]
    #[must_use]
    pub fn by_head(&self) -> Option<Self> {
        let ((k_strides, of_k), (v_strides, of_v)) =
            (by_head(self.k_strides)?, by_head(self.v_strides)?);
        let whole = matches!(self.scales, KvScales::One | KvScales::Tensor { .. });
        (whole && self.rope.is_none() && of_k == of_v).then_some(Self {
            k_strides,
            v_strides,
            ..*self
        })
    }
}
