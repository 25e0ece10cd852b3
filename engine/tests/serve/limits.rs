//! What a server takes at once and of one request.

use std::{io::Write as _, thread, time::Duration};

use serde_json::{Value, json};
use tandem_engine::{Architecture, CpuBackend, Engine, Limits, Text, Weights};

use crate::{
    common::{folder, options, with_template},
    server::{Server, body, raw, response},
};

/// Each takes a moment to be tokenized, and is refused in the end: the model has 512 positions.
#[test]
fn large_prompts_are_refused_before_work_and_leave_places_for_others() {
    let limits = Limits {
        running: 1,
        waiting: 9,
        ..Limits::default()
    };
    let server = Server::start("llama3", limits, |_| ());
    let long = json!({"prompt": "The planner ".repeat(20_000), "max_tokens": 1});
    let mut again = 0;
    let clients: Vec<_> = thread::scope(|scope| {
        let clients: Vec<_> = (0..40)
            .map(|_| scope.spawn(|| raw(server.ask(&long))))
            .collect();
        // Two are tokenized, and half as many as there are places wait.
        server.wait_for("tandem_lane_waiting_requests", 5);
        // Those that are being refused hold places for a moment.
        let short = json!({"prompt": "a", "max_tokens": 1});
        let (mut status, mut answer) = server.complete(&short);
        while status == 429 && again < 100 {
            again += 1;
            thread::sleep(Duration::from_millis(5));
            (status, answer) = server.complete(&short);
        }
        assert_eq!(status, 200, "{answer}");
        clients
            .into_iter()
            .map(|client| client.join().unwrap())
            .collect()
    });
    let busy: Vec<_> = clients
        .iter()
        .filter(|said| said.contains(" 429 "))
        .collect();
    let too_long = clients
        .iter()
        .filter(|said| said.contains("positions of the model"));
    let too_long = too_long.count();
    assert_eq!(too_long + busy.len(), 40);
    // Those that arrived when others had been tokenized already are few.
    assert!((7..=30).contains(&too_long), "{too_long}");
    for said in &busy {
        assert!(said.contains("retry-after: 1\r\n"), "{said}");
        assert!(said.contains("\"type\":\"rate_limit_error\""), "{said}");
    }
    let of_lane = "the queue of prompts over 65536 bytes is full (limit 5: half of --batch and --waiting together, up to 16): \
                   try again later";
    assert!(busy.iter().any(|said| said.contains(of_lane)));
    server.has_metrics(&[
        ("requests_busy_total", busy.len() as u64 + again),
        ("lane_waiting_requests", 0),
        ("requests_total", 1),
    ]);
}

/// It waits behind others that are tokenized, or is tokenized itself.
#[test]
fn clients_that_leave_before_the_engine_has_their_requests_are_counted() {
    let server = Server::of("llama3");
    let long = json!({"prompt": "The planner ".repeat(20_000), "max_tokens": 1});
    let clients: Vec<_> = (0..5).map(|_| server.ask(&long)).collect();
    server.wait_for("tandem_lane_waiting_requests", 3);
    drop(clients);
    server.wait_until(|| {
        let left = server.metric("tandem_requests_left_total");
        left + server.metric("tandem_requests_refused_total") == 5 && left >= 3
    });
    server.wait_for("tandem_taken_places", 0);
    server.has_metrics(&[("requests_total", 0), ("requests_cancelled_total", 0)]);
}

/// Those that are tokenized have places already.
#[test]
fn requests_without_a_place_are_refused() {
    let limits = Limits {
        running: 1,
        waiting: 1,
        ..Limits::default()
    };
    let server = Server::start("llama3", limits, |_| ());
    let long =
        json!({"prompt": "Prompts", "max_tokens": 490, "ignore_eos": true, "n": 2, "stream": true});
    let client = server.ask(&long);
    server.wait_for("tandem_requests_total", 2);
    server.has_metrics(&[("taken_places", 2), ("places", 2)]);
    let said = raw(server.ask(&json!({"prompt": "a"})));
    assert!(
        said.contains("the queue is full (limit 1, --waiting): try again later"),
        "{said}"
    );
    assert!(
        said.contains(" 429 ") && said.contains("retry-after: 1\r\n"),
        "{said}"
    );
    // A body that is no JSON is not even read.
    let said = response(server.send("/v1/completions", "application/json", "{"));
    assert_eq!(said.0, 429);
    drop(client);
    server.wait_for("tandem_running_requests", 0);
    server.wait_until(|| server.complete(&json!({"prompt": "a", "max_tokens": 1})).0 == 200);
}

