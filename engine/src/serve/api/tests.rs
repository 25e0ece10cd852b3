use super::*;
use crate::Sampling;

fn parsed(kind: Kind, field: &str, value: Value) -> Result<Asked, String> {
    let mut body = match kind {
        Kind::Completion => json!({"prompt": "a"}),
        Kind::Chat => json!({"messages": [{"role": "user", "content": "a"}]}),
    };
    body[field] = value;
    parse(kind, body.to_string().as_bytes(), "tiny").map_err(|refusal| refusal.message)
}

fn refused(kind: Kind, field: &str, value: Value) -> String {
    match parsed(kind, field, value.clone()) {
        Ok(_) => panic!("{field}: {value} is taken"),
        Err(message) => message,
    }
}

/// `false` is not the default of every field: without this check these would be ignored.
#[test]
fn fields_that_are_switched_off_are_not_ignored() {
    let only_true = "is false, and only true is implemented";
    let unknown = "is not known here: leave it out";
    for (kind, field, rule) in [
        (Kind::Completion, "add_special_tokens", only_true),
        (Kind::Chat, "add_generation_prompt", only_true),
        (Kind::Chat, "enable_thinking", unknown),
        (Kind::Chat, "unknown", unknown),
    ] {
        assert_eq!(
            refused(kind, field, json!(false)),
            format!("{field} {rule}")
        );
    }
    let with = |options: Value| {
        let body = json!({"prompt": "a", "stream": true, "stream_options": options});
        parse(Kind::Completion, body.to_string().as_bytes(), "tiny")
            .map_err(|refusal| refusal.message)
    };
    assert_eq!(
        with(json!({"include_usage": true, "continuous_usage_stats": true}))
            .err()
            .unwrap(),
        "stream_options.continuous_usage_stats is true, and only false is implemented"
    );
    for obfuscation in [false, true] {
        let options = json!({"include_usage": true, "include_obfuscation": obfuscation});
        assert!(with(options).is_ok());
    }
    assert!(with(json!({"include_obfuscation": "a"})).is_err());
    let body = json!({"prompt": "a", "max_tokens": 3, "max_completion_tokens": 2}).to_string();
    let both = parse(Kind::Completion, body.as_bytes(), "tiny")
        .err()
        .unwrap();
    assert_eq!(
        both.message,
        "max_completion_tokens is 2 and max_tokens is 3: give one of them"
    );
}

/// Nothing is stored here, and there is one tier.
#[test]
fn services_that_are_not_there_are_refused() {
    for (field, value, rule) in [
        ("store", json!(true), "false"),
        ("service_tier", json!("priority"), "\"auto\" or \"default\""),
    ] {
        let message = format!("{field} is {value}, and only {rule} is implemented");
        assert_eq!(refused(Kind::Chat, field, value), message);
    }
}

/// Clients send defaults of OpenAI's interface and of other servers.
#[test]
fn values_without_effect_are_taken() {
    for (kind, field, value) in [
        (Kind::Completion, "prompt", json!(["a"])),
        (Kind::Completion, "prompt", json!([[1, 2]])),
        (Kind::Completion, "suffix", json!("")),
        (Kind::Completion, "echo", json!(false)),
        (Kind::Completion, "add_special_tokens", json!(true)),
        (Kind::Completion, "top_k", json!(-1)),
        (Kind::Completion, "repetition_penalty", json!(1.0)),
        (Kind::Completion, "logprobs", json!(false)),
        (Kind::Completion, "top_logprobs", json!(0)),
        (Kind::Chat, "top_logprobs", json!(0)),
        (Kind::Chat, "logprobs", json!(false)),
        (Kind::Chat, "add_special_tokens", json!(false)),
        (Kind::Chat, "prompt", Value::Null),
        (Kind::Chat, "tools", json!([])),
        (Kind::Chat, "tool_choice", json!("auto")),
        (Kind::Chat, "logit_bias", json!({})),
        (Kind::Chat, "response_format", json!({"type": "text"})),
        (Kind::Chat, "unknown", Value::Null),
        (Kind::Chat, "store", json!(false)),
        (Kind::Chat, "service_tier", json!("auto")),
        (Kind::Chat, "service_tier", json!("default")),
    ] {
        let taken = parsed(kind, field, value.clone());
        assert!(taken.is_ok(), "{field} {value}: {:?}", taken.err());
    }
}

