//! The GPU kernels of tandem-attn, compressed: see the README of this package.
//!
//! ```
//! for module in kernels_bin::MODULES {
//!     println!("{} for {}", module.family, module.arch);
//! }
//! ```

use std::{borrow::Cow, fmt, io::Read};

mod registers;
mod target;

/// Bytes of a program for the GPU, compressed or as they are.
#[derive(Clone)]
pub struct Image {
    bytes: Cow<'static, [u8]>,
    /// The length of what `bytes` unpack to; `None` where they are not compressed.
    unpacked: Option<usize>,
    /// Whether what is compressed is PTX with relative numbers of registers.
    relative: bool,
    /// The architecture that PTX is for, where it was packed for another one.
    target: Option<&'static str>,
}

impl Image {
    /// Bytes as they are.
    #[must_use]
    pub const fn raw(bytes: &'static [u8]) -> Self {
        Self {
            bytes: Cow::Borrowed(bytes),
            unpacked: None,
            relative: false,
            target: None,
        }
    }

    /// A zstd frame that unpacks to `unpacked` bytes.
    #[must_use]
    pub const fn zstd(bytes: &'static [u8], unpacked: usize) -> Self {
        Self {
            bytes: Cow::Borrowed(bytes),
            unpacked: Some(unpacked),
            relative: false,
            target: None,
        }
    }

    /// A zstd frame of a text that becomes `unpacked` bytes of PTX, once the numbers of its registers are no longer
    /// relative to each other.
    #[must_use]
    pub const fn ptx(bytes: &'static [u8], unpacked: usize) -> Self {
        Self {
            bytes: Cow::Borrowed(bytes),
            unpacked: Some(unpacked),
            relative: true,
            target: None,
        }
    }

    /// The same for another architecture than the PTX names: with `arch` in its line `.target`, it is `unpacked` bytes.
    #[must_use]
    pub const fn ptx_for(arch: &'static str, bytes: &'static [u8], unpacked: usize) -> Self {
        Self {
            bytes: Cow::Borrowed(bytes),
            unpacked: Some(unpacked),
            relative: true,
            target: Some(arch),
        }
    }

    /// Bytes that were read or compiled when the program runs.
    #[must_use]
    pub fn owned(bytes: Vec<u8>) -> Self {
        Self {
            bytes: Cow::Owned(bytes),
            unpacked: None,
            relative: false,
            target: None,
        }
    }

    /// The bytes for the driver.
    ///
    /// # Errors
    /// [`Corrupt`] where the frame does not unpack to the length that was stated for it.
    pub fn unpack(&self) -> Result<Cow<'_, [u8]>, Corrupt> {
        let Some(expected) = self.unpacked else {
            return Ok(Cow::Borrowed(&self.bytes));
        };
        let corrupt = |reason: String| Corrupt { expected, reason };
        let mut decoder = ruzstd::decoding::StreamingDecoder::new(&*self.bytes)
            .map_err(|error| corrupt(error.to_string()))?;
        // A sign makes a register longer, and then all of it is no longer than twice the PTX. The name of another target
        // is within that too.
        let most = expected << u32::from(self.relative);
        let mut unpacked = Vec::with_capacity(expected);
        decoder
            .by_ref()
            .take(most as u64 + 1)
            .read_to_end(&mut unpacked)
            .map_err(|error| corrupt(error.to_string()))?;
        if self.relative {
            unpacked = registers::absolute(&unpacked)
                .ok_or_else(|| corrupt("a register has a negative number".to_owned()))?;
        }
        if let Some(arch) = self.target {
            unpacked = target::for_target(&unpacked, arch)
                .ok_or_else(|| corrupt("it names no target".to_owned()))?;
        }
        if unpacked.len() != expected {
            return Err(corrupt(format!("{} bytes came out", unpacked.len())));
        }
        Ok(Cow::Owned(unpacked))
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Image({} bytes)", self.bytes.len())
    }
}

/// An [`Image`] that cannot be unpacked: the program's file is damaged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Corrupt {
    /// The length that was expected.
    pub expected: usize,
    /// What is wrong.
    pub reason: String,
}

impl fmt::Display for Corrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "packed kernels do not unpack to {} bytes: {}",
            self.expected, self.reason
        )
    }
}

impl std::error::Error for Corrupt {}

/// A family of kernels for one architecture.
#[derive(Clone, Debug)]
pub struct Module {
    /// As ptxas names it: `sm_80`, `sm_90a`.
    pub arch: &'static str,
    /// Which kernels it holds.
    pub family: &'static str,
    /// PTX, for GPUs that no machine code is there for.
    pub ptx: Image,
    /// Machine code; `None` where ptxas was missing when it was built.
    pub cubin: Option<Image>,
}

/// All kernels: each family for each architecture.
pub static MODULES: &[Module] = include!("table.rs");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_module_unpacks_and_is_for_its_architecture() {
        assert!(!MODULES.is_empty());
        for module in MODULES {
            let ptx = module.ptx.unpack().unwrap();
            let target = format!("\n.target {}\n", module.arch);
            let head = String::from_utf8_lossy(&ptx[..ptx.len().min(4096)]);
            assert!(head.contains(&target), "{module:?}");
            let cubin = module.cubin.as_ref().expect("packed with ptxas");
            let cubin = cubin.unpack().unwrap();
            assert!(cubin.starts_with(b"\x7fELF"));
            // What assemblers of CUDA 12 write, and drivers from 525 read. Those of CUDA 13 write 0x41 and 8, which takes
            // 580.
            assert_eq!(cubin[7..9], [0x33, 7], "{module:?}");
        }
        let archs: Vec<_> = MODULES.iter().map(|module| module.arch).collect();
        assert!(archs.contains(&"sm_80") && archs.contains(&"sm_90a"));
    }

    #[test]
    fn damaged_images_are_refused() {
        let image = &MODULES[0].ptx;
        let cut = Image {
            bytes: Cow::Owned(image.bytes[..image.bytes.len() / 2].to_vec()),
            ..image.clone()
        };
        assert!(cut.unpack().is_err());
        let longer = Image {
            unpacked: image.unpacked.map(|length| length - 1),
            ..image.clone()
        };
        let error = longer.unpack().unwrap_err();
        assert!(error.to_string().contains("bytes came out"), "{error}");
    }

    #[test]
    fn ptx_that_is_for_two_architectures_is_stored_once() {
        let of = |arch| {
            let mut all = MODULES.iter();
            let found = all.find(|it| it.family == "sm80_decode" && it.arch == arch);
            found.expect("decodes have kernels for Ampere")
        };
        let (first, second) = (&of("sm_80").ptx, &of("sm_90a").ptx);
        assert!(std::ptr::eq(&*first.bytes, &*second.bytes));
        let [first, second] = [first, second].map(|it| it.unpack().unwrap());
        let retargeted = target::for_target(&first, "sm_90a").unwrap();
        assert_eq!(retargeted, *second);
        assert_eq!(target::for_target(b"\n.version 8.0\n", "sm_90a"), None);
    }
}
