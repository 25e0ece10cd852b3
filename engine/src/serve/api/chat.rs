//! What chats have beside the texts of their messages: tools, calls of tools, and variables of the template.

use serde_json::{Value, json};

use crate::{
    ChatOptions,
    serve::{
        fields::{self, Fields, Idle},
        refusal::Refusal,
    },
};

/// What the chat template gets beside the messages.
pub(super) fn options(fields: &mut Fields) -> Result<ChatOptions, Refusal> {
    let rule = "give a list of {\"type\": \"function\", \"function\": {\"name\": …}}";
    let tools = fields.take("tools", rule, tools)?.unwrap_or_default();
    // A template may write it, but no call is forced into its schema.
    let strict = |tool: &Value| tool["function"]["strict"] == true;
    if let Some(index) = tools.iter().position(strict) {
        let name = format!("tools[{index}].function.strict");
        let message = format!("{name} is true, and only false is implemented");
        return Err(Refusal::of(name, message));
    }
    let rule = "give \"auto\" or \"none\": a model's calls are its text here, and none is forced";
    let choice = fields.take("tool_choice", rule, |value| match value.as_str()? {
        "auto" => Some(true),
        "none" => Some(false),
        _ => None,
    })?;
    if fields.flag("parallel_tool_calls")? == Some(false) && !tools.is_empty() {
        let message = "parallel_tool_calls is false, and the number of calls is not limited here: leave it out";
        return Err(Refusal::of("parallel_tool_calls", message));
    }
    let variables = fields.take("chat_template_kwargs", "give an object", |value| {
        value.as_object().cloned()
    })?;
    Ok(ChatOptions {
        tools: if choice == Some(false) {
            Vec::new()
        } else {
            tools
        },
        variables: variables.unwrap_or_default(),
    })
}

fn tools(value: &Value) -> Option<Vec<Value>> {
    let tools = value.as_array()?;
    let sound = |tool: &Value| tool["type"] == "function" && tool["function"]["name"].is_string();
    tools.iter().all(sound).then(|| tools.clone())
}

/// The calls in a message of the assistant, with their arguments as objects: templates write them as JSON.
pub(super) fn calls(name: &str, calls: Vec<Value>) -> Result<Value, Refusal> {
    let calls = calls.into_iter().enumerate();
    calls
        .map(|(index, call)| one_call(&format!("{name}[{index}]"), call))
        .collect()
}

