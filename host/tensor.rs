//! Tensors in host memory: element types, shapes, and errors of shapes.

mod element;
mod erased;
mod error;

pub use element::{Element, F8E4M3, F8E5M2};
pub(crate) use element::{Slice, SliceMut, with_elements};
pub use erased::{TensorMut, TensorRef};
pub use error::ShapeError;

/// Data of a [`Spec`](crate::problem::Spec)'s variant for each query head, in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct HeadTensors<'a> {
    /// `[q_heads]`: the [sinks](crate::problem::Variant::sinks), natural logits. For page lists by KV head, those of the model
    /// ([`Variant::sink_tokens`](crate::problem::Variant::sink_tokens)).
    pub sinks: Option<&'a [f32]>,
}

impl<'a> HeadTensors<'a> {
    /// With sinks.
    #[must_use]
    pub const fn with_sinks(mut self, sinks: &'a [f32]) -> Self {
        self.sinks = Some(sinks);
        self
    }

    /// Checks that exactly the data that a specification needs is given.
    ///
    /// # Errors
    /// [`ShapeError::Missing`], [`ShapeError::Surplus`], [`ShapeError::Length`].
    pub fn check(&self, spec: &crate::problem::Spec) -> Result<(), ShapeError> {
        let name = "sinks";
        match (spec.variant.sinks, self.sinks) {
            (true, None) => Err(ShapeError::Missing { name }),
            (false, Some(_)) => Err(ShapeError::Surplus { name }),
            (true, Some(sinks)) => {
                ShapeError::length(name, sinks.len(), spec.shape_of_sinks(), spec.sinks())
            }
            (false, None) => Ok(()),
        }
    }
}

/// Checks that a variant's weights are a softmax exactly if the specification says so.
pub(crate) fn check_softmax(spec: &crate::problem::Spec, softmax: bool) -> Result<(), ShapeError> {
    let variant = &spec.variant;
    // A variant that the specification does not name is accepted as it is.
    if variant.hooks.is_some() && variant.adds_up == softmax {
        return Err(ShapeError::Softmax { softmax });
    }
    if variant.sinks && !softmax {
        return Err(ShapeError::SinksWithoutSoftmax);
    }
    Ok(())
}
