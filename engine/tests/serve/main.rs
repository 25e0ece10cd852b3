//! Tests the server with clients that behave, are slow, vanish or are malicious.

#[path = "../common/mod.rs"]
mod common;

mod access;
mod answers;
mod choices;
mod clients;
mod ends;
mod limits;
mod logits;
mod model_files;
mod refusals;
mod server;
