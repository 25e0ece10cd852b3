//! Several choices and prompts, and what ends an answer.

use serde_json::{Value, json};
use tandem_engine::{Generation, Limits, Text};

use crate::{
    common::{answers, engine, folder},
    server::{Server, body, events, response, streamed},
};

/// The texts of an answer's choices, which are in order.
fn texts(answer: &Value) -> Vec<String> {
    let choices = answer["choices"]
        .as_array()
        .unwrap_or_else(|| panic!("{answer}"));
    let text = |(index, choice): (usize, &Value)| {
        assert_eq!(choice["index"], index, "{answer}");
        choice["text"].as_str().unwrap().to_owned()
    };
    choices.iter().enumerate().map(text).collect()
}

/// The texts of a stream by choice, each of which ends once.
fn streamed_texts(stream: &str, field: &str, choices: usize) -> Vec<String> {
    assert!(stream.ends_with("data: [DONE]\n\n"), "{stream}");
    let mut texts = vec![(String::new(), false); choices];
    for event in events(stream) {
        for choice in event["choices"].as_array().unwrap() {
            let (text, ended) = &mut texts[choice["index"].as_u64().unwrap() as usize];
            assert!(!*ended, "{stream}");
            *text += choice
                .pointer(field)
                .and_then(Value::as_str)
                .unwrap_or_default();
            *ended = !choice["finish_reason"].is_null();
        }
    }
    assert!(texts.iter().all(|(_, ended)| *ended), "{stream}");
    texts.into_iter().map(|(text, _)| text).collect()
}

#[test]
fn choices_and_prompts_are_those_of_single_requests() {
    let server = Server::of("qwen2");
    let text = Text::read(&folder("qwen2")).unwrap();
    let ids = text.encode("The planner", true).unwrap();
    let single = json!({"prompt": "The planner", "max_tokens": 8, "temperature": 5.0, "seed": 3});
    let first = texts(&server.complete(&single).1);

    let mut three = single.clone();
    three["n"] = json!(3);
    let (status, whole) = server.complete(&three);
    let together = texts(&whole);
    assert_eq!((status, together.len()), (200, 3), "{whole}");
    assert_eq!(together[0], first[0]);
    assert!(together[0] != together[1] && together[1] != together[2] && together[0] != together[2]);
    assert_eq!(whole["usage"]["prompt_tokens"], ids.len());
    let generated = whole["usage"]["completion_tokens"].as_u64().unwrap();
    assert!((9..=24).contains(&generated), "{whole}");
    three["stream_options"] = json!({"include_usage": true});
    let (_, stream) = server.stream(&three);
    assert_eq!(streamed_texts(&stream, "/text", 3), together);
    let last = events(&stream).pop().unwrap();
    assert_eq!(last["usage"]["completion_tokens"], generated);
    assert_eq!(last["usage"]["prompt_tokens"], ids.len());

    // The choices of the first prompt come first. Greedy, so that each is that of its prompt alone.
    let alone = ["The planner", "Prompts are cut"].map(|prompt| {
        let asked = json!({"prompt": prompt, "max_tokens": 8, "temperature": 0});
        let answer = server.complete(&asked).1;
        (
            texts(&answer).remove(0),
            answer["usage"]["prompt_tokens"].as_u64().unwrap(),
        )
    });
    let second = text.encode("Prompts are cut", true).unwrap();
    for prompts in [
        json!(["The planner", "Prompts are cut"]),
        json!([ids, second]),
    ] {
        let asked = json!({"prompt": prompts, "n": 2, "max_tokens": 8, "temperature": 0});
        let answer = server.complete(&asked).1;
        let [(a, of_a), (b, of_b)] = &alone;
        assert_eq!(texts(&answer), [a, a, b, b].map(String::clone));
        assert_eq!(answer["usage"]["prompt_tokens"], of_a + of_b);
        assert_eq!(
            streamed_texts(&server.stream(&asked).1, "/text", 4),
            texts(&answer)
        );
    }
    // All of them or none.
    let (status, answer) = server.complete(&json!({"prompt": [[1], [999_999]], "max_tokens": 4}));
    assert_eq!(status, 400, "{answer}");
    server.wait_for("tandem_running_requests", 0);
    server.has_metrics(&[("requests_cancelled_total", 0)]);
}

