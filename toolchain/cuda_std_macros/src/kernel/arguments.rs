//! The arguments of `#[kernel]`, and the comment that passes them on in the PTX.

use proc_macro2::TokenStream;
use quote::{ToTokens, format_ident, quote};
use syn::{
    Error, Expr, ExprLit, Ident, Lit, Result, Token, parse::Parser, punctuated::Punctuated,
    spanned::Spanned,
};

/// An argument such as `max_threads = 256`, or just `tensor_maps`.
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

/// The arguments of `#[kernel(…)]`.
#[derive(Default)]
pub struct Arguments {
    max_threads: Option<Expr>,
    min_blocks: Option<Expr>,
    max_registers: Option<Expr>,
    cluster: Option<Expr>,
    pub tensor_maps: bool,
    /// Name in the body of the variable with the address of the maps.
    pub maps: Option<Ident>,
    /// The entry's name, if it differs from the function's.
    pub name: Option<Ident>,
    /// Whether the entry is left out.
    pub left_out: bool,
}

/// The expression without the invisible groups that `macro_rules` puts around `$x:literal`.
fn ungrouped(mut expression: &Expr) -> &Expr {
    loop {
        expression = match expression {
            Expr::Group(group) => &group.expr,
            _ => return expression,
        }
    }
}

fn identifier(expression: &Expr) -> Option<&Ident> {
    match ungrouped(expression) {
        Expr::Path(path) => path.path.get_ident(),
        _ => None,
    }
}

/// A name composed of literals and identifiers.
fn composed_name(expression: &Expr) -> Result<Ident> {
    let refuse = |span| {
        let message =
            "`name` needs a list of literals and identifiers: `name = [\"copy_\", 16, suffix]`";
        Err(Error::new(span, message))
    };
    let Expr::Array(list) = ungrouped(expression) else {
        return refuse(expression.span());
    };
    let mut name = String::new();
    for part in &list.elems {
        match ungrouped(part) {
            Expr::Lit(literal) => match &literal.lit {
                Lit::Str(text) => name += &text.value(),
                Lit::Int(number) => name += number.base10_digits(),
                other => return refuse(other.span()),
            },
            other => match identifier(other) {
                Some(word) => name += &word.to_string(),
                None => return refuse(other.span()),
            },
        }
    }
    let parsed: Result<Ident> = syn::parse_str(&name);
    parsed.map_err(|_| Error::new(list.span(), format!("`{name}` is no name of a function")))
}

/// Whether each value is in its list: `[(16, [8, 16]), (F16, [F16])]`. Compares integers by value, others as written.
fn all_listed(expression: &Expr) -> Result<bool> {
    let refuse = |span| {
        let message = "`only` needs values and lists: `only = [(16, [8, 16]), (F16, [Bf16, F16])]`";
        Err(Error::new(span, message))
    };
    let Expr::Array(pairs) = ungrouped(expression) else {
        return refuse(expression.span());
    };
    let text = |expression: &Expr| match ungrouped(expression) {
        Expr::Lit(ExprLit {
            lit: Lit::Int(number),
            ..
        }) => number.base10_digits().to_owned(),
        other => other.to_token_stream().to_string(),
    };
    let mut all = true;
    for pair in &pairs.elems {
        let Expr::Tuple(pair) = ungrouped(pair) else {
            return refuse(pair.span());
        };
        let (Some(value), Some(list)) = (pair.elems.first(), pair.elems.get(1)) else {
            return refuse(pair.span());
        };
        let Expr::Array(list) = ungrouped(list) else {
            return refuse(list.span());
        };
        all &= list.elems.iter().any(|listed| text(listed) == text(value));
    }
    Ok(all)
}

impl Arguments {
    pub fn parse(tokens: TokenStream) -> Result<Self> {
        let mut arguments = Self::default();
        for Argument { name, value } in
            Punctuated::<Argument, Token![,]>::parse_terminated.parse2(tokens)?
        {
            let slot = match name.to_string().as_str() {
                "max_threads" => &mut arguments.max_threads,
                "min_blocks" => &mut arguments.min_blocks,
                "max_registers" => &mut arguments.max_registers,
                "cluster" => &mut arguments.cluster,
                "name" => {
                    let Some(value) = value else {
                        return Err(Error::new(
                            name.span(),
                            "`name` needs a value: `name = […]`",
                        ));
                    };
                    if arguments.name.replace(composed_name(&value)?).is_some() {
                        return Err(Error::new(name.span(), "`name` is given twice"));
                    }
                    continue;
                }
                "only" => {
                    let Some(value) = value else {
                        return Err(Error::new(
                            name.span(),
                            "`only` needs a value: `only = [(16, [8, 16])]`",
                        ));
                    };
                    arguments.left_out |= !all_listed(&value)?;
                    continue;
                }
                "tensor_maps" => {
                    if let Some(value) = value {
                        let Some(maps) = identifier(&value) else {
                            let message = "`tensor_maps` takes the name of a variable, or no value";
                            return Err(Error::new(value.span(), message));
                        };
                        arguments.maps = Some(maps.clone());
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
                         `max_registers = …`, `cluster = …`, `tensor_maps`, `name = […]` and `only = […]`",
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

    /// The comment line that the builder turns into directives; nothing if there are no arguments.
    pub fn marker(&self, entry: &str) -> TokenStream {
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
            // SAFETY: it is only a comment.
            unsafe { ::core::arch::asm!(#line, #(#operands)* options(nomem, nostack)) };
        }
    }
}