fn one_call(name: &str, call: Value) -> Result<Value, Refusal> {
    let Value::Object(call) = call else {
        let message = format!("{name} is {}: give an object", fields::shown(&call));
        return Err(Refusal::of(name, message));
    };
    let mut fields = Fields::new(format!("{name}."), call);
    let id = fields.take("id", "give a text", fields::text)?;
    let function = fields.need("function", "give an object", |value| {
        value.as_object().cloned()
    })?;
    fields.end(|field| match field {
        "type" => Idle::Values(vec![json!("function")]),
        // Streams of other servers have it.
        "index" => Idle::Any,
        _ => Idle::Empty,
    })?;
    let mut function = Fields::new(format!("{name}.function."), function);
    let called = function.need("name", "give a text", fields::text)?;
    let rule = "give an object, or a text that is the JSON of one";
    let arguments = function.need("arguments", rule, |value| match value {
        // Clients write so that there are none.
        Value::String(json) if json.is_empty() => Some(json!({})),
        Value::String(json) => serde_json::from_str(json).ok().filter(Value::is_object),
        object => Some(object.clone()).filter(Value::is_object),
    })?;
    function.end(|_| Idle::Empty)?;
    let mut call =
        json!({"type": "function", "function": {"name": called, "arguments": arguments}});
    if let Some(id) = id {
        call["id"] = id.into();
    }
    Ok(call)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::serve::api::{self, Kind, Prompt};

    fn parsed(body: &Value) -> Result<Prompt, Value> {
        let asked = api::parse(Kind::Chat, body.to_string().as_bytes(), "tiny");
        asked
            .map(|mut asked| asked.prompts.remove(0))
            .map_err(|refusal| refusal.body()["error"].clone())
    }

    fn with_call(call: &Value) -> Value {
        json!({"messages": [{"role": "assistant", "content": null, "tool_calls": [call]}]})
    }

    /// As clients send back what a model called.
    #[test]
    fn calls_and_their_results_are_taken() {
        let function = json!({"name": "weather", "arguments": "{\"place\": \"Bern\", \"at\": 9}"});
        let body = json!({
            "messages": [
                {"role": "user", "content": "a", "tool_calls": []},
                {"role": "assistant", "content": null,
                 "tool_calls": [{"id": "c1", "index": 0, "type": "function", "function": function}]},
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
            ],
            "tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}],
            "tool_choice": "auto", "parallel_tool_calls": true,
            "chat_template_kwargs": {"enable_thinking": false},
        });
        let Ok(Prompt::Chat(messages, options)) = parsed(&body) else {
            panic!("a chat");
        };
        let call = json!({
            "type": "function", "function": {"name": "weather", "arguments": {"place": "Bern", "at": 9}}, "id": "c1",
        });
        let expected = json!([
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        ]);
        assert_eq!(Value::from(messages), expected);
        assert_eq!(Value::from(options.tools), body["tools"]);
        assert_eq!(Value::from(options.variables), body["chat_template_kwargs"]);
        // Clients write so that a call has no arguments.
        let call = json!({"function": {"name": "now", "arguments": ""}});
        let Ok(Prompt::Chat(messages, _)) = parsed(&with_call(&call)) else {
            panic!("a chat");
        };
        let called = &messages[0]["tool_calls"][0]["function"];
        assert_eq!(*called, json!({"name": "now", "arguments": {}}));
        // Without a choice of tools there are none.
        let mut none = body.clone();
        none["tool_choice"] = json!("none");
        assert!(matches!(parsed(&none), Ok(Prompt::Chat(_, options)) if options.tools.is_empty()));
    }

    /// What a model writes is not forced into a schema.
    #[test]
    fn strict_schemas_are_refused() {
        let with = |strict: Value| {
            let function = |strict: &Value| json!({"name": "b", "strict": strict});
            let tools = [Value::Null, strict]
                .map(|strict| json!({"type": "function", "function": function(&strict)}));
            parsed(&json!({"messages": [{"role": "user", "content": "a"}], "tools": tools}))
        };
        assert!(with(json!(false)).is_ok());
        let error = with(json!(true)).unwrap_err();
        assert_eq!(error["param"], "tools[1].function.strict");
        let message = "tools[1].function.strict is true, and only false is implemented";
        assert_eq!(error["message"], message);
    }

    #[test]
    fn what_is_not_rendered_is_refused() {
        let user = json!([{"role": "user", "content": "a"}]);
        let tools = json!([{"type": "function", "function": {"name": "b"}}]);
        let refused = |body: &Value, field: &str, part: &str| {
            let Err(error) = parsed(body) else {
                panic!("{body} is taken");
            };
            let message = error["message"].as_str().unwrap();
            assert!(error["param"] == field && message.contains(part), "{error}");
        };
        let auto = "give \"auto\" or \"none\"";
        for (field, value, part) in [
            ("tools", json!([{"type": "web_search"}]), "give a list of"),
            ("tool_choice", json!("required"), auto),
            (
                "tool_choice",
                json!({"type": "function", "function": {"name": "b"}}),
                auto,
            ),
            ("parallel_tool_calls", json!(false), "leave it out"),
            ("chat_template_kwargs", json!("a"), "give an object"),
            (
                "functions",
                json!([{"name": "b"}]),
                "only [] is implemented",
            ),
        ] {
            let mut body = json!({"messages": user, "tools": tools});
            body[field] = value;
            refused(&body, field, part);
        }
        let call = |function: Value| with_call(&json!({"function": function}));
        let prefix = "messages[0].tool_calls[0].function";
        let json = "the JSON of one";
        for (function, field, part) in [
            (json!({"arguments": "{}"}), "name", "is missing"),
            (json!({"name": "a", "arguments": "{"}), "arguments", json),
            (json!({"name": "a", "arguments": "[]"}), "arguments", json),
            (
                json!({"name": "a", "arguments": {}, "strict": true}),
                "strict",
                "not rendered",
            ),
        ] {
            refused(&call(function), &format!("{prefix}.{field}"), part);
        }
        refused(
            &with_call(&json!({"type": "custom", "function": {"name": "a", "arguments": {}}})),
            "messages[0].tool_calls[0].type",
            "only \"function\"",
        );
        for (message, field) in [
            (json!({"role": "assistant", "content": null}), "content"),
            (
                json!({"role": "user", "content": "a", "tool_call_id": "b"}),
                "tool_call_id",
            ),
            (
                json!({"role": "user", "content": "a", "tool_calls": [{}]}),
                "tool_calls",
            ),
        ] {
            refused(
                &json!({"messages": [message]}),
                &format!("messages[0].{field}"),
                "",
            );
        }
        // A completion has no template.
        let body = json!({"prompt": "a", "chat_template_kwargs": {}}).to_string();
        assert!(api::parse(Kind::Completion, body.as_bytes(), "tiny").is_err());
    }
}
