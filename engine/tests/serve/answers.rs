//! Answers: completions, chats, their lengths and what metrics count of them.

use serde_json::{Value, json};
use tandem_engine::{Architecture, CpuBackend, Engine, Generation, Limits, Message, Text, Weights};

use crate::{
    common::{answers, engine, expected_text, folder, options, with_template},
    server::{MODEL, Server, body, events, raw, streamed},
};

#[test]
fn completions_are_what_the_engine_writes() {
    let server = Server::of("qwen2");
    let text = Text::read(&folder("qwen2")).unwrap();
    let prompt = "The planner finds";
    let ids = text.encode(prompt, true).unwrap();
    let right = answers(
        &mut engine("qwen2", Limits::default()),
        &[Generation::greedy(ids.clone(), 12)],
    );
    let right = text.decode(&right[0]).unwrap();
    let asked = json!({"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0});

    let (status, whole) = server.complete(&asked);
    assert_eq!(
        (status, whole["choices"][0]["text"].as_str()),
        (200, Some(right.as_str())),
        "{whole}"
    );
    assert_eq!(whole["usage"]["prompt_tokens"], ids.len());

    let mut with_usage = asked.clone();
    with_usage["stream_options"] = json!({"include_usage": true});
    let (status, stream) = server.stream(&with_usage);
    assert!(
        status == 200 && stream.ends_with("data: [DONE]\n\n"),
        "{stream}"
    );
    let events = events(&stream);
    let texts = events
        .iter()
        .filter_map(|event| event["choices"][0]["text"].as_str());
    assert_eq!(texts.collect::<String>(), right);
    assert_eq!(events.last().unwrap()["usage"], whole["usage"]);

    let tokens = json!({"prompt": ids, "max_tokens": 12, "temperature": 0});
    assert_eq!(server.complete(&tokens).1["choices"][0]["text"], right);

    // The answer excludes the stop text, even if the stop text begins within a token.
    let middle = right
        .char_indices()
        .nth(right.chars().count() / 2)
        .unwrap()
        .0;
    let stop: String = right[middle..].chars().take(2).collect();
    let before = right.split_once(&stop).unwrap().0;
    let mut stopped = asked.clone();
    stopped["stop"] = json!([stop, "never written"]);
    let stopped = server.complete(&stopped).1;
    assert_eq!(stopped["choices"][0]["text"], before);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");

    // A sampled answer depends only on its seed.
    let sampled = json!({"prompt": prompt, "max_tokens": 8, "temperature": 5.0, "seed": 3});
    let [a, b] = [(); 2].map(|()| server.complete(&sampled).1["choices"].clone());
    assert_eq!(a, b);
}

#[test]
fn chats_are_rendered_and_streamed() {
    let server = Server::of("gemma3");
    let text = Text::read(&folder("gemma3")).unwrap();
    let conversation = expected_text("gemma3").conversation;
    let ids = text.encode_chat(&conversation).unwrap();
    let right = answers(
        &mut engine("gemma3", Limits::default()),
        &[Generation::greedy(ids, 10)],
    );
    let right = text.decode(&right[0]).unwrap();
    let asked = json!({"messages": conversation, "max_completion_tokens": 10, "temperature": 0});
    let whole = body(&server.chat(&asked).1);
    let message = json!({"role": "assistant", "content": right});
    assert_eq!(whole["choices"][0]["message"], message, "{whole}");

    let events = events(&server.chat(&streamed(&asked)).1);
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let texts = events
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
    assert_eq!(texts.collect::<String>(), right);
    assert_eq!(
        events.last().unwrap()["choices"][0]["finish_reason"],
        "length"
    );
    // The parts of a message are joined to one text.
    let parts = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], "max_tokens": 1});
    assert_eq!(server.chat(&parts).0, 200);
}

/// Mistral's models mark a call with `[TOOL_CALLS]`, Llama's with `<|python_tag|>`. A client that reads the call in the text needs
/// them.
#[test]
fn special_tokens_are_text_where_a_client_needs_them() {
    let template = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}";
    let (_folder, text) = with_template(template, |_| ());
    let server = Server::with(engine("qwen2", Limits::default()), text, |_| ());
    let tools = json!([{"type": "function", "function": {"name": "a"}}]);
    // Token 2, which is special and ends no text, again and again.
    let asked = |fields: Value| {
        let mut asked = json!({"max_tokens": 3, "temperature": 0, "logit_bias": {"2": 100}});
        asked
            .as_object_mut()
            .unwrap()
            .extend(fields.as_object().unwrap().clone());
        asked
    };
    let (named, none) = ("<|im_start|>".repeat(3), String::new());
    for (fields, expected) in [
        (json!({"tools": tools}), &named),
        (json!({"tools": tools, "tool_choice": "none"}), &none),
        (json!({"tools": tools, "skip_special_tokens": true}), &none),
        (json!({}), &none),
        (json!({"skip_special_tokens": false}), &named),
        (
            json!({"skip_special_tokens": false, "stop": "|im_s"}),
            &"<".to_owned(),
        ),
    ] {
        let mut chat = asked(fields.clone());
        chat["messages"] = json!([{"role": "user", "content": "a"}]);
        let whole = body(&server.chat(&chat).1);
        assert_eq!(
            whole["choices"][0]["message"]["content"], **expected,
            "{fields}: {whole}"
        );
        let events = events(&server.chat(&streamed(&chat)).1);
        let texts = events
            .iter()
            .filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
        assert_eq!(texts.collect::<String>(), **expected, "{fields}");
    }
    for (skips, expected) in [
        (Value::Null, &none),
        (json!(true), &none),
        (json!(false), &named),
    ] {
        let completion = asked(json!({"prompt": "a", "skip_special_tokens": skips}));
        let whole = server.complete(&completion).1;
        assert_eq!(whole["choices"][0]["text"], **expected, "{whole}");
    }
}

