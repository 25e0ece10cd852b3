//! Parameters of the fused prefill and decode kernel.

use bytemuck::{Pod, Zeroable};

use super::{GatherDecodeParams, GatherPrefillParams};

/// Parameters of the fused prefill and decode kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct PodParams {
    /// The prefill; its ticket is unused.
    pub prefill: GatherPrefillParams,
    /// The decode; a following kernel merges its states. Its ticket is unused.
    pub decode: GatherDecodeParams,
    /// `[`[`COUNTERS`](crate::sm80::pod::COUNTERS)`]` u32, zero before and after every launch.
    pub counters: u64,
    /// CTAs of prefill and of decode in a period of an SM's tickets; both 0: in proportion to their numbers.
    pub tickets: [u32; 2],
    /// Virtual decodes that a CTA runs, one warp each.
    pub virtual_decodes: u32,
    /// Zero.
    pub reserved: u32,
}
