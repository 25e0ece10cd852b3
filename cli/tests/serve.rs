//! `tandem serve` on a tiny random model.

mod common;

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use common::{model, run};

/// `tandem serve`, what it says first, and where it listens. It ends with the test.
struct Server {
    process: Child,
    line: String,
    address: String,
}

impl Server {
    fn start(more: &[&str]) -> Self {
        Self::with_key(None, more)
    }

    /// With a key in the environment.
    fn with_key(key: Option<&str>, more: &[&str]) -> Self {
        let folder = model("llama3");
        let common = [
            "serve",
            &folder,
            "--listen",
            "127.0.0.1:0",
            "--backend",
            "cpu",
        ];
        let mut process = Command::new(env!("CARGO_BIN_EXE_tandem"))
            .args(common)
            .args(more)
            .env_remove("TANDEM_API_KEY")
            .envs(key.map(|key| ("TANDEM_API_KEY", key)))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let read = BufReader::new(process.stdout.take().unwrap()).read_line(&mut line);
        let address = line
            .split("http://")
            .nth(1)
            .and_then(|rest| rest.split('/').next());
        let address = address.unwrap_or_default().to_owned();
        let server = Self {
            process,
            line,
            address,
        };
        assert!(
            read.is_ok() && !server.address.is_empty(),
            "no address in {:?}",
            server.line
        );
        server
    }

    fn send(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream
    }

    fn get(&self, path: &str) -> String {
        self.ask(&format!("GET {path}"), "")
    }

