//! Traces whose bytes were damaged are refused or read: nothing panics.

use tandem_schedule::trace::Trace;

const MOONCAKE: &str = r#"{"timestamp": 0, "input_length": 1500, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3052, "input_length": 1000, "output_length": 490, "hash_ids": [0, 14]}
"#;
const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n\
                     2023-11-16 18:15:50.9951690,396,109\n";
const LENGTHS: &str = "num_prefill_tokens,num_decode_tokens,pd_ratio\n1024,64,16.0\n31,7,4.4\n";

/// SplitMix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[test]
fn damaged_traces_are_refused_or_read() {
    let (mut read, mut refused) = (0, 0);
    for (which, text) in [MOONCAKE, AZURE, LENGTHS].into_iter().enumerate() {
        assert!(Trace::parse(text, "whole").is_ok(), "{text}");
        for seed in 0..20_000_u64 {
            let mut state = seed << 8 | which as u64;
            let mut bytes = text.as_bytes().to_vec();
            for _ in 0..1 + next(&mut state) % 4 {
                let at = next(&mut state) as usize % bytes.len();
                match next(&mut state) % 4 {
                    0 => bytes[at] = next(&mut state) as u8,
                    1 => bytes[at] = b"0123456789,.-:\n\"{}"[next(&mut state) as usize % 18],
                    2 => drop(bytes.remove(at)),
                    _ => bytes.insert(at, b'9'),
                }
            }
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
