//! Renders chat templates with the constructs that models' templates use, and compares with what Jinja renders in the
//! environment of `transformers`. `fixtures/templates.py` makes both.

mod common;

use std::{fs, path::Path};

use serde::Deserialize;
use serde_json::{Map, Value, json};
use tandem_engine::{ChatOptions, Error, Text};

/// A template, and conversations with what it writes of them.
#[derive(Deserialize)]
struct Made {
    template: String,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    messages: Vec<Value>,
    tools: Vec<Value>,
    variables: Map<String, Value>,
    rendered: Option<String>,
    refused: Option<String>,
}

/// A tokenizer with a template.
fn with_template(template: &str) -> (tempfile::TempDir, Text) {
    let special = json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}});
    common::with_template(template, |to| {
        fs::write(to.join("tokenizer_config.json"), special.to_string()).expect("writable");
    })
}

#[test]
fn templates_are_rendered_as_by_jinja() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/templates.json");
    let made: Vec<Made> = serde_json::from_slice(&fs::read(path).expect("a fixture")).unwrap();
    let mut wrong = String::new();
    for Made { template, cases } in made {
        let (_folder, text) = with_template(&template);
        for case in cases {
            let options = ChatOptions {
                tools: case.tools,
                variables: case.variables,
            };
            let got = text.render_with(&case.messages, &options);
            let right = match (&got, &case.rendered, &case.refused) {
                (Ok(got), Some(right), None) => got == right,
                (Err(Error::ChatTemplate { reason }), None, Some(right)) => reason == right,
                _ => false,
            };
            if !right {
                let expected = case.rendered.or(case.refused).unwrap_or_default();
                wrong += &format!("{template}\n  gives {got:?}\n  not {expected:?}\n\n");
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

#[test]
fn what_a_template_leaves_out_is_refused() {
    let plain = "{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.content }}{% endfor %}{{ tone }}";
    let refused = |template: &str, messages: Value, options: &ChatOptions| {
        let (_folder, text) = with_template(template);
        let messages = messages.as_array().unwrap();
        let error = text.render_with(messages, options).unwrap_err();
        assert!(matches!(error, Error::NotInTemplate { .. }), "{error:?}");
        error.to_string()
    };
    let variables = |given: Value| ChatOptions {
        variables: given.as_object().unwrap().clone(),
        ..ChatOptions::default()
    };
    let user = json!([{"role": "user", "content": "a"}]);
    let given = variables(json!({"tone": "b"}));
    let (_folder, text) = with_template(plain);
    let rendered = text.render_with(user.as_array().unwrap(), &given);
    assert_eq!(rendered.unwrap(), "ab");
    assert_eq!(
        refused(
            plain,
            user.clone(),
            &variables(json!({"enable_thinking": false}))
        ),
        "the model's chat template does not write a variable enable_thinking (it has tone): leave it out, or give a template \
         that does"
    );
    // The program's own variables are not the caller's.
    refused(plain, user.clone(), &variables(json!({"messages": []})));
    let with_tools = ChatOptions {
        tools: vec![json!({"type": "function"})],
        ..ChatOptions::default()
    };
    refused(plain, user, &with_tools);
    let tool = json!([{"role": "tool", "content": "a"}]);
    refused(plain, tool, &ChatOptions::default());
    let call = json!([{"role": "assistant", "content": "b", "tool_calls": [{"function": {"name": "weather"}}]}]);
    refused(plain, call.clone(), &ChatOptions::default());
    // The name of a call is among the tools, too.
    let with_tools = ChatOptions {
        tools: vec![json!({"type": "function", "function": {"name": "weather"}})],
        ..ChatOptions::default()
    };
    let no_calls = format!("{{{{ tools | tojson }}}}{plain}");
    let said = refused(&no_calls, call, &with_tools);
    assert!(said.contains("does not write tool_calls"), "{said}");
}

/// A variable of a rendering, not those that another conversation would need, decides.
#[test]
fn variables_that_are_read_only_to_be_set_are_named() {
    let template =
        "{% set thinking = thinking | default(false) %}{% if tone %}{% endif %}{{ thinking }}";
    let (_folder, text) = with_template(template);
    let user = [json!({"role": "user", "content": "a"})];
    let render = |given: Value| {
        let options = ChatOptions {
            variables: given.as_object().unwrap().clone(),
            ..ChatOptions::default()
        };
        text.render_with(&user, &options)
    };
    assert_eq!(render(json!({"thinking": true})).unwrap(), "True");
    let said = render(json!({"other": 1})).unwrap_err().to_string();
    assert!(said.contains("(it has thinking, tone)"), "{said}");
    // Functions are not the caller's.
    let said = render(json!({"range": 1})).unwrap_err().to_string();
    assert!(said.contains("a variable range"), "{said}");
}

/// Hermes 2 Pro and 3, for two, have another template for conversations with tools.
#[test]
fn tools_are_written_by_the_template_for_them() {
    let user = [json!({"role": "user", "content": "a"})];
    let without = ChatOptions::default();
    let with = ChatOptions {
        tools: vec![json!({"type": "function"})],
        ..ChatOptions::default()
    };
    let tools = "{{ tools | tojson }}{{ bos_token }}{{ messages[0].content }}";
    let usual = "{{ messages[0].content }}";
    let named = |name: &str, template: &str| json!({"name": name, "template": template});
    let list = json!([named("default", usual), named("tool_use", tools)]);
    let written = "[{\"type\": \"function\"}]<s>a";
    let read = |write: &dyn Fn(&Path)| {
        let (folder, _) = common::with_template("", write);
        Text::read(folder.path()).unwrap()
    };
    let settings = |to: &Path, templates: &Value| {
        let settings = json!({"bos_token": "<s>", "chat_template": templates});
        fs::write(to.join("tokenizer_config.json"), settings.to_string()).unwrap();
    };
    let file = |to: &Path, name: &str, template: &str| {
        fs::create_dir_all(to.join("additional_chat_templates")).unwrap();
        fs::write(to.join(name), template).unwrap();
    };
    let only_settings = read(&|to| {
        settings(to, &list);
        fs::remove_file(to.join("chat_template.jinja")).unwrap();
    });
    let files = read(&|to| {
        settings(to, &json!("another one"));
        file(to, "chat_template.jinja", usual);
        file(to, "additional_chat_templates/tool_use.jinja", tools);
    });
    for text in [only_settings, files] {
        assert_eq!(text.render_with(&user, &without).unwrap(), "a");
        assert_eq!(text.render_with(&user, &with).unwrap(), written);
    }
    // As for `transformers`, the file replaces the whole list.
    let replaced = read(&|to| {
        settings(to, &list);
        file(to, "chat_template.jinja", usual);
    });
    let refused = replaced.render_with(&user, &with).unwrap_err();
    assert!(matches!(refused, Error::NotInTemplate { .. }), "{refused}");
}

/// Processors for texts and pictures, such as Mistral Small 3.1's, have their template there, and their tokenizers have none.
#[test]
fn templates_of_processors_are_read_last() {
    let user = [json!({"role": "user", "content": "a"})];
    let written = |of_settings: Option<&str>, of_processor: &str| {
        let (folder, _) = common::with_template("", |to| {
            fs::remove_file(to.join("chat_template.jinja")).unwrap();
            let settings = json!({"bos_token": "<s>", "chat_template": of_settings}).to_string();
            fs::write(to.join("tokenizer_config.json"), settings).unwrap();
            fs::write(to.join("chat_template.json"), of_processor).unwrap();
        });
        Text::read(folder.path())?.render_with(&user, &ChatOptions::default())
    };
    let processor =
        json!({"chat_template": "{{ bos_token }}{{ messages[0].content }}"}).to_string();
    assert_eq!(written(None, &processor).unwrap(), "<s>a");
    let of_settings = Some("{{ messages[0].content }}");
    assert_eq!(written(of_settings, &processor).unwrap(), "a");
    let none = written(None, "{}").unwrap_err();
    assert!(matches!(none, Error::NoChatTemplate), "{none:?}");
}

#[test]
fn a_damaged_template_of_a_processor_is_named() {
    let copy = tempfile::tempdir().unwrap();
    let tokenizer = "tokenizer.json";
    fs::copy(
        common::folder("qwen2").join(tokenizer),
        copy.path().join(tokenizer),
    )
    .unwrap();
    fs::write(copy.path().join("chat_template.json"), "{").unwrap();
    let refused = Text::read(copy.path()).unwrap_err();
    assert!(
        matches!(&refused, Error::Malformed { path, .. } if path.ends_with("chat_template.json")),
        "{refused:?}"
    );
}

/// 4 MB of lists within lists would be a gigabyte.
#[test]
fn what_templates_write_is_limited() {
    let mut deep = json!(0);
    for _ in 0..100 {
        deep = json!([deep]);
    }
    let tool = |lists: usize| json!({"type": "function", "function": {"name": "a", "parameters": vec![deep.clone(); lists]}});
    let user = [json!({"role": "user", "content": "a"})];
    let thrice = "{% for t in tools %}{{ t | tojson }}{{ t | tojson }}{{ t | tojson }}{% endfor %}";
    let indented = "{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}";
    // The value that is written, and the value and its rest of the conversation.
    for (template, fits, beyond) in [(indented, 1, 1000), (thrice, 100, 2000)] {
        let (_folder, text) = with_template(template);
        let written = |lists: usize| {
            let options = ChatOptions {
                tools: vec![tool(lists)],
                ..ChatOptions::default()
            };
            (
                text.render_with(&user, &options),
                json!(options.tools).to_string().len(),
            )
        };
        assert!(written(fits).0.is_ok(), "{template}");
        let (refused, given) = written(beyond);
        let Err(Error::ChatTooLong { limit }) = refused else {
            panic!("{template}: {:?}", refused.map(|text| text.len()));
        };
        assert!(
            limit.abs_diff(2 * given + (256 << 10)) < 200,
            "{limit} of {given}"
        );
    }
}
