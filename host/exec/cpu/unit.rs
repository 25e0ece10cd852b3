//! A piece of work (one item and some KV heads), and how its queries, keys and values become f32.

use std::ops::Range;

use kernels_gpu::{
    abi::{KvStrides, WorkItem},
    masks::sees,
    variant::{Hook, Key, Pair, Query, Variant},
};

use super::{buffer::Buffer, simd::prefetch};
use crate::{
    kv::{KvScales, KvView, LATENT_656_BYTES, ScaleAt, latent_656},
    plan::Plan,
    problem::Spec,
    step::RopeTable,
    tensor::{Element, Slice, with_elements},
};

/// Memory for the work of one thread.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    pub(super) queries: Buffer,
    pub(super) outputs: Buffer,
    pub(super) keys: Buffer,
    pub(super) values: Buffer,
    pub(super) logits: Buffer,
}

/// Queries of any type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queries<'a> {
    pub(super) elements: Slice<'a>,
    /// Elements from a token to the next.
    pub(super) token: usize,
    /// Elements from a head to the next.
    pub(super) head: usize,
}

/// Keys and values of a part, of any type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pools<'a> {
    pub(super) k: Slice<'a>,
    pub(super) v: Slice<'a>,
    pub(super) k_strides: KvStrides,
    pub(super) v_strides: KvStrides,
    pub(super) scales: KvScales<'a>,
    /// The elements of latent keys that are no part of the values, if they have a pool of their own.
    pub(super) rope: Option<(Slice<'a>, KvStrides)>,
}

impl<'a> Pools<'a> {
    pub(super) fn new<T: Element>(view: &KvView<'a, T>) -> Self {
        let &KvView {
            k,
            v,
            k_strides,
            v_strides,
            scales,
            rope,
        } = view;
        Self {
            k: T::erase(k),
            v: T::erase(v),
            k_strides,
            v_strides,
            scales,
            rope: rope.map(|rope| (T::erase(rope.pool), rope.strides)),
        }
    }
}

/// The pool of the keys or that of the values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pool {
    Keys,
    Values,
}

/// Rows of a pool: some keys (or values) of one head.
#[derive(Debug)]
pub(super) struct PoolRows<'a> {
    pool: Slice<'a>,
    strides: KvStrides,
    head: u32,
    keys: Range<u32>,
    /// Elements of a key (or value), and those of them that come from this pool.
    dim: usize,
    columns: Range<usize>,
    pages: &'a [u32],
    /// Where the item ends: keys before it will be read, too.
    end: u32,
}

/// A row is prefetched this many keys before it is needed.
const AHEAD: u32 = 16;

impl PoolRows<'_> {
    /// Copies the rows to `[keys, dim]`, there to `columns`.
    #[inline(always)]
    pub(super) fn load(&self, to: &mut [f32]) {
        with_elements!(Slice(self.pool), pool => self.load_from(pool, to));
    }

    #[inline(always)]
    fn load_from<T: Element>(&self, pool: &[T], to: &mut [f32]) {
        for (key, to) in self.keys.clone().zip(to.chunks_exact_mut(self.dim)) {
            if key + AHEAD < self.end {
                prefetch(self.row(pool, key + AHEAD));
            }
            to[self.columns.clone()]
                .iter_mut()
                .zip(self.row(pool, key))
                .for_each(|(to, x)| *to = x.to_f32());
        }
    }

    #[inline(always)]
    fn row<'p, T>(&self, pool: &'p [T], key: u32) -> &'p [T] {
        let &Self { strides, .. } = self;
        let (page, offset) = (
            self.pages[(key / strides.page_size) as usize],
            key % strides.page_size,
        );
        let start = page as usize * strides.page as usize
            + offset as usize * strides.token as usize
            + self.head as usize * strides.head as usize;
        &pool[start..start + self.columns.len()]
    }
}

/// A query token and one of the query heads of a KV head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row<'a> {
    token: u32,
    /// Index of the head in its group.
    member: u32,
    position: i32,
    /// First key position that it sees.
    pub(super) first: i32,
    /// Last key position that it sees, inclusive.
    pub(super) last: i32,
    /// The words of its mask, and where their bits begin ([`kernels_gpu::masks`]).
    mask: (&'a [u64], u32),
}

