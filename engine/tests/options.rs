//! Options of backends that cannot be met are refused when a model is loaded.

mod common;

use common::{engine, expected, folder, on_cpu, options};
use tandem_engine::{Architecture, Backend, CpuBackend, Engine, Error, Limits, Weights, Work};

/// As kernels and page tables take them.
#[test]
fn pages_of_no_or_too_many_tokens_are_refused() {
    let folder = folder("llama3");
    let weights = Weights::open(&folder).expect("a fixture");
    for page_size in [0, 4097, u32::MAX] {
        let mut options = options(4, 16);
        options.page_size = page_size;
        let architecture = Architecture::read(&folder).expect("a fixture");
        let refused = CpuBackend::load(architecture, &weights, &options, &mut |_| ());
        let refused = refused.expect_err("no such pages");
        assert!(matches!(refused, Error::Attention(_)), "{refused:?}");
        let said = refused.to_string();
        assert!(
            said.contains(&format!("is {page_size}: give 1 to 4096 tokens")),
            "{said}"
        );
    }
}

/// A backend for steps of up to 16 tokens and 4 rows of logits.
struct Small(Box<dyn Backend>);

impl Backend for Small {
    common::of_the_backend_within!(but limits);

    fn step_tokens(&self) -> u32 {
        16
    }

    fn step_requests(&self) -> u32 {
        4
    }

    fn begin(&mut self, work: &Work<'_>) -> Result<(), Error> {
        assert!(work.inputs.tokens.len() <= 16 && work.rows.len() <= 4);
        self.0.begin(work)
    }
}

#[test]
fn chunks_of_logits_are_as_small_as_a_step_of_the_backend() {
    let prompt = expected("llama3").prompt;
    let right = engine("llama3", Limits::default()).logits(&prompt, 4);
    let mut small = Engine::new(Box::new(Small(on_cpu("llama3"))), Limits::default()).unwrap();
    assert!(small.logits(&prompt, 48).unwrap() == right.unwrap());
}
