//! Runs PTX on a CPU: everything that rustc emits for GPU kernels, including Hopper's tensor memory accelerator,
//! mbarriers and `wgmma`.
//!
//! ```
//! use ptx_run::{Launch, Memory, Module, Schedule};
//!
//! let module = Module::parse(
//!     ".version 8.0
//!     .target sm_90a
//!     .visible .entry double(.param .u64 double_param_0)
//!     .maxntid 32, 1, 1
//!     {
//!         .reg .b32 %r<3>; .reg .b64 %rd<4>;
//!         ld.param.b64 %rd1, [double_param_0];
//!         mov.u32 %r1, %tid.x;
//!         mul.wide.u32 %rd2, %r1, 4;
//!         add.s64 %rd3, %rd1, %rd2;
//!         ld.global.b32 %r2, [%rd3];
//!         add.s32 %r2, %r2, %r2;
//!         st.global.b32 [%rd3], %r2;
//!         ret;
//!     }",
//! )?;
//! let mut memory = Memory::new();
//! let numbers: Vec<u8> = (0..32_u32).flat_map(u32::to_le_bytes).collect();
//! let address = memory.allocate_with(&numbers);
//! let launch = Launch { grid: [1, 1, 1], block: [32, 1, 1], ..Launch::default() };
//! module.launch("double", &launch, &address.to_le_bytes(), &mut memory, Schedule::Random(7))?;
//! assert_eq!(memory.read(address + 12, 4)?, 6_u32.to_le_bytes());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A launch ends with [`Stats`], or with a [`Report`] that names the instruction and the threads. A report may show a
//! data race, a read of uninitialised bytes, an address out of bounds, an incorrect use of a barrier, an access to a
//! register that a product still uses, or a deadlock.
//!
//! Unsupported features are errors: local memory, copies and mbarriers across a cluster (except `st.async`), instructions that our kernels
//! do not use.

mod block;
mod clock;
mod decode;
mod exec;
mod flow;
mod memory;
mod module;
#[allow(missing_docs)]
mod op;
mod parse;
mod report;
mod run;
mod shadow;
mod swizzle;
mod tensor_map;
mod timeline;
mod warp;

pub use memory::Memory;
pub use module::{EntryInfo, Module};
pub use report::{Fault, ParseError, Place, Report, Waiting};
pub(crate) use run::Random;
pub use run::{Launch, Schedule, Stats};
pub use swizzle::Swizzle;
pub use tensor_map::TensorMap;
pub use timeline::{Beside, COPY_STEPS, Flight, Interval, State, Timeline};
