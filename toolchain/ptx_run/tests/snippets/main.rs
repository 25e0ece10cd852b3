//! Pieces of PTX written by hand: what each feature computes, and what each kind of fault reports.

mod arithmetic;
mod barriers;
mod copies;
mod faults;
mod harness;
mod matrix;
