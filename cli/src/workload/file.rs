//! The workload format of this command.

use serde::{Deserialize, Deserializer, de::Error as _};
use tandem_attn::{
    kv::PagesByHead,
    problem::{Dtype, KvLayout, Spec},
    step::{Pairing, Rope},
    variants::{ALIBI, DISTANCE_BIAS, SIGMOID},
};

use super::{ByHead, Case, DTYPES, Requests, Tree, chosen, json, levels};
use crate::{Failure, hooks::Numbers, table::visible};

/// Maximum number of query tokens of a batch with draft trees: each token needs a mask of 64 bits.
const MOST_BESIDE_TREES: u64 = 1 << 24;

/// Maximum number of biases of all heads: 64 MiB.
const MOST_BIASES: u64 = 1 << 24;

/// The largest bias of sigmoid weights; with more, all weights would be 0 or 1 in f32.
const MOST_SIGMOID_BIAS: f32 = 100.0;

/// A file or one of its cases. A case takes fields that it leaves out from the file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object that describes a workload")]
struct Fields {
    name: Option<String>,
    #[serde(default, rename = "description")]
    _description: Option<String>,
    heads: Option<u32>,
    kv_heads: Option<u32>,
    head_dim: Option<u32>,
    head_dim_v: Option<u32>,
    latent: Option<bool>,
    #[serde(default, deserialize_with = "dtype")]
    dtype: Option<Dtype>,
    #[serde(default, deserialize_with = "dtype")]
    kv_dtype: Option<Dtype>,
    page_size: Option<u32>,
    pages_by_head: Option<u32>,
    top_k: Option<u32>,
    layout: Option<Layout>,
    variant: Option<Variant>,
    requests: Option<Vec<Requests>>,
    #[serde(default, deserialize_with = "tree")]
    tree: Option<Tree>,
    cases: Option<Vec<Fields>>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Layout {
    Nhd,
    Hnd,
}

/// A field that is left out is `None`, and one that is `null` `Some(None)`: what the file gives is not used then.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(
    default,
    deny_unknown_fields,
    expecting = "an object such as {\"causal\": true}"
)]
struct Variant {
    causal: Option<bool>,
    #[serde(deserialize_with = "given")]
    window_left: Option<Option<u32>>,
    #[serde(deserialize_with = "given")]
    logits_soft_cap: Option<Option<f32>>,
    sinks: Option<bool>,
    alibi: Option<bool>,
    #[serde(deserialize_with = "given")]
    distance_bias: Option<Option<u32>>,
    #[serde(deserialize_with = "given")]
    sigmoid: Option<Option<f32>>,
    #[serde(deserialize_with = "given")]
    rotary: Option<Option<Rotary>>,
    #[serde(deserialize_with = "given")]
    sm_scale: Option<Option<f32>>,
}

impl Variant {
    /// The variant of a case: fields that it leaves out are those of the file.
    fn or(self, file: Self) -> Self {
        Self {
            causal: self.causal.or(file.causal),
            window_left: self.window_left.or(file.window_left),
            logits_soft_cap: self.logits_soft_cap.or(file.logits_soft_cap),
            sinks: self.sinks.or(file.sinks),
            alibi: self.alibi.or(file.alibi),
            distance_bias: self.distance_bias.or(file.distance_bias),
            sigmoid: self.sigmoid.or(file.sigmoid),
            rotary: self.rotary.or(file.rotary),
            sm_scale: self.sm_scale.or(file.sm_scale),
        }
    }

    /// Adds the hooks to a specification, and returns their numbers.
    fn hooks(self, spec: &mut Spec) -> Result<Numbers, String> {
        let (entries, sigmoid) = (self.distance_bias.flatten(), self.sigmoid.flatten());
        let asked = [
            (self.alibi == Some(true), ALIBI),
            (entries.is_some(), DISTANCE_BIAS),
            (sigmoid.is_some(), SIGMOID),
        ];
        let mut asked = asked.into_iter().filter(|(asked, _)| *asked);
        if let Some((_, hooks)) = asked.next() {
            *spec = spec.with_hooks(&hooks);
        }
        if asked.next().is_some() {
            return Err(
                "variant: alibi, distance_bias and sigmoid: a case has one of them".to_owned(),
            );
        }
        if let Some(entries) = entries
            && !(1..=MOST_BIASES).contains(&(u64::from(entries) * u64::from(spec.q_heads)))
        {
            return Err(format!(
                "variant.distance_bias is {entries}: give 1 or more entries of a head, and at most {MOST_BIASES} of all heads"
            ));
        }
        if let Some(bias) = sigmoid
            && (bias.is_nan() || bias.abs() > MOST_SIGMOID_BIAS)
        {
            return Err(format!(
                "variant.sigmoid is {bias}: give a bias of at most {MOST_SIGMOID_BIAS} and at least -{MOST_SIGMOID_BIAS}"
            ));
        }
        Ok(Numbers {
            entries: entries.unwrap_or(0),
            sigmoid: sigmoid.unwrap_or(0.0),
        })
    }
}

