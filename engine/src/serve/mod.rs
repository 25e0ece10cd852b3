//! A server with OpenAI's interface: completions and chat, streamed or whole, health, and metrics.
//!
//! | | |
//! |---|---|
//! | `POST /v1/completions`, `POST /v1/chat/completions` | a text; with `"stream": true` as server-sent events |
//! | `GET /v1/models`, `GET /v1/models/NAME` | the one model |
//! | `GET /health` | 200 while the engine runs and takes requests, else 503 |
//! | `GET /metrics` | Prometheus text |
//!
//! One thread has the engine. The server takes as many requests as the engine lets run and wait, and refuses more before it
//! tokenizes them (429). If a client disconnects, its request is cancelled before the next step. A slow client keeps only the
//! text that waits for it; a client that reads nothing is disconnected. Requests for features that are not implemented are
//! refused (400). A server that stops refuses new requests (503) and ends when the last answer does, or after the grace
//! period. If the engine fails, all requests get the reason (500), and the server ends with an error.

mod access;
mod answer;
mod api;
mod assembly;
mod clients;
mod connections;
mod fields;
mod handlers;
mod heads;
mod json;
mod lanes;
mod listen;
mod log_probs;
mod metrics;
mod options;
mod patience;
mod places;
mod receive;
mod refusal;
mod runner;

use std::{future::Future, io, net::SocketAddr, time::Duration};

use tokio::net::{TcpListener, TcpSocket};

use crate::{Engine, Error, Text};
pub use options::{ApiKey, ServeOptions};

/// Why a server ended before it was asked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// Its threads could not start.
    #[error("the server's threads cannot start: {0}")]
    Runtime(io::Error),
    /// Its address cannot be listened on.
    #[error("cannot listen on {address}: {error}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The reason.
        error: io::Error,
    },
    /// A step of the engine failed.
    #[error("the engine has failed: {0}")]
    Engine(#[source] Error),
    /// The engine's thread panicked.
    #[error("the engine has failed: its thread panicked: {0}")]
    Panic(String),
}

/// An address that a server is going to listen on. Until it [runs](Self::run), connections are refused.
#[derive(Debug)]
pub struct Bound {
    socket: TcpSocket,
    address: SocketAddr,
}

/// Takes an address for a server, before a model is loaded for minutes.
///
/// # Errors
/// [`ServeError::Listen`], also if another program listens on it.
pub fn bind(address: SocketAddr) -> Result<Bound, ServeError> {
    match listen::bind(address) {
        Ok(socket) => Ok(Bound { socket, address }),
        Err(error) => Err(ServeError::Listen { address, error }),
    }
}

impl Bound {
    /// Serves until `shutdown`; then as [`serve`] does. It has its own runtime. `ready` receives the address; for port 0 it has the
    /// port that the system chose.
    ///
    /// # Errors
    /// [`ServeError::Runtime`], [`ServeError::Listen`]; those of [`serve`].
    pub fn run(
        self,
        engine: Engine,
        text: Text,
        options: ServeOptions,
        shutdown: impl Future<Output = ()>,
        ready: impl FnOnce(SocketAddr),
    ) -> Result<(), ServeError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .map_err(ServeError::Runtime)?;
        let Self { socket, address } = self;
        let served = runtime.block_on(async {
            let listening = |error| ServeError::Listen { address, error };
            let listener = listen::listen(socket).map_err(listening)?;
            ready(listener.local_addr().map_err(listening)?);
            serve(listener, engine, text, options, shutdown).await
        });
        // Prompts may still be tokenized: their clients are gone.
        runtime.shutdown_background();
        served
    }
}

/// [Binds](bind) an address and [serves](Bound::run) on it.
///
/// # Errors
/// Those of both.
pub fn run(
    address: SocketAddr,
    engine: Engine,
    text: Text,
    options: ServeOptions,
    shutdown: impl Future<Output = ()>,
    ready: impl FnOnce(SocketAddr),
) -> Result<(), ServeError> {
    bind(address)?.run(engine, text, options, shutdown, ready)
}

/// How long an engine may take to end behind the last answer.
const ENGINE_ENDS: Duration = Duration::from_secs(5);

/// Serves on a listener until `shutdown`. The first requests find a device that has not run a step, unless its backend was
/// [warmed up](crate::calibrate::warm_up). After that, answers under way have the [grace period](ServeOptions::grace) to end.
/// Until the last of them has ended, the server refuses new requests with 503 and says so in `/health`.
///
/// # Errors
/// [`ServeError::Runtime`]; [`ServeError::Engine`] and [`ServeError::Panic`], at once. All requests get the reason, and so does `/health`.
pub async fn serve(
    listener: TcpListener,
    engine: Engine,
    text: Text,
    options: ServeOptions,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let (server, running) = handlers::Server::start(&listener, engine, text, options)?;
    let served = connections::accept(listener, &server, shutdown, running.failure).await;
    drop(server);
    // No request is left, and the step under way ends before the device's memory is freed.
    let _ = tokio::time::timeout(ENGINE_ENDS, running.ended).await;
    served
}
