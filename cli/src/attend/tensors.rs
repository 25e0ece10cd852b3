//! Reads the tensors of a step from the safetensors format and writes the results to it.

use std::{borrow::Cow, collections::HashMap, f32::consts::LOG2_E};

use bytemuck::Pod;
use safetensors::{
    Dtype as FileDtype, SafeTensors,
    tensor::{TensorView, View},
};
use tandem_attn::problem::{Batch, Dtype, KvLayout, PageTable, Spec};

use super::{
    heads,
    scales::{self, Batched},
};
use crate::{
    Failure,
    backend::Results,
    hooks::Numbers,
    table::{shorten, visible},
    tensors::{Scales, Tensor, Tensors},
};

/// The contents of an input file.
#[derive(Debug)]
pub(super) struct Step {
    pub(super) spec: Spec,
    pub(super) batch: Batch,
    pub(super) tensors: Tensors,
    /// Tensors that are not read, sorted.
    pub(super) unread: Vec<String>,
    /// Names in the metadata that are not read, sorted.
    pub(super) unread_metadata: Vec<String>,
}

/// Reads a step, or returns one line that explains why it cannot be read.
pub(super) fn read(bytes: &[u8]) -> Result<Step, String> {
    let file = SafeTensors::deserialize(bytes)
        .map_err(|error| format!("not a whole safetensors file ({error})"))?;
    let (_, header) = SafeTensors::read_metadata(bytes).map_err(|error| error.to_string())?;
    let empty = HashMap::new();
    let metadata = Metadata(header.metadata().as_ref().unwrap_or(&empty));
    metadata.check_names()?;
    let asked = |name: &str| file.tensor(name).is_ok() || metadata.asks_for(name);
    if let Some(name) = NOT_TAKEN.into_iter().find(|name| asked(name)) {
        return Err(format!(
            "{name} is there, and attention would be computed without it: leave it out"
        ));
    }

    if let Some(name) = LATENT.into_iter().find(|name| file.tensor(name).is_ok()) {
        let library = match name.starts_with("q_") {
            true => "the library takes one q of both parts",
            false => "KvView::latent_parts of the library takes such pools",
        };
        return Err(format!(
            "{name} is there, a tensor of latent attention, which is not read from files: {library}"
        ));
    }

    let q = float_tensor(&file, "q")?;
    let (k, v) = (
        float_tensor(&file, "k_cache")?,
        float_tensor(&file, "v_cache")?,
    );
    let [tokens, heads, dim] = shape(&file, "q", "[tokens, heads, d]")?;
    let layout = metadata.layout()?;
    let axes = match layout {
        KvLayout::Nhd => "[pages, page, kv_heads, d]",
        KvLayout::Hnd => "[pages, kv_heads, page, d]",
    };
    let of_axes = |[pages, a, b, dim]: [u32; 4]| match layout {
        KvLayout::Nhd => [pages, a, b, dim],
        KvLayout::Hnd => [pages, b, a, dim],
    };
    let [pages, page_size, kv_heads, dim_k] = of_axes(shape(&file, "k_cache", axes)?);
    let [v_pages, v_page_size, v_heads, dim_v] = of_axes(shape(&file, "v_cache", axes)?);
    if dim_k != dim {
        return Err(format!(
            "q has a head dimension of {dim} and k_cache of {dim_k}: they must be equal"
        ));
    }
    if (v_pages, v_page_size, v_heads) != (pages, page_size, kv_heads) {
        return Err(format!(
            "k_cache has {pages} pages of {page_size} tokens and {kv_heads} heads, v_cache {v_pages} of \
             {v_page_size} and {v_heads}"
        ));
    }
    if k.dtype() != v.dtype() {
        return Err(format!(
            "k_cache is {:?} and v_cache {:?}: convert one of them",
            k.dtype(),
            v.dtype()
        ));
    }

    let mut spec = Spec::new(heads, kv_heads, dim)
        .with_dtype(q.dtype())
        .with_kv_dtype(k.dtype())
        .with_head_dim_v(dim_v);
    spec.variant.causal = metadata.flag("causal", true)?;
    spec.variant.window_left = metadata.window_left()?;
    let cap: f32 = metadata.number("logits_soft_cap", 0.0)?;
    spec.variant.soft_cap = (cap != 0.0).then_some(cap);
    spec.scale = metadata.number("sm_scale", spec.scale)?;
    let given = heads::read(&file, metadata.0, &mut spec)?;
    spec.check().map_err(|error| error.to_string())?;

    let qo_indptr = indices(&file, "qo_indptr")?;
    let end = qo_indptr.last().copied();
    let end = end.ok_or("qo_indptr is empty: it begins with 0")?;
    if end != tokens {
        return Err(format!(
            "qo_indptr ends at {end} and q has {tokens} tokens: they must be equal"
        ));
    }
    let table = PageTable::from_csr(
        page_size,
        pages,
        indices(&file, "kv_indptr")?,
        indices(&file, "kv_indices")?,
        indices(&file, "kv_last_page_len")?,
    );
    let batch = Batch::new(qo_indptr, table);
    batch
        .check(&spec)
        .map_err(|error| in_file_names(&error.to_string()))?;
    let batched = Batched {
        spec: &spec,
        batch: &batch,
        layout,
    };
    let scales = scales::read(&file, metadata.0, &batched)?;
    check_range(&spec, scales.as_ref())?;
    Ok(Step {
        spec,
        batch,
        tensors: Tensors {
            q,
            k,
            v,
            layout,
            scales,
            indices: None,
            given,
            numbers: Numbers::default(),
        },
        unread: unread(&file),
        unread_metadata: metadata.unread(),
    })
}

