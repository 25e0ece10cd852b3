//! Decode on Hopper with `mma`: keys and values are loaded with TMA, in boxes of a page or a part of one.
//!
//! A CTA has three to five producer warps. The *scheduler* claims units and lists them ahead of all other warps, so
//! that the stream of keys does not wait for tickets, items, rows and page ids. Two to four *loaders* follow the list
//! and keep the ring of stages full; they take chunks in turn. The consumer warps take the chunks in turn, too. If the
//! tile has 16 rows, two warps share a chunk, and each has 8 of the rows. All warps share a long unit and combine their
//! states in shared memory at its end. A short unit goes to one warp, or to two with 16 rows, whose latencies overlap with
//! the work of the other warps.
//!
//! [`layout`] is the layout of shared memory, `unit` what the producers write there. `load` and `open` are the loaders, `mainloop` a consumer warp, with `rows` for the rows of a unit, `turn` for
//! rotary embeddings, `combine` for the states of a unit, and `merges` for the merging of partial states.

#[cfg(target_arch = "nvptx64")]
mod by_rows;
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
pub use config::{Shape, per_lane, producers, row_blocks, shape, warps};
#[cfg(target_arch = "nvptx64")]
#[doc(hidden)]
pub use roles::run;
