//! `#[kernel]`, re-exported by `cuda_std`.

mod kernel;
mod shared_array;

use proc_macro::TokenStream;

/// Makes a function an entry that the host can launch.
///
/// The function is `unsafe`, returns nothing and has no generics; its name is the entry's name. On targets other than
/// `nvptx64` it is removed. The crate needs `#![feature(abi_ptx, asm_experimental_arch)]`.
///
/// ```text
/// #[kernel(max_threads = 256)]
/// pub unsafe fn add(a: &[f32], b: &[f32], c: *mut f32) { … }
/// // launched with: a, a.len(), b, b.len(), c
/// ```
///
/// # Parameters
/// - A slice (`&[T]`, `&mut [T]`) becomes two parameters, a pointer and a length (`usize`), as rust-cuda
///   has it. The pointer must be aligned and not null, even where the length is 0.
/// - Everything else is passed as it is: numbers, pointers, `repr(C)` structs by value.
///
/// # Arguments
/// All are optional; values are constant expressions of type `u32`.
///
/// - `max_threads`: most threads of a block; launches with more fail. The compiler may use
///   `65536 / (max_threads · min_blocks)` registers.
/// - `min_blocks`: blocks that a multiprocessor must be able to hold; wants `max_threads`.
/// - `max_registers`: most registers of a thread at launch, where `min_blocks` is too coarse: to leave room
///   for another kernel's blocks.
/// - `cluster`: blocks of a cluster along x; the grid must be a multiple of it.
/// - `tensor_maps`: the first parameter is a struct by value (`repr(C)`, alignment 16) that begins with
///   tensor maps; it is placed at a multiple of 64 and found by `cuda_std::param_address!`. With
///   `tensor_maps = maps` its address is in a variable of that name.
/// - `name = ["copy_", 16, suffix]`: the entry is not called as the function is, but `copy_16suffix`. So
///   `macro_rules!` compose the names of a table of kernels.
/// - `only = [(16, [8, 16]), (F16, [Bf16, F16])]`: the entry vanishes unless each value is in its list. So
///   `macro_rules!` take some rows of a table.
///
/// # Leaving kernels out
/// If the environment variable `CUDA_BUILDER_ENTRIES` has a comma-separated list of names, all other kernels are
/// removed. `cuda_builder` sets it when only a part of a module is requested.
///
/// # Markers for the builder
/// rustc has no launch bounds, so an entry with arguments has one comment line in its body, which `cuda_builder` finds
/// in the PTX and turns into directives (omitted arguments are absent, the order is fixed):
///
/// ```text
/// // tandem.kernel <entry> max_threads=384 min_blocks=1 cluster=2 tensor_maps=1
/// ```
#[proc_macro_attribute]
pub fn kernel(arguments: TokenStream, item: TokenStream) -> TokenStream {
    kernel::expand(arguments.into(), item.into())
        .unwrap_or_else(syn::Error::into_compile_error)
        .into()
}

/// The shared address of an array; `cuda_std::shared_array!` converts it to a pointer.
#[doc(hidden)]
#[proc_macro]
pub fn __shared_array(input: TokenStream) -> TokenStream {
    shared_array::expand(input.into())
        .unwrap_or_else(syn::Error::into_compile_error)
        .into()
}
