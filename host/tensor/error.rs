//! Errors of tensor shapes.

use thiserror::Error;

use crate::problem::{Dtype, PageTable};

/// A tensor that does not match the plan or the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// A plan whose part has heads that its query tokens do not have.
    #[error("part {part} of the plan has {heads} heads: plan the batch again")]
    PartHeads {
        /// The part.
        part: usize,
        /// Its heads.
        heads: u32,
    },
    /// A tensor of the wrong length.
    #[error("{name} has {got} elements, but {shape} needs {expected}")]
    Length {
        /// The tensor.
        name: &'static str,
        /// Its length.
        got: usize,
        /// Its shape, in words.
        shape: &'static str,
        /// The length of that shape.
        expected: usize,
    },
    /// A tensor of the wrong type.
    #[error(
        "{name} is {got:?}, but the spec says {expected:?}: convert it, or change the spec and plan again"
    )]
    Dtype {
        /// The tensor.
        name: &'static str,
        /// Its type.
        got: Dtype,
        /// The type in the spec.
        expected: Dtype,
    },
    /// Not one KV view for each part.
    #[error(
        "{got} KV views for {expected} parts: give one view for each part of the batch, in order"
    )]
    Parts {
        /// Views given.
        got: usize,
        /// Parts of the batch.
        expected: usize,
    },
    /// A specification without KV heads.
    #[error("the KV view of part {part} has no row to read, as the specification has no KV heads")]
    NoKvHeads {
        /// The part.
        part: usize,
    },
    /// A view with pages of another size.
    #[error(
        "the KV view of part {part} has pages of {got} tokens, but its table has pages of {expected}: use one page \
         size"
    )]
    PageSize {
        /// The part.
        part: usize,
        /// Page size of the view.
        got: u32,
        /// Page size of the table.
        expected: u32,
    },
    /// A slice that ends before its pool does.
    #[error(
        "{tensor} of part {part} has {got} elements, but {pool_pages} pages with its strides reach to {needed}: \
         pass the whole pool, or a table with fewer pages"
    )]
    PoolTooSmall {
        /// The part.
        part: usize,
        /// Keys or values.
        tensor: &'static str,
        /// Elements in the slice.
        got: usize,
        /// Elements needed.
        needed: usize,
        /// Pages of the pool.
        pool_pages: u32,
    },
    /// A batch whose keys are chosen on the device, in a run that is not given their indices.
    #[error(
        "the keys of part {part} are chosen on the device (Batch::of_top_k), and this run has no indices: give them to a \
         run on a GPU (RunTensors::with_indices), or make the batch from indices on the host (Batch::of_indices)"
    )]
    ChosenOnDevice {
        /// The part.
        part: usize,
    },
    /// Scales for keys and values that are not of 8 bits.
    #[error(
        "scales are given for keys and values in {dtype:?}, but only 8-bit types have scales: use `KvScales::One`"
    )]
    Scaled {
        /// Type of keys and values.
        dtype: Dtype,
    },
    /// A query token of a request without scales.
    #[error(
        "query token {token} belongs to request {got}, but there are scales for {requests} requests: count requests \
         from 0, and give scales for each"
    )]
    NoRequest {
        /// The query token.
        token: usize,
        /// Its request.
        got: u32,
        /// Requests with scales.
        requests: usize,
    },
    /// A tensor that the specification needs, but that was not given.
    #[error(
        "the specification needs {name}: give them to the run, or remove them from the variant"
    )]
    Missing {
        /// The tensor.
        name: &'static str,
    },
    /// Hooks that the library does not know by name: their code must be passed.
    #[error(
        "the specification's variant {hooks:?} has its own code: pass it to `Cpu::run_with` or \
         `reference::attention_with`, or run the plan on a GPU"
    )]
    Hooks {
        /// Their name.
        hooks: kernels_gpu::HooksName,
    },
    /// Data for a variant's hooks of another size than theirs.
    #[error("{}", own_bytes(*.hooks, *.got, *.expected))]
    OwnBytes {
        /// The variant that the specification names, if any.
        hooks: Option<kernels_gpu::HooksName>,
        /// Bytes given.
        got: usize,
        /// Bytes of its `FromLaunch::Own`.
        expected: usize,
    },
    /// Invalid data for a variant's hooks.
    #[error("the variant {hooks:?} was given {name}: {got}; give {rule}")]
    Own {
        /// The variant.
        hooks: kernels_gpu::HooksName,
        /// The number that is wrong.
        name: &'static str,
        /// What it is.
        got: u64,
        /// What it must be.
        rule: &'static str,
    },
    /// A variant and a specification that disagree about whether weights are a softmax.
    #[error(
        "the variant's weights are {}, but the specification says that they are {}: name the variant with \
         `Spec::with_hooks`, and plan again",
        names_softmax(*.softmax),
        names_softmax(!*.softmax)
    )]
    Softmax {
        /// What the variant says.
        softmax: bool,
    },
    /// Sinks with weights that are not a softmax.
    #[error(
        "sinks are given, but the variant's weights are not a softmax: remove the sinks, which only change the \
         denominator of a softmax"
    )]
    SinksWithoutSoftmax,
    /// A tensor that the specification does not need.
    #[error(
        "{name} are given, but the specification has none: remove them, or add them to the variant and plan again"
    )]
    Surplus {
        /// The tensor.
        name: &'static str,
    },
    /// A shape that reaches past the elements that are given for it.
    #[error("{got} elements are given, but the shape with its strides needs {needed}")]
    TooShort {
        /// Elements given.
        got: usize,
        /// Elements needed.
        needed: usize,
    },
    /// Bytes that are not elements of a type.
    #[error(
        "{got} bytes are not whole elements of {dtype:?}: their number and their address must be multiples of {}",
        .dtype.bytes()
    )]
    Bytes {
        /// Bytes given.
        got: usize,
        /// The type that they were to be of.
        dtype: Dtype,
    },
    /// Keys and values in one pool that differ in head dimension.
    #[error(
        "keys of {head_dim_qk} and values of {head_dim_v} elements cannot be stored in pairs: use a separate pool \
         for each"
    )]
    Unpaired {
        /// Head dimension of keys.
        head_dim_qk: u32,
        /// Head dimension of values.
        head_dim_v: u32,
    },
    /// Latent attention with values that are not a part of the keys.
    #[error(
        "the values of part {part} are not the first elements of its keys, as the latent spec requires: use one \
         pool (KvView::latent), two (KvView::latent_parts), or a spec that is not latent"
    )]
    NotLatent {
        /// The part.
        part: usize,
    },
    /// A pool with one row for each token, for several KV heads.
    #[error(
        "the pool of part {part} has one row for each token, but the spec has {kv_heads} KV heads: use the pool `latent` \
         with Spec::latent only, and `new` for other heads"
    )]
    OneHead {
        /// The part.
        part: usize,
        /// KV heads of the specification.
        kv_heads: u32,
    },
    /// The last elements of keys in a pool of their own, for keys that have no such elements.
    #[error(
        "part {part} has a pool for elements that only the keys have (the field `rope`){}: use KvView::latent_parts with \
         Spec::latent and numbers without scales in their rows, or a view with one pool of keys",
        if *.latent { ", and rows with their scales" } else { ", but the spec is not latent" }
    )]
    NotInParts {
        /// The part.
        part: usize,
        /// Whether the specification is latent.
        latent: bool,
    },
    /// Rows of 656 bytes for heads that do not have them.
    #[error(
        "rows with their scales (KvScales::InRow) need latent attention with keys of 576 and values of 512 elements \
         in F8E4M3, but got keys of {head_dim_qk} and values of {head_dim_v} in {dtype:?}, latent: {latent}; use \
         `Spec::latent(heads, 512, 64)` with keys in F8E4M3, or a pool without such rows"
    )]
    NoRows656 {
        /// Whether the specification is latent.
        latent: bool,
        /// Elements of its keys.
        head_dim_qk: u32,
        /// Elements of its values.
        head_dim_v: u32,
        /// Type of keys and values.
        dtype: Dtype,
    },
    /// A pool that ends within a page.
    #[error("the pool has {got} elements, but a page has {page}: pass whole pages")]
    PartOfPage {
        /// Elements of the pool.
        got: usize,
        /// Elements of a page.
        page: usize,
    },
    /// A page that is not in a pool.
    #[error(
        "page {got} is outside the pool of {pages} pages: correct the id, or give the call the whole pool"
    )]
    NoPage {
        /// The page.
        got: u32,
        /// Pages of the pool.
        pages: u32,
    },
}

