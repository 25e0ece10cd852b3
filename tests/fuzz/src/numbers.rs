//! Numbers of keys, values and queries, and how they lie in memory.

use half::{bf16, f16};
use tandem_attn::{
    problem::Dtype,
    tensor::{Element, F8E4M3, F8E5M2},
};

use crate::{
    case::{Case, Numbers},
    numeric::Rng,
};

/// Evaluates an expression with `T` the element type of a [`Dtype`].
#[macro_export]
macro_rules! with_type {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            ::tandem_attn::problem::Dtype::F16 => {
                type $T = ::half::f16;
                $body
            }
            ::tandem_attn::problem::Dtype::BF16 => {
                type $T = ::half::bf16;
                $body
            }
            ::tandem_attn::problem::Dtype::F32 => {
                type $T = f32;
                $body
            }
            ::tandem_attn::problem::Dtype::F8E4M3 => {
                type $T = ::tandem_attn::tensor::F8E4M3;
                $body
            }
            ::tandem_attn::problem::Dtype::F8E5M2 => {
                type $T = ::tandem_attn::tensor::F8E5M2;
                $body
            }
            other => unreachable!("{other:?} is not drawn"),
        }
    };
}

/// The nearest number of a type.
pub fn round(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::BF16 => bf16::from_f32(x).to_f32(),
        Dtype::F32 => x,
        Dtype::F8E4M3 => Element::to_f32(F8E4M3::from_f32(x)),
        Dtype::F8E5M2 => Element::to_f32(F8E5M2::from_f32(x)),
        other => unreachable!("{other:?} is not drawn"),
    }
}

/// Writes numbers from a byte on.
pub fn put(dtype: Dtype, numbers: &[f32], to: &mut [u8]) {
    let bytes = numbers.len() * dtype.bytes() as usize;
    with_type!(dtype, T => {
        let to: &mut [T] = bytemuck::cast_slice_mut(&mut to[..bytes]);
        to.iter_mut().zip(numbers).for_each(|(to, &x)| *to = <T as Element>::from_f32(x));
    });
}

/// Reads so many.
pub fn get(dtype: Dtype, from: &[u8], count: usize) -> Vec<f64> {
    with_type!(dtype, T => {
        let from: &[T] = bytemuck::cast_slice(&from[..count * size_of::<T>()]);
        from.iter().map(|&x| f64::from(Element::to_f32(x))).collect()
    })
}

/// By how much queries and keys are larger than usual.
fn amplitudes(case: &Case) -> (f32, f32) {
    match case.numbers {
        Numbers::Steep => (100.0, 3.0),
        Numbers::Huge => (1000.0, 30.0),
        Numbers::Tiny if case.spec.kv_dtype == Dtype::BF16 => (4.0, 1e-39),
        Numbers::Tiny => (4.0, 1e-7),
        _ => (4.0, 1.0),
    }
}

/// The mean, over random logits, of the scaled sum of |q·k| over the elements of a head.
pub fn summands(case: &Case) -> f64 {
    let (q, k) = amplitudes(case);
    f64::from(case.spec.scale * case.spec.head_dim_qk as f32 * q * k) / 4.0
}

/// A row of queries. Where logits rise or fall the first element says by how much.
pub fn query(case: &Case, step: usize, row: usize) -> Vec<f32> {
    let seed = case.seed ^ (step as u64) << 40 ^ (row as u64) << 8 ^ 3;
    let most = amplitudes(case).0;
    let mut numbers = Rng(seed).floats(case.spec.head_dim_qk as usize, -most, most);
    if matches!(
        case.numbers,
        Numbers::Rising | Numbers::Falling | Numbers::OneKey | Numbers::Infinite
    ) {
        numbers[0] = 8.0;
    }
    let dtype = match case.spec.q_dtype {
        // A GPU rounds these, which loses nothing then.
        Dtype::F32 if case.spec.kv_dtype.bytes() < 4 => Dtype::BF16,
        other => other,
    };
    let round = |x| round(dtype, x);
    numbers.into_iter().map(round).collect()
}

/// A key or a value of a head, in a slot of the pool that holds a position of a sequence.
pub fn cached(case: &Case, is_value: bool, slot: u32, position: u32, head: u32) -> Vec<f32> {
    let spec = &case.spec;
    let mut seed = u64::from(slot) << 20 ^ u64::from(head) << 4 ^ u64::from(is_value);
    if case.numbers == Numbers::Equal && !is_value {
        seed = u64::from(head);
    }
    let mut rng = Rng(case.seed ^ seed.wrapping_mul(0x2545_F491_4F6C_DD1D) ^ 4);
    if is_value {
        return rng.floats(spec.head_dim_v as usize, -1.0, 1.0);
    }
    let most = amplitudes(case).1;
    let mut numbers = rng.floats(spec.head_dim_qk as usize, -most, most);
    let step = 1.0 / (8.0 * spec.scale);
    match case.numbers {
        Numbers::Rising => numbers[0] = step * position as f32,
        Numbers::Falling => numbers[0] = -step * position as f32,
        Numbers::OneKey if position as u64 % 97 == case.seed % 97 => numbers[0] = 200.0 * step,
        _ => {}
    }
    // Within what the type has.
    let largest = match spec.kv_dtype {
        Dtype::F8E4M3 => 200.0,
        _ => 20_000.0,
    };
    numbers
        .iter_mut()
        .for_each(|x| *x = x.clamp(-largest, largest));
    if case.numbers == Numbers::Infinite && u64::from(position) % 61 == case.seed % 61 {
        numbers[0] = f32::INFINITY;
    }
    numbers
}
