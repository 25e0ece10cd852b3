//! Pieces of PTX written by hand: what each feature computes, and what each kind of fault reports.

mod arithmetic;
mod barriers;
mod clusters;
mod copies;
mod faults;
mod harness;
mod matrix;