/// Rotary embedding that attention applies to queries and keys.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(
    deny_unknown_fields,
    expecting = "an object such as {\"theta\": 500000}"
)]
struct Rotary {
    /// Number of rotated elements of a head; all if left out.
    #[serde(default)]
    dim: Option<u32>,
    theta: f64,
    #[serde(default)]
    interleaved: bool,
}

impl Rotary {
    fn of(self, head_dim: u32) -> Rope {
        Rope::new(self.dim.unwrap_or(head_dim), self.theta).with_pairing(match self.interleaved {
            true => Pairing::Interleaved,
            false => Pairing::HalfSplit,
        })
    }
}

fn given<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

fn dtype<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Dtype>, D::Error> {
    let name = String::deserialize(deserializer)?;
    match DTYPES.iter().find(|(known, _)| *known == name) {
        Some(&(_, dtype)) => Ok(Some(dtype)),
        None => {
            let known: Vec<_> = DTYPES.iter().map(|(known, _)| *known).collect();
            let known = known.join(", ");
            Err(D::Error::custom(format!(
                "unknown element type {name:?}: give one of {known}"
            )))
        }
    }
}

fn tree<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Tree>, D::Error> {
    let tree = Tree::deserialize(deserializer)?;
    check_tree(&tree).map_err(D::Error::custom)?;
    Ok(Some(tree))
}

/// Checks that the levels form a tree.
pub(super) fn check_tree(tree: &Tree) -> Result<(), String> {
    let (nodes, tokens) = (&tree.nodes_per_level, &tree.tokens_per_level);
    if nodes.is_empty() || nodes.len() != tokens.len() {
        return Err(format!(
            "nodes_per_level has {} levels and tokens_per_level {}: give the same number, at least 1",
            nodes.len(),
            tokens.len()
        ));
    }
    if nodes[0] == 0 || !nodes.is_sorted() {
        return Err(format!(
            "nodes_per_level is [{}]: no level has fewer nodes than the one above it, nor none",
            levels(nodes)
        ));
    }
    if tokens
        .iter()
        .try_fold(0u32, |sum, &t| sum.checked_add(t))
        .is_none()
    {
        return Err(format!(
            "tokens_per_level [{}] are more than 32 bits count",
            levels(tokens)
        ));
    }
    Ok(())
}

/// Reads the cases of a file.
pub(super) fn cases(name: &str, text: &str) -> Result<Vec<Case>, Failure> {
    let wrong = |reason: String| Failure::Input(format!("{name}: {reason}"));
    if text.trim_start().starts_with('[') {
        return Err(wrong(
            "a workload is an object with heads, kv_heads, head_dim and requests, and this is a list; a list of several \
             is the field cases of an object"
                .to_owned(),
        ));
    }
    let file: Fields = json::read(name, text)?;
    match &file.cases {
        None => Ok(vec![file.case(&Fields::default()).map_err(wrong)?]),
        Some(_) if file.requests.is_some() || file.tree.is_some() => Err(wrong(
            "requests and tree stand in the cases where there are cases".to_owned(),
        )),
        Some(_) if file.name.is_some() => Err(wrong(
            "names stand in the cases where there are cases; for the file there is description"
                .to_owned(),
        )),
        Some(cases) => {
            let of_case = |(index, case): (usize, &Fields)| {
                case.case(&file).map_err(|reason| {
                    let line = json::line_of(text, "cases", index);
                    let line = line.map_or(String::new(), |line| format!(":{line}"));
                    Failure::Input(format!("{name}{line}: cases[{index}]: {reason}"))
                })
            };
            cases.iter().enumerate().map(of_case).collect()
        }
    }
}

impl Case {
    /// Lets each KV head read `pages` pages of its own.
    fn choose_by_head(&mut self, pages: u32) -> Result<(), String> {
        let trees = self.tree.is_some() || self.requests.iter().any(|one| one.branches > 0);
        if pages == 0 || matches!(self.layout, KvLayout::Nhd) || trees {
            return Err(format!(
                "pages_by_head is {pages}: give 1 or more, the layout hnd, in which what a head has of a page lies \
                 together, and no tree or branches"
            ));
        }
        let model = self.spec;
        let strides = self
            .layout
            .strides(self.page_size.max(1), model.kv_heads, model.head_dim_qk);
        let lists = PagesByHead::new(&model, strides, 0).map_err(|error| error.to_string())?;
        self.spec = *lists.spec();
        self.by_head = Some(ByHead { model, pages });
        Ok(())
    }
}

