//! The texts of the server, as its clients get them.

mod common;

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::Path,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use common::{engine, folder};
use serde_json::{Value, json};
use tandem_engine::{
    Limits, Text,
    serve::{ServeOptions, run},
};

const WAIT: Duration = Duration::from_secs(60);

/// Runs a server with a family's model and a tokenizer while `clients` run.
fn serving<T>(family: &str, tokenizer: &Path, clients: impl FnOnce(SocketAddr) -> T) -> T {
    let (engine, text) = (
        engine(family, Limits::default()),
        Text::read(tokenizer).expect("sound"),
    );
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let (ready, address) = mpsc::channel();
    let server = thread::spawn(move || {
        let mut options = ServeOptions::new("tiny".to_owned());
        options.grace = Duration::from_secs(1);
        let shutdown = async {
            let _ = stopped.await;
        };
        let loopback = "127.0.0.1:0".parse().unwrap();
        run(loopback, engine, text, options, shutdown, |address| {
            ready.send(address).unwrap();
        })
        .unwrap();
    });
    let seen = clients(address.recv_timeout(WAIT).unwrap());
    stop.send(()).unwrap();
    server.join().unwrap();
    seen
}

/// The head and the body of an answer. Answers to HTTP 1.0 are not chunked.
fn answer(address: SocketAddr, request: &str, body: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(WAIT)).unwrap();
    let head = format!("{request} HTTP/1.0\r\ncontent-type: application/json\r\n");
    let length = format!("content-length: {}\r\n\r\n", body.len());
    stream
        .write_all((head + &length + body).as_bytes())
        .unwrap();
    let mut all = String::new();
    stream.read_to_string(&mut all).unwrap();
    let (head, body) = all.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.to_owned())
}

/// The body of an answer that is no error.
fn post(address: SocketAddr, path: &str, body: &Value) -> String {
    let (head, body) = answer(address, &format!("POST {path}"), &body.to_string());
    assert!(head.contains(" 200 "), "{head} {body}");
    body
}

