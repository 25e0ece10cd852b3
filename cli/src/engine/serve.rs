//! `tandem serve`: serves a model through OpenAI's interface.

use std::{net::SocketAddr, time::Duration};

use tandem_engine::{
    Text,
    serve::{self, ServeOptions},
};

use super::{ModelArgs, warn_of_no_end};
use crate::{
    Failure,
    cache_type::mention,
    output::{print, when_first_interrupted},
    serve_sim::at_least_1,
};

const EXAMPLES: &str = "\
Examples:
  tandem serve Qwen3-0.6B
  tandem serve Llama-3.1-8B-Instruct --listen 127.0.0.1:8080 --cache 200000 --batch 128 --waiting 256
  curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{\"prompt\": \"Attention is\"}'";

/// Serve a model over HTTP with OpenAI's interface: completions and chat, streamed or whole, /health, /metrics.
///
/// There is no authentication: anyone who can reach the address can use the server. By default, only this machine can.
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
    /// Maximum number of requests that wait behind those of --batch; more are refused with 429
    #[arg(long, value_name = "REQUESTS", default_value_t = 128, value_parser = at_least_1)]
    waiting: u32,
    /// Seconds for which a client may accept no data of its answer; then its connection is closed and its request
    /// cancelled
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = at_least_1)]
    send_timeout: u32,
    /// Seconds that answers under way may take after Ctrl-C or SIGTERM; a second one stops at once
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    grace: u32,
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
/// [`Failure::Input`] for an invalid model or an address that cannot be listened on, [`Failure::Backend`].
pub fn run(args: &Args) -> Result<(), Failure> {
    let text = Text::read(args.model.folder()?)?;
    let architecture = args.model.architecture(&text)?;
    warn_of_no_end(&architecture);
    let engine = args
        .model
        .engine(architecture, args.batch, args.waiting as usize)?;
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
    options.send = Duration::from_secs(args.send_timeout.into());
    options.grace = Duration::from_secs(args.grace.into());
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let grace = args.grace;
    when_first_interrupted(move || {
        eprintln!("stopping: answers under way have {grace} s to end; Ctrl-C again stops at once");
        let _ = stop.send(());
    });
    let ready = |address| print(&format!("{name} on {device}, at http://{address}/v1\n"));
    serve::run(
        args.listen,
        engine,
        text,
        options,
        // If the sender is dropped, nothing asks to stop.
        async { stopped.await.unwrap_or(()) },
        ready,
    )
    .map_err(|error| {
        let address = args.listen;
        Failure::Input(format!(
            "cannot listen on {address}: {error}: give another --listen"
        ))
    })
}
