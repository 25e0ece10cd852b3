//! Pieces of the keys of a query: which items compute it.

use tandem_attn::{
    plan::{DeviceDescription, Kernel, Plan, PlanOptions, Planner, SplitMode, Tile, TileGroup},
    problem::{Batch, PageTable, Spec},
};

/// A request of a batch by itself.
pub fn only(batch: &Batch, request: usize) -> Batch {
    let table = &batch.parts[0].table;
    let mut own = PageTable::new(table.page_size, table.pool_pages);
    own.push(table.pages(request), table.kv_len(request));
    Batch::new(vec![0, batch.q_len(request)], own)
}

/// Kernel, tile, packed heads, rows and keys of a query token's items, in merging order.
pub fn pieces(plan: &Plan, token: u32) -> Vec<(Kernel, Tile, u32, u32, u32, u32)> {
    let mut pieces = Vec::new();
    for group in &plan.groups {
        for item in plan.items_of(group) {
            let has = if item.is_gathered() {
                plan.rows_of(item).iter().any(|row| row.token == token)
            } else {
                (item.rows_begin..item.rows_begin + item.rows).contains(&token)
            };
            if has {
                let TileGroup {
                    kernel, tile, pack, ..
                } = *group;
                pieces.push((kernel, tile, pack, item.rows, item.kv_begin, item.kv_end));
            }
        }
    }
    pieces.sort_unstable_by_key(|&(kernel, tile, pack, rows, begin, end)| {
        (begin, end, kernel, tile.m, tile.n, pack, rows)
    });
    pieces
}

/// Chunks that begin where tiles of the whole prompt do, of as many tokens as take the same kernel, and of as many rows as
/// are cut at the same keys.
#[test]
fn with_fixed_splits_chunks_have_the_pieces_of_the_whole_prompt() {
    let of = |plan: &Plan, token| {
        let mut pieces = pieces(plan, token);
        pieces.retain(|&(kernel, ..)| kernel == Kernel::Prefill);
        assert!(!pieces.is_empty(), "{plan}");
        pieces
    };
    // Device; query heads, KV heads and head dimension; window, where there is one; tokens of a split, keys before the prompt
    // and ends of its chunks.
    for (name, [q_heads, kv_heads, dim], window, tokens, before, ends) in [
        // 512 tokens of 32 heads are 16,384 rows.
        ("h200", [32, 8, 128], 0, 512, 0, [512, 1024, 2000]),
        ("h200", [32, 8, 128], 0, 512, 40_000, [640, 1280, 1999]),
        ("h200", [64, 8, 64], 0, 4096, 70_000, [256, 512, 700]),
        ("h200", [32, 8, 128], 0, 48_000, 90_000, [256, 640, 1000]),
        ("h200", [16, 16, 256], 0, 1024, 70_000, [512, 1024, 1536]),
        ("h200", [32, 8, 128], 9000, 1024, 70_000, [512, 1024, 1536]),
        // Of 4 heads as many are 2,048.
        ("h200", [4, 1, 128], 0, 1024, 9000, [256, 512, 600]),
        ("a100", [32, 8, 128], 0, 512, 40_000, [512, 1024, 2000]),
        ("cpu", [32, 8, 128], 0, 512, 40_000, [512, 1024, 2000]),
    ] {
        // Keys between cuts: of few rows as the options say, of many at least 32,768.
        let cut = if q_heads == 4 {
            tokens
        } else {
            tokens.max(32_768)
        };
        let device = DeviceDescription::named(name).unwrap();
        let mut spec = Spec::new(q_heads, kv_heads, dim);
        spec.variant.window_left = (window > 0).then_some(window);
        let options = PlanOptions::default().with_split(SplitMode::Fixed { tokens });
        let plan = |begin: u32, end: u32| {
            let (keys, page) = (before + end, 16);
            let mut table = PageTable::new(page, keys.div_ceil(page));
            table.push(&(0..keys.div_ceil(page)).collect::<Vec<_>>(), keys);
            let batch = Batch::new(vec![0, end - begin], table);
            let plan = Planner::new()
                .plan(&spec, &batch, &device, &options)
                .unwrap();
            assert_eq!(plan.verify(&batch), Ok(()));
            plan
        };
        let whole = plan(0, ends[2]);
        let mut begin = 0;
        for end in ends {
            let chunk = plan(begin, end);
            for token in begin..end {
                let of_whole = of(&whole, token);
                assert_eq!(of(&chunk, token - begin), of_whole, "{name}: {token}");
                let is_cut =
                    |&(.., key): &(Kernel, Tile, u32, u32, u32, u32)| key.is_multiple_of(cut);
                assert!(
                    of_whole[..of_whole.len() - 1].iter().all(is_cut),
                    "{of_whole:?}"
                );
            }
            begin = end;
        }
    }
}