impl Row<'_> {
    /// Whether a key lies within its visible interval.
    #[inline(always)]
    pub(super) fn sees(&self, key: u32) -> bool {
        (self.first..=self.last).contains(&(key as i32))
    }

    /// Which of some keys lie within its visible interval.
    #[inline(always)]
    pub(super) fn seen(&self, keys: &Range<u32>) -> Range<u32> {
        let begin = (self.first.max(0) as u32).clamp(keys.start, keys.end);
        let end = (self.last.saturating_add(1).max(0) as u32).clamp(begin, keys.end);
        begin..end
    }

    /// Hides the keys that its mask hides. `logits` has one place for each key.
    pub(super) fn hide_masked<'l>(
        &self,
        keys: Range<u32>,
        hidden: f32,
        logits: impl Iterator<Item = &'l mut f32>,
    ) {
        let (words, after) = self.mask;
        if matches!(words, [] | [u64::MAX]) {
            return;
        }
        for (logit, key) in logits.zip(keys) {
            if !sees(words, after, self.position, key as i32) {
                *logit = hidden;
            }
        }
    }
}

/// Copies rows of a pool as f32, compiled for the machine's instruction set.
pub(super) type LoadRows = fn(&PoolRows<'_>, &mut [f32]);

/// One item and some KV heads.
pub(super) struct Unit<'a, V> {
    pub(super) variant: &'a V,
    /// With the heads of its part.
    pub(super) spec: Spec,
    /// As [`Part::heads`](crate::problem::Part::heads): so many tokens of the queries are one of its rows.
    heads: u32,
    pub(super) kv_heads: Range<u32>,
    /// Key positions.
    pub(super) keys: Range<u32>,
    /// Token by token, with the heads of a group together. The same for all KV heads.
    pub(super) rows: Vec<Row<'a>>,
    q: Queries<'a>,
    pools: &'a Pools<'a>,
    pages: &'a [u32],
    /// The rotary embedding, applied to queries and keys before the variant sees them.
    rotary: Option<&'a RopeTable>,
    load: LoadRows,
}

impl<'a, V: Variant> Unit<'a, V> {
    #[expect(clippy::too_many_arguments, reason = "what a unit is made of")]
    pub(super) fn new(
        variant: &'a V,
        plan: &'a Plan,
        item: WorkItem,
        kv_heads: Range<u32>,
        q: Queries<'a>,
        pools: &'a Pools<'a>,
        rotary: Option<&'a RopeTable>,
        load: LoadRows,
    ) -> Self {
        let heads = plan.parts[item.part as usize].heads;
        let spec = plan.spec.times(heads);
        let token_and_position = |row: u32| {
            if item.is_gathered() {
                let row = plan.rows[(item.rows_begin + row) as usize];
                (row.token, row.position)
            } else {
                (
                    item.rows_begin + row,
                    item.position.wrapping_add_unsigned(row),
                )
            }
        };
        let rows = (0..item.rows).flat_map(|row| {
            let (token, position) = token_and_position(row);
            let (first, last) = variant.visible_keys(position);
            let mask = plan.mask_of(token);
            (0..spec.group()).map(move |member| Row {
                token,
                member,
                position,
                first,
                last,
                mask,
            })
        });
        Self {
            variant,
            spec,
            heads,
            kv_heads,
            keys: item.kv_begin..item.kv_end,
            rows: rows.collect(),
            q,
            pools,
            pages: &plan.page_ids[item.table as usize..],
            rotary,
            load,
        }
    }

