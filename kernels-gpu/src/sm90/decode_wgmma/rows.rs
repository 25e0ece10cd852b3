//! The queries of a unit whose rows lie anywhere, brought to shared memory as wgmma wants them.

use cuda_std::{async_copy, shared, warp};

use crate::abi::DecodeParams;

/// A unit's queries, and where they go.
#[derive(Clone, Copy)]
pub(super) struct Queries {
    /// Shared memory of the slabs of 64 columns, so many bytes each.
    pub target: u32,
    pub slab_bytes: u32,
    /// The unit's tokens in shared memory, 16 bytes each, and how many there are.
    pub rows: u32,
    pub tokens: u32,
    /// KV head, and elements of one.
    pub head: u32,
    pub head_dim: u32,
}

impl Queries {
    /// Copies every other of the queries, swizzled; `half` says which.
    ///
    /// # Safety
    /// A whole warp; the rows are listed, and the memory is its own.
    #[inline(always)]
    pub unsafe fn gather(self, p: &DecodeParams, half: u32) {
        /// Copies that do not wait for each other's addresses.
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
        // A vector is 8 elements; the lanes take neighbouring ones.
        let vectors = head_dim / 8;
        let step = 2 * (32 / vectors);
        let (vector, mut row) = (lane % vectors, lane / vectors + half * (32 / vectors));
        let target = target + vector / 8 * slab_bytes;
        let source = a.q + u64::from(head * a.group * head_dim + vector * 8) * 2;
        let rows = tokens * a.group;
        // SAFETY: a whole warp; the rows are listed, the queries the plan's.
        unsafe {
            while row < rows {
                let mut elements = [0; AT_ONCE];
                let mut i = 0;
                while i < AT_ONCE {
                    // Behind the last row, the last token once more; it is not copied.
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
