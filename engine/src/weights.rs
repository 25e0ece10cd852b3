//! A model's weights: safetensors files, mapped into memory.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
    fs::{self, File},
    ops::Range,
    path::{Path, PathBuf},
};

use bytemuck::Pod;
use half::{bf16, f16};
use memmap2::Mmap;
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use serde::Deserialize;

use crate::{
    Error,
    error::{damaged, unread},
};

/// Source of a model's weights.
#[derive(Debug)]
pub struct Weights(Source);

#[derive(Debug)]
enum Source {
    Files {
        files: Vec<Mmap>,
        tensors: HashMap<String, Place>,
        /// Prefix of the names of the text part.
        prefix: &'static str,
    },
    Random {
        seed: u64,
    },
}

/// Where a tensor is in the files.
#[derive(Debug)]
struct Place {
    file: usize,
    bytes: Range<usize>,
    dtype: Dtype,
    shape: Vec<usize>,
}

/// Contents of `model.safetensors.index.json`.
#[derive(Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

/// Prefixes of tensor names: plain models, and the text part of multimodal ones.
const PREFIXES: [&str; 3] = ["model.", "language_model.model.", "model.language_model."];
/// Beginning of the names of the matrix of the logits and of what belongs to it.
const HEAD: &str = "lm_head.";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

impl Weights {
    /// Maps the files of a model's folder: one, or those that its index names.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Malformed`].
    pub fn open(folder: &Path) -> Result<Self, Error> {
        let index = folder.join(INDEX);
        let names: Vec<PathBuf> = match index.exists() {
            false if !folder.join(SINGLE).exists() => {
                return Err(malformed(
                    folder,
                    format!(
                        "there is neither {SINGLE} nor {INDEX}: add the one, or the other with its shards"
                    ),
                ));
            }
            false => vec![folder.join(SINGLE)],
            true => {
                let text = fs::read(&index).map_err(|error| read_error(&index, error))?;
                let read: Index = serde_json::from_slice(&text)
                    .map_err(|error| malformed(&index, damaged(&error)))?;
                let mut names: Vec<_> = read.weight_map.into_values().collect();
                names.sort_unstable();
                names.dedup();
                // File names in the index must not lead outside of the folder.
                if let Some(name) = names.iter().find(|name| name.contains(['/', '\\'])) {
                    return Err(malformed(
                        &index,
                        format!(
                            "{name:?} is not the name of a file in this folder: give one without slashes"
                        ),
                    ));
                }
                // Programs differ in which of the two they take, so the text would be that of an old model in some of them.
                if folder.join(SINGLE).exists() && !names.iter().any(|name| name == SINGLE) {
                    return Err(malformed(
                        &index,
                        format!(
                            "it does not name {SINGLE}, which is there, too: delete the one of both that is old"
                        ),
                    ));
                }
                names.iter().map(|name| folder.join(name)).collect()
            }
        };
        let (mut files, mut tensors) = (Vec::new(), HashMap::new());
        for path in names {
            let file = File::open(&path).map_err(|error| read_error(&path, error))?;
            // SAFETY: the memory is only read. If another program truncates the file while it is mapped, this process
            // may be killed, as with any mapped file.
            let map = unsafe { Mmap::map(&file) }.map_err(|error| read_error(&path, error))?;
            let (header, metadata) = SafeTensors::read_metadata(&map)
                .map_err(|error| malformed(&path, not_whole(&map, &error)))?;
            for (name, info) in metadata.tensors() {
                let (begin, end) = info.data_offsets;
                // Data starts after the 8-byte header length and the header.
                let bytes = 8 + header + begin..8 + header + end;
                let place = Place {
                    file: files.len(),
                    bytes,
                    dtype: info.dtype,
                    shape: info.shape.clone(),
                };
                tensors.insert(name, place);
            }
            files.push(map);
        }
        let embedding =
            |prefix: &&&str| tensors.contains_key(&format!("{prefix}embed_tokens.weight"));
        let prefix = PREFIXES
            .iter()
            .find(embedding)
            .copied()
            .unwrap_or(PREFIXES[0]);
        Ok(Self(Source::Files {
            files,
            tensors,
            prefix,
        }))
    }

    /// Random weights for measurements. Their size is typical, so that logits neither vanish nor overflow.
    #[must_use]
    pub const fn random(seed: u64) -> Self {
        Self(Source::Random { seed })
    }

