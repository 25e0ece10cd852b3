//! Who may use a server.

use std::io::Write;

use serde_json::{Value, json};
use tandem_engine::{Limits, serve::ApiKey};

use crate::server::{Server, body, raw};

fn get(server: &Server, path: &str, headers: &str) -> (u16, Value, String) {
    let mut stream = server.connect();
    let request = format!("GET {path} HTTP/1.1\r\nconnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let said = raw(stream);
    let status = said.split(' ').nth(1).unwrap().parse().unwrap();
    let (head, text) = said.split_once("\r\n\r\n").unwrap();
    let error = match status {
        200 => Value::Null,
        _ => body(text)["error"].clone(),
    };
    (status, error, head.to_ascii_lowercase())
}

/// A web page whose name resolves to this machine sends its own name.
#[test]
fn requests_for_other_hosts_are_refused() {
    let server = Server::start("llama3", Limits::default(), |options| {
        options.hosts = vec!["llm.example".to_owned()];
    });
    for host in [
        "localhost:8000",
        "127.0.0.1",
        "[::1]:80",
        "LLM.example:8000",
    ] {
        for path in ["/health", "/metrics", "/v1/models"] {
            let (status, ..) = get(&server, path, &format!("host: {host}\r\n"));
            assert_eq!(status, 200, "{host}");
        }
    }
    // Probes come by the address of a machine.
    assert_eq!(get(&server, "/health", "host: 10.0.0.7:8000\r\n").0, 200);
    for path in ["/metrics", "/v1/models", "/nowhere"] {
        let (status, error, _) = get(&server, path, "host: evil.example:8000\r\n");
        assert_eq!((status, &error["type"]), (403, &json!("permission_error")));
        let message = error["message"].as_str().unwrap();
        assert!(
            message.contains("\"evil.example:8000\", and this server is localhost or llm.example")
                && message.contains("--allow-host"),
            "{message}"
        );
    }
    let (status, ..) = get(
        &server,
        "http://evil.example/v1/models",
        "host: localhost\r\n",
    );
    assert_eq!(status, 403);
    server.has_metrics(&[("requests_refused_total", 4)]);
}

#[test]
fn a_server_with_a_key_answers_only_those_who_have_it() {
    let server = Server::start("llama3", Limits::default(), |options| {
        options.api_key = ApiKey::new("sk-secret");
    });
    let with =
        |path: &str, header: &str| get(&server, path, &format!("host: localhost\r\n{header}"));
    for header in [
        "authorization: Bearer sk-secret\r\n",
        "Authorization: bearer sk-secret\r\n",
    ] {
        assert_eq!(with("/v1/models", header).0, 200, "{header}");
    }
    // Probes have no key.
    for path in ["/health", "/metrics"] {
        assert_eq!(with(path, "").0, 200);
    }
    for (header, what) in [
        ("", "missing"),
        ("authorization: sk-secret\r\n", "missing"),
        ("authorization: Bearer sk-secreT\r\n", "wrong"),
        ("authorization: Bearer sk-secret1\r\n", "wrong"),
        ("authorization: Bearer \r\n", "missing"),
    ] {
        let (status, error, head) = with("/v1/models", header);
        let message = format!("the API key is {what}: send the header `Authorization: Bearer KEY`");
        let expected = json!({"message": message, "type": "authentication_error", "param": null, "code": "401"});
        assert_eq!((status, error), (401, expected), "{header}");
        assert!(head.contains("www-authenticate: bearer"), "{head}");
    }
    let (status, answer) = server.complete(&json!({"prompt": "a"}));
    assert_eq!(status, 401, "{answer}");
    assert_eq!(server.metric("tandem_requests_refused_total"), 6);
}
