//! The end of a server: its engine fails, or it is stopped.

use std::{
    io::{Read, Write},
    thread,
    time::{Duration, Instant},
};

use serde_json::json;
use tandem_engine::{Architecture, Backend, CpuBackend, Engine, Error, Limits, Weights, Work};

use crate::{
    common::{self, PAGES, folder, options},
    server::{GET_HEALTH, Server, WAIT, events, response},
};

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
    let (status, answer) = server.stream(&json!({"prompt": "a", "max_tokens": 100}));
    let last = events(&answer).pop().unwrap();
    assert_eq!(
        (status, &last["error"]["code"]),
        (200, &json!("503")),
        "{answer}"
    );
    assert!(!answer.contains("[DONE]"), "{answer}");
    // The server accepts no more requests.
    let (status, answer) = server.complete(&json!({"prompt": "a"}));
    assert_eq!((status, &answer["error"]["code"]), (503, &json!("503")));
    server.wait_until(|| server.get("/health").0 == 503);
    server.has_metrics(&[
        ("requests_total", 1),
        ("requests_failed_total", 2),
        ("requests_refused_total", 0),
        ("requests_cancelled_total", 0),
        ("requests_completed_total", 0),
    ]);
}

/// The answer under way ends, other requests are refused, and a connection without a request does not delay the end.
#[test]
fn a_server_that_stops_says_so_and_ends_with_the_last_answer() {
    let mut server = Server::start("llama3", Limits::default(), |options| {
        options.grace = WAIT;
    });
    let _idle = server.connect();
    let asked = json!({"prompt": "Prompts", "max_tokens": 3});
    let text = asked.to_string();
    let (first, rest) = text.split_at(9);
    let mut client = server.connect();
    let length = text.len();
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
        let sent = stream.write_all(GET_HEALTH.as_bytes());
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
    let (status, refused) = response(server.ask(&asked));
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
    let mut server = Server::of("llama3");
    let connections: Vec<_> = (0..8).map(|_| server.connect()).collect();
    // They were accepted if a later one was answered.
    assert_eq!(server.get("/health").0, 200);
    server.stop();
    thread::sleep(Duration::from_millis(20));
    for mut stream in connections {
        stream.write_all(GET_HEALTH.as_bytes()).unwrap();
        assert!([200, 503].contains(&response(stream).0));
    }
}
