use std::collections::HashSet;

use tandem_attn::{
    step::{Pairing, Rope},
    variants::{ALIBI, DISTANCE_BIAS, SIGMOID},
};

use super::*;

fn one(text: &str) -> Case {
    let mut cases = parse("test", text).unwrap();
    assert_eq!(cases.len(), 1);
    cases.remove(0)
}

fn names(text: &str) -> Vec<String> {
    let cases = parse("test", text).unwrap();
    cases.into_iter().map(|case| case.name).collect()
}

#[test]
fn every_suite_is_sound() {
    for (suite, count) in [
        (Suite::Quick, 4),
        (Suite::Decode, 29),
        (Suite::Prefill, 22),
        (Suite::Pod, 8),
        (Suite::Pat, 80),
        (Suite::Variants, 36),
        (Suite::Mla, 32),
        (Suite::Decode8, 12),
        (Suite::All, 219),
    ] {
        let cases = suite.cases();
        assert_eq!(cases.len(), count, "{suite:?}");
        let names: HashSet<_> = cases.iter().map(|case| &case.name).collect();
        assert_eq!(names.len(), count, "{suite:?} has two cases of one name");
        for case in cases {
            assert!(case.pages() <= MAX_PAGES);
            case.spec.check().unwrap();
        }
    }
    for case in Suite::Quick.cases() {
        case.batch().unwrap();
    }
}

#[test]
fn fields_have_defaults_and_cases_take_what_they_leave_out() {
    let text = r#"{"heads": 8, "kv_heads": 2, "head_dim": 64, "layout": "hnd", "cases": [
        {"requests": [{"q_len": 1, "kv_len": 5}]},
        {"name": "own", "page_size": 1, "kv_dtype": "f8e4m3", "requests": [{"q_len": 3, "kv_len": 5, "count": 2}],
         "variant": {"window_left": 7, "logits_soft_cap": 20, "sm_scale": 0.5}}]}"#;
    let cases = parse("test", text).unwrap();
    let [first, second] = cases.as_slice() else {
        panic!("{cases:?}");
    };
    assert_eq!(first.name, "1 decode × 5 8/2");
    assert_eq!((first.page_size, first.layout), (16, KvLayout::Hnd));
    assert_eq!(first.spec, Spec::new(8, 2, 64));
    let spec = Spec::new(8, 2, 64)
        .with_kv_dtype(Dtype::F8E4M3)
        .with_window_left(7)
        .with_soft_cap(20.0)
        .with_scale(0.5);
    assert_eq!((second.name.as_str(), second.spec), ("own", spec));
    assert_eq!(second.batch().unwrap().qo_indptr, [0, 3, 6]);
}

#[test]
fn a_case_takes_fields_of_the_variant_that_it_leaves_out() {
    let text = r#"{"heads": 8, "kv_heads": 2, "head_dim": 64,
        "variant": {"causal": false, "window_left": 7, "logits_soft_cap": 20, "sm_scale": 0.5},
        "cases": [
        {"requests": [{"q_len": 1, "kv_len": 5}]},
        {"variant": {"sinks": true}, "requests": [{"q_len": 1, "kv_len": 5}]},
        {"variant": {"causal": true, "window_left": 9}, "requests": [{"q_len": 1, "kv_len": 5}]},
        {"variant": {"window_left": null, "sm_scale": null}, "requests": [{"q_len": 1, "kv_len": 5}]}]}"#;
    let cases = parse("test", text).unwrap();
    let specs: Vec<_> = cases.iter().map(|case| case.spec).collect();
    let mut file = Spec::new(8, 2, 64)
        .with_window_left(7)
        .with_soft_cap(20.0)
        .with_scale(0.5);
    file.variant.causal = false;
    let mut sinks = file;
    sinks.variant.sinks = true;
    let mut narrow = file.with_window_left(9);
    narrow.variant.causal = true;
    // Without the window and the scale of the file.
    let mut whole = Spec::new(8, 2, 64).with_soft_cap(20.0);
    whole.variant.causal = false;
    assert_eq!(specs, [file, sinks, narrow, whole]);
}

