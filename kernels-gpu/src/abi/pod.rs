//! What the kernel takes that has prefill and decode in one.

use bytemuck::{Pod, Zeroable};

use super::{GatherDecodeParams, GatherPrefillParams};

/// What the kernel takes that has prefill and decode in one.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct PodParams {
    /// The prefill; its ticket is unused.
    pub prefill: GatherPrefillParams,
    /// The decode, whose states a kernel behind this one merges; its ticket is unused.
    pub decode: GatherDecodeParams,
    /// `[`[`COUNTERS`](crate::sm80::pod::COUNTERS)`]` u32, zero before and after every launch.
    pub counters: u64,
    /// CTAs of prefill and of decode in a period of an SM's tickets; none of either: as many as there are.
    pub tickets: [u32; 2],
    /// Decodes that a CTA runs side by side, a warp each.
    pub virtual_decodes: u32,
    /// Zero.
    pub reserved: u32,
}
