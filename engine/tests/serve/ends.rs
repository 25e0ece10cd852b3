//! The end of a server: its engine fails, or it is stopped.

use std::{
    io::{Read, Write},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use serde_json::json;
use tandem_engine::{Architecture, Backend, CpuBackend, Engine, Error, Limits, Weights, Work};

use crate::{
    common::{self, PAGES, folder, options},
    server::{GET_HEALTH, Server, WAIT, body, events, response},
};

/// How a step fails.
type Cause = fn() -> Error;

/// A backend whose third step fails.
struct Failing(CpuBackend, u32, Cause);

impl Backend for Failing {
    common::of_the_backend_within!();

    fn begin(&mut self, work: &Work<'_>) -> Result<(), Error> {
        self.1 += 1;
        match self.1 {
            3 => Err(self.2()),
            _ => self.0.begin(work),
        }
    }
}

/// All clients get the reason, and the server ends with it.
#[test]
fn an_engine_that_fails_ends_its_server() {
    let causes: [(Cause, &str); 2] = [
        (
            || Error::NoStep,
            "the engine has failed: no step is under way: begin one first",
        ),
        (
            || panic!("on purpose"),
            "the engine has failed: its thread panicked: on purpose",
        ),
    ];
    for (cause, why) in causes {
        let architecture = Architecture::read(&folder("llama3")).unwrap();
        let weights = Weights::open(&folder("llama3")).unwrap();
        let backend =
            CpuBackend::load(architecture, &weights, &options(PAGES, 16), &mut |_| ()).unwrap();
        let limits = Limits {
            running: 1,
            ..Limits::default()
        };
        let engine = Engine::new(Box::new(Failing(backend, 0, cause)), limits).unwrap();
        let mut server = Server::with_engine(engine, "llama3", |options| options.grace = WAIT);
        let [mut late, mut health, mut metrics] = [(); 3].map(|()| server.connect());
        // They were accepted if a later one was answered.
        assert_eq!(server.get("/health").0, 200);
        // One request runs and the others wait.
        let asked = json!({"prompt": "a", "max_tokens": 100, "n": 2});
        let waiting = [(); 2].map(|()| server.ask(&asked));
        let (status, answer) = server.stream(&asked);
        let begin = Instant::now();
        if status == 200 {
            let error = &events(&answer).pop().unwrap()["error"];
            assert_eq!(
                *error,
                json!({"code": "500", "type": "server_error", "param": null, "message": why})
            );
            assert!(!answer.contains("[DONE]"), "{answer}");
        }
        let request =
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
        late.write_all(request.as_bytes()).unwrap();
        health.write_all(GET_HEALTH.as_bytes()).unwrap();
        let get = GET_HEALTH.replace("health", "metrics");
        metrics.write_all(get.as_bytes()).unwrap();
        assert_eq!(response(health), (503, format!("{why}\n")));
        let (status, metrics) = response(metrics);
        assert_eq!(status, 200);
        assert!(
            metrics.contains("tandem_requests_cancelled_total 0\n"),
            "{metrics}"
        );
        for client in waiting.into_iter().chain([late]) {
            let (status, answer) = response(client);
            let error = &body(&answer)["error"]["message"];
            assert_eq!((status, error), (500, &json!(why)));
        }
        let ended = server.ended().unwrap_err();
        assert_eq!(ended.to_string(), why);
        assert!(begin.elapsed() < WAIT / 2);
    }
}

/// A backend that takes a moment to free its memory.
struct Slow(CpuBackend, Arc<AtomicBool>);

impl Backend for Slow {
    common::of_the_backend_within!();

    fn begin(&mut self, work: &Work<'_>) -> Result<(), Error> {
        self.0.begin(work)
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        thread::sleep(Duration::from_millis(300));
        self.1.store(true, Relaxed);
    }
}

/// A backend that warns of its second step.
struct Warning(CpuBackend, u32);

impl Backend for Warning {
    common::of_the_backend_within!();

    fn begin(&mut self, work: &Work<'_>) -> Result<(), Error> {
        self.1 += 1;
        self.0.begin(work)
    }

    fn warnings(&mut self) -> Vec<String> {
        match std::mem::replace(&mut self.1, 10) {
            2 => vec!["no memory for graphs".to_owned()],
            steps => {
                self.1 = steps;
                Vec::new()
            }
        }
    }
}

/// A library writes nothing to standard error.
#[test]
fn warnings_of_the_backend_are_given_to_the_program() {
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let architecture = Architecture::read(&folder("llama3")).unwrap();
    let weights = Weights::open(&folder("llama3")).unwrap();
    let backend =
        CpuBackend::load(architecture, &weights, &options(PAGES, 16), &mut |_| ()).unwrap();
    let engine = Engine::new(Box::new(Warning(backend, 0)), Limits::default()).unwrap();
    let server = Server::with_engine(engine, "llama3", |options| {
        options.warn = |what| SAID.lock().unwrap().push(what.to_owned());
    });
    let asked = json!({"prompt": "a", "max_tokens": 5, "ignore_eos": true});
    assert_eq!(server.complete(&asked).0, 200);
    assert_eq!(*SAID.lock().unwrap(), ["no memory for graphs"]);
}

/// A process that ends while the engine uses its device leaves that to the driver.
#[test]
fn a_server_ends_after_its_engine() {
    let architecture = Architecture::read(&folder("llama3")).unwrap();
    let weights = Weights::open(&folder("llama3")).unwrap();
    let backend =
        CpuBackend::load(architecture, &weights, &options(PAGES, 16), &mut |_| ()).unwrap();
    let freed = Arc::new(AtomicBool::new(false));
    let slow = Slow(backend, Arc::clone(&freed));
    let engine = Engine::new(Box::new(slow), Limits::default()).unwrap();
    let mut server = Server::with_engine(engine, "llama3", |options| {
        options.grace = Duration::from_millis(1);
    });
    let _under_way = server.ask(&json!({"prompt": "a", "max_tokens": 490, "ignore_eos": true}));
    server.wait_for("tandem_requests_total", 1);
    server.stop();
    server.ended().unwrap();
    assert!(freed.load(Relaxed));
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
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-type: application/json\r\n\
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
    server.has_metrics(&[("requests_failed_total", 0), ("requests_refused_total", 1)]);

    client.write_all(rest.as_bytes()).unwrap();
    let (status, answer) = response(client);
    assert_eq!(status, 200, "{answer}");
    server.ended().unwrap();
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
