//! Clients that are many, slow, vanish or send noise.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpStream},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tandem_engine::Limits;

use crate::{
    common::PAGES,
    server::{GET_HEALTH, Server, WAIT, response, streamed},
};

/// A request for an answer of so many tokens, the most likely ones.
fn greedy(tokens: u32) -> Value {
    json!({"prompt": "Prompts are cut", "max_tokens": tokens, "temperature": 0})
}

/// A request for a long streamed answer.
fn long(seed: u64) -> Value {
    json!({"prompt": "Prompts are cut", "max_tokens": 400, "temperature": 1.0, "seed": seed, "stream": true})
}

/// Reads a response to its end, with a pause after each part of at most this many bytes.
fn read_slowly(mut stream: TcpStream, most: usize, pause: Duration) -> String {
    let (mut text, mut some) = (Vec::new(), vec![0; most]);
    loop {
        match stream.read(&mut some).unwrap() {
            0 => return String::from_utf8(text).unwrap(),
            read => text.extend_from_slice(&some[..read]),
        }
        thread::sleep(pause);
    }
}

#[test]
fn too_many_requests_are_refused_and_those_taken_are_served() {
    let limits = Limits {
        running: 2,
        waiting: 2,
        ..Limits::default()
    };
    let server = Server::start("mistral", limits, |_| ());
    let streams: Vec<_> = (0..12).map(|seed| server.ask(&long(seed))).collect();
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

#[test]
fn a_request_whose_client_has_gone_is_cancelled() {
    let server = Server::of("llama3");
    for (count, stream) in [(1, true), (2, false)] {
        let asked = json!({"prompt": "Prompts", "max_tokens": 490, "temperature": 1.0, "seed": 1, "stream": stream});
        let client = server.ask(&asked);
        server.wait_for("tandem_requests_total", count);
        client.shutdown(Shutdown::Both).unwrap();
        drop(client);
        let ended = |server: &Server| {
            ["cancelled", "completed"]
                .map(|end| server.metric(&format!("tandem_requests_{end}_total")))
        };
        server.wait_until(|| ended(&server).iter().sum::<u64>() >= count);
        // Cancellation must take effect before an answer of 490 tokens would end.
        assert_eq!(ended(&server), [count, 0]);
    }
}

/// A byte behind the request, such as the line end that some clients send, waits to be read until the answer is sent. It hid
/// the end of the connection behind it.
#[test]
fn a_request_with_something_behind_it_is_cancelled_too() {
    let limits = Limits {
        running: 1,
        ..Limits::default()
    };
    let server = Server::start("llama3", limits, |_| ());
    let asked = json!({"prompt": "Prompts", "max_tokens": 490, "ignore_eos": true, "n": 30});
    let ended = || {
        ["cancelled", "completed"].map(|end| server.metric(&format!("tandem_requests_{end}_total")))
    };
    for (count, behind) in [(30, "\n"), (60, GET_HEALTH)] {
        let [before, _] = ended();
        let mut client = server.ask(&asked);
        client.write_all(behind.as_bytes()).unwrap();
        server.wait_for("tandem_requests_total", count);
        drop(client);
        server.wait_until(|| ended().iter().sum::<u64>() == count);
        let cancelled = ended()[0] - before;
        assert!(cancelled > 10, "{cancelled} of 30");
    }
}

/// They have sent all that they have to say, and read on. Only the last of their answers is lost. They are many, because each may
/// be quick enough by chance, and ask for little, because the machine may be busy.
#[test]
fn half_closed_clients_have_quick_answers() {
    let server = Server::of("llama3");
    let asked = "GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(4) + GET_HEALTH;
    for _ in 0..20 {
        let mut client = server.connect();
        client.write_all(asked.as_bytes()).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let mut said = String::new();
        client.read_to_string(&mut said).unwrap();
        let answers = said.matches("HTTP/1.1 200 OK").count();
        assert!(answers >= 4, "{answers}");
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
    let asked = streamed(&greedy(490));
    let clients: Vec<_> = (0..NEVER).map(|_| server.ask(&asked)).collect();
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

/// Times and tokens are those of the engine. Its client reads nothing, and has room for the events of a hundred tokens.
#[test]
fn metrics_do_not_wait_for_clients_that_read_slowly() {
    let server = Server::start("llama3", Limits::default(), |options| {
        options.name = "n".repeat(64 << 10);
    });
    let mut asked = streamed(&greedy(490));
    asked["ignore_eos"] = json!(true);
    let client = server.ask(&asked);
    server.wait_for("tandem_generated_tokens_total", 490);
    server.wait_for("tandem_request_seconds_count", 1);
    server.has_metrics(&[("requests_completed_total", 0)]);
    assert_eq!(response(client).0, 200);
    server.wait_for("tandem_requests_completed_total", 1);
    server.has_metrics(&[
        ("request_seconds_count", 1),
        ("generated_tokens_total", 490),
    ]);
}

/// The send limit applies to time without progress, not to a whole answer.
#[test]
fn a_client_that_reads_slowly_has_its_answer() {
    let server = Server::start("llama3", Limits::default(), |options| {
        options.name = "n".repeat(64 << 10);
        options.send = Duration::from_millis(500);
    });
    let stream = server.ask(&streamed(&greedy(100)));
    let begin = Instant::now();
    // Less than one event at a time: 64 KiB of the 6.5 MB of 100 events.
    let text = read_slowly(stream, 64 << 10, Duration::from_millis(30));
    assert!(
        begin.elapsed() > 2 * Duration::from_millis(500),
        "it was not slow"
    );
    let end = &text[text.len() - 100..];
    assert!(end.contains("data: [DONE]"), "{end}");
}

/// Proxies keep connections for a minute, and send the next request just before it is over. The limits are far apart, because other
/// programs may delay the test by a second.
#[test]
fn a_connection_may_be_idle_for_longer_than_a_head_may_take() {
    let server = Server::start("llama3", Limits::default(), |options| {
        options.receive = Duration::from_millis(1200);
        options.idle = Duration::from_millis(6000);
    });
    let mut stream = server.connect();
    let head = "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let mut ask = || {
        stream.write_all(head.as_bytes()).unwrap();
        let mut said = Vec::new();
        while !said.ends_with(b"\r\n\r\nok\n") {
            let mut some = [0; 500];
            let read = stream.read(&mut some).unwrap();
            assert!(read > 0, "the connection is closed");
            said.extend_from_slice(&some[..read]);
        }
    };
    for _ in 0..2 {
        ask();
        thread::sleep(Duration::from_millis(2000));
    }
    // A head that has begun has less time.
    ask();
    let begin = Instant::now();
    stream.write_all(&head.as_bytes()[..9]).unwrap();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    let took = begin.elapsed();
    assert!(
        rest.is_empty() && took < Duration::from_millis(5600),
        "{took:?}"
    );
    // And so does the first of a connection.
    let begin = Instant::now();
    server.connect().read_to_end(&mut rest).unwrap();
    let took = begin.elapsed();
    assert!(
        rest.is_empty() && took < Duration::from_millis(5600),
        "{took:?}"
    );
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
    let right = server.complete(&greedy(24)).1["choices"][0]["text"].clone();
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (server, right) = (&server, &right);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(client);
                thread::sleep(Duration::from_millis(random.u64(..300)));
                match client % 6 {
                    // A well-behaved client among the others gets the usual text.
                    0 | 1 => {
                        let (status, answer) = server.complete(&greedy(24));
                        assert_eq!((status, &answer["choices"][0]["text"]), (200, right));
                    }
                    // A client that disconnects in the middle of its answer.
                    2 => {
                        let mut stream = server.ask(&long(client));
                        let mut some = [0; 300];
                        let _ = stream.read(&mut some).unwrap();
                        drop(stream);
                    }
                    // A slow client, which finally gets its whole answer.
                    3 => {
                        let stream = server.ask(&long(client));
                        let text = read_slowly(stream, 4096, Duration::from_millis(2));
                        assert!(text.contains("data: [DONE]"));
                    }
                    // A client that never completes the head or the body of its request is disconnected.
                    4 => {
                        let mut stream = server.connect();
                        let begun: &[u8] = match random.bool() {
                            true => b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n",
                            false => b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 90\r\n\r\n{",
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
                        drop(server.ask(&long(client)));
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
    server.wait_until(|| {
        metric("tandem_requests_completed_total") + metric("tandem_requests_cancelled_total")
            == taken
    });
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
