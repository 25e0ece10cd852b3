//! Bytes of tensors, with poison between them.

use std::ops::Range;

/// Poison before each tensor and behind the last.
const ZONE: usize = 512;

/// Bytes at addresses that vector loads take.
#[derive(Clone, Debug)]
pub struct Image {
    words: Vec<u128>,
    len: usize,
}

impl Image {
    pub fn new(poison: u8) -> Self {
        Self {
            words: vec![u128::from_ne_bytes([poison; 16]); ZONE / 16],
            len: ZONE,
        }
    }

    /// Room for so many bytes, poison until something is written there.
    pub fn room(&mut self, bytes: usize) -> Range<usize> {
        let place = self.len..self.len + bytes;
        self.len = (place.end + ZONE).next_multiple_of(256);
        self.words.resize(self.len / 16, self.words[0]);
        place
    }

    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.words)
    }

    /// Poison again.
    pub fn spoil(&mut self, place: &Range<usize>) {
        let poison = self.bytes()[0];
        self.bytes_mut()[place.clone()].fill(poison);
    }

    /// Where another image differs first.
    pub fn differs(&self, other: &[u8]) -> Option<usize> {
        let bytes = self.bytes();
        (bytes != other).then(|| {
            let mut pairs = bytes.iter().zip(other);
            pairs.position(|(a, b)| a != b).unwrap_or(other.len())
        })
    }
}
