//! Stands in for `libcuda.so.1`: one GPU whose kernels run on the CPU, with [`ptx_run`].
//!
//! A program that takes the driver's functions from a file of its user's choice (`TANDEM_LIBCUDA` for this
//! workspace) runs on it unchanged. Work is done when it is asked for, one call after the other; streams and
//! events are names only. What a kernel does wrong comes back as an error of the launch, with the report as its
//! text (`cuGetErrorString`), and again from every call behind it, as the driver has it.
//!
//! `PTX_DRIVER` holds `name=value` pairs:
//!
//! | name | value | default |
//! |---|---|---|
//! | `compute` | compute capability, 80 or 90 | 90 |
//! | `sms` | multiprocessors | 2 |
//! | `schedule` | `round`, `random` or `late` | `random` |
//! | `seed` | of the schedule's choices; each launch has its own | 0 |
//! | `limit` | millions of warp instructions that a launch may take | 1000 |
//! | `log` | 1: a line for each launch on standard error | 0 |
#![allow(non_snake_case, missing_docs, clippy::missing_safety_doc)]

mod calls;
mod gpu;
mod settings;
mod work;
