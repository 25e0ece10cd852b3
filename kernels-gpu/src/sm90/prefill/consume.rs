//! The warpgroups that compute: products, masks and weights.

use cuda_std::{
    math::div_u32,
    mbarrier,
    prelude::*,
    wgmma::{self, Descriptor, Swizzle},
};

use super::{
    super::ring::Ring,
    finish::finish_tile,
    tile::{Dtype, Shared, Tile},
};
use crate::{
    abi::PrefillParams,
    softmax::{Rows, Visible, mask, transform},
    variant::{Pair, Variant},
};

const WARP: u32 = !0;

/// S = Q·Kᵀ of 64 rows and a block, issued. A slab of 64 columns of the queries is `slab_bytes`.
#[inline(always)]
pub(in crate::sm90) unsafe fn queries_keys<T: Dtype, const S: usize>(
    s: &mut [f32; S],
    queries: u32,
    keys: u32,
    head_dim: u32,
    slab_bytes: u32,
) where
    [f32; S]: wgmma::Accumulator,
{
    let row_bytes = head_dim * 2;
    // Both K-major in slabs of 64 columns: the slabs of a whole tile of queries follow each other,
    // those of 8 keys do.
    let q = Descriptor::new(queries, 16, 1024, Swizzle::B128);
    let k = Descriptor::new(keys, 16, 8 * row_bytes, Swizzle::B128);
    // SAFETY: the barriers of both operands completed; the accumulator is waited for.
    unsafe {
        wgmma::fence();
        wgmma::mma_ss::<T, false, false, false, _>(s, q, k);
        let mut step = 1;
        while step < head_dim / 16 {
            let (slab, inner) = (step / 4, step % 4 * 32);
            wgmma::mma_ss::<T, true, false, false, _>(
                s,
                q.advance(slab * slab_bytes + inner),
                k.advance(slab * 1024 + inner),
            );
            step += 1;
        }
        wgmma::commit_group();
    }
}

/// O += P·V of 64 rows and a block, issued.
#[inline(always)]
pub(in crate::sm90) unsafe fn weights_values<T: Dtype, const O: usize, const P: usize>(
    o: &mut [f32; O],
    weights: &[u32; P],
    values: u32,
    head_dim: u32,
) where
    [f32; O]: wgmma::Accumulator,
{
    let row_bytes = head_dim * 2;
    let v = Descriptor::new(values, 1024, 8 * row_bytes, Swizzle::B128);
    // SAFETY: the barrier of the values completed; the accumulator is waited for before it and the
    // weights are touched again.
    unsafe {
        wgmma::fence();
        let mut step = 0;
        while step < P / 4 {
            let a = [
                weights[4 * step],
                weights[4 * step + 1],
                weights[4 * step + 2],
                weights[4 * step + 3],
            ];
            wgmma::mma_rs::<T, true, true, _>(o, a, v.advance(step as u32 * 16 * row_bytes));
            step += 1;
        }
        wgmma::commit_group();
    }
}

/// A value that is the same in all lanes, told to the compiler.
#[inline(always)]
pub(in crate::sm90) unsafe fn uniform(x: u32) -> u32 {
    // SAFETY: the caller brings whole warps.
    unsafe { warp::warp_shuffle_idx(WARP, x, 0, 32) }
}

/// What a consumer knows of its tile.
struct Work {
    /// Shared address of its 64 rows of queries.
    queries: u32,
    /// First key of the block at hand, blocks left (this one included), blocks it need not look at.
    begin: i32,
    left: u32,
    skipped: u32,
    /// The first and the last key that all 64 rows see.
    all_see: (i32, i32),
}

/// The first and the last key of the tile that a row sees.
#[inline(always)]
fn sees<V: Variant>(p: &PrefillParams, variant: &V, tile: &Tile, row: u32) -> (i32, i32) {
    let position = tile.position + div_u32(row, p.pack) as i32;
    let (first, last) = variant.visible_keys(position);
    (
        first.max(tile.kv_begin as i32),
        last.min(tile.kv_end as i32 - 1),
    )
}

/// Whose a row is; the key is left open.
#[inline(always)]
fn query(p: &PrefillParams, tile: &Tile, row: u32) -> Pair {
    let token = div_u32(row, p.pack);
    Pair {
        token: tile.token + token,
        head: tile.head + row - token * p.pack,
        position: tile.position + token as i32,
        key: 0,
    }
}

impl Work {
    #[inline(always)]
    unsafe fn open<V: Variant>(
        p: &PrefillParams,
        variant: &V,
        s: Shared,
        stage: u32,
        consumer: u32,
    ) -> Self {
        // SAFETY: the tile's barrier completed; whole warps.
        let tile = unsafe { Tile::load(s.tile(stage)) };
        // Positions grow with the row, and what is seen with the position.
        let (_, least) = sees(p, variant, &tile, 64 * consumer);
        let (most_first, most) = sees(p, variant, &tile, 64 * consumer + 63);
        let keys = s.shape.keys as i32;
        let mut begin = tile.end as i32 - keys;
        let mut left = tile.blocks;
        let mut skipped = 0;
        while left > 1 && begin > most {
            begin -= keys;
            left -= 1;
            skipped += 1;
        }
        // SAFETY: whole warps; all 64 rows agree on these.
        unsafe {
            Self {
                queries: s.queries(stage) + consumer * 64 * 128,
                begin: uniform(begin as u32) as i32,
                left: uniform(left),
                skipped: uniform(skipped),
                all_see: (
                    uniform(most_first as u32) as i32,
                    uniform(least as u32) as i32,
                ),
            }
        }
    }
}

#[inline(always)]
pub(super) unsafe fn consume<
    T: Dtype,
    V: Variant,
    const STAGES: u32,
    const S: usize,
    const P: usize,
    const O: usize,
