//! Scales of 8-bit keys and values in device memory.

use kernels_gpu::{
    abi::{KvStrides, ScaleParams},
    registry::KernelInfo,
};

use super::{
    DeviceArray, DeviceTensor,
    tensor::{COUNTED, fits},
};
use crate::{
    Error,
    checks::check_least,
    kv::check_in_row,
    problem::{Dtype, Quantity, Spec},
    tensor::ShapeError,
};

/// Scales of an 8-bit pool: a key or value is a stored number times a scale. Scales are in device memory, so
/// a captured graph uses new ones. The counterpart of [`kv::KvScales`](crate::kv::KvScales).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvScales {
    /// A scale of 1.
    #[default]
    One,
    /// One scale for all keys, and one for all values: `[1]` F32 each.
    Tensor {
        /// Of keys.
        k: DeviceTensor<1>,
        /// Of values.
        v: DeviceTensor<1>,
    },
    /// One scale for each KV head: `[kv_heads]` F32 each.
    Head {
        /// Of keys.
        k: DeviceTensor<1>,
        /// Of values.
        v: DeviceTensor<1>,
    },
    /// One scale for each request and KV head: `[requests, kv_heads]` F32 each. The request is that of the query.
    Request {
        /// Of keys.
        k: DeviceTensor<2>,
        /// Of values.
        v: DeviceTensor<2>,
        /// The request of each query token, as many as `q` has; below the number of requests.
        of_token: DeviceArray<u32>,
    },
    /// One scale for each token and KV head: `[pages, page_size, kv_heads]` F32 each, in any order, so that scales can be stored
    /// inside the pages. Prefills on a GPU round the product of each key or value and its scale to the type of the queries,
    /// clamped to the largest number of F16. Decode kernels have them for F8E4M3 without a soft cap, and
    /// prefills not with `Compute::F8`: [`Gpu::supports_pool`](super::Gpu::supports_pool) says before the first run whether all have.
    Token {
        /// Of keys.
        k: DeviceTensor<3>,
        /// Of values.
        v: DeviceTensor<3>,
    },
    /// As [`kv::KvScales::InRow`](crate::kv::KvScales::InRow): each row of a latent pool has 656 bytes and contains its scales.
    /// Strides count bytes.
    InRow,
}

impl KvScales {
    /// Checks the scales for a pool of these pages and tokens in a page, and for this number of query tokens, and makes the kernel parameters.
    pub(super) fn parameters(
        &self,
        spec: &Spec,
        dtype: Dtype,
        [pages, page_size]: [u32; 2],
        tokens: usize,
    ) -> Result<ScaleParams, Error> {
        self.check_kind(spec, dtype)?;
        let (heads, of_spec) = (spec.kv_heads as usize, "in the specification");
        match self {
            Self::One | Self::InRow => Ok(ScaleParams::default()),
            Self::Token { k, v } => {
                for (name, tensor) in [(KEYS, k), (VALUES, v)] {
                    let of_pool = "in the pool";
                    tensor.check_extent(name, "pages", 0, pages as usize, of_pool)?;
                    tensor.check_extent(
                        name,
                        "tokens in a page",
                        1,
                        page_size as usize,
                        of_pool,
                    )?;
                    tensor.check_extent(name, "KV heads", 2, heads, of_spec)?;
                }
                let token = |tensor: &DeviceTensor<3>| {
                    fits(
                        Quantity::Stride("a stride of scales"),
                        tensor.strides[1],
                        COUNTED,
                    )
                };
                let mut params = pair(k, v, |tensor| [tensor.strides[0], tensor.strides[2]])?;
                params.k_strides.token = token(k)?;
                params.v_strides.token = token(v)?;
                for tensor in [k, v] {
                    reach(Quantity::Stride("the scales of a page"), tensor, [1, 2])?;
                }
                Ok(params)
            }
            Self::Tensor { k, v } => {
                k.check_extent(KEYS, "scales", 0, 1, "there is one")?;
                v.check_extent(VALUES, "scales", 0, 1, "there is one")?;
                pair(k, v, |_| [0, 0])
            }
            Self::Head { k, v } => {
                k.check_extent(KEYS, "KV heads", 0, heads, of_spec)?;
                v.check_extent(VALUES, "KV heads", 0, heads, of_spec)?;
                let params = pair(k, v, |tensor| [0, tensor.strides[0]])?;
                for tensor in [k, v] {
                    reach(Quantity::Stride("the scales of all KV heads"), tensor, [0])?;
                }
                Ok(params)
            }
            Self::Request { k, v, of_token } => {
                k.check_extent(KEYS, "KV heads", 1, heads, of_spec)?;
                v.check_extent(VALUES, "KV heads", 1, heads, of_spec)?;
                v.check_extent(VALUES, "requests", 0, k.shape[0], "in those of keys")?;
                of_token.check_address("requests of tokens", 4)?;
                let got = of_token.len;
                check_least("requests of tokens", "tokens", got, tokens, ", as q has")?;
                let params = pair(k, v, |tensor| tensor.strides)?;
                for tensor in [k, v] {
                    reach(
                        Quantity::Stride("the scales of all requests"),
                        tensor,
                        [0, 1],
                    )?;
                }
                Ok(ScaleParams {
                    of_token: of_token.address,
                    ..params
                })
            }
        }
    }

