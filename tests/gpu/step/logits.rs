//! Biases, penalties and log-probabilities against the CPU and the softmax in f64.

use tandem_attn::{
    Error,
    exec::gpu::{DeviceArray, DeviceTensor, Gpu},
    problem::Dtype,
    step::{AdjustRow, AdjustToken, LOG_PROBS, LogProb, LogProbRow, NO_TOKEN, Penalties, cpu},
};

use super::{
    common::{self, Memory, Rng, Stream},
    steps::log_probs,
};

const PENALTIES: Penalties = Penalties {
    presence: 0.3,
    frequency: 0.7,
    repetition: 1.3,
};

const fn token(token: u32, bias: f32, seen: u32) -> AdjustToken {
    AdjustToken {
        token,
        bias,
        seen,
        logit: 0.0,
    }
}

/// Rows of logits with a gap behind each, but for the last.
struct Logits {
    values: Vec<f32>,
    vocabulary: usize,
    stride: usize,
}

impl Logits {
    fn new(rng: &mut Rng, rows: usize, vocabulary: usize, reach: f32) -> Self {
        let stride = (vocabulary + 9).next_multiple_of(8);
        let mut values = vec![1e4; (rows - 1) * stride + vocabulary];
        for row in values.chunks_mut(stride) {
            row[..vocabulary].copy_from_slice(&rng.floats(vocabulary, -reach, reach));
        }
        Self {
            values,
            vocabulary,
            stride,
        }
    }

    fn dense(&self, values: &[f32]) -> Vec<f32> {
        let rows = values
            .chunks(self.stride)
            .map(|row| &row[..self.vocabulary]);
        rows.collect::<Vec<_>>().concat()
    }

    fn rows(&self) -> usize {
        self.values.len().div_ceil(self.stride)
    }

    fn tensor(&self, memory: &Memory) -> DeviceTensor<2> {
        let shape = [self.rows(), self.vocabulary];
        memory.tensor(Dtype::F32, shape).with_stride(0, self.stride)
    }
}

/// A row for each of `of`: some tokens, and the newest one by its index.
fn rules(
    rng: &mut Rng,
    of: &[(u32, Option<u32>)],
    vocabulary: usize,
) -> (Vec<AdjustRow>, Vec<AdjustToken>) {
    let (mut rows, mut tokens) = (Vec::new(), Vec::new());
    for &(row, newest) in of {
        let first = tokens.len() as u32;
        let step = 1 + rng.below(1 + vocabulary / 40);
        for id in (rng.below(3)..vocabulary).step_by(step) {
            let seen = [0, 1, 9, AdjustToken::IN_PROMPT][rng.below(4)];
            let bias = [0.0, rng.between(-50.0, 50.0), f32::NEG_INFINITY][rng.below(3)];
            tokens.push(token(id as u32, bias, seen));
        }
        rows.push(PENALTIES.row(row, first..tokens.len() as u32, newest));
        tokens.push(token(0, 0.0, 0));
    }
    (rows, tokens)
}

#[test]
fn gpu_and_cpu_adjust_to_the_same_bits_and_restore() {
    let Some(gpu) = common::gpu("gpu_and_cpu_adjust_to_the_same_bits_and_restore") else {
        return;
    };
    for (seed, vocabulary) in (0..).zip([1, 3, 40, 300, 1111, 5000]) {
        let mut rng = Rng(seed);
        let logits = Logits::new(&mut rng, 4, vocabulary, 9.0);
        let ids: Vec<u32> = (0..3).map(|_| rng.below(vocabulary) as u32).collect();
        // One row stays as it is, and one has an id outside the vocabulary.
        let ids = [&ids[..], &[vocabulary as u32 + 3]].concat();
        let of = [(3, Some(1)), (0, None), (2, Some(3))];
        let (rows, mut tokens) = rules(&mut rng, &of, vocabulary);
        let memory = Memory::new(&logits.values);
        let (on_rows, on_tokens) = (Memory::new(&rows), Memory::new(&tokens));
        let (on_ids, stream) = (Memory::new(&ids), Stream::new());
        let tensor = logits.tensor(&memory);
        let adjust = || {
            // SAFETY: everything is there as described until the stream is done; tokens of a row are distinct.
            unsafe {
                gpu.adjust(
                    &tensor,
                    on_rows.array(),
                    on_tokens.array(),
                    on_ids.array(),
                    stream.0,
                )
            }
            .expect("a good call");
            stream.wait();
        };
        adjust();
        let mut right = logits.dense(&logits.values);
        cpu::adjust(&mut right, vocabulary, &rows, &mut tokens, &ids).expect("a good call");
        let got = logits.dense(&memory.read::<f32>());
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&got), bits(&right), "{vocabulary}");
        // SAFETY: as above.
        unsafe { gpu.restore(&tensor, on_rows.array(), on_tokens.array(), stream.0) }
            .expect("a good call");
        stream.wait();
        assert_eq!(
            bits(&memory.read::<f32>()),
            bits(&logits.values),
            "{vocabulary}"
        );
        // A second call with the same list is as the first: the newest token is counted once.
        adjust();
        let again = logits.dense(&memory.read::<f32>());
        assert_eq!(bits(&again), bits(&right), "{vocabulary}, again");
    }
}

