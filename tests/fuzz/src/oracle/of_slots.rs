//! Attention of each query head over a list of slots.

use rayon::prelude::*;
use tandem_attn::reference::Output;

use super::with_scales;
use crate::{case::Case, world::World};

/// Attention over the slots that `seen` lists for a token and a query head, in f64: no page tables, no parts, no positions.
pub fn of_slots(
    case: &Case,
    world: &World,
    q: &[f32],
    sinks: bool,
    seen: impl Fn(usize, usize) -> Vec<u32> + Sync,
) -> Output {
    let spec = &case.spec;
    let (heads, dim, dim_v) = (
        spec.q_heads as usize,
        spec.head_dim_qk as usize,
        spec.head_dim_v as usize,
    );
    let (kv_heads, group) = (spec.kv_heads as usize, spec.group() as usize);
    let row = |q: &[f32], row: usize| -> (Vec<f64>, f64) {
        let (token, head) = (row / heads, row % heads);
        let place = |slot: u32| slot as usize * kv_heads + head / group;
        let logit = |slot: &u32| {
            let key = &world.keys[place(*slot) * dim..][..dim];
            let pairs = q[row * dim..][..dim].iter().zip(key);
            let dot: f64 = pairs.map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
            let logit = dot * f64::from(spec.scale);
            match spec.variant.soft_cap.map(f64::from) {
                Some(cap) => cap * (logit / cap).tanh(),
                None => logit,
            }
        };
        let slots = seen(token, head);
        let logits: Vec<f64> = slots.iter().map(logit).collect();
        let of_token = token % spec.variant.sink_tokens as usize * heads + head;
        let sink = sinks.then(|| f64::from(world.sink_values[of_token]));
        let all = || logits.iter().copied().chain(sink);
        let (mut out, most) = (vec![0.0; dim_v], all().fold(f64::NEG_INFINITY, f64::max));
        if most == f64::NEG_INFINITY {
            return (out, most);
        }
        let sum: f64 = all().map(|logit| (logit - most).exp()).sum();
        for (&slot, logit) in slots.iter().zip(&logits) {
            let weight = (logit - most).exp() / sum;
            let value = &world.values[place(slot) * dim_v..][..dim_v];
            let pairs = out.iter_mut().zip(value);
            pairs.for_each(|(out, &v)| *out += weight * f64::from(v));
        }
        (out, most + sum.ln())
    };
    with_scales(case, world, q, |q| {
        let rows: Vec<_> = (0..q.len() / dim)
            .into_par_iter()
            .map(|at| row(q, at))
            .collect();
        let (out, lse): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
        Output {
            out: out.concat(),
            lse,
        }
    })
}