    /// Checks that a pool of this type and specification can have scales of this kind.
    pub(super) fn check_kind(&self, spec: &Spec, dtype: Dtype) -> Result<(), Error> {
        if !matches!(self, Self::One) && dtype.bytes() != 1 {
            return Err(ShapeError::Scaled { dtype }.into());
        }
        match self {
            Self::InRow => Ok(check_in_row(spec, dtype)?),
            _ => Ok(()),
        }
    }

    /// Checks that an attention kernel supports scales of this granularity.
    pub(super) fn check_kernel(&self, row: &KernelInfo) -> Result<(), Error> {
        let in_row = matches!(self, Self::InRow);
        if (row.latent && row.cache.is_some()) != in_row {
            return Err(Error::NoInstance {
                kernel: "attention",
                asked: match in_row {
                    true => format!("rows that carry their scales in {}", row.name),
                    false => format!(
                        "latent keys of 8 bits without scales in their rows in {}",
                        row.name
                    ),
                },
                there: "latent keys in F8E4M3 whose rows carry their scales (KvPool::latent_656), or keys of 16 bits",
            });
        }
        let by_token = matches!(self, Self::Token { .. });
        if row.by_token == by_token {
            return Ok(());
        }
        Err(Error::NoInstance {
            kernel: "attention",
            asked: match by_token {
                true => format!("scales by token in {}", row.name),
                false => format!("scales that are not by token in {}", row.name),
            },
            there: "scales by tensor, by KV head, by request and KV head, or (in F8E4M3, without a soft cap) by token",
        })
    }

    /// Whether the scales of neighbouring KV heads of a token can be copied two at a time.
    pub(super) fn come_in_pairs(&self) -> bool {
        match self {
            Self::Token { k, v } => [k, v].into_iter().all(|scales| {
                let [page, token, head] = scales.strides;
                head == 1
                    && [page, token].iter().all(|stride| stride.is_multiple_of(2))
                    && scales.address.is_multiple_of(8)
            }),
            _ => true,
        }
    }

    /// Whether two sets of scales differ at most in addresses, and launches for one can be given the other.
    pub(super) fn alike(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::One, Self::One) | (Self::InRow, Self::InRow) => true,
            (Self::Tensor { k, v }, Self::Tensor { k: a, v: b })
            | (Self::Head { k, v }, Self::Head { k: a, v: b }) => {
                k.layout() == a.layout() && v.layout() == b.layout()
            }
            (
                Self::Request { k, v, of_token },
                Self::Request {
                    k: a,
                    v: b,
                    of_token: c,
                },
            ) => k.layout() == a.layout() && v.layout() == b.layout() && of_token.len == c.len,
            // Scales that come in pairs may have another kernel, which others would give misaligned addresses.
            (Self::Token { k, v }, Self::Token { k: a, v: b }) => {
                k.layout() == a.layout()
                    && v.layout() == b.layout()
                    && self.come_in_pairs() == other.come_in_pairs()
            }
            _ => false,
        }
    }
}

/// Checks that 32 bits can count the reach of some axes.
fn reach<const RANK: usize, const AXES: usize>(
    what: Quantity,
    tensor: &DeviceTensor<RANK>,
    axes: [usize; AXES],
) -> Result<(), Error> {
    let of_axis = |axis: usize| {
        let last = tensor.shape[axis].saturating_sub(1);
        last.saturating_mul(tensor.strides[axis])
    };
    let all = axes.map(of_axis).into_iter().fold(0, usize::saturating_add);
    Ok(fits(what, all, u32::MAX).map(drop)?)
}

pub(super) const KEYS: &str = "the scales of keys";
pub(super) const VALUES: &str = "the scales of values";