fn log_probs_of(gpu: &Gpu, logits: &Logits, asked: &[LogProbRow], ids: &[u32]) -> Vec<LogProb> {
    let none = LogProb {
        token: 7,
        value: 7.0,
    };
    let out = Memory::new(&vec![none; asked.len() * LOG_PROBS as usize]);
    let memory = Memory::new(&logits.values);
    let (on_asked, on_ids, stream) = (Memory::new(asked), Memory::new(ids), Stream::new());
    let tensor = logits.tensor(&memory);
    // SAFETY: everything is there as described until the stream is done.
    unsafe {
        gpu.log_probs(
            &tensor,
            on_asked.array(),
            on_ids.array(),
            out.array(),
            stream.0,
        )
    }
    .expect("a good call");
    stream.wait();
    out.read()
}

#[test]
fn log_probabilities_are_those_of_the_softmax() {
    let Some(gpu) = common::gpu("log_probabilities_are_those_of_the_softmax") else {
        return;
    };
    for (seed, vocabulary) in (0..).zip([1, 5, 19, 64, 4096, 4103, 20_001]) {
        for reach in [0.0, 1.0, 30.0] {
            let mut rng = Rng(seed);
            let mut logits = Logits::new(&mut rng, 3, vocabulary, reach);
            // Equal logits in one row, and the largest ones in the tokens of one thread in another.
            let stride = logits.stride;
            logits.values[..vocabulary]
                .iter_mut()
                .for_each(|x| *x = x.round());
            for token in (16..vocabulary)
                .step_by(4096)
                .flat_map(|at| at..(at + 8).min(vocabulary))
            {
                logits.values[2 * stride + token] += 3.0 * reach;
            }
            let ids: Vec<u32> = (0..3).map(|_| rng.below(vocabulary) as u32).collect();
            let asked = [(2, 20), (0, 7), (1, 0)].map(|(row, top)| LogProbRow { row, top });
            let got = log_probs_of(gpu, &logits, &asked, &ids);
            for (asked, got) in asked.iter().zip(got.chunks(LOG_PROBS as usize)) {
                let row = &logits.values[asked.row as usize * stride..][..vocabulary];
                let right = log_probs(row, ids[asked.row as usize], asked.top as usize);
                let (written, rest) = got.split_at(right.len());
                for (got, (token, value)) in written.iter().zip(right) {
                    assert_eq!(got.token, token, "{vocabulary}, {asked:?}");
                    let near = (f64::from(got.value) - value).abs() < 2e-5 + 2e-7 * value.abs();
                    assert!(
                        token == NO_TOKEN || near,
                        "{} instead of {value}",
                        got.value
                    );
                }
                assert!(
                    rest.iter().all(|one| one.token == 7),
                    "written behind its end"
                );
            }
        }
    }
}

#[test]
fn logits_that_do_not_fit_are_refused() {
    let Some(gpu) = common::gpu("logits_that_do_not_fit_are_refused") else {
        return;
    };
    const NOWHERE: u64 = 1 << 40;
    let logits =
        |dtype, stride: usize| DeviceTensor::new(NOWHERE, dtype, [2, 40]).with_stride(0, stride);
    let asked = |logits: &DeviceTensor<2>, ids: usize, out: usize| {
        let [rows, on_ids, out] = [2, ids, out].map(|len| (NOWHERE, len));
        let stream = Stream::new();
        // SAFETY: refused before anything is launched.
        unsafe {
            gpu.log_probs(
                logits,
                DeviceArray::new(rows.0, rows.1),
                DeviceArray::new(on_ids.0, on_ids.1),
                DeviceArray::new(out.0, out.1),
                stream.0,
            )
        }
        .expect_err("it is refused")
    };
    let results = 2 * LOG_PROBS as usize;
    let refused = asked(&logits(Dtype::BF16, 40), 2, results);
    assert!(
        matches!(
            refused,
            Error::Dtype {
                tensor: "logits",
                ..
            }
        ),
        "{refused:?}"
    );
    let refused = asked(&logits(Dtype::F32, 44), 2, results);
    assert!(
        matches!(
            refused,
            Error::Stride {
                tensor: "logits",
                ..
            }
        ),
        "{refused:?}"
    );
    let refused = asked(&logits(Dtype::F32, 40), 1, results);
    assert!(
        matches!(refused, Error::Extent { tensor: "ids", .. }),
        "{refused:?}"
    );
    let refused = asked(&logits(Dtype::F32, 40), 2, results - 1);
    assert!(
        matches!(refused, Error::Extent { tensor: "out", .. }),
        "{refused:?}"
    );
    let stream = Stream::new();
    // SAFETY: as above.
    let refused = unsafe {
        gpu.adjust(
            &logits(Dtype::F32, 40),
            DeviceArray::new(NOWHERE, 3),
            DeviceArray::new(NOWHERE, 2),
            DeviceArray::new(NOWHERE, 0),
            stream.0,
        )
    };
    assert!(
        matches!(
            refused,
            Err(Error::Extent {
                tensor: "tokens",
                ..
            })
        ),
        "{refused:?}"
    );
}
