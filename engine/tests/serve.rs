//! Tests the server with clients that behave, are slow, vanish or are malicious.

mod common;

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use common::{PAGES, answers, engine, expected_text, folder, options};
use serde_json::{Value, json};
use tandem_engine::{
    Architecture, Backend, CpuBackend, Engine, Error, Generation, Limits, Message, Text, Weights,
    Work,
    serve::{ServeOptions, run},
};

const MODEL: &str = "tiny";
const WAIT: Duration = Duration::from_secs(60);

/// A server that stops when the test ends.
struct Server {
    address: SocketAddr,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Server {
    fn start(family: &str, limits: Limits, change: impl FnOnce(&mut ServeOptions)) -> Self {
        Self::with_engine(engine(family, limits), family, change)
    }

    fn with_engine(engine: Engine, family: &str, change: impl FnOnce(&mut ServeOptions)) -> Self {
        let text = Text::read(&folder(family)).unwrap();
        let mut options = ServeOptions::new(MODEL.to_owned());
        options.grace = Duration::from_secs(1);
        change(&mut options);
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let (ready, address) = mpsc::channel();
        let thread = thread::spawn(move || {
            let shutdown = async {
                let _ = stopped.await;
            };
            let loopback = "127.0.0.1:0".parse().unwrap();
            run(loopback, engine, text, options, shutdown, |address| {
                ready.send(address).unwrap()
            })
            .unwrap();
        });
        Self {
            address: address.recv_timeout(WAIT).unwrap(),
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(WAIT)).unwrap();
        stream
    }

    fn send(&self, path: &str, kind: &str, body: &str) -> TcpStream {
        let mut stream = self.connect();
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n"
        );
        stream.write_all((head + body).as_bytes()).unwrap();
        stream
    }

    fn post(&self, path: &str, body: &Value) -> (u16, String) {
        response(self.send(path, "application/json", &body.to_string()))
    }

