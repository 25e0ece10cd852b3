//! What is held of the sources themselves: modules without circles, one place for each kernel, documents whose links and
//! tests are there, examples that run.

mod docs;
mod examples;
mod modules;
mod names;
mod registry;
