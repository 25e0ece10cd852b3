//! Inner nodes whose leaves are alike and fit one tile: all leaves are cut, or none.

/// Where the run of keys that reaches a node begins.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Number of ancestors above the node.
    pub above: u32,
    /// The first key.
    pub start: u32,
}

/// The best way to cut a node's children: the first `choices` of the packer's choices, and `leaves` of the uniform
/// leaves.
#[derive(Clone, Copy, Debug)]
pub struct Weighed {
    pub cost: u64,
    pub choices: usize,
    pub leaves: u32,
}

/// Most inner nodes: leaves with equal numbers of rows that fit one tile. They are all cut or all joined.
#[derive(Clone, Copy, Debug)]
pub struct Uniform {
    pub leaves: u32,
    /// Bytes of the leaves' own keys.
    pub bytes: u64,
    /// Bytes of a leaf's partial state.
    pub partial_bytes: u64,
    pub kv_bytes: u64,
    /// One past the node's last key.
    pub end: u32,
}

impl Uniform {
    #[inline]
    pub fn weigh(&self, run: Run) -> Weighed {
        let run_bytes = self.kv_bytes * u64::from(self.end - run.start);
        let is_partial = u64::from(run.start > 0);
        let leaves = u64::from(self.leaves);
        let joined = (run_bytes + is_partial * self.partial_bytes) * leaves;
        let cut = 2 * self.partial_bytes * leaves + run_bytes;
        let (bytes, leaves) = if cut < joined {
            (cut, self.leaves)
        } else {
            (joined, 0)
        };
        Weighed {
            cost: self.bytes + bytes,
            choices: 0,
            leaves,
        }
    }
}
