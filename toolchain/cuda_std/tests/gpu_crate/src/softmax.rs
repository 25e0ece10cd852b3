//! The loop of a consumer warpgroup of attention: two accumulators in flight, P in registers.
//!
//! It shows that separate product instructions cost nothing: no serialisation, no register copies, and
//! the softmax stays between the two waits.

use cuda_std::{convert, kernel, math, setmaxnreg, shared, warp, wgmma::*};

const STAGE: u32 = 32768;

#[inline(always)]
fn k_descriptor(address: u32) -> Descriptor {
    Descriptor::new(address, 16, 2048, Swizzle::B128)
}

#[inline(always)]
fn v_descriptor(address: u32) -> Descriptor {
    Descriptor::new(address, 1024, 2048, Swizzle::B128)
}

/// S = Q·Kᵀ over a head dimension of 128.
#[inline(always)]
unsafe fn scores(s: &mut [f32; 64], q: Descriptor, k: Descriptor) {
    // SAFETY: the caller's promise.
    unsafe {
        mma_ss::<Bf16, false, false, false, _>(s, q, k);
        let mut step = 1;
        while step < 8 {
            let (half, column) = (step / 4, step % 4 * 32);
            mma_ss::<Bf16, true, false, false, _>(
                s,
                q.advance(half * 16384 + column),
                k.advance(half * 1024 + column),
            );
            step += 1;
        }
        commit_group();
    }
}

#[kernel(max_threads = 384, min_blocks = 1)]
pub unsafe fn consumer_loop(output: *mut f32, blocks: u32) {
    // SAFETY: this is compiled and inspected, never launched.
    unsafe {
        let base = shared::dynamic_shared_address();
        setmaxnreg::increase::<240>();
        let q = k_descriptor(base);
        let mut s = [0.0f32; 64];
        let mut p = [0u32; 32];
        let mut o = [0.0f32; 64];
        let mut maximum = [0.0f32; 2];
        let mut sum = [0.0f32; 2];
        fence();
        scores(&mut s, q, k_descriptor(base + STAGE));
        wait_group::<0>();
        fence_operand(&mut s);
        pack(&mut p, &s);
        let mut block = blocks;
        while block > 0 {
            block -= 1;
            let stage = base + (block & 1) * STAGE;
            fence();
            scores(&mut s, q, k_descriptor(stage + STAGE));
            let v = v_descriptor(stage + 3 * STAGE);
            let mut step = 0;
            while step < 8 {
                let a = [
                    p[4 * step],
                    p[4 * step + 1],
                    p[4 * step + 2],
                    p[4 * step + 3],
                ];
                mma_rs::<Bf16, true, true, _>(&mut o, a, v.advance(4096 * step as u32));
                step += 1;
            }
            commit_group();
            wait_group::<1>();
            fence_operand(&mut s);
            let mut scale = [0.0f32; 2];
            let mut row = 0;
            while row < 2 {
                scale[row] = softmax_row(&mut s, row, &mut maximum[row], &mut sum[row]);
                row += 1;
            }
            schedule_fence();
            wait_group::<0>();
            fence_operand(&mut o);
            fence_operand(&mut p);
            pack(&mut p, &s);
            let mut i = 0;
            while i < 64 {
                o[i] *= scale[(i >> 1) & 1];
                i += 1;
            }
        }
        let mut i = 0;
        while i < 64 {
            *output.add(i) = o[i] * sum[(i >> 1) & 1];
            i += 1;
        }
    }
}

#[inline(always)]
fn pack(p: &mut [u32; 32], s: &[f32; 64]) {
    let mut i = 0;
    while i < 32 {
        p[i] = convert::f32x2_to_bf16x2(s[2 * i], s[2 * i + 1]);
        i += 1;
    }
}

#[inline(always)]
unsafe fn softmax_row(s: &mut [f32; 64], row: usize, maximum: &mut f32, sum: &mut f32) -> f32 {
    let mut new = *maximum;
    let mut j = 0;
    while j < 16 {
        new = new.max(s[4 * j + 2 * row]).max(s[4 * j + 2 * row + 1]);
        j += 1;
    }
    // SAFETY: all lanes execute this.
    unsafe {
        new = new.max(warp::warp_shuffle_xor(warp::FULL_MASK, new, 1, 32));
        new = new.max(warp::warp_shuffle_xor(warp::FULL_MASK, new, 2, 32));
    }
    let scale = math::ex2(*maximum - new);
    *maximum = new;
    let mut total = 0.0;
    let mut j = 0;
    while j < 16 {
        let first = math::ex2(s[4 * j + 2 * row] - new);
        let second = math::ex2(s[4 * j + 2 * row + 1] - new);
        s[4 * j + 2 * row] = first;
        s[4 * j + 2 * row + 1] = second;
        total += first + second;
        j += 1;
    }
    *sum = math::fma(*sum, scale, total);
    scale
}