/// However many requests may wait.
#[test]
fn choices_of_a_request_are_limited() {
    let server = Server::of("llama3");
    let asked = |prompts: usize| {
        let prompts = vec![[1]; prompts];
        server.complete(&json!({"prompt": prompts, "n": 100, "max_tokens": 1}))
    };
    let (status, answer) = asked(11);
    let message = "1100 choices are asked for (n for each prompt), and a request has at most 1024: ask for fewer";
    assert_eq!(
        (status, &answer["error"]["message"]),
        (400, &json!(message))
    );
    let (status, answer) = asked(10);
    assert_eq!(status, 200);
    assert_eq!(answer["choices"].as_array().unwrap().len(), 1000);
}

/// Lists within lists are indented by the square of their depth: 3 MB would become 600.
#[test]
fn a_conversation_that_its_template_would_blow_up_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(
            crate::common::folder("llama3").join(file),
            folder.path().join(file),
        )
        .unwrap();
    }
    let template =
        "{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{{ messages[0].content }}";
    std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
    let text = Text::read(folder.path()).unwrap();
    let engine = crate::common::engine("llama3", Limits::default());
    let server = Server::with(engine, text, |_| ());
    let mut deep = json!(0);
    for _ in 0..100 {
        deep = json!([deep]);
    }
    let parameters = vec![deep; 15_000];
    let tools = json!([{"type": "function", "function": {"name": "a", "parameters": parameters}}]);
    let messages = json!([{"role": "user", "content": "a"}]);
    let (status, said) = server.chat(&json!({"messages": messages, "tools": tools}));
    assert_eq!(status, 400, "{said}");
    assert!(
        said.contains("the chat template writes more than"),
        "{said}"
    );
}

/// A client can change what the template refuses or cannot write, and not what is wrong with the template.
#[test]
fn faults_of_a_template_are_those_of_the_server() {
    let call = json!([{"type": "function", "function": {"name": "a", "arguments": "{}"}}]);
    let messages = json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": null, "tool_calls": call},
        {"role": "tool", "content": "b"},
    ]);
    let tools = json!([{"type": "function", "function": {"name": "a"}}]);
    for (template, status, failed, said) in [
        (
            "{{ tools }}{{ raise_exception('roles must alternate') }}",
            400,
            0,
            "roles must alternate: change the messages, or give a plain prompt",
        ),
        (
            "{{ tools }}{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}",
            400,
            0,
            "change the messages, or give a plain prompt",
        ),
        (
            "{{ messages[1].content.strip() }}{{ tools }}",
            400,
            0,
            "none has no method named strip: change the messages, or give a plain prompt",
        ),
        (
            "{% for t in tools %}{{ t.function.parameters.properties.a }}{% endfor %}",
            400,
            0,
            "change the messages, or give a plain prompt",
        ),
        (
            "{{ tools }}{{ strftime_now('%!') }}",
            500,
            1,
            "correct the template in the model's folder, or give a plain prompt",
        ),
        (
            "{{ tools }}{{ messages[0].content | no_such_filter }}",
            500,
            1,
            "the chat template fails: filter no_such_filter is unknown: correct the template in the model's folder, or give a \
             plain prompt",
        ),
    ] {
        let (_folder, text) = with_template(template, |_| ());
        let engine = crate::common::engine("qwen2", Limits::default());
        let server = Server::with(engine, text, |_| ());
        let asked = json!({"messages": messages, "tools": tools, "max_tokens": 1});
        let (got, answer) = server.chat(&asked);
        assert_eq!(got, status, "{answer}");
        let error = &body(&answer)["error"]["message"];
        assert!(error.as_str().unwrap().ends_with(said), "{answer}");
        server.has_metrics(&[
            ("requests_failed_total", failed),
            ("requests_refused_total", 1 - failed),
        ]);
    }
}

