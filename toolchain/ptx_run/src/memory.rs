//! The memory of the emulated GPU.

use crate::{
    report::{Fault, Step},
    shadow::{GRANULE, Granule, LAUNCHES},
};

/// Number of granules whose shadow is allocated together.
const PAGE: usize = 256;
/// The mark of a granule of which every byte is written.
const WHOLE: u8 = (1 << GRANULE) - 1;
/// Unused bytes between allocations.
const RED_ZONE: u64 = 4096;
const FIRST: u64 = 0x7_0000_0000;

/// Contents of unwritten bytes: floats of any width are NaN.
const NOTHING: u8 = 0xFF;

/// Bytes, with a mark for each written byte and the state of the race detection.
#[derive(Debug, Default)]
pub(crate) struct Bytes {
    pub data: Vec<u8>,
    /// A bit for each written byte: 4 in the low half of each entry.
    written: Vec<u8>,
    shadow: Vec<Option<Box<[Granule; PAGE]>>>,
}

impl Bytes {
    pub fn new(len: usize) -> Self {
        Self::try_new(len).expect("the host has memory for it")
    }

    /// `None` if the host has not enough memory.
    fn try_new(len: usize) -> Option<Self> {
        let granules = len.div_ceil(GRANULE);
        let mut bytes = Self::default();
        bytes.data.try_reserve_exact(len).ok()?;
        bytes.written.try_reserve_exact(granules).ok()?;
        let pages = granules.div_ceil(PAGE);
        bytes.shadow.try_reserve_exact(pages).ok()?;
        bytes.data.resize(len, NOTHING);
        bytes.written.resize(granules, 0);
        bytes.shadow.resize(pages, None);
        Some(bytes)
    }

    /// Fills unwritten bytes with arbitrary values.
    pub fn scramble(&mut self, mut byte: impl FnMut() -> u8) {
        self.data.iter_mut().for_each(|one| *one = byte());
    }

    pub fn granule(&mut self, granule: usize) -> &mut Granule {
        let page = &mut self.shadow[granule / PAGE];
        &mut page.get_or_insert_with(|| Box::new([Granule::default(); PAGE]))[granule % PAGE]
    }

    pub fn forget_accesses(&mut self) {
        self.shadow.fill(None);
    }

    /// Forgets the accesses of all launches but this one.
    fn forget_accesses_before(&mut self, launch: u32) {
        for granule in self
            .shadow
            .iter_mut()
            .flatten()
            .flat_map(|page| page.iter_mut())
        {
            granule.keep_launch(launch);
        }
    }

    pub fn set_written(&mut self, at: usize, len: usize, written: bool) {
        if (at | len).is_multiple_of(GRANULE) {
            let all = if written { WHOLE } else { 0 };
            self.written[at / GRANULE..(at + len) / GRANULE].fill(all);
            return;
        }
        let (first, last) = (at / GRANULE, (at + len).div_ceil(GRANULE));
        for granule in first..last {
            let bytes = crate::shadow::bytes_of(granule, at, at + len) as u8;
            if written {
                self.written[granule] |= bytes;
            } else {
                self.written[granule] &= !bytes;
            }
        }
    }

    pub fn is_written(&self, at: usize, len: usize) -> bool {
        if (at | len).is_multiple_of(GRANULE) {
            let granules = &self.written[at / GRANULE..(at + len) / GRANULE];
            return granules.iter().all(|&granule| granule == WHOLE);
        }
        let (first, last) = (at / GRANULE, (at + len).div_ceil(GRANULE));
        (first..last).all(|granule| {
            let bytes = crate::shadow::bytes_of(granule, at, at + len) as u8;
            self.written[granule] & bytes == bytes
        })
    }
}

#[derive(Debug)]
struct Allocation {
    base: u64,
    bytes: Bytes,
}

impl Allocation {
    fn end(&self) -> u64 {
        self.base + self.bytes.data.len() as u64
    }
}

