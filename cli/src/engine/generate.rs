//! `tandem generate`: a model continues a prompt.

use std::{
    fmt::Write,
    io::{IsTerminal, stdout},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use serde_json::{Map, Value};
use tandem_engine::{
    ChatOptions, Error, Event, Finish, Generation, LogitRules, Message, Text, TextStream,
};

use super::{ModelArgs, SamplingArgs, warn, warn_of_no_end};
use crate::{Failure, cache_type::mention, input, output::print_prose, serve_sim::at_least_1};

const EXAMPLES: &str = "\
Examples:
  tandem generate Qwen3-0.6B \"Attention is\"
  tandem generate Llama-3.1-8B-Instruct --chat \"Explain paged attention in two sentences.\" --max-new-tokens 200
  tandem generate Qwen3-0.6B --chat --chat-template-kwargs '{\"enable_thinking\": false}' \"How large is a page?\"
  tandem generate gemma-3-1b-it --chat --temperature 0.8 --top-p 0.95 --seed 7 - < question.txt";

/// Let a model continue a prompt: Llama 3, Qwen 2.5 and 3, Mistral, Gemma 3.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The prompt; `-` reads it from standard input
    prompt: String,
    /// Give the prompt as the user's message, in the model's chat template
    #[arg(long)]
    chat: bool,
    /// System message at the beginning of the conversation
    #[arg(long, requires = "chat")]
    system: Option<String>,
    /// Variables of the chat template, such as {"enable_thinking": false} of Qwen 3's
    #[arg(long, value_name = "JSON", requires = "chat", value_parser = object)]
    chat_template_kwargs: Option<Map<String, Value>>,
    /// Maximum number of tokens to generate
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = at_least_1)]
    max_new_tokens: u32,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Continue after a token that ends the text: for measurements
    #[arg(long)]
    ignore_end: bool,
}

fn object(json: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(json).map_err(|error| {
        format!("{error}: give a JSON object, such as {{\"enable_thinking\": false}}")
    })
}

/// Runs the subcommand.
///
/// # Errors
/// [`Failure::Input`] for an invalid model or prompt, [`Failure::Backend`].
pub fn run(args: &Args) -> Result<(), Failure> {
    let folder = args.model.folder()?;
    let (sampling, penalties) = args.sampling.sampling(args.model.usual_sampling()?)?;
    let text = Text::read(folder)?;
    let prompt = prompt(args, &text)?;
    let mut stream = match args.chat {
        false => TextStream::after(&text, &prompt)?,
        true => TextStream::default(),
    };
    let architecture = args.model.architecture(&text)?;
    if !args.ignore_end {
        warn_of_no_end(&architecture);
    }
    let count = prompt.len();
    let cache = text_tokens(count, args.max_new_tokens, architecture.positions)?;
    let backend = args.model.backend(architecture, 1, Some(cache))?;
    let mut engine = args.model.engine(backend, 1, 1, (u32::MAX, false))?;
    engine.submit(Generation {
        prompt,
        max_new_tokens: args.max_new_tokens,
        sampling,
        rules: LogitRules {
            penalties,
            bias: Vec::new(),
        },
        ignore_ends: args.ignore_end,
        ..Generation::greedy(Vec::new(), 0)
    })?;

    // On a terminal the text itself shows how far it is.
    let mut progress = Progress::new(count, args.max_new_tokens, !stdout().is_terminal());
    let (begin, mut first) = (Instant::now(), None);
    let mut reason = None;
    while !engine.is_idle() {
        let mut events = Vec::new();
        let step = engine.step(&mut |event| events.push(event))?;
        progress.computed(step.tokens);
        warn(&progress.bar, engine.warnings());
        for event in events {
            match event {
                Event::Started { .. } => {}
                Event::Token { token, .. } => {
                    first.get_or_insert_with(|| begin.elapsed());
                    progress.wrote();
                    print_prose(&stream.push(&text, token)?);
                }
                Event::Finished { reason: why, .. } => reason = Some(why),
            }
        }
    }
    progress.bar.finish_and_clear();
    print_prose(&stream.finish(&text)?);
    print_prose("\n");
    let first = first.unwrap_or_else(|| begin.elapsed());
    eprintln!(
        "{}",
        summary(
            &(engine.device() + &mention(engine.cache_type())),
            count,
            progress.written,
            first,
            begin.elapsed(),
            reason
        )
    );
    Ok(())
}

/// A line on standard error: how much of the prompt is read and, if the text goes elsewhere, how much of it is written.
struct Progress {
    bar: ProgressBar,
    /// Tokens of the text.
    written: u32,
    most: u32,
    shows_writing: bool,
}

