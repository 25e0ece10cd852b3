//! Options of backends that cannot be met are refused when a model is loaded.

mod common;

use common::{folder, options};
use tandem_engine::{Architecture, CpuBackend, Error, Weights};

/// As kernels and page tables take them.
#[test]
fn pages_of_no_or_too_many_tokens_are_refused() {
    let folder = folder("llama3");
    let weights = Weights::open(&folder).expect("a fixture");
    for page_size in [0, 129, u32::MAX] {
        let mut options = options(4, 16);
        options.page_size = page_size;
        let architecture = Architecture::read(&folder).expect("a fixture");
        let refused = CpuBackend::load(architecture, &weights, &options, &mut |_| ());
        let refused = refused.expect_err("no such pages");
        assert!(matches!(refused, Error::Attention(_)), "{refused:?}");
        let said = refused.to_string();
        assert!(
            said.contains(&format!("is {page_size}: give 1 to 128 tokens")),
            "{said}"
        );
    }
}
