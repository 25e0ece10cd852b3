//! With fixed splits a request has the same bits alone and in any batch.

use half::bf16;
use proptest::{prelude::*, sample::Index};
use tandem_attn::{
    exec::gpu::{Arch, Gpu},
    plan::{PackRule, PlanOptions, SplitMode},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    tensor::{Element, F8E4M3},
};

use super::{
    Case, case,
    common::problems::{Tensors, cases},
    hopper,
    problem::OnDevice,
};

type Tensors16 = Tensors<bf16, bf16>;

/// Outputs and LSEs as bits.
fn bits<K: Element>(gpu: &Gpu, case: &Case, tensors: &Tensors<bf16, K>) -> (Vec<u16>, Vec<u32>) {
    let (mut workspace, stream) = case.uploaded(gpu);
    let device = OnDevice::new(&case.spec, &case.batch, tensors);
    device.run(gpu, &mut workspace, &stream)
}

fn check<K: Element>(
    gpu: &Gpu,
    mut case: Case,
    pages: u32,
    request: Index,
) -> Result<(), TestCaseError> {
    let [part] = &case.batch.parts[..] else {
        return Ok(()); // parts that span requests are a batch by themselves
    };
    if case.batch.requests() == 0 {
        return Ok(());
    }
    let table = &part.table;
    case.options.split = SplitMode::Fixed {
        tokens: pages * table.page_size,
    };
    let request = request.index(case.batch.requests());
    let mut own = PageTable::new(table.page_size, table.pool_pages);
    own.push(table.pages(request), table.kv_len(request));
    let alone = Case {
        batch: Batch::new(vec![0, case.batch.q_len(request)], own),
        ..case.clone()
    };

    let (spec, indptr) = (&case.spec, &case.batch.qo_indptr);
    let tensors = Tensors::<bf16, K>::random(spec, &case.batch, case.layout, case.seed);
    let of_request = |width: u32| {
        let row = (spec.q_heads * width) as usize;
        indptr[request] as usize * row..indptr[request + 1] as usize * row
    };
    let own_tensors = Tensors {
        q: tensors.q[of_request(spec.head_dim_qk)].to_vec(),
        ..tensors.clone()
    };
    let (out, lse) = bits(gpu, &case, &tensors);
    let (own_out, own_lse) = bits(gpu, &alone, &own_tensors);
    prop_assert!(
        out[of_request(spec.head_dim_v)] == own_out,
        "outputs differ"
    );
    prop_assert!(lse[of_request(1)] == own_lse, "LSEs differ");
    Ok(())
}

/// A prompt in chunks of whole tiles is computed as in one piece, to the bit.
#[test]
fn with_fixed_splits_a_prompt_in_chunks_is_the_whole_prompt() {
    let test = "with_fixed_splits_a_prompt_in_chunks_is_the_whole_prompt";
    let Some(gpu) = hopper(test) else {
        return;
    };
    // Rows enough to be cut at 32,768 keys, and too few for it.
    for (spec, before, ends, arch) in [
        (Spec::new(64, 2, 64), 30, [128, 260], None),
        (Spec::new(8, 2, 128), 250, [128, 330], None),
        (
            Spec::new(8, 2, 128).with_window_left(90),
            250,
            [256, 330],
            None,
        ),
        (Spec::new(4, 1, 256), 100, [64, 150], None),
        (Spec::new(7, 1, 256), 100, [128, 200], None),
        (Spec::new(8, 2, 64), 250, [128, 256], Some(Arch::Sm80)),
    ] {
        let case = |begin: u32, end: u32| {
            let pages: Vec<u32> = (0..40).map(|page| page * 7 % 40).collect();
            let keys = before + end;
            let mut table = PageTable::new(16, 40);
            table.push(&pages[..keys.div_ceil(16) as usize], keys);
            Case {
                spec: spec.with_dtype(Dtype::BF16),
                batch: Batch::new(vec![0, end - begin], table),
                layout: KvLayout::Nhd,
                options: PlanOptions::default().with_split(SplitMode::Fixed { tokens: 96 }),
                arch,
                sms: gpu.device().sms,
                in_set: false,
                seed: 5,
            }
        };
        let whole = case(0, ends[1]);
        let tensors = Tensors16::random(&whole.spec, &whole.batch, whole.layout, whole.seed);
        let (out, lse) = bits(gpu, &whole, &tensors);
        let mut begin = 0;
        for end in ends {
            let rows = |width: u32| {
                let row = (spec.q_heads * width) as usize;
                begin as usize * row..end as usize * row
            };
            let own = Tensors {
                q: tensors.q[rows(spec.head_dim_qk)].to_vec(),
                ..tensors.clone()
            };
            let (chunk_out, chunk_lse) = bits(gpu, &case(begin, end), &own);
            assert!(
                chunk_out == out[rows(spec.head_dim_v)] && chunk_lse == lse[rows(1)],
                "{spec:?}: {begin}..{end} differs"
            );
            begin = end;
        }
    }
}

#[test]
fn with_fixed_splits_a_request_is_computed_as_if_alone() {
    let Some(gpu) = hopper("with_fixed_splits_a_request_is_computed_as_if_alone") else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(150));
    runner
        .run(
            &(case(), 1..20_u32, any::<Index>()),
            |(case, pages, request)| check::<bf16>(gpu, case, pages, request),
        )
        .unwrap();
}

/// Kernels that read two KV heads at a time are for batches that keep the GPU busy with half as many units: a request alone does
/// not, and 16 of them do.
#[test]
fn with_fixed_splits_the_kernel_does_not_depend_on_the_batch() {
    let Some(gpu) = hopper("with_fixed_splits_the_kernel_does_not_depend_on_the_batch") else {
        return;
    };
    let kv_heads = gpu.multiprocessors().div_ceil(4) * 2;
    let mut runner = proptest::test_runner::TestRunner::new(cases(6));
    runner
        .run(
            &(any::<u64>(), any::<Index>(), any::<bool>()),
            |(seed, request, eight)| {
                let spec = Spec::new(kv_heads, kv_heads, if eight { 64 } else { 80 });
                let pages: Vec<u32> = (0..40).map(|page| page * 7 % 40).collect();
                let mut table = PageTable::new(16, 40);
                for _ in 0..16 {
                    table.push(&pages, 635);
                }
                let case = Case {
                    spec: if eight {
                        spec.with_kv_dtype(Dtype::F8E4M3)
                    } else {
                        spec
                    },
                    batch: Batch::new((0..=16).collect(), table),
                    layout: KvLayout::Nhd,
                    options: PlanOptions::default().with_packing(PackRule::Off),
                    arch: None,
                    sms: gpu.device().sms,
                    in_set: false,
                    seed: seed | 1,
                };
                match eight {
                    true => check::<F8E4M3>(gpu, case, 40, request),
                    false => check::<bf16>(gpu, case, 40, request),
                }
            },
        )
        .unwrap();
}