/// The decoders of Mistral's tokenizers take away the space at the beginning of a text. An answer to a prompt is none.
#[test]
fn completions_keep_the_space_before_their_first_word() {
    let copy = tempfile::tempdir().expect("writable");
    let tokenizer = fs::read(folder("mistral").join("tokenizer.json")).expect("a fixture");
    let tokenizer: Value = serde_json::from_slice(&tokenizer).expect("a fixture");
    let text = |address, seed| {
        let body =
            json!({"prompt": "The planner", "max_tokens": 3, "temperature": 9, "seed": seed});
        let body: Value = serde_json::from_str(&post(address, "/v1/completions", &body)).unwrap();
        body["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let texts = |tokenizer: &Path| -> Vec<String> {
        serving("mistral", tokenizer, |address| {
            (0..12).map(|seed| text(address, seed)).collect()
        })
    };
    let right = texts(&folder("mistral"));
    let letters = right.iter().filter_map(|text| text.chars().next());
    let letters = letters.filter(char::is_ascii_alphabetic);
    // Few tokens of the fixture begin with a space, so that the decoder takes away a letter here.
    for letter in letters.take(2) {
        let mut tokenizer = tokenizer.clone();
        let decoders = tokenizer["decoder"]["decoders"]
            .as_array_mut()
            .expect("a sequence");
        decoders.push(json!({"type": "Strip", "content": letter, "start": 1, "stop": 0}));
        fs::write(copy.path().join("tokenizer.json"), tokenizer.to_string()).expect("writable");
        assert_eq!(texts(copy.path()), right, "{letter:?}");
    }
}

/// Long prompts wait while others are tokenized. The time to their first token includes that.
#[test]
fn the_time_to_the_first_token_begins_before_a_prompt_is_tokenized() {
    let tokenizer = folder("llama3");
    // They take the places for long prompts, and are refused in the end.
    let long = json!({"prompt": "The planner ".repeat(40_000), "max_tokens": 1}).to_string();
    let (waited, metrics) = serving("llama3", &tokenizer, |address| {
        thread::scope(|scope| {
            let busy =
                [(); 2].map(|()| scope.spawn(|| answer(address, "POST /v1/completions", &long)));
            thread::sleep(Duration::from_millis(200));
            // The chat template trims a message.
            let message = json!({"role": "user", "content": " ".repeat(100_000) + "x"});
            let chat = json!({"messages": [message], "max_tokens": 1});
            let begun = Instant::now();
            post(address, "/v1/chat/completions", &chat);
            let waited = begun.elapsed().as_secs_f64();
            for refused in busy {
                assert!(refused.join().unwrap().0.contains(" 400 "));
            }
            (waited, answer(address, "GET /metrics", "").1)
        })
    });
    let sum = metrics
        .lines()
        .find_map(|line| line.strip_prefix("tandem_first_token_seconds_sum "));
    let sum: f64 = sum.expect("a metric").parse().unwrap();
    assert!(waited > 0.1 && sum > 0.8 * waited, "{sum} of {waited} s");
}

/// Clients with types want the field in each event of a stream that ends with its usage, and only there.
#[test]
fn every_event_of_a_stream_with_usage_has_the_field() {
    let tokenizer = folder("qwen2");
    serving("qwen2", &tokenizer, |address| {
        for (path, prompt) in [
            ("/v1/completions", json!({"prompt": "The planner"})),
            (
                "/v1/chat/completions",
                json!({"messages": [{"role": "user", "content": "Hi"}]}),
            ),
        ] {
            for include_usage in [true, false] {
                let mut body = prompt.clone();
                body["max_tokens"] = json!(5);
                body["stream"] = json!(true);
                body["stream_options"] = json!({"include_usage": include_usage});
                let stream = post(address, path, &body);
                let data = stream
                    .split("\n\n")
                    .filter_map(|event| event.strip_prefix("data: "));
                let events = data.filter(|data| *data != "[DONE]");
                let events: Vec<Value> = events
                    .map(|data| serde_json::from_str(data).unwrap())
                    .collect();
                let (last, others) = events.split_last().unwrap();
                assert!(!others.is_empty(), "{stream}");
                let right = include_usage.then_some(&Value::Null);
                assert!(
                    others.iter().all(|event| event.get("usage") == right),
                    "{stream}"
                );
                assert_eq!(
                    last["usage"]["total_tokens"].is_u64(),
                    include_usage,
                    "{stream}"
                );
                assert_eq!(last.get("usage").is_some(), include_usage, "{stream}");
            }
        }
    });
}

/// Templates such as Qwen's have no branch for other roles, and no error either.
#[test]
fn messages_of_developers_are_in_the_prompt() {
    let copy = tempfile::tempdir().expect("writable");
    fs::copy(
        folder("qwen2").join("tokenizer.json"),
        copy.path().join("tokenizer.json"),
    )
    .unwrap();
    let template = "{% for m in messages %}{% if m.role == 'user' or m.role == 'system' %}\
                    {{ m.role + ': ' + m.content }}{% endif %}{% endfor %}";
    fs::write(copy.path().join("chat_template.jinja"), template).unwrap();
    serving("qwen2", copy.path(), |address| {
        let [developer, system] = ["developer", "system"].map(|role| {
            let messages =
                json!([{"role": role, "content": "Be short."}, {"role": "user", "content": "Hi"}]);
            let body = json!({"messages": messages, "max_tokens": 1, "temperature": 0});
            let body: Value =
                serde_json::from_str(&post(address, "/v1/chat/completions", &body)).unwrap();
            (
                body["usage"]["prompt_tokens"].clone(),
                body["choices"].clone(),
            )
        });
        assert_eq!(developer, system);
    });
}

/// The answer to a chat ends its template's text, so a template that writes what it gets shows in the number of its tokens.
#[test]
fn tools_and_variables_are_in_the_prompt() {
    let template = "{% for m in messages %}{{ m.content or m.tool_calls[0].function | tojson }};{% endfor %}{{ tools | tojson }}{% if \
                    enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}";
    let (copy, text) = common::with_template(template, |_| {});
    let function = json!({"name": "weather", "arguments": "{\"place\": \"Bern\"}"});
    let mut asked = json!({
        "messages": [
            {"role": "user", "content": "How is it?"},
            {"role": "assistant", "content": null, "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": "rain"},
        ],
        "tools": [{"type": "function", "function": {"name": "weather"}}],
        "chat_template_kwargs": {"enable_thinking": false}, "max_tokens": 1, "temperature": 0,
    });
    let rendered = "How is it?;{\"name\": \"weather\", \"arguments\": {\"place\": \"Bern\"}};rain;[{\"type\": \"function\", \
                    \"function\": {\"name\": \"weather\"}}]<think></think>";
    let right = text.encode(rendered, false).expect("bytes").len();
    serving("qwen2", copy.path(), |address| {
        let path = "/v1/chat/completions";
        let chat: Value = serde_json::from_str(&post(address, path, &asked)).unwrap();
        assert_eq!(chat["usage"]["prompt_tokens"], right);
        asked["chat_template_kwargs"] = json!({"thinking": false});
        let (head, body) = answer(address, &format!("POST {path}"), &asked.to_string());
        assert!(head.contains(" 400 "), "{head}");
        assert!(
            body.contains("a variable thinking (it has enable_thinking)"),
            "{body}"
        );
    });
    // The fixture's own template writes no tools.
    serving("qwen2", &folder("qwen2"), |address| {
        asked["chat_template_kwargs"] = Value::Null;
        let (head, body) = answer(address, "POST /v1/chat/completions", &asked.to_string());
        assert!(
            head.contains(" 400 ") && body.contains("does not write tools"),
            "{body}"
        );
    });
}
