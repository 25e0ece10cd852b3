//! Decodes of a model's layers in a graph, each with a KV cache of its own: what a layer's attention takes if nothing is
//! between.

use tandem_attn::{
    exec::gpu::Gpu,
    plan::PlanOptions,
    problem::{Batch, KvLayout},
};

use super::{
    run::{Pool, Step, Timer, queries},
    shuffled, spec, without_prefixes,
};

const LAYERS: u32 = 32;

/// Microseconds of a layer. The pool has room for all layers of each batch.
pub fn measure(gpu: &Gpu, timer: &Timer, pool: &Pool) {
    println!(
        "\n{:<26} {:>9} {:>12}  launches of a layer",
        "a layer of 32 in a graph", "µs", "same pages"
    );
    for (requests, keys, q_heads, kv_heads) in [
        (1, 1024, 32, 8),
        (4, 1024, 32, 8),
        (16, 1024, 32, 8),
        (1, 8192, 32, 8),
        (32, 512, 32, 8),
        (16, 1024, 64, 8),
        (16, 1024, 28, 4),
    ] {
        let spec = spec(q_heads, kv_heads);
        let batch: Batch = shuffled(without_prefixes(&vec![keys; requests], 16), 5);
        let q = queries(&spec, requests as u32);
        let step = Step::planned(
            gpu,
            (&spec, &batch),
            (&gpu.device(), &PlanOptions::default()),
            pool,
            &q,
            KvLayout::Nhd,
        );
        let layers: Vec<_> = (0..u64::from(LAYERS))
            .map(|layer| pool.of_layer(&spec, &batch, KvLayout::Nhd, layer))
            .collect();
        step.run();
        let own = timer.graph_of(LAYERS, |layer, stream| {
            step.enqueue_on(&layers[layer as usize], stream);
        });
        let same = timer.graph(&step);
        println!(
            "{:<26} {own:>9.2} {same:>12.2}  {}",
            format!("{requests} × {keys}, {q_heads}/{kv_heads}"),
            super::run::launches(&step)
        );
    }
}
