//! Kernel ids: rows of the table by number and by name, and the kernels that can replace each other.

use core::fmt;

use super::{Arch, COUNT, KERNELS, KernelInfo, Loads};

/// A row of [`KERNELS`]. It is displayed and serialised as the kernel's name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KernelId(u16);

impl KernelId {
    /// The ids of all kernels.
    pub fn all() -> impl Iterator<Item = Self> + Clone {
        (0..COUNT as u16).map(Self)
    }

    /// The id of the kernel with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::all().find(|id| id.info().name == name)
    }

    /// The kernel's row of the table.
    #[must_use]
    pub fn info(self) -> &'static KernelInfo {
        &KERNELS[self.index()]
    }

    /// The first kernel that computes the same and satisfies `is`, which gets this kernel's row and the other one's.
    fn counterpart(self, is: impl Fn(&KernelInfo, &KernelInfo) -> bool) -> Option<Self> {
        let row = self.info();
        Self::all().find(|id| id.info().computes() == row.computes() && is(row, id.info()))
    }

    /// The kernel that supports sinks and masks of the last keys and otherwise does the same, with tiles of as many
    /// rows. One with as many keys and the same `co_resident` is preferred; otherwise it is one without `co_resident`.
    #[must_use]
    pub fn with_extras(self) -> Option<Self> {
        if self.info().extras {
            return Some(self);
        }
        let of_rows = |row: &KernelInfo, other: &KernelInfo| {
            other.stands_in && other.extras && !other.general && other.rows == row.rows
        };
        let same_tile = |row: &KernelInfo, other: &KernelInfo| {
            of_rows(row, other) && (other.keys, other.co_resident) == (row.keys, row.co_resident)
        };
        let there = self.counterpart(same_tile);
        there.or_else(|| self.counterpart(|row, other| of_rows(row, other) && !other.co_resident))
    }

    /// The kernel of latent attention that does the same and loads keys row by row.
    #[must_use]
    pub fn by_rows(self) -> Option<Self> {
        self.counterpart(|row, other| {
            (other.latent && other.stands_in && other.loads == Loads::Rows)
                && (other.rows, other.keys, other.merges_pieces)
                    == (row.rows, row.keys, row.merges_pieces)
        })
    }

    /// The kernel of latent attention that does the same and [merges pieces](KernelInfo::merges_pieces).
    #[must_use]
    pub fn with_pieces(self) -> Option<Self> {
        self.counterpart(|row, other| {
            other.merges_pieces
                && (other.loads, other.rows, other.keys) == (row.loads, row.rows, row.keys)
        })
    }

    /// The kernel for an architecture that does the same, whatever the sizes of its tiles.
    #[must_use]
    pub fn on(self, arch: Arch) -> Option<Self> {
        if self.info().arch == arch {
            return Some(self);
        }
        self.counterpart(|row, other| {
            (other.arch == arch && other.by_token == row.by_token)
                && (!other.general || !other.stands_in)
        })
    }

    /// The kernel with Ampere's instructions that does the same and is [general](KernelInfo::general).
    #[must_use]
    pub fn general(self) -> Option<Self> {
        if self.info().general {
            return Some(self);
        }
        self.counterpart(|row, other| {
            other.general && (other.arch, other.rows, other.keys) == (row.arch, row.rows, row.keys)
        })
    }

    /// Whether a CTA with this much shared memory holds a kernel that is faster and does the same.
    #[must_use]
    pub fn is_replaced(self, shared_bytes: u32) -> bool {
        let row = self.info();
        let larger = |row: &KernelInfo, other: &KernelInfo| {
            !other.smaller
                && other.shared_bytes <= shared_bytes
                && (other.arch, other.rows, other.keys, other.by_token)
                    == (row.arch, row.rows, row.keys, row.by_token)
        };
        row.smaller && self.counterpart(larger).is_some()
    }

    /// The kernel that does the same with scales per token.
    #[must_use]
    pub fn by_token(self) -> Option<Self> {
        self.counterpart(|row, other| {
            other.by_token
                && other.arch == row.arch
                && (other.rows, other.keys, other.co_resident, other.kv_heads)
                    == (row.rows, row.keys, row.co_resident, row.kv_heads)
        })
    }

    /// The kernel that does the same for two KV heads at a time, with head dimension `head_dim`: this kernel's own, or
    /// a smaller one that this kernel pads.
    #[must_use]
    pub fn of_pairs(self, head_dim: u32) -> Option<Self> {
        let row = self.info();
        Self::all().find(|id| {
            let other = id.info();
            let padded = KernelInfo {
                head_dim: row.head_dim,
                value_dim: row.value_dim,
                ..*other
            };
            other.kv_heads == 2
                && (other.head_dim, other.value_dim) == (head_dim, head_dim)
                && padded.computes() == row.computes()
                && (other.rows, other.keys, other.co_resident, other.by_token)
                    == (row.rows, row.keys, row.co_resident, row.by_token)
        })
    }

    /// Whether both give bit-identical results: they differ at most in the stages, and so in shared memory.
    #[must_use]
    pub fn same_bits(self, other: Self) -> bool {
        let of = |id: Self| KernelInfo {
            name: "",
            stages: 0,
            shared_bytes: 0,
            ..*id.info()
        };
        of(self) == of(other)
    }

    /// The index in [`KERNELS`].
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Debug for KernelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.info().name)
    }
}

impl fmt::Display for KernelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.info().name)
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for KernelId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.info().name)
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for KernelId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        let unknown = || serde::de::Error::custom(format!("there is no kernel {name:?}"));
        Self::named(&name).ok_or_else(unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::Op;

    #[test]
    fn kernel_names_are_unique_and_find_their_rows() {
        for id in KernelId::all() {
            assert_eq!(KernelId::named(id.info().name), Some(id));
        }
        assert_eq!(KernelId::named("decode"), None);
    }

    #[test]
    fn kernels_with_masks_have_the_same_tile_if_there_is_one() {
        let tile = |row: &KernelInfo| (row.rows, row.keys, row.co_resident);
        let mut co_resident = 0;
        for id in KernelId::all().filter(|id| !id.info().extras) {
            let Some(there) = id.with_extras() else {
                continue;
            };
            let (row, there) = (id.info(), there.info());
            assert!(there.extras && there.rows == row.rows, "{row:?}");
            let same = |of: &KernelInfo| {
                of.stands_in
                    && of.extras
                    && of.computes() == row.computes()
                    && tile(of) == tile(row)
            };
            match KERNELS.iter().any(same) {
                true => assert_eq!(tile(there), tile(row)),
                // Then it takes as much of an SM as it likes.
                false => assert!(!there.co_resident, "{row:?}"),
            }
            co_resident += u32::from(there.co_resident);
        }
        assert!(co_resident > 0, "none shares SMs");
    }

    #[test]
    fn stages_change_no_bit_and_all_else_may() {
        let decodes = || KernelId::all().filter(|id| id.info().op == Op::Decode);
        let mut alike = 0;
        for (a, b) in decodes().flat_map(|a| decodes().map(move |b| (a, b))) {
            let tile = |id: KernelId| (id.info().rows, id.info().keys, id.info().stages);
            if a.same_bits(b) && a != b {
                assert!(a.info().stages != b.info().stages && tile(a).0 == tile(b).0);
                assert!(a.info().computes() == b.info().computes());
                alike += 1;
            }
            assert!(
                !a.same_bits(b) || (tile(a).1, a.info().element) == (tile(b).1, b.info().element)
            );
        }
        assert!(alike > 0, "none has other stages");
    }
}
