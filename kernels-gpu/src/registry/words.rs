//! The words in which a row describes its kernel: family, architecture, what it does, how keys come, element types.

use crate::passes;

/// A module of kernels: what is compiled together, and a feature of this crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// Hopper's prefill.
    Prefill,
    /// Hopper's prefill with products of 8 bits.
    PrefillF8,
    /// Hopper's decode of 8 and 16 rows.
    DecodeMma,
    /// Hopper's decode of 64 and 128 rows, of 8 beside a prefill, and of heads of 512.
    DecodeWgmma,
    /// Hopper's latent attention.
    Mla,
    /// Prefill with the instructions of Ampere.
    Sm80Prefill,
    /// Decode with the instructions of Ampere.
    Sm80Decode,
    /// Prefill and decode in one kernel, with the instructions of Ampere.
    Pod,
    /// What goes around attention.
    Passes,
    /// The step around attention.
    Step,
    /// To pages of 8 bits, from them, and to pages of keys that are turned.
    Quantise,
    /// What the library has of [variants](crate::variants).
    Variants,
    /// What measures the hardware.
    Measure,
}

impl Family {
    /// As the feature is called, and the module.
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
    /// Ampere; everything after it has them, too.
    Sm80,
    /// Hopper, and nothing else.
    Sm90a,
}

impl Arch {
    /// Whether GPUs of this compute capability have them.
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
    /// Attention of contiguous rows.
    Prefill,
    /// Attention of gathered rows, all query heads of a KV head in a tile.
    Decode,
    /// Both.
    Pod,
    /// Merges partial states.
    Merge(passes::merge::Shape),
    /// Merges what several GPUs computed.
    MergeRanks,
    /// Appends keys and values to their pages.
    Append {
        /// What a thread moves at a time.
        vector_bytes: u32,
    },
    /// Appends keys and values of 16 bits to pages of 8.
    Quantise,
    /// Appends keys of latent attention to rows of 656 bytes.
    QuantiseLatent,
    /// Widens keys and values of 8 bits by the scale of each token, for a prefill.
    Widen,
    /// Turns queries and keys by their positions, for a prefill.
    Turn,
    /// Brings heads to the dimension of a kernel, and back.
    Pad,
    /// Rounds queries to 16 bits.
    Narrow,
    /// From a fused projection to queries, and to keys and values in their pages.
    QkvStep {
        /// Heads of a thread.
        heads: u32,
        /// Pages are of 8 bits.
        quantises: bool,
    },
    /// Divides rows by the root of their mean square.
    RmsNorm {
        /// Vectors of a thread, at most.
        vectors: u32,
    },
    /// Activates gates and multiplies.
    Gate,
    /// Looks rows of a table up.
    Embed,
    /// Draws tokens from logits.
    Sample,
    /// Reads as fast as that can be done.
    MeasureRead,
    /// Multiplies as fast as that can be done.
    MeasureProducts,
    /// Runs two loops at two limits.
    MeasureOverlap,
}

/// How keys and values come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Loads {
    /// By the tensor memory accelerator: pages of a multiple of 8 tokens.
    Pages,
    /// Row by row: pages of any size.
    Rows,
    /// Either way, as the launch says.
    PagesOrRows,
}

/// What outputs are made of, and in attention queries, keys and values.
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
    /// Whatever it is: bytes are moved.
    Any,
}
