//! The expansion of `#[kernel]`.

use proc_macro2::TokenStream;
use quote::{ToTokens, format_ident, quote};
use syn::{
    Error, Expr, FnArg, ItemFn, Pat, PatType, Result, ReturnType, Token, Type, TypeReference,
    parse::Parser, punctuated::Punctuated, spanned::Spanned,
};

/// `max_threads = 256`, or the bare `tensor_maps`.
struct Argument {
    name: syn::Ident,
    value: Option<Expr>,
}

impl syn::parse::Parse for Argument {
    fn parse(input: syn::parse::ParseStream<'_>) -> Result<Self> {
        let name = input.parse()?;
        let value = match input.parse::<Option<Token![=]>>()? {
            Some(_) => Some(input.parse()?),
            None => None,
        };
        Ok(Self { name, value })
    }
}

#[derive(Default)]
struct Arguments {
    max_threads: Option<Expr>,
    min_blocks: Option<Expr>,
    max_registers: Option<Expr>,
    cluster: Option<Expr>,
    tensor_maps: bool,
}

impl Arguments {
    fn parse(tokens: TokenStream) -> Result<Self> {
        let mut arguments = Self::default();
        for Argument { name, value } in
            Punctuated::<Argument, Token![,]>::parse_terminated.parse2(tokens)?
        {
            let slot = match name.to_string().as_str() {
                "max_threads" => &mut arguments.max_threads,
                "min_blocks" => &mut arguments.min_blocks,
                "max_registers" => &mut arguments.max_registers,
                "cluster" => &mut arguments.cluster,
                "tensor_maps" => {
                    if let Some(value) = value {
                        return Err(Error::new(value.span(), "`tensor_maps` takes no value"));
                    }
                    if std::mem::replace(&mut arguments.tensor_maps, true) {
                        return Err(Error::new(name.span(), "`tensor_maps` is given twice"));
                    }
                    continue;
                }
                _ => {
                    return Err(Error::new(
                        name.span(),
                        "unknown argument of #[kernel]; there are `max_threads = …`, `min_blocks = …`, \
                         `max_registers = …`, `cluster = …` and `tensor_maps`",
                    ));
                }
            };
            let Some(value) = value else {
                let message = format!("`{name}` needs a value: `{name} = …`");
                return Err(Error::new(name.span(), message));
            };
            if slot.replace(value).is_some() {
                return Err(Error::new(name.span(), format!("`{name}` is given twice")));
            }
        }
        if let (Some(min_blocks), None) = (&arguments.min_blocks, &arguments.max_threads) {
            return Err(Error::new(
                min_blocks.span(),
                "`min_blocks` needs `max_threads`: registers are shared out by threads",
            ));
        }
        if let (Some(_), Some(max_registers)) = (&arguments.min_blocks, &arguments.max_registers) {
            return Err(Error::new(
                max_registers.span(),
                "`max_registers` and `min_blocks` exclude each other: both limit the registers",
            ));
        }
        Ok(arguments)
    }

    /// The comment line that the builder turns into directives; nothing where there are no arguments.
    fn marker(&self, entry: &str) -> TokenStream {
        let values: Vec<(&str, &Expr)> = [
            ("max_threads", &self.max_threads),
            ("min_blocks", &self.min_blocks),
            ("max_registers", &self.max_registers),
            ("cluster", &self.cluster),
        ]
        .into_iter()
        .filter_map(|(key, value)| value.as_ref().map(|value| (key, value)))
        .collect();
        if values.is_empty() && !self.tensor_maps {
            return TokenStream::new();
        }
        let mut line = format!("// tandem.kernel {entry}");
        for (key, _) in &values {
            line += &format!(" {key}={{{key}}}");
        }
        if self.tensor_maps {
            line += " tensor_maps=1";
        }
        let operands = values.iter().map(|(key, value)| {
            let name = format_ident!("{key}");
            let message = format!("`{key}` must be at least 1");
            quote! {
                #name = const {
                    let value: u32 = #value;
                    ::core::assert!(value > 0, #message);
                    value
                },
            }
        });
        quote! {
            // SAFETY: a comment.
            unsafe { ::core::arch::asm!(#line, #(#operands)* options(nomem, nostack)) };
        }
    }
}

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

/// What a parameter of the function becomes: parameters of the entry, and a `let` where these differ.
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
            // SAFETY: whoever launches the kernel vouches for the slice.
            let #pat: #ty = unsafe { #build(#pointer, #length) };
        },
    ))
}

