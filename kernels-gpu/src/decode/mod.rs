//! Decode: what the kernels of all architectures share.
//!
//! A CTA is one producer warp and several consumer warps around a ring of stages in shared memory. The
//! producer claims units and brings their keys, chunk by chunk and unit after unit without a pause; the
//! consumer warps take the chunks in turn. So a long unit is shared by all warps, whose states are combined
//! in shared memory at its end, and short units go to one warp each, which works through its latencies
//! while the other warps work through theirs.
//!
//! [`layout`] says where things lie in shared memory, `unit` what the producer writes there; `produce` is what it
//! finds out. `consume` is a consumer's loop, with `tile` and `products` for the arithmetic on a chunk, `combine`
//! for the states of a unit, and `results` and `merges` for what leaves the CTA.

#[cfg(target_arch = "nvptx64")]
mod combine;
#[cfg(target_arch = "nvptx64")]
pub mod consume;
#[cfg(target_arch = "nvptx64")]
pub mod half;
pub mod layout;
#[cfg(target_arch = "nvptx64")]
mod merges;
#[cfg(target_arch = "nvptx64")]
pub mod produce;
#[cfg(target_arch = "nvptx64")]
pub mod products;
#[cfg(target_arch = "nvptx64")]
pub mod results;
#[cfg(target_arch = "nvptx64")]
pub mod tile;
#[cfg(target_arch = "nvptx64")]
pub mod unit;

use layout::Layout;

/// Warps of a CTA that bring work and data.
pub const PRODUCER_WARPS: u32 = 3;

/// How a CTA is made for a head dimension and a row tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Threads.
    pub threads: u32,
    /// Stages of the ring.
    pub stages: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// Units that can be under way.
    pub units: u32,
}

/// Consumer warps: as many as find registers.
#[must_use]
pub const fn warps(dim: u32, rows: u32) -> u32 {
    match (dim, rows) {
        (64 | 128, 8) => 8,
        (256, 16) => 2,
        _ => 4,
    }
}

/// The shape of a CTA that can have `shared_bytes` of shared memory; `None` where there is no such kernel or
/// too little memory.
#[must_use]
pub const fn shape(dim: u32, rows: u32, shared_bytes: u32) -> Option<Shape> {
    const fn of<const DIM: u32, const ROWS: u32, const WARPS: u32>(bytes: u32) -> Option<Shape> {
        let stages = Layout::<DIM, ROWS, WARPS>::stages(bytes);
        if stages == 0 {
            return None;
        }
        Some(Shape {
            threads: (WARPS + PRODUCER_WARPS) * 32,
            stages,
            shared_bytes: Layout::<DIM, ROWS, WARPS>::bytes(stages),
            units: Layout::<DIM, ROWS, WARPS>::UNITS,
        })
    }
    match (dim, rows) {
        (64, 8) => of::<64, 8, { warps(64, 8) }>(shared_bytes),
        (64, 16) => of::<64, 16, { warps(64, 16) }>(shared_bytes),
        (128, 8) => of::<128, 8, { warps(128, 8) }>(shared_bytes),
        (128, 16) => of::<128, 16, { warps(128, 16) }>(shared_bytes),
        (256, 8) => of::<256, 8, { warps(256, 8) }>(shared_bytes),
        (256, 16) => of::<256, 16, { warps(256, 16) }>(shared_bytes),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a CTA can have on Hopper.
    const H200: u32 = 227 * 1024;

    #[test]
    fn kernels_fill_an_sm_of_hopper_and_no_more() {
        for dim in [64, 128, 256] {
            for rows in [8, 16] {
                let shape = shape(dim, rows, H200).expect("there is such a kernel");
                assert!(shape.shared_bytes <= H200, "{dim} {rows}: {shape:?}");
                assert!(
                    shape.stages.is_multiple_of(warps(dim, rows)),
                    "{dim} {rows}"
                );
                let in_flight = shape.stages * layout::KEYS * dim * 4;
                assert!(
                    in_flight >= 128 << 10,
                    "{dim} {rows}: {in_flight} bytes in flight"
                );
            }
        }
        assert_eq!(shape(96, 8, H200), None);
        assert_eq!(shape(128, 8, 48 << 10), None);
    }
}
