//! Requests that are refused, and what the refusal says.

use std::io::Write;

use serde_json::{Value, json};
use tandem_engine::Limits;

use crate::server::{MODEL, Server, body, response};

/// A field of a completion, and the status and message that its value is refused with.
const REFUSED: &str = r#"
n: 4294967295 => 400 n is 4294967295: give a whole number from 1 to 128
n: 100 => 400 100 choices are asked for (n for each prompt), and this server runs and queues 10 in all: ask for fewer, or start it with a larger --waiting
best_of: 2 => 400 best_of is 2, and only 1 is implemented
min_tokens: 2 => 400 min_tokens is 2, and the answer may have 1 tokens: give a smaller min_tokens or a larger max_tokens
stop_token_ids: [999999] => 400 token 999999 is outside the model's vocabulary of 384 tokens: give ids below that, from the model's own tokenizer
logprobs: 21 => 400 logprobs is 21: give a number of most likely tokens, at most 20
presence_penalty: 2.5 => 400 presence_penalty of the sampling is 2.5: it must be between -2 and 2
logit_bias: {"999999": 1} => 400 token 999999 is outside the model's vocabulary of 384 tokens: give ids below that, from the model's own tokenizer
echo: true => 400 echo is true, and only false is implemented
model: "gpt-4" => 404 there is no model "gpt-4" here, only "tiny"
prompt: [1, 999999] => 400 token 999999 is outside the model's vocabulary of 384 tokens: give ids below that, from the model's own tokenizer
max_tokens: 100000 => 400 100001 tokens of prompt and answer are more than the 512 positions of the model: use a shorter prompt or answer
max_tokens: 0 => 400 max_tokens is 0: give a whole number from 1 to 4294967295
prompt: "" => 400 the prompt is empty: a request needs at least one token to start from
stop: [""] => 400 stop is [""]: give a text, or up to 4 of them, none empty, with 4096 bytes together
stream_options: {"include_usage": true} => 400 stream_options are for streams: set stream to true, or leave them out
messages: [] => 400 a completion has a prompt, and no messages
"#;

#[test]
fn what_is_not_computed_is_refused_and_named() {
    let limits = Limits {
        running: 4,
        waiting: 6,
        ..Limits::default()
    };
    let server = Server::start("llama3", limits, |options| options.body_bytes = 4096);
    let with = |field: &str, value: Value| {
        let mut asked = json!({"prompt": "a", "max_tokens": 1});
        asked[field] = value;
        let (status, answer) = server.complete(&asked);
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        (status, message.to_owned())
    };
    for line in REFUSED.trim().lines() {
        let (asked, refusal) = line.split_once(" => ").unwrap();
        let (field, value) = asked.split_once(": ").unwrap();
        let (status, message) = with(field, serde_json::from_str(value).unwrap());
        assert_eq!(format!("{status} {message}"), refusal, "{asked}");
    }
    assert_eq!(with("temperature", json!(-1.0)).0, 400);
    assert_eq!(with("n", json!(1)).0, 200);
    assert_eq!(with("user", json!("me")).0, 200);

    let plain = response(server.send("/v1/completions", "text/plain", "{\"prompt\": \"a\"}"));
    assert_eq!(plain.0, 415);
    let large = json!({"prompt": "a".repeat(5000)});
    assert_eq!(response(server.ask(&large)).0, 413);
    assert_eq!(
        response(server.send("/v1/completions", "application/json", "{\"prompt\": ")).0,
        400
    );
    // Refused before the body is sent, and a body that breaks off.
    for (head, status) in [
        ("content-length: 9999999999", 413),
        ("transfer-encoding: chunked", 400),
    ] {
        let mut stream = server.connect();
        let asked = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n{head}\r\n\r\nzz\r\n"
        );
        stream.write_all(asked.as_bytes()).unwrap();
        assert_eq!(response(stream).0, status, "{head}");
    }
    for (path, status) in [("/v1/completions", 405), ("/nothing", 404)] {
        let (got, answer) = server.get(path);
        let error = &body(&answer)["error"];
        assert_eq!((got, &error["code"]), (status, &json!(status.to_string())));
        let message = error["message"].as_str().unwrap();
        let named = message.starts_with(&format!(
            "there is no GET {path} here, only POST /v1/completions"
        ));
        assert!(named, "{message}");
    }
    assert_eq!(server.get("/health"), (200, "ok\n".to_owned()));
    let models = body(&server.get("/v1/models").1);
    let model = &models["data"][0];
    assert!(model["id"] == MODEL && model["created"].is_u64(), "{model}");
    assert_eq!(&body(&server.get("/v1/models/tiny").1), model);
    assert_eq!(server.get("/v1/models/other").0, 404);
    let refused = server.metric("tandem_requests_refused_total");
    assert_eq!(refused, 26, "each refusal is counted");
}

/// Their ranges are known to the engine alone.
#[test]
fn errors_of_the_engine_name_their_field() {
    let server = Server::of("llama3");
    for (field, value) in [
        ("temperature", json!(-1)),
        ("top_p", json!(1.5)),
        ("min_p", json!(2)),
        ("frequency_penalty", json!(-2.5)),
        ("repetition_penalty", json!(0)),
    ] {
        let mut asked = json!({"prompt": "a", "max_tokens": 1});
        asked[field] = value;
        let (status, answer) = server.complete(&asked);
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(field)));
    }
    let asked = json!({"prompt": [100_000], "max_tokens": 1});
    let (status, answer) = server.complete(&asked);
    assert_eq!((status, &answer["error"]["param"]), (400, &Value::Null));
}

/// What is dropped silently changes the conversation, so it is refused.
#[test]
fn fields_of_messages_that_are_not_rendered_are_refused() {
    let server = Server::of("gemma3");
    let with = |field: &str, value: Value| {
        let mut message = json!({"role": "user", "content": "Hello"});
        message[field] = value;
        let asked = json!({"messages": [message], "max_tokens": 1});
        server.chat(&asked)
    };
    for (field, value) in [
        ("function_call", json!({"name": "f", "arguments": "{}"})),
        ("reasoning_content", json!("It greets.")),
    ] {
        let (status, text) = with(field, value);
        let message = format!("messages[0].{field} is not rendered here: leave it out");
        assert_eq!(
            (status, &body(&text)["error"]["message"]),
            (400, &json!(message))
        );
    }
    // Clients send answers back with empty fields; these are accepted.
    for (field, value) in [
        ("tool_calls", Value::Null),
        ("annotations", json!([])),
        ("refusal", Value::Null),
        ("name", json!("me")),
    ] {
        assert_eq!(with(field, value).0, 200, "{field}");
    }
}
