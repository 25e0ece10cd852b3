//! What a model's files say, and what requests say about it.

use serde_json::{Value, json};
use tandem_engine::Limits;

use crate::server::Server;

/// As with a `generation_config.json` that has `"do_sample": false`.
#[test]
fn a_request_that_says_nothing_is_drawn_as_the_model_says() {
    let greedy = Server::start("qwen2", Limits::default(), |options| {
        options.sampling.temperature = Some(0.0);
    });
    let usual = Server::of("qwen2");
    let text = |server: &Server, more: Value| {
        let mut asked = json!({"prompt": "The planner", "max_tokens": 8});
        for (name, value) in more.as_object().unwrap() {
            asked[name] = value.clone();
        }
        let (status, answer) = server.complete(&asked);
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let right = text(&usual, json!({"temperature": 0}));
    assert_eq!(text(&greedy, json!({})), right);
    assert_eq!(text(&greedy, json!({"temperature": null})), right);
    // What a request says counts, and without the model's word the temperature is 1.
    let drawn = text(&greedy, json!({"temperature": 9, "seed": 3}));
    assert_ne!(drawn, right);
    assert_eq!(text(&usual, json!({"temperature": 9, "seed": 3})), drawn);
    let once = text(&usual, json!({"seed": 3}));
    assert_eq!(text(&greedy, json!({"temperature": 1, "seed": 3})), once);
    // Who gives a seed wants tokens drawn.
    assert_eq!(text(&greedy, json!({"seed": 3})), once);
}
