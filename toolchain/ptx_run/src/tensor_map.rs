//! Tensor maps: the arguments of `cuTensorMapEncodeTiled` in our own format of 128 bytes.

use crate::Swizzle;

const MARK: u64 = 0x7074_785f_7275_6e01;

/// A tensor of rank 1 to 5 and the box that one instruction copies. The fastest dimension comes first.
///
/// The format of a real `CUtensorMap` is not documented; this one has the same fields in its own order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap {
    /// Device address.
    pub address: u64,
    /// Bytes of an element: 1, 2, 4 or 8.
    pub element_bytes: u32,
    /// Whether reductions add 32-bit floats.
    pub is_f32: bool,
    /// Number of dimensions in use.
    pub rank: u32,
    /// Extents in elements.
    pub dims: [u64; 5],
    /// Strides in bytes, from the second dimension on.
    pub strides: [u64; 4],
    /// Extents of the box in elements.
    pub box_dims: [u32; 5],
    /// How rows of the box are permuted in shared memory.
    pub swizzle: Swizzle,
}

impl TensorMap {
    /// Encodes the map as it is passed among the parameters of a launch.
    #[must_use]
    pub fn encode(&self) -> [u64; 16] {
        let mut words = [0; 16];
        words[0] = MARK;
        words[1] = self.address;
        words[2] = u64::from(self.element_bytes)
            | u64::from(self.rank) << 8
            | (self.swizzle as u64) << 16
            | u64::from(self.is_f32) << 24;
        words[3..8].copy_from_slice(&self.dims);
        words[8..12].copy_from_slice(&self.strides);
        for (at, &extent) in self.box_dims.iter().enumerate() {
            words[12 + at / 3] |= u64::from(extent) << (at % 3 * 20);
        }
        words
    }

    /// Decodes the result of [`encode`](Self::encode); `None` for other bytes.
    #[must_use]
    pub fn decode(words: &[u64; 16]) -> Option<Self> {
        if words[0] != MARK {
            return None;
        }
        Some(Self {
            address: words[1],
            element_bytes: words[2] as u32 & 0xFF,
            rank: (words[2] >> 8) as u32 & 0xFF,
            swizzle: Swizzle::from_number(words[2] >> 16 & 0xFF)?,
            is_f32: words[2] >> 24 & 1 != 0,
            dims: words[3..8].try_into().ok()?,
            strides: words[8..12].try_into().ok()?,
            box_dims: std::array::from_fn(|at| {
                (words[12 + at / 3] >> (at % 3 * 20)) as u32 & 0xF_FFFF
            }),
        })
    }

    /// Bytes of a box.
    #[must_use]
    pub fn box_bytes(&self) -> u32 {
        self.box_dims[..self.rank as usize].iter().product::<u32>() * self.element_bytes
    }

    /// The rows of a box at these coordinates, in the order of shared memory: the address of each row's first byte, and
    /// its bytes that are inside the tensor.
    pub(crate) fn rows(&self, coordinates: &[i64]) -> Vec<TensorRow> {
        let rank = self.rank as usize;
        let count: usize = self.box_dims[1..rank]
            .iter()
            .map(|&extent| extent as usize)
            .product();
        let mut rows = Vec::with_capacity(count);
        for row in 0..count {
            let mut rest = row;
            let mut address = self.address as i64 + coordinates[0] * i64::from(self.element_bytes);
            let mut inside = true;
            #[allow(clippy::needless_range_loop)]
            for axis in 1..rank {
                let extent = self.box_dims[axis] as usize;
                let at = coordinates[axis] + (rest % extent) as i64;
                rest /= extent;
                inside &= (0..self.dims[axis] as i64).contains(&at);
                address += at * self.strides[axis - 1] as i64;
            }
            let element = i64::from(self.element_bytes);
            let first = (-coordinates[0]).clamp(0, i64::from(self.box_dims[0]));
            let last =
                (self.dims[0] as i64 - coordinates[0]).clamp(first, i64::from(self.box_dims[0]));
            let (first, last) = if inside {
                (first * element, last * element)
            } else {
                (0, 0)
            };
            rows.push(TensorRow {
                address: address as u64,
                first: first as usize,
                last: last as usize,
            });
        }
        rows
    }

    /// The rows as a store writes them. A row whose end is inside a unit of 16 bytes is written to the end of that
    /// unit.
    pub(crate) fn stored_rows(&self, coordinates: &[i64]) -> Vec<TensorRow> {
        let mut rows = self.rows(coordinates);
        for row in &mut rows {
            row.last = row.last.next_multiple_of(16).min(self.row_bytes());
        }
        rows
    }

    /// Bytes of a row of the box.
    pub(crate) fn row_bytes(&self) -> usize {
        (self.box_dims[0] * self.element_bytes) as usize
    }
}

/// A row of a box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TensorRow {
    pub address: u64,
    /// Range of the row's bytes that are inside the tensor.
    pub first: usize,
    pub last: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: TensorMap = TensorMap {
        address: 0x1000,
        element_bytes: 2,
        is_f32: false,
        rank: 3,
        dims: [10, 4, 3, 0, 0],
        strides: [32, 128, 0, 0],
        box_dims: [8, 2, 2, 0, 0],
        swizzle: Swizzle::B128,
    };

    #[test]
    fn what_was_encoded_is_decoded() {
        assert_eq!(TensorMap::decode(&MAP.encode()), Some(MAP));
        assert_eq!(TensorMap::decode(&[0; 16]), None);
        assert_eq!(MAP.box_bytes(), 64);
    }

    #[test]
    fn rows_outside_the_tensor_have_no_bytes() {
        let rows = MAP.rows(&[4, 3, -1]);
        let bytes: Vec<_> = rows.iter().map(|row| (row.first, row.last)).collect();
        // The second dimension ends after its first row, the third begins with its second.
        assert_eq!(bytes, [(0, 0), (0, 0), (0, 12), (0, 0)]);
        assert_eq!(rows[2].address, 0x1000 + 8 + 3 * 32);
        let rows = MAP.rows(&[-3, 0, 0]);
        assert_eq!((rows[0].first, rows[0].last), (6, 16));
        let stored = MAP.stored_rows(&[8, 0, 0]);
        assert_eq!(
            (stored[0].first, stored[0].last),
            (0, 16),
            "10 elements of 2 bytes"
        );
    }
}
