//! Reads traces from files.
//!
//! Three formats are read, told apart by their content: Mooncake's JSON lines (`timestamp` in ms,
//! `input_length`, `output_length`, `hash_ids` of 512-token blocks), Azure's CSV (`TIMESTAMP`,
//! `ContextTokens`, `GeneratedTokens`), and a CSV of lengths alone (`num_prefill_tokens`,
//! `num_decode_tokens`), which is given arrival times by [`Trace::with_poisson_arrivals`]. Columns of a CSV are found by
//! their names, in any order; others are ignored.

use std::path::Path;

use serde::Deserialize;

use super::{Arrival, Trace};
use crate::{Prompt, Request, ScheduleError};

/// A line in Mooncake's format.
#[derive(Deserialize)]
struct MooncakeLine {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    #[serde(default)]
    hash_ids: Vec<u32>,
}

/// Reads a line.
type Parse = dyn Fn(&str) -> Result<Arrival, String>;

/// Number of tokens of a block in Mooncake's traces.
const MOONCAKE_BLOCK: u32 = 512;

/// Maximum number of tokens of a prompt or an answer: the sum of both fits 32 bits.
const MOST_TOKENS: u32 = 1 << 30;

impl Trace {
    /// Reads a file: Mooncake's JSON lines, Azure's CSV, or a CSV of lengths alone, told apart by its content.
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