/// A request could ask for choices until the memory was full.
#[test]
fn choices_of_a_prompt_are_limited() {
    let choices = |n: u32| parsed(Kind::Completion, "n", json!(n)).map(|asked| asked.choices());
    assert_eq!(choices(128), Ok(128));
    for more in [129, u32::MAX] {
        let message = format!("n is {more}: give a whole number from 1 to 128");
        assert_eq!(choices(more), Err(message));
    }
}

#[test]
fn prompts_are_one_or_several() {
    let prompts =
        |value: Value| parsed(Kind::Completion, "prompt", value).map(|asked| asked.prompts);
    let (text, tokens) = (
        |text: &str| Prompt::Text(text.to_owned()),
        |ids: &[u32]| Prompt::Tokens(ids.to_vec()),
    );
    for (value, expected) in [
        (json!([7]), vec![tokens(&[7])]),
        (json!(["a"]), vec![text("a")]),
        (json!(["a", "b"]), vec![text("a"), text("b")]),
        (json!([[7, 8], [9]]), vec![tokens(&[7, 8]), tokens(&[9])]),
        (json!([[]]), vec![tokens(&[])]),
        (json!([]), vec![tokens(&[])]),
    ] {
        assert_eq!(prompts(value.clone()), Ok(expected), "{value}");
    }
    for wrong in [json!([1, "a"]), json!([[["a"]]]), json!([-1]), json!({})] {
        assert!(prompts(wrong.clone()).is_err(), "{wrong}");
    }
    let asked = |value| parsed(Kind::Completion, "prompt", value).unwrap();
    assert_eq!(asked(json!(["a", "b"])).choices(), 2);
}

const MOST: Most = Most {
    usual: SamplingOptions {
        temperature: None,
        top_k: None,
        top_p: None,
        min_p: None,
        presence_penalty: None,
        frequency_penalty: None,
        repetition_penalty: None,
    },
    positions: 200,
    limit: 150,
    request_tokens: 100,
    answer_tokens: 10,
};

/// Equal seeds give equal choices, but no two choices of an answer.
#[test]
fn choices_have_seeds_of_their_own() {
    let most = MOST;
    let asked = parsed(Kind::Chat, "seed", json!(-3)).unwrap().parameters;
    let of = |choice| asked.generation(choice, 1, &most);
    assert_eq!(of(0).sampling.seed, (-3_i64).cast_unsigned());
    let seeds: std::collections::BTreeSet<_> = (0..1000).map(|at| of(at).sampling.seed).collect();
    assert_eq!(seeds.len(), 1000);
    assert_eq!(of(0).max_new_tokens, 10);
    assert_eq!(asked.generation(0, 95, &most).max_new_tokens, 5);
}

/// The engine would refuse each choice, with a copy of its prompt.
#[test]
fn prompts_that_are_too_long_are_refused_before_their_choices() {
    let most = MOST;
    let asked = parsed(Kind::Chat, "max_tokens", json!(20))
        .unwrap()
        .parameters;
    assert!(asked.check(130, &most).is_ok());
    let refused = asked.check(131, &most);
    let limit = ScheduleError::RequestTooLong {
        prompt: 131,
        new: 20,
        limit: 150,
    };
    assert!(
        matches!(&refused, Err(Error::Schedule(error)) if *error == limit),
        "{refused:?}"
    );
    let refused = asked.check(181, &most);
    let too_long =
        |got| matches!(refused, Err(Error::TooLong { got: is, limit: 200 }) if is == got);
    assert!(too_long(201), "{refused:?}");
    assert!(asked.check(usize::MAX, &most).is_err());
}

