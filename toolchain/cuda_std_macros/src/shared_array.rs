//! The expansion of `shared_array!`.
//!
//! A variable in shared memory can only be declared in PTX text, where its name must be unique in the module.
//! `macro_rules` cannot make such a name, and `sym` operands do not exist on this target.

use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use std::sync::atomic::{AtomicU32, Ordering};
use syn::{Expr, Result, Token, Type, parse::Parser};

/// Number of expansions so far. The compiler expands in the same order every time.
static ARRAYS: AtomicU32 = AtomicU32::new(0);

pub(crate) fn expand(input: TokenStream) -> Result<TokenStream> {
    let parser = |input: syn::parse::ParseStream<'_>| {
        let element: Type = input.parse()?;
        input.parse::<Token![,]>()?;
        let length: Expr = input.parse()?;
        Ok((element, length))
    };
    let (element, length) = parser.parse2(input)?;

    let owner = std::env::var("CARGO_CRATE_NAME").unwrap_or_default();
    let number = ARRAYS.fetch_add(1, Ordering::Relaxed);
    let name = format!("shared_array_{owner}_{number}");
    let declaration = format!(".shared .align {{align}} .b8 {name}[{{bytes}}];");
    let address_of = format!("mov.u32 {{}}, {name};");
    // `global_asm!` is an item and needs a module around it.
    let module = format_ident!("{name}");
    Ok(quote! {{
        mod #module {
            #[allow(unused_imports)]
            use super::*;
            ::core::arch::global_asm!(
                #declaration,
                align = const ::core::mem::align_of::<#element>(),
                bytes = const ::core::mem::size_of::<[#element; #length]>(),
            );
        }
        let address: u32;
        // SAFETY: only computes an address.
        #[allow(unused_unsafe)]
        unsafe {
            ::core::arch::asm!(#address_of, out(reg32) address, options(pure, nomem, nostack));
        }
        address
    }})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_array_has_its_own_name() {
        let names: Vec<String> = (0..2)
            .map(|_| {
                let tokens = expand(quote!([f32; 2], 3 + N)).unwrap().to_string();
                let start = tokens.find("mod ").unwrap() + 4;
                tokens[start..].split(' ').next().unwrap().to_owned()
            })
            .collect();
        assert_ne!(names[0], names[1]);
    }

    #[test]
    fn a_missing_length_is_refused() {
        assert!(expand(quote!(f32)).is_err());
    }
}
