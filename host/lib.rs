//! Attention for LLM serving, in pure Rust.
//!
//! One step of a serving loop is a batch of prompts and decodes over paged keys and values. It is *planned* once,
//! by a pure function on the CPU, and the plan is *run* once per layer, on the CPU or on an NVIDIA GPU. This page
//! is the tour, in the order in which things are called.
//!
//! # The heads, and whose keys are where
//!
//! A [`Spec`](problem::Spec) describes the heads of a layer: how many, how long, of which types, with which mask.
//! Keys and values live in pages. A [`PagePool`](kv::PagePool) says which are free, a [`Sequence`](kv::Sequence)
//! has those of a request, and a [`PrefixCache`](kv::PrefixCache) gives requests that begin alike the same pages.
//! All three are bookkeeping only: the memory is yours.
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
//! // This step: one new token of the first request, 20 of the second. Their keys count: room is made for them first.
//! // A page that others hold, too, is traded for another one and has to be copied; here none is.
//! assert_eq!((first.append(&mut pool, 1)?, second.append(&mut pool, 20)?), (None, None));
//! let mut table = PageTable::new(pool.page_size(), pool.pages());
//! first.push_to(&mut table);
//! second.push_to(&mut table);
//! let batch = Batch::new(vec![0, 1, 21], table);
//! batch.check(&spec)?; // whatever is wrong is named, with its values
//!
//! // # The plan
//! let cpu = Cpu::new();
//! let device = cpu.device();
//! let (mut planner, options) = (Planner::new(), PlanOptions::default());
//! let mut plan = planner.plan(&spec, &batch, &device, &options)?;
//! println!("{plan}");
//!
//! // # The run, once per layer
//! // New keys and values go to their pages; here all of them are one.
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
//! assert_eq!(out, q); // a mean of values that are all one
//!
//! // # The next step
//! // Both requests decode now: other queries than before, so the plan is made anew.
//! let decodes = |first: &Sequence, second: &Sequence| {
//!     let mut table = PageTable::new(16, 32);
//!     first.push_to(&mut table);
//!     second.push_to(&mut table);
//!     Batch::new(vec![0, 1, 2], table)
//! };
//! assert_eq!((first.append(&mut pool, 1)?, second.append(&mut pool, 1)?), (None, None));
//! let batch = decodes(&first, &second);
//! assert_eq!(planner.update(&spec, &batch, &device, &options, &mut plan)?, Update::Planned);
//! // From then on it is patched, as long as new tokens fit into the last pages.
//! assert_eq!((first.append(&mut pool, 1)?, second.append(&mut pool, 1)?), (None, None));
//! let batch = decodes(&first, &second);
//! assert_eq!(planner.update(&spec, &batch, &device, &options, &mut plan)?, Update::Patched);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What a plan is
//!
//! A [`Plan`](plan::Plan) is plain data: items of work, the tile and the query heads that go together, where partial
//! states go and in which order they are merged. It prints, it serialises, it can be scheduled in time
//! ([`Plan::schedule`](plan::Plan::schedule)), weighed ([`Plan::traffic`](plan::Plan::traffic)), checked
//! ([`Plan::verify`](plan::Plan::verify)) and kept from step to step ([`Planner::update`](plan::Planner::update)).
//! The same input gives the same plan, bit for bit. Memory is known before anything is allocated:
//! [`Bound`](plan::Bound).
//!
//! Prefixes that requests share are found in the page tables and read once. Where the sharing is known beforehand,
//! or masks are trees, compose a batch of several parts: [`Batch::share_prefixes`](problem::Batch::share_prefixes),
//! [`Part::token_level`](problem::Part::token_level).
//!
//! # Other kinds of attention
//!
//! Windows, soft caps and sinks are fields of the specification; a run is given the sinks
//! ([`HeadTensors`](tensor::HeadTensors), on a GPU `gpu::RunTensors`). Which of the last 64 keys each query sees
//! is a field of the batch ([`Batch::ancestors`](problem::Batch::ancestors)), from trees of drafted tokens by
//! [`Batch::ancestors_of`](problem::Batch::ancestors_of). Anything else is a variant of your own, whose hooks the CPU, a reference
//! in f64 and kernels that are compiled for it run; linear biases, biases by distance and sigmoid weights come with the
//! library (feature `unstable`, module `variant`).
//!
//! # Which batches
//!
//! The crate `tandem-schedule` composes them: requests in, hybrid batches out, with costs and a simulator.
//!
//! # On a GPU
//!
//! With the feature `cuda`, `gpu` runs on memory of any CUDA library, on any stream: a workspace is allocated
//! once, a plan is uploaded once per step, and run once per layer. Without a driver it says so.
//! [`examples/gpu_serving.rs`](https://docs.rs/crate/tandem-attn/latest/source/examples/gpu_serving.rs) is a whole
//! serving loop: a prompt, a hybrid step, decodes from a captured graph.
//! [`DeviceDescription::supports`](plan::DeviceDescription::supports) says, when a model is loaded, whether there
//! are kernels for its heads.
//!
//! # In a program that has tensors already
//!
//! Nothing has to be copied. Element types that are known at run time, fused projections and pools in any order are
//! [`TensorRef`](tensor::TensorRef)s for [`Cpu::run_tensors`] and [`Cpu::append_rows`]; block tables go in as they are
//! ([`PageTable::try_push`](problem::PageTable::try_push)). Objects of `cust` and `cudarc` have features of those
//! names, and the crate `tandem-candle` makes the calls on candle's tensors.
//!
//! # What may change
//!
//! What this documentation shows without the feature `unstable` is for programs that serve. That feature adds two kinds of
//! names, which change with any release:
//!
//! - what has no settled interface yet: several GPUs (`shard`, `gpu::Rank`), the step around attention (`step`), variants of
//!   your own (`variant`, `reference`), block masks and page lists by head (`kv`);
//! - what tools and tests look into: parts of plans, tiles and their costs, calls of single kernels and what these are given.