/// Device memory. Allocations are so far apart that an out-of-bounds access hits no other allocation.
///
/// A byte that neither the host nor a kernel has written counts as uninitialised.
#[derive(Debug, Default)]
pub struct Memory {
    /// Sorted by address.
    allocations: Vec<Allocation>,
    next: u64,
    /// The last used allocation.
    last: usize,
    launches: u32,
    /// How many of the last launches may have overlapped with the one before.
    overlapping: u32,
    /// Addresses at which the last launch released its writes. A thread that acquires there need not wait for the end
    /// of that launch.
    pub(crate) handed_over: Vec<u64>,
}

impl Memory {
    /// Memory without allocations.
    #[must_use]
    pub fn new() -> Self {
        Self {
            allocations: Vec::new(),
            next: FIRST,
            last: 0,
            launches: 0,
            overlapping: 0,
            handed_over: Vec::new(),
        }
    }

    /// Allocates uninitialised bytes at a multiple of 1024.
    ///
    /// # Panics
    /// If the host has not enough memory.
    pub fn allocate(&mut self, len: usize) -> u64 {
        self.try_allocate(len).expect("the host has memory for it")
    }

    /// As [`allocate`](Self::allocate); `None` if the host has not enough memory.
    pub fn try_allocate(&mut self, len: usize) -> Option<u64> {
        let base = self.next;
        let end = base.checked_add(len as u64)?.checked_add(RED_ZONE)?;
        let next = end.checked_next_multiple_of(1024)?;
        let bytes = Bytes::try_new(len)?;
        self.next = next;
        self.allocations.push(Allocation { base, bytes });
        Some(base)
    }

    /// Total bytes of all allocations.
    #[must_use]
    pub fn allocated(&self) -> usize {
        let bytes = self.allocations.iter().map(|one| one.bytes.data.len());
        bytes.sum()
    }

    /// Allocates memory with these contents.
    pub fn allocate_with(&mut self, bytes: &[u8]) -> u64 {
        let base = self.allocate(bytes.len());
        let target = self.allocations.last_mut().expect("just made");
        target.bytes.data.copy_from_slice(bytes);
        target.bytes.set_written(0, bytes.len(), true);
        base
    }

    /// Frees an allocation. Returns `false` if none begins there.
    pub fn free(&mut self, base: u64) -> bool {
        let found = self.allocations.binary_search_by_key(&base, |one| one.base);
        if let Ok(at) = found {
            self.allocations.remove(at);
            self.last = 0;
        }
        found.is_ok()
    }

    /// Reads bytes from anywhere inside an allocation.
    ///
    /// # Errors
    /// [`Fault::OutOfBounds`].
    pub fn read(&mut self, address: u64, len: usize) -> Result<&[u8], Box<Fault>> {
        let (bytes, at) = self.find(address, len)?;
        Ok(&bytes.data[at..at + len])
    }

    /// Writes bytes from the host.
    ///
    /// # Errors
    /// [`Fault::OutOfBounds`].
    pub fn write(&mut self, address: u64, values: &[u8]) -> Result<(), Box<Fault>> {
        let (bytes, at) = self.find(address, values.len())?;
        bytes.data[at..at + values.len()].copy_from_slice(values);
        bytes.set_written(at, values.len(), true);
        Ok(())
    }

    /// Copies bytes. Those that nobody has written stay uninitialised.
    ///
    /// # Errors
    /// [`Fault::OutOfBounds`].
    pub fn copy(&mut self, target: u64, source: u64, len: usize) -> Result<(), Box<Fault>> {
        let (bytes, at) = self.find(source, len)?;
        let values = bytes.data[at..at + len].to_vec();
        let mut unwritten = Vec::new();
        if !bytes.is_written(at, len) {
            unwritten.extend((0..len).filter(|&byte| !bytes.is_written(at + byte, 1)));
        }
        self.write(target, &values)?;
        let (bytes, at) = self.find(target, len)?;
        for byte in unwritten {
            bytes.set_written(at + byte, 1, false);
        }
        Ok(())
    }

    /// Whether all these bytes have been written.
    ///
    /// # Errors
    /// [`Fault::OutOfBounds`].
    pub fn is_written(&mut self, address: u64, len: usize) -> Result<bool, Box<Fault>> {
        let (bytes, at) = self.find(address, len)?;
        Ok(bytes.is_written(at, len))
    }

