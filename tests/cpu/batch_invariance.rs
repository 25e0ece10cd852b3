//! What a result depends on: neither the order of the batch nor where it is cut; with fixed splits nothing
//! else in the batch at all.

use proptest::prelude::*;
use tandem_attn::{
    exec::Cpu,
    plan::{PlanOptions, Planner, SplitMode, Update},
    problem::{Batch, Dtype, PageTable, Part, Spec},
};

use crate::{
    agree,
    numeric::Tolerance,
    plan_of,
    problems::{Problem, Tensors, batch, cases, problem},
    run, tiny, widen,
};

/// A problem of one part with splits of two pages.
fn fixed_splits() -> impl Strategy<Value = Problem> {
    (problem(), batch()).prop_map(|(mut problem, batch)| {
        let tokens = 2 * batch.parts[0].table.page_size;
        problem.spec = problem.spec.with_dtype(Dtype::F32);
        problem.batch = batch;
        problem.options.split = SplitMode::Fixed { tokens };
        problem
    })
}

/// Outputs and LSEs as bits.
fn bits(problem: &Problem, tensors: &Tensors<f32, f32>) -> (Vec<u32>, Vec<u32>) {
    let (out, lse) = run::<_, _, f32>(&Cpu::new(), &plan_of(problem), tensors);
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    (bits(out), bits(lse))
}

proptest! {
    #![proptest_config(cases(300))]

    /// The order of requests is the order of their outputs, and nothing else.
    #[test]
    fn permuting_requests_permutes_outputs(
        problem in fixed_splits(), order in any::<prop::sample::Index>(),
    ) {
        let spec = problem.spec;
        let tensors: Tensors<f32, f32> = Tensors::random(&spec, &problem.batch, problem.layout, problem.seed);
        let (out, lse) = run::<_, _, f32>(&Cpu::new(), &plan_of(&problem), &tensors);

        let requests = problem.batch.requests();
        let shift = order.index(requests.max(1));
        let order: Vec<usize> = (0..requests).map(|r| (r + shift) % requests).rev().collect();
        let tokens = |r: usize| problem.batch.qo_indptr[r] as usize..problem.batch.qo_indptr[r + 1] as usize;
        let rows = |width: u32, x: &[f32]| -> Vec<f32> {
            let row = (spec.q_heads * width) as usize;
            order.iter().flat_map(|&r| x[tokens(r).start * row..tokens(r).end * row].to_vec()).collect()
        };
        let table = &problem.batch.parts[0].table;
        let mut permuted_table = PageTable::new(table.page_size, table.pool_pages);
        let mut qo_indptr = vec![0];
        for &r in &order {
            permuted_table.push(table.pages(r), table.kv_len(r));
            qo_indptr.push(qo_indptr[qo_indptr.len() - 1] + problem.batch.q_len(r));
        }
        let permuted = Problem { batch: Batch::new(qo_indptr, permuted_table), ..problem.clone() };
        let permuted_tensors = Tensors { q: rows(spec.head_dim_qk, &tensors.q), ..tensors.clone() };
        let got = run::<_, _, f32>(&Cpu::new(), &plan_of(&permuted), &permuted_tensors);
        let right = (rows(spec.head_dim_v, &out), rows(1, &lse));
        agree(&spec, &widen(&got), &widen(&right), Tolerance { absolute: 1e-5, relative: 1e-5 })?;
    }

    /// To the bit.
    #[test]
    fn with_fixed_splits_a_request_is_computed_as_if_alone(
        problem in fixed_splits(), request in any::<prop::sample::Index>(),
    ) {
        let Problem { spec, batch, layout, seed, .. } = &problem;
        if batch.requests() == 0 {
            return Ok(());
        }
        let request = request.index(batch.requests());
        let table = &batch.parts[0].table;
        let mut own = PageTable::new(table.page_size, table.pool_pages);
        own.push(table.pages(request), table.kv_len(request));
        let alone = Problem { batch: Batch::new(vec![0, batch.q_len(request)], own), ..problem.clone() };

        let tensors: Tensors<f32, f32> = Tensors::random(spec, batch, *layout, *seed);
        let tokens = batch.qo_indptr[request] as usize..batch.qo_indptr[request + 1] as usize;
        let of_request = |width: u32| {
            let row = (spec.q_heads * width) as usize;
            tokens.start * row..tokens.end * row
        };
        let own_tensors = Tensors { q: tensors.q[of_request(spec.head_dim_qk)].to_vec(), ..tensors.clone() };
        let (out, lse) = bits(&problem, &tensors);
        let (own_out, own_lse) = bits(&alone, &own_tensors);
        prop_assert_eq!(&out[of_request(spec.head_dim_v)], &own_out[..]);
        prop_assert_eq!(&lse[of_request(1)], &own_lse[..]);
    }

    /// To the bit: whether a plan was patched or made anew depends on whether another request needs a page.
    #[test]
    fn with_fixed_splits_a_plan_that_grew_computes_as_a_new_one(
        problem in fixed_splits(), growth in prop::collection::vec(0u32..20, 7),
    ) {
        let mut later = problem.clone();
        let table = &mut later.batch.parts[0].table;
        let page_size = table.page_size;
        for (len, growth) in table.last_page_len.iter_mut().zip(&growth).filter(|(len, _)| **len > 0) {
            *len = (*len + growth).min(page_size);
        }
        let mut plan = Planner::new()
            .plan(&problem.spec, &problem.batch, &problem.device, &problem.options)
            .expect("the problem can be planned");
        if !matches!(plan.grow(&later.batch), Some(Update::Kept | Update::Patched)) {
            return Ok(());
        }
        let Problem { spec, batch, layout, seed, .. } = &later;
        let tensors: Tensors<f32, f32> = Tensors::random(spec, batch, *layout, *seed);
        let (out, lse) = run::<_, _, f32>(&Cpu::new(), &plan, &tensors);
        let (new_out, new_lse) = bits(&later, &tensors);
        prop_assert!(out.iter().map(|x| x.to_bits()).eq(new_out));
        prop_assert!(lse.iter().map(|x| x.to_bits()).eq(new_lse));
    }
}