    /// Like [`Trace::read`], from a string. Errors contain `name`.
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
        let parse: Box<Parse> = if header.starts_with('{') {
            Box::new(mooncake)
        } else if let Some(columns) =
            columns(header, ["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        {
            Box::new(move |line| azure(line, columns))
        } else if let Some(columns) = columns(header, ["num_prefill_tokens", "num_decode_tokens"]) {
            Box::new(move |line| lengths(line, columns))
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
}

fn mooncake(line: &str) -> Result<Arrival, String> {
    let line: MooncakeLine = serde_json::from_str(line).map_err(|error| {
        format!(
            "{error}: each line of such a trace is an object with timestamp, input_length, output_length and hash_ids"
        )
    })?;
    for (field, tokens) in [
        ("input_length", line.input_length),
        ("output_length", line.output_length),
    ] {
        if !(1..=MOST_TOKENS).contains(&tokens) {
            return Err(format!(
                "{field} is {tokens}: a request has 1 to {MOST_TOKENS} tokens"
            ));
        }
    }
    // Each token of a block has its own id of 32 bits: otherwise different blocks would count as one.
    const MOST_ID: u32 = u32::MAX / MOONCAKE_BLOCK;
    if let Some(id) = line.hash_ids.iter().find(|&&id| id > MOST_ID) {
        return Err(format!(
            "{id} is among the hash_ids: number the blocks from 0 to {MOST_ID}"
        ));
    }
    let blocks = line.hash_ids.len() as u64 * u64::from(MOONCAKE_BLOCK);
    let prompt = if line.hash_ids.is_empty() {
        Prompt::Length(line.input_length)
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
            len: line.input_length,
        }
    };
    Ok(Arrival {
        at_s: line.timestamp / 1e3,
        request: Request {
            prompt,
            max_new_tokens: line.output_length,
            computed: 0,
        },
    })
}

fn azure(line: &str, columns: [usize; 3]) -> Result<Arrival, String> {
    let [time, prompt, generated] = fields(line, columns)?;
    Ok(Arrival {
        at_s: seconds(time).ok_or_else(|| format!("{time:?} is not a date and time"))?,
        request: Request::of_length(length(prompt)?, length(generated)?),
    })
}

fn lengths(line: &str, columns: [usize; 2]) -> Result<Arrival, String> {
    let [prompt, generated] = fields(line, columns)?;
    Ok(Arrival {
        at_s: 0.0,
        request: Request::of_length(length(prompt)?, length(generated)?),
    })
}

/// Where the columns of these names are in a CSV header.
fn columns<const N: usize>(header: &str, names: [&str; N]) -> Option<[usize; N]> {
    let mut found = [0; N];
    for (index, name) in found.iter_mut().zip(names) {
        *index = header.split(',').position(|field| field.trim() == name)?;
    }
    Some(found)
}

/// The fields of a CSV line without quotes at these columns.
fn fields<const N: usize>(line: &str, columns: [usize; N]) -> Result<[&str; N], String> {
    let mut found = [""; N];
    for (field, column) in found.iter_mut().zip(columns) {
        let given = line.split(',').nth(column).map(str::trim);
        *field = given.ok_or_else(|| format!("fewer than {} fields", column + 1))?;
    }
    Ok(found)
}

/// Parses a number of tokens. Some files write a decimal point.
fn length(field: &str) -> Result<u32, String> {
    let value: f64 = field
        .parse()
        .map_err(|_| format!("{field:?} is not a number of tokens"))?;
    if !(1.0..=f64::from(MOST_TOKENS)).contains(&value) {
        return Err(format!("{field} tokens: a request has 1 to {MOST_TOKENS}"));
    }
    Ok(value as u32)
}

/// Converts `2023-11-16 18:17:03.9799600` to seconds from a fixed start.
fn seconds(time: &str) -> Option<f64> {
    let (date, clock) = time.split_once([' ', 'T'])?;
    let mut date = date.split('-').map(|field| field.parse::<i64>().ok());
    let (year, month, day) = (date.next()??, date.next()??, date.next()??);
    let clock = clock.trim_end_matches('Z').trim_end_matches("+00:00");
    let mut clock = clock.split(':').map(|field| field.parse::<f64>().ok());
    let (hour, minute, second) = (clock.next()??, clock.next()??, clock.next()??);
    // Allow for leap seconds.
    let exists = (1..=9999).contains(&year)
        && (1..=12).contains(&month)
        && (1..=days_of(year, month)).contains(&day)
        && (0.0..24.0).contains(&hour)
        && (0.0..60.0).contains(&minute)
        && (0.0..61.0).contains(&second);
    if !exists {
        return None;
    }
    // Days of the civil calendar, with years that begin in March.
    let (year, month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    let days = 365 * year + leap_days + (153 * month + 2) / 5 + day;
    Some(days as f64 * 86_400.0 + hour * 3_600.0 + minute * 60.0 + second)
}

const fn days_of(year: i64, month: i64) -> i64 {
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    match month {
        2 => 28 + leap as i64,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Only the beginning of the header was read: columns in another order were taken for each other.
    #[test]
    fn columns_are_found_by_their_names() {
        for (header, line) in [
            (
                "TIMESTAMP,ContextTokens,GeneratedTokens",
                "2023-11-16 00:00:00,700,5",
            ),
            (
                "TIMESTAMP,GeneratedTokens,ContextTokens",
                "2023-11-16 00:00:00,5,700",
            ),
            (
                "model, ContextTokens, TIMESTAMP, GeneratedTokens",
                "a,700,2023-11-16 00:00:00,5",
            ),
            ("num_prefill_tokens,num_decode_tokens", "700,5"),
            ("num_decode_tokens,num_prefill_tokens,ratio", "5,700,140"),
            (",num_prefill_tokens,num_decode_tokens", "0,700,5"),
        ] {
            let trace = Trace::parse(&format!("{header}\n{line}\n"), "t").unwrap();
            let request = &trace.arrivals[0].request;
            let lengths = (request.prompt.len(), request.max_new_tokens);
            assert_eq!(lengths, (700, 5), "{header}");
        }
        for header in [
            "TIMESTAMP,ContextTokens",
            "TIMESTAMP,Context,Generated",
            "num_prefill_tokens,num_decode_tokens_2",
        ] {
            let error = Trace::parse(&format!("{header}\n1,2,3\n"), "t").unwrap_err();
            assert!(error.to_string().contains("line 1: neither"), "{error}");
        }
    }

    #[test]
    fn all_three_formats_are_read() {
        let mooncake = "{\"timestamp\": 2000, \"input_length\": 700, \"output_length\": 5, \"hash_ids\": [0, 7]}\n\
                        {\"timestamp\": 500, \"input_length\": 10, \"output_length\": 1, \"hash_ids\": [0]}\n";
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
        // JSON of another kind, such as a workload.
        let workload = error("{ \"heads\": 8,\n  \"requests\": [] }");
        assert!(
            workload.contains("line 1") && workload.contains("each line of such a trace"),
            "{workload}"
        );
        for date in [
            "2023-13-46 00:00:00",
            "2023-02-29 00:00:00",
            "2023-04-31 00:00:00",
            "2023-11-16 24:00:00",
            "2023-11-16 nan:00:00",
        ] {
            let text = error(&format!("{azure}{date},1,2\n"));
            assert!(
                text.contains("line 2") && text.contains("is not a date"),
                "{text}"
            );
        }
        assert!(Trace::parse(&format!("{azure}2024-02-29 23:59:60,1,2\n"), "leap").is_ok());
        for line in ["0,2", "1,0", "-1,2", "0.5,2", "1e10,2"] {
            let text = error(&format!(
                "{azure}2023-11-16 00:00:00,3,4\n2023-11-16 00:00:00,{line}\n"
            ));
            assert!(
                text.contains("line 3") && text.contains("a request has 1 to"),
                "{text}"
            );
        }
        let none = "{\"timestamp\":0,\"input_length\":5,\"output_length\":0}";
        assert!(error(none).contains("line 1: output_length is 0"));
        let few = "{\"timestamp\":0,\"input_length\":513,\"output_length\":1,\"hash_ids\":[1]}";
        assert!(error(few).contains("too few for 513"));
        let large =
            "{\"timestamp\":0,\"input_length\":5,\"output_length\":1,\"hash_ids\":[8388608]}";
        assert!(error(large).contains("8388608 is among the hash_ids"));
        assert!(
            Trace::read("/no/such/trace")
                .unwrap_err()
                .to_string()
                .contains("/no/such/trace")
        );
    }
}
