//! Hand-written pieces of PTX: the results of each feature, and the report of each kind of fault.

mod arithmetic;
mod barriers;
mod clusters;
mod copies;
mod faults;
mod harness;
mod matrix;
mod orders;
