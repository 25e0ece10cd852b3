//! Variants, beside the standard one, whose kernels come with the library.

use bytemuck::{Pod, Zeroable};

use crate::{
    abi::VariantParams,
    common::{
        math::{Real, recip},
        variant::{FromLaunch, Hook, OwnDefect, Pair, Query, Sigmoid, Variant},
    },
};

/// Attention with linear biases (ALiBi; Press et al., 2022): the logit of a key `d` positions before the query is
/// reduced by the head's slope times `d`.
///
/// It reads its slopes from an address, so making it is unsafe, on the CPU as in a kernel:
///
/// ```compile_fail,E0133
/// use kernels_gpu::{abi::VariantParams, variant::FromLaunch, variants::{Alibi, Slopes}};
///
/// fn of_a_device_address(params: VariantParams) -> Alibi {
///     Alibi::from_launch(params, &Slopes { address: 1 << 20 })
/// }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Alibi {
    params: VariantParams,
    slopes: Slopes,
}

/// The address of the slopes of [`Alibi`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Slopes {
    /// Address of one f32 per query head, in the memory of the device that computes; in natural logits per position.
    pub address: u64,
}

impl Variant for Alibi {
    const KEEPS_UNIT: bool = true;
    const LINEAR: bool = true;

    #[inline(always)]
    fn params(&self) -> &VariantParams {
        &self.params
    }

    #[inline(always)]
    fn of_row(&self, at: Query) -> f32 {
        // SAFETY: the creator of the variant guarantees the slopes.
        let slope = unsafe { *(self.slopes.address as *const f32).add(at.head as usize) };
        -slope * recip(self.params.scale)
    }

    #[inline(always)]
    fn logit<R: Real>(&self, dot: R, at: Pair) -> impl Hook<R> {
        R::from_f32(at.of_row).mul_add(R::from_f32(at.distance), dot)
    }
}

/// Checks that an address is not null and aligned for f32.
const fn check_address(address: u64) -> Result<(), OwnDefect> {
    if address == 0 || !address.is_multiple_of(4) {
        return Err(OwnDefect {
            name: "address",
            got: address,
            rule: "that of f32 in the memory of whoever computes: not 0, and a multiple of 4",
        });
    }
    Ok(())
}

impl FromLaunch for Alibi {
    type Own = Slopes;

    fn check(own: &Slopes, _: u32) -> Result<(), OwnDefect> {
        check_address(own.address)
    }

    #[inline(always)]
    unsafe fn from_launch(params: VariantParams, own: &Slopes) -> Self {
        Self {
            params,
            slopes: *own,
        }
    }
}

/// The parameters of [`Sigmoid`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct SigmoidBias {
    /// Added to the scaled dot product, usually −ln(number of keys).
    pub bias: f32,
}

impl FromLaunch for Sigmoid {
    type Own = SigmoidBias;

    #[inline(always)]
    unsafe fn from_launch(params: VariantParams, own: &SigmoidBias) -> Self {
        Self {
            params,
            bias: own.bias,
        }
    }
}

/// Attention with a table of biases by query head and distance: relative position biases as in T5, with its buckets
/// expanded to one entry per distance.
///
/// A logit becomes `scale · dot + table[head][distance − first]`. The distance is the query's position minus the key's;
/// distances outside the table use its nearest entry.
#[derive(Clone, Copy, Debug)]
pub struct DistanceBias {
    params: VariantParams,
    table: BiasTable,
}

/// The table of [`DistanceBias`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct BiasTable {
    /// Address of `[heads, entries]` f32 in natural logits, in the memory of the device that computes.
    pub address: u64,
    /// Query heads.
    pub heads: u32,
    /// Entries per head, at least one.
    pub entries: u32,
    /// The distance of a head's first entry: 0 with causal attention, otherwise minus the number of later keys that
    /// have an entry.
    pub first: i32,
    /// Zero.
    pub reserved: u32,
}

impl BiasTable {
    /// Limit of the entries of all heads together, and of the magnitude of `first`.
    const MOST: u32 = 1 << 30;

