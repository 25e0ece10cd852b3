//! Ways in which keys and values of a pool may lie, other than dense pools of their own. Tensor maps describe all of them.

use tandem_attn::{abi::KvStrides, problem::KvLayout};

/// Strides of keys and of values with heads of `dims` elements, by the name of the way.
pub fn layouts(page: u32, heads: u32, dims: [u32; 2]) -> Vec<(&'static str, [KvStrides; 2])> {
    let dense = |layout: KvLayout| dims.map(|dim| layout.strides(page, heads, dim));
    let [k, v] = dense(KvLayout::Nhd);
    let both = k.page + v.page;
    let pages_apart = |sides: [KvStrides; 2], page| sides.map(|side| KvStrides { page, ..side });
    let tokens_apart = |side: KvStrides, token| KvStrides {
        page: page * token,
        token,
        ..side
    };
    let mut ways = vec![
        // [pages, 2, page size, heads, dim]
        (
            "a page of values behind each of keys",
            pages_apart([k, v], both),
        ),
        (
            "values behind the keys of a token",
            [k, v].map(|side| tokens_apart(side, k.token + v.token)),
        ),
        (
            "a head of nobody in each token",
            [k, v].map(|side| tokens_apart(side, side.token + side.head)),
        ),
        (
            "each value behind its key",
            [k, v].map(|side| KvStrides {
                head: dims[0] + dims[1],
                ..tokens_apart(side, k.token + v.token)
            }),
        ),
    ];
    if dims[0] == dims[1] {
        let [of_heads, _] = dense(KvLayout::Hnd);
        // [pages, 2, heads, page size, dim], as FlashInfer has it
        let paired = pages_apart([of_heads; 2], both);
        ways.push(("a page of heads of values behind each of keys", paired));
        let more = pages_apart([of_heads; 2], of_heads.page + of_heads.head);
        ways.push(("a head of nobody in each page", more));
    }
    ways
}

/// As [`layouts`], where values lie otherwise than keys: only for heads of which no kernel pads the columns.
pub fn uneven(page: u32, heads: u32, dims: [u32; 2]) -> Vec<(&'static str, [KvStrides; 2])> {
    let [k, v] = dims.map(|dim| KvLayout::Nhd.strides(page, heads, dim));
    let further = |page, token| KvStrides { page, token, ..v };
    vec![
        (
            "gaps between pages of values",
            [k, further(v.page + 64, v.token)],
        ),
        (
            "gaps between values of tokens",
            [k, further(page * (v.token + 64), v.token + 64)],
        ),
    ]
}
