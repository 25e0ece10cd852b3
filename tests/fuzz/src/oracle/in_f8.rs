//! Prefills with products of 8 bits: what is right depends on the tiles of the plan.

use tandem_attn::{
    kv::KvView,
    plan::Plan,
    problem::{Batch, Compute, Dtype, KvLayout},
    reference::Output,
};

use super::{Right, of_request};
use crate::{case::Case, in_8_bits, world::World};

/// What a plan with products of 8 bits gives; none for other plans.
pub fn of_plan(case: &Case, batch: &Batch, plan: &Plan, world: &World, q: &[f32]) -> Option<Right> {
    let spec = &case.spec;
    if spec.compute != Compute::F8 {
        return None;
    }
    let (keys, values) = (&world.keys, &world.values);
    let view = KvView::new(spec, KvLayout::Nhd, case.page_size, keys, values);
    let sinks = spec.variant.sinks.then_some(&world.sink_values[..]);
    let heads = spec.q_heads as usize;
    let scale_of = |token: usize, kv_head: usize| {
        let row = token * heads + kv_head * spec.group() as usize;
        [0, 1].map(|side| of_request(case, world, side, row))
    };
    macro_rules! expected {
        ($element:ty) => {{
            let q: Vec<_> = q.iter().map(|&x| <$element>::from_f32(x)).collect();
            in_8_bits::Problem {
                spec,
                batch,
                plan,
                q: &q,
                view,
                scale_of: &scale_of,
                sinks,
            }
            .attention()
        }};
    }
    let expected = match spec.q_dtype {
        Dtype::F16 => expected!(half::f16),
        _ => expected!(half::bf16),
    };
    Some(Right {
        output: Output {
            out: expected.out,
            lse: expected.lse,
        },
        off: Some([expected.out_tolerance, expected.lse_tolerance]),
        roundings: 1.0,
    })
}
