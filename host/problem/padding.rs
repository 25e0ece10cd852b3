//! Head dimensions between those of the kernels of a GPU.

use super::Spec;

/// How heads become such as kernels have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Padding {
    /// Elements of a head.
    pub(crate) dim: u32,
    /// Elements of a head that the kernel computes with.
    pub(crate) kernel_dim: u32,
    /// Slabs of 64 elements that the head has.
    pub(crate) slabs: u32,
    /// Elements from one slab to the next: where that is less than 64 they overlap.
    pub(crate) step: u32,
}

impl Padding {
    /// None where kernels have heads of these dimensions, or none can be made to have them: slabs start at multiples
    /// of 16 bytes, at equal distances.
    pub(crate) const fn of(spec: &Spec) -> Option<Self> {
        let dim = spec.head_dim_qk;
        if spec.head_dim_v != dim || dim == 0 || !dim.is_multiple_of(16) || dim > 256 {
            return None;
        }
        let kernel_dim = match dim {
            64 | 128 | 256 => return None,
            1..64 => 64,
            65..128 => 128,
            _ => 256,
        };
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
            kernel_dim,
            slabs,
            step,
        })
    }
}

impl Spec {
    /// The heads as kernels compute with them; scale and everything else stay.
    pub(crate) const fn on_kernels(mut self) -> Self {
        if let Some(padding) = Padding::of(&self) {
            self.head_dim_qk = padding.kernel_dim;
            self.head_dim_v = padding.kernel_dim;
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_cover_heads_and_no_more() {
        let mut refused = Vec::new();
        for dim in (16..=256).step_by(16) {
            match Padding::of(&Spec::new(4, 2, dim)) {
                Some(padding) => {
                    let end = (padding.slabs - 1) * padding.step + 64;
                    assert!(end == dim || padding.slabs == 1 && dim < 64, "{padding:?}");
                    assert!(padding.slabs * 64 <= padding.kernel_dim);
                }
                None => refused.push(dim),
            }
        }
        assert_eq!(refused, [64, 128, 224, 240, 256]);
    }
}