    /// Loads the query of a row, ready for the product with the keys.
    pub(super) fn load_query(&self, row: &Row, kv_head: u32, to: &mut [f32]) {
        let head = self.head(row, kv_head);
        let of_token = self.spec.q_heads / self.heads;
        let token = row.token * self.heads + head / of_token;
        let start = token as usize * self.q.token + (head % of_token) as usize * self.q.head;
        with_elements!(Slice(self.q.elements), q => {
            to.iter_mut().zip(&q[start..]).for_each(|(to, x)| *to = x.to_f32());
        });
        if let Some(table) = self.rotary {
            table.turn(to, row.position.into());
        }
        if V::TRANSFORMS_QUERY {
            let at = Query {
                token: row.token,
                head,
                position: row.position,
            };
            transform(to, |x, dim| self.variant.query(x, dim, at).plain());
        }
        // Scaling costs one multiplication per element of a query here, instead of one per logit.
        let of_logits = match V::TRANSFORMS_LOGITS {
            true => 1.0,
            false => self.variant.params().scale_log2,
        };
        let [of_keys, _] = self.row_scales(row, kv_head);
        let scale = of_logits * of_keys;
        if scale != 1.0 {
            to.iter_mut().for_each(|x| *x *= scale);
        }
    }

    /// The scales of keys and of values for a row, if they are the same for all keys; otherwise 1.
    pub(super) fn row_scales(&self, row: &Row, kv_head: u32) -> [f32; 2] {
        if self.pools.scales.by_key() {
            return [1.0; 2];
        }
        let at = ScaleAt {
            token: row.token,
            head: kv_head,
            page: 0,
            offset: 0,
        };
        self.pools.scales.at(self.spec.kv_heads, at)
    }

    /// Whether the keys (or values) differ from those of the pool, or are in two pools.
    pub(super) const fn makes(&self, pool: Pool) -> bool {
        let transforms = match pool {
            Pool::Keys => V::TRANSFORMS_KEY || self.rotary.is_some() || self.pools.rope.is_some(),
            Pool::Values => V::TRANSFORMS_VALUE,
        };
        transforms || self.pools.scales.by_key()
    }

    /// Multiplies keys (or values) of one head by the scales of their tokens, unless the rows contain these.
    fn scale_rows(&self, of: Pool, head: u32, keys: Range<u32>, to: &mut [f32]) {
        if !matches!(self.pools.scales, KvScales::Token { .. }) {
            return;
        }
        let page_size = self.pools.k_strides.page_size;
        for (key, to) in keys.zip(to.chunks_exact_mut(self.dim(of))) {
            let at = ScaleAt {
                token: 0,
                head,
                page: self.pages[(key / page_size) as usize],
                offset: key % page_size,
            };
            let [k, v] = self.pools.scales.at(self.spec.kv_heads, at);
            let scale = match of {
                Pool::Keys => k,
                Pool::Values => v,
            };
            to.iter_mut().for_each(|x| *x *= scale);
        }
    }

    /// A pool and its strides.
    pub(super) const fn pool(&self, pool: Pool) -> (Slice<'a>, &'a KvStrides) {
        match pool {
            Pool::Keys => (self.pools.k, &self.pools.k_strides),
            Pool::Values => (self.pools.v, &self.pools.v_strides),
        }
    }

    /// Elements of a key (or value).
    pub(super) const fn dim(&self, pool: Pool) -> usize {
        match pool {
            Pool::Keys => self.spec.head_dim_qk as usize,
            Pool::Values => self.spec.head_dim_v as usize,
        }
    }

    /// Writes where some keys (or values) of head 0 begin.
    pub(super) fn places(&self, pool: Pool, keys: Range<u32>, to: &mut [usize]) {
        let (_, strides) = self.pool(pool);
        let mut page = (keys.start / strides.page_size) as usize;
        let mut offset = keys.start % strides.page_size;
        for (_, to) in keys.zip(to) {
            *to = self.pages[page] as usize * strides.page as usize
                + offset as usize * strides.token as usize;
            offset += 1;
            if offset == strides.page_size {
                (page, offset) = (page + 1, 0);
            }
        }
    }

