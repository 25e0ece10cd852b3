//! The command `tandem`.
fn main() {}