proptest! {
    #![proptest_config(cases(300))]

    /// Step after step, each request at its own pace, however the plan was kept or made anew.
    #[test]
    fn a_plan_that_is_kept_up_to_date_is_the_reference(
        problem in problem(), steps in prop::collection::vec(prop::collection::vec(0u32..4, 7), 1..5),
    ) {
        let mut now = problem;
        now.spec = now.spec.with_dtype(Dtype::F32);
        let mut planner = Planner::new();
        let mut plan = plan_of(&now);
        for step in steps {
            let (last, shared) = now.batch.parts.split_last_mut().expect("there is a part");
            let page_size = last.table.page_size;
            let grown: Vec<u32> = last.table.last_page_len.iter_mut().zip(step.into_iter().cycle()).map(|(len, by)| {
                let grown = if *len > 0 { by.min(page_size - *len) } else { 0 };
                *len += grown;
                grown
            }).collect();
            // What a request shares stays; its own keys behind it became more.
            for part in shared {
                for row_block in 0..part.keys_after.len() {
                    let first = part.q_indptr[row_block];
                    let own = last.q_indptr.iter().position(|&token| token == first);
                    part.keys_after[row_block] += own.map_or(0, |request| grown[request]);
                }
            }
            if now.batch.check(&now.spec).is_err() {
                return Ok(());
            }
            planner.update(&now.spec, &now.batch, &now.device, &now.options, &mut plan).expect("it can be planned");
            let tensors: Tensors<f32, f32> = Tensors::random(&now.spec, &now.batch, now.layout, now.seed);
            let right = tensors.reference(&now.spec, &now.batch);
            let got = run::<_, _, f32>(&Cpu::new(), &plan, &tensors);
            agree(&now.spec, &widen(&got), &(right.out, right.lse), Tolerance::of(Dtype::F32))?;
        }
    }
}

/// A prompt in chunks of whole tiles is computed as in one piece, to the bit.
#[test]
fn with_fixed_splits_a_prompt_in_chunks_is_the_whole_prompt() {
    // Rows enough to be cut at 32,768 keys, and too few for it.
    for (q_heads, before, ends, window) in [
        (64, 100, [128, 256, 390], None),
        (64, 0, [256, 384, 512], Some(90)),
        (8, 70, [128, 256, 333], None),
        (8, 70, [128, 512, 576], Some(150)),
    ] {
        let mut spec = Spec::new(q_heads, 2, 16).with_dtype(Dtype::F32);
        spec.variant.window_left = window;
        let problem = |begin: u32, end: u32| {
            let pages: Vec<u32> = (0..60).map(|page| page * 7 % 60).collect();
            let keys = before + end;
            let mut table = PageTable::new(16, 60);
            table.push(&pages[..keys.div_ceil(16) as usize], keys);
            let split = SplitMode::Fixed { tokens: 48 };
            Problem {
                batch: Batch::new(vec![0, end - begin], table),
                options: PlanOptions::default().with_split(split),
                ..tiny(&spec)
            }
        };
        let whole = problem(0, ends[2]);
        let tensors: Tensors<f32, f32> =
            Tensors::random(&spec, &whole.batch, whole.layout, u64::from(q_heads));
        let (out, lse) = bits(&whole, &tensors);
        let mut begin = 0;
        for end in ends {
            let rows = |width: u32| {
                let row = (q_heads * width) as usize;
                begin as usize * row..end as usize * row
            };
            let own = Tensors {
                q: tensors.q[rows(16)].to_vec(),
                ..tensors.clone()
            };
            let (chunk_out, chunk_lse) = bits(&problem(begin, end), &own);
            assert!(chunk_out == out[rows(16)], "outputs of {begin}..{end}");
            assert!(chunk_lse == lse[rows(1)], "LSEs of {begin}..{end}");
            begin = end;
        }
    }
}

