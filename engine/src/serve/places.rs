//! Places for requests: the server takes as many as its engine lets run and wait, and refuses more before it works on them.

use std::sync::Arc;

use tandem_schedule::Limits;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::refusal::Refusal;

/// A place for each choice of a request, from its arrival until the engine has dropped it.
pub(super) type Place = OwnedSemaphorePermit;

/// Choices of a request, however many places there are: each costs memory before the engine has it.
const MOST_CHOICES: usize = 1024;

pub(super) struct Places {
    free: Arc<Semaphore>,
    all: usize,
    waiting: usize,
}

impl Places {
    pub(super) fn new(limits: &Limits) -> Self {
        let all = Self::of(limits);
        Self {
            free: Arc::new(Semaphore::new(all)),
            all,
            waiting: limits.waiting,
        }
    }

    /// How many an engine with these limits has.
    pub(super) fn of(limits: &Limits) -> usize {
        let all = limits.waiting.saturating_add(limits.running as usize);
        all.min(Semaphore::MAX_PERMITS)
    }

    /// Their number.
    pub(super) const fn all(&self) -> usize {
        self.all
    }

    /// How many are taken: by requests that are read or tokenized, by those that the engine has, and by choices behind these.
    pub(super) fn taken(&self) -> usize {
        self.all - self.free.available_permits()
    }

    /// Whether there is a place.
    pub(super) fn check(&self) -> Result<(), Refusal> {
        match self.free.available_permits() {
            0 => Err(self.full()),
            _ => Ok(()),
        }
    }

    /// A place for one choice.
    pub(super) fn take(&self) -> Result<Place, Refusal> {
        let place = Arc::clone(&self.free).try_acquire_owned();
        place.map_err(|_| self.full())
    }

    /// Extends a place for one choice to one for so many.
    pub(super) fn extend(&self, place: &mut Place, choices: usize) -> Result<(), Refusal> {
        if choices > MOST_CHOICES {
            return Err(Refusal::wrong(format!(
                "{choices} choices are asked for (n for each prompt), and a request has at most {MOST_CHOICES}: ask for fewer"
            )));
        }
        let more = match choices <= self.all {
            true => choices.saturating_sub(1) as u32,
            false => {
                let all = self.all;
                return Err(Refusal::wrong(format!(
                    "{choices} choices are asked for (n for each prompt), and this server runs and queues {all} in all: ask for \
                     fewer, or start it with a larger --waiting"
                )));
            }
        };
        let more = Arc::clone(&self.free).try_acquire_many_owned(more);
        place.merge(more.map_err(|_| self.full())?);
        Ok(())
    }

    fn full(&self) -> Refusal {
        let waiting = self.waiting;
        Refusal::busy(&format!("the queue is full (limit {waiting}, --waiting)"))
    }
}
