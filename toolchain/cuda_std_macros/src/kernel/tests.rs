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
fn a_raw_name_is_written_as_its_symbol() {
    let item = quote!(
        unsafe fn r#match(params: Params) {}
    );
    let entry = expanded(quote!(max_threads = 64, tensor_maps = maps), item);
    let text = text(&entry);
    assert!(text.contains("tandem.kernel match max_threads"), "{text}");
    assert!(!text.contains("r#match"), "{text}");
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
fn an_entry_that_is_not_listed_vanishes() {
    let dim = proc_macro2::Group::new(proc_macro2::Delimiter::None, quote!(128));
    let of = |arguments| {
        let entry = quote!(
            unsafe fn entry(p: Params) {}
        );
        expand(arguments, entry).unwrap().is_empty()
    };
    assert!(!of(quote!(only = [(#dim, [64, 128]), (F16, [F16])])));
    assert!(of(quote!(only = [(#dim, [64, 256]), (F16, [F16])])));
    assert!(of(quote!(only = [(128, [128]), (F16, [Bf16])])));
    assert!(!of(quote!(only = [(16u32, [8, 16]), (0x20, [32])])));
    for wrong in [
        quote!(only),
        quote!(only = 3),
        quote!(only = [3]),
        quote!(only = [(3, 4)]),
    ] {
        let entry = quote!(
            unsafe fn entry(p: Params) {}
        );
        assert_refused(wrong, entry, "`only` needs");
    }
}

#[test]
fn a_name_is_composed_of_literals_and_identifiers() {
    let dim = proc_macro2::Group::new(proc_macro2::Delimiter::None, quote!(128));
    let entry = expanded(
        quote!(name = ["prefill_", 64, "x", #dim, "_", cap], tensor_maps = maps),
        quote!(
            unsafe fn entry(p: Params) {}
        ),
    );
    assert_eq!(entry.sig.ident, "prefill_64x128_cap");
    let body = text(&entry);
    assert!(body.contains("// tandem.kernel prefill_64x128_cap tensor_maps=1"));
    assert!(
        body.contains("param_address ! (prefill_64x128_cap , 0)"),
        "{body}"
    );
    for name in [
        quote!(name),
        quote!(name = 3),
        quote!(name = ["1"]),
        quote!(name = [x + y]),
    ] {
        let item = quote!(
            unsafe fn entry(p: Params) {}
        );
        assert!(error(name, item).contains('`'));
    }
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
    assert_refused(
        quote!(tensor_maps = 1),
        kernel(),
        "takes the name of a variable, or no value",
    );
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
