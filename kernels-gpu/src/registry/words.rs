//! The enums by which a row describes its kernel: family, architecture, operation, loads, element types.

use crate::passes;

/// A family of kernels, compiled to one module; each is a feature of this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// Hopper's prefill.
    Prefill,
    /// Hopper's prefill with 8-bit products.
    PrefillF8,
    /// Hopper's decode with tiles of 8 and 16 rows.
    DecodeMma,
    /// Hopper's decode with tiles of 64 and 128 rows, of 8 rows co-resident with a prefill, and for values of 512.
    DecodeWgmma,
    /// Hopper's latent attention (MLA).
    Mla,
    /// Prefill with Ampere instructions.
    Sm80Prefill,
    /// Decode with Ampere instructions.
    Sm80Decode,
    /// Prefill and decode in one kernel, with Ampere instructions.
    Pod,
    /// Kernels around attention: merges, appends, conversions.
    Passes,
    /// The step around attention.
    Step,
    /// Conversions to and from 8-bit pages, and rotary embeddings of keys.
    Quantise,
    /// Kernels of the library's [variants](crate::variants).
    Variants,
    /// Kernels that measure the hardware.
    Measure,
}

impl Family {
    /// The name of the feature and of the module.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::PrefillF8 => "prefill_f8",
            Self::DecodeMma => "decode_mma",
            Self::DecodeWgmma => "decode_wgmma",
            Self::Mla => "mla",
            Self::Sm80Prefill => "sm80_prefill",
            Self::Sm80Decode => "sm80_decode",
            Self::Pod => "pod",
            Self::Passes => "passes",
            Self::Step => "step",
            Self::Quantise => "quantise",
            Self::Variants => "variants",
            Self::Measure => "measure",
        }
    }
}

/// The architecture whose instructions a kernel needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Arch {
    /// Ampere and later.
    Sm80,
    /// Hopper only.
    Sm90a,
}

impl Arch {
    /// Whether GPUs of this compute capability have its instructions.
    #[must_use]
    pub const fn runs_on(self, (major, minor): (u32, u32)) -> bool {
        match self {
            Self::Sm80 => major >= 8,
            Self::Sm90a => major == 9 && minor == 0,
        }
    }
}

/// What a kernel does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Attention with contiguous query rows.
    Prefill,
    /// Attention with gathered query rows, all query heads of a KV head in a tile (pack_gqa).
    Decode,
    /// Prefill and decode in one launch.
    Pod,
    /// Merges partial states.
    Merge(passes::merge::Shape),
    /// Merges the results of several GPUs.
    MergeRanks,
    /// Merges results of the same queries.
    MergeResults,
    /// Appends keys and values to their pages.
    Append {
        /// Bytes of a thread's loads and stores.
        vector_bytes: u32,
    },
    /// Appends 16-bit keys and values to 8-bit pages.
    Quantise,
    /// Appends keys of latent attention as rows of 656 bytes.
    QuantiseLatent,
    /// Converts 8-bit keys and values to 16 bits with a scale per token, for a prefill.
    Widen,
    /// Applies rotary embeddings to keys, for a prefill.
    Turn,
    /// Pads heads to the dimension of a kernel, and back.
    Pad,
    /// Rounds queries to 16 bits.
    Narrow,
    /// Turns a fused QKV projection into queries, and appends keys and values to their pages.
    QkvStep {
        /// Heads per thread.
        heads: u32,
        /// Pages are 8-bit.
        quantises: bool,
    },
    /// RMS norm of rows.
    RmsNorm {
        /// The largest number of vectors per thread.
        vectors: u32,
    },
    /// Applies the activation to gates, and multiplies.
    Gate,
    /// Looks up rows of a table.
    Embed,
    /// Draws tokens from logits.
    Sample,
    /// Adds biases and penalties to logits, or takes them back.
    Adjust,
    /// Log-probabilities of tokens.
    LogProbs,
    /// Measures the bandwidth of reads.
    MeasureRead,
    /// Measures the rate of tensor-core products.
    MeasureProducts,
    /// Runs a memory-bound and a compute-bound loop.
    MeasureOverlap,
}

/// How keys and values are loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loads {
    /// By TMA: pages of a multiple of 8 tokens.
    Pages,
    /// Row by row: pages of any size.
    Rows,
    /// Either way; the launch selects.
    PagesOrRows,
}

/// The type of outputs and, for attention, of queries, keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// Single precision.
    F32,
    /// 8-bit float with 4 exponent bits.
    E4m3,
    /// 8-bit float with 5 exponent bits.
    E5m2,
    /// Any type: the kernel copies bytes.
    Any,
}