/// Parameters for scales of keys and of values. `strides` returns the strides of requests and of heads.
fn pair<const RANK: usize>(
    k: &DeviceTensor<RANK>,
    v: &DeviceTensor<RANK>,
    strides: impl Fn(&DeviceTensor<RANK>) -> [usize; 2],
) -> Result<ScaleParams, Error> {
    let side = |name, tensor: &DeviceTensor<RANK>| -> Result<KvStrides, Error> {
        tensor.check_f32(name)?;
        tensor.check_address(name, 4)?;
        let [page, head] = strides(tensor);
        Ok(KvStrides {
            page: fits(Quantity::Stride("a stride of scales"), page, COUNTED)?,
            head: fits(Quantity::Stride("a stride of scales"), head, COUNTED)?,
            token: 0,
            page_size: 0,
        })
    };
    Ok(ScaleParams {
        k_strides: side(KEYS, k)?,
        v_strides: side(VALUES, v)?,
        k: k.address,
        v: v.address,
        of_token: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kernels count the scales of all requests, of all KV heads, and of a page, in 32 bits.
    #[test]
    fn all_scales_can_be_counted() {
        let spec = Spec::new(8, 8, 128).with_kv_dtype(Dtype::F8E4M3);
        let check = |scales: KvScales| {
            let parameters = scales.parameters(&spec, Dtype::F8E4M3, [100, 16], 4);
            parameters.map(drop)
        };
        let of_requests = |stride| {
            let k = DeviceTensor::new(1 << 20, Dtype::F32, [4, 8]).with_stride(0, stride);
            let of_token = DeviceArray::new(1 << 20, 4);
            KvScales::Request { k, v: k, of_token }
        };
        assert_eq!(check(of_requests(1 << 30)), Ok(()));
        let error = check(of_requests((1 << 31) - 1)).unwrap_err();
        assert!(error.to_string().contains("of all requests"), "{error}");
        let of_heads = |stride| {
            let k = DeviceTensor::new(1 << 20, Dtype::F32, [8]).with_stride(0, stride);
            let dense = DeviceTensor::new(1 << 20, Dtype::F32, [8]);
            [(k, dense), (dense, k)].map(|(k, v)| check(KvScales::Head { k, v }))
        };
        assert_eq!(of_heads(1 << 29), [Ok(()), Ok(())]);
        for error in of_heads(1 << 30) {
            let error = error.unwrap_err();
            assert!(error.to_string().contains("of all KV heads"), "{error}");
        }
        let by_head = |stride| {
            let k = DeviceTensor::new(1 << 20, Dtype::F32, [100, 16, 8]).with_stride(2, stride);
            KvScales::Token { k, v: k }
        };
        assert_eq!(check(by_head(1 << 29)), Ok(()));
        let error = check(by_head(1 << 30)).unwrap_err();
        assert!(error.to_string().contains("of a page"), "{error}");
    }

    /// A kernel of two KV heads copies eight bytes: these must be the scales of the two heads, and aligned.
    #[test]
    fn scales_of_neighbouring_heads_are_copied_together_where_they_lie_so() {
        let at = |address, strides: [usize; 3]| {
            let mut scales = DeviceTensor::new(address, Dtype::F32, [100, 16, 8]);
            scales.strides = strides;
            scales
        };
        let of = |k, v| KvScales::Token { k, v }.come_in_pairs();
        let good = at(1 << 20, [128, 8, 1]);
        assert!(of(good, good) && KvScales::One.come_in_pairs());
        let by_head = at(1 << 20, [256, 2, 32]);
        let misaligned = at((1 << 20) + 4, [128, 8, 1]);
        let odd_tokens = at(1 << 20, [144, 9, 1]);
        let odd_pages = at(1 << 20, [129, 8, 1]);
        for bad in [by_head, misaligned, odd_tokens, odd_pages] {
            assert!(!of(bad, good) && !of(good, bad), "{bad:?}");
        }
    }

    /// The launches of a layer are those of the layer before if the scales are alike: a kernel of two KV heads once copied eight
    /// bytes from an address that was no multiple of eight.
    #[test]
    fn scales_that_come_in_pairs_are_not_like_others() {
        let at = |address| DeviceTensor::new(address, Dtype::F32, [100, 16, 8]);
        let of = |k, v| KvScales::Token { k: at(k), v: at(v) };
        let (even, odd) = (1 << 20, (1 << 20) + 4);
        let pairs = of(even, even);
        assert!(pairs.alike(&of(even + 8, even + 64)));
        for misaligned in [of(odd, even), of(even, odd), of(odd, odd)] {
            assert!(!pairs.alike(&misaligned) && !misaligned.alike(&pairs));
        }
        assert!(of(odd, even).alike(&of(even, odd + 8)));
    }
}
