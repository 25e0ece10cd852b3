//! The registry of all kernels, one [row](KernelInfo) each.
//!
//! A family lists its kernels in one table (`table!` in its module). On the GPU each row of a table becomes an entry
//! per 16-bit float type; here it becomes a [`KernelInfo`], with resources computed by the same const functions. The
//! planner chooses among these rows, plans name them, and the GPU executor loads and launches them. No other place
//! knows the name or shape of a kernel.

use crate::{measure, passes, sm80, sm90, step};

mod id;
mod info;
mod words;

pub use id::KernelId;
pub(crate) use info::registers;
pub use info::{KernelInfo, Sm};
pub use words::{Arch, Element, Family, Loads, Op};

/// The tables of all families.
const TABLES: [&[&[KernelInfo]]; 18] = [
    sm90::prefill::ROWS,
    sm90::prefill::f8::ROWS,
    sm90::decode_mma::ROWS,
    sm90::decode_wgmma::narrow::ROWS,
    sm90::decode_wgmma::wide::ROWS,
    sm90::decode_wgmma::wide::ROWS_8_BIT,
    sm90::decode_wgmma::large::ROWS,
    sm90::mla::ROWS,
    sm90::mla::few_rows::ROWS,
    sm90::mla::narrow::ROWS,
    sm90::mla::swap_ab::ROWS,
    sm80::prefill::ROWS,
    sm80::decode::TABLE,
    sm80::pod::ROWS,
    passes::ROWS,
    step::ROWS,
    step::qkv::QUANTISING_ROWS,
    measure::ROWS,
];

const COUNT: usize = {
    let (mut count, mut table) = (0, 0);
    while table < TABLES.len() {
        let mut part = 0;
        while part < TABLES[table].len() {
            count += TABLES[table][part].len();
            part += 1;
        }
        table += 1;
    }
    count
};

/// Every kernel, family after family.
pub static KERNELS: [KernelInfo; COUNT] = {
    let mut all = [measure::ROWS[0][0]; COUNT];
    let (mut next, mut table) = (0, 0);
    while table < TABLES.len() {
        let mut part = 0;
        while part < TABLES[table].len() {
            let mut row = 0;
            while row < TABLES[table][part].len() {
                all[next] = TABLES[table][part][row];
                next += 1;
                row += 1;
            }
            part += 1;
        }
        table += 1;
    }
    all
};

/// An entry of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The module.
    pub family: Family,
    /// Its name there.
    pub name: String,
    /// The kernel that it is or, for a variant, that it replaces.
    pub kernel: KernelId,
}

/// The entries of all modules: every kernel, and those of the library's [variants](crate::variants).
pub fn entries() -> impl Iterator<Item = Entry> {
    let kernels = KernelId::all().map(|kernel| Entry {
        family: kernel.info().family,
        name: kernel.info().name.into(),
        kernel,
    });
    let of_variant = |hooks: &'static crate::Hooks| {
        hooks.kernels().map(move |kernel| Entry {
            family: Family::Variants,
            name: hooks.entry(kernel.info()),
            kernel,
        })
    };
    kernels.chain(crate::variants::BUILT_IN.iter().flat_map(of_variant))
}

#[cfg(test)]
mod tests;
