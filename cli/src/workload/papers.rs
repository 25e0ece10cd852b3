//! Reads collected files with the cases of papers: PAT's Figure 10, POD's figures, trees.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, de::Error as _};
use serde_json::Value;
use tandem_attn::problem::{Dtype, KvLayout, Spec};

use super::{Case, Requests, Tree, file::check_tree, json};
use crate::Failure;

/// The kind of file.
#[derive(Clone, Copy, Debug)]
pub(super) enum Paper {
    PatTrees,
    PatTimes,
    Pod,
    Trees,
}

/// Recognises a file by fields that only this kind has.
pub(super) fn recognise(value: &Value) -> Option<Paper> {
    if value.get("fasttree_kernel_bench").is_some() {
        return Some(Paper::Trees);
    }
    if value.get("fig11").is_some() {
        return Some(Paper::Pod);
    }
    let first = value.get(0)?;
    first.get("tree")?;
    match first.get("heads")? {
        Value::Object(_) => Some(Paper::PatTrees),
        _ => Some(Paper::PatTimes),
    }
}

pub(super) fn cases(paper: Paper, name: &str, text: &str) -> Result<Vec<Case>, Failure> {
    Ok(match paper {
        Paper::PatTrees => {
            let entries: Vec<PatTree> = json::read(name, text)?;
            let numbers = entries.iter().map(|entry| {
                let levels = entry.tree.tree.nodes_per_level.len();
                entry.heads.len() as u64 * levels as u64
            });
            few(name, numbers.sum())?;
            let each = entries.iter().flat_map(|entry| {
                let heads = entry.heads.keys();
                heads.map(|heads| pat_case(entry.id, &entry.tree, *heads))
            });
            each.collect()
        }
        Paper::PatTimes => {
            let entries: Vec<PatTime> = json::read(name, text)?;
            let each = entries.iter();
            each.map(|entry| pat_case(entry.id, &entry.tree, entry.heads))
                .collect()
        }
        Paper::Pod => {
            let pod: Pod = json::read(name, text)?;
            few(name, pod.count())?;
            pod.cases()
        }
        Paper::Trees => {
            let trees: Trees = json::read(name, text)?;
            few(name, trees.count())?;
            let cases = trees.cases();
            cases
                .map_err(|reason| Failure::Input(format!("{name}: relay_kernel_bench: {reason}")))?
        }
    })
}

/// Maximum number of cases and of levels of their trees: even a short file can describe any number.
const MOST_CASES: u64 = 1 << 20;

fn few(name: &str, cases: u64) -> Result<(), Failure> {
    match cases <= MOST_CASES {
        true => Ok(()),
        false => Err(Failure::Input(format!(
            "{name}: it stands for {cases} cases and levels of trees; at most {MOST_CASES} are made"
        ))),
    }
}

fn case(name: String, (heads, kv_heads): (u32, u32), page_size: u32) -> Case {
    Case {
        name,
        spec: Spec::new(heads, kv_heads, 128).with_dtype(Dtype::F16),
        page_size,
        layout: KvLayout::Nhd,
        requests: Vec::new(),
        tree: None,
        by_head: None,
        top_k: None,
        numbers: Default::default(),
    }
}

/// Query heads and KV heads, written as `"32/8"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Heads(u32, u32);

impl<'de> Deserialize<'de> for Heads {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let parsed = text
            .split_once('/')
            .and_then(|(q, kv)| Some(Self(q.parse().ok()?, kv.parse().ok()?)));
        parsed.ok_or_else(|| D::Error::custom(format!("{text:?} is not heads/kv_heads")))
    }
}

/// Nodes and tokens of each level, written as `"1,10_4096,416"`.
#[derive(Clone, Debug)]
struct TreeName {
    text: String,
    tree: Tree,
}

impl<'de> Deserialize<'de> for TreeName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let list =
            |text: &str| -> Option<Vec<u32>> { text.split(',').map(|n| n.parse().ok()).collect() };
        let parsed = text.split_once('_').and_then(|(nodes, tokens)| {
            Some(Tree {
                nodes_per_level: list(nodes)?,
                tokens_per_level: list(tokens)?,
            })
        });
        let tree = parsed.ok_or_else(|| {
            D::Error::custom(format!("{text:?} is not nodes,…_tokens,… of each level"))
        })?;
        check_tree(&tree).map_err(D::Error::custom)?;
        Ok(Self { text, tree })
    }
}

#[derive(Debug, Deserialize)]
struct PatTree {
    id: u32,
    tree: TreeName,
    heads: BTreeMap<Heads, serde::de::IgnoredAny>,
}

#[derive(Debug, Deserialize)]
struct PatTime {
    id: u32,
    tree: TreeName,
    heads: Heads,
}