#[test]
fn rotary_embeddings_are_those_of_the_file() {
    let text = |rotary: &str| {
        format!(
            r#"{{"heads": 8, "kv_heads": 2, "head_dim": 64, "requests": [{{"q_len": 1, "kv_len": 5}}],
                "variant": {{"rotary": {rotary}}}}}"#
        )
    };
    let whole = Spec::new(8, 2, 64).with_rotary(Rope::new(64, 5e5));
    assert_eq!(one(&text(r#"{"theta": 500000}"#)).spec, whole);
    let part = Rope::new(32, 1e4).with_pairing(Pairing::Interleaved);
    let case = one(&text(r#"{"theta": 10000, "dim": 32, "interleaved": true}"#));
    assert_eq!(case.spec.rotary, Some(part));
    let wide = parse("test", &text(r#"{"theta": 10000, "dim": 66}"#));
    let error = wide.unwrap_err().to_string();
    assert!(error.contains("turns 66 elements"), "{error}");
}

#[test]
fn hooks_and_their_numbers_are_those_of_the_file() {
    let text = |variant: &str| {
        format!(
            r#"{{"heads": 8, "kv_heads": 2, "head_dim": 64, "variant": {{"distance_bias": 9}}, "cases": [
                {{"requests": [{{"q_len": 1, "kv_len": 5}}], "variant": {{{variant}}}}}]}}"#
        )
    };
    let spec = Spec::new(8, 2, 64);
    let of = |entries, sigmoid| Numbers { entries, sigmoid };
    for (variant, hooks, numbers) in [
        ("", Some(DISTANCE_BIAS), of(9, 0.0)),
        (r#""distance_bias": 128"#, Some(DISTANCE_BIAS), of(128, 0.0)),
        (
            r#""distance_bias": null, "sigmoid": -9"#,
            Some(SIGMOID),
            of(0, -9.0),
        ),
        (
            r#""distance_bias": null, "alibi": true"#,
            Some(ALIBI),
            of(0, 0.0),
        ),
        (r#""distance_bias": null, "alibi": false"#, None, of(0, 0.0)),
    ] {
        let case = one(&text(variant));
        let with = hooks.map_or(spec, |hooks| spec.with_hooks(&hooks));
        assert_eq!((case.spec, case.numbers), (with, numbers), "{variant}");
    }
    for (variant, says) in [
        (
            r#""distance_bias": 0"#,
            "variant.distance_bias is 0: give 1",
        ),
        (
            r#""distance_bias": 2097153"#,
            "at most 16777216 of all heads",
        ),
        (r#""sigmoid": 1"#, "a case has one of them"),
        (r#""alibi": true"#, "a case has one of them"),
        (
            r#""distance_bias": null, "sigmoid": 1e9"#,
            "variant.sigmoid is 1000000000: give a bias",
        ),
        (
            r#""distance_bias": null, "sigmoid": 0, "sinks": true"#,
            "without a softmax",
        ),
        (r#""logits_soft_cap": 20"#, "cap"),
    ] {
        let error = parse("test", &text(variant)).unwrap_err().to_string();
        assert!(error.contains(says), "{variant}: {error}");
    }
}

/// Requests of a tree share pages as defined: the pages that the tokens of common nodes fill completely.
#[test]
fn trees_share_full_pages() {
    let case = one(
        r#"{"heads": 8, "kv_heads": 2, "head_dim": 64, "page_size": 16,
            "tree": {"nodes_per_level": [1, 3, 7], "tokens_per_level": [40, 24, 5]}}"#,
    );
    let batch = case.batch().unwrap();
    let table = &batch.parts[0].table;
    assert_eq!((batch.requests(), batch.total_q()), (7, 7));
    // 2 full pages of the root; each child ends at token 64, so it has 2 more pages; each leaf has its own page.
    assert_eq!(table.pool_pages, 2 + 3 * 2 + 7);
    let parent = |leaf: usize| leaf * 3 / 7;
    for a in 0..7 {
        assert_eq!(table.kv_len(a), 69);
        for b in 0..a {
            let common = table.pages(a).iter().zip(table.pages(b));
            let common = common.take_while(|(a, b)| a == b).count();
            let expected = if parent(a) == parent(b) { 4 } else { 2 };
            assert_eq!(common, expected, "leaves {a} and {b}");
        }
    }
    let distinct: HashSet<_> = table.indices.iter().collect();
    assert_eq!(distinct.len(), 15, "every page of the pool is named");
}

#[test]
fn forests_and_single_levels_are_trees_too() {
    let tree = |nodes: &str, tokens: &str| {
        let case = one(&format!(
            r#"{{"heads": 8, "kv_heads": 2, "head_dim": 64,
                "tree": {{"nodes_per_level": {nodes}, "tokens_per_level": {tokens}}}}}"#
        ));
        case.batch().unwrap().parts[0].table.pool_pages
    };
    assert_eq!(tree("[4]", "[64]"), 16);
    assert_eq!(tree("[2, 8]", "[32, 16]"), 2 * 2 + 8);
}

#[test]
fn collections_of_papers_are_recognised() {
    let trees = r#"[{"id": 4, "tree": "1,2_64,32", "B": [1, 2], "L": [64, 32],
                     "heads": {"16/8": {"ctas": 3}, "32/8": {}}}]"#;
    assert_eq!(
        names(trees),
        ["pat 4 16/8 1,2_64,32", "pat 4 32/8 1,2_64,32"]
    );
    let case = parse("test", trees).unwrap().remove(0);
    assert_eq!((case.page_size, case.spec.q_dtype), (32, Dtype::F16));
    assert_eq!(case.batch().unwrap().parts[0].table.pool_pages, 2 + 2);

    let times = r#"[{"id": 4, "tree": "1,2_64,32", "heads": "64/8", "pat_us_warm": 1.5}]"#;
    assert_eq!(names(times), ["pat 4 64/8 1,2_64,32"]);

    let wrong = r#"[{"id": 4, "tree": "1,2_64", "heads": "64/8"}]"#;
    let error = parse("test", wrong).unwrap_err().to_string();
    assert!(error.starts_with("test:1:"), "{error}");
    assert!(
        error.contains("[0].tree: nodes_per_level has 2 levels"),
        "{error}"
    );
}

/// It was accepted and ignored: cases do not take it from the file.
#[test]
fn a_file_with_cases_has_no_name() {
    let text = r#"{"name": "mine", "heads": 8, "kv_heads": 2, "head_dim": 64,
        "cases": [{"requests": [{"q_len": 1, "kv_len": 5}]}]}"#;
    let error = parse("test", text).unwrap_err().to_string();
    assert!(error.contains("names stand in the cases"), "{error}");
}

#[test]
fn chunks_of_pod_end_where_they_should() {
    let text = r#"{
        "fig1": {"q_heads": 16, "kv_heads": 4, "configs": {"C0": {"p_chunk": 64, "p_ctx": 128, "d_bs": 2, "d_cl": 32}}},
        "fig6": {"q_heads": 32, "kv_heads": 4, "chunk": 64, "n_chunks": 2, "d_bs": [3], "d_cl": 48},
        "fig11": {"cases": [["m", 8, 2, 64, 192, 3, 5]]},
        "fig13": {"q_heads": 32, "kv_heads": 8, "ctx": [96], "d_bs": [7]},
        "fig14": {"models": {"m": [32, 8]}, "ctx": 256, "p_chunk": 128, "d_bs": [9]},
        "table8": {"ctx": 256, "chunk": 64, "d_bs": 11, "chunk_ids": [3]}}"#;
    let cases = parse("test", text).unwrap();
    let lengths: Vec<_> = cases.iter().map(Case::lengths).collect();
    assert_eq!(
        lengths,
        [
            "1 chunk of 64 @ 128, 2 decodes × 32",
            "1 chunk of 64 @ 64, 3 decodes × 48",
            "1 chunk of 64 @ 128, 3 decodes × 48",
            "1 chunk of 64 @ 64, 5 decodes × 192",
            "1 chunk of 64 @ 128, 5 decodes × 192",
            "1 chunk of 64 @ 192, 5 decodes × 192",
            "1 chunk of 96 @ 96, 7 decodes × 96",
            "1 chunk of 128 @ 256, 9 decodes × 256",
            "1 chunk of 64 @ 256, 11 decodes × 256",
        ]
    );
}

#[test]
fn trees_of_other_papers_are_crossed_with_their_heads() {
    let text = r#"{
        "fasttree_kernel_bench": [{"N": [1, 2], "C": [8, 32]}], "fasttree_heads": [[16, 1], [32, 8]],
        "pat_unit_test_trees": [{"N": [4], "C": [64]}], "pat_unit_test_heads": [64, 8],
        "relay_kernel_bench": {"num_reqs": [1, 4], "context_len": [128], "prefix_len": [64], "heads": [52, 52]}}"#;
    assert_eq!(
        names(text),
        [
            "fasttree 16/1 1,2_8,32",
            "fasttree 32/8 1,2_8,32",
            "pat-test 64/8 4_64",
            "relay 52/52 1,1_64,128",
            "relay 52/52 1,4_64,128",
        ]
    );
    for case in parse("test", text).unwrap() {
        case.batch().unwrap();
    }
}

