//! Keys and values of a tile where they lie, and the memory that is asked for meanwhile.

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
    /// How far the head is from head 0.
    pub(super) head: usize,
    pub(super) dim: usize,
    /// Where rows begin that will be needed for the next tile, in the order of memory: this head's share of
    /// the rows of all heads.
    pub(super) ahead: &'a [usize],
}

impl TileRows<'_> {
    /// A row; the last where there are not so many.
    #[inline(always)]
    pub(super) fn get<'p, T>(&self, pool: &'p [T], index: usize) -> &'p [T] {
        let at = self.places[index.min(self.places.len() - 1)] + self.head;
        &pool[at..at + self.dim]
    }

    /// Has the next elements that will be needed brought into the cache: those after row and element `from`,
    /// which moves on. Little by little, for a processor can wait for a few reads only beside its work.
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

/// Where the keys (or values) of a tile lie, and what to ask for meanwhile.
pub(super) struct Places {
    pool: Pool,
    /// For head 0; the next tile's.
    tile: [usize; KEYS],
    next: [usize; KEYS],
    /// Rows of the next tile, of all heads, as they follow one another in memory: only so do the hardware's
    /// own prefetchers recognise a stream, and without them there are too few reads under way.
    ahead: Vec<usize>,
    /// Where they lie when a variant made something else of them.
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

    /// Goes on to the next tile; `after` comes after that.
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

    /// The share of a head, of those of the unit, in what is asked for.
    fn share(&self, head: usize, heads: usize) -> &[usize] {
        let rows = self.ahead.len() / heads;
        &self.ahead[head * rows..(head + 1) * rows]
    }
}

impl<V: Variant> Unit<'_, V> {
    /// The keys (or values) of a tile, from the pool or as the variant makes them.
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
