//! Head dimensions between those of the kernels of a GPU.

use kernels_gpu::registry::{KERNELS, Op};

use super::{Dtype, Spec};

/// Head dimensions that are padded are multiples of this, up to the largest.
const STEP: u32 = 16;
const MOST: u32 = 256;

/// By multiples of [`STEP`]: the least head dimension of decode kernels that holds so many elements. Kernels for two KV heads at a time
/// read heads as they are, and those of larger heads take prompts, too.
const KERNEL_DIMS: [u32; (MOST / STEP) as usize + 1] = {
    let (mut dims, mut index) = ([MOST; _], 0);
    while index < KERNELS.len() {
        let row = &KERNELS[index];
        let pads = matches!(row.op, Op::Decode) && !row.latent && !row.takes_prompts;
        if pads && row.kv_heads == 1 && row.head_dim == row.value_dim {
            let mut at = 0;
            while at < dims.len() {
                if at as u32 * STEP <= row.head_dim && row.head_dim < dims[at] {
                    dims[at] = row.head_dim;
                }
                at += 1;
            }
        }
        index += 1;
    }
    dims
};

/// How heads are padded to a head dimension that kernels have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Padding {
    /// Elements of a head.
    pub(crate) dim: u32,
    /// Elements of a head in the kernel.
    pub(crate) kernel_dim: u32,
    /// Slabs of 64 elements that the head has.
    pub(crate) slabs: u32,
    /// Elements from one slab to the next. If less than 64, slabs overlap.
    pub(crate) step: u32,
}

impl Padding {
    /// None if kernels have this head dimension, or if it is no multiple of 16.
    pub(crate) const fn of(spec: &Spec) -> Option<Self> {
        let dim = spec.head_dim_qk;
        if spec.head_dim_v != dim || dim == 0 || !dim.is_multiple_of(STEP) || dim > MOST {
            return None;
        }
        let kernel_dim = KERNEL_DIMS[(dim / STEP) as usize];
        if kernel_dim == dim {
            return None;
        }
        match Self::of_row(dim) {
            Some(row) if spec.kv_dtype.bytes() > 1 => Some(Self { kernel_dim, ..row }),
            // Loaders copy row by row: keys of 8 bits, and 224 and 240, which have no equal slabs.
            _ => Some(Self {
                dim,
                kernel_dim,
                slabs: dim.div_ceil(64),
                step: 64,
            }),
        }
    }

    /// Whether the last of several slabs has fewer columns. Tensor maps do not read such heads: the box would contain bytes of
    /// the next head.
    pub(crate) const fn is_cut(&self) -> bool {
        self.slabs > 1 && (self.slabs - 1) * self.step + 64 > self.dim
    }

    /// The padding of a row of one or several heads, in as many slabs as it needs, which contain no other column. None if
    /// these would not start at multiples of 16 bytes and equal distances.
    pub(crate) const fn of_row(dim: u32) -> Option<Self> {
        let slabs = dim.div_ceil(64);
        let step = if slabs == 1 {
            64
        } else if (dim - 64).is_multiple_of(8 * (slabs - 1)) {
            (dim - 64) / (slabs - 1)
        } else {
            return None;
        };
        Some(Self {
            dim,
            kernel_dim: slabs * 64,
            slabs,
            step,
        })
    }

    /// For heads of two slabs: additional columns between the 64th column of a padded head's output and the next.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) const fn gap(&self) -> u32 {
        64 - self.step
    }
}

impl Spec {
    /// The heads and types that kernels compute with. Scale and everything else stay.
    pub(crate) const fn on_kernels(mut self) -> Self {
        let rows = self.dtype_of_rows();
        if self.rounds_queries() {
            self.q_dtype = rows;
        }
        if self.has_f32_outputs() {
            self.out_dtype = rows;
        }
        if let Some(padding) = Padding::of(&self) {
            self.head_dim_qk = padding.kernel_dim;
            self.head_dim_v = padding.kernel_dim;
        }
        self
    }

    /// The type of queries in kernels. F32 queries take the type of the keys or, if keys have 8 bits, that of the
    /// outputs.
    const fn dtype_of_rows(&self) -> Dtype {
        match (self.q_dtype, self.kv_dtype, self.out_dtype) {
            (Dtype::F32, of @ (Dtype::BF16 | Dtype::F16), _) => of,
            (Dtype::F32, _, of @ (Dtype::BF16 | Dtype::F16)) => of,
            (Dtype::F32, ..) => Dtype::BF16,
            (of, ..) => of,
        }
    }

    /// Whether queries are rounded before the kernels of a GPU read them.
    pub(crate) const fn rounds_queries(&self) -> bool {
        matches!(self.q_dtype, Dtype::F32)
    }

    /// Whether outputs on a GPU come from merges: only these write F32.
    pub(crate) const fn has_f32_outputs(&self) -> bool {
        matches!(self.out_dtype, Dtype::F32)
    }

    /// Bytes of an element of outputs whose heads are padded: kernels write 16 bits, and merges F32.
    pub(crate) const fn bytes_of_padded_outputs(&self) -> usize {
        if self.has_f32_outputs() { 4 } else { 2 }
    }

    /// Whether a GPU copies queries to the workspace before its kernels read them.
    pub(crate) const fn moves_queries(&self) -> bool {
        Padding::of(self).is_some() || self.rounds_queries()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Kernels for single KV heads have these dimensions.
    #[test]
    fn heads_are_padded_to_those_of_the_next_kernel() {
        let decodes = KERNELS.iter().filter(|row| row.op == Op::Decode);
        let alone = decodes.filter(|row| row.kv_heads == 1 && !row.latent);
        let dims: BTreeSet<_> = alone.map(|row| row.head_dim).collect();
        for dim in (16..=256).step_by(16) {
            let next = *dims
                .range(dim..)
                .next()
                .expect("kernels of 256 are the widest");
            let padded = Spec::new(4, 2, dim).on_kernels().head_dim_qk;
            assert_eq!(padded, next, "{dim}");
        }
    }

    #[test]
    fn slabs_cover_heads_and_no_more() {
        let (mut cut, mut whole) = (Vec::new(), Vec::new());
        for dim in (16..=256).step_by(16) {
            match Padding::of(&Spec::new(4, 2, dim)) {
                Some(padding) => {
                    let end = (padding.slabs - 1) * padding.step + 64;
                    if padding.is_cut() {
                        cut.push(dim);
                        assert_eq!((padding.step, padding.slabs), (64, dim.div_ceil(64)));
                        continue;
                    }
                    assert!(end == dim || padding.slabs == 1 && dim < 64, "{padding:?}");
                    assert!(padding.slabs * 64 <= padding.kernel_dim);
                    if padding.slabs == 2 {
                        assert_eq!(dim + padding.gap(), padding.kernel_dim);
                    }
                }
                None => whole.push(dim),
            }
        }
        assert_eq!(whole, [64, 128, 256]);
        assert_eq!(cut, [224, 240]);
    }

    #[test]
    fn slabs_of_8_bits_start_at_vectors() {
        for dim in (16..=256).step_by(16) {
            let spec = Spec::new(4, 2, dim).with_kv_dtype(Dtype::F8E4M3);
            if let Some(padding) = Padding::of(&spec) {
                assert_eq!((padding.step, padding.slabs), (64, dim.div_ceil(64)));
            }
        }
    }
}
