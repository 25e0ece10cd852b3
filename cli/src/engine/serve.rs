//! `tandem serve`: serves a model through OpenAI's interface.

use std::{
    env::{self, VarError},
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::{Duration, Instant},
};

use tandem_engine::{
    Backend, Message, Text,
    calibrate::warm_up,
    serve::{self, ApiKey, ServeError, ServeOptions},
};

use super::{ModelArgs, warn_of_no_end};
use crate::{
    Failure,
    cache_type::mention,
    input,
    output::{print, when_first_interrupted},
    serve_sim::at_least_1,
    table::visible,
};

const EXAMPLES: &str = "\
Examples:
  tandem serve Qwen3-0.6B
  tandem serve Llama-3.1-8B-Instruct --listen 127.0.0.1:8080 --cache 200000 --batch 128 --waiting 256
  curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{\"prompt\": \"Attention is\"}'";

/// Serve a model over HTTP with OpenAI's interface: completions and chat, streamed or whole, /health, /metrics.
///
/// By default, only this machine can reach the server. On another address, anyone who can reach it can use it: give a key. There
/// is no TLS.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Address and port to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8000", value_parser = address)]
    listen: SocketAddr,
    /// The model's name in the interface [default: the name of its folder]
    #[arg(long, value_parser = clap::builder::NonEmptyStringValueParser::new())]
    name: Option<String>,
    /// Maximum requests in a step
    #[arg(long, value_name = "REQUESTS", default_value_t = 64, value_parser = at_least_1)]
    batch: u32,
    /// Maximum number of requests that wait behind those of --batch, to be tokenized or computed; more are refused with 429
    #[arg(long, value_name = "REQUESTS", default_value_t = 128, value_parser = at_least_1)]
    waiting: u32,
    /// Maximum tokens of a request, prompt and answer [default: what the model and the cache have room for]
    #[arg(long, value_name = "TOKENS", value_parser = at_least_1)]
    request_tokens: Option<u32>,
    /// Maximum tokens of a chat's answer if the request has no max_tokens [default: 2048, or a quarter of the cache if that is
    /// less]
    #[arg(long, value_name = "TOKENS", value_parser = at_least_1)]
    answer_tokens: Option<u32>,
    /// Compute each prompt by itself, also what it has in common with earlier ones
    #[arg(long)]
    no_prefix_cache: bool,
    /// Maximum bytes of a request's body
    #[arg(long, value_name = "BYTES", default_value_t = ServeOptions::BODY_BYTES, value_parser = at_least_1)]
    body_bytes: u32,
    /// Maximum open connections; more wait to be accepted
    #[arg(long, value_name = "CONNECTIONS", default_value_t = ServeOptions::CONNECTIONS, value_parser = at_least_1)]
    connections: u32,
    /// Seconds in which a client must send the head of a request, and its body
    #[arg(long, value_name = "SECONDS", default_value_t = ServeOptions::RECEIVE_SECONDS, value_parser = at_least_1)]
    receive_timeout: u32,
    /// Seconds for which a connection stays open after an answer, for another request
    #[arg(long, value_name = "SECONDS", default_value_t = ServeOptions::IDLE_SECONDS, value_parser = at_least_1)]
    idle_timeout: u32,
    /// Seconds for which a client may accept no data of its answer; then its connection is closed and its request
    /// cancelled
    #[arg(long, value_name = "SECONDS", default_value_t = ServeOptions::SEND_SECONDS, value_parser = at_least_1)]
    send_timeout: u32,
    /// Seconds that answers under way may take after Ctrl-C or SIGTERM; a second one stops at once
    #[arg(long, value_name = "SECONDS", default_value_t = ServeOptions::GRACE_SECONDS)]
    grace: u32,
    /// Another name or IP address by which clients call the server, without a port; may be given several times. On a loopback
    /// address, or with this flag, requests to other hosts than localhost and these are refused, except those for /health
    #[arg(long, value_name = "NAME", value_parser = host)]
    allow_host: Vec<String>,
    /// File with a key that requests to /v1 must bring (Authorization: Bearer KEY) [default: the environment variable
    /// TANDEM_API_KEY, if it is set]
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
}

fn host(text: &str) -> Result<String, String> {
    // As in an address, IPv6 is in brackets.
    let bare = text
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    match bare.unwrap_or(text).parse::<IpAddr>() {
        Ok(address) => Ok(address.to_string()),
        Err(_) if text.is_empty() || text.contains([':', '/', '[']) => Err(
            "give a name or an IP address, without a port: llm.example, 10.0.0.2 or fd00::1"
                .to_owned(),
        ),
        Err(_) => Ok(text.to_owned()),
    }
}

/// Longest file with a key.
const MOST_KEY: u64 = 64 << 10;
const KEY_VARIABLE: &str = "TANDEM_API_KEY";

/// The key of the file, or else of the environment. An argument would show it to other users of the machine.
fn api_key(file: Option<&PathBuf>) -> Result<Option<ApiKey>, Failure> {
    let (key, of) = match (file, env::var(KEY_VARIABLE)) {
        (Some(file), _) => (
            input::text(file, MOST_KEY)?,
            format!(
                "--api-key-file {}",
                visible(&file.display().to_string(), false)
            ),
        ),
        (None, Ok(key)) => (key, KEY_VARIABLE.to_owned()),
        (None, Err(VarError::NotPresent)) => return Ok(None),
        (None, Err(VarError::NotUnicode(_))) => (String::new(), KEY_VARIABLE.to_owned()),
    };
    match ApiKey::new(key.trim_end()) {
        Some(key) => Ok(Some(key)),
        None => Err(Failure::Input(format!(
            "{of} has no key that a header can carry: give one line of visible ASCII characters, without spaces"
        ))),
    }
}

