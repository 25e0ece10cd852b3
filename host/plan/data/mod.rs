//! Plans, and the input of a planner: plain data.

mod appended;
mod bound;
mod error;
mod hybrid;
mod options;
mod plan;
mod rules;
mod tables;
mod unsupported;

pub use appended::Appended;
pub use bound::{BatchLimits, Bound, LIST_TOKENS};
pub use error::{BrokenPlan, PlanError};
pub use hybrid::{CtaSplit, PodForecast, PodMode, PodPlan, Tickets, alike};
pub use options::{PackRule, PlanOptions, SplitMode};
pub use plan::{Kernel, MergeMode, Plan, PlannedPart, PlannedRowBlock, Tile, TileGroup};
pub use rules::{Chunk, Join, Rules};
pub use tables::{check_split, collect_tables};
pub use unsupported::{Unsupported, dims};
