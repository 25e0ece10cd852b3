//! Tests the server with clients that behave, are slow, vanish or are malicious.

#[path = "../common/mod.rs"]
mod common;

mod answers;
mod clients;
mod ends;
mod refusals;
mod server;
