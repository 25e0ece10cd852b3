//! What goes wrong between a program and its driver, each with its own error and nothing launched: against a
//! library that stands in for the driver. A process opens one driver, so each scenario is a child process.
#![cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]

mod calls;
mod driver;
mod entries;
mod failing;
mod graphs;
mod launched;
mod layouts;
#[path = "../common/layouts.rs"]
mod layouts_of_pools;
mod loading;
mod misuse;
mod needed;
mod runs;
