//! `tandem demo`: attention over pieces of the keys, merged, and checked against f64.

use std::{fmt::Write, time::Instant};

use tandem_attn::{
    Error,
    abi::MergeRow,
    exec::cpu::{Partials, merge_states},
    problem::Spec,
};

use crate::{Failure, output, pieces};

const EXAMPLES: &str = "\
Example:
  tandem demo";

/// Compute a small batch, check it against f64, and show what happened.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {}

/// Runs it.
///
/// # Errors
/// [`Failure::Wrong`] where a result is too far from f64.
pub fn run(_args: &Args) -> Result<(), Failure> {
    let mut report = format!(
        "tandem {}, on the CPU\n\nOne decode step, its keys cut into pieces, the pieces' states merged; \
         errors against f64:\n\n{:>8} {:>7} {:>7} {:>13} {:>13}\n",
        env!("CARGO_PKG_VERSION"),
        "request",
        "keys",
        "pieces",
        "output error",
        "LSE error"
    );
    let spec = Spec::new(32, 8, 128);
    let mut exact = true;
    for (request, (keys, pieces)) in [(1, 1), (77, 3), (1000, 4), (4096, 16), (20_000, 64)]
        .into_iter()
        .enumerate()
    {
        let error = pieces::check(&spec, keys, pieces)?;
        let _ = writeln!(
            report,
            "{request:>8} {keys:>7} {pieces:>7} {:>13.1e} {:>13.1e}",
            error.out, error.lse
        );
        exact &= error.out < 1e-5 && error.lse < 1e-5;
    }
    report += &time_merge(&spec)?;
    output::print(&report);
    if exact {
        Ok(())
    } else {
        Err(Failure::Wrong(
            "not within 1e-5: please report this".to_owned(),
        ))
    }
}

/// Merges a batch worth of states and says how long it took.
fn time_merge(spec: &Spec) -> Result<String, Error> {
    const ROWS: usize = 512;
    const STATES: usize = 4;
    let (heads, dim) = (spec.q_heads as usize, spec.head_dim_v as usize);
    let partial_out = vec![0.5; ROWS * STATES * heads * dim];
    let partial_lse = vec![1.0; ROWS * STATES * heads];
    let slots: Vec<u32> = (0..(ROWS * STATES) as u32).collect();
    let rows: Vec<MergeRow> = (0..ROWS as u32)
        .map(|token| MergeRow {
            token,
            slots_begin: token * STATES as u32,
            slots: STATES as u32,
            reserved: 0,
        })
        .collect();
    let partials = Partials {
        out: &partial_out,
        lse: &partial_lse,
        q_heads: heads,
        head_dim_v: dim,
    };
    let mut out = vec![0.0_f32; ROWS * heads * dim];
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let begin = Instant::now();
        merge_states(&partials, &rows, &slots, &mut out, None)?;
        best = best.min(begin.elapsed().as_secs_f64());
    }
    let bytes = 4 * (partial_out.len() + partial_lse.len() + out.len());
    Ok(format!(
        "{ROWS} rows of {STATES} states ({heads} heads × {dim}) merge in {:.2} ms, {:.1} GB/s.\n",
        best * 1e3,
        bytes as f64 / best / 1e9
    ))
}
