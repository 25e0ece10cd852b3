//! Decode on Hopper: pages come by TMA, each one instruction.
//!
//! Three to five producer warps. The *scheduler* claims units and lists them, ahead of all other warps, so that the
//! stream of keys does not wait for ticket, item, rows and page ids. Two to four *loaders* follow the list and keep the
//! ring full, each with a chunk in turn. The consumer warps take the chunks in turn: a long unit is shared by all of
//! them, whose states are combined in shared memory at its end, and short units go to one warp each, which works
//! through its latencies while the other warps work through theirs.
//!
//! [`layout`] says where things lie in shared memory, `unit` what the producers write there. `mainloop` is a
//! consumer's, with `rows` for what a unit asks, `turn` for queries that are turned, `combine` for the states of a unit, and
//! `merges` for what leaves the CTA.

#[cfg(target_arch = "nvptx64")]
mod combine;
mod config;
#[cfg(all(target_arch = "nvptx64", feature = "decode_mma"))]
mod entries;
pub mod layout;
#[cfg(target_arch = "nvptx64")]
mod load;
#[cfg(target_arch = "nvptx64")]
mod mainloop;
#[cfg(target_arch = "nvptx64")]
mod merges;
#[cfg(target_arch = "nvptx64")]
mod open;
#[cfg(target_arch = "nvptx64")]
mod queries;
#[cfg(target_arch = "nvptx64")]
mod roles;
#[cfg(target_arch = "nvptx64")]
mod rows;
#[cfg(target_arch = "nvptx64")]
mod scheduler;
#[cfg(target_arch = "nvptx64")]
mod turn;
#[cfg(target_arch = "nvptx64")]
mod unit;

#[cfg(not(target_arch = "nvptx64"))]
pub use config::ROWS;
pub use config::{Shape, per_lane, producers, shape, warps};
#[cfg(target_arch = "nvptx64")]
#[doc(hidden)]
pub use roles::run;
