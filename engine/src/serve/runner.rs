//! The thread that runs the engine.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Instant,
};

use tandem_schedule::{RequestId, ScheduleError};
use tokio::sync::{mpsc, oneshot};

use super::{
    api::Refusal,
    metrics::{Metrics, Taken},
};
use crate::{Engine, Error, Event, Finish, Generation};

/// Capacity of the queue of requests that arrive during a step.
const ARRIVING: usize = 1024;

/// What a client receives.
#[derive(Debug)]
pub(super) enum Piece {
    Token(u32),
    Finished(Finish),
    /// The engine failed.
    Failed(String),
}

pub(super) struct Runner {
    submissions: mpsc::Sender<Submission>,
    alive: Arc<AtomicBool>,
}

struct Submission {
    generation: Generation,
    // Unbounded, because a slow client must not block the engine. An answer's maximum length limits it.
    pieces: mpsc::UnboundedSender<Piece>,
    taken: oneshot::Sender<Result<Taken, Refusal>>,
    begun: Instant,
}

/// A request under way. Its client has gone if the receiver of `pieces` is dropped.
struct Client {
    pieces: mpsc::UnboundedSender<Piece>,
    begun: Instant,
    last: Option<Instant>,
}

impl Runner {
    pub(super) fn start(engine: Engine, metrics: Arc<Metrics>) -> Self {
        let (submissions, arriving) = mpsc::channel(ARRIVING);
        let alive = Arc::new(AtomicBool::new(true));
        let flag = Arc::clone(&alive);
        thread::spawn(move || {
            // Set in `drop`, so that a panic of the thread sets it too.
            struct Ended(Arc<AtomicBool>);
            impl Drop for Ended {
                fn drop(&mut self) {
                    self.0.store(false, Ordering::Relaxed);
                }
            }
            let _ended = Ended(flag);
            run(engine, arriving, &metrics);
        });
        Self { submissions, alive }
    }

    pub(super) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Relaxed)
    }

    /// Submits a request to the engine. The time to its first token counts from `begun`. Dropping the returned value
    /// cancels it.
    pub(super) async fn submit(
        &self,
        generation: Generation,
        begun: Instant,
    ) -> Result<(Taken, mpsc::UnboundedReceiver<Piece>), Refusal> {
        let (pieces, receiver) = mpsc::unbounded_channel();
        let (taken, answer) = oneshot::channel();
        let submission = Submission {
            generation,
            pieces,
            taken,
            begun,
        };
        self.submissions
            .try_send(submission)
            .map_err(|error| match error {
                mpsc::error::TrySendError::Full(_) => Refusal::busy(),
                mpsc::error::TrySendError::Closed(_) => {
                    Refusal::failed("the engine has failed".to_owned())
                }
            })?;
        let taken = answer
            .await
            .map_err(|_| Refusal::failed("the engine has failed".to_owned()))?;
        taken.map(|taken| (taken, receiver))
    }
}

fn run(mut engine: Engine, mut arriving: mpsc::Receiver<Submission>, metrics: &Arc<Metrics>) {
    let mut clients = HashMap::new();
    loop {
        if engine.is_idle() {
            metrics.engine(&engine);
            // Nothing to do: wait for a request, and end when no sender is left.
            let Some(submission) = arriving.blocking_recv() else {
                return;
            };
            take(&mut engine, &mut clients, submission, metrics);
        }
        while let Ok(submission) = arriving.try_recv() {
            take(&mut engine, &mut clients, submission, metrics);
        }
        let gone = |(request, client): (&RequestId, &Client)| {
            client.pieces.is_closed().then_some(*request)
        };
        let gone: Vec<_> = clients.iter().filter_map(gone).collect();
        for request in gone {
            engine.cancel(request);
        }
        let step = engine.step(&mut |event| deliver(&mut clients, event, metrics));
        if let Err(error) = step {
            eprintln!("the engine has failed: {error}");
            for client in clients.values() {
                let _ = client.pieces.send(Piece::Failed(error.to_string()));
            }
            return;
        }
        metrics.engine(&engine);
    }
}

fn take(
    engine: &mut Engine,
    clients: &mut HashMap<RequestId, Client>,
    submission: Submission,
    metrics: &Arc<Metrics>,
) {
    let Submission {
        generation,
        pieces,
        taken,
        begun,
    } = submission;
    if taken.is_closed() {
        return;
    }
    let prompt = generation.prompt.len();
    let answer = match engine.submit(generation) {
        Ok(request) => {
            let client = Client {
                pieces,
                begun,
                last: None,
            };
            clients.insert(request, client);
            Ok(metrics.submitted(prompt))
        }
        Err(Error::Schedule(ScheduleError::QueueFull { .. })) => Err(Refusal::busy()),
        Err(error) => Err(error.into()),
    };
    let _ = taken.send(answer);
}

fn deliver(clients: &mut HashMap<RequestId, Client>, event: Event, metrics: &Metrics) {
    match event {
        Event::Token { request, token } => {
            let Some(client) = clients.get_mut(&request) else {
                return;
            };
            let now = Instant::now();
            match client.last.replace(now) {
                None => metrics.first_token(now - client.begun),
                Some(last) => metrics.next_token(now - last),
            }
            let _ = client.pieces.send(Piece::Token(token));
        }
        Event::Finished { request, reason } => {
            if let Some(client) = clients.remove(&request) {
                let _ = client.pieces.send(Piece::Finished(reason));
            }
        }
    }
}
