//! Decodes whose keys are distributed over all GPUs of a host. Each GPU computes attention over its own pages, and the results are
//! merged by direct reads of the other GPUs' memory.
//!
//! Run it with `cargo run --release --features cuda --example several_gpus`. With fewer than two GPUs, or if
//! they cannot read each other's memory, it says what is missing and ends.
//!
//! To use this code in a program of your own, add the features `cuda` and `unstable`, and the crate `half`.

use half::bf16;
use tandem_attn::{
    Error,
    gpu::{DeviceBuffer, Gpu, KvPool, Rank, RankOptions, RunTensors, WorkspaceOptions},
    kv::KvView,
    plan::{Bound, PlanOptions, Planner},
    problem::{Batch, KvLayout, PageTable, Spec},
    reference,
    shard::{Keys, RankError, Sharding, Share},
};

const LAYERS: usize = 4;

/// One rank: its plan, its memory, a graph of all layers, and what it computed.
fn serve(
    gpu: &Gpu,
    mut rank: Rank,
    share: &Share,
    host: &[Vec<bf16>; 3],
) -> Result<Vec<bf16>, Error> {
    let (spec, tokens, stream) = (share.spec, share.batch.total_q() as usize, gpu.stream()?);
    let plan = Planner::new().plan(&spec, &share.batch, &gpu.device(), &PlanOptions::default())?;
    let mut workspace = gpu.workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default())?;
    // SAFETY: here and below, the stream and all buffers live until the stream was waited for.
    unsafe { workspace.upload(&plan, *stream)? };
    // In this example every GPU has all pages. In a server each GPU has only its own.
    let [q, k, v] = host
        .each_ref()
        .map(|values| DeviceBuffer::from_slice(gpu, values));
    let (q, k, v, out) = (
        q?,
        k?,
        v?,
        DeviceBuffer::<bf16>::zeroed(gpu, host[0].len())?,
    );
    let table = &share.batch.parts[0].table;
    let (page, pages) = (table.page_size, table.pool_pages);
    let pools = [KvPool::new(
        &spec,
        KvLayout::Nhd,
        page,
        pages,
        k.address(),
        v.address(),
    )];
    let shape = [tokens, spec.q_heads as usize, spec.head_dim_v as usize];
    let (q, result) = (q.tensor(shape), out.tensor(shape));
    let tensors = RunTensors::new(&q, &pools, &result);
    rank.announce(tokens)?; // once per step, on all ranks
    let graph = rank.capture(gpu, &stream, |rank, stream| {
        // SAFETY: as above.
        (0..LAYERS)
            .try_for_each(|_| unsafe { rank.run(gpu, &mut workspace, &tensors, 0..tokens, stream) })
    })?;
    // SAFETY: as above.
    unsafe { graph.launch(*stream)? };
    stream.synchronize()?;
    rank.check()?; // if a rank failed, all ranks get an error
    out.read()
}

/// Runs the example.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let open = |ordinal| {
        let mut progress = |module| eprintln!("{module}");
        Gpu::builder().compile_ptx(&mut progress).build(ordinal)
    };
    let mut gpus: Vec<Gpu> = Vec::new();
    while gpus.len() < 8 {
        match open(gpus.len() as u32) {
            Ok(gpu) => gpus.push(gpu),
            Err(_) if gpus.len() >= 2 => break,
            Err(missing) => {
                println!(
                    "this takes two GPUs, and {} can be used: {missing}",
                    gpus.len()
                );
                return Ok(());
            }
        }
    }
    let (spec, keys) = (Spec::new(8, 2, 128), 5000);
    let mut table = PageTable::new(16, 2 * keys / 16 + 2);
    for request in 0..2 {
        table.push(
            &(request..)
                .step_by(2)
                .take(keys as usize / 16 + 1)
                .collect::<Vec<_>>(),
            keys,
        );
    }
    let pool = (table.pool_pages * 16 * spec.kv_heads * spec.head_dim_qk) as usize;
    let batch = Batch::new(vec![0, 1, 2], table);
    let values = |len: usize| {
        (0..len)
            .map(|i| bf16::from_f32((i * 37 % 101) as f32 / 50.0 - 1.0))
            .collect()
    };
    let host = [values(2 * 8 * 128), values(pool), values(pool)];

    // Pages alternate between the GPUs.
    let sharding = Sharding::one().over_keys(gpus.len() as u32, Keys::RoundRobin { pages: 1 });
    let shares = sharding.shares(&spec, &batch)?;
    let together: Vec<_> = gpus.iter().collect();
    let ranks = match Gpu::ranks(&together, &spec, 2, &RankOptions::default()) {
        Ok(ranks) => ranks,
        Err(missing @ Error::Rank(RankError::NoPeerAccess { .. })) => {
            println!("this takes GPUs that read each other's memory: {missing}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let results: Vec<_> = std::thread::scope(|scope| {
        let of = ranks.into_iter().zip(&gpus).zip(&shares);
        let of: Vec<_> = of
            .map(|((rank, gpu), share)| scope.spawn(|| serve(gpu, rank, share, &host)))
            .collect();
        of.into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .collect()
    });
    let right = reference::attention(
        &spec,
        &batch,
        &host[0],
        &[KvView::new(&spec, KvLayout::Nhd, 16, &host[1], &host[2])],
    )?;
    for (rank, result) in results.into_iter().enumerate() {
        let result = result?;
        let off = result.iter().zip(&right.out);
        let off = off.map(|(got, right)| (f64::from(got.to_f32()) - right).abs());
        let off = off.fold(0.0, f64::max);
        println!("rank {rank}: largest difference to f64 {off:.4}");
        assert!(off < 0.02, "the ranks together are not attention");
    }
    Ok(())
}