impl Fields {
    /// The case, or what is wrong with it.
    fn case(&self, file: &Self) -> Result<Case, String> {
        // Only a case has a file around it.
        if self.cases.is_some() && file.cases.is_some() {
            return Err("a case has no cases of its own".to_owned());
        }
        let need =
            |value: Option<u32>, field: &str| value.ok_or_else(|| format!("{field} is missing"));
        let heads = need(self.heads.or(file.heads), "heads")?;
        let kv_heads = need(self.kv_heads.or(file.kv_heads), "kv_heads")?;
        let head_dim = need(self.head_dim.or(file.head_dim), "head_dim")?;
        let dtype = self.dtype.or(file.dtype).unwrap_or(Dtype::BF16);
        let mut spec = Spec::new(heads, kv_heads, head_dim)
            .with_dtype(dtype)
            .with_kv_dtype(self.kv_dtype.or(file.kv_dtype).unwrap_or(dtype))
            .with_head_dim_v(self.head_dim_v.or(file.head_dim_v).unwrap_or(head_dim));
        if self.latent.or(file.latent).unwrap_or(false) {
            let Spec { head_dim_v, .. } = spec;
            let rope = head_dim.saturating_sub(head_dim_v);
            spec.latent = true;
            spec.scale = Spec::latent(heads, head_dim_v, rope).scale;
        }
        let [own, around] = [self, file].map(|fields| fields.variant.unwrap_or_default());
        let variant = own.or(around);
        spec.variant.causal = variant.causal.unwrap_or(true);
        spec.variant.window_left = variant.window_left.flatten();
        spec.variant.soft_cap = variant.logits_soft_cap.flatten();
        spec.variant.sinks = variant.sinks.unwrap_or(false);
        let numbers = variant.hooks(&mut spec)?;
        spec.rotary = variant.rotary.flatten().map(|rotary| rotary.of(head_dim));
        spec.scale = variant.sm_scale.flatten().unwrap_or(spec.scale);
        spec.check().map_err(|error| error.to_string())?;
        let requests = self.requests.clone().unwrap_or_default();
        if requests.iter().all(|requests| requests.count == 0) && self.tree.is_none() {
            return Err("give requests, a tree, or both".to_owned());
        }
        for (index, one) in requests.iter().enumerate() {
            let Requests { q_len, kv_len, .. } = *one;
            let wrong = |reason: String| Err(format!("requests[{index}]: {reason}"));
            if one.branches > 0 && q_len > 64 {
                return wrong(format!(
                    "q_len is {q_len}, a tree of so many drafted tokens: give at most 64, or no branches"
                ));
            }
            if one.count > 0 && q_len > kv_len && spec.variant.causal {
                return wrong(format!(
                    "q_len is {q_len} and kv_len {kv_len}: count the new tokens in kv_len, too"
                ));
            }
        }
        let masks = requests.iter().position(|one| one.one_block_in > 0);
        let trees = requests.iter().any(|one| one.branches > 0);
        if let (Some(index), true) = (masks, trees || self.tree.is_some() || !spec.variant.causal) {
            return Err(format!(
                "requests[{index}]: one_block_in needs a causal mask, and no tree or branches"
            ));
        }
        let tokens = requests.iter().fold(0_u64, |sum, one| {
            sum.saturating_add(u64::from(one.q_len) * u64::from(one.count))
        });
        if trees && tokens > MOST_BESIDE_TREES {
            return Err(format!(
                "requests: {tokens} query tokens in a batch with trees of drafted tokens: at most {MOST_BESIDE_TREES} are taken"
            ));
        }
        let mut case = Case {
            name: String::new(),
            spec,
            page_size: self.page_size.or(file.page_size).unwrap_or(16),
            layout: match self.layout.or(file.layout) {
                Some(Layout::Hnd) => KvLayout::Hnd,
                Some(Layout::Nhd) | None => KvLayout::Nhd,
            },
            requests,
            tree: self.tree.clone(),
            by_head: None,
            top_k: None,
            numbers,
        };
        match self.pages_by_head.or(file.pages_by_head) {
            Some(pages) => {
                let masks = |one: &Requests| one.one_block_in > 0 && !one.all_pages;
                if let Some(index) = case.requests.iter().position(masks) {
                    return Err(format!(
                        "requests[{index}]: one_block_in beside pages_by_head needs all_pages"
                    ));
                }
                case.choose_by_head(pages)?;
            }
            None => {
                if let Some(index) = case.requests.iter().position(|one| one.all_pages) {
                    return Err(format!(
                        "requests[{index}]: all_pages is for cases with pages_by_head: without it all heads read all pages"
                    ));
                }
            }
        }
        if let Some(k) = self.top_k.or(file.top_k) {
            chosen::check(&case, k)?;
            case.top_k = Some(k);
        }
        case.name = match &self.name {
            Some(name) => visible(name, false),
            None => format!("{} {heads}/{kv_heads}", case.lengths()),
        };
        Ok(case)
    }
}
