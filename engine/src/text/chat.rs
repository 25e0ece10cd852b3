//! Chat templates: Jinja, with the few functions that models' templates call.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex},
    time::{SystemTime, UNIX_EPOCH},
};

use minijinja::{
    Environment, ErrorKind, State, Value, escape_formatter,
    syntax::SyntaxConfig,
    value::{Object, Serde, ValueKind},
};
use serde::{Deserialize, Serialize};
use serde_json::Map;

use super::{
    date::strftime,
    float::float,
    limit::{Beyond, Limited, cause, most_of},
    methods::method,
    tojson::tojson,
};
use crate::Error;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The author: usually `system`, `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
}

/// What a chat template gets beside the messages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatOptions {
    /// Tools that the model may call, in OpenAI's format.
    pub tools: Vec<serde_json::Value>,
    /// Variables of the template, such as `enable_thinking` of Qwen 3's.
    pub variables: Map<String, serde_json::Value>,
}

const NAME: &str = "chat";
/// Limit of instructions per rendering: a template comes with the model and must not block the server.
const FUEL: u64 = 50_000_000;
/// Variables that are not the caller's.
const OWN: [&str; 6] = [
    "add_generation_prompt",
    "bos_token",
    "documents",
    "eos_token",
    "messages",
    "tools",
];
/// The roles that all templates know.
const ROLES: [&str; 3] = ["system", "user", "assistant"];

#[derive(Debug)]
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    /// Variables that it reads, as far as its text shows: not those that it reads only to set them.
    variables: BTreeSet<String>,
    /// Functions, which are not the caller's to replace.
    functions: BTreeSet<String>,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    pub(super) fn new(source: String, bos: String, eos: String) -> Result<Self, Error> {
        let mut environment = Environment::new();
        // The settings of `transformers`.
        let mut syntax = SyntaxConfig::builder();
        syntax.trim_blocks(true).lstrip_blocks(true);
        environment.set_syntax(syntax.build().map_err(|error| refused(&error))?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(method);
        environment.add_filter("tojson", tojson);
        // `None` is not iterable; texts and objects have a length and items, which is what makes a sequence.
        environment.add_test("iterable", |value: &Value| {
            !value.is_none() && value.try_iter().is_ok()
        });
        environment.add_test("sequence", |value: &Value| {
            use ValueKind::{Map, Seq, String, Undefined};
            matches!(value.kind(), Seq | String | Map | Undefined)
        });
        environment.add_filter("string", |state: &State, value: &Value| {
            match value.kind() == ValueKind::Number && !value.is_integer() {
                true => Ok(float(f64::try_from(value.clone())?).into()),
                false => minijinja::filters::string(state, value),
            }
        });
        // As Python writes them.
        environment.set_formatter(|out, state, value| match value.kind() {
            ValueKind::None => Ok(out.write_str("None")?),
            ValueKind::Bool => Ok(out.write_str(if value.is_true() { "True" } else { "False" })?),
            ValueKind::Number if !value.is_integer() => {
                Ok(out.write_str(&float(f64::try_from(value.clone())?))?)
            }
            _ => escape_formatter(out, state, value),
        });
        environment.add_function("raise_exception", |reason: String| {
            let error = minijinja::Error::new(ErrorKind::InvalidOperation, reason);
            Err::<String, _>(error.with_source(Raised))
        });
        // Templates that write today's date call it.
        environment.add_function("strftime_now", |format: &str| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            strftime(format, now.map_or(0, |now| now.as_secs())).map_err(|wrong| {
                let reason = format!("strftime_now knows no {wrong}");
                minijinja::Error::new(ErrorKind::InvalidOperation, reason).with_source(Fault)
            })
        });
        environment
            .add_template_owned(NAME, without_marks(&source))
            .map_err(|error| refused(&error))?;
        let template = environment.get_template(NAME);
        let template = template.map_err(|error| refused(&error))?;
        let mut variables: BTreeSet<_> = template.undeclared_variables(false).into_iter().collect();
        let functions = environment.globals().map(|(name, _)| name.to_owned());
        let functions: BTreeSet<_> = functions.collect();
        variables.retain(|name| !functions.contains(name));
        Ok(Self {
            variables,
            functions,
            environment,
            bos,
            eos,
        })
    }

    pub(super) fn render(
        &self,
        messages: &[impl Serialize],
        options: &ChatOptions,
    ) -> Result<String, Error> {
        let most = most_of(&(messages, &options.tools, &options.variables));
        let values: Vec<_> = messages.iter().map(|one| Value::from(Serde(one))).collect();
        let read = Arc::new(Read::default());
        let rendered = self.write(&values, options, most, &read);
        // A template that reads no tools often fails for a message with calls, which has no content.
        self.check_read(options, &read)?;
        let rendered = rendered?;
        check_roles(&values, &rendered)?;
        let called = messages.iter().zip(0..).find_map(|(message, index)| {
            let renamed = with_renamed_call(message)?;
            Some((index, renamed))
        });
        if let Some((index, renamed)) = called {
            let mut values = values;
            values[index] = Value::from(Serde(renamed));
            // If the call has another name, a template that writes it writes another text. Its name may be among the tools,
            // too.
            let other = self.write(&values, options, most.saturating_mul(2), &read);
            if other.is_ok_and(|other| other == rendered) {
                return left_out("tool_calls".to_owned());
            }
        }
        Ok(rendered)
    }

    /// What the template writes, up to a number of bytes. `read` gets the variables that it looks up.
    fn write(
        &self,
        messages: &[Value],
        options: &ChatOptions,
        most: usize,
        read: &Arc<Read>,
    ) -> Result<String, Error> {
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|error| refused(&error))?;
        let tools = Some(&options.tools).filter(|tools| !tools.is_empty());
        let own = [
            ("messages", messages.iter().cloned().collect()),
            ("tools", Value::from(Serde(tools))),
            ("documents", ().into()),
            ("add_generation_prompt", true.into()),
            ("bos_token", self.bos.as_str().into()),
            ("eos_token", self.eos.as_str().into()),
        ];
        let given = options.variables.iter();
        let given = given.map(|(name, value)| (name.as_str(), Value::from(Serde(value))));
        let context = Context {
            values: Value::from_pairs(given.chain(own)),
            read: Arc::clone(read),
        };
        let mut text = Limited::new(most);
        let rendered = template.render_captured_to(Value::from_object(context), &mut text);
        match (text.beyond(), rendered.map(drop)) {
            (Some(Beyond { limit }), _) => Err(Error::ChatTooLong { limit }),
            (None, Err(error)) => Err(refused(&error)),
            (None, Ok(())) => Ok(text.into_string()),
        }
    }

    /// Refuses variables and tools that the template does not read: neither in this rendering nor, as its text shows, in
    /// another one.
    fn check_read(&self, options: &ChatOptions, read: &Read) -> Result<(), Error> {
        let read = read.0.lock().expect("nothing panics while it is held");
        let reads = |name: &str| self.variables.contains(name) || read.contains(name);
        let own = |name: &str| OWN.contains(&name) || self.functions.contains(name);
        let mut given = options.variables.keys();
        if let Some(name) = given.find(|name| own(name) || !reads(name)) {
            let known: BTreeSet<_> = self.variables.union(&read).map(String::as_str).collect();
            let known: Vec<_> = known.into_iter().filter(|name| !own(name)).collect();
            let known = match known.is_empty() {
                true => "none".to_owned(),
                false => known.join(", "),
            };
            return left_out(format!("a variable {name} (it has {known})"));
        }
        match options.tools.is_empty() || reads("tools") {
            true => Ok(()),
            false => left_out("tools".to_owned()),
        }
    }
}

/// Names that a template looked up.
#[derive(Debug, Default)]
struct Read(Mutex<BTreeSet<String>>);

/// The variables of a template, and which of them it looks up. Its text alone does not show all: in
/// `{% set thinking = thinking | default(false) %}` the name is that of a variable of the template, too.
#[derive(Debug)]
struct Context {
    values: Value,
    read: Arc<Read>,
}

impl Object for Context {
    fn get_value(self: &Arc<Self>, name: &Value) -> Option<Value> {
        let name = name.as_str()?;
        let mut read = self.read.0.lock().expect("nothing panics while it is held");
        if !read.contains(name) {
            read.insert(name.to_owned());
        }
        let value = self.values.get_attr(name).ok();
        value.filter(|value| !value.is_undefined())
    }
}

/// A template called `raise_exception`.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the template refuses the conversation")]
struct Raised;

/// A template asks for what there is not.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("no conversation changes this")]
struct Fault;

fn left_out<T>(what: String) -> Result<T, Error> {
    Err(Error::NotInTemplate { what })
}

/// Refuses messages that the template left out: many templates write only the roles that they know. The first of each role
/// stands for the others.
fn check_roles(messages: &[Value], rendered: &str) -> Result<(), Error> {
    let field = |of: &Value, name: &str| of.get_attr(name).unwrap_or_default();
    let mut known: BTreeSet<_> = ROLES.map(str::to_owned).into();
    for message in messages {
        let role = field(message, "role");
        let role = role.as_str().unwrap_or_default();
        if known.contains(role) {
            continue;
        }
        known.insert(role.to_owned());
        let content = field(message, "content");
        let content = content.as_str().unwrap_or_default().trim();
        // Some templates write results of tools as JSON.
        let json = serde_json::Value::from(content).to_string();
        if !rendered.contains(content) && !rendered.contains(json.trim_matches('"')) {
            return left_out(format!("messages of role {role:?}"));
        }
    }
    Ok(())
}

/// A message whose first call has another name; none if it has no calls.
fn with_renamed_call(message: &impl Serialize) -> Option<serde_json::Value> {
    let mut message = serde_json::to_value(message).ok()?;
    let name = message.pointer_mut("/tool_calls/0/function/name")?;
    let other = format!("{}_", name.as_str()?);
    *name = other.into();
    Some(message)
}

/// Without `{% generation %}` and `{% endgeneration %}`, which mark for training what a model writes, and write nothing.
fn without_marks(source: &str) -> String {
    let mut rest = source;
    let mut text = String::with_capacity(source.len());
    while let Some((before, block)) = rest.split_once("{%") {
        text += before;
        text += "{%";
        let end = block.find("%}").unwrap_or(block.len());
        let inner = block[..end].trim_matches(['-', '+']).trim();
        text += &match inner {
            "generation" => block[..end].replace(inner, "if true"),
            "endgeneration" => block[..end].replace(inner, "endif"),
            _ => block[..end].to_owned(),
        };
        rest = &block[end..];
    }
    text + rest
}

fn refused(error: &minijinja::Error) -> Error {
    if let Some(Beyond { limit }) = cause(error) {
        return Error::ChatTooLong { limit };
    }
    let reason = error
        .detail()
        .map_or_else(|| error.to_string(), str::to_owned);
    match is_fault(error) && cause::<Raised>(error).is_none() {
        true => Error::BrokenTemplate { reason },
        false => Error::ChatTemplate { reason },
    }
}

/// Whether a template is wrong for all conversations. A sound one fails for some: it joins the content of messages, which may be
/// null, or reads what a tool lacks. A method may be unknown because a value is null, and a long conversation takes much fuel.
fn is_fault(error: &minijinja::Error) -> bool {
    use ErrorKind::{
        BadEscape, InvalidDelimiter, MissingArgument, SyntaxError, TemplateNotFound,
        TooManyArguments, UnknownFilter, UnknownFunction, UnknownTest,
    };
    let of_kind = matches!(
        error.kind(),
        BadEscape
            | InvalidDelimiter
            | MissingArgument
            | SyntaxError
            | TemplateNotFound
            | TooManyArguments
            | UnknownFilter
            | UnknownFunction
            | UnknownTest
    );
    of_kind || cause::<Fault>(error).is_some()
}
