//! Batches distributed over ranks: each rank's plan is run on pools that have nothing but its own pages and heads, and
//! what the ranks computed is merged and compared with attention in f64.

use std::ops::Range;

use crate::numeric::{Tolerance, compare, to_f64};
use crate::problems::{
    Pools, Problem, Tensors, alibi, cases, enrich, sinks, slopes, small_problem,
};
use half::bf16;
use proptest::prelude::*;
use tandem_attn::{
    exec::{
        Cpu,
        cpu::{RankState, merge_ranks},
    },
    kv::KvView,
    plan::Planner,
    problem::{Batch, Dtype, KvLayout, PageTable, Part, Spec},
    shard::{Keys, ShardDefect, ShardError, Sharding, Share},
    step::Rope,
    tensor::{Element, HeadTensors},
    variants::ALIBI,
};

/// Some way to distribute over up to 8 ranks; heads as far as there are some.
fn sharding() -> impl Strategy<Value = (Sharding, bool)> {
    let deal = prop_oneof![
        3 => (1..5_u32).prop_map(|pages| Keys::RoundRobin { pages }),
        2 => Just(Keys::Contiguous),
        2 => Just(Keys::Folded),
    ];
    (1..9_u32, deal, any::<bool>(), any::<bool>()).prop_map(|(ranks, deal, queries, heads)| {
        let sharding = match queries && ranks % 3 == 0 {
            true => Sharding::one().over_queries(ranks),
            false => Sharding::one().over_keys(ranks, deal),
        };
        (sharding, heads)
    })
}

/// Heads over two ranks where that goes.
fn with_heads(sharding: Sharding, spec: &Spec) -> Sharding {
    let two = sharding.over_heads(2);
    let goes =
        spec.kv_heads.is_multiple_of(2) || spec.kv_heads == 1 && spec.q_heads.is_multiple_of(2);
    if goes { two } else { sharding }
}

/// The pools of a rank: its pages and heads, and NaN where others have theirs.
fn own_pools<T: Element>(whole: &Pools<T>, spec: &Spec, share: &Share, part: &Part) -> Pools<T> {
    let table = &part.table;
    let own = &share.spec;
    let layout = KvLayout::Nhd;
    let strides = |dim| layout.strides(table.page_size, own.kv_heads, dim);
    let (k_strides, v_strides) = match own.latent {
        true => (strides(own.head_dim_qk), strides(own.head_dim_qk)),
        false => (strides(own.head_dim_qk), strides(own.head_dim_v)),
    };
    let nan = |page: u32| vec![T::from_f32(f32::NAN); (table.pool_pages * page) as usize];
    let mut pools = Pools {
        k: nan(k_strides.page),
        v: if spec.latent {
            Vec::new()
        } else {
            nan(v_strides.page)
        },
        k_strides,
        v_strides,
    };
    for &page in &table.indices {
        for token in 0..table.page_size {
            for (head, from) in (0..own.kv_heads).zip(share.kv_heads.clone()) {
                let at = |s: tandem_attn::kv::KvStrides, head: u32| {
                    (page * s.page + token * s.token + head * s.head) as usize
                };
                let dim = own.head_dim_qk as usize;
                pools.k[at(k_strides, head)..][..dim]
                    .copy_from_slice(&whole.k[at(whole.k_strides, from)..][..dim]);
                if !spec.latent {
                    let dim = own.head_dim_v as usize;
                    pools.v[at(v_strides, head)..][..dim]
                        .copy_from_slice(&whole.v[at(whole.v_strides, from)..][..dim]);
                }
            }
        }
    }
    pools
}