    pub(crate) fn find(&mut self, address: u64, len: usize) -> Step<(&mut Bytes, usize)> {
        let inside = |one: &Allocation| {
            one.base <= address && address.saturating_add(len as u64) <= one.end()
        };
        if !self.allocations.get(self.last).is_some_and(inside) {
            let after = self.allocations.partition_point(|one| one.base <= address);
            match after
                .checked_sub(1)
                .filter(|&at| inside(&self.allocations[at]))
            {
                Some(at) => self.last = at,
                None => return Err(self.outside(address, len, after)),
            }
        }
        let allocation = &mut self.allocations[self.last];
        Ok((&mut allocation.bytes, (address - allocation.base) as usize))
    }

    fn outside(&self, address: u64, bytes: usize, after: usize) -> Box<Fault> {
        let describe = |one: &Allocation| {
            let (base, len) = (one.base, one.bytes.data.len());
            match address.checked_sub(one.end()) {
                Some(behind) => {
                    format!("{behind} bytes behind the end of the {len} bytes at {base:#x}")
                }
                None if address >= one.base => {
                    format!("reaches over the end of the {len} bytes at {base:#x}")
                }
                None => format!(
                    "{} bytes before the {len} bytes at {base:#x}",
                    one.base - address
                ),
            }
        };
        let before = after.checked_sub(1).map(|at| &self.allocations[at]);
        let nearest = before
            .filter(|one| address < one.end() + RED_ZONE / 2)
            .or(self.allocations.get(after))
            .or(before);
        Box::new(Fault::OutOfBounds {
            address: format!("global {address:#x}"),
            bytes,
            nearest: nearest.map_or("there is no memory".into(), describe),
        })
    }

    /// Begins a launch. It is ordered after all earlier launches; if it may overlap, it is not ordered after the last
    /// one. Returns its number.
    pub(crate) fn begin_launch(&mut self, overlaps: bool) -> u32 {
        self.overlapping = if overlaps { self.overlapping + 1 } else { 0 };
        for Allocation { bytes, .. } in &mut self.allocations {
            match overlaps {
                false => bytes.forget_accesses(),
                // Records have the last bits of a launch's number. Accesses of the launches before the last one are ordered.
                true if self.overlapping.is_multiple_of(LAUNCHES / 2) => {
                    bytes.forget_accesses_before(self.launches);
                }
                true => {}
            }
        }
        self.launches += 1;
        self.launches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_and_the_rest_is_uninitialised() {
        let mut memory = Memory::new();
        let a = memory.allocate(10);
        let b = memory.allocate_with(&[1, 2, 3]);
        assert_eq!(memory.read(b, 3).unwrap(), [1, 2, 3]);
        memory.write(a + 3, &[9, 8, 7]).unwrap();
        assert!(memory.is_written(a + 3, 3).unwrap());
        assert!(!memory.is_written(a + 2, 2).unwrap() && !memory.is_written(a + 5, 2).unwrap());
    }

    #[test]
    fn a_copy_of_what_nobody_wrote_is_still_uninitialised() {
        let mut memory = Memory::new();
        let (a, b) = (memory.allocate(8), memory.allocate_with(&[7; 8]));
        memory.write(a + 2, &[1, 2, 3]).unwrap();
        memory.copy(b, a, 6).unwrap();
        let written: Vec<bool> = (0..8)
            .map(|at| memory.is_written(b + at, 1).unwrap())
            .collect();
        assert_eq!(written, [false, false, true, true, true, false, true, true]);
        assert_eq!(memory.read(b + 2, 3).unwrap(), [1, 2, 3]);
        assert!(memory.copy(b + 4, a, 8).is_err());
    }

    #[test]
    fn an_access_behind_the_end_names_the_allocation() {
        let mut memory = Memory::new();
        let a = memory.allocate(16);
        memory.allocate(16);
        let fault = *memory.read(a + 16, 4).unwrap_err();
        let Fault::OutOfBounds { nearest, .. } = fault else {
            panic!()
        };
        assert!(
            nearest.starts_with("0 bytes behind the end of the 16 bytes"),
            "{nearest}"
        );
        assert!(memory.free(a) && !memory.free(a));
        assert!(memory.read(a, 4).is_err());
    }
}
