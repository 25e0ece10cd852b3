//! The list contains exactly the functions that the bindings declare, and each has its own trampoline.
#![cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]

use std::collections::HashSet;

use libcuda_link as _;

#[path = "../src/entry_points.rs"]
mod entry_points;

use entry_points::with_entry_points;

macro_rules! addresses {
    ($($name:ident)*) => { [$(cust_raw::$name as *const ()),*] };
}

#[test]
fn every_declared_function_links_to_its_own_trampoline() {
    let addresses = with_entry_points!(addresses);
    assert_eq!(
        addresses.len(),
        353,
        "functions declared in cust_raw 0.11.3"
    );
    let distinct: HashSet<_> = addresses.into_iter().collect();
    assert_eq!(distinct.len(), addresses.len());
}