/// What a rank computes of its share.
fn run_share<T: Element>(
    problem: &Problem,
    tensors: &Tensors<T, T>,
    share: &Share,
) -> (Vec<T>, Vec<f32>) {
    let (spec, own) = (&problem.spec, &share.spec);
    let plan = Planner::new()
        .plan(own, &share.batch, &problem.device, &problem.options)
        .expect("a share can be planned");
    plan.verify(&share.batch)
        .expect("the plan computes the share");
    let dim = spec.head_dim_qk as usize;
    let q: Vec<T> = share
        .whole_tokens()
        .flat_map(|token| {
            let first = (token * spec.q_heads + share.q_heads.start) as usize * dim;
            &tensors.q[first..first + own.q_heads as usize * dim]
        })
        .copied()
        .collect();
    let parts = tensors.parts.iter().zip(&share.batch.parts);
    let pools: Vec<_> = parts
        .map(|(pools, part)| own_pools(pools, spec, share, part))
        .collect();
    let views: Vec<KvView<'_, T>> = pools.iter().map(Pools::view).collect();
    let rows = (plan.total_q * own.q_heads) as usize;
    let mut out = vec![T::from_f32(f32::NAN); rows * own.head_dim_v as usize];
    let mut lse = vec![f32::NAN; rows];
    let all_sinks = sinks(spec);
    let mut heads = HeadTensors::default();
    if let (Some(sinks), true) = (&all_sinks, own.variant.sinks) {
        heads = heads.with_sinks(&sinks[share.q_heads.start as usize..share.q_heads.end as usize]);
    }
    let (cpu, to_lse) = (Cpu::new(), Some(&mut lse[..]));
    let ran = match own.variant.hooks {
        // A variant is given what belongs to the rank's heads.
        Some(_) => {
            let slopes = &slopes(spec)[share.q_heads.start as usize..];
            let alibi = alibi(own, slopes);
            cpu.run_with(&alibi, &plan, &q, &views, &mut out, to_lse, &heads)
        }
        None => cpu.run_heads(&plan, &q, &views, &mut out, to_lse, &heads),
    };
    ran.expect("plan and tensors fit");
    (out, lse)
}

/// What all ranks compute together, at its place in the whole.
fn run_all<T: Element>(
    problem: &Problem,
    tensors: &Tensors<T, T>,
    shares: &[Share],
) -> (Vec<T>, Vec<f32>) {
    let Spec {
        q_heads,
        head_dim_v,
        ..
    } = problem.spec;
    let rows = (problem.batch.total_q() * q_heads) as usize;
    let dim = head_dim_v as usize;
    let (mut out, mut lse) = (
        vec![T::from_f32(f32::NAN); rows * dim],
        vec![f32::NAN; rows],
    );
    for first in shares
        .iter()
        .filter(|share| share.rank == share.group.start)
    {
        let group = &shares[first.group.start as usize..first.group.end as usize];
        let states: Vec<_> = group
            .iter()
            .map(|share| run_share(problem, tensors, share))
            .collect();
        let states: Vec<_> = states
            .iter()
            .map(|(out, lse)| RankState { out, lse })
            .collect();
        let heads = first.spec.q_heads as usize;
        let mut own_out = states[0].out.to_vec();
        let mut own_lse = states[0].lse.to_vec();
        merge_ranks(&states, heads, dim, &mut own_out, Some(&mut own_lse)).expect("they fit");
        for (own, token) in first.whole_tokens().enumerate() {
            let to = (token * q_heads + first.q_heads.start) as usize;
            out[to * dim..][..heads * dim]
                .copy_from_slice(&own_out[own * heads * dim..][..heads * dim]);
            lse[to..][..heads].copy_from_slice(&own_lse[own * heads..][..heads]);
        }
    }
    (out, lse)
}

