//! The host's view of a variant's kernels: its name, the size of its parameters, and the rows that it replaces.

use core::fmt;

use crate::{
    registry::{Element, Family, KernelId, KernelInfo},
    variant::{FromLaunch, OwnDefect},
};

/// The name of a variant: up to 23 letters, digits and underscores.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct HooksName {
    len: u8,
    bytes: [u8; Self::MOST],
}

impl HooksName {
    const MOST: usize = 23;

    /// `None` if it is not a valid name.
    #[must_use]
    pub const fn new(name: &str) -> Option<Self> {
        let name = name.as_bytes();
        let mut bytes = [0; Self::MOST];
        if name.is_empty() || name.len() > Self::MOST {
            return None;
        }
        let mut i = 0;
        while i < name.len() {
            if !(name[i].is_ascii_alphanumeric() || name[i] == b'_') {
                return None;
            }
            bytes[i] = name[i];
            i += 1;
        }
        let len = name.len() as u8;
        Some(Self { len, bytes })
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        std::str::from_utf8(&self.bytes[..self.len.into()]).unwrap_or_default()
    }

    /// The name of the entry by which the variant of this name replaces a kernel.
    #[must_use]
    pub fn entry(&self, row: &KernelInfo) -> String {
        let plain = row.name.trim_end_matches("_cap");
        format!("{plain}_{self}")
    }
}

impl fmt::Display for HooksName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for HooksName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for HooksName {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for HooksName {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        let wrong = || {
            let most = Self::MOST;
            serde::de::Error::custom(format!(
                "a variant is called {name:?}: give up to {most} letters, digits and underscores"
            ))
        };
        Self::new(&name).ok_or_else(wrong)
    }
}

/// A variant's check of its own parameters: their bytes, and the number of query heads.
#[derive(Clone, Copy)]
pub struct CheckOwn(pub fn(&[u8], u32) -> Result<(), OwnDefect>);

impl CheckOwn {
    /// The check of a variant.
    #[must_use]
    pub const fn of<V: FromLaunch>() -> Self {
        Self(|own, q_heads| V::check(&bytemuck::pod_read_unaligned(own), q_heads))
    }
}

/// All checks are considered equal: variants are distinguished by name.
impl PartialEq for CheckOwn {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for CheckOwn {}

impl fmt::Debug for CheckOwn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CheckOwn")
    }
}

/// The kernels of a variant, as [`variant_kernels!`](crate::variant_kernels) makes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hooks {
    /// Its name in specifications, and the suffix of its entries.
    pub name: HooksName,
    /// Size of its own parameters, in bytes.
    pub own_bytes: usize,
    /// Whether its weights are a [softmax](crate::variant::Variant::SOFTMAX).
    pub softmax: bool,
    /// Checks [`own_bytes`](Self::own_bytes) bytes of its own parameters.
    pub check: CheckOwn,
    /// The families that it was instantiated for.
    pub families: &'static [Family],
    /// The head dimensions.
    pub heads: &'static [u32],
    /// The types of queries, keys, values and outputs.
    pub elements: &'static [Element],
}

impl Hooks {
    /// The kernels that the variant replaces.
    pub fn kernels(&self) -> impl Iterator<Item = KernelId> + use<'_> {
        KernelId::all().filter(|id| self.replaces(id.info()))
    }

    /// Whether the variant replaces this kernel.
    #[must_use]
    pub fn replaces(&self, row: &KernelInfo) -> bool {
        Self::replaceable(row)
            && self.families.contains(&row.family)
            && self.heads.contains(&row.head_dim)
            && self.elements.contains(&row.element)
    }

    /// Whether variants can replace this kernel: it has a soft cap, reads 16-bit keys, and does not itself stand in for
    /// another kernel.
    #[must_use]
    pub fn replaceable(row: &KernelInfo) -> bool {
        row.cap && row.cache.is_none() && !row.stands_in && !row.smaller
    }

    /// The name of the entry that replaces a kernel.
    #[must_use]
    pub fn entry(&self, row: &KernelInfo) -> String {
        self.name.entry(row)
    }
}
