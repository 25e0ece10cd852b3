//! Problems without their tensors, with options and a device to plan them for.

use proptest::prelude::*;
use tandem_attn::{
    plan::{DeviceDescription, JointDescription, PlanOptions, QueryStep, SplitMode},
    problem::{Batch, KvLayout, Spec},
};

use super::batches::{batch, batch_of, request};

/// A problem without its tensors.
#[derive(Clone, Debug)]
pub struct Problem {
    pub spec: Spec,
    pub batch: Batch,
    pub layout: KvLayout,
    pub device: DeviceDescription,
    pub options: PlanOptions,
    pub seed: u64,
}

pub fn spec() -> impl Strategy<Value = Spec> {
    let heads = prop_oneof![
        Just((1u32, 1u32)),
        Just((4, 1)),
        Just((6, 2)),
        Just((8, 1)),
        Just((16, 1)),
        Just((4, 4))
    ];
    let dims = prop_oneof![
        3 => Just((16u32, 16u32)),
        3 => Just((32, 32)),
        3 => Just((128, 128)),
        3 => Just((48, 80)),
        3 => Just((80, 16)),
        1 => Just((64, 512))
    ];
    let window = prop_oneof![2 => Just(None), 1 => (0u32..60).prop_map(Some)];
    let cap = prop_oneof![2 => Just(None), 1 => (1.0f32..30.0).prop_map(Some)];
    (heads, dims, any::<bool>(), window, cap, any::<bool>()).prop_map(
        |((q_heads, kv_heads), (qk, v), causal, window, cap, latent)| {
            let mut spec = Spec::new(q_heads, kv_heads, qk).with_head_dim_v(v);
            spec.variant.causal = causal;
            spec.variant.window_left = window;
            spec.variant.soft_cap = cap;
            // Of the heads that it may be true for.
            spec.latent = kv_heads == 1 && v <= qk && latent;
            spec
        },
    )
}

/// Any problem: one part or several, any mask, all ways to split.
pub fn problem() -> impl Strategy<Value = Problem> {
    problem_of(spec(), batch())
}

/// The same with few and short requests and narrow heads, for many cases.
pub fn small_problem() -> impl Strategy<Value = Problem> {
    let own = prop_oneof![1 => Just(0u32), 6 => 0u32..20, 1 => 0u32..90];
    let queries = prop_oneof![1 => Just(0u32), 6 => Just(1), 4 => 1u32..10];
    let narrow = spec().prop_map(|mut spec| {
        spec.head_dim_qk = spec.head_dim_qk.min(32);
        spec.head_dim_v = spec.head_dim_v.min(32);
        spec
    });
    problem_of(
        narrow,
        batch_of(prop::collection::vec(request(own, queries), 0..4)),
    )
}

fn problem_of(
    spec: impl Strategy<Value = Spec>,
    batch: impl Strategy<Value = Batch>,
) -> impl Strategy<Value = Problem> {
    let layout = prop_oneof![Just(KvLayout::Nhd), Just(KvLayout::Hnd)];
    let split = prop_oneof![
        Just(SplitMode::Makespan),
        (1u32..4).prop_map(|times| SplitMode::Fixed { tokens: times * 48 }),
        Just(SplitMode::Off),
    ];
    (
        spec,
        batch,
        layout,
        device(),
        split,
        any::<bool>(),
        any::<u64>(),
    )
        .prop_map(|(spec, mut batch, layout, device, split, composed, seed)| {
            if composed && spec.variant.window_left.is_none() {
                batch = batch.share_prefixes();
            }
            let page_size = batch.parts[0].table.page_size;
            let split = match split {
                SplitMode::Fixed { tokens } => SplitMode::Fixed {
                    tokens: tokens.next_multiple_of(page_size),
                },
                other => other,
            };
            let options = PlanOptions::default().with_split(split);
            Problem {
                spec,
                batch,
                layout,
                device,
                options,
                seed,
            }
        })
}

/// The CPU with so many workers, cut into small tiles or not, so that small batches are split and merged.
fn device() -> impl Strategy<Value = DeviceDescription> {
    (
        1u32..60,
        prop_oneof![Just(8u32), Just(16), Just(64)],
        1u32..9,
        1u32..5,
        any::<bool>(),
        prop_oneof![2 => Just(None), 1 => Just(Some(0.0)), 3 => Just(Some(1e9))],
    )
        .prop_map(|(workers, m, tokens, pack, small, joint)| {
            let mut device = DeviceDescription::named("cpu").expect("it is built in");
            device.sms = workers;
            device.decode.joint = joint.map(|apart_ns| JointDescription {
                cut_ns: apart_ns,
                apart_ns,
                behind_ns: apart_ns,
                bytes: 1e9,
            });
            if small {
                device.decode_max_tokens = tokens;
                device.decode.rows = vec![16];
                let step = |up_to, rows, pack| QueryStep {
                    head_dim: None,
                    compute: None,
                    up_to,
                    rows,
                    pack,
                };
                device.prefill.by_q_len =
                    vec![step(Some(32), 48, None), step(None, m.max(16), Some(pack))];
            }
            device
        })
}