/// As clients write them that have one type of numbers.
#[test]
fn whole_numbers_may_have_a_point() {
    let body = json!({
        "prompt": [7.0, 8], "max_tokens": 16.0, "n": 2.0, "seed": -3.0, "top_k": -1.0, "min_tokens": 1e1, "logprobs": 2.0,
        "stop_token_ids": [5.0],
    });
    let asked = parse(Kind::Completion, body.to_string().as_bytes(), "tiny").unwrap();
    assert_eq!(asked.prompts, [Prompt::Tokens(vec![7, 8])]);
    let parameters = asked.parameters;
    assert_eq!((parameters.choices, parameters.min_tokens), (2, 10));
    assert_eq!(parameters.log_probs, Some(2));
    let first = parameters.generation(0, 2, &MOST);
    assert_eq!(first.max_new_tokens, 16);
    assert_eq!(first.sampling.seed, (-3_i64).cast_unsigned());
    assert_eq!(first.sampling.top_k, 0);
    assert_eq!(first.stop_tokens, [5]);
    for (field, value) in [
        ("max_tokens", json!(16.5)),
        ("max_tokens", json!(4_294_967_296.0)),
        ("min_tokens", json!(-1.0)),
        ("seed", json!(9_223_372_036_854_775_808.0)),
        ("seed", json!(1e300)),
        ("n", json!(0.0)),
        ("top_k", json!(-2.0)),
    ] {
        assert!(
            parsed(Kind::Completion, field, value.clone()).is_err(),
            "{field} {value}"
        );
    }
    let least = json!(-9_223_372_036_854_775_808.0);
    assert!(parsed(Kind::Completion, "seed", least).is_ok());
}

/// Clients draw them from all numbers of 64 bits, with or without a sign.
#[test]
fn seeds_are_numbers_of_64_bits() {
    let seed = |value: Value| {
        let asked = parsed(Kind::Chat, "seed", value)?.parameters;
        Ok::<_, String>(asked.generation(0, 1, &MOST).sampling.seed)
    };
    for (given, expected) in [
        (json!(u64::MAX), u64::MAX),
        (json!(-1), u64::MAX),
        (json!(1_u64 << 63), 1 << 63),
        (json!(i64::MIN), 1 << 63),
        (json!(7), 7),
    ] {
        assert_eq!(seed(given.clone()), Ok(expected), "{given}");
    }
    assert!(seed(json!(-1e19)).is_err());
}

#[test]
fn stop_texts_are_few_and_short() {
    let asked = |stops: Value| parsed(Kind::Completion, "stop", stops);
    for (few, more) in [
        (
            json!(["a", "b", "c", "d"]),
            json!(["a", "b", "c", "d", "e"]),
        ),
        (json!("a".repeat(4096)), json!("a".repeat(4097))),
        (
            json!(["a".repeat(4095), "b"]),
            json!(["a".repeat(4095), "bc"]),
        ),
    ] {
        assert!(asked(few).is_ok());
        let said = asked(more).unwrap_err();
        assert!(
            said.contains("up to 4 of them") && said.contains("4096 bytes"),
            "{said}"
        );
    }
}

