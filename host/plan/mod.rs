//! The planner: pure functions without GPU types.
//!
//! A [`Planner`] turns a [`Spec`](crate::problem::Spec) and a [`Batch`](crate::problem::Batch) into a [`Plan`]: work items, the
//! rows of each, the places of partial states, and how they are merged. Every executor can run a plan. One
//! plan is used for all layers of a step that have the same specification.
//!
//! ```
//! use tandem_attn::plan::{DeviceDescription, Planner, PlanOptions};
//! use tandem_attn::problem::{Batch, PageTable, Spec};
//!
//! // Two decodes that share their first page.
//! let mut table = PageTable::new(16, 100);
//! table.push(&[7, 3], 20);
//! table.push(&[7, 9, 4], 40);
//! let batch = Batch::new(vec![0, 1, 2], table);
//!
//! let device = DeviceDescription::named("h200")?;
//! let plan = Planner::new().plan(&Spec::new(32, 8, 128), &batch, &device, &PlanOptions::default())?;
//! assert_eq!(plan.total_q, 2);
//! println!("{plan}");
//! # Ok::<(), tandem_attn::plan::PlanError>(())
//! ```

use std::{fmt, sync::Arc};

mod appended;
pub(crate) mod conversion;
mod data;
mod draft;
mod emit;
mod hybrid;
pub(crate) mod launched;
mod model;
mod planner;
mod prefix;
mod split;
mod update;
mod views;
mod workspace;

pub(crate) use data::LIST_TOKENS;
#[cfg(feature = "cuda")]
pub(crate) use data::dims;
pub use data::{BatchLimits, Bound, Plan, PlanError, PlanOptions, SplitMode};
pub use model::DeviceDescription;
#[cfg(feature = "cuda")]
pub(crate) use model::gcd;
pub use planner::Planner;
#[cfg(feature = "cuda")]
pub(crate) use planner::check_fused;
pub use update::Update;
unstable! {
    use data::{
        BrokenPlan, Chunk, Join, Kernel, MergeMode, PackRule, PlannedPart, PlannedRowBlock, PodMode,
        Rules, Tile, TileGroup, Unsupported,
    };
    use model::{
        DecodeDescription, HeadRate, JointDescription, PrefillDescription, QueryStep, TileCost, WiderTile, tiles,
    };
    use views::{Defect, Schedule, Span, Traffic};
    use workspace::{MAX_LAUNCHES, WorkspaceLayout};
}

unstable! {
    /// Hybrid batches: prefill and decode on the same SMs at the same time (POD-Attention).
    ///
    /// Prefill is limited by the tensor cores, decode by memory bandwidth. If a batch has both, the plan says
    /// whether they run one after the other, on two streams, or fused; in which configuration; and how CTAs of
    /// the two alternate on an SM.
    mod pod {
        pub use super::{
            data::{CtaSplit, PodForecast, PodMode, PodPlan, Tickets},
            model::{PodConfig, PodDescription, Share},
        };
    }
}

/// The device and the options for which a plan was made. Plans that do the same are equal, whatever they were made for.
#[derive(Clone, Default)]
struct Origin(Option<(Arc<DeviceDescription>, PlanOptions)>);

impl fmt::Debug for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.0.as_ref().map(|(device, _)| &device.name);
        f.debug_tuple("Origin").field(&name).finish()
    }
}

impl PartialEq for Origin {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Origin {
    /// The device.
    fn device(&self) -> Option<&DeviceDescription> {
        self.0.as_ref().map(|(device, _)| &**device)
    }

    /// Whether the plan was made for these.
    fn is(&self, device: &DeviceDescription, options: &PlanOptions) -> bool {
        let Self(Some((of_device, of_options))) = self else {
            return false;
        };
        of_options == options && **of_device == *device
    }
}