fn against_reference<T: Element>(
    mut problem: Problem,
    sharding: Sharding,
    heads: bool,
) -> Result<(), TestCaseError> {
    problem.spec = problem.spec.with_dtype(T::DTYPE);
    enrich(&mut problem.spec, &mut problem.batch, problem.seed);
    let Problem { spec, batch, .. } = &problem;
    let sharding = if heads {
        with_heads(sharding, spec)
    } else {
        sharding
    };
    let shares = match sharding.shares(spec, batch) {
        Ok(shares) => shares,
        Err(ShardError::Positions { .. }) => {
            prop_assert!(
                spec.variant.window_left.is_some()
                    || spec.variant.hooks.is_some()
                    || !batch.ancestors.is_empty()
                    || !batch.masks.is_empty()
            );
            prop_assert!(sharding.deal != Keys::Contiguous && sharding.keys > 1);
            return Ok(());
        }
        Err(ShardError::WindowOfQueries { .. }) => {
            let measured = spec.variant.window_left.is_some() || !batch.masks.is_empty();
            prop_assert!(measured && !spec.variant.causal);
            return Ok(());
        }
        Err(error) => return Err(TestCaseError::fail(error.to_string())),
    };
    prop_assert_eq!(sharding.verify(spec, batch, &shares), Ok(()));
    let tensors: Tensors<T, T> = Tensors::random(spec, batch, problem.layout, problem.seed);
    let right = tensors.reference(spec, batch);
    let (out, lse) = run_all(&problem, &tensors, &shares);
    let tokens = batch.total_q() as usize;
    let shape = [tokens, spec.q_heads as usize, spec.head_dim_v as usize];
    let mut tolerance = Tolerance::of(T::DTYPE);
    if T::DTYPE != Dtype::F32 {
        // Values up to 1 were rounded before they were merged.
        tolerance.absolute += 1.0 / 256.0;
    }
    compare("out", &shape, &to_f64(&out), &right.out, tolerance).map_err(TestCaseError::fail)?;
    let exact = Tolerance {
        absolute: 1e-5,
        relative: 1e-5,
    };
    let shape = [tokens, spec.q_heads as usize];
    compare("lse", &shape, &to_f64(&lse), &right.lse, exact).map_err(TestCaseError::fail)?;
    let again = run_all(&problem, &tensors, &shares);
    prop_assert!(to_f64(&out) == to_f64(&again.0) && to_f64(&lse) == to_f64(&again.1));
    Ok(())
}

proptest! {
    #![proptest_config(cases(2000))]

    #[test]
    fn shares_of_up_to_eight_ranks_are_the_reference(problem in small_problem(), (sharding, heads) in sharding()) {
        against_reference::<f32>(problem.clone(), sharding, heads)?;
        against_reference::<bf16>(problem, sharding, heads)?;
    }
}

/// A causal batch of prompts and decodes, on pages of 16.
fn hybrid(prompts: &[(u32, u32)]) -> Batch {
    let pages: u32 = prompts.iter().map(|(_, keys)| keys.div_ceil(16)).sum();
    let (mut table, mut indptr, mut next) = (PageTable::new(16, pages), vec![0], 0);
    for &(queries, keys) in prompts {
        let own: Vec<u32> = (next..next + keys.div_ceil(16)).collect();
        next += own.len() as u32;
        table.push(&own, keys);
        indptr.push(indptr[indptr.len() - 1] + queries);
    }
    Batch::new(indptr, table)
}

/// Pairs of a query and a key that a share computes.
fn pairs(share: &Share) -> u64 {
    let part = &share.batch.parts[0];
    let of = |row_block| {
        let first = part.first_position(row_block);
        let seen = |query| {
            let keys = share
                .spec
                .variant
                .visible(first + query, part.kv_len(row_block));
            keys.len() as u64
        };
        (0..part.q_range(row_block).len() as i32)
            .map(seen)
            .sum::<u64>()
    };
    (0..part.row_blocks()).map(of).sum()
}

#[test]
fn queries_of_a_hybrid_batch_are_balanced() {
    let mut requests = vec![(4096, 4096), (1024, 8192)];
    requests.extend([(1, 3000); 24]);
    let (spec, batch) = (Spec::new(32, 8, 128), hybrid(&requests));
    for ranks in [2, 4] {
        let sharding = Sharding::one().over_queries(ranks);
        let shares = sharding.shares(&spec, &batch).unwrap();
        sharding.verify(&spec, &batch, &shares).unwrap();
        let pairs: Vec<u64> = shares.iter().map(pairs).collect();
        let (least, most) = (*pairs.iter().min().unwrap(), *pairs.iter().max().unwrap());
        assert!(most as f64 / least as f64 <= 1.1, "{pairs:?}");
        // Decodes are whole, and neighbours stay together.
        let decodes: Vec<_> = shares
            .iter()
            .map(|share| share.tokens.last().unwrap())
            .collect();
        assert!(
            decodes.windows(2).all(|pair| pair[0].end <= pair[1].start),
            "{decodes:?}"
        );
    }
}