#[test]
fn log_probabilities_are_asked_for_as_each_endpoint_has_them() {
    let asked = |kind, field: &str, value| {
        parsed(kind, field, value).map(|asked| asked.parameters.log_probs)
    };
    for (value, top) in [
        (json!(0), Some(0)),
        (json!(20), Some(20)),
        (Value::Null, None),
    ] {
        assert_eq!(asked(Kind::Completion, "logprobs", value), Ok(top));
    }
    assert_eq!(asked(Kind::Chat, "logprobs", json!(true)), Ok(Some(0)));
    let body = json!({"messages": [{"role": "user", "content": "a"}], "logprobs": true, "top_logprobs": 3});
    let both = parse(Kind::Chat, body.to_string().as_bytes(), "tiny").unwrap();
    assert_eq!(both.parameters.log_probs, Some(3));
    let top = "give a number of most likely tokens, at most 20";
    for (kind, field, value, message) in [
        (
            Kind::Completion,
            "logprobs",
            json!(21),
            format!("logprobs is 21: {top}"),
        ),
        (
            Kind::Completion,
            "logprobs",
            json!(true),
            format!("logprobs is true: {top}"),
        ),
        (
            Kind::Completion,
            "top_logprobs",
            json!(2),
            "top_logprobs is 2, and only 0 is implemented".into(),
        ),
        (
            Kind::Chat,
            "logprobs",
            json!(2),
            "logprobs is 2: give true or false".into(),
        ),
        (
            Kind::Chat,
            "top_logprobs",
            json!(21),
            format!("top_logprobs is 21: {top}"),
        ),
        (
            Kind::Chat,
            "top_logprobs",
            json!(2),
            "top_logprobs is 2 without logprobs: set logprobs to true".into(),
        ),
    ] {
        assert_eq!(refused(kind, field, value), message);
    }
}

#[test]
fn biases_are_numbers_of_token_ids() {
    let asked = |value| parsed(Kind::Chat, "logit_bias", value).map(|asked| asked.parameters.bias);
    let few = json!({"7": -100, "9": 1.5});
    assert_eq!(asked(few), Ok(vec![(7, -100.0), (9, 1.5)]));
    let of = |count: u32| {
        let all = (0..count).map(|id| (id.to_string(), json!(1)));
        Value::Object(all.collect())
    };
    assert_eq!(asked(of(1024)).unwrap().len(), 1024);
    for wrong in [
        of(1025),
        json!({"a": 1}),
        json!({"-1": 1}),
        json!({"7": 101}),
        json!({"7": "1"}),
        json!([7]),
    ] {
        let message = asked(wrong).unwrap_err();
        assert!(
            message.starts_with("logit_bias is ") && message.contains("up to 1024 token ids"),
            "{message}"
        );
    }
}

/// As with a `generation_config.json` that has `"do_sample": false`.
#[test]
fn who_says_how_a_token_is_drawn_gets_one_drawn() {
    let mut most = Most {
        usual: SamplingOptions {
            temperature: Some(0.0),
            ..SamplingOptions::default()
        },
        positions: 100,
        limit: 100,
        request_tokens: 100,
        answer_tokens: 10,
    };
    let drawn = |field: &str, value: Value, most: &Most| {
        let parameters = parsed(Kind::Completion, field, value).unwrap().parameters;
        parameters.generation(0, 1, most).sampling
    };
    for (field, value) in [
        ("max_tokens", json!(3)),
        ("top_p", json!(1)),
        ("top_k", json!(-1)),
        ("min_p", json!(0)),
    ] {
        assert_eq!(drawn(field, value, &most).temperature, 0.0, "{field}");
    }
    for (field, value) in [
        ("top_p", json!(0.9)),
        ("top_k", json!(5)),
        ("min_p", json!(0.1)),
        ("seed", json!(7)),
    ] {
        assert_eq!(drawn(field, value, &most).temperature, 1.0, "{field}");
    }
    assert_eq!(drawn("top_p", json!(0.9), &most).top_p, 0.9);
    assert_eq!(drawn("temperature", json!(0.5), &most).temperature, 0.5);
    assert_eq!(drawn("temperature", json!(1e-6), &most).temperature, 1e-4);
    most.usual.temperature = Some(0.6);
    assert_eq!(drawn("top_p", json!(0.9), &most).temperature, 0.6);
}

