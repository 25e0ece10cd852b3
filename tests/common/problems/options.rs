//! Each option of a specification or a batch, changed.

use tandem_attn::{
    problem::{Batch, Compute, Dtype, PageTable, Spec},
    step::{Pairing, Rope},
    variants::{ALIBI, DISTANCE_BIAS, SIGMOID},
};

/// Changes one thing.
type Change = fn(&mut Spec, &mut Batch);

/// Each option of a specification or a batch, changed: from a causal batch with several queries to a request.
pub const OPTIONS: &[(&str, Change)] = &[
    ("causal", |spec, _| spec.variant.causal = false),
    ("window_left", |spec, _| spec.variant.window_left = Some(5)),
    ("soft_cap", |spec, _| spec.variant.soft_cap = Some(2.0)),
    ("sinks", |spec, _| spec.variant.sinks = true),
    ("hooks", |spec, _| *spec = spec.with_hooks(&ALIBI)),
    ("hooks with a table", |spec, _| {
        *spec = spec.with_hooks(&DISTANCE_BIAS)
    }),
    ("hooks without a softmax", |spec, _| {
        *spec = spec.with_hooks(&SIGMOID)
    }),
    ("weights that add up without hooks", |spec, _| {
        spec.variant.adds_up = true
    }),
    ("sinks without a softmax", |spec, _| {
        *spec = spec.with_hooks(&SIGMOID).with_sinks()
    }),
    ("rotary", |spec, _| {
        spec.rotary = Some(Rope::new(64, 10_000.0))
    }),
    ("rotary of neighbours, in part", |spec, _| {
        let rope = Rope::new(32, 10_000.0).with_pairing(Pairing::Interleaved);
        spec.rotary = Some(rope);
    }),
    ("rotary, wider than heads", |spec, _| {
        spec.rotary = Some(Rope::new(1026, 10_000.0))
    }),
    ("scale", |spec, _| spec.scale *= 0.5),
    ("q_heads", |spec, _| spec.q_heads *= 2),
    ("kv_heads", |spec, _| spec.kv_heads = 1),
    ("head_dim_qk", |spec, _| spec.head_dim_qk = 128),
    ("head_dim_v", |spec, _| spec.head_dim_v = 48),
    ("q_dtype", |spec, _| spec.q_dtype = Dtype::F32),
    ("kv_dtype", |spec, _| spec.kv_dtype = Dtype::F8E4M3),
    ("out_dtype", |spec, _| spec.out_dtype = Dtype::F32),
    ("compute", |spec, _| spec.compute = Compute::F8),
    ("ancestors", |_, batch| {
        let queries = batch.total_q() as usize;
        batch.ancestors = vec![!0b10; queries];
    }),
    ("ancestors of other queries", |_, batch| {
        batch.ancestors = vec![!0b10; 1]
    }),
    ("ancestors without a causal mask", |spec, batch| {
        spec.variant.causal = false;
        batch.ancestors = vec![!0b10; batch.total_q() as usize];
    }),
    ("keys_after", |_, batch| {
        let row_blocks = batch.parts[0].row_blocks();
        batch.parts[0].keys_after = vec![3; row_blocks];
    }),
    ("last_page_len", |_, batch| {
        batch.parts[0].table.last_page_len[0] -= 1
    }),
    ("indices", |_, batch| {
        batch.parts[0].table.indices.swap(0, 3)
    }),
];

/// A causal batch that [`OPTIONS`] change.
pub fn plain(dtype: Dtype) -> (Spec, Batch) {
    let mut table = PageTable::new(16, 12);
    table.push(&[4, 1, 7, 2], 57);
    table.push(&[9, 3], 30);
    let batch = Batch::new(vec![0, 6, 7], table);
    (Spec::new(8, 2, 64).with_dtype(dtype), batch)
}
