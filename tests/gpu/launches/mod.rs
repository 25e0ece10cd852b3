//! Every kernel of the registry on a small problem: launches it, and says what it wrote and what is right.
//!
//! Programs that include this have `tests/common` and `tests/gpu/problem.rs` at their root, as `common` and
//! `problem`.
// Each program uses its own part of this.
#![allow(dead_code)]

pub mod attention;
mod measure;
mod passes;
pub mod raw;
mod step;

use tandem_attn::{
    Hooks,
    exec::gpu::{Arch, Gpu, KernelId, KernelInfo},
    problem::Dtype,
    variants::BUILT_IN,
};

use crate::common::{Tolerance, compare, decode};

/// What a launch wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    pub name: &'static str,
    /// Of numbers that are compared as such; none: compared to the bit.
    pub dtype: Option<Dtype>,
    /// What numbers may differ by besides their rounding.
    pub absolute: f64,
    pub bytes: Vec<u8>,
}

impl Output {
    /// Numbers that depend on the order in which they are added.
    pub fn rounded<T: bytemuck::Pod>(
        name: &'static str,
        dtype: Dtype,
        absolute: f64,
        values: &[T],
    ) -> Self {
        Self {
            name,
            dtype: Some(dtype),
            absolute,
            bytes: bytemuck::cast_slice(values).to_vec(),
        }
    }

    /// What depends on nothing.
    pub fn exact<T: bytemuck::Pod>(name: &'static str, values: &[T]) -> Self {
        Self {
            name,
            dtype: None,
            absolute: 0.0,
            bytes: bytemuck::cast_slice(values).to_vec(),
        }
    }

    /// `Err` says where it is not what it ought to be.
    pub fn check(&self, right: &Self) -> Result<(), String> {
        let name = self.name;
        if self.bytes.len() != right.bytes.len() {
            return Err(format!("{name}: {} bytes", self.bytes.len()));
        }
        let Some(dtype) = self.dtype else {
            let mut both = self.bytes.iter().zip(&right.bytes);
            return match both.position(|(got, right)| got != right) {
                Some(at) => Err(format!(
                    "{name}: byte {at} is {:#x}, not {:#x}",
                    self.bytes[at], right.bytes[at]
                )),
                None => Ok(()),
            };
        };
        // Both are rounded.
        self.compare(dtype, &decode(dtype, &right.bytes), 2.0)
    }

    /// The same for numbers, and what is right of them.
    pub fn near(&self, right: &[f64]) -> Result<(), String> {
        self.compare(self.dtype.expect("numbers"), right, 1.0)
    }

    fn compare(&self, dtype: Dtype, right: &[f64], roundings: f64) -> Result<(), String> {
        let got = decode(dtype, &self.bytes);
        let rounding = Tolerance::of(dtype);
        let tolerance = Tolerance {
            absolute: rounding.absolute + self.absolute,
            relative: rounding.relative * roundings,
        };
        compare(self.name, &[got.len()], &got, right, tolerance)
    }
}

/// The kernels that a GPU of this architecture has.
pub fn entries(gpu: &Gpu) -> impl Iterator<Item = &'static KernelInfo> {
    let newest = newest(gpu);
    KernelId::all()
        .map(KernelId::info)
        .filter(move |row| row.arch <= newest)
}

fn newest(gpu: &Gpu) -> Arch {
    match gpu.arch() {
        "sm_80" => Arch::Sm80,
        _ => Arch::Sm90a,
    }
}

/// The kernels of the library's variants that a GPU of this architecture has, with those in whose place they stand.
pub fn hooked(gpu: &Gpu) -> impl Iterator<Item = (&'static Hooks, &'static KernelInfo)> {
    let newest = newest(gpu);
    let of = |hooks: &'static Hooks| hooks.kernels().map(move |id| (hooks, id.info()));
    let all = BUILT_IN.iter().flat_map(of);
    all.filter(move |(_, row)| row.arch <= newest)
}

/// Launches a kernel, among others if a plan needs them, on a problem that the seed draws. What it wrote has been
/// compared with what is right where that is `checked`.
///
/// # Errors
/// What is wrong with it.
pub fn run(gpu: &Gpu, row: &KernelInfo, seed: u64, checked: bool) -> Result<Vec<Output>, String> {
    use kernels_gpu::registry::Op;
    match row.op {
        Op::Narrow => passes::narrow(gpu, row, seed),
        Op::Pad if gpu.arch() == "sm_80" => passes::pad(gpu, row, seed),
        Op::Prefill | Op::Decode | Op::Pod | Op::Pad | Op::Widen | Op::Turn => {
            attention::run_entry(gpu, row, seed, checked)
        }
        // So many rows that a GPU of any size takes this kernel.
        Op::Merge(_) => passes::merge(gpu, row, seed, checked),
        Op::MergeRanks => attention::merge_ranks(gpu, row, seed, checked),
        Op::MergeResults => passes::merge_results(gpu, row, seed, checked),
        Op::Append { vector_bytes } => passes::append(gpu, vector_bytes, seed, checked),
        Op::Quantise => passes::quantise(gpu, row, seed, checked),
        Op::QuantiseLatent => passes::latent_656(gpu, row, seed, checked),
        Op::MeasureRead | Op::MeasureProducts | Op::MeasureOverlap => measure::run(gpu, row, seed),
        Op::QkvStep { heads, quantises } => step::qkv(gpu, row, (heads, quantises), seed, checked),
        Op::RmsNorm { vectors } => step::rms_norm(gpu, row, vectors, seed, checked),
        Op::Gate => step::gate(gpu, row, seed, checked),
        Op::Embed => step::embed(gpu, row, seed, checked),
        Op::Sample => step::sample(gpu, row, seed, checked),
        Op::Adjust => step::adjust(gpu, seed, checked),
        Op::LogProbs => step::log_probs(gpu, seed, checked),
    }
}

/// Compares all, where that is wanted.
fn compared(outputs: Vec<Output>, right: Option<Vec<Output>>) -> Result<Vec<Output>, String> {
    for (got, right) in outputs.iter().zip(right.iter().flatten()) {
        got.check(right)?;
    }
    Ok(outputs)
}

/// The 16-bit type that a kernel's name has.
fn dtype_of(row: &KernelInfo) -> Dtype {
    match row.name.contains("bf16") {
        true => Dtype::BF16,
        false => Dtype::F16,
    }
}