#[test]
fn a_chat_may_have_several_choices() {
    let server = Server::of("gemma3");
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let asked =
        json!({"messages": messages, "n": 2, "max_tokens": 6, "temperature": 3.0, "seed": 1});
    let whole = body(&server.chat(&asked).1);
    let right: Vec<_> = whole["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|choice| {
            assert_eq!(choice["message"]["role"], "assistant");
            choice["message"]["content"].as_str().unwrap().to_owned()
        })
        .collect();
    let stream = server.chat(&streamed(&asked)).1;
    assert_eq!(streamed_texts(&stream, "/delta/content", 2), right);
    for index in 0..2 {
        let of = |event: &&Value| event["choices"][0]["index"] == index;
        let events = events(&stream);
        let mut of_choice = events.iter().filter(of);
        assert_eq!(
            of_choice.next().unwrap()["choices"][0]["delta"]["role"],
            "assistant"
        );
        assert!(of_choice.all(|event| event["choices"][0]["delta"].get("role").is_none()));
    }
}

/// The other choices go on after it.
#[test]
fn a_stop_text_ends_only_its_choice() {
    let server = Server::of("qwen2");
    let asked = json!({"prompt": "The planner", "max_tokens": 40, "temperature": 5.0, "seed": 3, "n": 4, "ignore_eos": true});
    let whole = texts(&server.complete(&asked).1);
    let stop: String = whole[1].chars().skip(4).take(3).collect();
    let mut stopped = asked.clone();
    stopped["stop"] = json!(stop);
    let answer = server.complete(&stopped).1;
    let expected: Vec<_> = whole
        .iter()
        .map(|text| text.split(&stop).next().unwrap())
        .collect();
    assert_eq!(texts(&answer), expected);
    assert_eq!(answer["choices"][1]["finish_reason"], "stop");
    assert!(
        expected.iter().zip(&whole).any(|(cut, whole)| cut == whole),
        "{stop:?} is in all"
    );
    assert_eq!(
        streamed_texts(&server.stream(&stopped).1, "/text", 4),
        expected
    );
    server.wait_for("tandem_requests_completed_total", 12);
    server.has_metrics(&[("requests_cancelled_total", 0)]);
}

