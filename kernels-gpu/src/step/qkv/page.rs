//! Stores of keys and values to their pages: unchanged, or as scaled 8-bit floats.

#[cfg(feature = "quantise")]
use cuda_std::convert;
use cuda_std::prelude::*;

#[cfg(feature = "step")]
use crate::step::{at, pack};
use crate::{
    abi::{KvStrides, QkvParams},
    common::half::Half,
    step::Vector,
};

/// The target of a head of a token.
pub(super) struct Place {
    pub(super) page: u32,
    pub(super) offset: u32,
    /// The KV head.
    pub(super) head: u32,
    pub(super) token: u32,
    pub(super) is_key: bool,
    /// The head is a key or a value, and its token has a slot in the pool.
    pub(super) exists: bool,
    /// The thread is the first of the head.
    pub(super) first: bool,
}

impl Place {
    #[inline(always)]
    fn of(&self, strides: &KvStrides) -> u64 {
        u64::from(self.page) * u64::from(strides.page)
            + u64::from(self.offset) * u64::from(strides.token)
            + u64::from(self.head) * u64::from(strides.head)
    }
}

/// The format of pages.
pub(super) trait Page {
    /// Writes a thread's vectors of a key or a value.
    ///
    /// # Safety
    /// All lanes come here; no other head has the same existing place.
    unsafe fn append<T: Half>(p: &QkvParams, place: &Place, at: [u32; 2], x: &[Vector; 2]);
}

/// Pages of the projection's type.
#[cfg(feature = "step")]
pub(super) struct Same;

#[cfg(feature = "step")]
impl Page for Same {
    #[inline(always)]
    unsafe fn append<T: Half>(p: &QkvParams, place: &Place, [a, b]: [u32; 2], x: &[Vector; 2]) {
        let (pool, strides) = if place.is_key {
            (p.k, &p.k_strides)
        } else {
            (p.v, &p.v_strides)
        };
        let to = place.of(strides);
        if place.exists {
            // SAFETY: the caller's promise.
            unsafe {
                ptr::store_u32x4(at(pool, to + u64::from(a)) as *mut u32, pack::<T>(x[0]));
                ptr::store_u32x4(at(pool, to + u64::from(b)) as *mut u32, pack::<T>(x[1]));
            }
        }
    }
}

/// Pages of scaled e4m3 numbers.
#[cfg(feature = "quantise")]
pub(super) struct E4m3;

#[cfg(feature = "quantise")]
impl Page for E4m3 {
    #[inline(always)]
    unsafe fn append<T: Half>(p: &QkvParams, place: &Place, [a, b]: [u32; 2], x: &[Vector; 2]) {
        use crate::passes::quantise::{COMPUTED, GIVEN, LARGEST, SMALLEST, largest_finite};
        let (pool, strides, scales, of_scales) = if place.is_key {
            (p.k, &p.k_strides, p.scales.k, &p.scales.k_strides)
        } else {
            (p.v, &p.v_strides, p.scales.v, &p.scales.v_strides)
        };
        let of_token = place.of(of_scales);
        let mut scale = 1.0;
        // SAFETY: all lanes reach the shuffles; every existing place has a scale, if there are scales.
        unsafe {
            // Query heads are not quantised, and most warps have only query heads.
            let any = warp::warp_vote_any(warp::FULL_MASK, place.exists);
            if p.mode == COMPUTED && any {
                let mut largest = largest_finite(&x[0]).max(largest_finite(&x[1]));
                let mut distance = 1 << p.lanes_log >> 1;
                while distance > 0 {
                    let other = warp::warp_shuffle_xor(warp::FULL_MASK, largest, distance, 32);
                    largest = if other > largest { other } else { largest };
                    distance >>= 1;
                }
                if largest > 0.0 {
                    scale = largest / LARGEST;
                    scale = if scale > SMALLEST { scale } else { SMALLEST };
                }
                if place.exists && place.first {
                    ptr::store_f32((scales + of_token * 4) as *mut f32, scale);
                }
            } else if place.exists && scales != 0 {
                let mut index = of_token;
                if p.mode == GIVEN {
                    let mut request = 0;
                    if p.scales.of_token != 0 {
                        let of_token = p.scales.of_token + u64::from(place.token) * 4;
                        request = ptr::load_nc_u32(of_token as *const u32);
                    }
                    index = u64::from(request) * u64::from(of_scales.page)
                        + u64::from(place.head) * u64::from(of_scales.head);
                }
                scale = ptr::load_nc_f32((scales + index * 4) as *const f32);
            }
            if place.exists {
                let inverse = 1.0 / scale;
                let to = pool + place.of(strides) * 8;
                ptr::store_u32x2((to + u64::from(a) * 8) as *mut u32, narrow(&x[0], inverse));
                ptr::store_u32x2((to + u64::from(b) * 8) as *mut u32, narrow(&x[1], inverse));
            }
        }
    }
}

#[cfg(feature = "quantise")]
#[inline(always)]
fn narrow(x: &Vector, inverse: f32) -> [u32; 2] {
    let pair = |i: usize| u32::from(convert::f32x2_to_e4m3x2(x[i] * inverse, x[i + 1] * inverse));
    [pair(0) | pair(2) << 16, pair(4) | pair(6) << 16]
}
