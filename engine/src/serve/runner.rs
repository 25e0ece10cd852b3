//! The thread that runs the engine.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, OnceLock},
    thread,
    time::Instant,
};

use tandem_schedule::{RequestId, ScheduleError};
use tokio::sync::{mpsc, oneshot};

use super::{
    ServeError,
    clients::{Client, Clients, Wanted},
    metrics::{Counted, Metrics, Whole},
    places::{Place, Places},
    refusal::Refusal,
};
use crate::{Engine, Error, Event, Finish, LogProbs};

/// What a client receives.
#[derive(Debug)]
pub(super) enum Piece {
    /// The first step of its request began.
    Started {
        cached: u32,
    },
    Token(u32, Option<LogProbs>),
    Finished(Finish),
    /// The engine failed.
    Failed(String),
}

/// A request that the engine accepted. Dropping it cancels the request.
#[derive(Debug)]
pub(super) struct Taken {
    pub pieces: mpsc::UnboundedReceiver<Piece>,
    counted: Counted,
}

impl Taken {
    /// Its answer has come to its end. The engine drops the request, if it still has it.
    pub(super) fn completed(&mut self) {
        self.counted.completed();
        self.pieces.close();
    }

    pub(super) fn failed(&mut self) {
        self.counted.failed();
        self.pieces.close();
    }
}

pub(super) struct Runner {
    // The places limit their number.
    submissions: mpsc::UnboundedSender<Submission>,
    /// Why the engine failed.
    failure: Arc<OnceLock<String>>,
}

/// What the thread of an engine says.
pub(super) struct Running {
    /// Why the engine failed, if it does.
    pub failure: oneshot::Receiver<ServeError>,
    /// Ends when the engine has been dropped.
    pub ended: oneshot::Receiver<()>,
}

/// The choices of a request, and a place for each.
struct Submission {
    choices: Vec<(Wanted, Place)>,
    taken: oneshot::Sender<Result<Vec<Taken>, Refusal>>,
    begun: Instant,
}

impl Runner {
    /// Starts the thread.
    pub(super) fn start(
        mut engine: Engine,
        metrics: Arc<Metrics>,
        warn: fn(&str),
    ) -> Result<(Self, Running), ServeError> {
        let (submissions, mut arriving) = mpsc::unbounded_channel();
        let (failed, failure) = oneshot::channel();
        let (ending, ended) = oneshot::channel();
        let why = Arc::new(OnceLock::new());
        let runner = Self {
            submissions,
            failure: Arc::clone(&why),
        };
        let thread = thread::Builder::new().name("engine".to_owned());
        let spawned = thread.spawn(move || {
            let _ending: oneshot::Sender<()> = ending;
            let mut clients = Clients::default();
            let mut work = || run(&mut engine, &mut clients, &mut arriving, &metrics, warn);
            let error = match catch_unwind(AssertUnwindSafe(&mut work)) {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(ServeError::Engine(error)),
                Err(panic) => Some(ServeError::Panic(message(&*panic))),
            };
            if let Some(error) = error {
                // The server says so before anyone hears of it.
                let why = why.get_or_init(|| error.to_string());
                clients.failed(why);
                let _ = failed.send(error);
            }
            drop((clients, arriving));
            // This frees the memory of the device, and may take a while.
            drop(engine);
        });
        spawned.map_err(ServeError::Runtime)?;
        Ok((runner, Running { failure, ended }))
    }

    /// Why the engine failed, if it did.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    fn failed(&self) -> Refusal {
        Refusal::failed(self.failure().unwrap_or("the engine has ended"))
    }

    /// Submits the choices of a request to the engine, which takes all of them or none. The time to their first tokens
    /// counts from `begun`.
    pub(super) async fn submit(
        &self,
        choices: Vec<(Wanted, Place)>,
        begun: Instant,
    ) -> Result<Vec<Taken>, Refusal> {
        let (taken, answer) = oneshot::channel();
        let submission = Submission {
            choices,
            taken,
            begun,
        };
        let sent = self.submissions.send(submission);
        sent.map_err(|_| self.failed())?;
        answer.await.map_err(|_| self.failed())?
    }
}

/// What a panic said.
fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("without a message").to_owned()
}