#[test]
fn turns_balance_decodes_and_chunks() {
    let (spec, batch) = (Spec::new(32, 8, 128), hybrid(&[(1024, 12288), (1, 12288)]));
    for pages in [1, 16] {
        let deal = Keys::RoundRobin { pages };
        let sharding = Sharding::one().over_keys(2, deal);
        let shares = sharding.shares(&spec, &batch).unwrap();
        sharding.verify(&spec, &batch, &shares).unwrap();
        let [a, b] = [pairs(&shares[0]) as f64, pairs(&shares[1]) as f64];
        assert!((a / b - 1.0).abs() < 0.03, "{deal:?}: {a} and {b}");
    }
}

#[test]
fn shared_prefixes_stay_shared() {
    let mut table = PageTable::new(16, 100);
    let prefix: Vec<u32> = (0..32).collect();
    for request in 0..4 {
        let own = (40 + request * 4..44 + request * 4).collect::<Vec<_>>();
        table.push(&[&prefix[..], &own].concat(), 36 * 16);
    }
    let (spec, batch) = (Spec::new(32, 8, 128), Batch::new((0..5).collect(), table));
    let shares = Sharding::one()
        .over_keys(2, Keys::RoundRobin { pages: 2 })
        .shares(&spec, &batch)
        .unwrap();
    for share in &shares {
        let table = &share.batch.parts[0].table;
        assert!((1..4).all(|r| table.pages(r)[..16] == table.pages(0)[..16]));
    }
}

#[test]
fn variants_that_cannot_be_sharded_are_refused_with_what_can() {
    let batch = hybrid(&[(40, 400)]);
    let spec = Spec::new(32, 8, 128);
    let refused = |spec: &Spec, batch: &Batch, sharding: Sharding| {
        sharding.shares(spec, batch).unwrap_err().to_string()
    };
    let turns = Sharding::one().over_keys(2, Keys::RoundRobin { pages: 1 });
    let said = refused(&spec.with_window_left(50), &batch, turns);
    assert!(
        said.contains("a window") && said.contains("Keys::Contiguous"),
        "{said}"
    );
    let said = refused(&spec.with_hooks(&ALIBI), &batch, turns);
    assert!(said.contains("the variant"), "{said}");
    let tree = batch.clone().with_ancestors(vec![!0b10; 40]);
    let said = refused(&spec, &tree, turns);
    assert!(said.contains("a mask"), "{said}");
    let said = refused(&spec, &batch, Sharding::one().over_heads(3));
    assert!(said.contains("divisor of the KV heads"), "{said}");
    let both = turns.over_queries(2);
    assert!(matches!(
        both.shares(&spec, &batch),
        Err(ShardError::KeysAndQueries { .. })
    ));
    let many = turns.over_heads(37);
    assert!(matches!(
        many.shares(&spec, &batch),
        Err(ShardError::Ranks { got: 74, .. })
    ));
    let none = Sharding::one().over_keys(0, Keys::Contiguous);
    assert!(matches!(
        none.shares(&spec, &batch),
        Err(ShardError::Ranks { got: 0, .. })
    ));
    let turn = Sharding::one().over_keys(2, Keys::RoundRobin { pages: 0 });
    assert_eq!(turn.shares(&spec, &batch), Err(ShardError::NoTurn));
    let long = hybrid(&[(262_144, 262_144)]);
    assert!(matches!(
        turns.shares(&spec, &long),
        Err(ShardError::ShortTurns { .. })
    ));
}