/// Says that chats will fail, if not even a short one can be written.
fn warn_of_template(text: &Text) {
    let message = Message {
        role: "user".to_owned(),
        content: "Hello".to_owned(),
    };
    if !text.has_chat_template() {
        eprintln!("the model has no chat template: chats are refused, and completions are served");
    } else if let Err(error) = text.render(&[message]) {
        let error = visible(&error.to_string(), false);
        eprintln!("a chat of one message cannot be written, so that others may fail, too: {error}");
    }
}

/// Runs the steps in which a device loads kernels, chooses algorithms and captures graphs, before the first request.
fn prepare(backend: &mut dyn Backend) -> Result<(), Failure> {
    if !backend.is_asynchronous() {
        return Ok(());
    }
    let begin = Instant::now();
    warm_up(backend)?;
    let warnings = backend.warnings();
    warnings.iter().for_each(|what| eprintln!("{what}"));
    let seconds = begin.elapsed().as_secs_f64();
    eprintln!("kernels and graphs of usual steps are ready after {seconds:.1} s");
    Ok(())
}

/// Refuses fixed splits beside the prefix cache: a text whose prompt finds pages there is computed in other chunks, so it would depend on
/// what was asked before.
fn check_splits(args: &Args) -> Result<(), Failure> {
    match args.model.fixed_splits {
        Some(tokens) if !args.no_prefix_cache => Err(Failure::Input(format!(
            "--fixed-splits {tokens} is for texts that do not depend on other requests, and with the prefix cache they do: give \
             --no-prefix-cache, too"
        ))),
        _ => Ok(()),
    }
}

fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        "give an IP address and a port, such as 127.0.0.1:8000, or 0.0.0.0:8000 for all addresses of this machine"
            .to_owned()
    })
}

/// Runs the subcommand until the process is interrupted and the answers under way have ended.
///
/// # Errors
/// [`Failure::Input`] for an invalid model, key, or address that cannot be listened on; [`Failure::Backend`]; the failure of the
/// engine.
pub fn run(args: &Args) -> Result<(), Failure> {
    let text = Text::read(args.model.folder()?)?;
    check_splits(args)?;
    let sampling = args.model.usual_sampling()?;
    let api_key = api_key(args.api_key_file.as_ref())?;
    let bound = serve::bind(args.listen)?;
    let architecture = args.model.architecture(&text)?;
    warn_of_no_end(&architecture);
    warn_of_template(&text);
    let mut backend = args.model.backend(architecture, args.batch, None)?;
    prepare(&mut *backend)?;
    let (batch, waiting) = (args.batch, args.waiting as usize);
    let request_tokens = args.request_tokens.unwrap_or(u32::MAX);
    let limits = (request_tokens, !args.no_prefix_cache);
    let engine = args.model.engine(backend, batch, waiting, limits)?;
    let name = args.name.clone().unwrap_or_else(|| {
        let folder = args
            .model
            .model
            .canonicalize()
            .unwrap_or_else(|_| args.model.model.clone());
        folder.file_name().map_or_else(
            || "model".to_owned(),
            |name| name.to_string_lossy().into_owned(),
        )
    });
    let device = engine.device() + &mention(engine.cache_type());
    let mut options = ServeOptions::new(name.clone());
    options.answer_tokens = args.answer_tokens;
    options.body_bytes = args.body_bytes as usize;
    options.connections = args.connections as usize;
    options.receive = Duration::from_secs(args.receive_timeout.into());
    options.idle = Duration::from_secs(args.idle_timeout.into());
    options.hosts.clone_from(&args.allow_host);
    options.api_key = api_key;
    options.warn = |what| eprintln!("{what}");
    options.sampling = sampling;
    options.send = Duration::from_secs(args.send_timeout.into());
    options.grace = Duration::from_secs(args.grace.into());
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let grace = args.grace;
    when_first_interrupted(move || {
        eprintln!("stopping: answers under way have {grace} s to end; Ctrl-C again stops at once");
        let _ = stop.send(());
    });
    let ready = |address| print(&format!("{name} on {device}, at http://{address}/v1\n"));
    // If the sender is dropped, nothing asks to stop.
    let stopped = async { stopped.await.unwrap_or(()) };
    Ok(bound.run(engine, text, options, stopped, ready)?)
}

impl From<ServeError> for Failure {
    fn from(error: ServeError) -> Self {
        match error {
            ServeError::Listen { .. } => Self::Input(format!("{error}: give another --listen")),
            // The engine took its input before, so that this is not wrong.
            _ => Self::Wrong(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use tandem_engine::Error;

    use super::*;

    #[test]
    fn hosts_are_names_or_addresses() {
        for (given, right) in [
            ("llm.example", "llm.example"),
            ("10.0.0.2", "10.0.0.2"),
            ("fd00:0::1", "fd00::1"),
            ("[fd00::1]", "fd00::1"),
        ] {
            assert_eq!(host(given).as_deref(), Ok(right));
        }
        for wrong in [
            "",
            "llm.example:80",
            "10.0.0.2:80",
            "[fd00::1]:80",
            "http://a",
            "[a]",
        ] {
            assert!(host(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_engine_that_fails_is_no_wrong_input() {
        let failure = Failure::from(ServeError::Engine(Error::NoStep));
        assert!(
            matches!(&failure, Failure::Wrong(said) if said.contains("no step")),
            "{failure:?}"
        );
    }
}