/// Refuses factors with which kernels compute infinite numbers, and from them outputs that are no numbers.
fn check_range(spec: &Spec, scales: Option<&Scales>) -> Result<(), String> {
    // Kernels multiply by log₂e, the scale also by those of the keys, and by 2 over the cap, whose inverse they compute first.
    let of_keys = scales.map_or(1.0, |Scales { k, .. }| {
        k.iter().fold(0.0, |most: f32, &scale| most.max(scale))
    });
    let scale = spec.scale * of_keys * LOG2_E;
    if !scale.is_finite() {
        return Err(format!(
            "sm_scale is {:?}: give at most 2.3e38, multiplied by k_scale",
            spec.scale
        ));
    }
    if let Some(cap) = spec.variant.soft_cap
        && !(cap.is_normal() && (cap * LOG2_E).is_finite() && (2.0 * scale / cap).is_finite())
    {
        return Err(format!(
            "logits_soft_cap is {cap:?}: give 1.2e-38 to 2.3e38, and no less than sm_scale / 1.1e38"
        ));
    }
    Ok(())
}

/// Replaces the library's names in an error message by the names in the file.
fn in_file_names(message: &str) -> String {
    message
        .replace("row blocks (requests)", "requests")
        .replace(
            "push each request to the table once, also one without new tokens, and give one entry more than requests in \
             qo_indptr (q_indptr of the part)",
            "give one entry more than requests in qo_indptr and in kv_indptr",
        )
        .replace("q_indptr", "qo_indptr")
        .replace("table.indptr", "kv_indptr")
        .replace("table.last_page_len", "kv_last_page_len")
        .replace(" at indices[", " at kv_indices[")
        .replace(" of part 0", "")
        .replace("row block", "request")
}

/// Further arguments of FlashInfer, and names of masks elsewhere, that would change the result and are not supported.
const NOT_TAKEN: [&str; 11] = [
    "custom_mask",
    "packed_custom_mask",
    "mask",
    "attn_mask",
    "attention_mask",
    "attn_bias",
    "pos_encoding_mode",
    "rope_theta",
    "rope_scale",
    "window_right",
    "q_scale",
];

/// FlashInfer's tensors of latent attention.
const LATENT: [&str; 4] = ["ckv_cache", "kpe_cache", "q_nope", "q_pe"];

struct Metadata<'a>(&'a HashMap<String, String>);