    /// Whether they are [random](Self::random).
    #[must_use]
    pub const fn are_random(&self) -> bool {
        matches!(self.0, Source::Random { .. })
    }

    /// Whether there is a tensor with this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        match &self.0 {
            Source::Files { .. } => self.place(name).is_some(),
            Source::Random { .. } => true,
        }
    }

    fn place(&self, name: &str) -> Option<&Place> {
        let Source::Files {
            tensors, prefix, ..
        } = &self.0
        else {
            return None;
        };
        let inner = name
            .strip_prefix(PREFIXES[0])
            .map(|rest| format!("{prefix}{rest}"));
        tensors
            .get(&inner.unwrap_or_else(|| format!("{}{name}", beside(prefix))))
            .or_else(|| tensors.get(name))
    }

    /// Number of elements of a tensor, after a check that it exists with this shape. Called before memory is allocated:
    /// unless weights are random, the number is at most what the file holds.
    pub(crate) fn elements(&self, name: &str, shape: &[usize]) -> Result<usize, Error> {
        if !self.are_random() {
            self.place_of(name, shape)?;
        }
        Ok(shape.iter().product())
    }

    /// Whether two tensors hold the same numbers. They may be of different types.
    pub(crate) fn are_equal(&self, one: &str, other: &str) -> bool {
        let Source::Files { files, .. } = &self.0 else {
            return one == other;
        };
        let (Some(one), Some(other)) = (self.place(one), self.place(other)) else {
            return false;
        };
        if one.shape != other.shape {
            return false;
        }
        let [a, b] = [one, other].map(|place| &files[place.file][place.bytes.clone()]);
        if one.dtype == other.dtype {
            let pieces = a.par_chunks(PIECE).zip(b.par_chunks(PIECE));
            return pieces.all(|(a, b)| a == b);
        }
        let elements = one.shape.iter().product::<usize>().max(1);
        let numbers = |bytes: &[u8], dtype: Dtype| {
            let mut numbers = Vec::<f32>::new();
            append_as(dtype, bytes, &mut numbers).then_some(numbers)
        };
        let piece = |bytes: &[u8]| (bytes.len() / elements * PIECE).max(1);
        let pieces = a.par_chunks(piece(a)).zip(b.par_chunks(piece(b)));
        pieces.all(|(a, b)| {
            let a = numbers(a, one.dtype);
            a.is_some() && a == numbers(b, other.dtype)
        })
    }

    /// Checks that the text part of the files has only these tensors, by their names in a text-only model.
    pub(crate) fn check_used(&self, used: &HashSet<String>) -> Result<(), Error> {
        let Source::Files {
            tensors, prefix, ..
        } = &self.0
        else {
            return Ok(());
        };
        let inner = |name: &String| {
            let head = || {
                let name = name.strip_prefix(beside(prefix)).unwrap_or(name);
                name.starts_with(HEAD).then(|| name.to_owned())
            };
            let inner = name.strip_prefix(prefix);
            let inner = inner.map(|inner| format!("{}{inner}", PREFIXES[0]));
            let name = inner.or_else(head)?;
            // Frequencies of the rotary embedding, which old files have, follow from the configuration.
            let needless = used.contains(&name) || name.ends_with(".inv_freq");
            (!needless).then_some(name)
        };
        match tensors.keys().filter_map(inner).min() {
            Some(name) => Err(Error::UnusedTensor { name }),
            None => Ok(()),
        }
    }

    /// The location of a tensor of this shape.
    fn place_of(&self, name: &str, shape: &[usize]) -> Result<&Place, Error> {
        let place = self.place(name).ok_or_else(|| Error::NoTensor {
            name: name.to_owned(),
        })?;
        match place.shape == shape {
            true => Ok(place),
            false => Err(Error::TensorShape {
                name: name.to_owned(),
                got: place.shape.clone(),
                expected: shape.to_vec(),
            }),
        }
    }

    /// Appends a tensor to `out`, converted. Names are those of a text-only model (`model.layers.0.…`).
    ///
    /// # Errors
    /// [`Error::NoTensor`], [`Error::TensorShape`], [`Error::TensorType`].
    pub fn append<T: Weight>(
        &self,
        name: &str,
        shape: &[usize],
        out: &mut Vec<T>,
    ) -> Result<(), Error> {
        let files = match &self.0 {
            Source::Files { files, .. } => files,
            Source::Random { seed } => {
                random(*seed, name, shape, out);
                return Ok(());
            }
        };
        let place = self.place_of(name, shape)?;
        let bytes = &files[place.file][place.bytes.clone()];
        match append_as(place.dtype, bytes, out) {
            true => Ok(()),
            false => Err(Error::TensorType {
                name: name.to_owned(),
                got: format!("{:?}", place.dtype),
            }),
        }
    }

    /// A tensor in a new vector: see [`append`](Self::append).
    ///
    /// # Errors
    /// As [`append`](Self::append).
    pub fn get<T: Weight>(&self, name: &str, shape: &[usize]) -> Result<Vec<T>, Error> {
        let mut out = Vec::with_capacity(self.elements(name, shape)?);
        self.append(name, shape, &mut out)?;
        Ok(out)
    }
}