/// PAT uses pages of 32 tokens.
fn pat_case(id: u32, tree: &TreeName, Heads(heads, kv_heads): Heads) -> Case {
    Case {
        tree: Some(tree.tree.clone()),
        ..case(
            format!("pat {id} {heads}/{kv_heads} {}", tree.text),
            (heads, kv_heads),
            32,
        )
    }
}

/// Nodes and tokens of each level, written as `{"N": [1, 10], "C": [4096, 416]}`.
#[derive(Debug, Deserialize)]
#[serde(try_from = "Lists")]
struct Levels(Tree);

#[derive(Deserialize)]
struct Lists {
    #[serde(rename = "N")]
    nodes: Vec<u32>,
    #[serde(rename = "C")]
    tokens: Vec<u32>,
}

impl TryFrom<Lists> for Levels {
    type Error = String;

    fn try_from(Lists { nodes, tokens }: Lists) -> Result<Self, String> {
        let tree = Tree {
            nodes_per_level: nodes,
            tokens_per_level: tokens,
        };
        check_tree(&tree)?;
        Ok(Self(tree))
    }
}

#[derive(Debug, Deserialize)]
struct Trees {
    fasttree_kernel_bench: Vec<Levels>,
    fasttree_heads: Vec<(u32, u32)>,
    pat_unit_test_trees: Vec<Levels>,
    pat_unit_test_heads: (u32, u32),
    relay_kernel_bench: Relay,
}

#[derive(Debug, Deserialize)]
struct Relay {
    num_reqs: Vec<u32>,
    context_len: Vec<u32>,
    prefix_len: Vec<u32>,
    heads: (u32, u32),
}

impl Trees {
    /// Number of cases; a tree counts once per level.
    fn count(&self) -> u64 {
        let levels = |trees: &[Levels]| -> u64 {
            let levels = trees.iter();
            levels
                .map(|Levels(tree)| tree.nodes_per_level.len() as u64)
                .sum()
        };
        let relay = &self.relay_kernel_bench;
        let lists = [&relay.num_reqs, &relay.context_len, &relay.prefix_len];
        let relay = lists.into_iter().fold(2, |product: u64, list| {
            product.saturating_mul(list.len() as u64)
        });
        let fasttree = levels(&self.fasttree_kernel_bench) * self.fasttree_heads.len() as u64;
        relay.saturating_add(fasttree + levels(&self.pat_unit_test_trees))
    }

    fn cases(&self) -> Result<Vec<Case>, String> {
        let tree_case = |source: &str, tree: &Tree, heads: (u32, u32)| {
            let list = |numbers: &[u32]| {
                let numbers: Vec<_> = numbers.iter().map(u32::to_string).collect();
                numbers.join(",")
            };
            let (q, kv) = heads;
            let (nodes, tokens) = (&tree.nodes_per_level, &tree.tokens_per_level);
            let name = format!("{source} {q}/{kv} {}_{}", list(nodes), list(tokens));
            Case {
                tree: Some(tree.clone()),
                ..case(name, heads, 16)
            }
        };
        let mut cases = Vec::new();
        for Levels(tree) in &self.fasttree_kernel_bench {
            for &heads in &self.fasttree_heads {
                cases.push(tree_case("fasttree", tree, heads));
            }
        }
        for Levels(tree) in &self.pat_unit_test_trees {
            cases.push(tree_case("pat-test", tree, self.pat_unit_test_heads));
        }
        let relay = &self.relay_kernel_bench;
        for &requests in &relay.num_reqs {
            for &context in &relay.context_len {
                for &prefix in &relay.prefix_len {
                    let tree = Tree {
                        nodes_per_level: vec![1, requests],
                        tokens_per_level: vec![prefix, context],
                    };
                    check_tree(&tree)?;
                    cases.push(tree_case("relay", &tree, relay.heads));
                }
            }
        }
        Ok(cases)
    }
}

#[derive(Debug, Deserialize)]
struct Pod {
    fig1: Fig1,
    fig6: Fig6,
    fig11: Fig11,
    fig13: Fig13,
    fig14: Fig14,
    table8: Table8,
}

#[derive(Debug, Deserialize)]
struct Fig1 {
    q_heads: u32,
    kv_heads: u32,
    configs: BTreeMap<String, Fig1Config>,
}

#[derive(Debug, Deserialize)]
struct Fig1Config {
    p_chunk: u32,
    p_ctx: u32,
    d_bs: u32,
    d_cl: u32,
}

#[derive(Debug, Deserialize)]
struct Fig6 {
    q_heads: u32,
    kv_heads: u32,
    chunk: u32,
    n_chunks: u32,
    d_bs: Vec<u32>,
    d_cl: u32,
}

