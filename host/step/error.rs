//! What is wrong with the data of a step.

use thiserror::Error;

/// An invalid description.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum StepError {
    /// A number of a rotary embedding.
    #[error("{what} of the rotary embedding is {got}: it must be {rule}")]
    Rope {
        /// The number.
        what: &'static str,
        /// Its value.
        got: f64,
        /// What it must be.
        rule: &'static str,
    },
    /// A rotary embedding of more elements than a head has.
    #[error(
        "the rotary embedding turns {got} elements, but heads have {head_dim}: use at most that many"
    )]
    RopeDim {
        /// Elements that it rotates.
        got: u32,
        /// Elements of a head.
        head_dim: u32,
    },
    /// A number of a sampling.
    #[error("{what} of the sampling is {got}: it must be {rule}")]
    Sampling {
        /// The number.
        what: &'static str,
        /// Its value.
        got: f64,
        /// What it must be.
        rule: &'static str,
    },
    /// Heads whose keys and values are not equally wide parts of one projection.
    #[error(
        "keys of {head_dim_qk} and values of {head_dim_v} elements{} are not parts of one fused projection: append \
         them with append_rows",
        if *.latent { " in latent attention" } else { "" }
    )]
    Heads {
        /// Head dimension of keys.
        head_dim_qk: u32,
        /// Head dimension of values.
        head_dim_v: u32,
        /// Whether attention is latent.
        latent: bool,
    },
}

impl StepError {
    /// Whether a number of a sampling holds its rule.
    pub(super) fn sampling(
        what: &'static str,
        got: f32,
        holds: bool,
        rule: &'static str,
    ) -> Result<(), Self> {
        match holds {
            true => Ok(()),
            // The f64 of its shortest decimal number, which is what was written: 1e-5, and not 9.999999747e-6.
            false => Err(Self::Sampling {
                what,
                got: got.to_string().parse().unwrap_or_else(|_| got.into()),
                rule,
            }),
        }
    }

    /// Whether heads have the elements that a rotary embedding turns.
    pub(crate) const fn rope_dim(got: u32, head_dim: u32) -> Result<(), Self> {
        match got > head_dim {
            true => Err(Self::RopeDim { got, head_dim }),
            false => Ok(()),
        }
    }
}