/// Also those of a server that was started again: clients and logs keep them.
#[test]
fn answers_have_ids_of_their_own() {
    let asked = json!({"prompt": "a", "max_tokens": 1});
    let id = |server: &Server| server.complete(&asked).1["id"].as_str().unwrap().to_owned();
    let (one, again) = (Server::of("qwen2"), Server::of("qwen2"));
    let ids = [id(&one), id(&one), id(&again)];
    assert!(ids.iter().all(|id| id.starts_with("cmpl-")), "{ids:?}");
    let different: std::collections::BTreeSet<_> = ids.iter().collect();
    assert_eq!(different.len(), 3, "{ids:?}");
}

/// Python's requests, for one, reads texts of no encoding as Latin-1.
#[test]
fn streams_name_their_encoding() {
    let server = Server::of("qwen2");
    let sent = raw(server.ask(&streamed(&json!({"prompt": "a", "max_tokens": 1}))));
    let (head, _) = sent.split_once("\r\n\r\n").unwrap();
    let kind = "content-type: text/event-stream; charset=utf-8\r\n";
    assert!(head.to_ascii_lowercase().contains(kind), "{head}");
}

/// Near the end of the model's positions, and with a lower limit per request.
#[test]
fn without_a_limit_an_answer_has_what_is_left() {
    for request_tokens in [u32::MAX, 100] {
        let limits = Limits {
            request_tokens,
            ..Limits::default()
        };
        let server = Server::start("gemma3", limits, |_| ());
        let text = Text::read(&folder("gemma3")).unwrap();
        let most = request_tokens.min(512) as usize;
        let chat = |content: &str| json!([{"role": "user", "content": content}]);
        let tokens = |content: &str| {
            let messages = serde_json::from_value::<Vec<Message>>(chat(content)).unwrap();
            text.encode_chat(&messages).unwrap().len()
        };
        let one = tokens(" x x") - tokens(" x");
        for left in [2, 60] {
            let content = " x".repeat((most - left - tokens("")) / one);
            let asked = json!({"messages": chat(&content), "temperature": 0});
            let (status, answer) = server.chat(&asked);
            let answer = body(&answer);
            assert_eq!(status, 200, "{left} of {most}: {answer}");
            let all = answer["usage"]["total_tokens"].as_u64().unwrap();
            let ended = answer["choices"][0]["finish_reason"] == "stop";
            assert!(all as usize == most || ended, "{answer}");
        }
        // The default of a completion is 16 tokens, or what is left.
        let prompt = vec![5; most - 3];
        let answer = server.complete(&json!({"prompt": prompt})).1;
        let generated = answer["usage"]["completion_tokens"].as_u64().unwrap();
        assert!(generated <= 3, "{answer}");
        // An explicit request for more than what is left is refused.
        for (prompt, more) in [(most - 3, json!(4)), (most, Value::Null)] {
            let asked = json!({"prompt": vec![5; prompt], "max_tokens": more});
            let (status, answer) = server.complete(&asked);
            assert_eq!(status, 400, "{answer}");
        }
    }
}

/// The model has more positions than the caches hold; a request without a limit gets what the caches hold.
#[test]
fn a_request_has_no_more_tokens_than_the_caches_hold() {
    let architecture = Architecture::read(&folder("llama3")).unwrap();
    let weights = Weights::open(&folder("llama3")).unwrap();
    let backend = CpuBackend::load(architecture, &weights, &options(4, 16), &mut |_| ()).unwrap();
    let mut engine = Engine::new(Box::new(backend), Limits::default()).unwrap();
    assert_eq!(engine.request_tokens(), 65);
    let mut asked = |new| engine.submit(Generation::greedy(vec![5; 60], new));
    assert!(asked(5).is_ok() && asked(6).is_err());
}

/// After a stop text the request does not count as cancelled. Tokens behind it are drawn until it is found.
#[test]
fn metrics_count_what_clients_had() {
    let server = Server::of("qwen2");
    let asked = json!({"prompt": "The planner finds", "max_tokens": 400, "temperature": 0});
    let whole = server.complete(&asked).1;
    let text = whole["choices"][0]["text"].as_str().unwrap();
    let stop: String = text.chars().skip(3).take(2).collect();
    let mut tokens = whole["usage"]["completion_tokens"].as_u64().unwrap();
    let mut stopped = asked.clone();
    stopped["stop"] = json!(stop);
    let (status, whole) = server.complete(&stopped);
    stopped["stream_options"] = json!({"include_usage": true});
    let (streamed_status, answer) = server.stream(&stopped);
    assert_eq!((status, streamed_status), (200, 200));
    for last in [&whole, events(&answer).last().unwrap()] {
        tokens += last["usage"]["completion_tokens"].as_u64().unwrap();
    }
    server.wait_for("tandem_running_requests", 0);
    server.has_metrics(&[
        ("requests_total", 3),
        ("requests_completed_total", 3),
        ("requests_cancelled_total", 0),
        ("requests_failed_total", 0),
        ("request_seconds_count", 3),
    ]);
    let drawn = server.metric("tandem_generated_tokens_total");
    assert!((tokens..=3 * 400).contains(&drawn), "{drawn}, not {tokens}");
}