#[test]
fn clients_that_leave_within_a_body_are_counted() {
    let server = Server::of("llama3");
    let mut client = server.connect();
    let head =
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    write!(client, "{head}content-length: 90\r\n\r\n{{").unwrap();
    drop(client);
    server.wait_for("tandem_requests_left_total", 1);
    server.has_metrics(&[("requests_refused_total", 0), ("requests_failed_total", 0)]);
}

/// Programs give the largest numbers for no limit.
#[test]
fn a_server_may_have_no_limits() {
    let mut server = Server::start("llama3", Limits::default(), |options| {
        options.connections = usize::MAX;
        options.body_bytes = usize::MAX;
        [
            options.receive,
            options.idle,
            options.send,
            options.grace,
            options.keep_alive,
        ] = [Duration::MAX; 5];
    });
    let asked = json!({"prompt": "a", "max_tokens": 300, "ignore_eos": true});
    assert_eq!(server.complete(&asked).0, 200);
    let under_way = server.ask(&asked);
    server.wait_for("tandem_requests_total", 2);
    server.stop();
    assert_eq!(response(under_way).0, 200);
    server.ended().unwrap();
}

/// 64 pages of 16 tokens: a quarter of them are 256.
#[test]
fn a_chat_without_a_limit_takes_a_part_of_the_cache() {
    for (given, expected) in [(None, 256), (Some(5), 5), (Some(5000), 400)] {
        let limits = Limits {
            request_tokens: 450,
            ..Limits::default()
        };
        let server = Server::start("llama3", limits, |options| options.answer_tokens = given);
        let messages = json!([{"role": "user", "content": "Hello"}]);
        let asked = json!({"messages": messages, "ignore_eos": true});
        let usage = body(&server.chat(&asked).1)["usage"].clone();
        let generated = usage["completion_tokens"].as_u64().unwrap();
        match expected {
            400 => assert_eq!(usage["total_tokens"], 450, "{usage}"),
            expected => assert_eq!(generated, expected, "{usage}"),
        }
    }
}

/// Clients cannot change a field of the server's source.
#[test]
fn refusals_name_the_flags_of_the_server() {
    let refused = |server: &Server, asked: Value| {
        let (status, answer) = server.complete(&asked);
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        (status, message.to_owned())
    };
    let limits = Limits {
        request_tokens: 100,
        ..Limits::default()
    };
    let server = Server::start("llama3", limits, |options| {
        options.body_bytes = 1000;
        options.receive = Duration::from_millis(200);
    });
    let asked = json!({"prompt": [5, 6], "max_tokens": 99});
    let message = "2 tokens of the prompt and 99 of the answer are more than the 100 that a request to this server may have: use \
                   a shorter prompt or answer, or start the server with a larger --request-tokens";
    assert_eq!(refused(&server, asked), (400, message.to_owned()));
    let (status, message) = refused(&server, json!({"prompt": "a".repeat(1000)}));
    assert!(
        status == 413 && message.ends_with("with a larger --body-bytes"),
        "{message}"
    );
    let mut slow = server.connect();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
                content-length: 90\r\n\r\n{";
    std::io::Write::write_all(&mut slow, head.as_bytes()).unwrap();
    let (status, said) = response(slow);
    assert!(
        status == 408 && said.contains("within 0.2 s") && said.contains("--receive-timeout"),
        "{said}"
    );

    let architecture = Architecture::read(&folder("llama3")).unwrap();
    let weights = Weights::open(&folder("llama3")).unwrap();
    let backend = CpuBackend::load(architecture, &weights, &options(4, 16), &mut |_| ()).unwrap();
    let engine = Engine::new(Box::new(backend), Limits::default()).unwrap();
    let server = Server::with_engine(engine, "llama3", |_| ());
    let asked = json!({"prompt": vec![5; 60], "max_tokens": 6});
    let message = "the request needs 5 pages of the KV cache, which has 4: use a shorter prompt or answer, or start the server \
                   with a larger --cache";
    assert_eq!(refused(&server, asked), (400, message.to_owned()));
}
