//! What the kernel is compiled for, and where things lie in shared memory.

/// Sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Warpgroups that compute.
    pub consumers: u32,
    /// Rows of a tile.
    pub rows: u32,
    /// Keys in a block.
    pub keys: u32,
    /// Head dimension of queries, keys and values.
    pub head_dim: u32,
    /// Blocks of keys in shared memory.
    pub stages: u32,
    /// Blocks of values: they stay longer, until P·V is done.
    pub value_stages: u32,
}

impl Shape {
    /// Threads of a CTA: the consumers and the warpgroup that feeds them.
    #[must_use]
    pub const fn threads(&self) -> u32 {
        128 * (self.consumers + 1)
    }

    pub(super) const fn block_bytes(&self) -> u32 {
        self.keys * self.head_dim * 2
    }

    /// Bytes of 64 columns of the queries.
    pub(super) const fn slab_bytes(&self) -> u32 {
        self.rows * 128
    }

    pub(super) const fn query_bytes(&self) -> u32 {
        self.head_dim / 64 * self.slab_bytes()
    }

    /// Two units' queries, the stages, the units' rows, what is known of them, barriers.
    pub(super) const fn keys_offset(&self) -> u32 {
        2 * self.query_bytes()
    }

    pub(super) const fn values_offset(&self) -> u32 {
        self.keys_offset() + self.stages * self.block_bytes()
    }

    pub(super) const fn rows_offset(&self) -> u32 {
        self.values_offset() + self.value_stages * self.block_bytes()
    }

    pub(super) const fn units_offset(&self) -> u32 {
        self.rows_offset() + 2 * self.rows * 16
    }

    pub(super) const fn barriers_offset(&self) -> u32 {
        self.units_offset() + 2 * UNIT_BYTES
    }

    /// Full and free of each stage behind the others.
    pub(super) const fn barriers(&self) -> u32 {
        BARRIERS + 2 * (self.stages + self.value_stages)
    }

    /// Dynamic shared memory.
    #[must_use]
    pub const fn shared_bytes(&self) -> u32 {
        self.barriers_offset() + 8 * self.barriers()
    }
}

/// A unit in shared memory: three vectors of four words.
pub(super) const UNIT_BYTES: u32 = 48;

/// Barriers beside those of the stages.
pub(super) const BARRIERS: u32 = 10;
