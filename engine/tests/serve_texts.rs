//! The texts of the server, as its clients get them.

mod common;

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    sync::mpsc,
    thread,
    time::Duration,
};

use common::{engine, folder};
use serde_json::{Value, json};
use tandem_engine::{
    Limits, Text,
    serve::{ServeOptions, run},
};

/// Sends requests to a server with a family's model and a tokenizer, and stops it. Returns the bodies of the answers.
fn answers(family: &str, tokenizer: &Path, requests: &[(&str, Value)]) -> Vec<String> {
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
    let address = address.recv_timeout(Duration::from_secs(60)).unwrap();
    let answer = |(path, body): &(&str, Value)| {
        let body = body.to_string();
        let mut stream = TcpStream::connect(address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        // Answers to HTTP 1.0 are not chunked.
        write!(
            stream,
            "POST {path} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut all = String::new();
        stream.read_to_string(&mut all).unwrap();
        let (head, body) = all.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(" 200 "), "{all}");
        body.to_owned()
    };
    let answers = requests.iter().map(answer).collect();
    stop.send(()).unwrap();
    server.join().unwrap();
    answers
}

/// The decoders of Mistral's tokenizers take away the space at the beginning of a text. An answer to a prompt is none.
#[test]
fn completions_keep_the_space_before_their_first_word() {
    let copy = tempfile::tempdir().expect("writable");
    let tokenizer = fs::read(folder("mistral").join("tokenizer.json")).expect("a fixture");
    let tokenizer: Value = serde_json::from_slice(&tokenizer).expect("a fixture");
    let asked: Vec<_> = (0..12)
        .map(|seed| {
            let body =
                json!({"prompt": "The planner", "max_tokens": 3, "temperature": 9, "seed": seed});
            ("/v1/completions", body)
        })
        .collect();
    let texts = |tokenizer: &Path| {
        let bodies = answers("mistral", tokenizer, &asked);
        let text = |body: &String| {
            let body: Value = serde_json::from_str(body).unwrap();
            body["choices"][0]["text"].as_str().unwrap().to_owned()
        };
        bodies.iter().map(text).collect::<Vec<_>>()
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