fn run(
    engine: &mut Engine,
    clients: &mut Clients,
    arriving: &mut mpsc::UnboundedReceiver<Submission>,
    metrics: &Arc<Metrics>,
    warn: fn(&str),
) -> Result<(), Error> {
    loop {
        if engine.is_idle() {
            metrics.engine(engine);
            // Nothing to do: wait for a request, and end when no sender is left.
            let Some(submission) = arriving.blocking_recv() else {
                return Ok(());
            };
            take(engine, clients, submission, metrics);
        }
        while let Ok(submission) = arriving.try_recv() {
            take(engine, clients, submission, metrics);
        }
        let gone = |(request, client): (&RequestId, &Client)| {
            client.pieces.is_closed().then_some(*request)
        };
        let gone: Vec<_> = clients.by_request.iter().filter_map(gone).collect();
        for request in gone {
            engine.cancel(request);
        }
        let step = engine.step(&mut |event| deliver(clients, event, metrics))?;
        engine.warnings().iter().for_each(|what| warn(what));
        let composer = engine.composer();
        let all = Places::of(composer.limits());
        let room = all.saturating_sub(composer.running() + composer.waiting());
        for _ in 0..room.min(clients.ready.len()) {
            let (wanted, client) = clients.ready.remove(0);
            follow(engine, clients, wanted, client);
        }
        metrics.step(&step);
        metrics.engine(engine);
    }
}

fn take(
    engine: &mut Engine,
    clients: &mut Clients,
    submission: Submission,
    metrics: &Arc<Metrics>,
) {
    let Submission {
        choices,
        taken,
        begun,
    } = submission;
    if taken.is_closed() {
        metrics.left();
        return;
    }
    let (mut first, mut all) = (Vec::<(RequestId, Arc<[u32]>, Client)>::new(), Vec::new());
    // Only whole pages are shared.
    let page = engine
        .composer()
        .prefix_cache()
        .map(|_| engine.composer().pool().page_size());
    for (wanted, place) in choices {
        let (pieces, receiver) = mpsc::unbounded_channel();
        let whole = Arc::new(Whole::new(metrics, begun));
        let client = Client {
            pieces,
            begun,
            whole: Arc::clone(&whole),
            last: None,
            place,
            behind: Vec::new(),
        };
        let prompt = Arc::clone(&wanted.prompt);
        all.push((receiver, prompt.len(), whole));
        if let Some((_, same, before)) = first.last_mut()
            && (Arc::ptr_eq(same, &prompt) || *same == prompt)
            && page.is_some_and(|page| prompt.len() > page as usize)
        {
            // The engine takes it, as it took the first: only their seeds differ.
            before.behind.push((wanted, client));
            continue;
        }
        match engine.submit(wanted.whole()) {
            Ok(request) => first.push((request, prompt, client)),
            Err(error) => {
                for (request, ..) in first {
                    engine.cancel(request);
                }
                let refusal = match error {
                    // Cancelled requests give their places back before the step that has them ends.
                    Error::Schedule(ScheduleError::QueueFull { waiting }) => {
                        Refusal::busy(&format!("{waiting} requests wait, as many as may"))
                    }
                    error => error.into(),
                };
                let _ = taken.send(Err(refusal));
                return;
            }
        }
    }
    let first = first
        .into_iter()
        .map(|(request, _, client)| (request, client));
    clients.by_request.extend(first);
    let all = all.into_iter().map(|(pieces, prompt, whole)| Taken {
        pieces,
        counted: metrics.submitted(prompt, whole),
    });
    let _ = taken.send(Ok(all.collect()));
}

/// Submits a choice whose prompt another one has computed.
fn follow(engine: &mut Engine, clients: &mut Clients, wanted: Wanted, client: Client) {
    if client.pieces.is_closed() {
        return;
    }
    match engine.submit(wanted.whole()) {
        Ok(request) => drop(clients.by_request.insert(request, client)),
        Err(error) => drop(client.pieces.send(Piece::Failed(error.to_string()))),
    }
}

/// Gives a client what happened to its request. The choices behind it are ready once its prompt is computed or it has ended.
fn deliver(clients: &mut Clients, event: Event, metrics: &Metrics) {
    let Clients { by_request, ready } = clients;
    match event {
        Event::Started {
            request,
            cached_tokens: cached,
        } => {
            if let Some(client) = by_request.get(&request) {
                metrics.started(client.begun.elapsed());
                let _ = client.pieces.send(Piece::Started { cached });
            }
        }
        Event::Token {
            request,
            token,
            log_probs,
        } => {
            let Some(client) = by_request.get_mut(&request) else {
                return;
            };
            ready.append(&mut client.behind);
            metrics.token();
            let now = Instant::now();
            match client.last.replace(now) {
                None => metrics.first_token(now - client.begun),
                Some(last) => metrics.next_token(now - last),
            }
            let _ = client.pieces.send(Piece::Token(token, log_probs));
        }
        Event::Finished { request, reason } => {
            if let Some(mut client) = by_request.remove(&request) {
                ready.append(&mut client.behind);
                // A cancelled one may have ended with a stop text.
                if reason != Finish::Cancelled {
                    client.whole.ends();
                }
                let _ = client.pieces.send(Piece::Finished(reason));
            }
        }
    }
}
