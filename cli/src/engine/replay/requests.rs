//! The requests that are served: a trace, and what fits in memory, caches and positions.

use tandem_schedule::{Prompt, trace::Trace};

use crate::{Failure, bench::serving::Args, memory, serve_sim::read_trace, table::counted};

/// Prompts with a common beginning are given as blocks of this number of tokens.
const BLOCK: u32 = 16;

/// Checks that memory suffices for the requests and their tokens: accounts of requests, ids of blocks and of tokens,
/// times.
fn check_memory(args: &Args, requests: u64, [prompt, generated]: [u64; 2]) -> Result<(), Failure> {
    const REQUEST: u64 = 640;
    let blocks = match args.prefix {
        Some(_) => prompt.div_ceil(BLOCK.into()) + requests,
        None => 0,
    };
    let times = args.policy.len() as u64 + 2;
    // With a window, only the prompts inside of it are expanded to tokens.
    let ids = if args.window.is_some() { 0 } else { prompt };
    // The whole trace is kept in addition to the part that is served.
    let needed = REQUEST * requests + 4 * (ids + 2 * blocks + times * generated);
    memory::check(
        &format!(
            "serving {} of {prompt} prompt and {generated} generated tokens together",
            counted(requests as usize, "request")
        ),
        needed,
        "give fewer --requests, or shorter ones",
    )
}

pub(super) fn trace(args: &Args) -> Result<Trace, Failure> {
    let mut trace = match &args.trace {
        Some(path) => {
            let trace = read_trace(path)?;
            let served = args.requests.map_or(usize::MAX, |most| most as usize);
            let served = &trace.arrivals[..served.min(trace.arrivals.len())];
            let tokens = served.iter().fold([0, 0], |[prompt, generated], arrival| {
                let request = &arrival.request;
                [
                    prompt + u64::from(request.prompt.len()),
                    generated + u64::from(request.max_new_tokens),
                ]
            });
            check_memory(args, served.len() as u64, tokens)?;
            trace
        }
        None => {
            let requests = args.requests.unwrap_or(64);
            let all = |tokens: u32| u64::from(requests) * u64::from(tokens);
            let tokens = [all(args.prompt), all(args.generated)];
            check_memory(args, requests.into(), tokens)?;
            Trace::uniform(requests as usize, args.prompt, args.generated)
        }
    };
    if trace.arrivals.is_empty() {
        return Err(Failure::Input("the trace has no requests".to_owned()));
    }
    if let Some(prefix) = args.prefix {
        if prefix > args.prompt {
            return Err(Failure::Input(format!(
                "--prefix {prefix} is more than the {} tokens of a prompt (--prompt)",
                args.prompt
            )));
        }
        if !prefix.is_multiple_of(BLOCK) {
            return Err(Failure::Input(format!(
                "--prefix {prefix}: prompts share blocks of {BLOCK} tokens: give a multiple of {BLOCK}"
            )));
        }
        let blocks = args.prompt.div_ceil(BLOCK);
        let shared = prefix / BLOCK;
        for (request, arrival) in trace.arrivals.iter_mut().enumerate() {
            let own = (request as u32 + 1).wrapping_mul(blocks);
            let id = |block| if block < shared { block } else { own + block };
            arrival.request.prompt = Prompt::Blocks {
                ids: (0..blocks).map(id).collect(),
                block: BLOCK,
                len: args.prompt,
            };
        }
    }
    Ok(trace)
}

/// Numbers of tokens of the requests, prompt and answer.
fn lengths(trace: &Trace) -> impl Iterator<Item = u32> {
    trace.arrivals.iter().map(|arrival| {
        let request = &arrival.request;
        request.prompt.len().saturating_add(request.max_new_tokens)
    })
}

pub(super) fn longest(trace: &Trace) -> u32 {
    lengths(trace).max().unwrap_or(0)
}

/// Checks that a request fits, before anything is measured; those that do not are refused while the trace is served.
pub(super) fn check_lengths(
    trace: &Trace,
    positions: u32,
    cache: Option<u32>,
) -> Result<(), Failure> {
    let shortest = lengths(trace).min().unwrap_or(0);
    let cache = cache.unwrap_or(u32::MAX);
    let room = match shortest {
        _ if shortest > positions => {
            format!("the model has {positions} positions: give a model with more")
        }
        _ if shortest > cache => {
            format!("the KV cache holds {cache} tokens: give a larger --cache")
        }
        _ => return Ok(()),
    };
    Err(Failure::Input(format!(
        "no request fits: the shortest has {shortest} tokens of prompt and answer, and {room}, or shorter requests"
    )))
}
