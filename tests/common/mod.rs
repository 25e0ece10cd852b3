//! What GPU tests and benchmarks share: a GPU or a reason why there is none, device memory, random data,
//! and a comparison that says where two tensors part.
// Each program uses its own part of this.
#![allow(dead_code)]

use std::{io::Write, ptr, sync::OnceLock};

use bytemuck::Pod;
use cust::{
    memory::{CopyDestination, DeviceBuffer},
    sys,
};
use half::{bf16, f16};
use tandem_attn::{
    Error,
    exec::gpu::{CUstream, DeviceArray, DeviceTensor, Gpu},
    problem::Dtype,
    tensor::Element,
};

/// The first GPU, or `None` and a line that names the test and the reason.
///
/// With `TANDEM_REQUIRE_GPU` set, a missing GPU is a failure.
pub fn gpu(test: &str) -> Option<&'static Gpu> {
    static GPU: OnceLock<Result<Gpu, Error>> = OnceLock::new();
    match GPU.get_or_init(|| Gpu::new(0)) {
        Ok(gpu) => {
            gpu.make_current().expect("the primary context is there");
            Some(gpu)
        }
        Err(error @ (Error::NoDriver { .. } | Error::NoDevice { .. })) => {
            assert!(
                std::env::var_os("TANDEM_REQUIRE_GPU").is_none(),
                "{test}: {error}"
            );
            let reason = match error {
                Error::NoDriver { reason, .. } => format!("no CUDA driver ({reason})"),
                _ => error.to_string(),
            };
            // Past the test runner, which would show this for failures only.
            let _ = writeln!(std::io::stderr(), "skipped: {test}: {reason}");
            None
        }
        Err(error) => panic!("{test}: {error}"),
    }
}

/// A stream of its own, that the default stream does not wait for.
pub struct Stream(pub CUstream);

impl Stream {
    pub fn new() -> Self {
        let mut stream = ptr::null_mut();
        // SAFETY: writes one handle. 1 is CU_STREAM_NON_BLOCKING.
        let code = unsafe { sys::cuStreamCreate(&mut stream, 1) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        Self(stream)
    }

    pub fn wait(&self) {
        // SAFETY: the stream lives.
        let code = unsafe { sys::cuStreamSynchronize(self.0) };
        assert_eq!(
            code,
            sys::CUresult::CUDA_SUCCESS,
            "work on the stream failed"
        );
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by us.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.0) };
    }
}

/// Device memory, as bytes.
pub struct Memory(DeviceBuffer<u8>);

impl Memory {
    pub fn new<T: Pod>(values: &[T]) -> Self {
        Self(DeviceBuffer::from_slice(bytemuck::cast_slice(values)).expect("device memory"))
    }

    /// Of so many bytes, with anything in it.
    pub fn of_bytes(bytes: usize) -> Self {
        // SAFETY: bytes may have any value.
        Self(unsafe { DeviceBuffer::uninitialized(bytes) }.expect("device memory"))
    }

    pub fn address(&self) -> u64 {
        self.0.as_device_ptr().as_raw()
    }

    /// The values in it; all work on it must be done.
    pub fn read<T: Pod>(&self) -> Vec<T> {
        let mut values = vec![T::zeroed(); self.0.len() / size_of::<T>()];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
        self.0.copy_to(bytes).expect("device memory is readable");
        values
    }

    pub fn array<T>(&self) -> DeviceArray<T> {
        DeviceArray::new(self.address(), self.0.len() / size_of::<T>())
    }

    pub fn tensor<const RANK: usize>(
        &self,
        dtype: Dtype,
        shape: [usize; RANK],
    ) -> DeviceTensor<RANK> {
        DeviceTensor::new(self.address(), dtype, shape)
    }
}

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

/// The bytes of a tensor of `dtype` with these values.
pub fn encode(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    fn as_type<T: Element>(values: &[f32]) -> Vec<u8> {
        let values: Vec<T> = values.iter().map(|&x| T::from_f32(x)).collect();
        bytemuck::cast_slice(&values).to_vec()
    }
    match dtype {
        Dtype::BF16 => as_type::<bf16>(values),
        Dtype::F16 => as_type::<f16>(values),
        _ => as_type::<f32>(values),
    }
}

/// The values of a tensor of `dtype`.
pub fn decode(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        Dtype::BF16 => to_f64::<bf16>(bytemuck::cast_slice(bytes)),
        Dtype::F16 => to_f64::<f16>(bytemuck::cast_slice(bytes)),
        _ => to_f64::<f32>(bytemuck::cast_slice(bytes)),
    }
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
