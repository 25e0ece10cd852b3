//! Random numbers, and a comparison that says where two tensors part.
// Each program uses its own part of this.
#![allow(dead_code)]

use tandem_attn::{problem::Dtype, tensor::Element};

/// SplitMix64: the same numbers on every machine.
#[derive(Clone)]
pub struct Rng(pub u64);

impl Rng {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit.max(1) as u64) as usize
    }

    /// Evenly between the two.
    pub fn between(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * ((self.bits() >> 40) as f32 / (1 << 24) as f32)
    }

    pub fn floats(&mut self, count: usize, low: f32, high: f32) -> Vec<f32> {
        (0..count).map(|_| self.between(low, high)).collect()
    }

    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        for i in (1..values.len()).rev() {
            values.swap(i, self.below(i + 1));
        }
    }
}

/// Values of any element type, to be compared.
pub fn to_f64<T: Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x.to_f32())).collect()
}

/// What two tensors may differ by: `absolute + relative · |right|`.
#[derive(Clone, Copy, Debug)]
pub struct Tolerance {
    pub absolute: f64,
    pub relative: f64,
}

impl Tolerance {
    /// Rounding to an element type, and a little more.
    pub fn of(dtype: Dtype) -> Self {
        let relative = match dtype {
            Dtype::BF16 => 1.0 / 200.0,
            Dtype::F16 => 1.0 / 1500.0,
            _ => 1e-5,
        };
        Self {
            absolute: 1e-5,
            relative,
        }
    }
}

/// `Err` with the first place where the tensors differ, the worst one, and where NaN and ±∞ disagree.
pub fn compare(
    name: &str,
    shape: &[usize],
    got: &[f64],
    right: &[f64],
    tolerance: Tolerance,
) -> Result<(), String> {
    assert_eq!(
        got.len(),
        shape.iter().product::<usize>(),
        "shape of {name}"
    );
    assert_eq!(got.len(), right.len(), "length of {name}");
    let coordinate = |mut index: usize| {
        let mut at = vec![0; shape.len()];
        for axis in (0..shape.len()).rev() {
            at[axis] = index % shape[axis];
            index /= shape[axis];
        }
        format!("{at:?}")
    };
    let special = |x: f64| !x.is_finite();
    let mut wrong = 0;
    let (mut first, mut worst, mut specials) = (None, (0.0, 0), Vec::new());
    for (index, (&got, &right)) in got.iter().zip(right).enumerate() {
        let same_special = got == right || got.is_nan() && right.is_nan();
        if special(got) || special(right) {
            if !same_special {
                specials.push(index);
            }
        } else {
            let excess =
                (got - right).abs() - tolerance.absolute - tolerance.relative * right.abs();
            if excess <= 0.0 {
                continue;
            }
            wrong += 1;
            first.get_or_insert(index);
            if excess > worst.0 {
                worst = (excess, index);
            }
        }
    }
    if wrong == 0 && specials.is_empty() {
        return Ok(());
    }
    let show = |index: usize| {
        format!(
            "{} is {:e}, right is {:e}",
            coordinate(index),
            got[index],
            right[index]
        )
    };
    let mut report = format!("{name} {shape:?}: {wrong} of {} differ", got.len());
    if let Some(first) = first {
        report += &format!("; first {}; worst {}", show(first), show(worst.1));
    }
    if !specials.is_empty() {
        let places: Vec<_> = specials.iter().take(8).map(|&index| show(index)).collect();
        report += &format!("; {} with NaN or ∞: {}", specials.len(), places.join(", "));
    }
    Err(report)
}
