//! From the logits of a chunk to its weights P: scales, variant, masks, and the online softmax with lazy rescaling.

use cuda_std::{mma, warp};

use super::{KEY_BLOCKS, Keys, Logits, Rows, Weights, scales::TokenScales};
use crate::common::{
    cache::Cache,
    half::Half,
    math::exp2,
    softmax::SLACK,
    state::Softmax,
    variant::{Hook, Pair, Query, Variant},
};

const ALL: u32 = warp::FULL_MASK;

/// The last of a lane's keys in a chunk.
const LAST: usize = 2 * KEY_BLOCKS - 1;
const _: () = assert!(LAST * 8 < 64);

impl<const DIM_BLOCKS: usize, const ROW_BLOCKS: usize> Rows<DIM_BLOCKS, ROW_BLOCKS> {
    /// Computes the weights from the accumulators of S, of a chunk of one KV head whose first key is at position `first`.
    /// With `MASKED`, keys outside `keys` and invisible keys get weight 0. `scales` is the shared address of the keys'
    /// scales, followed by the values', if there are scales per token.
    ///
    /// # Safety
    /// The lanes come together; the scales are loaded.
    #[inline(always)]
    pub unsafe fn weigh<C: Cache, V: Variant, const MASKED: bool>(
        &mut self,
        variant: &V,
        lane: u32,
        [first, scales]: [u32; 2],
        keys: Keys,
        s: Logits<ROW_BLOCKS>,
    ) -> Weights<ROW_BLOCKS> {
        const { assert!(!C::PAIRS) };
        // SAFETY: the caller's promise.
        unsafe {
            let scales = match C::BY_TOKEN {
                true => TokenScales::load::<MASKED>([scales, first], lane, keys, 1, 0),
                false => TokenScales::ONE,
            };
            self.weigh_scaled::<C, V, MASKED>(variant, lane, first, keys, s, |_| scales)
        }
    }

    /// As [`weigh`](Self::weigh), with scales per token, for each block of 8 rows. The scales of values are multiplied
    /// into the weights: their logarithms are added to the logits before the references are chosen, so that weights
    /// stay in the range of f16 whatever the scale. The sum is that of the weights without these scales.
    ///
    /// # Safety
    /// As [`Rows::weigh`].
    #[inline(always)]
    pub(super) unsafe fn weigh_scaled<C: Cache, V: Variant, const MASKED: bool>(
        &mut self,
        variant: &V,
        lane: u32,
        first: u32,
        keys: Keys,
        mut s: Logits<ROW_BLOCKS>,
        of_block: impl Fn(usize) -> TokenScales,
    ) -> Weights<ROW_BLOCKS> {
        const { assert!(V::SOFTMAX || !C::SCALED) };
        let first = first + lane / 4;
        let mut p = [[[0u32; 2]; ROW_BLOCKS]; KEY_BLOCKS];
        let mut block = 0;
        while block < ROW_BLOCKS {
            let scales = of_block(block);
            let mut max = [f32::NEG_INFINITY; 2];
            let mut column = 0;
            while column < 2 {
                let (token, head) = (self.token[block][column], self.head[block][column]);
                let position = self.position[block][column];
                let (low, high) = if MASKED {
                    let (low, high) = variant.visible_keys(position);
                    (low.max(keys.begin as i32), high.min(keys.end as i32 - 1))
                } else {
                    (0, 0)
                };
                // The lane's keys are 8 apart; bit 0 is the last one.
                let mut seen = u64::MAX;
                if MASKED && keys.masks.any() {
                    let last = first + 8 * LAST as u32;
                    // SAFETY: the token is one of the launch's.
                    seen = unsafe { keys.masks.of(token).bits(position - last as i32) };
                }
                let query = Query {
                    token,
                    head,
                    position,
                };
                let nearest = Pair::new(variant, query, first);
                let mut i = 0;
                while i < 2 * KEY_BLOCKS {
                    let logit = &mut s[i / 2][block][i % 2 * 2 + column];
                    let at = nearest.further(i as u32 * 8);
                    if C::SCALED {
                        *logit *= self.scale[block][column][0];
                    }
                    if C::BY_TOKEN {
                        *logit *= scales.keys[i];
                    }
                    *logit = variant.base_2(*logit, at);
                    if C::BY_TOKEN {
                        *logit += scales.values_log2[i];
                    }
                    if MASKED && ((at.key as i32) < low || at.key as i32 > high)
                        || MASKED && seen >> (8 * (LAST - i)) & 1 == 0
                        || V::MASKS && !variant.visible(at).plain()
                    {
                        *logit = if V::SOFTMAX { f32::NEG_INFINITY } else { 0.0 };
                    }
                    max[column] = if *logit > max[column] {
                        *logit
                    } else {
                        max[column]
                    };
                    i += 1;
                }
                column += 1;
            }

            let softmax = &mut self.softmax[block];
            if !V::SOFTMAX {
                // Eight lanes share a column, so that their sums add up to 1.
                *softmax = [Softmax {
                    max: 0.0,
                    sum: 0.125,
                }; 2];
            }
            let grew = max[0] > softmax[0].max + SLACK || max[1] > softmax[1].max + SLACK;
            // SAFETY: the lanes are together.
            if V::SOFTMAX && unsafe { warp::warp_vote_any(ALL, grew) } {
                let mut column = 0;
                while column < 2 {
                    // The lanes of the same columns are 4 apart.
                    let mut stride = 4;
                    while stride < 32 {
                        // SAFETY: the vote is the same in all lanes.
                        let other = unsafe { warp::warp_shuffle_xor(ALL, max[column], stride, 32) };
                        max[column] = if other > max[column] {
                            other
                        } else {
                            max[column]
                        };
                        stride *= 2;
                    }
                    // Each column is decided on its own, so that a row's bits do not depend on its neighbours.
                    let factor = if max[column] > softmax[column].max + SLACK {
                        softmax[column].raise(max[column])
                    } else {
                        1.0
                    };
                    let mut i = 0;
                    while i < DIM_BLOCKS {
                        self.out[i][block][column] *= factor;
                        self.out[i][block][2 + column] *= factor;
                        i += 1;
                    }
                    column += 1;
                }
            }

            let offset = [softmax[0].offset(), softmax[1].offset()];
            let mut i = 0;
            while i < 2 * KEY_BLOCKS {
                let logits = &s[i / 2][block];
                let mut weights = [logits[i % 2 * 2], logits[i % 2 * 2 + 1]];
                if V::SOFTMAX {
                    weights = [exp2(weights[0] - offset[0]), exp2(weights[1] - offset[1])];
                    let of_sum = if C::BY_TOKEN {
                        scales.values_inverse[i]
                    } else {
                        1.0
                    };
                    softmax[0].sum += weights[0] * of_sum;
                    softmax[1].sum += weights[1] * of_sum;
                }
                // Transposes keys × rows to rows × keys, as the B operand has it.
                // SAFETY: the lanes are together.
                p[i / 2][block][i % 2] =
                    unsafe { mma::movmatrix_trans(C::Product::pack(weights[0], weights[1])) };
                i += 1;
            }
            block += 1;
        }

        p
    }
}