#[test]
fn changed_shares_are_found() {
    let (spec, batch) = (
        Spec::new(32, 8, 128).with_sinks(),
        hybrid(&[(40, 400), (1, 90)]),
    );
    let sharding = Sharding::one().over_heads(2).over_keys(2, Keys::Folded);
    let shares = sharding.shares(&spec, &batch).unwrap();
    let broken = |change: fn(&mut Vec<Share>)| {
        let mut shares = shares.clone();
        change(&mut shares);
        sharding.verify(&spec, &batch, &shares).unwrap_err()
    };
    let defect = broken(|shares| shares.truncate(1));
    assert!(matches!(defect, ShardDefect::Shares { got: 1, .. }));
    let defect = broken(|shares| shares[1].batch.parts[0].table.indices[0] += 1);
    assert!(matches!(
        defect,
        ShardDefect::Seen {
            token: 0,
            first: 0,
            last: 1
        }
    ));
    let defect = broken(|shares| shares[3].spec.variant.sinks = true);
    assert!(matches!(
        defect,
        ShardDefect::Sinks {
            first: 2,
            got: 2,
            ..
        }
    ));
    let defect = broken(|shares| shares[2].q_heads = 0..16);
    assert!(matches!(
        defect,
        ShardDefect::Computed {
            token: 0,
            head: 0,
            got: 2
        }
    ));
    let defect = broken(|shares| shares[0].batch.qo_indptr[1] = 900);
    assert!(matches!(defect, ShardDefect::Batch { rank: 0, .. }));
}

/// Biases by distance and the rotary embedding are wrong there, although each key is seen once.
#[test]
fn changed_distances_are_found_where_they_matter() {
    let batch = hybrid(&[(1, 400)]);
    let sharding = Sharding::one().over_keys(2, Keys::Contiguous);
    let mut spec = Spec::new(32, 8, 128);
    let verified = |spec: &Spec| {
        let mut shares = sharding.shares(spec, &batch).unwrap();
        sharding.verify(spec, &batch, &shares).unwrap();
        for after in &mut shares[0].batch.parts[0].keys_after {
            *after += 1;
        }
        sharding.verify(spec, &batch, &shares)
    };
    assert_eq!(verified(&spec), Ok(()));
    spec.variant.hooks = Some(ALIBI.name);
    assert!(matches!(
        verified(&spec),
        Err(ShardDefect::Seen { token: 0, .. })
    ));
    spec.variant.hooks = None;
    spec.rotary = Some(Rope::new(128, 1e4));
    assert!(matches!(
        verified(&spec),
        Err(ShardDefect::Seen { token: 0, .. })
    ));
}

#[test]
fn the_owner_of_a_page_has_it_in_its_table() {
    let (spec, batch) = (Spec::new(8, 2, 64), hybrid(&[(1, 1000)]));
    for deal in [
        Keys::RoundRobin { pages: 3 },
        Keys::Contiguous,
        Keys::Folded,
    ] {
        let sharding = Sharding::one().over_keys(3, deal);
        let shares = sharding.shares(&spec, &batch).unwrap();
        for page in 0..63 {
            let owner = sharding.owner(page, 63);
            assert!(
                shares[owner as usize].batch.parts[0]
                    .table
                    .pages(0)
                    .contains(&page)
            );
        }
    }
}

/// Turns of no pages never came to an end.
#[test]
#[should_panic(expected = "turns have no pages")]
fn turns_of_no_pages_have_no_owner() {
    let turns = Sharding::one().over_keys(2, Keys::RoundRobin { pages: 0 });
    let _ = turns.owner(0, 3);
}

/// They were indices out of bounds.
#[test]
fn shares_of_what_is_not_there_are_found() {
    let batch = hybrid(&[(1, 100), (30, 60)]);
    let spec = Spec::new(32, 8, 128);
    let sharding = Sharding::one().over_keys(2, Keys::Contiguous);
    let shares = sharding.shares(&spec, &batch).unwrap();
    sharding.verify(&spec, &batch, &shares).unwrap();
    let changes: [fn(&mut Share); 6] = [
        |share| share.tokens[0].end += 100,
        |share| share.tokens.push(Range { start: 7, end: 3 }),
        |share| share.q_heads.end += 1,
        |share| share.group.end += 1,
        |share| share.group = 1..1,
        |share| share.group = Range { start: 2, end: 1 },
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let mut wrong = shares.clone();
        change(&mut wrong[0]);
        let got = sharding.verify(&spec, &batch, &wrong);
        assert!(
            matches!(got, Err(ShardDefect::Range { rank: 0, .. })),
            "{index}: {got:?}"
        );
    }
}