#[test]
fn pages_by_head_are_of_a_model_and_leave_no_place_for_trees() {
    let text = |requests: &str| {
        format!(
            r#"{{"heads": 4, "kv_heads": 2, "head_dim": 64, "layout": "hnd", "page_size": 4, "pages_by_head": 2,
                "requests": [{requests}]}}"#
        )
    };
    let chain = one(&text(r#"{"q_len": 5, "kv_len": 40}"#));
    // The counts are those of the model, but attention is computed per head.
    assert_eq!((chain.count(), chain.tokens()), (1, 5));
    assert_eq!(chain.heads(), "4/2 × 64 bf16");
    let chain = chain.batch().unwrap();
    assert_eq!((chain.requests(), chain.ancestors.len()), (10, 0));
    let branches = parse(
        "test",
        &text(r#"{"q_len": 5, "kv_len": 40, "branches": 2}"#),
    );
    let error = branches.unwrap_err().to_string();
    assert!(error.contains("no tree or branches"), "{error}");
    let long = one(&text(r#"{"q_len": 9, "kv_len": 40}"#)).batch();
    let error = long.unwrap_err().to_string();
    assert!(error.contains("9 new tokens but only 8 keys"), "{error}");
}

/// Requests whose heads read all pages are in the same batch, prompts as a part of their own.
#[test]
fn requests_beside_pages_by_head_may_read_all_pages() {
    let text = |requests: &str| {
        format!(
            r#"{{"heads": 4, "kv_heads": 2, "head_dim": 64, "layout": "hnd", "page_size": 4, "pages_by_head": 2,
                "requests": [{requests}]}}"#
        )
    };
    let case = one(&text(
        r#"{"q_len": 1, "kv_len": 40}, {"q_len": 20, "kv_len": 30, "all_pages": true}, {"q_len": 1, "kv_len": 9, "all_pages": true}"#,
    ));
    assert_eq!((case.count(), case.tokens()), (3, 22));
    let batch = case.batch().unwrap();
    assert_eq!(
        (batch.requests(), batch.total_q(), batch.parts.len()),
        (5, 44, 2)
    );
    let keys: Vec<_> = (0..5).map(|request| batch.kv_len(request)).collect();
    assert_eq!(keys, [8, 8, 30, 9, 9]);
    let place = Place::of(&batch, 2);
    assert_eq!(
        (place.part.heads, place.part.kv_len(place.row_block)),
        (2, 30)
    );
    // The parts of pages of the second head.
    let pages = batch.parts[1].table.pages(place.row_block).iter();
    assert_eq!(
        place.pages(3),
        pages.map(|page| 2 * page + 1).collect::<Vec<_>>()
    );
    assert_eq!(Place::of(&batch, 4).part.heads, 1);

    let lists = text(r#"{"q_len": 20, "kv_len": 30, "one_block_in": 2}"#);
    let error = parse("test", &lists).unwrap_err().to_string();
    assert!(error.contains("needs all_pages"), "{error}");
    let plain = r#"{"heads": 4, "kv_heads": 2, "head_dim": 64, "requests": [{"q_len": 1, "kv_len": 9, "all_pages": true}]}"#;
    let error = parse("test", plain).unwrap_err().to_string();
    assert!(error.contains("cases with pages_by_head"), "{error}");
}

#[test]
fn blocks_of_queries_see_one_block_of_keys_in_some_and_their_own() {
    let text = |more: &str| {
        format!(
            r#"{{"heads": 4, "kv_heads": 2, "head_dim": 64{more},
                "requests": [{{"q_len": 512, "kv_len": 640, "one_block_in": 4}}]}}"#
        )
    };
    let case = one(&text(""));
    assert_eq!((case.count(), case.tokens()), (1, 512));
    assert_eq!(case.name, "1 chunk of 512 @ 640 on one block in 4 4/2");
    let batch = case.batch().unwrap();
    // Query blocks 0 to 3 are key blocks 1 to 4. Of those before, 0 sees 0, 2 sees 2 and 3 sees 1; 1 would see 3, which comes later.
    let keys: Vec<_> = (0..4).map(|request| batch.kv_len(request)).collect();
    assert_eq!((batch.requests(), keys), (4, vec![256, 128, 256, 256]));
    for wrong in [
        r#", "variant": {"causal": false}"#,
        r#", "tree": {"nodes_per_level": [1], "tokens_per_level": [5]}"#,
    ] {
        let error = parse("test", &text(wrong)).unwrap_err().to_string();
        assert!(
            error.contains("one_block_in needs a causal mask"),
            "{error}"
        );
    }
}

#[test]
fn huge_cases_are_refused_before_memory_is() {
    let case = one(
        r#"{"heads": 8, "kv_heads": 2, "head_dim": 64, "page_size": 1,
            "requests": [{"q_len": 1, "kv_len": 2147483646, "count": 1000000}]}"#,
    );
    let error = case.batch().unwrap_err().to_string();
    assert!(error.contains("pages of 1 tokens"), "{error}");
}

