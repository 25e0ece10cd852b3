//! Attention for LLM serving, in pure Rust.
//!
//! One step of a serving loop is a batch of prompts and decodes over a paged KV cache. A pure function on the CPU
//! *plans* the batch once per step. The plan is *run* once per layer, on the CPU or on an NVIDIA GPU. This page
//! shows the calls in the order in which a program makes them.
//!
//! # The heads and the KV cache
//!
//! A [`Spec`](problem::Spec) describes the heads of a layer: their number, dimension, types and mask. Keys and values are
//! stored in pages. A [`PagePool`](kv::PagePool) knows which pages are free, a [`Sequence`](kv::Sequence) has the pages of
//! one request, and a [`PrefixCache`](kv::PrefixCache) gives requests that begin with the same tokens the same pages.
//! All three are bookkeeping only: the program owns the memory.
//!
//! ```
//! use tandem_attn::{
//!     Cpu,
//!     half::bf16,
//!     kv::{KvViewMut, PagePool, PrefixCache, Sequence},
//!     plan::{PlanOptions, Planner, Update},
//!     problem::{Batch, KvLayout, PageTable, Spec},
//! };
//!
//! // 8 query heads over 2 KV heads of 64 elements, bf16, causal.
//! let spec = Spec::new(8, 2, 64);
//! let mut pool = PagePool::new(32, 16);
//! let mut cache = PrefixCache::new(pool.page_size());
//!
//! // A first request brings a prompt of 48 tokens; the second begins with it and has 20 of its own.
//! let prompt: Vec<u32> = (0..48).collect();
//! let mut first = Sequence::default();
//! let _ = first.append(&mut pool, 48)?;
//! cache.insert(&mut pool, &prompt, &mut first);
//! let mut second = cache.acquire(&mut pool, &prompt);
//! assert_eq!(second.pages(), first.pages());
//!
//! // # The batch
//! // This step: one new token of the first request, 20 of the second. `append` makes room for their keys. It returns a page
//! // copy if the last page is shared and must be copied before it is written; here none is.
//! assert_eq!((first.append(&mut pool, 1)?, second.append(&mut pool, 20)?), (None, None));
//! let mut table = PageTable::new(pool.page_size(), pool.pages());
//! first.push_to(&mut table);
//! second.push_to(&mut table);
//! let batch = Batch::new(vec![0, 1, 21], table);
//! batch.check(&spec)?; // an error names what is wrong, with its values
//!
//! // # The plan
//! let cpu = Cpu::new();
//! let device = cpu.device();
//! let (mut planner, options) = (Planner::new(), PlanOptions::default());
//! let mut plan = planner.plan(&spec, &batch, &device, &options)?;
//! println!("{plan}");
//!
//! // # The run, once per layer
//! // New keys and values are written to their pages; in this example all of them are 1.
//! let elements = 32 * 16 * 2 * 64;
//! let (mut k, mut v) = (vec![bf16::ZERO; elements], vec![bf16::ZERO; elements]);
//! let mut kv = KvViewMut::new(&spec, KvLayout::Nhd, 16, &mut k, &mut v);
//! let new = vec![bf16::ONE; 69 * 2 * 64];
//! let table = &batch.parts[0].table;
//! let slots = [table.slots(0, 0..49)?, table.slots(1, 48..68)?].concat();
//! Cpu::append_paged_kv(&spec, 32, &slots, &new, &new, &mut kv)?;
//!
//! let q = vec![bf16::ONE; 21 * 8 * 64];
//! let (mut out, mut lse) = (vec![bf16::ZERO; q.len()], vec![0.0; 21 * 8]);
//! cpu.run(&plan, &q, &[kv.view()], &mut out, Some(&mut lse))?;
//! assert_eq!(out, q); // a weighted mean of values that are all 1
//!
//! // # The next step
//! // Both requests decode now. The numbers of queries differ from the previous step, so a new plan is made.
//! let decodes = |first: &Sequence, second: &Sequence| {
//!     let mut table = PageTable::new(16, 32);
//!     first.push_to(&mut table);
//!     second.push_to(&mut table);
//!     Batch::new(vec![0, 1, 2], table)
//! };
//! assert_eq!((first.append(&mut pool, 1)?, second.append(&mut pool, 1)?), (None, None));
//! let batch = decodes(&first, &second);
//! assert_eq!(planner.update(&spec, &batch, &device, &options, &mut plan)?, Update::Planned);
//! // From then on the plan is patched, as long as new tokens fit into the last pages.
//! assert_eq!((first.append(&mut pool, 1)?, second.append(&mut pool, 1)?), (None, None));
//! let batch = decodes(&first, &second);
//! assert_eq!(planner.update(&spec, &batch, &device, &options, &mut plan)?, Update::Patched);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What a plan is
//!
//! A [`Plan`](plan::Plan) is plain data: work items with their tiles and query heads, the places of partial
//! states, and the order in which they are merged. A plan can be printed and serialised, scheduled in time
//! ([`Plan::schedule`](plan::Plan::schedule)), measured in bytes and FLOPs ([`Plan::traffic`](plan::Plan::traffic)), checked
//! ([`Plan::verify`](plan::Plan::verify)) and updated from step to step ([`Planner::update`](plan::Planner::update)).
//! The same input gives the same plan, bit for bit. A [`Bound`](plan::Bound) gives the memory that plans need before
//! anything is allocated.
//!
//! The planner finds shared prefixes in the page tables; they are read once. If the sharing is known beforehand,
//! or masks are trees, compose a batch of several parts: [`Batch::share_prefixes`](problem::Batch::share_prefixes),
//! [`Part::token_level`](problem::Part::token_level).
//!
//! # Other kinds of attention
//!
//! Windows, soft caps and sinks are fields of the specification. The values of the sinks are passed to a run
//! ([`HeadTensors`](tensor::HeadTensors), on a GPU `gpu::RunTensors`). A field of the batch says which of the last 64 keys each
//! query sees ([`Batch::ancestors`](problem::Batch::ancestors)); [`Batch::ancestors_of`](problem::Batch::ancestors_of) computes
//! it for trees of draft tokens. [`Batch::push_mask`](problem::Batch::push_mask) says it of any keys. Anything else is a variant of
//! your own: hooks that run on the CPU, in the f64 reference, and in kernels compiled for them. Linear biases, biases by distance
//! and sigmoid weights come with the library (feature `unstable`, module `variant`).
//!
//! # Composing batches
//!
//! The crate `tandem-schedule` takes requests and composes hybrid batches. It has a cost model and a simulator.
//!
//! # On a GPU
//!
//! With the feature `cuda`, the module `gpu` runs plans on memory of any CUDA library and on any stream. A workspace is allocated
//! once; a plan is uploaded once per step and run once per layer. Without a driver, calls return a typed error.
//! [`examples/gpu_serving.rs`](https://github.com/tandem-attn/tandem-attn/blob/main/examples/gpu_serving.rs) is a complete
//! serving loop: a prompt, a hybrid step, decodes from a captured CUDA graph.
//! [`DeviceDescription::supports`](plan::DeviceDescription::supports) says, when a model is loaded, whether there
//! are kernels for its heads.
//!
//! # In a program that already has tensors
//!
//! Nothing has to be copied. For element types known only at run time, fused projections, and pools in any order, pass
//! [`TensorRef`](tensor::TensorRef)s to [`Cpu::run_tensors`] and [`Cpu::append_rows`]. Block tables are accepted as they are
//! ([`PageTable::try_push`](problem::PageTable::try_push)). The features `cust` and `cudarc` accept the objects of those crates,
//! and the crate `tandem-candle` makes the calls on candle's tensors.
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | none | the planner, the CPU backend, the bookkeeping of pages |
//! | `cuda` | the module `gpu` with compiled kernels; needs neither a driver nor a toolkit to build |
//! | `cudarc`, `cust` | contexts and memory of these crates (cudarc 0.19, cust 0.3) as they are, with `unstable` also streams; each turns on `cuda` |
//! | `emulator` | the module `emulated`: the same kernels on an emulated GPU, for tests; turns on `cuda` |
//! | `unstable` | names that may change with any release, see below |
//! | `build-kernels` | compiles the kernels from their sources, for changed kernels |
//!
//! # What may change
//!
//! The names that are visible without the feature `unstable` are for serving programs. The feature `unstable` adds two kinds of
//! names, which may change with any release:
//!
//! - interfaces that are not settled yet: several GPUs (`shard`, `gpu::Rank`), the step around attention (`step`), variants of
//!   your own (`variant`, `reference`), block masks and page lists by head (`kv`);
//! - internals for tools and tests: parts of plans, tiles and their costs, calls of single kernels and their parameters.