    fn ask(&self, head: &str, body: &str) -> String {
        let length = body.len();
        let request = format!(
            "{head} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {length}\r\n\r\n{body}"
        );
        let mut answer = String::new();
        self.send(&request).read_to_string(&mut answer).unwrap();
        answer
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

#[test]
fn a_served_model_answers_and_is_named_after_its_folder() {
    let server = Server::start(&[]);
    let answer = server.get("/v1/models");
    assert!(answer.contains("\"id\":\"llama3\""), "{answer}");
}

#[test]
fn a_server_says_how_it_stores_keys_and_values() {
    let server = Server::start(&["--cache-type", "e4m3-scaled"]);
    let said = ", caches in e4m3-scaled, at http";
    assert!(server.line.contains(said), "{:?}", server.line);
    let body = "{\"prompt\": \"a\", \"max_tokens\": 5, \"temperature\": 0}";
    let answer = server.ask("POST /v1/completions", body);
    assert!(answer.contains("\"completion_tokens\":5"), "{answer}");
    let metrics = server.get("/metrics");
    assert!(
        metrics.contains("\ntandem_cache_info{type=\"e4m3-scaled\"} 1\n"),
        "{metrics}"
    );
}

/// The weights, which are not there, would take minutes to load.
#[test]
fn an_address_in_use_is_said_before_the_weights_are_read() {
    let copy = tempfile::tempdir().unwrap();
    let from = model("llama3");
    for name in ["config.json", "tokenizer.json"] {
        std::fs::copy(Path::new(&from).join(name), copy.path().join(name)).unwrap();
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let call = ["serve", ".", "--listen", &address, "--backend", "cpu"];
    let said = run(copy.path(), &call);
    let expected = format!("cannot listen on {address}");
    assert!(
        said.code == 2 && said.stderr.contains(&expected) && said.stderr.contains("--listen"),
        "{}",
        said.stderr
    );
}

/// What the server says on standard error of a model with these files beside the weights and the tokenizer.
fn said_of(files: &[(&str, &str)]) -> String {
    let copy = tempfile::tempdir().unwrap();
    let from = model("llama3");
    for name in [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ] {
        std::fs::copy(Path::new(&from).join(name), copy.path().join(name)).unwrap();
    }
    for (name, content) in files {
        std::fs::write(copy.path().join(name), content).unwrap();
    }
    let mut server = Command::new(env!("CARGO_BIN_EXE_tandem"))
        .args(["serve", copy.path().to_str().unwrap()])
        .args(["--listen", "127.0.0.1:0", "--backend", "cpu"])
        .env_remove("TANDEM_API_KEY")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let out = server.stdout.take().unwrap();
    BufReader::new(out).read_line(&mut line).unwrap();
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(line.contains("http://"), "{line}");
    let mut said = String::new();
    let mut errors = server.stderr.take().unwrap();
    errors.read_to_string(&mut said).unwrap();
    said
}

/// Else the first chat says so, to a client that cannot do anything about it.
#[test]
fn a_server_says_at_its_start_that_chats_will_fail() {
    let template = |source| ("chat_template.jinja", source);
    for (files, warning) in [
        (&[][..], "has no chat template: chats are refused"),
        (
            &[template("{{ messages[0].content | no_such_filter }}")],
            "the chat template fails: filter no_such_filter is unknown",
        ),
        (
            &[template("{{ raise_exception('no system message') }}")],
            "the chat template: no system message",
        ),
    ] {
        let said = said_of(files);
        assert!(said.contains(warning), "{said}");
    }
    let said = said_of(&[template("{{ messages[0].content }}")]);
    assert!(!said.contains("chat"), "{said}");
}

/// The model's name is in each event, and long: the system keeps few of them for a client.
#[test]
fn a_client_that_takes_nothing_is_cut_off() {
    let name = "n".repeat(64 << 10);
    let server = Server::start(&["--name", &name, "--send-timeout", "1"]);
    let body = "{\"prompt\": \"a\", \"max_tokens\": 400, \"temperature\": 0, \"stream\": true}";
    let length = body.len();
    let client = server.send(&format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    ));
    let begin = Instant::now();
    while !server
        .get("/metrics")
        .contains("\ntandem_requests_cancelled_total 1\n")
    {
        assert!(
            begin.elapsed() < Duration::from_secs(60),
            "{}",
            server.get("/metrics")
        );
        thread::sleep(Duration::from_millis(20));
    }
    drop(client);
    let said = run(
        Path::new("."),
        &["serve", &model("llama3"), "--send-timeout", "0"],
    );
    assert!(
        said.code == 2 && said.stderr.contains("--send-timeout"),
        "{}",
        said.stderr
    );
}

#[test]
fn limits_of_a_server_are_flags() {
    let flags = [
        ("--request-tokens", "60"),
        ("--answer-tokens", "7"),
        ("--body-bytes", "400"),
        ("--receive-timeout", "1"),
        ("--idle-timeout", "1"),
        ("--connections", "2"),
        ("--allow-host", "llm.example"),
    ];
    let given: Vec<_> = flags
        .iter()
        .flat_map(|(flag, value)| [*flag, *value])
        .collect();
    let server = Server::start(&given);
    let answer = server.ask(
        "POST /v1/completions",
        "{\"prompt\": \"a\", \"max_tokens\": 70}",
    );
    assert!(
        answer.contains("more than the 60") && answer.contains("--request-tokens"),
        "{answer}"
    );
    let chat = "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"ignore_eos\": true}";
    let answer = server.ask("POST /v1/chat/completions", chat);
    assert!(answer.contains("\"completion_tokens\":7"), "{answer}");
    let answer = server.ask("POST /v1/completions", &" ".repeat(401));
    assert!(
        answer.contains(" 413 ") && answer.contains("--body-bytes"),
        "{answer}"
    );
    // A request that does not come to its end takes one of the connections for a second.
    let mut slow = server.send("POST /v1/completions HTTP/1.1\r\n");
    let mut named =
        server.send("GET /health HTTP/1.1\r\nhost: llm.example:80\r\nconnection: close\r\n\r\n");
    let mut said = String::new();
    named.read_to_string(&mut said).unwrap();
    assert!(said.starts_with("HTTP/1.1 200"), "{said}");
    let _ = slow.read_to_string(&mut said);
    let answer = server.get("/metrics");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    for (flag, _) in &flags[..6] {
        let said = run(Path::new("."), &["serve", &model("llama3"), flag, "0"]);
        assert!(
            said.code == 2 && said.stderr.contains(flag),
            "{}",
            said.stderr
        );
    }
    let said = run(
        Path::new("."),
        &["serve", &model("llama3"), "--allow-host", "llm.example:80"],
    );
    assert!(
        said.code == 2 && said.stderr.contains("without a port"),
        "{}",
        said.stderr
    );
}

#[test]
fn fixed_splits_and_the_prefix_cache_exclude_each_other() {
    let folder = model("llama3");
    let arguments = ["serve", &folder, "--fixed-splits", "32"];
    let said = run(Path::new("."), &arguments);
    let says = "--fixed-splits 32 is for texts that do not depend on other requests";
    assert!(
        said.code == 2 && said.stderr.contains(says) && said.stderr.contains("--no-prefix-cache"),
        "{}",
        said.stderr
    );
    // The second prompt finds pages of the first only in the cache.
    let prompt = "The planner cuts the keys of each request. ".repeat(4);
    let body = format!("{{\"prompt\": \"{prompt}\", \"max_tokens\": 5, \"temperature\": 0}}");
    for (flags, finds) in [
        (&[][..], true),
        (&["--no-prefix-cache"], false),
        (&["--no-prefix-cache", "--fixed-splits", "32"], false),
    ] {
        let server = Server::start(flags);
        let [_, answer] = [(); 2].map(|()| server.ask("POST /v1/completions", &body));
        assert!(answer.contains("\"completion_tokens\":5"), "{answer}");
        assert_eq!(
            !answer.contains("\"cached_tokens\":0"),
            finds,
            "{flags:?}: {answer}"
        );
    }
}

/// The key is in no argument, which other users of the machine could see.
#[test]
fn a_key_comes_from_a_file_or_the_environment() {
    let here = tempfile::tempdir().unwrap();
    let file = here.path().join("key");
    std::fs::write(&file, "sk-of-file\n").unwrap();
    let file = file.to_str().unwrap();
    for (server, key) in [
        (
            Server::with_key(Some("sk-of-environment"), &[]),
            "sk-of-environment",
        ),
        (
            Server::with_key(Some("other"), &["--api-key-file", file]),
            "sk-of-file",
        ),
    ] {
        assert!(!server.line.contains(key));
        assert!(server.get("/v1/models").contains(" 401 "));
        let head = format!(
            "GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer {key}\r\n\r\n"
        );
        let mut said = String::new();
        server.send(&head).read_to_string(&mut said).unwrap();
        assert!(said.contains("\"id\":\"llama3\""), "{said}");
    }
    for (content, reason) in [("", "has no key"), ("two words\n", "without spaces")] {
        std::fs::write(file, content).unwrap();
        let call = ["serve", &model("llama3"), "--api-key-file", file];
        let said = run(here.path(), &call);
        assert!(
            said.code == 2 && said.stderr.contains(reason),
            "{}",
            said.stderr
        );
    }
    let said = run(
        here.path(),
        &["serve", &model("llama3"), "--api-key-file", "nowhere"],
    );
    assert!(
        said.code == 2 && said.stderr.contains("cannot read nowhere"),
        "{}",
        said.stderr
    );
}
