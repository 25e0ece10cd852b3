//! Keys and values of a tile in their pool, and the prefetching of the next tile.

use std::ops::Range;

use kernels_gpu::variant::Variant;

use super::{
    simd::prefetch,
    unit::{Pool, Unit},
};
use crate::tensor::Slice;

/// Keys of a tile: one update of the softmax.
pub(super) const KEYS: usize = 32;

/// Keys (or values) of one head in a tile.
pub(super) struct TileRows<'a> {
    pub(super) pool: Slice<'a>,
    /// Where each row begins, for head 0.
    pub(super) places: &'a [usize],
    /// Elements from head 0 to this head.
    pub(super) head: usize,
    pub(super) dim: usize,
    /// Where the rows of the next tile begin that this head prefetches, in the order of memory: its share of the rows
    /// of all heads.
    pub(super) ahead: &'a [usize],
}

impl TileRows<'_> {
    /// A row, or the last one if there are fewer.
    #[inline(always)]
    pub(super) fn get<'p, T>(&self, pool: &'p [T], index: usize) -> &'p [T] {
        let at = self.places[index.min(self.places.len() - 1)] + self.head;
        &pool[at..at + self.dim]
    }

    /// Prefetches the next elements, after row and element `from`, which moves on. Only a few at a time: a processor
    /// can have only a few pending reads in addition to its work.
    #[inline(always)]
    pub(super) fn ask_for<T>(&self, pool: &[T], from: &mut (usize, usize), elements: usize) {
        let (row, element) = *from;
        if let Some(&at) = self.ahead.get(row) {
            let end = self.dim.min(element + elements);
            prefetch(&pool[at + element..at + end]);
            *from = if end == self.dim {
                (row + 1, 0)
            } else {
                (row, end)
            };
        }
    }
}

/// Where the keys (or values) of a tile are, and what to prefetch.
pub(super) struct Places {
    pool: Pool,
    /// For head 0: the places of this tile and of the next.
    tile: [usize; KEYS],
    next: [usize; KEYS],
    /// Rows of the next tile, of all heads, in the order of memory: only then do the hardware's prefetchers recognise a
    /// stream, and without these too few reads are pending.
    ahead: Vec<usize>,
    /// Their places if the variant or scales change them.
    made: [usize; KEYS],
}

impl Places {
    pub(super) fn new<V: Variant>(unit: &Unit<'_, V>, pool: Pool) -> Self {
        let dim = unit.dim(pool);
        Self {
            pool,
            tile: [0; KEYS],
            next: [0; KEYS],
            ahead: Vec::with_capacity(unit.kv_heads.len() * KEYS),
            made: std::array::from_fn(|key| key * dim),
        }
    }

    /// Moves on to the next tile; `after` is the tile after that one.
    pub(super) fn advance<V: Variant>(&mut self, unit: &Unit<'_, V>, after: &Range<u32>) {
        self.tile = self.next;
        unit.places(self.pool, after.clone(), &mut self.next);
        let next = &self.next[..after.len()];
        let (_, strides) = unit.pool(self.pool);
        let heads = unit
            .kv_heads
            .clone()
            .map(|head| head as usize * strides.head as usize);
        self.ahead.clear();
        if strides.head < strides.token {
            let rows = next
                .iter()
                .flat_map(|at| heads.clone().map(move |head| at + head));
            self.ahead.extend(rows);
        } else {
            self.ahead
                .extend(heads.flat_map(|head| next.iter().map(move |at| at + head)));
        }
    }

    /// The part of the rows to prefetch that one head of the unit prefetches.
    fn share(&self, head: usize, heads: usize) -> &[usize] {
        let rows = self.ahead.len() / heads;
        &self.ahead[head * rows..(head + 1) * rows]
    }
}

impl<V: Variant> Unit<'_, V> {
    /// The keys (or values) of a tile, from the pool or changed by the variant.
    pub(super) fn tile_rows<'a>(
        &'a self,
        head: u32,
        tile: &Range<u32>,
        places: &'a Places,
        made: &'a mut [f32],
    ) -> TileRows<'a> {
        let dim = self.dim(places.pool);
        if !self.makes(places.pool) {
            let (pool, strides) = self.pool(places.pool);
            let of_unit = (head - self.kv_heads.start) as usize;
            return TileRows {
                pool,
                places: &places.tile[..tile.len()],
                head: head as usize * strides.head as usize,
                dim,
                ahead: places.share(of_unit, self.kv_heads.len()),
            };
        }
        let made = &mut made[..tile.len() * dim];
        match places.pool {
            Pool::Keys => self.load_keys(head, tile.clone(), made),
            Pool::Values => self.load_values(head, tile.clone(), made),
        }
        TileRows {
            pool: Slice::F32(made),
            places: &places.made[..tile.len()],
            head: 0,
            dim,
            ahead: &[],
        }
    }
}