    fn get(&self, path: &str) -> (u16, String) {
        let mut stream = self.connect();
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        )
        .unwrap();
        response(stream)
    }

    fn metric(&self, name: &str) -> u64 {
        let (_, text) = self.get("/metrics");
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value
            .unwrap_or_else(|| panic!("{name} in {text}"))
            .parse()
            .unwrap()
    }

    /// Waits until a metric has the given value.
    fn wait_for(&self, name: &str, value: u64) {
        let begin = Instant::now();
        while self.metric(name) != value {
            assert!(
                begin.elapsed() < WAIT,
                "{name} is {}, not {value}",
                self.metric(name)
            );
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Server {
    fn stop(&mut self) {
        let _ = self.stop.take().map(|stop| stop.send(()));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
        let ended = self.thread.take().map(thread::JoinHandle::join);
        assert!(ended.is_none_or(|ended| ended.is_ok()) || thread::panicking());
    }
}

/// Status and body of a response, with a plain or a chunked body.
fn response(mut stream: TcpStream) -> (u16, String) {
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    let all = String::from_utf8(all).unwrap();
    let (head, body) = all.split_once("\r\n\r\n").unwrap_or((&all, ""));
    let status = head
        .split(' ')
        .nth(1)
        .unwrap_or_else(|| panic!("{all:?}"))
        .parse()
        .unwrap();
    if !head
        .to_ascii_lowercase()
        .contains("transfer-encoding: chunked")
    {
        return (status, body.to_owned());
    }
    let (mut whole, mut rest) = (String::new(), body);
    while let Some((length, after)) = rest.split_once("\r\n") {
        let length = usize::from_str_radix(length, 16).unwrap();
        if length == 0 {
            break;
        }
        whole += &after[..length];
        rest = &after[length + 2..];
    }
    (status, whole)
}

fn events(body: &str) -> Vec<Value> {
    let data = body
        .split("\n\n")
        .filter_map(|event| event.strip_prefix("data: "));
    data.filter(|data| *data != "[DONE]")
        .map(|data| serde_json::from_str(data).unwrap())
        .collect()
}

fn body(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| panic!("{text}"))
}

#[test]
fn completions_are_what_the_engine_writes() {
    let server = Server::start("qwen2", Limits::default(), |_| ());
    let text = Text::read(&folder("qwen2")).unwrap();
    let prompt = "The planner finds";
    let ids = text.encode(prompt, true).unwrap();
    let right = answers(
        &mut engine("qwen2", Limits::default()),
        &[Generation::greedy(ids.clone(), 12)],
    );
    let right = text.decode(&right[0]).unwrap();
    let asked = json!({"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0});

    let (status, whole) = server.post("/v1/completions", &asked);
    let whole = body(&whole);
    assert_eq!(
        (status, whole["choices"][0]["text"].as_str()),
        (200, Some(right.as_str())),
        "{whole}"
    );
    assert_eq!(whole["usage"]["prompt_tokens"], ids.len());

    let mut streamed = asked.clone();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let (status, stream) = server.post("/v1/completions", &streamed);
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
    assert_eq!(
        body(&server.post("/v1/completions", &tokens).1)["choices"][0]["text"],
        right
    );

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
    let stopped = body(&server.post("/v1/completions", &stopped).1);
    assert_eq!(stopped["choices"][0]["text"], before);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");

    // A sampled answer depends only on its seed.
    let sampled = json!({"prompt": prompt, "max_tokens": 8, "temperature": 5.0, "seed": 3});
    let [a, b] =
        [(); 2].map(|()| body(&server.post("/v1/completions", &sampled).1)["choices"].clone());
    assert_eq!(a, b);
}

#[test]
fn chats_are_rendered_and_streamed() {
    let server = Server::start("gemma3", Limits::default(), |_| ());
    let text = Text::read(&folder("gemma3")).unwrap();
    let conversation = expected_text("gemma3").conversation;
    let ids = text.encode_chat(&conversation).unwrap();
    let right = answers(
        &mut engine("gemma3", Limits::default()),
        &[Generation::greedy(ids, 10)],
    );
    let right = text.decode(&right[0]).unwrap();
    let mut asked =
        json!({"messages": conversation, "max_completion_tokens": 10, "temperature": 0});
    let whole = body(&server.post("/v1/chat/completions", &asked).1);
    let message = json!({"role": "assistant", "content": right});
    assert_eq!(whole["choices"][0]["message"], message, "{whole}");

    asked["stream"] = json!(true);
    let events = events(&server.post("/v1/chat/completions", &asked).1);
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
    assert_eq!(server.post("/v1/chat/completions", &parts).0, 200);
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
            let (status, answer) = server.post("/v1/chat/completions", &asked);
            let answer = body(&answer);
            assert_eq!(status, 200, "{left} of {most}: {answer}");
            let all = answer["usage"]["total_tokens"].as_u64().unwrap();
            let ended = answer["choices"][0]["finish_reason"] == "stop";
            assert!(all as usize == most || ended, "{answer}");
        }
        // The default of a completion is 16 tokens, or what is left.
        let prompt = vec![5; most - 3];
        let answer = server.post("/v1/completions", &json!({"prompt": prompt})).1;
        let answer = body(&answer);
        let generated = answer["usage"]["completion_tokens"].as_u64().unwrap();
        assert!(generated <= 3, "{answer}");
        // An explicit request for more than what is left is refused.
        for (prompt, more) in [(most - 3, json!(4)), (most, Value::Null)] {
            let asked = json!({"prompt": vec![5; prompt], "max_tokens": more});
            let (status, answer) = server.post("/v1/completions", &asked);
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

#[test]
fn what_is_not_computed_is_refused_and_named() {
    let server = Server::start("llama3", Limits::default(), |options| {
        options.body_bytes = 4096
    });
    let with = |field: &str, value: Value| {
        let mut asked = json!({"prompt": "a", "max_tokens": 1});
        asked[field] = value;
        let (status, text) = server.post("/v1/completions", &asked);
        (
            status,
            body(&text)["error"]["message"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
        )
    };
    for (field, value, status, message) in [
        ("n", json!(2), 400, "n is 2, and only 1 is implemented"),
        (
            "logprobs",
            json!(5),
            400,
            "logprobs is 5, and only false is implemented",
        ),
        (
            "presence_penalty",
            json!(0.5),
            400,
            "presence_penalty is 0.5, and only 0 is implemented",
        ),
        (
            "model",
            json!("gpt-4"),
            404,
            "there is no model \"gpt-4\" here, only \"tiny\"",
        ),
        (
            "prompt",
            json!([1, 999_999]),
            400,
            "token 999999 is outside the model's vocabulary of 384 tokens",
        ),
        (
            "max_tokens",
            json!(100_000),
            400,
            "100001 tokens of prompt and answer are more than the 512 positions of the model: use a shorter prompt or answer",
        ),
        (
            "max_tokens",
            json!(0),
            400,
            "0 new tokens are asked for: ask for at least 1",
        ),
        (
            "prompt",
            json!(""),
            400,
            "the prompt is empty: a request needs at least one token to start from",
        ),
        (
            "stop",
            json!([""]),
            400,
            "stop is [\"\"]: give a text, or up to 16 of them, none empty",
        ),
        (
            "stream_options",
            json!({"include_usage": true}),
            400,
            "stream_options are for streams: set stream to true, or leave them out",
        ),
        (
            "messages",
            json!([]),
            400,
            "a completion has a prompt, and no messages",
        ),
    ] {
        assert_eq!(with(field, value), (status, message.to_owned()), "{field}");
    }
    assert_eq!(with("prompt", json!(["a", "b"])).0, 400);
    assert_eq!(with("temperature", json!(-1.0)).0, 400);
    assert_eq!(with("n", json!(1)).0, 200);
    assert_eq!(with("user", json!("me")).0, 200);

    let plain = response(server.send("/v1/completions", "text/plain", "{\"prompt\": \"a\"}"));
    assert_eq!(plain.0, 415);
    let large = json!({"prompt": "a".repeat(5000)});
    assert_eq!(server.post("/v1/completions", &large).0, 413);
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
            "POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n{head}\r\n\r\nzz\r\n"
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
    assert_eq!(refused, 18, "each refusal of the handlers is counted");
}

/// Their ranges are known to the engine alone.
#[test]
fn errors_of_the_engine_name_their_field() {
    let server = Server::start("llama3", Limits::default(), |_| ());
    for (field, value) in [
        ("temperature", json!(-1)),
        ("top_p", json!(1.5)),
        ("min_p", json!(2)),
    ] {
        let mut asked = json!({"prompt": "a", "max_tokens": 1});
        asked[field] = value;
        let (status, text) = server.post("/v1/completions", &asked);
        assert_eq!(
            (status, &body(&text)["error"]["param"]),
            (400, &json!(field))
        );
    }
    let asked = json!({"prompt": [100_000], "max_tokens": 1});
    let (status, text) = server.post("/v1/completions", &asked);
    assert_eq!(
        (status, &body(&text)["error"]["param"]),
        (400, &Value::Null)
    );
}

/// Tool calls in a message would be dropped silently and change the conversation, so they are refused.
#[test]
fn fields_of_messages_that_are_not_rendered_are_refused() {
    let server = Server::start("gemma3", Limits::default(), |_| ());
    let with = |field: &str, value: Value| {
        let mut message = json!({"role": "user", "content": "Hello"});
        message[field] = value;
        let asked = json!({"messages": [message], "max_tokens": 1});
        server.post("/v1/chat/completions", &asked)
    };
    let call =
        json!([{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]);
    for (field, value) in [
        ("tool_calls", call),
        ("tool_call_id", json!("1")),
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

/// A request for a long streamed answer.
fn long(seed: u64) -> String {
    json!({"prompt": "Prompts are cut", "max_tokens": 400, "temperature": 1.0, "seed": seed, "stream": true}).to_string()
}

#[test]
fn too_many_requests_are_refused_and_those_taken_are_served() {
    let limits = Limits {
        running: 2,
        waiting: 2,
        ..Limits::default()
    };
    let server = Server::start("mistral", limits, |_| ());
    let streams: Vec<_> = (0..12)
        .map(|seed| server.send("/v1/completions", "application/json", &long(seed)))
        .collect();
    let answers: Vec<_> = streams.into_iter().map(response).collect();
    let taken = answers.iter().filter(|(status, _)| *status == 200).count();
    let busy: Vec<_> = answers
        .iter()
        .filter(|(status, _)| *status == 429)
        .collect();
    assert!(
        taken >= 2 && !busy.is_empty() && taken + busy.len() == 12,
        "{taken} taken, {} refused",
        busy.len()
    );
    assert!(
        answers
            .iter()
            .all(|(status, text)| *status == 429 || text.ends_with("data: [DONE]\n\n"))
    );
    assert_eq!(
        server.metric("tandem_requests_busy_total"),
        busy.len() as u64
    );
    server.wait_for("tandem_requests_completed_total", taken as u64);
}

/// After a stop text, tokens are not counted, and the request does not count as cancelled.
#[test]
fn metrics_count_what_clients_had() {
    let server = Server::start("qwen2", Limits::default(), |_| ());
    let asked = json!({"prompt": "The planner finds", "max_tokens": 400, "temperature": 0});
    let whole = body(&server.post("/v1/completions", &asked).1);
    let text = whole["choices"][0]["text"].as_str().unwrap();
    let stop: String = text.chars().skip(3).take(2).collect();
    let mut tokens = whole["usage"]["completion_tokens"].as_u64().unwrap();
    for stream in [false, true] {
        let mut stopped = asked.clone();
        stopped["stop"] = json!(stop);
        stopped["stream"] = json!(stream);
        if stream {
            stopped["stream_options"] = json!({"include_usage": true});
        }
        let (status, answer) = server.post("/v1/completions", &stopped);
        assert_eq!(status, 200);
        let last = match stream {
            true => events(&answer).pop().unwrap(),
            false => body(&answer),
        };
        tokens += last["usage"]["completion_tokens"].as_u64().unwrap();
    }
    server.wait_for("tandem_running_requests", 0);
    for (name, value) in [
        ("requests_total", 3),
        ("requests_completed_total", 3),
        ("requests_cancelled_total", 0),
        ("requests_failed_total", 0),
        ("generated_tokens_total", tokens),
    ] {
        assert_eq!(server.metric(&format!("tandem_{name}")), value, "{name}");
    }
}

/// A backend that fails at the given step.
struct Failing(CpuBackend, u32);

impl Backend for Failing {
    common::of_the_backend_within!();

    fn begin(&mut self, work: &Work<'_>) -> Result<(), Error> {
        self.1 += 1;
        match self.1 {
            3.. => Err(Error::NoStep),
            _ => self.0.begin(work),
        }
    }
}

#[test]
fn an_engine_that_fails_is_no_fault_of_requests() {
    let architecture = Architecture::read(&folder("llama3")).unwrap();
    let weights = Weights::open(&folder("llama3")).unwrap();
    let backend =
        CpuBackend::load(architecture, &weights, &options(PAGES, 16), &mut |_| ()).unwrap();
    let engine = Engine::new(Box::new(Failing(backend, 0)), Limits::default()).unwrap();
    let server = Server::with_engine(engine, "llama3", |_| ());
    let asked = json!({"prompt": "a", "max_tokens": 100, "stream": true});
    let (status, answer) = server.post("/v1/completions", &asked);
    let last = events(&answer).pop().unwrap();
    assert_eq!(
        (status, &last["error"]["code"]),
        (200, &json!("503")),
        "{answer}"
    );
    assert!(!answer.contains("[DONE]"), "{answer}");
    // The server accepts no more requests.
    let (status, answer) = server.post("/v1/completions", &json!({"prompt": "a"}));
    assert_eq!(
        (status, &body(&answer)["error"]["code"]),
        (503, &json!("503"))
    );
    let begin = Instant::now();
    while server.get("/health").0 != 503 {
        assert!(begin.elapsed() < WAIT);
    }
    for (name, value) in [
        ("total", 1),
        ("failed_total", 2),
        ("refused_total", 0),
        ("cancelled_total", 0),
        ("completed_total", 0),
    ] {
        assert_eq!(
            server.metric(&format!("tandem_requests_{name}")),
            value,
            "{name}"
        );
    }
}

#[test]
fn a_request_whose_client_has_gone_is_cancelled() {
    let server = Server::start("llama3", Limits::default(), |_| ());
    for (count, stream) in [(1, true), (2, false)] {
        let asked = json!({"prompt": "Prompts", "max_tokens": 490, "temperature": 1.0, "seed": 1, "stream": stream});
        let client = server.send("/v1/completions", "application/json", &asked.to_string());
        server.wait_for("tandem_requests_total", count);
        client.shutdown(Shutdown::Both).unwrap();
        drop(client);
        let ended = |server: &Server| {
            ["cancelled", "completed"]
                .map(|end| server.metric(&format!("tandem_requests_{end}_total")))
        };
        let begin = Instant::now();
        while ended(&server).iter().sum::<u64>() < count {
            assert!(begin.elapsed() < WAIT, "{:?} of {count}", ended(&server));
            thread::sleep(Duration::from_millis(5));
        }
        // Cancellation must take effect before an answer of 490 tokens would end.
        assert_eq!(ended(&server), [count, 0]);
    }
}

/// Each event contains the model's name. A name of 64 KiB fills the connection's buffers within a hundred tokens.
#[test]
fn clients_that_never_read_hold_no_connection_and_no_page() {
    const NEVER: usize = 3;
    let server = Server::start("llama3", Limits::default(), |options| {
        options.name = "n".repeat(64 << 10);
        options.send = Duration::from_millis(50);
        // These clients take all connections.
        options.connections = NEVER;
    });
    let asked =
        json!({"prompt": "Prompts are cut", "max_tokens": 490, "temperature": 0, "stream": true});
    let clients: Vec<_> = (0..NEVER)
        .map(|_| server.send("/v1/completions", "application/json", &asked.to_string()))
        .collect();
    let begin = Instant::now();
    let metric = |name| server.metric(&format!("tandem_{name}"));
    server.wait_for("tandem_requests_cancelled_total", NEVER as u64);
    assert!(begin.elapsed() < WAIT);
    assert_eq!(metric("requests_completed_total"), 0);
    server.wait_for("tandem_running_requests", 0);
    assert_eq!(
        metric("free_pages") + metric("cached_pages"),
        u64::from(PAGES)
    );
    for mut client in clients {
        // The connection is reset or ends early, so the answer is incomplete.
        let mut rest = Vec::new();
        let read = client.read_to_end(&mut rest);
        assert!(
            read.is_err() || !rest.ends_with(b"0\r\n\r\n"),
            "{} bytes",
            rest.len()
        );
    }
    assert_eq!(server.get("/health").0, 200);
}

/// The send limit applies to time without progress, not to a whole answer.
#[test]
fn a_client_that_reads_slowly_has_its_answer() {
    let server = Server::start("llama3", Limits::default(), |options| {
        options.name = "n".repeat(64 << 10);
        options.send = Duration::from_millis(500);
    });
    let asked =
        json!({"prompt": "Prompts are cut", "max_tokens": 100, "temperature": 0, "stream": true});
    let mut stream = server.send("/v1/completions", "application/json", &asked.to_string());
    let (mut text, mut some) = (Vec::new(), vec![0; 64 << 10]);
    let begin = Instant::now();
    loop {
        match stream.read(&mut some).unwrap() {
            0 => break,
            read => text.extend_from_slice(&some[..read]),
        }
        // Less than one event at a time: 64 KiB of the 6.5 MB of 100 events.
        thread::sleep(Duration::from_millis(30));
    }
    assert!(
        begin.elapsed() > 2 * Duration::from_millis(500),
        "it was not slow"
    );
    let end = String::from_utf8_lossy(&text[text.len() - 100..]).into_owned();
    assert!(end.contains("data: [DONE]"), "{end}");
}

#[test]
fn slow_vanishing_and_hostile_clients_cost_no_page_and_no_request() {
    const CLIENTS: u64 = 96;
    let limits = Limits {
        waiting: 1000,
        ..Limits::default()
    };
    let server = Server::start("qwen3", limits, |options| {
        options.receive = Duration::from_millis(500);
        options.connections = 200;
    });
    let right = {
        let asked = json!({"prompt": "Prompts are cut", "max_tokens": 24, "temperature": 0});
        body(&server.post("/v1/completions", &asked).1)["choices"][0]["text"].clone()
    };
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (server, right) = (&server, &right);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(client);
                thread::sleep(Duration::from_millis(random.u64(..300)));
                match client % 6 {
                    // A well-behaved client among the others gets the usual text.
                    0 | 1 => {
                        let asked = json!({"prompt": "Prompts are cut", "max_tokens": 24, "temperature": 0});
                        let (status, text) = server.post("/v1/completions", &asked);
                        assert_eq!((status, &body(&text)["choices"][0]["text"]), (200, right));
                    }
                    // A client that disconnects in the middle of its answer.
                    2 => {
                        let mut stream = server.send("/v1/completions", "application/json", &long(client));
                        let mut some = [0; 300];
                        let _ = stream.read(&mut some).unwrap();
                        drop(stream);
                    }
                    // A slow client, which finally gets its whole answer.
                    3 => {
                        let mut stream = server.send("/v1/completions", "application/json", &long(client));
                        let mut text = Vec::new();
                        let mut some = [0; 4096];
                        loop {
                            match stream.read(&mut some).unwrap() {
                                0 => break,
                                read => text.extend_from_slice(&some[..read]),
                            }
                            thread::sleep(Duration::from_millis(2));
                        }
                        assert!(String::from_utf8(text).unwrap().contains("data: [DONE]"));
                    }
                    // A client that never completes the head or the body of its request is disconnected.
                    4 => {
                        let mut stream = server.connect();
                        let begun: &[u8] = match random.bool() {
                            true => b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n",
                            false => b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 90\r\n\r\n{",
                        };
                        stream.write_all(begun).unwrap();
                        let mut rest = Vec::new();
                        stream.read_to_end(&mut rest).unwrap();
                        assert!(rest.is_empty() || rest.starts_with(b"HTTP/1.1 408"), "{:?}", String::from_utf8_lossy(&rest));
                    }
                    // Clients that send noise, or disconnect before they get an answer.
                    _ => {
                        let mut stream = server.connect();
                        let noise: Vec<u8> = (0..2000).map(|_| random.u8(..)).collect();
                        let _ = stream.write_all(&noise);
                        drop(stream);
                        drop(server.send("/v1/completions", "application/json", &long(client)));
                    }
                }
            });
        }
    });
    server.wait_for("tandem_running_requests", 0);
    server.wait_for("tandem_waiting_requests", 0);
    let metric = |name| server.metric(name);
    let taken = metric("tandem_requests_total");
    // Each accepted request is counted as ended when its connection ends.
    let begin = Instant::now();
    while metric("tandem_requests_completed_total") + metric("tandem_requests_cancelled_total")
        != taken
    {
        assert!(begin.elapsed() < WAIT, "{}", server.get("/metrics").1);
        thread::sleep(Duration::from_millis(5));
    }
    assert!(
        taken >= CLIENTS / 2,
        "{taken} of {CLIENTS} clients asked for something"
    );
    // All pages are free or kept by the prefix cache.
    assert_eq!(
        metric("tandem_free_pages") + metric("tandem_cached_pages"),
        u64::from(PAGES)
    );
    assert_eq!(server.get("/health").0, 200);
}

/// The answer under way ends, other requests are refused, and a connection without a request does not delay the end.
#[test]
fn a_server_that_stops_says_so_and_ends_with_the_last_answer() {
    let mut server = Server::start("llama3", Limits::default(), |options| {
        options.grace = WAIT;
    });
    let _idle = server.connect();
    let asked = json!({"prompt": "Prompts", "max_tokens": 3}).to_string();
    let (first, rest) = asked.split_at(9);
    let mut client = server.connect();
    let length = asked.len();
    write!(
        client,
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{first}"
    )
    .unwrap();
    let mut goes_on = [0; 25];
    client.read_exact(&mut goes_on).unwrap();
    assert_eq!(&goes_on, b"HTTP/1.1 100 Continue\r\n\r\n");

    server.stop();
    let begin = Instant::now();
    let health = || {
        let (mut stream, mut said) = (server.connect(), String::new());
        let request = "GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        let sent = stream.write_all(request.as_bytes());
        let _ = sent.and_then(|()| stream.read_to_string(&mut said));
        said
    };
    loop {
        let said = health();
        assert!(said.starts_with("HTTP/1.1 "), "no answer: {said:?}");
        if said.starts_with("HTTP/1.1 503") {
            break;
        }
        assert!(begin.elapsed() < WAIT);
    }
    let stopping = (503, "the server is stopping\n".to_owned());
    assert_eq!(server.get("/health"), stopping);
    let other = json!({"prompt": "Prompts", "max_tokens": 3});
    let (status, refused) = server.post("/v1/completions", &other);
    assert_eq!(status, 503);
    assert!(refused.contains("the server is stopping"), "{refused}");

    client.write_all(rest.as_bytes()).unwrap();
    let (status, answer) = response(client);
    assert_eq!(status, 200, "{answer}");
    server.thread.take().unwrap().join().unwrap();
    assert!(begin.elapsed() < WAIT / 2);
}

/// Connections that were accepted before the stop, and on which nothing was received until then.
#[test]
fn requests_that_arrive_just_after_the_stop_are_answered() {
    let mut server = Server::start("llama3", Limits::default(), |_| ());
    let connections: Vec<_> = (0..8).map(|_| server.connect()).collect();
    // They were accepted if a later one was answered.
    assert_eq!(server.get("/health").0, 200);
    server.stop();
    thread::sleep(Duration::from_millis(20));
    for mut stream in connections {
        let request = "GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).unwrap();
        assert!([200, 503].contains(&response(stream).0));
    }
}
