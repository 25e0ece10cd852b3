//! Results that were never measured, for tables and pictures.

use tandem_cli::{
    backend::{Ceilings, Machine},
    bench::{CaseResult, ResultFile, Stats, results::FORMAT},
    check::Errors,
};

/// A file with so many results.
pub fn results(points: usize) -> ResultFile {
    ResultFile {
        format: FORMAT.to_owned(),
        program: "tandem 0.1.0".to_owned(),
        date: "2026-01-02T03:04:05Z".to_owned(),
        machine: Machine {
            backend: "gpu".to_owned(),
            name: "a GPU".to_owned(),
            details: "sm_90a".to_owned(),
        },
        ceilings: Ceilings {
            read_bytes_per_s: 4.5e12,
            copy_bytes_per_s: 4.2e12,
            flops_per_s: 8e14,
            flops_from_description: false,
        },
        options: Vec::new(),
        results: (0..points).map(result).collect(),
    }
}

/// Times around 50 µs; every third is a peer's.
fn result(index: usize) -> CaseResult {
    let middle = 50.0 + 3.0 * index as f64;
    let times = |middle: f64| {
        Stats::of(vec![
            middle - 1.0,
            middle - 0.75,
            middle - 0.5,
            middle - 0.25,
            middle,
            middle + 0.25,
            middle + 0.5,
            middle + 0.75,
            middle + 1.0,
        ])
    };
    CaseResult {
        case: format!(
            "case {index} with a name that goes on and on, far beyond the edge of the picture"
        ),
        implementation: if index.is_multiple_of(3) {
            "peer"
        } else {
            "tandem"
        }
        .to_owned(),
        heads: "32/8 × 128 bf16".to_owned(),
        page_size: 16,
        requests: 1,
        query_tokens: 1,
        bytes: 100_000_000,
        flops: 1_000_000_000 << (index % 7),
        hybrid: None,
        plan: (index != 0).then(|| times(9.0)),
        flushed: Some(times(middle)),
        warm: Some(times(middle - 4.0)),
        read: None,
        energy: None,
        errors: Some(Errors {
            tokens: 16,
            out: 1e-3,
            out_of_bound: 0.25,
            lse: Some(1e-6),
            in_8_bits: false,
            rotary: false,
        }),
        skipped: None,
    }
}