/// Prefix of the names of what is beside the layers: the matrix of the logits is `language_model.lm_head.weight` in some
/// multimodal models.
fn beside(prefix: &str) -> &str {
    prefix.strip_suffix("model.").unwrap_or("")
}

/// Element types that weights are converted to.
pub trait Weight: Pod + Send + Sync {
    /// Rounds to nearest.
    fn from_f32(x: f32) -> Self;
}

impl Weight for f32 {
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Weight for bf16 {
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
}

/// Elements that a thread converts at a time.
const PIECE: usize = 1 << 16;

/// Appends elements of a type, converted; false if it is none of those that weights have.
fn append_as<T: Weight>(dtype: Dtype, bytes: &[u8], out: &mut Vec<T>) -> bool {
    match dtype {
        Dtype::BF16 => convert::<bf16, T>(bytes, out, bf16::to_f32),
        Dtype::F16 => convert::<f16, T>(bytes, out, f16::to_f32),
        Dtype::F32 => convert::<f32, T>(bytes, out, |x| x),
        _ => return false,
    }
    true
}

fn convert<F: Pod + Sync, T: Weight>(
    bytes: &[u8],
    out: &mut Vec<T>,
    to_f32: impl Fn(F) -> f32 + Sync,
) {
    // A header may have any length, so elements may be unaligned.
    let from: Cow<'_, [F]> = match bytemuck::try_cast_slice(bytes) {
        Ok(elements) => Cow::Borrowed(elements),
        Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(bytes)),
    };
    let begin = out.len();
    out.resize(begin + from.len(), T::zeroed());
    let pieces = out[begin..]
        .par_chunks_mut(PIECE)
        .zip(from.par_chunks(PIECE));
    pieces.for_each(|(to, from)| {
        for (to, &x) in to.iter_mut().zip(from) {
            *to = T::from_f32(to_f32(x));
        }
    });
}

/// Matrices whose products have about unit variance, and ones for norms.
fn random<T: Weight>(seed: u64, name: &str, shape: &[usize], out: &mut Vec<T>) {
    let (begin, elements) = (out.len(), shape.iter().product::<usize>());
    if name.ends_with("norm.weight") {
        out.resize(begin + elements, T::from_f32(1.0));
        return;
    }
    let width = *shape.last().unwrap_or(&1);
    // Uniform in ±√(3 / width) has a variance of 1 / width.
    let bound = (3.0 / width as f32).sqrt();
    let name = name.bytes().fold(seed, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    out.resize(begin + elements, T::zeroed());
    out[begin..]
        .par_chunks_mut(PIECE)
        .enumerate()
        .for_each(|(piece, to)| {
            let mut random = fastrand::Rng::with_seed(name.wrapping_add(piece as u64));
            to.fill_with(|| T::from_f32(bound * (2.0 * random.f32() - 1.0)));
        });
}

fn read_error(path: &Path, error: std::io::Error) -> Error {
    Error::Read {
        path: path.to_owned(),
        error,
    }
}

fn not_whole(bytes: &[u8], error: &SafeTensorError) -> String {
    let error = format!(
        "this is no whole safetensors file of {} bytes ({error})",
        bytes.len()
    );
    unread(bytes, &error)
}

fn malformed(path: &Path, reason: impl ToString) -> Error {
    Error::Malformed {
        path: path.to_owned(),
        reason: reason.to_string(),
    }
}
