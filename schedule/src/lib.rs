//! Composing batches: takes requests and makes one hybrid batch per iteration.
//!
//! A [`Composer`] holds the requests, the page pool and the prefix cache. A [`Policy`](policy::Policy)
//! decides what goes into a step. [`cost`] predicts the time of a step on a machine, and [`sim`] simulates a
//! whole trace, so that chunk size and policy can be chosen without the machine.
//!
//! ```
//! use tandem_schedule::{Composer, Limits, Request, Sampled, Step, policy::SarathiServe};
//!
//! let limits = Limits { step_tokens: 64, ..Limits::default() };
//! let mut composer = Composer::new(limits, 1000, 16, SarathiServe)?;
//! composer.submit(Request::new(vec![17; 100], 3))?;
//!
//! let (mut step, mut steps) = (Step::default(), Vec::new());
//! while composer.compose(&mut step) {
//!     steps.push(step.tokens());
//!     composer.complete(&step, |_| Sampled::Token(42));
//! }
//! assert_eq!(steps, [64, 36, 1, 1]); // two chunks of the prompt, then two decodes
//! # Ok::<(), tandem_schedule::ScheduleError>(())
//! ```

pub mod attention;
mod cache;
pub mod chunk;
mod composer;
pub mod cost;
mod draft;
mod error;
mod hardware;
pub mod metrics;
mod model;
pub mod policy;
mod request;
pub mod sim;
mod step;
pub mod trace;

pub use cache::CacheType;
pub use composer::{Composer, Finished, Limits, Sampled};
pub use draft::{Draft, Workload};
pub use error::ScheduleError;
pub use hardware::{Gemm, Hardware, Interconnect};
pub use model::ModelDescription;
pub use request::{Prompt, Request, RequestId};
pub use step::{Entry, Preemption, Step, StepInputs, Swap};

#[cfg(test)]
mod tests;