    /// A table of `len` numbers at an address.
    ///
    /// # Errors
    /// If `len` is not a positive multiple of `heads`, is too large, or the address cannot be that of an f32.
    pub fn new(address: u64, len: usize, heads: u32, first: i32) -> Result<Self, OwnDefect> {
        let of_head = len.checked_div(heads as usize).unwrap_or(0);
        if of_head == 0 || len > Self::MOST as usize || len != of_head * heads as usize {
            return Err(OwnDefect {
                name: "numbers in the table",
                got: len as u64,
                rule: "as many for each query head, at least one, and up to 2³⁰ in all",
            });
        }
        let table = Self {
            address,
            heads,
            entries: of_head as u32,
            first,
            reserved: 0,
        };
        table.check_extent()?;
        Ok(table)
    }

    fn check_extent(&self) -> Result<(), OwnDefect> {
        let all = u64::from(self.heads) * u64::from(self.entries);
        if self.entries == 0 || all > Self::MOST.into() {
            return Err(OwnDefect {
                name: "entries of a head",
                got: self.entries.into(),
                rule: "at least one, and up to 2³⁰ of all heads",
            });
        }
        if self.first.unsigned_abs() > Self::MOST {
            return Err(OwnDefect {
                name: "how far the first entry is from distance 0",
                got: self.first.unsigned_abs().into(),
                rule: "up to 2³⁰",
            });
        }
        check_address(self.address)
    }
}

impl Variant for DistanceBias {
    const KEEPS_UNIT: bool = true;

    #[inline(always)]
    fn params(&self) -> &VariantParams {
        &self.params
    }

    #[inline(always)]
    fn logit<R: Real>(&self, dot: R, at: Pair) -> impl Hook<R> {
        let BiasTable {
            address,
            entries,
            first,
            ..
        } = self.table;
        // Branchless: with a branch for keys beyond the table the kernels run out of registers.
        let distance = at.position.wrapping_sub(at.key as i32);
        let place = distance.wrapping_sub(first).clamp(0, entries as i32 - 1);
        let of_head = address + u64::from(at.head * entries) * 4;
        // SAFETY: the creator of the variant guarantees the table.
        let bias = unsafe { *(of_head as *const f32).add(place as usize) };
        R::from_f32(bias).mul_add(R::from_f32(recip(self.params.scale)), dot)
    }
}

impl FromLaunch for DistanceBias {
    type Own = BiasTable;

    #[inline(always)]
    unsafe fn from_launch(params: VariantParams, own: &BiasTable) -> Self {
        let table = *own;
        Self { params, table }
    }

    fn check(own: &BiasTable, q_heads: u32) -> Result<(), OwnDefect> {
        if own.heads != q_heads {
            return Err(OwnDefect {
                name: "heads of the table",
                got: own.heads.into(),
                rule: "as many as there are query heads",
            });
        }
        own.check_extent()
    }
}

#[cfg(any(not(target_arch = "nvptx64"), feature = "variants"))]
crate::variant_kernels! {
    /// Kernels of [`DistanceBias`] for Hopper. Its decodes for Ampere run on Hopper only, by `WorkspaceOptions::arch`: other GPUs also need
    /// prefills. One line in a crate of your own, with a name of its own, adds these, other head dimensions and f16.
    pub const DISTANCE_BIAS: "distance_bias" = [Prefill, DecodeMma, Sm80Decode] of DistanceBias
        where heads [64], elements [Bf16];
}

#[cfg(any(not(target_arch = "nvptx64"), feature = "variants"))]
crate::variant_kernels! {
    /// The kernels of [`Alibi`].
    pub const ALIBI: "alibi" = [Prefill, DecodeMma, DecodeWgmma, Sm80Prefill, Sm80Decode] of Alibi
        where heads [64, 128], elements [Bf16, F16];
}

#[cfg(any(not(target_arch = "nvptx64"), feature = "variants"))]
crate::variant_kernels! {
    /// Kernels of [`Sigmoid`] for Hopper. Its decodes for Ampere run on Hopper only, by `WorkspaceOptions::arch`: other GPUs also need
    /// prefills. One line in a crate of your own, with a name of its own, adds these, other head dimensions and f16.
    pub const SIGMOID: "sigmoid" = [Prefill, DecodeMma, Sm80Decode] of Sigmoid
        where heads [128], elements [Bf16];
}

/// The variants whose kernels come with the library.
#[cfg(not(target_arch = "nvptx64"))]
pub const BUILT_IN: &[crate::Hooks] = &[ALIBI, DISTANCE_BIAS, SIGMOID];