/// Merging the states of any cut is the state of the whole: the same batch under every split.
#[test]
fn any_split_is_no_split() {
    let mut table = PageTable::new(16, 200);
    table.push(&(0..130).collect::<Vec<_>>(), 2075);
    let spec = Spec::new(8, 2, 64).with_dtype(Dtype::F32);
    let problem = Problem {
        batch: Batch::new(vec![0, 1], table),
        ..tiny(&spec)
    };
    let tensors: Tensors<f32, f32> = Tensors::random(&spec, &problem.batch, problem.layout, 3);
    let with = |split| {
        let options = PlanOptions::default().with_split(split);
        let plan = plan_of(&Problem {
            options,
            ..problem.clone()
        });
        (
            plan.items.len(),
            widen(&run::<_, _, f32>(&Cpu::new(), &plan, &tensors)),
        )
    };
    let (items, whole) = with(SplitMode::Off);
    assert_eq!(items, 1);
    for tokens in [16, 48, 512, 2064] {
        let (items, cut) = with(SplitMode::Fixed { tokens });
        assert_eq!(items, 2075usize.div_ceil(tokens as usize));
        agree(&spec, &cut, &whole, Tolerance::of(Dtype::F32)).unwrap();
    }
}

/// Of eight queries some leave a chunk as the table grows: how many stay decides how a CPU works through it.
#[test]
fn a_plan_with_fixed_splits_does_not_grow_out_of_a_window() {
    let mut table = PageTable::new(3, 10);
    table.push(&[2, 4, 6, 8, 5, 1, 7], 19);
    let mut spec = Spec::new(6, 2, 16).with_dtype(Dtype::F32);
    spec.variant.causal = false;
    spec.variant.window_left = Some(2);
    let mut problem = Problem {
        batch: Batch::new(vec![0, 8], table),
        ..tiny(&spec)
    };
    problem.options.split = SplitMode::Fixed { tokens: 6 };
    let mut later = problem.clone();
    later.batch.parts[0].table.last_page_len[0] = 2;

    let mut plan = plan_of(&problem);
    let update = Planner::new().update(
        &later.spec,
        &later.batch,
        &later.device,
        &later.options,
        &mut plan,
    );
    assert_eq!(update, Ok(Update::Planned));
    let tensors: Tensors<f32, f32> = Tensors::random(&spec, &later.batch, later.layout, 3);
    let (out, _) = run::<_, _, f32>(&Cpu::new(), &plan, &tensors);
    let (new_out, _) = bits(&later, &tensors);
    assert!(out.iter().map(|x| x.to_bits()).eq(new_out));
}

/// Queries that stand further left than planned see again what their window had passed.
#[test]
fn a_plan_whose_queries_move_back_is_made_anew() {
    let mut table = PageTable::new(4, 40);
    table.push(&(0..32).collect::<Vec<_>>(), 128);
    let spec = Spec::new(4, 1, 16)
        .with_dtype(Dtype::F32)
        .with_window_left(70);
    let with_keys_after = |keys| {
        let part = Part::new(vec![0, 1], table.clone()).with_keys_after(vec![keys]);
        Problem {
            batch: Batch::composed(vec![0, 1], vec![part]),
            ..tiny(&spec)
        }
    };
    let mut plan = plan_of(&with_keys_after(60));
    let back = with_keys_after(20);
    let update = Planner::new().update(&spec, &back.batch, &back.device, &back.options, &mut plan);
    assert_eq!(plan.verify(&back.batch), Ok(()));
    assert_eq!(update, Ok(Update::Planned));
}