/// What is wrong with a case is found after its file was read, and has a line nevertheless.
#[test]
fn errors_of_a_case_have_its_line_and_its_field() {
    let error = |case: &str| {
        let text = format!(
            "{{\"description\": \"[{{\\\"cases\", \"heads\": 8,\n\"kv_heads\": 2, \"head_dim\": 64, \"cases\": [\n\
             {{\"name\": \"}}\", \"requests\": [{{\"q_len\": 1, \"kv_len\": 9}}]}},\n{case}]}}"
        );
        parse("test", &text).unwrap_err().to_string()
    };
    for (case, says) in [
        ("{}", "give requests"),
        (
            r#"{"kv_heads": 3}"#,
            "8 query heads cannot share 3 KV heads",
        ),
        (r#"{"cases": []}"#, "no cases of its own"),
        (
            r#"{"requests": [{"q_len": 1, "kv_len": 1}, {"q_len": 65, "kv_len": 99, "branches": 2}]}"#,
            "requests[1]: q_len is 65",
        ),
        (
            r#"{"requests": [{"q_len": 9, "kv_len": 8}]}"#,
            "requests[0]: q_len is 9 and kv_len 8",
        ),
    ] {
        let error = error(case);
        assert!(error.starts_with("test:4: cases[1]: "), "{error}");
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn chosen_keys_are_visible_and_the_same_for_host_and_device() {
    let text = |fields: &str| {
        format!(
            r#"{{"heads": 4, "kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "latent": true,
                "page_size": 4, {fields}}}"#
        )
    };
    let requests = r#""requests": [{"q_len": 2, "kv_len": 30}, {"q_len": 1, "kv_len": 5}]"#;
    let case = one(&text(&format!(
        r#""top_k": 8, "kv_dtype": "f8e4m3", {requests}"#
    )));
    let whole = one(&text(requests)).batch().unwrap();
    let table = &whole.parts[0].table;
    let (batch, chosen) = case.batches().unwrap();
    let chosen = chosen.unwrap();
    assert_eq!((chosen.planned.requests(), chosen.indices.len()), (3, 24));
    assert_eq!(chosen.planned.kv_len(2), 8);
    assert_eq!(case.planned().unwrap(), chosen.planned);
    batch.check(&case.spec).unwrap();
    assert_eq!(case.batch().unwrap(), batch);
    let known = &batch.parts[0].table;
    assert_eq!(
        (known.page_size, known.pool_pages),
        (1, table.pool_pages * 4)
    );
    // The first of two new tokens does not see the second.
    for (token, request, seen, count) in [(0, 0, 29, 8), (1, 0, 30, 8), (2, 1, 5, 5)] {
        let places: HashSet<u32> = (0..seen)
            .map(|key: u32| table.pages(request)[key as usize / 4] * 4 + key % 4)
            .collect();
        let indices = &chosen.indices[token * 8..][..8];
        let there = indices.iter().filter(|&&index| index != -1);
        let there: Vec<_> = there.map(|&index| index as u32).collect();
        assert!(
            there.iter().all(|place| places.contains(place)),
            "{there:?}"
        );
        assert_eq!(there.iter().collect::<HashSet<_>>().len(), count);
        assert_eq!(known.pages(token), there);
    }
    let plain = one(&text(requests));
    assert!(plain.batches().unwrap().1.is_none());
    assert_eq!(plain.planned().unwrap(), whole);
    // 2³² tokens of a pool are refused before a product in 32 bits, and before anything of that size is made.
    let case = one(
        r#"{"heads": 4, "kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "latent": true, "kv_dtype": "f8e4m3", "top_k": 8,
            "page_size": 128, "requests": [{"q_len": 1, "kv_len": 134217728, "count": 32}]}"#,
    );
    for error in [case.batch().unwrap_err(), case.planned().unwrap_err()] {
        let said = error.to_string();
        assert!(
            said.contains("keys of a pool of 4294967296 tokens"),
            "{said}"
        );
    }
    // Another type that is given to a command is checked, too.
    let mut case = one(&text(&format!(
        r#""top_k": 8, "kv_dtype": "f8e4m3", {requests}"#
    )));
    assert!(case.use_kv_dtype(None).is_ok());
    let error = case.use_kv_dtype(Some(Dtype::BF16)).unwrap_err();
    assert!(error.to_string().contains("in f8e4m3"), "{error}");
    for (fields, given) in [
        (r#""top_k": 0, "kv_dtype": "f8e4m3""#, "top_k is 0"),
        (r#""top_k": 8"#, "in f8e4m3"),
        (
            r#""top_k": 8, "kv_dtype": "f8e4m3", "variant": {"window_left": 3}"#,
            "no window",
        ),
    ] {
        let error = parse("test", &text(&format!("{fields}, {requests}")));
        let error = error.unwrap_err().to_string();
        assert!(error.contains(given), "{error}");
    }
}
