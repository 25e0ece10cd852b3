//! The expansion of `#[kernel]`.

mod arguments;
#[cfg(test)]
mod tests;

use proc_macro2::TokenStream;
use quote::{ToTokens, format_ident, quote};
use syn::{
    Error, FnArg, ItemFn, Pat, PatType, Result, ReturnType, Safety, Type, TypeReference,
    ext::IdentExt, spanned::Spanned,
};

use arguments::Arguments;

/// The type without the invisible groups that `macro_rules` puts around `$t:ty`.
fn ungrouped(mut ty: &Type) -> &Type {
    loop {
        ty = match ty {
            Type::Group(group) => &group.elem,
            Type::Paren(paren) => &paren.elem,
            _ => return ty,
        }
    }
}

/// The expansion of a function's parameter: parameters of the entry, and a `let` if these differ.
fn parameter(index: usize, typed: &PatType) -> Result<(TokenStream, TokenStream)> {
    let Type::Reference(reference) = ungrouped(&typed.ty) else {
        return Ok((typed.to_token_stream(), TokenStream::new()));
    };
    let TypeReference {
        elem, mutability, ..
    } = reference;
    let element = match ungrouped(elem) {
        Type::Slice(slice) => &slice.elem,
        Type::TraitObject(_) => {
            return Err(Error::new(
                elem.span(),
                "a kernel cannot take a trait object: its table of functions lies on the host",
            ));
        }
        Type::Path(path) if path.path.is_ident("str") => {
            return Err(Error::new(
                elem.span(),
                "a kernel cannot take a `&str`: give it the bytes, `&[u8]`",
            ));
        }
        _ => return Ok((typed.to_token_stream(), TokenStream::new())),
    };
    let base = match &*typed.pat {
        Pat::Ident(name) => name.ident.clone(),
        _ => format_ident!("parameter_{index}"),
    };
    let (pointer, length) = (format_ident!("{base}_ptr"), format_ident!("{base}_len"));
    let (pat, ty) = (&typed.pat, &typed.ty);
    let (raw, build) = match mutability {
        Some(_) => (
            quote!(*mut #element),
            quote!(::core::slice::from_raw_parts_mut),
        ),
        None => (
            quote!(*const #element),
            quote!(::core::slice::from_raw_parts),
        ),
    };
    Ok((
        quote!(#pointer: #raw, #length: usize),
        quote! {
            // SAFETY: the code that launches the kernel vouches for the slice.
            let #pat: #ty = unsafe { #build(#pointer, #length) };
        },
    ))
}

/// Checks that a function's signature is suitable for an entry.
fn check(function: &ItemFn) -> Result<()> {
    let signature = &function.sig;
    let fail = |span, message: &str| Err(Error::new(span, message));
    if !matches!(signature.safety, Safety::Unsafe(_)) {
        return fail(
            signature.fn_token.span(),
            "a kernel must be an `unsafe fn`: nothing checks what the host passes",
        );
    }
    if let ReturnType::Type(_, ty) = &signature.output {
        let unit = matches!(ungrouped(ty), Type::Tuple(tuple) if tuple.elems.is_empty());
        if !unit {
            return fail(
                ty.span(),
                "a kernel returns nothing: write results through a pointer",
            );
        }
    }
    if !signature.generics.params.is_empty() || signature.generics.where_clause.is_some() {
        return fail(
            signature.generics.span(),
            "a kernel cannot be generic: write one entry per type, by hand or by macro_rules!, that \
             calls a generic function",
        );
    }
    if let Some(asyncness) = &signature.asyncness {
        return fail(asyncness.span(), "a kernel cannot be `async`");
    }
    if let Some(constness) = &signature.constness {
        return fail(constness.span(), "a kernel cannot be `const`");
    }
    if let Some(abi) = &signature.abi {
        return fail(
            abi.span(),
            "#[kernel] sets the ABI itself: leave `extern` out",
        );
    }
    if let Some(variadic) = &signature.variadic {
        return fail(variadic.span(), "a kernel cannot be variadic");
    }
    Ok(())
}

/// Whether the builder requested only other kernels.
fn is_left_out(name: &str) -> bool {
    std::env::var("CUDA_BUILDER_ENTRIES")
        .is_ok_and(|entries| entries.split(',').all(|entry| entry != name))
}

pub(crate) fn expand(arguments: TokenStream, item: TokenStream) -> Result<TokenStream> {
    let arguments = Arguments::parse(arguments)?;
    if arguments.left_out {
        return Ok(TokenStream::new());
    }
    let mut function: ItemFn = syn::parse2(item)?;
    check(&function)?;
    if let Some(name) = &arguments.name {
        function.sig.ident = name.clone();
    }
    if is_left_out(&function.sig.ident.unraw().to_string()) {
        return Ok(TokenStream::new());
    }

    let ItemFn {
        attrs,
        modifiers,
        vis,
        sig,
        block,
    } = &function;
    modifiers.require_empty()?;
    let mut parameters = Vec::new();
    let mut slices = Vec::new();
    for (index, input) in sig.inputs.iter().enumerate() {
        match input {
            FnArg::Receiver(receiver) => {
                return Err(Error::new(
                    receiver.span(),
                    "a kernel is a free function: it cannot take `self`",
                ));
            }
            FnArg::Typed(typed) => {
                let (parameter, slice) = parameter(index, typed)?;
                parameters.push(parameter);
                slices.push(slice);
            }
        }
    }
    let maps = if arguments.tensor_maps {
        let Some(FnArg::Typed(PatType { ty, .. })) = sig.inputs.first() else {
            return Err(Error::new(
                sig.ident.span(),
                "`tensor_maps` needs a first parameter: a struct by value that begins with them",
            ));
        };
        if let Type::Reference(_) | Type::Ptr(_) | Type::Slice(_) = ungrouped(ty) {
            return Err(Error::new(
                ty.span(),
                "`tensor_maps` needs a struct given by value, not a pointer to one",
            ));
        }
        quote! {
            const {
                ::core::assert!(
                    ::core::mem::align_of::<#ty>() == 16,
                    "the struct of a `tensor_maps` kernel must have an alignment of 16, as `TensorMap` has"
                )
            };
        }
    } else {
        TokenStream::new()
    };

    let name = &sig.ident;
    // The symbol of `r#match` is `match`.
    let symbol = name.unraw();
    let marker = arguments.marker(&symbol.to_string());
    let address = arguments.maps.as_ref().map(|maps| {
        quote! {
            let #maps: *const ::cuda_std::tma::TensorMap = ::cuda_std::param_address!(#symbol, 0);
        }
    });
    let statements = &block.stmts;
    Ok(quote! {
        #(#attrs)*
        #[cfg(target_arch = "nvptx64")]
        #[unsafe(no_mangle)]
        #vis unsafe extern "ptx-kernel" fn #name(#(#parameters),*) {
            #marker
            #maps
            #address
            #(#slices)*
            #(#statements)*
        }
    })
}
