//! What runs give to the hooks of a case: slopes, a table of biases, or the bias of sigmoid weights.

use tandem_attn::{
    Error,
    problem::Spec,
    tensor::ShapeError,
    variant::FromLaunch,
    variants::{
        Alibi, BiasTable, DISTANCE_BIAS, DistanceBias, SIGMOID, Sigmoid, SigmoidBias, Slopes,
    },
};

/// The numbers that a workload gives for its hooks. Those of other hooks have no effect.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Numbers {
    /// Entries of a head in the table of biases by distance.
    pub entries: u32,
    /// What is added to the scaled dot product before the sigmoid.
    pub sigmoid: f32,
}

/// The data of a specification's hooks.
#[derive(Clone, Debug, PartialEq)]
pub enum Own {
    /// ALiBi: a slope for each query head.
    Slopes(Vec<f32>),
    /// Biases by distance: `[heads, entries]`, and the distance of the first entry.
    Biases {
        /// The table.
        table: Vec<f32>,
        /// The distance of the first entry.
        first: i32,
    },
    /// Sigmoid weights.
    Sigmoid {
        /// What is added to the scaled dot product.
        bias: f32,
    },
}

/// Runs `$body` with `$variant` bound to the variant that these hooks make of a specification.
#[macro_export]
macro_rules! with_hooks {
    ($own:expr, $spec:expr, $variant:ident => $body:expr) => {
        match $own {
            $crate::hooks::Own::Slopes(slopes) => {
                let $variant = &$crate::hooks::alibi($spec, slopes);
                $body
            }
            $crate::hooks::Own::Biases { table, first } => {
                let $variant = &$crate::hooks::distance_bias($spec, table, *first)?;
                $body
            }
            $crate::hooks::Own::Sigmoid { bias } => {
                let $variant = &$crate::hooks::sigmoid($spec, *bias);
                $body
            }
        }
    };
}

impl Own {
    /// The data that this program chooses for a specification with hooks: slopes from 2^(−8/heads) down to 1/256, as in models, or
    /// biases from −2 to 2 that differ from entry to entry and from head to head.
    #[must_use]
    pub fn of(spec: &Spec, numbers: Numbers) -> Option<Self> {
        let hooks = spec.variant.hooks?;
        if hooks == SIGMOID.name {
            let bias = numbers.sigmoid;
            return Some(Self::Sigmoid { bias });
        }
        if hooks == DISTANCE_BIAS.name {
            let all = spec.q_heads as usize * numbers.entries as usize;
            // Later keys, which queries see without a causal mask, have half of the entries.
            let first = match spec.variant.causal {
                true => 0,
                false => -((numbers.entries / 2) as i32),
            };
            let table = (0..all).map(|at| (at * 37 % 65) as f32 / 16.0 - 2.0);
            return Some(Self::Biases {
                table: table.collect(),
                first,
            });
        }
        let slope = |head: u32| (-8.0 * (head + 1) as f32 / spec.q_heads as f32).exp2();
        Some(Self::Slopes((0..spec.q_heads).map(slope).collect()))
    }

    /// The numbers that lie in the memory of the device that computes.
    #[must_use]
    pub fn in_memory(&self) -> &[f32] {
        match self {
            Self::Slopes(numbers) | Self::Biases { table: numbers, .. } => numbers,
            Self::Sigmoid { .. } => &[],
        }
    }

    /// The bytes that a run gives to the hooks, with the address of the numbers.
    ///
    /// # Errors
    /// If the table does not fit the query heads.
    pub fn bytes(&self, spec: &Spec, address: u64) -> Result<Vec<u8>, Error> {
        Ok(match self {
            Self::Slopes(_) => bytemuck::bytes_of(&Slopes { address }).to_vec(),
            Self::Biases { table, first } => {
                bytemuck::bytes_of(&bias_table(spec, address, table.len(), *first)?).to_vec()
            }
            &Self::Sigmoid { bias } => bytemuck::bytes_of(&SigmoidBias { bias }).to_vec(),
        })
    }
}

fn bias_table(spec: &Spec, address: u64, len: usize, first: i32) -> Result<BiasTable, Error> {
    BiasTable::new(address, len, spec.q_heads, first).map_err(|defect| {
        Error::from(ShapeError::Own {
            hooks: DISTANCE_BIAS.name,
            name: defect.name,
            got: defect.got,
            rule: defect.rule,
        })
    })
}

/// ALiBi with these slopes, which outlive it.
#[must_use]
pub fn alibi(spec: &Spec, slopes: &[f32]) -> Alibi {
    let address = slopes.as_ptr() as u64;
    // SAFETY: a slope for each head; callers keep them.
    unsafe { Alibi::from_launch(spec.variant_params(), &Slopes { address }) }
}

/// Biases by distance from this table, which outlives them.
///
/// # Errors
/// If the table does not fit the query heads.
pub fn distance_bias(spec: &Spec, table: &[f32], first: i32) -> Result<DistanceBias, Error> {
    let table = bias_table(spec, table.as_ptr() as u64, table.len(), first)?;
    // SAFETY: the table was checked, and callers keep it.
    Ok(unsafe { DistanceBias::from_launch(spec.variant_params(), &table) })
}

/// Sigmoid weights.
#[must_use]
pub fn sigmoid(spec: &Spec, bias: f32) -> Sigmoid {
    // SAFETY: there are no addresses in it.
    unsafe { Sigmoid::from_launch(spec.variant_params(), &SigmoidBias { bias }) }
}

#[cfg(test)]
mod tests {
    use tandem_attn::variants::ALIBI;

    use super::*;

    /// What a GPU is given: the bytes of the parameters that its kernels read.
    #[test]
    fn bytes_are_those_of_the_parameters_of_the_hooks() {
        let spec = Spec::new(8, 2, 64);
        let numbers = Numbers {
            entries: 9,
            sigmoid: -5.0,
        };
        assert_eq!(Own::of(&spec, numbers), None);
        let of = |spec: &Spec| Own::of(spec, numbers).expect("it has hooks");
        let address = 1 << 20;

        let slopes = of(&spec.with_hooks(&ALIBI));
        let expected = [0.5, 0.25, 0.125, 0.0625, 1.0 / 32.0, 1.0 / 64.0];
        assert_eq!(slopes.in_memory()[..6], expected);
        assert_eq!(
            slopes.bytes(&spec, address).unwrap(),
            bytemuck::bytes_of(&Slopes { address })
        );

        let sigmoid = of(&spec.with_hooks(&SIGMOID));
        assert!(sigmoid.in_memory().is_empty());
        let bias = SigmoidBias { bias: -5.0 };
        assert_eq!(
            sigmoid.bytes(&spec, address).unwrap(),
            bytemuck::bytes_of(&bias)
        );

        let causal = spec.with_hooks(&DISTANCE_BIAS);
        for (spec, first) in [(causal, 0), (causal.non_causal(), -4)] {
            let biases = of(&spec);
            assert_eq!(biases.in_memory().len(), 8 * 9);
            let table = BiasTable::new(address, 8 * 9, 8, first).unwrap();
            assert_eq!(
                biases.bytes(&spec, address).unwrap(),
                bytemuck::bytes_of(&table)
            );
            let of_heads: Vec<_> = biases.in_memory().chunks(9).collect();
            assert!(of_heads.windows(2).all(|heads| heads[0] != heads[1]));
        }
        let other = Spec::new(7, 1, 64).with_hooks(&DISTANCE_BIAS);
        let refused = of(&causal).bytes(&other, address).unwrap_err();
        assert!(
            refused.to_string().contains("numbers in the table"),
            "{refused}"
        );
    }
}