    /// Keys of one head, `[keys, head_dim_qk]`.
    pub(super) fn load_keys(&self, head: u32, keys: Range<u32>, to: &mut [f32]) {
        self.load_rows(Pool::Keys, head, keys.clone(), to);
        if let Some(table) = self.rotary {
            for (position, to) in keys.clone().zip(to.chunks_exact_mut(self.dim(Pool::Keys))) {
                table.turn(to, position.into());
            }
        }
        if V::TRANSFORMS_KEY {
            for (position, to) in keys.clone().zip(to.chunks_exact_mut(self.dim(Pool::Keys))) {
                transform(to, |x, dim| {
                    self.variant.key(x, dim, Key { position, head }).plain()
                });
            }
        }
        self.scale_rows(Pool::Keys, head, keys, to);
    }

    /// Values of one head, `[keys, head_dim_v]`.
    pub(super) fn load_values(&self, head: u32, keys: Range<u32>, to: &mut [f32]) {
        self.load_rows(Pool::Values, head, keys.clone(), to);
        if V::TRANSFORMS_VALUE {
            for (position, to) in keys
                .clone()
                .zip(to.chunks_exact_mut(self.dim(Pool::Values)))
            {
                transform(to, |x, dim| {
                    self.variant.value(x, dim, Key { position, head }).plain()
                });
            }
        }
        self.scale_rows(Pool::Values, head, keys, to);
    }

    fn load_rows(&self, of: Pool, head: u32, keys: Range<u32>, to: &mut [f32]) {
        let (pool, &strides) = self.pool(of);
        if self.pools.scales == KvScales::InRow {
            return self.widen_rows(of, keys, to);
        }
        let dim = self.dim(of);
        let mut load = |pool, strides, columns| {
            let rows = PoolRows {
                pool,
                strides,
                head,
                keys: keys.clone(),
                dim,
                columns,
                pages: self.pages,
                end: self.keys.end,
            };
            (self.load)(&rows, to);
        };
        match (of, self.pools.rope) {
            (Pool::Keys, Some((rope, of_rope))) => {
                let latent = self.dim(Pool::Values);
                load(pool, strides, 0..latent);
                load(rope, of_rope, latent..dim);
            }
            _ => load(pool, strides, 0..dim),
        }
    }

    /// Loads keys (or values) from rows that contain their scales.
    fn widen_rows(&self, of: Pool, keys: Range<u32>, to: &mut [f32]) {
        let (pool, strides) = self.pool(of);
        let bytes = pool.bytes();
        for (key, to) in keys.zip(to.chunks_exact_mut(self.dim(of))) {
            let page = self.pages[(key / strides.page_size) as usize];
            let start = page as usize * strides.page as usize
                + (key % strides.page_size) as usize * strides.token as usize;
            latent_656::widen(&bytes[start..start + LATENT_656_BYTES as usize], to);
        }
    }

    /// Whether hooks must change the products.
    pub(super) const HAS_LOGIT_HOOKS: bool = V::TRANSFORMS_LOGITS || V::MASKS;

    /// The logit (or weight) of a key within the row's visible interval; −∞ (or 0) if hooks hide it.
    #[inline(always)]
    pub(super) fn logit(&self, dot: f32, row: &Row, kv_head: u32, key: u32) -> f32 {
        let query = Query {
            token: row.token,
            head: self.head(row, kv_head),
            position: row.position,
        };
        let at = Pair::new(self.variant, query, key);
        if V::MASKS && !self.variant.visible(at).plain() {
            hidden(V::SOFTMAX)
        } else if V::TRANSFORMS_LOGITS {
            self.variant.base_2(dot, at)
        } else {
            dot
        }
    }

    #[inline(always)]
    fn head(&self, row: &Row, kv_head: u32) -> u32 {
        kv_head * self.spec.group() + row.member
    }
}

/// The logit (or weight) of a key that a row does not see.
pub(super) const fn hidden(softmax: bool) -> f32 {
    if softmax { f32::NEG_INFINITY } else { 0.0 }
}

fn transform(row: &mut [f32], hook: impl Fn([f32; 2], u32) -> [f32; 2]) {
    for (pair, x) in row.chunks_exact_mut(2).enumerate() {
        x.copy_from_slice(&hook([x[0], x[1]], 2 * pair as u32));
    }
}
