//! Views of the same memory with other pages.

use kernels_gpu::abi::KvStrides;

#[cfg(feature = "unstable")]
use super::strided::{ScalesByHead, view_by_head};
use super::{KvScales, KvView, RopePart};
#[cfg(feature = "unstable")]
use crate::problem::ProblemError;
use crate::tensor::Element;

impl<T: Element> KvView<'_, T> {
    /// The same memory as pages of one token, for token-level parts: token `t` of page `p` is page
    /// `p · page_size + t`. This is possible only if tokens are evenly spaced, as in [`KvLayout::Nhd`](crate::problem::KvLayout::Nhd);
    /// otherwise the result is `None`.
    #[must_use]
    pub fn by_token(&self) -> Option<Self> {
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
    /// (`PagesByHead`).
    ///
    /// # Errors
    /// [`ProblemError::UnevenHeads`] if the heads of a page are not evenly spaced; [`ProblemError::PoolByHead`] if keys and values lie in
    /// different layouts, scales are not one for all, or keys are in two pools.
    #[cfg(feature = "unstable")]
    pub fn by_head(&self) -> Result<Self, ProblemError> {
        let scales = match self.scales {
            KvScales::One | KvScales::Tensor { .. } => ScalesByHead::Same,
            KvScales::Head { .. } => ScalesByHead::OfHeads,
            KvScales::Request { .. } => ScalesByHead::Others("scales of requests"),
            KvScales::Token { .. } => ScalesByHead::Others("a scale for each token"),
            KvScales::InRow => ScalesByHead::Others("scales in its rows"),
        };
        let strides = [self.k_strides, self.v_strides];
        let ([k_strides, v_strides], _) = view_by_head(strides, scales, self.rope.is_some())?;
        Ok(Self {
            k_strides,
            v_strides,
            ..*self
        })
    }
}

/// Strides of the same memory as pages of one token, if its tokens are evenly spaced or are pages already.
pub(crate) fn by_token(strides: KvStrides) -> Option<KvStrides> {
    let KvStrides {
        page,
        token,
        page_size,
        ..
    } = strides;
    if page_size == 1 {
        return Some(strides);
    }
    let even = u64::from(page) == u64::from(page_size) * u64::from(token);
    even.then_some(KvStrides {
        page: token,
        page_size: 1,
        ..strides
    })
}
