//! How long a connection waits for the head of a request.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use hyper::rt::{Sleep, Timer};
use tokio::time::sleep;

use super::patience::after;

/// The timer of a connection, which times heads of requests only: hyper begins to wait for the next one when an answer is sent,
/// and has one limit for the time until it comes and the time in which it comes.
#[derive(Debug)]
pub(super) struct Heads {
    /// Number of reads of the connection.
    reads: Arc<AtomicU64>,
    /// Until a head is there, from its first byte. For the first head of a connection, from its beginning.
    receive: Duration,
    /// Until the first byte of another one.
    idle: Duration,
    is_first: AtomicBool,
}

impl Heads {
    pub(super) fn new(reads: Arc<AtomicU64>, receive: Duration, idle: Duration) -> Self {
        let is_first = AtomicBool::new(true);
        Self {
            reads,
            receive,
            idle,
            is_first,
        }
    }
}

impl Timer for Heads {
    fn sleep(&self, _limit: Duration) -> Pin<Box<dyn Sleep>> {
        let is_first = self.is_first.swap(false, Relaxed);
        let limit = if is_first { self.receive } else { self.idle };
        Box::pin(Head {
            before: (!is_first).then(|| self.reads.load(Relaxed)),
            reads: Arc::clone(&self.reads),
            receive: self.receive,
            end: Box::pin(sleep(limit)),
        })
    }

    fn sleep_until(&self, _deadline: Instant) -> Pin<Box<dyn Sleep>> {
        self.sleep(Duration::ZERO)
    }
}

/// Ends if a head does not come, or not whole. It is polled after each read.
struct Head {
    /// Number of reads before its first byte, until that comes.
    before: Option<u64>,
    reads: Arc<AtomicU64>,
    receive: Duration,
    end: Pin<Box<tokio::time::Sleep>>,
}

impl Future for Head {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self
            .before
            .is_some_and(|before| before != self.reads.load(Relaxed))
        {
            self.before = None;
            let end = after(self.receive);
            self.end.as_mut().reset(end);
        }
        self.end.as_mut().poll(context)
    }
}

impl Sleep for Head {}