/// A function with this much of a signature can be an entry.
fn check(function: &ItemFn) -> Result<()> {
    let signature = &function.sig;
    let fail = |span, message: &str| Err(Error::new(span, message));
    if signature.unsafety.is_none() {
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

pub(crate) fn expand(arguments: TokenStream, item: TokenStream) -> Result<TokenStream> {
    let arguments = Arguments::parse(arguments)?;
    let function: ItemFn = syn::parse2(item)?;
    check(&function)?;

    let ItemFn {
        attrs,
        vis,
        sig,
        block,
    } = &function;
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
    let marker = arguments.marker(&name.to_string());
    let statements = &block.stmts;
    Ok(quote! {
        #(#attrs)*
        #[cfg(target_arch = "nvptx64")]
        #[unsafe(no_mangle)]
        #vis unsafe extern "ptx-kernel" fn #name(#(#parameters),*) {
            #marker
            #maps
            #(#slices)*
            #(#statements)*
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(arguments: TokenStream, item: TokenStream) -> ItemFn {
        let tokens = expand(arguments, item).expect("expands");
        syn::parse2(tokens).expect("a function")
    }

    fn error(arguments: TokenStream, item: TokenStream) -> String {
        expand(arguments, item).expect_err("is refused").to_string()
    }

    #[track_caller]
    fn assert_refused(arguments: TokenStream, item: TokenStream, reason: &str) {
        let message = error(arguments, item);
        assert!(message.contains(reason), "{message:?} lacks {reason:?}");
    }

    fn parameters(function: &ItemFn) -> Vec<String> {
        let inputs = function.sig.inputs.iter();
        inputs
            .map(|input| input.to_token_stream().to_string())
            .collect()
    }

    fn text(function: &ItemFn) -> String {
        function.block.to_token_stream().to_string()
    }

    #[test]
    fn a_kernel_becomes_an_entry_of_its_own_name() {
        let entry = expanded(
            quote!(),
            quote!(
                pub unsafe fn add(n: u32) {
                    work(n)
                }
            ),
        );
        assert_eq!(entry.sig.ident, "add");
        let abi = entry.sig.abi.to_token_stream().to_string();
        assert_eq!(abi, "extern \"ptx-kernel\"");
        let attributes: Vec<_> = entry
            .attrs
            .iter()
            .map(|a| a.to_token_stream().to_string())
            .collect();
        assert!(attributes.iter().any(|a| a.contains("no_mangle")));
        assert!(
            !text(&entry).contains("asm"),
            "no arguments, hence no marker"
        );
    }

    #[test]
    fn slices_become_pointer_and_length() {
        let entry = expanded(
            quote!(),
            quote!(
                unsafe fn k(a: &[f32], mut n: u32, b: &mut [Half<u8>], p: &Params) {}
            ),
        );
        assert_eq!(
            parameters(&entry),
            [
                "a_ptr : * const f32",
                "a_len : usize",
                "mut n : u32",
                "b_ptr : * mut Half < u8 >",
                "b_len : usize",
                "p : & Params",
            ]
        );
        let body = text(&entry);
        assert!(body.contains(
            "let a : & [f32] = unsafe { :: core :: slice :: from_raw_parts (a_ptr , a_len) }"
        ));
        assert!(body.contains("from_raw_parts_mut (b_ptr , b_len)"));
    }

    #[test]
    fn a_slice_type_from_macro_rules_is_seen() {
        let ty: Type = syn::parse_quote!(&[u16]);
        let group = proc_macro2::Group::new(proc_macro2::Delimiter::None, ty.to_token_stream());
        let entry = expanded(quote!(), quote!(unsafe fn k(a: #group) {}));
        assert_eq!(parameters(&entry), ["a_ptr : * const u16", "a_len : usize"]);
    }

    #[test]
    fn a_slice_bound_by_a_pattern_gets_a_name() {
        let entry = expanded(
            quote!(),
            quote!(
                unsafe fn k(x: u32, _: &[u8]) {}
            ),
        );
        assert_eq!(parameters(&entry)[1], "parameter_1_ptr : * const u8");
    }

    #[test]
    fn the_marker_names_the_entry_and_what_was_given() {
        let marker = |arguments: TokenStream| {
            let entry = expanded(
                arguments,
                quote!(
                    unsafe fn fwd(p: Params) {}
                ),
            );
            let body = text(&entry);
            let start = body.find("// tandem.kernel").expect("a marker");
            body[start..].split('"').next().unwrap().to_owned()
        };
        assert_eq!(
            marker(quote!(max_threads = 384)),
            "// tandem.kernel fwd max_threads={max_threads}"
        );
        assert_eq!(
            marker(quote!(
                tensor_maps,
                cluster = 2,
                min_blocks = 1,
                max_threads = T
            )),
            "// tandem.kernel fwd max_threads={max_threads} min_blocks={min_blocks} cluster={cluster} tensor_maps=1"
        );
        assert_eq!(
            marker(quote!(tensor_maps)),
            "// tandem.kernel fwd tensor_maps=1"
        );
    }

    #[test]
    fn what_cannot_be_an_entry_is_refused() {
        let none = TokenStream::new;
        assert_refused(
            none(),
            quote!(
                fn k() {}
            ),
            "must be an `unsafe fn`",
        );
        assert_refused(
            none(),
            quote!(
                unsafe fn k() -> u32 {
                    1
                }
            ),
            "returns nothing",
        );
        assert_refused(
            none(),
            quote!(
                unsafe fn k<T>(t: T) {}
            ),
            "cannot be generic",
        );
        assert_refused(
            none(),
            quote!(
                unsafe fn k<'a>(t: &'a [u8]) {}
            ),
            "cannot be generic",
        );
        assert_refused(
            none(),
            quote!(
                async unsafe fn k() {}
            ),
            "`async`",
        );
        assert_refused(
            none(),
            quote!(
                const unsafe fn k() {}
            ),
            "`const`",
        );
        assert_refused(
            none(),
            quote!(
                unsafe extern "C" fn k() {}
            ),
            "leave `extern` out",
        );
        assert_refused(
            none(),
            quote!(
                unsafe fn k(&self) {}
            ),
            "`self`",
        );
        assert_refused(
            none(),
            quote!(
                unsafe fn k(s: &str) {}
            ),
            "&[u8]",
        );
        assert_refused(
            none(),
            quote!(
                unsafe fn k(s: &dyn Fn()) {}
            ),
            "trait object",
        );
        assert_refused(
            none(),
            quote!(
                struct K;
            ),
            "expected",
        );
    }

    #[test]
    fn a_unit_return_type_may_be_written_out() {
        expanded(
            quote!(),
            quote!(
                unsafe fn k() -> () {}
            ),
        );
    }

    #[test]
    fn wrong_arguments_are_refused() {
        let kernel = || {
            quote!(
                unsafe fn k(p: Params) {}
            )
        };
        assert_refused(quote!(threads = 3), kernel(), "unknown argument");
        assert_refused(quote!(max_threads), kernel(), "needs a value");
        assert_refused(
            quote!(max_threads = 1, max_threads = 2),
            kernel(),
            "given twice",
        );
        assert_refused(quote!(tensor_maps, tensor_maps), kernel(), "given twice");
        assert_refused(quote!(tensor_maps = 1), kernel(), "takes no value");
        assert_refused(quote!(min_blocks = 2), kernel(), "needs `max_threads`");
        assert_refused(
            quote!(max_threads = 32, min_blocks = 2, max_registers = 128),
            kernel(),
            "exclude each other",
        );
        assert_refused(
            quote!(tensor_maps),
            quote!(
                unsafe fn k() {}
            ),
            "needs a first parameter",
        );
        assert_refused(
            quote!(tensor_maps),
            quote!(
                unsafe fn k(p: &Params) {}
            ),
            "by value",
        );
    }
}