impl Progress {
    fn new(prompt: usize, most: u32, shows_writing: bool) -> Self {
        let what = "reading [{bar:40}] {pos} of {len} tokens of the prompt";
        Self {
            bar: ProgressBar::new(prompt as u64).with_style(style(what)),
            written: 0,
            most,
            shows_writing,
        }
    }

    /// A step has computed so many tokens.
    fn computed(&self, tokens: u32) {
        if self.written == 0 {
            self.bar.inc(tokens.into());
        }
    }

    /// A token was drawn.
    fn wrote(&mut self) {
        self.written += 1;
        match (self.shows_writing, self.written) {
            (false, _) => self.bar.finish_and_clear(),
            (true, 1) => {
                // A bar of its own: the time of the prompt does not count for its rate.
                self.bar.finish_and_clear();
                let what = "writing [{bar:40}] {pos} of at most {len} tokens, {rate} per second";
                self.bar = ProgressBar::new(self.most.into()).with_style(style(what));
                self.bar.inc(1);
            }
            (true, _) => self.bar.inc(1),
        }
    }
}

fn style(template: &str) -> ProgressStyle {
    let style = ProgressStyle::with_template(template).expect("the template is sound");
    let rate = |state: &ProgressState, text: &mut dyn Write| {
        // A line that cannot be written is not shown.
        let _ = write!(text, "{:.1}", state.per_sec());
    };
    style.with_key("rate", rate).progress_chars("=> ")
}

/// Tokens of the prompt and the text behind it. More than the model's positions are refused, as by the engine, but before it is
/// loaded.
fn text_tokens(prompt: usize, new: u32, positions: u32) -> Result<u32, Error> {
    let (got, limit) = (prompt as u64 + u64::from(new), positions);
    let fits = u32::try_from(got).ok().filter(|&tokens| tokens <= limit);
    fits.ok_or(Error::TooLong { got, limit })
}

fn prompt(args: &Args, text: &Text) -> Result<Vec<u32>, Failure> {
    let content = match &args.prompt[..] {
        "-" => input::standard_input(input::MOST_JSON)?,
        prompt => prompt.to_owned(),
    };
    let tokens = match args.chat {
        false => text.encode(&content, true)?,
        true => {
            let message = |role: &str, content: String| Message {
                role: role.to_owned(),
                content,
            };
            let system = args
                .system
                .iter()
                .map(|content| message("system", content.clone()));
            let messages: Vec<_> = system.chain([message("user", content)]).collect();
            let options = ChatOptions {
                variables: args.chat_template_kwargs.clone().unwrap_or_default(),
                ..ChatOptions::default()
            };
            text.encode_chat_with(&messages, &options)?
        }
    };
    if tokens.is_empty() {
        return Err(Failure::Input(
            "the prompt has no tokens: say something".to_owned(),
        ));
    }
    Ok(tokens)
}

/// Writes one line about the run to standard error; standard output has only the text.
fn summary(
    device: &str,
    prompt: usize,
    tokens: u32,
    first: Duration,
    all: Duration,
    reason: Option<Finish>,
) -> String {
    let rest = (all - first).as_secs_f64();
    let rate = f64::from(tokens.saturating_sub(1)) / rest.max(1e-9);
    let ended = match reason {
        Some(Finish::End) => "the model ended it",
        _ => "as many as were asked for",
    };
    format!(
        "{prompt} tokens read in {:.0} ms, {tokens} written ({ended}) at {rate:.1} per second, on {device}",
        first.as_secs_f64() * 1e3
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_of_the_prompt_and_then_of_a_text_that_goes_elsewhere() {
        for shows_writing in [false, true] {
            let mut progress = Progress::new(9, 7, shows_writing);
            progress.computed(6);
            assert_eq!(
                (progress.bar.position(), progress.bar.length()),
                (6, Some(9))
            );
            progress.computed(3);
            for written in 1..5 {
                progress.wrote();
                progress.computed(1);
                assert_eq!(progress.written, written);
                assert_eq!(progress.bar.is_finished(), !shows_writing);
                if shows_writing {
                    let bar = &progress.bar;
                    assert_eq!(
                        (bar.position(), bar.length()),
                        (u64::from(written), Some(7))
                    );
                }
            }
        }
    }

    #[test]
    fn caches_are_as_large_as_the_text() {
        let most = 40_960;
        let tokens = |prompt, new| text_tokens(prompt, new, most).ok();
        assert_eq!(tokens(5, 128), Some(133));
        assert_eq!(tokens(5, most - 5), Some(most));
        for (prompt, new) in [(5, most - 4), (5, u32::MAX), (1 << 40, 1)] {
            assert_eq!(tokens(prompt, new), None);
        }
    }
}