#[test]
fn fields_of_a_part_are_not_ignored() {
    let with = |field: &str, value: Value| {
        let mut part = json!({"type": "text", "text": "a"});
        part[field] = value;
        parsed(
            Kind::Chat,
            "messages",
            json!([{"role": "user", "content": [part]}]),
        )
    };
    for (field, value) in [
        ("image_url", json!({"url": "a"})),
        ("annotations", json!([{"type": "url_citation"}])),
        ("unknown", json!(false)),
    ] {
        assert_eq!(
            with(field, value).err(),
            Some(format!(
                "messages[0].content[0].{field} is not rendered here: leave it out"
            ))
        );
    }
    for (field, value) in [
        ("cache_control", json!({"type": "ephemeral"})),
        ("annotations", json!([])),
        ("unknown", Value::Null),
    ] {
        assert!(with(field, value).is_ok(), "{field}");
    }
}

#[test]
fn errors_have_the_field_and_its_value() {
    for (kind, field, value, message) in [
        (
            Kind::Completion,
            "max_tokens",
            json!("4"),
            "max_tokens is \"4\": give a whole number from 1 to 4294967295",
        ),
        (
            Kind::Completion,
            "max_tokens",
            json!(-1),
            "max_tokens is -1: give a whole number from 1 to 4294967295",
        ),
        (
            Kind::Completion,
            "temperature",
            json!("0"),
            "temperature is \"0\": give a number",
        ),
        (
            Kind::Completion,
            "stop",
            json!(5),
            "stop is 5: give a text, or up to 4 of them, none empty, with 4096 bytes together",
        ),
        (
            Kind::Completion,
            "seed",
            json!(1.5),
            "seed is 1.5: give a whole number of 64 bits",
        ),
        (
            Kind::Completion,
            "stream",
            json!("true"),
            "stream is \"true\": give true or false",
        ),
        (
            Kind::Chat,
            "messages",
            json!([]),
            "messages is empty: give at least one message",
        ),
        (
            Kind::Chat,
            "messages",
            json!("hi"),
            "messages is \"hi\": give a list of messages",
        ),
        (
            Kind::Chat,
            "messages",
            json!(["hi"]),
            "messages[0] is \"hi\": give an object with role and content",
        ),
        (
            Kind::Chat,
            "messages",
            json!([{"role": "assistant", "content": null}]),
            "messages[0].content is missing: give a text or a list of text parts",
        ),
        (
            Kind::Chat,
            "messages",
            json!([{"role": "User", "content": "a"}]),
            "messages[0].role is \"User\": give \"system\", \"user\", \"assistant\" or \"tool\"",
        ),
        (
            Kind::Chat,
            "messages",
            json!([{"role": "user", "content": "a"}, {"role": "function", "content": "b"}]),
            "messages[1].role is \"function\": give \"system\", \"user\", \"assistant\" or \"tool\"",
        ),
        (
            Kind::Chat,
            "messages",
            json!([{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text"}]}]),
            "messages[1].content[0] is {\"type\":\"text\"}: give {\"type\": \"text\", \"text\": …}",
        ),
        (
            Kind::Chat,
            "messages",
            json!([{"role": "user", "content": [{"type": "image_url"}]}]),
            "messages[0].content[0] is of type \"image_url\": only text is read here",
        ),
        (
            Kind::Chat,
            "tool_choice",
            json!("required"),
            "tool_choice is \"required\": give \"auto\" or \"none\": a model's calls are its text here, and none is forced",
        ),
        (
            Kind::Completion,
            "n",
            json!(0),
            "n is 0: give a whole number from 1 to 128",
        ),
        (
            Kind::Completion,
            "best_of",
            json!(2),
            "best_of is 2, and only 1 is implemented",
        ),
        (
            Kind::Completion,
            "stop_token_ids",
            json!(["a"]),
            "stop_token_ids is [\"a\"]: give a list of up to 64 token ids",
        ),
        (
            Kind::Completion,
            "min_tokens",
            json!(-1),
            "min_tokens is -1: give a number of tokens",
        ),
        (
            Kind::Chat,
            "ignore_eos",
            json!(1),
            "ignore_eos is 1: give true or false",
        ),
    ] {
        assert_eq!(refused(kind, field, value), message, "{field}");
    }
    let long = refused(Kind::Completion, "prompt", json!([["a".repeat(1000)], 1]));
    assert!(long.chars().count() < 150, "{long}");
    for (body, message) in [
        (
            &b"{\"prompt\": \"a\", \"prompt\": \"b\"}"[..],
            "\"prompt\" is there twice",
        ),
        (b"{}", "prompt is missing: give a text"),
        (
            b"{\"prompt\": \"a\", \"stream_options\": {\"include_usage\": true, \"include_usage\": false}}",
            "\"include_usage\" is there twice",
        ),
        (
            b"{\"messages\": [{\"role\": \"user\", \"content\": \"a\", \"content\": \"b\"}]}",
            "\"content\" is there twice",
        ),
        (b"[]", "the body is no JSON object"),
        (b"{\"prompt\": \"\xff\"}", "the body is no JSON object"),
    ] {
        let refusal = parse(Kind::Completion, body, "tiny").err().unwrap();
        assert!(refusal.message.contains(message), "{}", refusal.message);
    }
}

/// The types are those of OpenAI's interface: strict clients read an error with a number as its code as no error.
#[test]
fn errors_have_the_types_of_the_interface() {
    let error = Refusal::wrong("x").body();
    assert_eq!(
        error["error"],
        json!({"message": "x", "type": "invalid_request_error", "param": null, "code": "400"})
    );
}

/// Clients show `param` beside the field of their own interface.
#[test]
fn errors_name_their_field() {
    for (body, param) in [
        (json!({"prompt": "a", "best_of": 2}), "best_of"),
        (json!({"prompt": "a", "max_tokens": "4"}), "max_tokens"),
        (json!({"prompt": "a", "model": "gpt-4"}), "model"),
        (json!({"prompt": "a", "unknown": 1}), "unknown"),
        (json!({"max_tokens": 4}), "prompt"),
    ] {
        let refusal = parse(Kind::Completion, body.to_string().as_bytes(), "tiny");
        let error = refusal.err().unwrap().body();
        assert_eq!(error["error"]["param"], param, "{error}");
    }
    let body =
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": 5}]});
    let refusal = parse(Kind::Chat, body.to_string().as_bytes(), "tiny");
    let error = refusal.err().unwrap().body();
    assert_eq!(error["error"]["param"], "messages[1].content", "{error}");
}

/// The ranges of these are known where tokens are drawn.
#[test]
fn errors_of_drawing_name_their_field() {
    for (sampling, param) in [
        (
            Sampling {
                temperature: -1.0,
                ..Sampling::GREEDY
            },
            "temperature",
        ),
        (
            Sampling {
                top_p: 1.5,
                ..Sampling::GREEDY
            },
            "top_p",
        ),
        (
            Sampling {
                min_p: 2.0,
                ..Sampling::GREEDY
            },
            "min_p",
        ),
    ] {
        let error = sampling
            .draw(0)
            .map_err(tandem_attn::Error::from)
            .unwrap_err();
        let error = Refusal::from(Error::from(error)).body();
        assert_eq!(error["error"]["param"], param, "{error}");
    }
}

/// Long prompts wait for their own lane.
#[test]
fn chats_are_as_long_as_what_their_template_gets() {
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let long = "x".repeat(100_000);
    let options = ChatOptions {
        variables: json!({"note": long}).as_object().unwrap().clone(),
        ..ChatOptions::default()
    };
    let with_id = json!({"role": "tool", "content": "", "tool_call_id": long});
    for (message, options) in [
        (message(&long, "x"), ChatOptions::default()),
        (message("user", &long), ChatOptions::default()),
        (message("user", ""), options),
        (with_id, ChatOptions::default()),
    ] {
        assert!(Prompt::Chat(vec![message], options).text_bytes() >= 100_000);
    }
}
