//! Compares all families with `transformers`: logits, greedy texts, tokens and conversations.

mod common;

use std::{
    fs,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use common::{
    FAMILIES, ODD_VOCABULARY, PAGES, answers, engine, expected, expected_text, folder, nearness,
    odd_logits, of_folder, of_odd_vocabulary, on_cpu,
};
use serde_json::json;
use tandem_engine::{
    CacheType, Engine, Error, Event, Finish, Generation, Limits, Message, Sampling, Text,
    TextStream, replay::replay,
};
use tandem_schedule::{
    Request,
    trace::{Arrival, Trace},
};

#[test]
fn logits_are_those_of_transformers() {
    for family in FAMILIES {
        let right = expected(family);
        let mut engine = engine(family, Limits::default());
        // The whole prompt at once, chunks that end inside pages, and single tokens.
        for chunk in [48, 13, 1] {
            let got = engine.logits(&right.prompt, chunk).unwrap();
            let near = nearness(&got, &right.logits, engine.architecture().vocabulary);
            assert!(
                near.least_cosine > 0.999_99 && near.same_first == 1.0,
                "{family} in chunks of {chunk}: cosine {}, {} of the first tokens",
                near.least_cosine,
                near.same_first
            );
        }
    }
}

#[test]
fn the_size_of_the_vocabulary_need_not_be_a_multiple_of_8() {
    let (model, right) = (of_odd_vocabulary(), expected("llama3"));
    let backend = of_folder(model.path(), CacheType::Auto);
    let mut engine = Engine::new(backend, Limits::default()).unwrap();
    let got = engine.logits(&right.prompt, 13).unwrap();
    let near = nearness(&got, &odd_logits(&right), ODD_VOCABULARY);
    assert!(near.least_cosine > 0.999_99, "{}", near.least_cosine);
}

#[test]
fn greedy_text_is_that_of_transformers_whatever_the_batch() {
    for family in FAMILIES {
        let right = expected(family);
        let greedy = Generation {
            ignore_ends: true,
            ..Generation::greedy(right.prompt.clone(), right.greedy.len() as u32)
        };
        let mut alone = engine(family, Limits::default());
        assert_eq!(
            answers(&mut alone, std::slice::from_ref(&greedy)),
            std::slice::from_ref(&right.greedy),
            "{family}"
        );

        // Prompts of different lengths with a common prefix, in steps of 20 tokens: prompt chunks together with
        // decodes.
        let limits = Limits {
            step_tokens: 20,
            ..Limits::default()
        };
        let mut batch = vec![greedy];
        for (keep, answer) in [(48, 9), (37, 24), (5, 16), (1, 3)] {
            let prompt = right.prompt[..keep].to_vec();
            batch.push(Generation::greedy(prompt, answer));
        }
        let mut together = engine(family, limits);
        let given = answers(&mut together, &batch);
        assert_eq!(given[0], right.greedy, "{family}");
        let shared = given[1].len().min(right.greedy.len());
        assert_eq!(given[1][..shared], right.greedy[..shared], "{family}");
        assert!(together.composer().cached_tokens() > 0 || together.steps() > 0);
        together.clear_cache();
        assert_eq!(together.composer().pool().free_pages(), PAGES, "{family}");
    }
}

#[test]
fn answers_survive_preemption() {
    let right = expected("llama3");
    let generation = |keep: usize| Generation {
        ignore_ends: true,
        ..Generation::greedy(right.prompt[..keep].to_vec(), 200)
    };
    let all: Vec<_> = [48, 40, 32, 24, 16, 8].map(generation).into();
    let mut engine = engine("llama3", Limits::default());
    let together = answers(&mut engine, &all);
    // Six answers of 200 tokens exceed the pool, so requests are preempted.
    assert!(engine.composer().lost_tokens() > 0);
    for (one, together) in all.into_iter().zip(together) {
        assert_eq!(answers(&mut engine, &[one]), [together]);
    }
}

/// Backends copy no pages to the host.
#[test]
fn pages_on_the_host_are_refused() {
    let limits = Limits {
        host_pages: 1000,
        ..Limits::default()
    };
    let refused = Engine::new(on_cpu("llama3"), limits).err().unwrap();
    assert!(
        matches!(refused, Error::HostPages { got: 1000 }),
        "{refused}"
    );
}

#[test]
fn running_ahead_gives_the_same_answers() {
    let right = expected("llama3");
    // Some end early; the others together exceed the pool.
    let generation = |(seed, keep): (u64, usize)| Generation {
        sampling: Sampling {
            temperature: 4.0,
            seed,
            ..Sampling::GREEDY
        },
        ignore_ends: seed < 14,
        ..Generation::greedy(right.prompt[..keep].to_vec(), 250 + keep as u32)
    };
    let all: Vec<_> = (10..)
        .zip([48, 40, 33, 24, 17, 8, 1])
        .map(generation)
        .collect();
    let limits = Limits {
        step_tokens: 20,
        ..Limits::default()
    };
    let [waiting, ahead] = [false, true].map(|ahead| {
        let mut engine = engine("llama3", limits).running_ahead(ahead);
        let given = answers(&mut engine, &all);
        assert!(engine.composer().lost_tokens() > 0);
        // Cancel a request while a step that contains it is under way.
        let request = engine.submit(all[0].clone()).unwrap();
        for _ in 0..6 {
            engine.step(&mut |_| ()).unwrap();
        }
        assert!(engine.cancel(request));
        let mut finished = Vec::new();
        while !engine.is_idle() {
            engine.step(&mut |event| finished.push(event)).unwrap();
        }
        let reason = Finish::Cancelled;
        assert_eq!(finished, [Event::Finished { request, reason }]);
        engine.clear_cache();
        assert_eq!(engine.composer().pool().free_pages(), PAGES);
        given
    });
    assert_eq!(waiting, ahead);
    let early = all.iter().zip(&ahead);
    let early = early.filter(|(one, answer)| answer.len() < one.max_new_tokens as usize);
    assert!(early.count() > 0, "no text ended early");
}

#[test]
fn sampled_text_depends_on_the_seed_alone() {
    let right = expected("qwen2");
    let sampled = |seed| Generation {
        sampling: Sampling {
            temperature: 8.0,
            seed,
            ..Sampling::GREEDY
        },
        ignore_ends: true,
        ..Generation::greedy(right.prompt.clone(), 12)
    };
    let mut engine = engine("qwen2", Limits::default());
    let [a, b]: [Vec<u32>; 2] = answers(&mut engine, &[sampled(1), sampled(2)])
        .try_into()
        .unwrap();
    assert_ne!(a, b);
    assert_eq!(answers(&mut engine, &[sampled(1)]), [a]);
    assert_eq!(answers(&mut engine, &[sampled(2)]), [b]);
}

#[test]
fn texts_become_the_tokens_of_transformers_and_come_back() {
    for family in FAMILIES {
        let (text, right) = (Text::read(&folder(family)).unwrap(), expected_text(family));
        let tokens = text.encode(&right.text, false).unwrap();
        assert_eq!(tokens, right.tokens, "{family}");
        assert_eq!(text.decode(&tokens).unwrap(), right.decoded, "{family}");
        let mut stream = TextStream::default();
        let mut streamed = String::new();
        for &token in &tokens {
            let new = stream.push(&text, token).unwrap();
            // Characters of several tokens appear only when complete.
            assert!(
                !new.contains(char::REPLACEMENT_CHARACTER),
                "{family}: {new:?}"
            );
            streamed += &new;
        }
        streamed += &stream.finish(&text).unwrap();
        assert_eq!(streamed, right.decoded, "{family}");
    }
}

/// Their values in `tokenizer.json` are those of the program that saved the file.
#[test]
fn prompts_are_neither_cut_nor_padded() {
    let (right, copy) = (expected_text("llama3"), tempfile::tempdir().unwrap());
    let tokenizer = fs::read(folder("llama3").join("tokenizer.json")).expect("a fixture");
    let mut tokenizer: serde_json::Value = serde_json::from_slice(&tokenizer).unwrap();
    let saved = |tokenizer: &serde_json::Value| {
        fs::write(copy.path().join("tokenizer.json"), tokenizer.to_string()).expect("writable");
        let text = Text::read(copy.path()).expect("sound");
        text.encode(&right.text, false).unwrap()
    };
    tokenizer["truncation"] = json!({
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    });
    assert_eq!(saved(&tokenizer), right.tokens);
    tokenizer["truncation"] = serde_json::Value::Null;
    tokenizer["padding"] = json!({
        "strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": null, "pad_id": 1, "pad_type_id": 0,
        "pad_token": "<pad>",
    });
    assert_eq!(saved(&tokenizer), right.tokens);
}

/// In the fixtures each byte has its own token if the byte is part of a character that the training text lacked.
#[test]
fn bytes_that_are_no_character_are_held_back_only_while_they_may_become_one() {
    for family in FAMILIES {
        let text = Text::read(&folder(family)).unwrap();
        let ids = |of: &str| text.encode(of, false).unwrap();
        let (cut, letter) = (ids("\u{597d}")[0], *ids("x").last().unwrap());
        let (mut stream, mut streamed) = (TextStream::default(), String::new());
        for pushed in 1..=100 {
            streamed += &stream.push(&text, cut).unwrap();
            let given = streamed.chars().count();
            assert!(
                (pushed - 3..=pushed).contains(&(given as i32)),
                "{family}: {given} of {pushed}"
            );
        }
        streamed += &stream.push(&text, letter).unwrap();
        assert_eq!(streamed, "\u{fffd}".repeat(100) + "x", "{family}");
        assert_eq!(stream.finish(&text).unwrap(), "", "{family}");
    }
}

#[test]
fn a_replacement_character_that_was_written_is_given() {
    for family in FAMILIES {
        let text = Text::read(&folder(family)).unwrap();
        for written in [
            "a\u{fffd}b",
            "\u{fffd}\u{fffd}\u{fffd}\u{fffd}\u{fffd}",
            "\u{597d}\u{fffd}\u{597d}",
        ] {
            let tokens = text.encode(written, false).unwrap();
            let (mut stream, mut streamed) = (TextStream::default(), String::new());
            for &token in &tokens {
                streamed += &stream.push(&text, token).unwrap();
            }
            let given = streamed.len();
            streamed += &stream.finish(&text).unwrap();
            assert_eq!(streamed, text.decode(&tokens).unwrap(), "{family}");
            assert!(
                streamed.ends_with(written) && streamed.len() - given <= 9,
                "{family}: {written:?}, {given} bytes in time"
            );
        }
    }
}

/// Some decoders decode a run of bytes as a whole, so an invalid byte changes the text before it.
#[test]
fn what_follows_a_cut_character_is_not_lost() {
    for family in FAMILIES {
        let text = Text::read(&folder(family)).unwrap();
        let ids = |of: &str| text.encode(of, false).unwrap();
        for whole in ["\u{e9}", "\u{597d}", "\u{1f600}"] {
            let letter = *ids("x").last().unwrap();
            let tokens = [
                ids(whole),
                vec![ids("\u{597d}")[0], letter],
                ids("\u{597d}"),
                vec![letter],
            ]
            .concat();
            // Start at the token that begins the character: some tokenizers insert a space token before it.
            let tokens: Vec<_> = tokens
                .into_iter()
                .filter(|&id| text.decode(&[id]).unwrap() != " ")
                .collect();
            let (mut stream, mut streamed) = (TextStream::default(), String::new());
            for &token in &tokens {
                streamed += &stream.push(&text, token).unwrap();
            }
            streamed += &stream.finish(&text).unwrap();
            assert_eq!(streamed, format!("{whole}\u{fffd}x\u{597d}x"), "{family}");
        }
    }
}

/// Long sequences in which characters end and begin in the middle of tokens.
#[test]
fn any_tokens_give_their_text_in_time() {
    for family in FAMILIES {
        let text = Text::read(&folder(family)).unwrap();
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..20 {
            let tokens: Vec<u32> = (0..80).map(|_| random.u32(..384)).collect();
            let (mut stream, mut streamed) = (TextStream::default(), String::new());
            for &token in &tokens {
                streamed += &stream.push(&text, token).unwrap();
            }
            let held = stream.finish(&text).unwrap();
            assert!(held.chars().count() <= 3, "{family}: {held:?}");
            streamed += &held;
            let whole = text.decode(&tokens).unwrap();
            if matches!(family, "llama3" | "qwen2" | "qwen3") {
                assert_eq!(streamed, whole, "{family}");
            }
            let letters = |of: &str| {
                of.chars()
                    .filter(char::is_ascii_alphanumeric)
                    .collect::<String>()
            };
            // A decoder that reads runs of bytes drops valid letters next to an invalid byte, so the stream may have
            // more letters.
            let mut got = letters(&streamed).into_bytes().into_iter();
            let is_there = letters(&whole)
                .bytes()
                .all(|letter| got.any(|other| other == letter));
            assert!(is_there, "{family}: {streamed:?} of {whole:?}");
        }
    }
}

#[test]
fn conversations_are_rendered_as_by_transformers() {
    for family in FAMILIES {
        let (text, right) = (Text::read(&folder(family)).unwrap(), expected_text(family));
        assert_eq!(
            text.render(&right.conversation).unwrap(),
            right.rendered,
            "{family}"
        );
        assert!(text.encode_chat(&right.conversation).unwrap().len() > 10);
    }
    // The error contains the template's message.
    let twice = [("user", "one"), ("user", "two")].map(|(role, content)| Message {
        role: role.to_owned(),
        content: content.to_owned(),
    });
    let refused = Text::read(&folder("gemma3"))
        .unwrap()
        .render(&twice)
        .unwrap_err();
    assert_eq!(
        refused.to_string(),
        "the chat template: roles must take turns: change the messages, or give a plain prompt"
    );
}

/// Arrival times come from user input. Those that nobody waits for are refused before anything is computed.
#[test]
fn an_arrival_in_a_distant_future_is_waited_for() {
    let trace = |last_s| Trace {
        arrivals: [0.0, last_s]
            .map(|at_s| Arrival {
                at_s,
                request: Request::of_length(4, 1),
            })
            .into(),
    };
    let mut engine = engine("llama3", Limits::default());
    let refused = replay(&mut engine, &trace(1e30), None, 0, &mut |_| {
        panic!("computed")
    });
    let refused = refused.expect_err("no such time").to_string();
    assert!(refused.contains("arrivals[1]"), "{refused}");
    let (left, heard) = mpsc::channel();
    thread::spawn(move || {
        replay(&mut engine, &trace(9e9), None, 0, &mut |one| {
            left.send(one).unwrap()
        })
    });
    assert_eq!(heard.recv_timeout(Duration::from_secs(60)), Ok(1));
    let waits = heard.recv_timeout(Duration::from_millis(500));
    assert_eq!(waits, Err(RecvTimeoutError::Timeout));
}

/// Templates of Mistral's models write today's date.
#[test]
fn a_template_may_ask_for_the_date() {
    let copy = tempfile::tempdir().expect("a temporary folder");
    let (from, to) = (folder("mistral"), copy.path());
    fs::copy(from.join("tokenizer.json"), to.join("tokenizer.json")).expect("writable");
    fs::write(to.join("chat_template.jinja"), "{{ strftime_now('%Y') }}").expect("writable");
    let year = Text::read(to).expect("sound").render(&[]).expect("known");
    assert!(year.parse::<u32>().is_ok_and(|year| year > 2000), "{year}");
}