impl Metadata<'_> {
    const NAMES: [&'static str; 7] = [
        "layout",
        "causal",
        "sm_scale",
        "window_left",
        "logits_soft_cap",
        "k_scale",
        "v_scale",
    ];

    /// Names that other programs use.
    const ALIASES: [(&'static str, &'static str); 10] = [
        ("kvlayout", "layout"),
        ("iscausal", "causal"),
        ("scale", "sm_scale"),
        ("softmaxscale", "sm_scale"),
        ("window", "window_left"),
        ("windowsize", "window_left"),
        ("slidingwindow", "window_left"),
        ("softcap", "logits_soft_cap"),
        ("cap", "logits_soft_cap"),
        ("logitscap", "logits_soft_cap"),
    ];

    /// Other programs add their own metadata (`format: pt`), but a name similar to one of ours is probably a mistake.
    fn check_names(&self) -> Result<(), String> {
        let plain = |name: &str| name.to_lowercase().replace(['_', '-', ' '], "");
        for name in self
            .0
            .keys()
            .filter(|name| !Self::NAMES.contains(&name.as_str()))
        {
            let written = plain(name);
            let same = Self::NAMES
                .into_iter()
                .find(|known| plain(known) == written);
            let alias = Self::ALIASES
                .into_iter()
                .find(|(alias, _)| *alias == written);
            if let Some(meant) = same.or(alias.map(|(_, meant)| meant)) {
                return Err(format!("metadata {name:?} is not known: write {meant:?}"));
            }
        }
        Ok(())
    }

    /// What is not read and may be a mistake, sorted. `format` says which program wrote the file.
    fn unread(&self) -> Vec<String> {
        let names = self.0.keys().map(String::as_str);
        let known = |name: &&str| Self::NAMES.contains(name) || NOT_TAKEN.contains(name);
        let names = names.filter(|name| !known(name) && *name != "format");
        let mut names: Vec<String> = names.map(|name| visible(name, false)).collect();
        names.sort_unstable();
        names
    }

    /// Whether the metadata has this name with a value that changes the result.
    fn asks_for(&self, name: &str) -> bool {
        // The mode decides whether there is a rotary embedding at all.
        let of_mode = name.starts_with("rope_") && self.0.contains_key("pos_encoding_mode");
        let neutral = match name {
            // FlashInfer's number of NONE.
            "pos_encoding_mode" => Some(0.0),
            "window_right" => Some(-1.0),
            "q_scale" | "rope_scale" => Some(1.0),
            _ => None,
        };
        let nothing = |note: &String| {
            of_mode
                || note == "NONE"
                || neutral.is_some_and(|value| note.trim().parse() == Ok::<f32, _>(value))
        };
        self.0.get(name).is_some_and(|note| !nothing(note))
    }

    fn layout(&self) -> Result<KvLayout, String> {
        match self.0.get("layout").map(String::as_str) {
            None | Some("NHD" | "nhd") => Ok(KvLayout::Nhd),
            Some("HND" | "hnd") => Ok(KvLayout::Hnd),
            Some(other) => Err(format!("metadata layout is {other:?}: give NHD or HND")),
        }
    }

    fn flag(&self, name: &str, default: bool) -> Result<bool, String> {
        match self.0.get(name).map(String::as_str) {
            None => Ok(default),
            Some("true" | "True" | "1") => Ok(true),
            Some("false" | "False" | "0") => Ok(false),
            Some(other) => Err(format!("metadata {name} is {other:?}: give true or false")),
        }
    }

    fn number<T: std::str::FromStr>(&self, name: &str, default: T) -> Result<T, String> {
        match self.0.get(name) {
            None => Ok(default),
            Some(text) => text
                .trim()
                .parse()
                .map_err(|_| format!("metadata {name} is {text:?}: give a number")),
        }
    }

    fn window_left(&self) -> Result<Option<u32>, String> {
        let window: i64 = self.number("window_left", -1)?;
        if window == -1 {
            return Ok(None);
        }
        u32::try_from(window).map(Some).map_err(|_| {
            format!(
                "metadata window_left is {window}: give a number of keys up to {}, or -1 for no window",
                u32::MAX
            )
        })
    }
}

/// The tensors of an input file.
const READ: [&str; 11] = [
    "q",
    "k_cache",
    "v_cache",
    "qo_indptr",
    "kv_indptr",
    "kv_indices",
    "kv_last_page_len",
    "sinks",
    "alibi_slopes",
    "k_scale",
    "v_scale",
];