#[derive(Debug, Deserialize)]
struct Fig11 {
    /// Model, query heads, KV heads, chunk, context, chunks, decodes.
    cases: Vec<(String, u32, u32, u32, u32, u32, u32)>,
}

#[derive(Debug, Deserialize)]
struct Fig13 {
    q_heads: u32,
    kv_heads: u32,
    ctx: Vec<u32>,
    d_bs: Vec<u32>,
}

#[derive(Debug, Deserialize)]
struct Fig14 {
    models: BTreeMap<String, (u32, u32)>,
    ctx: u32,
    p_chunk: u32,
    d_bs: Vec<u32>,
}

#[derive(Debug, Deserialize)]
struct Table8 {
    ctx: u32,
    chunk: u32,
    d_bs: u32,
    chunk_ids: Vec<u32>,
}

/// A prompt chunk that ends at `context`, together with decodes.
struct Hybrid {
    chunk: u32,
    context: u32,
    decodes: u32,
    decode_context: u32,
}

impl Hybrid {
    fn case(&self, name: String, heads: (u32, u32)) -> Case {
        let requests = |q_len, kv_len, count| Requests {
            branches: 0,
            all_pages: false,
            one_block_in: 0,
            q_len,
            kv_len,
            count,
        };
        Case {
            requests: vec![
                requests(self.chunk, self.context, 1),
                requests(1, self.decode_context, self.decodes),
            ],
            ..case(name, heads, 16)
        }
    }
}

impl Pod {
    fn count(&self) -> u64 {
        let len = |list: &[u32]| list.len() as u64;
        let fig11 = self.fig11.cases.iter();
        let fig11: u64 = fig11.map(|(.., chunks, _)| u64::from(*chunks)).sum();
        fig11
            + self.fig1.configs.len() as u64
            + len(&self.fig6.d_bs) * u64::from(self.fig6.n_chunks)
            + len(&self.fig13.ctx) * len(&self.fig13.d_bs)
            + self.fig14.models.len() as u64 * len(&self.fig14.d_bs)
            + len(&self.table8.chunk_ids)
    }

    fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        let fig1 = &self.fig1;
        for (name, config) in &fig1.configs {
            let hybrid = Hybrid {
                chunk: config.p_chunk,
                context: config.p_ctx,
                decodes: config.d_bs,
                decode_context: config.d_cl,
            };
            cases.push(hybrid.case(format!("pod fig1 {name}"), (fig1.q_heads, fig1.kv_heads)));
        }
        let fig6 = &self.fig6;
        for &decodes in &fig6.d_bs {
            for index in 1..=fig6.n_chunks {
                let hybrid = Hybrid {
                    chunk: fig6.chunk,
                    context: index.saturating_mul(fig6.chunk),
                    decodes,
                    decode_context: fig6.d_cl,
                };
                let name = format!("pod fig6 chunk {index}/{} bs {decodes}", fig6.n_chunks);
                cases.push(hybrid.case(name, (fig6.q_heads, fig6.kv_heads)));
            }
        }
        for (model, q_heads, kv_heads, chunk, context, chunks, decodes) in &self.fig11.cases {
            for index in 1..=*chunks {
                let hybrid = Hybrid {
                    chunk: *chunk,
                    context: index.saturating_mul(*chunk),
                    decodes: *decodes,
                    decode_context: *context,
                };
                let name = format!(
                    "pod fig11 {model} {chunk} @ {context} chunk {index}/{chunks} bs {decodes}"
                );
                cases.push(hybrid.case(name, (*q_heads, *kv_heads)));
            }
        }
        let fig13 = &self.fig13;
        for &context in &fig13.ctx {
            for &decodes in &fig13.d_bs {
                let hybrid = Hybrid {
                    chunk: context,
                    context,
                    decodes,
                    decode_context: context,
                };
                let name = format!("pod fig13 {context} bs {decodes}");
                cases.push(hybrid.case(name, (fig13.q_heads, fig13.kv_heads)));
            }
        }
        let fig14 = &self.fig14;
        for (model, &heads) in &fig14.models {
            for &decodes in &fig14.d_bs {
                let hybrid = Hybrid {
                    chunk: fig14.p_chunk,
                    context: fig14.ctx,
                    decodes,
                    decode_context: fig14.ctx,
                };
                cases.push(hybrid.case(format!("pod fig14 {model} bs {decodes}"), heads));
            }
        }
        let table8 = &self.table8;
        for &id in &table8.chunk_ids {
            let hybrid = Hybrid {
                chunk: table8.chunk,
                context: id.saturating_add(1).saturating_mul(table8.chunk),
                decodes: table8.d_bs,
                decode_context: table8.ctx,
            };
            // Llama-3-8B on one GPU.
            cases.push(hybrid.case(format!("pod table8 chunk {id}"), (32, 8)));
        }
        cases
    }
}