>(
    p: &PrefillParams,
    variant: &V,
    s: Shared,
) where
    [f32; S]: wgmma::Accumulator,
    [f32; O]: wgmma::Accumulator,
{
    let lane = warp::lane_id();
    let thread = thread::thread_idx_x() - 128;
    // SAFETY: whole warps here and in everything below.
    let consumer = unsafe { uniform(thread / 128) };
    let first_row = thread / 32 * 16;
    let rows_of_thread = [first_row + lane / 4, first_row + lane / 4 + 8];
    let scale = if V::TRANSFORMS_LOGITS {
        1.0
    } else {
        variant.params().scale_log2
    };
    let keys = s.shape.keys as i32;
    let (dim, slab) = (s.shape.head_dim, s.shape.slab_bytes());

    let mut tiles = Ring::<2>::CONSUMER;
    let mut k = Ring::<STAGES>::CONSUMER;
    let mut v = Ring::<STAGES>::CONSUMER;
    let mut logits = [0.0; S];
    let mut weights = [0; P];
    let mut o = [0.0; O];
    let mut rows = Rows::EMPTY;

    macro_rules! release {
        ($barrier:expr) => {
            if lane == 0 {
                mbarrier::arrive($barrier);
            }
        };
    }
    // The next tile, and the keys of its blocks that these rows do not see.
    macro_rules! open {
        () => {{
            let work = Work::open(p, variant, s, tiles.stage, consumer);
            let mut skipped = work.skipped;
            while skipped > 0 {
                mbarrier::wait(s.keys_full(k.stage), k.parity);
                release!(s.keys_free(k.stage));
                k.advance();
                skipped -= 1;
            }
            work
        }};
    }
    macro_rules! skip_values {
        ($work:ident) => {
            while $work.skipped > 0 {
                mbarrier::wait(s.values_full(v.stage), v.parity);
                release!(s.values_free(v.stage));
                v.advance();
                $work.skipped -= 1;
            }
        };
    }
    // From accumulators to logits: the variant's and the mask.
    macro_rules! finish_logits {
        ($work:ident) => {
            if V::TRANSFORMS_LOGITS {
                let tile = Tile::load(s.tile(tiles.stage));
                let of = rows_of_thread.map(|row| query(p, &tile, row));
                transform(&mut logits, variant, $work.begin, of);
            }
            let last = $work.begin + keys - 1;
            if V::MASKS || last > $work.all_see.1 || $work.begin < $work.all_see.0 {
                // Seldom: what the rows see is computed again rather than kept in registers.
                let tile = Tile::load(s.tile(tiles.stage));
                let of = rows_of_thread.map(|row| query(p, &tile, row));
                let seen = rows_of_thread.map(|row| sees(p, variant, &tile, row));
                let visible = Visible {
                    first: [seen[0].0, seen[1].0],
                    last: [seen[0].1, seen[1].1],
                };
                mask(&mut logits, variant, &visible, $work.begin, of);
            }
        };
    }

    unsafe {
        mbarrier::wait(s.queries_full(0), 0);
        let mut work = open!();
        mbarrier::wait(s.keys_full(k.stage), k.parity);
        queries_keys::<T, S>(&mut logits, work.queries, s.keys(k.stage), dim, slab);
        wgmma::wait_group::<0>();
        wgmma::fence_operand(&mut logits);
        release!(s.keys_free(k.stage));
        k.advance();
        finish_logits!(work);
        rows.rescale(&logits, scale);
        rows.weigh(&logits, scale, &mut weights, T::pack);
        skip_values!(work);
        loop {
            work.left -= 1;
            work.begin -= keys;
            // The last block's P·V is still to be done: it goes with the next tile's first Q·Kᵀ.
            let turn = work.left == 0;
            let done = tiles.stage;
            if turn {
                tiles.advance();
                mbarrier::wait(s.queries_full(tiles.stage), tiles.parity);
                if shared::load_u32(s.tile(tiles.stage) + 8) == 0 {
                    break;
                }
                work = open!();
            }
            let values = uniform(s.values(v.stage));
            mbarrier::wait(s.keys_full(k.stage), k.parity);
            queries_keys::<T, S>(&mut logits, work.queries, s.keys(k.stage), dim, slab);
            mbarrier::wait(s.values_full(v.stage), v.parity);
            weights_values::<T, O, P>(&mut o, &weights, values, dim);
            wgmma::wait_group::<1>();
            wgmma::fence_operand(&mut logits);
            release!(s.keys_free(k.stage));
            k.advance();
            finish_logits!(work);
            let ended = rows;
            if turn {
                rows = Rows::EMPTY;
            }
            // P·V runs beneath the maxima; by the time they are known it is done, the weights'
            // registers are free, and the exponentials run beneath the other consumers' products.
            let (grew, factors) = rows.rescale(&logits, scale);
            wgmma::wait_group::<0>();
            wgmma::fence_operand(&mut o);
            wgmma::fence_operand(&mut weights);
            release!(s.values_free(v.stage));
            v.advance();
            if turn {
                finish_tile::<T, O>(p, s, done, &o, &ended, scale, first_row);
                o = [0.0; O];
                skip_values!(work);
            } else if grew {
                let mut i = 0;
                while i < O {
                    o[i] *= factors[i / 2 % 2];
                    i += 1;
                }
            }
            rows.weigh(&logits, scale, &mut weights, T::pack);
        }
        mbarrier::wait(s.values_full(v.stage), v.parity);
        weights_values::<T, O, P>(&mut o, &weights, s.values(v.stage), dim);
        wgmma::wait_group::<0>();
        wgmma::fence_operand(&mut o);
        finish_tile::<T, O>(p, s, tiles.stage ^ 1, &o, &rows, scale, first_row);
    }
}
