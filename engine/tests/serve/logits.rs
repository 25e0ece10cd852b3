//! Log-probabilities in answers, biases and penalties.

use serde_json::{Value, json};
use tandem_engine::{Generation, Limits, LogitRules, Penalties, Text};

use crate::{
    common::{answers, engine, folder},
    server::{Server, body, events, streamed},
};

fn list<'a>(value: &'a Value, field: &str) -> &'a Vec<Value> {
    value[field]
        .as_array()
        .unwrap_or_else(|| panic!("{field} of {value}"))
}

/// Without a prefix cache: products in chunks of other lengths differ in their last bits.
fn server(family: &str) -> Server {
    let limits = Limits {
        prefix_cache: false,
        ..Limits::default()
    };
    Server::start(family, limits, |_| ())
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value}"))
}

#[test]
fn completions_have_the_log_probabilities_of_their_tokens() {
    for family in ["qwen2", "gemma3"] {
        let server = server(family);
        let asked = json!({
            "prompt": "The planner é", "max_tokens": 30, "temperature": 3.0, "seed": 5, "ignore_eos": true, "logprobs": 3,
        });
        let (status, whole) = server.complete(&asked);
        assert_eq!(status, 200, "{whole}");
        let choice = &whole["choices"][0];
        let log_probs = &choice["logprobs"];
        let fields = ["tokens", "token_logprobs", "top_logprobs", "text_offset"];
        let [tokens, values, top, offsets] = fields.map(|field| list(log_probs, field));
        for of_field in [tokens, values, top, offsets] {
            assert_eq!(
                of_field.len(),
                whole["usage"]["completion_tokens"].as_u64().unwrap() as usize
            );
        }
        let text = choice["text"].as_str().unwrap();
        let mut rare = 0;
        for at in 0..tokens.len() {
            let (name, value) = (tokens[at].as_str().unwrap(), number(&values[at]));
            let top = top[at].as_object().unwrap();
            assert!(value <= 0.0 && (2..=4).contains(&top.len()), "{top:?}");
            assert_eq!(number(&top[name]), value);
            let larger = top.values().filter(|other| number(other) > value).count();
            rare += usize::from(larger == 3);
            // Whole tokens stand where their offsets say.
            let offset = offsets[at].as_u64().unwrap() as usize;
            if !name.starts_with("bytes:") && !text.contains(char::REPLACEMENT_CHARACTER) {
                let there: String = text.chars().skip(offset).collect();
                assert!(there.starts_with(name), "{name:?} at {offset} of {text:?}");
            }
        }
        assert!(rare > 0, "no token outside the likeliest");

        // Streams have the same, each token once.
        let (_, stream) = server.stream(&asked);
        let events = events(&stream);
        for field in fields {
            let parts = events.iter().map(|event| &event["choices"][0]["logprobs"]);
            let parts = parts.filter(|part| !part.is_null());
            let all: Value = parts.flat_map(|part| list(part, field)).cloned().collect();
            assert_eq!(all, log_probs[field], "{field}");
        }
        // Without the question there is no answer.
        let mut plain = asked.clone();
        plain["logprobs"] = Value::Null;
        let plain = server.complete(&plain).1;
        assert_eq!(plain["choices"][0]["text"], text);
        assert!(plain["choices"][0]["logprobs"].is_null());
    }
}

