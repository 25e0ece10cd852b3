//! Requests to simulate: traces from files, and synthetic ones.

mod formats;
mod random;

use super::{Request, ScheduleError};
pub use random::{Random, Zipf};

/// A request and its arrival time.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrival {
    /// Seconds from the start.
    pub at_s: f64,
    /// The request.
    pub request: Request,
}

/// Requests in order of arrival.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// In order of arrival.
    pub arrivals: Vec<Arrival>,
}

/// The latest arrival in seconds, 317 years: nanoseconds are exact to 2 µs there.
const MOST_S: f64 = 1e10;

impl Trace {
    /// Sorts requests by arrival and shifts times so that the first arrives at 0.
    #[must_use]
    pub fn from_arrivals(mut arrivals: Vec<Arrival>) -> Self {
        arrivals.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
        let first = arrivals.first().map_or(0.0, |arrival| arrival.at_s);
        for arrival in &mut arrivals {
            arrival.at_s -= first;
        }
        Self { arrivals }
    }

    /// `requests` copies of one request, all arriving at 0.
    #[must_use]
    pub fn uniform(requests: usize, prompt: u32, generated: u32) -> Self {
        let arrival = Arrival {
            at_s: 0.0,
            request: Request::of_length(prompt, generated),
        };
        Self {
            arrivals: vec![arrival; requests],
        }
    }

    /// Requests that all arrive at 0. Total lengths follow Zipf's law and are divided between prompt and generated
    /// tokens at a fixed P:D ratio.
    #[must_use]
    pub fn zipf(requests: usize, lengths: &Zipf, ratio: f64, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut request = || {
            let total = lengths.sample(&mut random);
            let generated = ((f64::from(total) / (1.0 + ratio)).round() as u32).max(1);
            Request::of_length(total.saturating_sub(generated).max(1), generated)
        };
        Self {
            arrivals: (0..requests)
                .map(|_| Arrival {
                    at_s: 0.0,
                    request: request(),
                })
                .collect(),
        }
    }

    /// Replaces the arrival times with those of a Poisson process of `requests_per_s`. The order stays.
    ///
    /// # Panics
    /// If `requests_per_s` is not above 0.
    #[must_use]
    pub fn with_poisson_arrivals(mut self, requests_per_s: f64, seed: u64) -> Self {
        assert!(
            requests_per_s > 0.0,
            "at {requests_per_s} requests per second none arrives: give a rate above 0"
        );
        let mut random = Random::new(seed);
        let mut now = 0.0;
        for arrival in &mut self.arrivals {
            arrival.at_s = now;
            now += random.exponential() / requests_per_s;
        }
        self
    }

    /// Divides arrival times by `times`.
    ///
    /// # Panics
    /// If `times` is not above 0.
    #[must_use]
    pub fn sped_up(mut self, times: f64) -> Self {
        assert!(
            times > 0.0,
            "no request arrives {times} times as fast: give a number above 0"
        );
        for arrival in &mut self.arrivals {
            arrival.at_s /= times;
        }
        self
    }

    /// Checks the times of all arrivals.
    ///
    /// # Errors
    /// [`ScheduleError::Arrival`] for a request that never arrives, or so late that times in nanoseconds are inexact.
    pub fn check_arrivals(&self) -> Result<(), ScheduleError> {
        let mut times = self.arrivals.iter().map(|arrival| arrival.at_s);
        let in_time = |at_s: f64| (-MOST_S..=MOST_S).contains(&at_s);
        match times.position(|at_s| !in_time(at_s)) {
            None => Ok(()),
            Some(index) => Err(ScheduleError::Arrival {
                index,
                at_s: self.arrivals[index].at_s,
                most_s: MOST_S,
            }),
        }
    }

    /// The first `requests` requests.
    #[must_use]
    pub fn first(mut self, requests: usize) -> Self {
        self.arrivals.truncate(requests);
        self
    }

    /// Mean numbers of prompt tokens and of generated tokens.
    #[must_use]
    pub fn mean_lengths(&self) -> (f64, f64) {
        let requests = self.arrivals.len().max(1) as f64;
        let mut sums = (0.0, 0.0);
        for Arrival { request, .. } in &self.arrivals {
            sums.0 += f64::from(request.prompt.len());
            sums.1 += f64::from(request.max_new_tokens);
        }
        (sums.0 / requests, sums.1 / requests)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ScheduleError;

    #[test]
    fn arrivals_and_lengths_follow_their_distributions() {
        let trace = Trace::uniform(20_000, 10, 1).with_poisson_arrivals(4.0, 7);
        let rate = trace.arrivals.len() as f64 / trace.arrivals.last().unwrap().at_s;
        assert!((rate - 4.0).abs() < 0.1, "{rate}");
        assert_eq!(
            trace,
            Trace::uniform(20_000, 10, 1).with_poisson_arrivals(4.0, 7)
        );

        let zipf = Zipf::new(1024, 4096, 0.4).unwrap();
        let trace = Trace::zipf(20_000, &zipf, 10.0, 7);
        let (prompt, generated) = trace.mean_lengths();
        assert!(
            (prompt / generated - 10.0).abs() < 0.1,
            "{prompt} {generated}"
        );
        // ∫x^(1−θ) / ∫x^−θ over the range 1..3073 is (1−θ)/(2−θ) of the range.
        let expected = 1024.0 + 3073.0 * 0.6 / 1.6;
        let mean = prompt + generated;
        assert!((mean / expected - 1.0).abs() < 0.02, "{mean} {expected}");
    }

    #[test]
    fn lengths_that_cannot_be_drawn_are_refused() {
        for (min, max) in [(2, 1), (1, u32::MAX), (0, u32::MAX)] {
            let error = Zipf::new(min, max, 0.4).unwrap_err();
            assert_eq!(
                error,
                ScheduleError::Lengths {
                    min,
                    max,
                    most: 1 << 24
                }
            );
        }
        let steep = Zipf::new(1, 2, f64::NAN).unwrap_err().to_string();
        assert!(steep.contains("theta is NaN"), "{steep}");
    }

    #[test]
    #[should_panic(expected = "at 0 requests per second none arrives")]
    fn a_rate_of_0_is_refused() {
        drop(Trace::uniform(2, 1, 1).with_poisson_arrivals(0.0, 1));
    }

    #[test]
    #[should_panic(expected = "NaN times as fast")]
    fn a_speed_that_is_no_number_is_refused() {
        drop(Trace::uniform(2, 1, 1).sped_up(f64::NAN));
    }
}