#![cfg_attr(docsrs, feature(doc_cfg))]
// Functions that only non-public internals call.
#![cfg_attr(not(feature = "unstable"), allow(dead_code, unused_imports))]

pub use error::Error;
pub use exec::Cpu;
#[cfg(feature = "emulator")]
#[doc(inline)]
pub use exec::emulated;
#[cfg(feature = "cuda")]
pub use exec::gpu;
/// The 16-bit floats of tensors, in the version that this crate uses.
pub use half;

/// Names that are private to this crate, unless its feature `unstable` is on.
macro_rules! unstable {
    ($($(#[$attribute:meta])* use $first:ident $(:: $rest:tt)+;)+) => { $(
        #[cfg(feature = "unstable")]
        $(#[$attribute])*
        pub use $first $(:: $rest)+;
        #[cfg(not(feature = "unstable"))]
        $(#[$attribute])*
        #[allow(unused_imports)]
        pub(crate) use $first $(:: $rest)+;
    )+ };
    ($(#[$attribute:meta])* mod $name:ident { $($item:item)* }) => {
        #[cfg(feature = "unstable")]
        $(#[$attribute])*
        pub mod $name { $($item)* }
        #[cfg(not(feature = "unstable"))]
        #[allow(unused_imports)]
        pub(crate) mod $name { $($item)* }
    };
}

unstable! {
    use kernels_gpu::{Hooks, HooksName, abi, math, state};
}

unstable! {
    /// Hooks for what differs between models: code that runs at named places of the attention algorithm.
    ///
    /// A variant of your own runs on the CPU and in the reference as it is. On a GPU it needs kernels that are compiled for it
    /// ([guide](https://github.com/tandem-attn/tandem-attn/blob/main/docs/guide/own-variant.md)).
    ///
    /// ```
    /// use tandem_attn::{
    ///     Cpu,
    ///     kv::KvView,
    ///     plan::{PlanOptions, Planner},
    ///     problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    ///     reference,
    ///     tensor::HeadTensors,
    ///     variant::{Hook, Pair, Real, Variant, VariantParams},
    /// };
    ///
    /// /// The last keys get more weight, and no query sees the key before its own.
    /// #[derive(Clone, Copy)]
    /// struct Recent(VariantParams);
    ///
    /// impl Variant for Recent {
    ///     fn params(&self) -> &VariantParams {
    ///         &self.0
    ///     }
    ///
    ///     /// In base 2.
    ///     fn logit<R: Real>(&self, dot: R, at: Pair) -> impl Hook<R> {
    ///         let bonus = if at.distance < 4.0 { 0.5 } else { 0.0 };
    ///         dot * R::from_f32(self.0.scale_log2) + R::from_f32(bonus)
    ///     }
    ///
    ///     fn visible(&self, at: Pair) -> impl Hook<bool> {
    ///         at.distance != 1.0
    ///     }
    /// }
    ///
    /// let spec = Spec::new(2, 1, 16).with_dtype(Dtype::F32);
    /// let mut table = PageTable::new(8, 2);
    /// table.push(&[1, 0], 11);
    /// let (cpu, batch) = (Cpu::new(), Batch::new(vec![0, 3], table));
    /// let plan = Planner::new().plan(&spec, &batch, &cpu.device(), &PlanOptions::default())?;
    ///
    /// let numbers: Vec<f32> = (0..256_u16).map(|index| f32::from(index * 37 % 64) / 32.0 - 1.0).collect();
    /// let (q, kv) = (&numbers[..96], KvView::new(&spec, KvLayout::Nhd, 8, &numbers, &numbers));
    /// let (variant, none, mut out) = (Recent(spec.variant_params()), HeadTensors::default(), [0.0_f32; 96]);
    /// cpu.run_with(&variant, &plan, q, &[kv], &mut out, None, &none)?;
    ///
    /// let right = reference::attention_with(&variant, &spec, &batch, q, &[kv], &none)?.out;
    /// assert!(out.iter().zip(&right).all(|(&out, right)| (f64::from(out) - right).abs() < 1e-5));
    /// # Ok::<(), tandem_attn::Error>(())
    /// ```
    mod variant {
        pub use kernels_gpu::{
            abi::VariantParams,
            math::Real,
            variant::{
                Derived, FromLaunch, Hook, Key, OwnDefect, Pair, Query, Sigmoid, Standard, Variant,
            },
        };
    }
}

unstable! {
    /// Variants whose kernels come with the library.
    mod variants {
        pub use kernels_gpu::{
            variant::Sigmoid,
            variants::{
                ALIBI, Alibi, BUILT_IN, BiasTable, DISTANCE_BIAS, DistanceBias, SIGMOID, SigmoidBias,
                Slopes,
            },
        };
    }
}

/// The programs of the README.
#[cfg(all(doctest, feature = "cuda"))]
#[doc = include_str!("../README.md")]
struct Readme;

// Its symbols replace those of the driver. Without a use, a dependency is not linked.
#[cfg(feature = "cust")]
use libcuda_link as _;

mod checks;
mod error;
pub mod kv;
pub mod plan;
pub mod problem;
pub mod tensor;

// Module files are declared here directly, because rustfmt does not find those that a macro declares.
#[cfg(feature = "unstable")]
pub mod exec;
#[cfg(not(feature = "unstable"))]
mod exec;
#[cfg(feature = "unstable")]
pub mod reference;
#[cfg(not(feature = "unstable"))]
mod reference;
#[cfg(feature = "unstable")]
pub mod shard;
#[cfg(not(feature = "unstable"))]
mod shard;
#[cfg(feature = "unstable")]
pub mod step;
#[cfg(not(feature = "unstable"))]
mod step;