const fn names_softmax(softmax: bool) -> &'static str {
    if softmax {
        "a softmax"
    } else {
        "not a softmax"
    }
}

fn own_bytes(hooks: Option<kernels_gpu::HooksName>, got: usize, expected: usize) -> String {
    match hooks {
        Some(hooks) => format!(
            "the run was given {got} bytes of data for the variant {hooks:?}, whose `FromLaunch::Own` has {expected}: pass one \
             with `RunTensors::with_own`"
        ),
        None => format!(
            "the run was given {got} bytes of data for a variant, but the specification names none: leave them out, or name the \
             variant with `Spec::with_hooks`"
        ),
    }
}

impl ShapeError {
    /// Whether a slice is as long as its shape says.
    pub(crate) const fn length(
        name: &'static str,
        got: usize,
        shape: &'static str,
        expected: usize,
    ) -> Result<(), Self> {
        if got == expected {
            return Ok(());
        }
        Err(Self::Length {
            name,
            got,
            shape,
            expected,
        })
    }
    /// Whether a part names its keys: its pages are those of a pool.
    pub(crate) const fn named(part: usize, page_size: u32, pages: u32) -> Result<(), Self> {
        match page_size == 1 && pages > PageTable::CHOSEN {
            true => Err(Self::ChosenOnDevice { part }),
            false => Ok(()),
        }
    }
}