#[test]
fn chats_have_tokens_with_bytes() {
    let server = server("gemma3");
    let text = Text::read(&folder("gemma3")).unwrap();
    let asked = json!({
        "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20, "temperature": 0, "ignore_eos": true,
        "logprobs": true, "top_logprobs": 4,
    });
    let whole = body(&server.chat(&asked).1);
    let choice = &whole["choices"][0];
    let content = list(&choice["logprobs"], "content");
    assert_eq!(content.len(), 20);
    for entry in content {
        let top = list(entry, "top_logprobs");
        assert_eq!(top.len(), 4);
        // Greedy: the likeliest token.
        for field in ["token", "logprob", "bytes"] {
            assert_eq!(top[0][field], entry[field]);
        }
        assert!(
            top.windows(2)
                .all(|pair| number(&pair[0]["logprob"]) >= number(&pair[1]["logprob"]))
        );
        let sum: f64 = top.iter().map(|one| number(&one["logprob"]).exp()).sum();
        assert!(sum > 0.0 && sum <= 1.0 + 1e-5, "{sum}");
    }
    let bytes = content.iter().flat_map(|entry| list(entry, "bytes"));
    let bytes: Vec<u8> = bytes.map(|byte| byte.as_u64().unwrap() as u8).collect();
    let message = choice["message"]["content"].as_str().unwrap();
    let special = content.iter().any(|entry| {
        let name = entry["token"].as_str().unwrap();
        let ids = text.encode(name, false).unwrap();
        text.decode(&ids).unwrap().is_empty()
    });
    if !special {
        assert_eq!(String::from_utf8_lossy(&bytes), message);
    }

    let parts = events(&server.chat(&streamed(&asked)).1);
    let parts = parts.iter().map(|event| &event["choices"][0]["logprobs"]);
    let parts = parts.filter(|part| !part.is_null());
    let all: Value = parts
        .flat_map(|part| list(part, "content"))
        .cloned()
        .collect();
    assert_eq!(all, choice["logprobs"]["content"]);

    let mut alone = asked.clone();
    alone["top_logprobs"] = Value::Null;
    let alone = body(&server.chat(&alone).1);
    let content = list(&alone["choices"][0]["logprobs"], "content");
    assert!(
        content
            .iter()
            .all(|entry| entry["top_logprobs"] == json!([]))
    );
}

/// Tokens that are cut off by a stop text are tokens of the usage, too.
#[test]
fn tokens_behind_a_stop_text_are_counted_as_in_the_usage() {
    let server = server("qwen2");
    let asked =
        json!({"prompt": "The planner finds", "max_tokens": 30, "temperature": 0, "logprobs": 0});
    let whole = server.complete(&asked).1;
    let text = whole["choices"][0]["text"].as_str().unwrap();
    let stop: String = text.chars().skip(4).take(3).collect();
    let mut stopped = asked.clone();
    stopped["stop"] = json!(stop);
    stopped["stream_options"] = json!({"include_usage": true});
    let (_, stream) = server.stream(&stopped);
    let events = events(&stream);
    let with_tokens = events
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["tokens"].as_array());
    let tokens: usize = with_tokens.map(Vec::len).sum();
    assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], tokens);
    let texts = events
        .iter()
        .filter_map(|event| event["choices"][0]["text"].as_str());
    assert_eq!(texts.collect::<String>(), text.split_once(&stop).unwrap().0);
}

#[test]
fn biases_and_penalties_reach_the_engine() {
    let server = server("llama3");
    let text = Text::read(&folder("llama3")).unwrap();
    let ids = text.encode("The planner", true).unwrap();
    let asked = json!({"prompt": ids, "max_tokens": 16, "temperature": 0, "ignore_eos": true});
    let with = |field: &str, value: Value| {
        let mut asked = asked.clone();
        asked[field] = value;
        let (status, answer) = server.complete(&asked);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let right = |rules: LogitRules| {
        let asked = Generation {
            rules,
            ignore_ends: true,
            ..Generation::greedy(ids.clone(), 16)
        };
        let answer = answers(&mut engine("llama3", Limits::default()), &[asked]);
        text.decode(&answer[0]).unwrap()
    };
    let forced = text.encode("x", false).unwrap()[0];
    assert_eq!(
        with("logit_bias", json!({forced.to_string(): 100})),
        "x".repeat(16)
    );
    for (field, penalties) in [
        (
            "presence_penalty",
            Penalties {
                presence: 1.5,
                ..Penalties::NONE
            },
        ),
        (
            "frequency_penalty",
            Penalties {
                frequency: 1.5,
                ..Penalties::NONE
            },
        ),
        (
            "repetition_penalty",
            Penalties {
                repetition: 1.5,
                ..Penalties::NONE
            },
        ),
    ] {
        let rules = LogitRules {
            penalties,
            ..LogitRules::default()
        };
        let penalised = with(field, json!(1.5));
        assert_eq!(penalised, right(rules), "{field}");
        assert_ne!(penalised, with("user", json!("me")), "{field}");
    }
}
