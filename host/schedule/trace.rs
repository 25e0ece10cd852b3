//! Requests to simulate: traces from files, and synthetic ones.
//!
//! Three formats are read, told apart by their content: Mooncake's JSON lines (`timestamp` in ms,
//! `input_length`, `output_length`, `hash_ids` of 512-token blocks), Azure's CSV (`TIMESTAMP`,
//! `ContextTokens`, `GeneratedTokens`), and a CSV of lengths alone (`num_prefill_tokens`,
//! `num_decode_tokens`), which is given arrival times by [`Trace::with_poisson_arrivals`].

use std::path::Path;

use serde::Deserialize;

use super::{Prompt, Request, ScheduleError};

/// A request and when it comes.
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

/// A small generator of random numbers (SplitMix64): the same on every machine, whatever crates do.
#[derive(Clone, Copy, Debug)]
pub struct Random(u64);

impl Random {
    /// From a seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub const fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = self.0;
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0..1`.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Exponential with a mean of 1.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }
}

/// Lengths between two bounds whose rank follows Zipf's law: the i-th shortest is drawn with a probability
/// in proportion to 1 / i^θ.
#[derive(Clone, Debug)]
pub struct Zipf {
    min: u32,
    cumulative: Vec<f64>,
}

impl Zipf {
    /// Lengths `min..=max`.
    ///
    /// # Panics
    /// If `min` is above `max`.
    #[must_use]
    pub fn new(min: u32, max: u32, theta: f64) -> Self {
        assert!(min <= max, "no length is in {min}..={max}");
        let mut sum = 0.0;
        let cumulative = (1..=max - min + 1)
            .map(|rank| {
                sum += f64::from(rank).powf(-theta);
                sum
            })
            .collect();
        Self { min, cumulative }
    }

    /// Draws a length.
    pub fn sample(&self, random: &mut Random) -> u32 {
        let total = self.cumulative[self.cumulative.len() - 1];
        let wanted = random.unit() * total;
        let rank = self.cumulative.partition_point(|&sum| sum <= wanted);
        self.min + rank.min(self.cumulative.len() - 1) as u32
    }
}

/// A line of Mooncake's format.
#[derive(Deserialize)]
struct MooncakeLine {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    #[serde(default)]
    hash_ids: Vec<u32>,
}

/// Tokens of a block of Mooncake's traces.
const MOONCAKE_BLOCK: u32 = 512;

impl Trace {
    /// Reads a file in any of the formats.
    ///
    /// # Errors
    /// [`ScheduleError::Trace`].
    pub fn read(path: impl AsRef<Path>) -> Result<Self, ScheduleError> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|error| ScheduleError::Trace {
            path: name.clone(),
            line: 0,
            reason: error.to_string(),
        })?;
        Self::parse(&text, &name)
    }

    /// Reads a trace from a string; `name` is for errors.
    ///
    /// # Errors
    /// [`ScheduleError::Trace`].
    pub fn parse(text: &str, name: &str) -> Result<Self, ScheduleError> {
        let wrong = |line: usize, reason: String| ScheduleError::Trace {
            path: name.to_owned(),
            line,
            reason,
        };
        let header = text.lines().next().unwrap_or_default().trim();
        let parse: fn(&str) -> Result<Arrival, String> = if header.starts_with('{') {
            mooncake
        } else if header.starts_with("TIMESTAMP,") {
            azure
        } else if header.starts_with("num_prefill_tokens,num_decode_tokens") {
            lengths
        } else {
            return Err(wrong(
                1,
                "neither Mooncake's JSON lines, nor Azure's CSV (TIMESTAMP,ContextTokens,GeneratedTokens), nor \
                 a CSV of num_prefill_tokens,num_decode_tokens"
                    .to_owned(),
            ));
        };
        let skipped = usize::from(!header.starts_with('{'));
        let mut arrivals = Vec::new();
        for (index, line) in text.lines().enumerate().skip(skipped) {
            if !line.trim().is_empty() {
                arrivals.push(parse(line).map_err(|reason| wrong(index + 1, reason))?);
            }
        }
        Ok(Self::from_arrivals(arrivals))
    }

    /// Orders requests by arrival; the first comes at 0.
    #[must_use]
    pub fn from_arrivals(mut arrivals: Vec<Arrival>) -> Self {
        arrivals.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
        let first = arrivals.first().map_or(0.0, |arrival| arrival.at_s);
        for arrival in &mut arrivals {
            arrival.at_s -= first;
        }
        Self { arrivals }
    }

    /// `requests` copies of one request, all there from the start.
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

    /// Requests, all there from the start, whose total lengths follow Zipf's law and are shared out between
    /// prompt and generated tokens at a fixed P:D ratio.
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

    /// With arrivals of a Poisson process of so many requests per second, in place of its own; the order
    /// stays.
    #[must_use]
    pub fn with_poisson_arrivals(mut self, requests_per_s: f64, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut now = 0.0;
        for arrival in &mut self.arrivals {
            arrival.at_s = now;
            now += random.exponential() / requests_per_s;
        }
        self
    }

    /// With time running so many times as fast.
    #[must_use]
    pub fn sped_up(mut self, times: f64) -> Self {
        for arrival in &mut self.arrivals {
            arrival.at_s /= times;
        }
        self
    }

    /// The first so many requests.
    #[must_use]
    pub fn first(mut self, requests: usize) -> Self {
        self.arrivals.truncate(requests);
        self
    }

    /// The mean tokens of a prompt and generated.
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

fn mooncake(line: &str) -> Result<Arrival, String> {
    let line: MooncakeLine = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let blocks = line.hash_ids.len() as u64 * u64::from(MOONCAKE_BLOCK);
    let prompt = if line.hash_ids.is_empty() {
        Prompt::Length(line.input_length.max(1))
    } else if blocks < u64::from(line.input_length) {
        return Err(format!(
            "{} hash_ids are too few for {} tokens",
            line.hash_ids.len(),
            line.input_length
        ));
    } else {
        Prompt::Blocks {
            ids: line.hash_ids.into(),
            block: MOONCAKE_BLOCK,
            len: line.input_length.max(1),
        }
    };
    Ok(Arrival {
        at_s: line.timestamp / 1e3,
        request: Request {
            prompt,
            max_new_tokens: line.output_length.max(1),
        },
    })
}

fn azure(line: &str) -> Result<Arrival, String> {
    let [time, prompt, generated] = fields(line)?;
    Ok(Arrival {
        at_s: seconds(time).ok_or_else(|| format!("{time:?} is not a date and time"))?,
        request: Request::of_length(length(prompt)?, length(generated)?),
    })
}

fn lengths(line: &str) -> Result<Arrival, String> {
    let [prompt, generated] = fields(line)?;
    Ok(Arrival {
        at_s: 0.0,
        request: Request::of_length(length(prompt)?, length(generated)?),
    })
}

/// The first fields of a CSV line without quotes.
fn fields<const N: usize>(line: &str) -> Result<[&str; N], String> {
    let mut fields = line.split(',').map(str::trim);
    let mut found = [""; N];
    for field in &mut found {
        *field = fields
            .next()
            .ok_or_else(|| format!("fewer than {N} fields"))?;
    }
    Ok(found)
}

/// A number of tokens; some files write them with a decimal point. At least one is computed.
fn length(field: &str) -> Result<u32, String> {
    let value: f64 = field
        .parse()
        .map_err(|_| format!("{field:?} is not a number of tokens"))?;
    if !(0.0..=f64::from(i32::MAX)).contains(&value) {
        return Err(format!("{field} tokens are impossible"));
    }
    Ok((value as u32).max(1))
}

/// `2023-11-16 18:17:03.9799600` as seconds from some start.
fn seconds(time: &str) -> Option<f64> {
    let (date, clock) = time.split_once([' ', 'T'])?;
    let mut date = date.split('-').map(|field| field.parse::<i64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let clock = clock.trim_end_matches('Z').trim_end_matches("+00:00");
    let mut clock = clock.split(':').map(|field| field.parse::<f64>().ok());
    let (hour, minute, second) = (clock.next()??, clock.next()??, clock.next()??);
    // Days of the civil calendar, years beginning in March.
    let (year, month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    let days = 365 * year + leap_days + (153 * month + 2) / 5 + day;
    Some(days as f64 * 86_400.0 + hour * 3_600.0 + minute * 60.0 + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_three_formats_are_read() {
        let mooncake = "{\"timestamp\": 2000, \"input_length\": 700, \"output_length\": 5, \"hash_ids\": [0, 7]}\n\
                        {\"timestamp\": 500, \"input_length\": 10, \"output_length\": 0, \"hash_ids\": [0]}\n";
        let trace = Trace::parse(mooncake, "m").unwrap();
        let [first, second] = &trace.arrivals[..] else {
            panic!("two requests")
        };
        assert_eq!((first.at_s, second.at_s), (0.0, 1.5));
        assert_eq!(
            (first.request.prompt.len(), first.request.max_new_tokens),
            (10, 1)
        );
        assert_eq!(second.request.prompt.len(), 700);
        let mut tokens = Vec::new();
        second.request.prompt.expand_blocks(&mut tokens);
        assert_eq!(
            (tokens.len(), tokens[511], tokens[512]),
            (700, 511, 7 * 512)
        );

        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
                     2023-02-28 23:59:59.5000000,4808,10\n2023-03-01 00:00:01.2500000,3180,8\n";
        let trace = Trace::parse(azure, "a").unwrap();
        assert_eq!(trace.arrivals[1].at_s, 1.75);
        assert_eq!(trace.arrivals[1].request, Request::of_length(3180, 8));

        let lengths = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n7564.0,192.0,7756.0,39.4\n";
        let trace = Trace::parse(lengths, "l").unwrap();
        assert_eq!(trace.arrivals[0].request, Request::of_length(7564, 192));
    }

    #[test]
    fn errors_name_the_line() {
        let error = |text: &str| Trace::parse(text, "file").unwrap_err().to_string();
        assert!(error("a,b\n1,2\n").contains("file, line 1: neither"));
        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
        assert!(error(&format!("{azure}2023-11-16,1,2\n")).contains("line 2: \"2023-11-16\""));
        assert!(
            error(&format!("{azure}2023-11-16 00:00:00,x,2\n")).contains("\"x\" is not a number")
        );
        assert!(error(&format!("{azure}2023-11-16 00:00:00,1\n")).contains("fewer than 3"));
        assert!(error("{\"timestamp\": 0}").contains("input_length"));
        let few = "{\"timestamp\":0,\"input_length\":513,\"output_length\":1,\"hash_ids\":[1]}";
        assert!(error(few).contains("too few for 513"));
        assert!(
            Trace::read("/no/such/trace")
                .unwrap_err()
                .to_string()
                .contains("/no/such/trace")
        );
    }

    #[test]
    fn arrivals_and_lengths_follow_their_distributions() {
        let trace = Trace::uniform(20_000, 10, 1).with_poisson_arrivals(4.0, 7);
        let rate = trace.arrivals.len() as f64 / trace.arrivals.last().unwrap().at_s;
        assert!((rate - 4.0).abs() < 0.1, "{rate}");
        assert_eq!(
            trace,
            Trace::uniform(20_000, 10, 1).with_poisson_arrivals(4.0, 7)
        );

        let zipf = Zipf::new(1024, 4096, 0.4);
        let trace = Trace::zipf(20_000, &zipf, 10.0, 7);
        let (prompt, generated) = trace.mean_lengths();
        assert!(
            (prompt / generated - 10.0).abs() < 0.1,
            "{prompt} {generated}"
        );
        // ∫x^(1−θ) / ∫x^−θ over 1..3073 is (1−θ)/(2−θ) of the range.
        let expected = 1024.0 + 3073.0 * 0.6 / 1.6;
        let mean = prompt + generated;
        assert!((mean / expected - 1.0).abs() < 0.02, "{mean} {expected}");
    }
}