#![cfg_attr(docsrs, feature(doc_cfg))]
// What only internals that are not public call.
#![cfg_attr(not(feature = "unstable"), allow(dead_code, unused_imports))]

pub use error::Error;
pub use exec::Cpu;
#[cfg(feature = "emulator")]
#[doc(inline)]
pub use exec::emulated;
#[cfg(feature = "cuda")]
pub use exec::gpu;
/// The 16-bit floats of tensors, in the version that this crate takes.
pub use half;

/// Names that are of this crate alone, unless its feature `unstable` is on.
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
    /// What may differ between models, as code at named places of one algorithm.
    ///
    /// A variant of your own runs on the CPU and in the reference as it is. On a GPU it takes kernels that are compiled for it
    /// ([guide](https://docs.rs/crate/tandem-attn/latest/source/docs/guide/own-variant.md)).
    ///
    /// ```
    /// use tandem_attn::{
    ///     Cpu,
    ///     kv::KvView,
    ///     plan::{PlanOptions, Planner},
    ///     problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    ///     reference,
    ///     tensor::HeadTensors,
    ///     variant::{Pair, Real, Variant, VariantParams},
    /// };
    ///
    /// /// The last keys count more, and no query sees the key in front of its own.
    /// #[derive(Clone, Copy)]
    /// struct Recent(VariantParams);
    ///
    /// impl Variant for Recent {
    ///     // Hooks that are not announced are not called.
    ///     const TRANSFORMS_LOGITS: bool = true;
    ///     const MASKS: bool = true;
    ///
    ///     fn params(&self) -> &VariantParams {
    ///         &self.0
    ///     }
    ///
    ///     /// In base 2.
    ///     fn logit<R: Real>(&self, dot: R, at: Pair) -> R {
    ///         let bonus = if at.distance < 4.0 { 0.5 } else { 0.0 };
    ///         dot * R::from_f32(self.0.scale_log2) + R::from_f32(bonus)
    ///     }
    ///
    ///     fn visible(&self, at: Pair) -> bool {
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
            variant::{FromLaunch, Key, OwnDefect, Pair, Query, Sigmoid, Standard, Variant},
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

/// The programs of the front page.
#[cfg(all(doctest, feature = "cuda"))]
#[doc = include_str!("../README.md")]
struct Readme;

// Its symbols stand in for the driver's; a dependency that nobody names is not linked.
#[cfg(feature = "cust")]
use libcuda_link as _;

mod error;
pub mod kv;
pub mod plan;
pub mod problem;
pub mod tensor;

// Files of modules stand here as they are, for rustfmt finds none that a macro names.
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
