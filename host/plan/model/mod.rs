//! What the planner knows of a device: descriptions as data, tiles, and what work costs.

mod contention;
mod cost;
mod device;
mod heads;
mod hybrid;
pub mod tiles;
mod timeline;

pub use contention::Contention;
pub use cost::CostModel;
pub use device::{
    DecodeDescription, DeviceDescription, HeadRate, JointDescription, PrefillDescription,
    QueryStep, TileCost, WiderTile,
};
pub use heads::Model;
pub use hybrid::{PodConfig, PodDescription, Share};
pub use tiles::{PrefillTile, TileTable};
pub use timeline::{CtaTimeline, gcd};
