//! Gathers a unit's queries, whose rows may lie anywhere, to shared memory in wgmma's swizzled layout.

use cuda_std::{async_copy, shared, warp};

use crate::abi::DecodeParams;

/// A unit's queries, and their target.
#[derive(Clone, Copy)]
pub(super) struct Queries {
    /// Shared address of the slabs of 64 columns, `slab_bytes` each.
    pub target: u32,
    pub slab_bytes: u32,
    /// Shared address of the unit's rows, 16 bytes each, and their number.
    pub rows: u32,
    pub tokens: u32,
    /// The KV head, and the head dimension.
    pub head: u32,
    pub head_dim: u32,
}

impl Queries {
    /// Copies half of the queries, swizzled. Two warps share the work; `half` is 0 or 1.
    ///
    /// # Safety
    /// A whole warp; the rows are written, and only these warps access the target.
    #[inline(always)]
    pub unsafe fn gather(self, p: &DecodeParams, half: u32) {
        /// Copies whose addresses are computed together, so that none waits for another's.
        const AT_ONCE: usize = 4;
        let Self {
            target,
            slab_bytes,
            rows: listed,
            tokens,
            head,
            head_dim,
        } = self;
        let a = &p.attention;
        let lane = warp::lane_id();
        // A vector is 8 elements; neighbouring lanes take neighbouring vectors.
        let vectors = head_dim / 8;
        let step = 2 * (32 / vectors);
        let (vector, mut row) = (lane % vectors, lane / vectors + half * (32 / vectors));
        let target = target + vector / 8 * slab_bytes;
        let source = a.q + u64::from(head * a.group * head_dim + vector * 8) * 2;
        let rows = tokens * a.group;
        // SAFETY: a whole warp; the rows are written, and the plan has these queries.
        unsafe {
            while row < rows {
                let mut elements = [0; AT_ONCE];
                let mut i = 0;
                while i < AT_ONCE {
                    // Past the last row: the last token again, which is not copied.
                    let (token, in_group) = p.group.div_rem(row + i as u32 * step);
                    let token = shared::load_u32(listed + token.min(tokens - 1) * 16);
                    elements[i] = u64::from(token) * u64::from(a.q_token_stride)
                        + u64::from(in_group * head_dim);
                    i += 1;
                }
                i = 0;
                while i < AT_ONCE {
                    let row = row + i as u32 * step;
                    if row < rows {
                        let at = target + row * 128 + ((vector % 8) ^ (row % 8)) * 16;
                        async_copy::copy_cg(at, (source + elements[i] * 2) as *const u8);
                    }
                    i += 1;
                }
                row += AT_ONCE as u32 * step;
            }
        }
    }
}
