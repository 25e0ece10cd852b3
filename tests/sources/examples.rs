//! Every example runs to its end; what it promises it asserts itself.

#[path = "../../examples/composable_formats.rs"]
mod composable_formats;
#[path = "../../examples/shared_prefixes.rs"]
mod shared_prefixes;
#[path = "../../examples/variable_lengths.rs"]
mod variable_lengths;

#[test]
fn composable_formats_runs() {
    composable_formats::main().unwrap();
}

#[test]
fn shared_prefixes_runs() {
    shared_prefixes::main().unwrap();
}

#[test]
fn variable_lengths_runs() {
    variable_lengths::main().unwrap();
}

#[cfg(feature = "cuda")]
#[path = "../../examples/gpu_serving.rs"]
mod gpu_serving;

/// Without a GPU the example says what is missing and ends.
#[cfg(feature = "cuda")]
#[test]
fn gpu_serving_runs() {
    gpu_serving::main().unwrap();
}

#[cfg(feature = "cuda")]
#[path = "../../examples/gpu_fp8.rs"]
mod gpu_fp8;

#[cfg(feature = "cuda")]
#[test]
fn gpu_fp8_runs() {
    gpu_fp8::main().unwrap();
}

#[cfg(feature = "cuda")]
#[path = "../../examples/gpu_mla.rs"]
mod gpu_mla;

#[cfg(feature = "cuda")]
#[test]
fn gpu_mla_runs() {
    gpu_mla::main().unwrap();
}

#[cfg(feature = "cuda")]
#[path = "../../examples/several_gpus.rs"]
mod several_gpus;

/// With fewer than two GPUs the example says so and ends.
#[cfg(feature = "cuda")]
#[test]
fn several_gpus_runs() {
    several_gpus::main().unwrap();
}
