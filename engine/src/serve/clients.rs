//! Who receives what the engine computes.

use std::{collections::HashMap, sync::Arc, time::Instant};

use tandem_schedule::RequestId;
use tokio::sync::mpsc;

use super::{metrics::Whole, places::Place, runner::Piece};
use crate::Generation;

/// What is asked for a choice. All choices of a prompt share it: the engine takes a copy of it only with the choice.
#[derive(Debug)]
pub(super) struct Wanted {
    pub prompt: Arc<[u32]>,
    /// All but the prompt.
    pub beside: Generation,
}

impl Wanted {
    /// As the engine takes it.
    pub(super) fn whole(self) -> Generation {
        Generation {
            prompt: self.prompt.to_vec(),
            ..self.beside
        }
    }
}

/// A request under way. Its client has gone if the receiver of `pieces` is dropped.
pub(super) struct Client {
    // Unbounded, because a slow client must not block the engine. An answer's maximum length limits it.
    pub pieces: mpsc::UnboundedSender<Piece>,
    pub begun: Instant,
    pub whole: Arc<Whole>,
    pub last: Option<Instant>,
    /// Given back with it.
    #[expect(dead_code, reason = "held until the engine has dropped the request")]
    pub place: Place,
    /// Other choices of its prompt. They start when the prompt is computed, and find its pages in the prefix cache.
    pub behind: Vec<(Wanted, Self)>,
}

/// The requests under way.
#[derive(Default)]
pub(super) struct Clients {
    pub by_request: HashMap<RequestId, Client>,
    /// Choices whose prompt is computed, before the engine has them.
    pub ready: Vec<(Wanted, Client)>,
}

impl Clients {
    /// Says why the engine failed.
    pub(super) fn failed(&self, why: &str) {
        let running = self.by_request.values();
        let behind = running.clone().flat_map(|client| &client.behind);
        let choices = behind.chain(&self.ready).map(|(_, client)| client);
        for client in running.chain(choices) {
            let _ = client.pieces.send(Piece::Failed(why.to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use tandem_schedule::{Composer, Limits, Request, policy::SarathiServe};

    use super::*;
    use crate::serve::{metrics::Metrics, places::Places};

    /// Those that run, the choices behind them, and choices that the engine does not have yet.
    #[test]
    fn all_clients_hear_why_the_engine_failed() {
        let limits = Limits::default();
        let places = Places::new(&limits);
        let mut composer = Composer::new(limits, 4, 16, SarathiServe).unwrap();
        let request = composer.submit(Request::new(vec![1], 1)).unwrap();
        let (mut clients, mut receivers) = (Clients::default(), Vec::new());
        let (metrics, begun) = (Arc::new(Metrics::default()), Instant::now());
        let mut client = || {
            let (pieces, receiver) = mpsc::unbounded_channel();
            receivers.push(receiver);
            Client {
                pieces,
                begun,
                whole: Arc::new(Whole::new(&metrics, begun)),
                last: None,
                place: places.take().unwrap(),
                behind: Vec::new(),
            }
        };
        let wanted = || Wanted {
            prompt: [1].into(),
            beside: Generation::greedy(Vec::new(), 1),
        };
        let choice = |client| (wanted(), client);
        clients.ready.push(choice(client()));
        let mut first = client();
        first.behind.push(choice(client()));
        clients.by_request.insert(request, first);
        clients.failed("no memory");
        drop(clients);
        for mut receiver in receivers {
            let said = receiver.try_recv().unwrap();
            assert!(
                matches!(&said, Piece::Failed(why) if why == "no memory"),
                "{said:?}"
            );
        }
        assert_eq!(places.taken(), 0);
    }
}
