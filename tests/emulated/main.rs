//! Whole plans on the emulated GPU against naive attention in f64, and what it says of calls that are wrong.

#[path = "../common/adversarial.rs"]
mod adversarial;
mod ampere;
mod ampere_prompts;
mod by_head;
mod calls;
mod converted;
#[path = "../common/heads.rs"]
mod heads;
mod in_f32;
mod large_pages;
#[path = "../common/latent_parts.rs"]
mod latent_parts;
mod layers;
mod layers_of_8_bits;
#[path = "../common/layouts.rs"]
mod layouts;
mod logits;
mod masks;
mod nan_rows;
#[path = "../common/numeric.rs"]
mod numeric;
mod options;
#[path = "../common/passed.rs"]
mod passed;
mod passed_pages;
mod plans;
mod pools;
#[path = "../common/problems/mod.rs"]
mod problems;
mod sinks;
#[path = "../common/sinks.rs"]
mod sinks_of_rows;
mod step;

use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use tandem_attn::exec::{
    emulated::Settings,
    gpu::{Gpu, modules_of},
};

/// The emulated driver is one of the process, and so is its failure: a test that provokes one writes, all others read.
static FAILURE: RwLock<()> = RwLock::new(());

fn no_failure() -> RwLockReadGuard<'static, ()> {
    FAILURE.read().unwrap_or_else(PoisonError::into_inner)
}

/// The settings of a [schedule](plans::Case::schedule).
fn settings(schedule: u8, seed: u64) -> Settings {
    Settings::in_order(schedule.into(), seed)
}

/// The emulated GPU with the kernels of the folder that `TANDEM_MODULES` names.
fn replaced() -> Option<Gpu> {
    let folder = std::env::var_os("TANDEM_MODULES")?;
    let kernels = modules_of(folder.as_ref()).expect("a folder with kernels");
    let gpu = Gpu::builder()
        .compile_ptx(&mut |_| {})
        .modules(&kernels.modules)
        .build(0);
    Some(gpu.expect("the emulator"))
}
