//! Decisions in papers that differ from those of `tandem-attn`, as [`Rules`] for its planner.
//!
//! Nothing here is faster than the planner's own decisions: the rules exist to measure the difference. `tandem bench`
//! takes them by name (`--packing`, `--split`).
//!
//! ```
//! use tandem_attn::{plan::{DeviceDescription, Planner, PlanOptions}, problem::{Batch, PageTable, Spec}};
//!
//! let mut table = PageTable::new(16, 100);
//! table.push(&[7, 3], 20);
//! table.push(&[7, 9, 4], 40);
//! let batch = Batch::new(vec![0, 1, 2], table);
//!
//! let device = DeviceDescription::named("h200")?;
//! let mut planner = Planner::with_rules(tandem_papers::pat::PUBLISHED);
//! let plan = planner.plan(&Spec::new(32, 8, 128), &batch, &device, &PlanOptions::default())?;
//! assert_eq!(plan.verify(&batch), Ok(()));
//! # Ok::<(), tandem_attn::plan::PlanError>(())
//! ```

pub mod flashinfer;
pub mod pat;
pub mod pod;

use tandem_attn::plan::Rules;

/// The planner makes every decision.
pub const NONE: Rules = Rules {
    join: None,
    chunk: None,
    tickets: None,
};