#[test]
fn tokens_that_end_an_answer_are_those_asked_for() {
    let server = Server::of("llama3");
    let text = Text::read(&folder("llama3")).unwrap();
    let ids = text.encode("Prompts are cut", true).unwrap();
    let generation = Generation {
        ignore_ends: true,
        ..Generation::greedy(ids.clone(), 40)
    };
    let right = answers(&mut engine("llama3", Limits::default()), &[generation]).remove(0);
    let with = |fields: Value| {
        let mut asked =
            json!({"prompt": ids, "max_tokens": 40, "temperature": 0, "ignore_eos": true});
        for (name, value) in fields.as_object().unwrap() {
            asked[name] = value.clone();
        }
        let answer = server.complete(&asked).1;
        let usage = answer["usage"]["completion_tokens"].as_u64();
        let finish = answer["choices"][0]["finish_reason"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        (texts(&answer).remove(0), usage.unwrap() as usize, finish)
    };
    let cut = |tokens: usize, finish: &str| {
        (
            text.decode(&right[..tokens]).unwrap(),
            tokens,
            finish.to_owned(),
        )
    };
    assert_eq!(with(json!({})).1, 40);
    // The stop token is not in the text, and ends it also where the ends of the model do not.
    let stop = right[5];
    let at = right.iter().position(|&token| token == stop).unwrap();
    assert_eq!(with(json!({"stop_token_ids": [stop]})), cut(at, "stop"));
    // Before min_tokens it is not drawn.
    let (min_new_tokens, stop_tokens) = (at as u32 + 1, vec![stop]);
    let generation = Generation {
        ignore_ends: true,
        min_new_tokens,
        stop_tokens,
        ..Generation::greedy(ids.clone(), 40)
    };
    let longer = answers(&mut engine("llama3", Limits::default()), &[generation]).remove(0);
    assert!(longer.len() > at && longer[..at] == right[..at] && longer[at] != stop);
    let finish = if longer.len() < 40 { "stop" } else { "length" };
    assert_eq!(
        with(json!({"stop_token_ids": [stop], "min_tokens": at + 1})),
        (
            text.decode(&longer).unwrap(),
            longer.len(),
            finish.to_owned()
        )
    );
    // A stop text before it is a text like any other.
    let all = text.decode(&right).unwrap();
    let stop: String = all.chars().skip(2).take(2).collect();
    assert!(with(json!({"stop": stop})).1 < 30);
    let (_, tokens, _) = with(json!({"stop": stop, "min_tokens": 30}));
    assert!(tokens >= 30, "{tokens}");

    // A seed whose answer the model ends.
    let asked = |seed: u64, more: Value| {
        let mut asked = json!({"prompt": ids, "max_tokens": 200, "temperature": 9.0, "seed": seed});
        for (name, value) in more.as_object().unwrap() {
            asked[name] = value.clone();
        }
        server.complete(&asked).1
    };
    let ended = (0..50).map(|seed| (seed, asked(seed, json!({}))));
    let mut ended = ended.filter(|(_, answer)| answer["choices"][0]["finish_reason"] == "stop");
    let (seed, answer) = ended.next().expect("one of them ends");
    let tokens = answer["usage"]["completion_tokens"].as_u64().unwrap();
    let ignored = asked(seed, json!({"ignore_eos": true}));
    assert_eq!(ignored["usage"]["completion_tokens"], 200, "{ignored}");
    let longer = asked(seed, json!({"min_tokens": tokens + 1}));
    assert!(
        longer["usage"]["completion_tokens"].as_u64().unwrap() > tokens,
        "{longer}"
    );
}

#[test]
fn usage_has_the_cached_tokens_of_a_request() {
    let server = Server::of("llama3");
    let prompt: Vec<u32> = (1..=40).collect();
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    let asked = json!({"prompt": prompt, "max_tokens": 2, "ignore_eos": true});
    assert_eq!(cached(&server.complete(&asked).1), 0);
    // Whole pages of 16 tokens.
    assert_eq!(cached(&server.complete(&asked).1), 32);
    let mut two = asked.clone();
    two["n"] = json!(2);
    two["stop"] = json!("never");
    assert_eq!(cached(&server.complete(&two).1), 32);
    // The second choice found the pages of the first.
    let before = server.metric("tandem_cached_tokens_total");
    let other: Vec<u32> = (101..=140).collect();
    let several = json!({"prompt": other, "max_tokens": 2, "ignore_eos": true, "n": 4});
    assert_eq!(cached(&server.complete(&several).1), 0);
    server.wait_for("tandem_cached_tokens_total", before + 3 * 32);
    two["stream_options"] = json!({"include_usage": true});
    let events = events(&server.stream(&two).1);
    assert_eq!(cached(events.last().unwrap()), 32);
}

/// One request runs. A queued stream has nothing to send for a while.
#[test]
fn streams_are_kept_alive() {
    let limits = Limits {
        running: 1,
        ..Limits::default()
    };
    let server = Server::start("llama3", limits, |options| {
        options.keep_alive = std::time::Duration::from_millis(5);
    });
    let long = json!({"prompt": "a", "max_tokens": 490, "ignore_eos": true});
    let first = server.ask(&long);
    server.wait_for("tandem_running_requests", 1);
    let (status, stream) =
        server.stream(&json!({"prompt": "a", "max_tokens": 3, "ignore_eos": true}));
    assert!(
        status == 200 && stream.starts_with(": keep-alive\n\n"),
        "{stream}"
    );
    assert_eq!(streamed_texts(&stream, "/text", 1).len(), 1);
    assert_eq!(response(first).0, 200);
}

/// Six answers of 200 tokens exceed the pool.
#[test]
fn metrics_have_the_times_and_steps_of_requests() {
    let server = Server::of("llama3");
    let prompt: Vec<u32> = (1..=40).collect();
    let asked = json!({"prompt": prompt, "max_tokens": 200, "ignore_eos": true, "n": 6, "seed": 1});
    let (status, answer) = server.complete(&asked);
    assert_eq!(
        (status, &answer["usage"]["completion_tokens"]),
        (200, &json!(1200))
    );
    server.wait_for("tandem_running_requests", 0);
    server.has_metrics(&[
        ("queue_seconds_count", 6),
        ("first_token_seconds_count", 6),
        ("request_seconds_count", 6),
    ]);
    assert!(server.metric("tandem_preemptions_total") > 0);
    let [steps, requests] =
        ["steps", "step_requests"].map(|name| server.metric(&format!("tandem_{name}_total")));
    assert!(
        steps < requests && requests <= 6 * steps,
        "{requests} in {steps}"
    );
}
