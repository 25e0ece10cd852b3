//! Traces with damaged bytes must be refused or read, without a panic.

#[path = "../../tests/common/damage.rs"]
mod damage;
#[path = "../../tests/common/numeric.rs"]
mod numeric;

use damage::damaged;
use tandem_schedule::trace::Trace;

const MOONCAKE: &str = r#"{"timestamp": 0, "input_length": 1500, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3052, "input_length": 1000, "output_length": 490, "hash_ids": [0, 14]}
"#;
const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n\
                     2023-11-16 18:15:50.9951690,396,109\n";
const LENGTHS: &str = "num_prefill_tokens,num_decode_tokens,pd_ratio\n1024,64,16.0\n31,7,4.4\n";

#[test]
fn damaged_traces_are_refused_or_read() {
    let (mut read, mut refused) = (0, 0);
    for (which, text) in [MOONCAKE, AZURE, LENGTHS].into_iter().enumerate() {
        assert!(Trace::parse(text, "whole").is_ok(), "{text}");
        for seed in 0..20_000_u64 {
            let bytes = damaged(text.as_bytes(), seed << 8 | which as u64);
            match Trace::parse(&String::from_utf8_lossy(&bytes), "damaged") {
                Ok(_) => read += 1,
                Err(error) => {
                    refused += 1;
                    assert!(error.to_string().contains("damaged"), "{error}");
                }
            }
        }
    }
    assert!(
        read > 1000 && refused > 1000,
        "{read} read, {refused} refused"
    );
}
