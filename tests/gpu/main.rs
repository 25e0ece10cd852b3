//! The kernels and the executor on a GPU, in one program: `cargo test --features cust --test gpu -- mla::`. Where there is
//! no GPU, each test says that it is skipped; `TANDEM_LIBCUDA` names an emulated one (docs/guide/without-a-gpu.md).

#[path = "../common/mod.rs"]
mod common;
mod launches;
#[allow(dead_code)]
mod problem;

mod ampere_prompts;
mod append;
mod cust;
mod decode;
mod delays;
mod device;
mod entries;
mod fidelity;
mod fp8;
mod heads_512;
mod latent_scales;
mod merge;
mod mla;
mod mla_pieces;
mod prefill;
mod ranks;
mod run;
mod step;
mod two_pools;
