//! Views of a plan: in time, in bytes, as a table, verified against its batch, without joint items.

mod display;
mod launches;
mod timeline;
mod traffic;
mod verify;
mod without_joint;

pub use timeline::{Schedule, Span};
pub use traffic::Traffic;
pub use verify::Defect;