fn unread(file: &SafeTensors<'_>) -> Vec<String> {
    let names = file.names().into_iter();
    let names = names.filter(|name| !READ.contains(name));
    let mut names: Vec<String> = names.map(|name| visible(name, false)).collect();
    names.sort_unstable();
    names
}

fn tensor<'a>(file: &SafeTensors<'a>, name: &str) -> Result<TensorView<'a>, String> {
    file.tensor(name).map_err(|_| {
        let mut names = file.names();
        names.sort_unstable();
        format!(
            "there is no tensor {name:?}; there are {}",
            shorten(&names.join(", "), 400)
        )
    })
}

fn shape<const N: usize>(
    file: &SafeTensors<'_>,
    name: &str,
    axes: &str,
) -> Result<[u32; N], String> {
    let tensor = tensor(file, name)?;
    let got = tensor.shape();
    let wrong = || format!("{name} has shape {got:?}: it must be {axes}");
    let extents: Option<Vec<u32>> = got.iter().map(|&n| u32::try_from(n).ok()).collect();
    extents.and_then(|e| e.try_into().ok()).ok_or_else(wrong)
}

/// Copies elements from the file, where they may be unaligned.
pub(super) fn elements<T: Pod>(view: &TensorView<'_>) -> Vec<T> {
    bytemuck::allocation::pod_collect_to_vec(view.data())
}

fn float_tensor(file: &SafeTensors<'_>, name: &str) -> Result<Tensor, String> {
    let view = tensor(file, name)?;
    Ok(match view.dtype() {
        FileDtype::F16 => Tensor::F16(elements(&view)),
        FileDtype::BF16 => Tensor::Bf16(elements(&view)),
        FileDtype::F32 => Tensor::F32(elements(&view)),
        FileDtype::F8_E4M3 if name != "q" => Tensor::F8E4M3(elements(&view)),
        FileDtype::F8_E5M2 if name != "q" => Tensor::F8E5M2(elements(&view)),
        other => {
            let known = if name == "q" {
                "F16, BF16 or F32"
            } else {
                "F16, BF16, F32, F8_E4M3 or F8_E5M2"
            };
            return Err(format!("{name} is {other:?}: convert it to {known}"));
        }
    })
}

fn indices(file: &SafeTensors<'_>, name: &str) -> Result<Vec<u32>, String> {
    let view = tensor(file, name)?;
    if view.dtype() != FileDtype::I32 || view.shape().len() != 1 {
        return Err(format!(
            "{name} is {:?} of shape {:?}: it must be I32 with one dimension",
            view.dtype(),
            view.shape()
        ));
    }
    let values: Vec<i32> = elements(&view);
    let values = values.into_iter().enumerate();
    values
        .map(|(index, value)| {
            u32::try_from(value)
                .map_err(|_| format!("{name}[{index}] is {value}: no index is negative"))
        })
        .collect()
}

/// The results in the safetensors format.
pub(super) fn write(spec: &Spec, tokens: u32, results: &Results) -> Result<Vec<u8>, Failure> {
    let (tokens, heads) = (tokens as usize, spec.q_heads as usize);
    let tensors = [
        (
            "o",
            OutTensor {
                dtype: file_dtype(results.out.dtype())?,
                shape: vec![tokens, heads, spec.head_dim_v as usize],
                bytes: results.out.bytes(),
            },
        ),
        (
            "lse",
            OutTensor {
                dtype: FileDtype::F32,
                shape: vec![tokens, heads],
                bytes: bytemuck::cast_slice(&results.lse),
            },
        ),
    ];
    safetensors::serialize(tensors, None)
        .map_err(|error| Failure::Wrong(format!("the output does not serialise: {error}")))
}

fn file_dtype(dtype: Dtype) -> Result<FileDtype, Failure> {
    match dtype {
        Dtype::F16 => Ok(FileDtype::F16),
        Dtype::BF16 => Ok(FileDtype::BF16),
        Dtype::F32 => Ok(FileDtype::F32),
        other => Err(Failure::Input(format!(
            "outputs of {other:?} are not written"
        ))),
    }
}

struct OutTensor<'a> {
    dtype: FileDtype,
    shape: Vec<usize>,
    bytes: &'a [u8],
}

impl View for OutTensor<'_> {
    fn dtype(&self) -> FileDtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.bytes.into()
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}
