//! Rows by number, by name, and those that stand in for others.

use core::fmt;

use super::{Arch, COUNT, KERNELS, KernelInfo, Loads};

/// Which row of [`KERNELS`]. Written down it is the kernel's name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KernelId(u16);

impl KernelId {
    /// Of every kernel.
    pub fn all() -> impl Iterator<Item = Self> + Clone {
        (0..COUNT as u16).map(Self)
    }

    /// Of the kernel of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::all().find(|id| id.info().name == name)
    }

    /// The row.
    #[must_use]
    pub fn info(self) -> &'static KernelInfo {
        &KERNELS[self.index()]
    }

    /// The first kernel that computes the same, of those that `is` takes, which is given this kernel's row and theirs.
    fn counterpart(self, is: impl Fn(&KernelInfo, &KernelInfo) -> bool) -> Option<Self> {
        let row = self.info();
        Self::all().find(|id| id.info().computes() == row.computes() && is(row, id.info()))
    }

    /// The kernel that takes sinks and masks of the last keys and otherwise does the same, in tiles of the same rows: of
    /// the same keys, too, and in as much of an SM, if there is one.
    #[must_use]
    pub fn with_extras(self) -> Option<Self> {
        if self.info().extras {
            return Some(self);
        }
        let of_rows = |row: &KernelInfo, other: &KernelInfo| {
            other.stands_in && other.extras && other.rows == row.rows
        };
        let same_tile = |row: &KernelInfo, other: &KernelInfo| {
            of_rows(row, other) && (other.keys, other.co_resident) == (row.keys, row.co_resident)
        };
        let there = self.counterpart(same_tile);
        there.or_else(|| self.counterpart(|row, other| of_rows(row, other) && !other.co_resident))
    }

    /// The kernel of latent heads that does the same and loads keys row by row.
    #[must_use]
    pub fn by_rows(self) -> Option<Self> {
        self.counterpart(|row, other| {
            (other.latent && other.stands_in && other.loads == Loads::Rows)
                && (other.rows, other.keys) == (row.rows, row.keys)
        })
    }

    /// The kernel that does the same with the instructions of an architecture, whatever the sizes of its tiles.
    #[must_use]
    pub fn on(self, arch: Arch) -> Option<Self> {
        if self.info().arch == arch {
            return Some(self);
        }
        self.counterpart(|row, other| other.arch == arch && other.by_token == row.by_token)
    }

    /// The kernel that does the same where each token of the cache has scales of its own.
    #[must_use]
    pub fn by_token(self) -> Option<Self> {
        self.counterpart(|row, other| {
            other.by_token
                && (other.rows, other.keys, other.co_resident, other.kv_heads)
                    == (row.rows, row.keys, row.co_resident, row.kv_heads)
        })
    }

    /// The kernel that does the same for two KV heads at a time, for heads of so many elements: as many as this one's, or
    /// fewer, which this one pads.
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

    /// Whether both compute the same bits: they differ in nothing but the blocks of keys that are under way.
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

    /// Its place.
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
    fn what_takes_masks_has_the_same_tile_if_there_is_such() {
        let tile = |row: &KernelInfo| (row.rows, row.keys, row.co_resident);
        let mut beside = 0;
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
                // What takes as much of an SM as it likes.
                false => assert!(!there.co_resident, "{row:?}"),
            }
            beside += u32::from(there.co_resident);
        }
        assert!(beside > 0, "none shares SMs");
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
