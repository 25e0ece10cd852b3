//! Stores of keys and values to their pages: unchanged, or as scaled 8-bit floats.

#[cfg(feature = "quantise")]
use cuda_std::math::fma;
use cuda_std::prelude::*;

#[cfg(feature = "quantise")]
use super::arithmetic::of_lanes;
#[cfg(feature = "quantise")]
use crate::common::eight_bits::f32x2_to_e4m3x2;
#[cfg(feature = "step")]
use crate::step::pack;
use crate::{
    abi::{KvStrides, QkvParams},
    common::half::Half,
    step::Vector,
};

/// The target of a thread's keys and values.
pub(super) struct Place {
    pub(super) page: u32,
    pub(super) offset: u32,
    /// The KV head.
    pub(super) head: u32,
    pub(super) token: u32,
    /// The thread's first vector of a head, and the distance to the second.
    pub(super) first: u32,
    pub(super) apart: u32,
    /// The heads are keys or values, and their token has a slot in the pool.
    pub(super) exists: bool,
    /// The thread is the first of the head.
    pub(super) leads: bool,
    /// The thread has a part of a head. Others have numbers of a foreign one.
    pub(super) in_head: bool,
}

impl Place {
    #[inline(always)]
    fn of(&self, strides: &KvStrides) -> u64 {
        u64::from(self.page) * u64::from(strides.page)
            + u64::from(self.offset) * u64::from(strides.token)
            + u64::from(self.head) * u64::from(strides.head)
    }

    /// The addresses of the thread's vectors of so many bytes.
    #[inline(always)]
    fn vectors(&self, pool: u64, strides: &KvStrides, bytes: u64) -> [u64; 2] {
        let at = pool + self.of(strides) * bytes + u64::from(self.first) * bytes;
        [at, at + u64::from(self.apart) * bytes]
    }
}

/// The format of pages.
pub(super) trait Page {
    /// Writes a thread's vectors: of a key and of the value, if it has two heads, otherwise of one of them.
    ///
    /// # Safety
    /// All lanes come here; no other head has the same existing place.
    unsafe fn append<T: Half, const HEADS: usize>(
        p: &QkvParams,
        place: &Place,
        first_is_key: bool,
        x: &[[Vector; 2]; HEADS],
    );
}

/// Pages of the projection's type.
#[cfg(feature = "step")]
pub(super) struct Same;

#[cfg(feature = "step")]
impl Page for Same {
    #[inline(always)]
    unsafe fn append<T: Half, const HEADS: usize>(
        p: &QkvParams,
        place: &Place,
        first_is_key: bool,
        x: &[[Vector; 2]; HEADS],
    ) {
        if !place.exists {
            return;
        }
        let mut i = 0;
        while i < HEADS {
            let (pool, strides) = if i == 0 && first_is_key {
                (p.k, &p.k_strides)
            } else {
                (p.v, &p.v_strides)
            };
            let [a, b] = place.vectors(pool, strides, 16);
            // SAFETY: the caller's promise.
            unsafe {
                ptr::store_u32x4(a as *mut u32, pack::<T>(x[i][0]));
                ptr::store_u32x4(b as *mut u32, pack::<T>(x[i][1]));
            }
            i += 1;
        }
    }
}

/// Pages of scaled e4m3 numbers.
#[cfg(feature = "quantise")]
pub(super) struct E4m3;

#[cfg(feature = "quantise")]
impl Page for E4m3 {
    #[inline(always)]
    unsafe fn append<T: Half, const HEADS: usize>(
        p: &QkvParams,
        place: &Place,
        first_is_key: bool,
        x: &[[Vector; 2]; HEADS],
    ) {
        use crate::passes::quantise::{COMPUTED, GIVEN, largest_finite};
        let of_value = |i: usize| i > 0 || !first_is_key;
        let (mut scale, mut i) = ([1.0; HEADS], 0);
        // SAFETY: all lanes reach the shuffles; every existing place has a scale, if there are scales.
        unsafe {
            // Query heads are not quantised, and most warps have only query heads.
            if !warp::warp_vote_any(warp::FULL_MASK, place.exists) {
                return;
            }
            if p.mode == COMPUTED {
                let largest = x
                    .each_ref()
                    .map(|x| largest_finite(16, |i| x[i / 8][i % 8]))
                    .map(|largest| if place.in_head { largest } else { 0.0 });
                scale = of_lanes(largest, p.lanes_log, f32::max).map(scale_for);
            }
            if !place.exists {
                return;
            }
            while i < HEADS {
                let (scales, strides) = match of_value(i) {
                    false => (p.scales.k, &p.scales.k_strides),
                    true => (p.scales.v, &p.scales.v_strides),
                };
                if p.mode == COMPUTED {
                    if place.leads {
                        ptr::store_f32((scales + place.of(strides) * 4) as *mut f32, scale[i]);
                    }
                } else if scales != 0 {
                    let mut index = place.of(strides);
                    if p.mode == GIVEN {
                        let mut request = 0;
                        if p.scales.of_token != 0 {
                            // Opaque: this address is not held in registers until here.
                            let token = u64::from(misc::opaque(place.token));
                            let of_token = p.scales.of_token + token * 4;
                            request = ptr::load_u32(of_token as *const u32);
                        }
                        index = u64::from(request) * u64::from(strides.page)
                            + u64::from(place.head) * u64::from(strides.head);
                    }
                    scale[i] = ptr::load_f32((scales + index * 4) as *const f32);
                }
                i += 1;
            }
            i = 0;
            while i < HEADS {
                let (pool, strides) = match of_value(i) {
                    false => (p.k, &p.k_strides),
                    true => (p.v, &p.v_strides),
                };
                let inverse = 1.0 / scale[i];
                let [a, b] = place.vectors(pool, strides, 8);
                ptr::store_u32x2(a as *mut u32, narrow(&x[i][0], inverse));
                ptr::store_u32x2(b as *mut u32, narrow(&x[i][1], inverse));
                i += 1;
            }
        }
    }
}

/// The scale of a head with this largest magnitude: `largest / LARGEST`.
#[cfg(feature = "quantise")]
#[inline(always)]
fn scale_for(largest: f32) -> f32 {
    use crate::passes::quantise::{LARGEST, SMALLEST};
    // A product with the rounded inverse and one correction give the quotient, rounded as a division would round it,
    // for all numbers above the smallest scale; compared for each of them. A division has branches for the rest.
    const INVERSE: f32 = 1.0 / LARGEST;
    let near = largest * INVERSE;
    let scale = fma(fma(-near, LARGEST, largest), INVERSE, near);
    match largest > 0.0 {
        true if scale > SMALLEST => scale,
        true => SMALLEST,
        false => 1.0,
    }
}

#[cfg(feature = "quantise")]
#[inline(always)]
fn narrow(x: &Vector, inverse: f32) -> [u32; 2] {
    let pair = |i: usize| u32::from(f32x2_to_e4m3x2(x[i] * inverse, x[i + 1] * inverse));
    [pair(0) | pair(2) << 16, pair(4) | pair(6) << 16]
}
