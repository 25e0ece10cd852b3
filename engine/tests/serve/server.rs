//! A server on this machine, requests to it and responses.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tandem_engine::{
    Engine, Limits, Text,
    serve::{ServeError, ServeOptions, run},
};

use crate::common::{engine, folder};

pub const MODEL: &str = "tiny";
pub const WAIT: Duration = Duration::from_secs(60);
pub const GET_HEALTH: &str = "GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";

/// A server that stops when the test ends.
pub struct Server {
    address: SocketAddr,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<Result<(), ServeError>>>,
}

impl Server {
    /// A server without limits of its own.
    pub fn of(family: &str) -> Self {
        Self::start(family, Limits::default(), |_| ())
    }

    pub fn start(family: &str, limits: Limits, change: impl FnOnce(&mut ServeOptions)) -> Self {
        Self::with_engine(engine(family, limits), family, change)
    }

    pub fn with_engine(
        engine: Engine,
        family: &str,
        change: impl FnOnce(&mut ServeOptions),
    ) -> Self {
        Self::with(engine, Text::read(&folder(family)).unwrap(), change)
    }

    pub fn with(engine: Engine, text: Text, change: impl FnOnce(&mut ServeOptions)) -> Self {
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
        });
        Self {
            address: address.recv_timeout(WAIT).unwrap(),
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(WAIT)).unwrap();
        stream
    }

    pub fn send(&self, path: &str, kind: &str, body: &str) -> TcpStream {
        let mut stream = self.connect();
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n"
        );
        stream.write_all((head + body).as_bytes()).unwrap();
        stream
    }

    /// Asks for a completion, and leaves the answer to be read.
    pub fn ask(&self, asked: &Value) -> TcpStream {
        self.send("/v1/completions", "application/json", &asked.to_string())
    }

    /// Status and answer of a completion that is not streamed.
    pub fn complete(&self, asked: &Value) -> (u16, Value) {
        let (status, text) = response(self.ask(asked));
        (status, body(&text))
    }

    /// Status and answer of a streamed completion.
    pub fn stream(&self, asked: &Value) -> (u16, String) {
        response(self.ask(&streamed(asked)))
    }

    pub fn chat(&self, asked: &Value) -> (u16, String) {
        let path = "/v1/chat/completions";
        response(self.send(path, "application/json", &asked.to_string()))
    }

    pub fn get(&self, path: &str) -> (u16, String) {
        let mut stream = self.connect();
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
        .unwrap();
        response(stream)
    }

    pub fn metric(&self, name: &str) -> u64 {
        let (_, text) = self.get("/metrics");
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value
            .unwrap_or_else(|| panic!("{name} in {text}"))
            .parse()
            .unwrap()
    }

    /// Metrics whose names begin with `tandem_` have these values.
    pub fn has_metrics(&self, expected: &[(&str, u64)]) {
        for (name, value) in expected {
            assert_eq!(self.metric(&format!("tandem_{name}")), *value, "{name}");
        }
    }

    /// Waits until a metric has the given value.
    #[track_caller]
    pub fn wait_for(&self, name: &str, value: u64) {
        self.wait_until(|| self.metric(name) == value);
    }

    /// Waits for what the metrics show.
    #[track_caller]
    pub fn wait_until(&self, is_so: impl Fn() -> bool) {
        let begin = Instant::now();
        while !is_so() {
            assert!(begin.elapsed() < WAIT, "{}", self.get("/metrics").1);
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for its end.
    pub fn ended(&mut self) -> Result<(), ServeError> {
        self.thread.take().unwrap().join().unwrap()
    }

    pub fn stop(&mut self) {
        let _ = self.stop.take().map(|stop| stop.send(()));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
        let ended = self.thread.take().map(thread::JoinHandle::join);
        assert!(ended.is_none_or(|ended| matches!(ended, Ok(Ok(())))) || thread::panicking());
    }
}

/// A request with a streamed answer.
pub fn streamed(asked: &Value) -> Value {
    let mut streamed = asked.clone();
    streamed["stream"] = json!(true);
    streamed
}

/// A response as it was sent.
pub fn raw(mut stream: TcpStream) -> String {
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    String::from_utf8(all).unwrap()
}

/// Status and body of a response, with a plain or a chunked body.
pub fn response(stream: TcpStream) -> (u16, String) {
    let all = raw(stream);
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

pub fn events(body: &str) -> Vec<Value> {
    let data = body
        .split("\n\n")
        .filter_map(|event| event.strip_prefix("data: "));
    data.filter(|data| *data != "[DONE]")
        .map(|data| serde_json::from_str(data).unwrap())
        .collect()
}

pub fn body(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| panic!("{text}"))
}
