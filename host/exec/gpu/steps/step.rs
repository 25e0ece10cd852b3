//! A launch that was checked: its kernel and parameters, and how these are updated for tensors at other addresses.

use std::ffi::c_void;

use kernels_gpu::abi::{
    AttentionParams, DecodeParams, GatherDecodeParams, GatherPrefillParams, LatentParams,
    MergeParams, PodParams, PrefillParams, ScaleParams, TurnParams, WidenParams,
};

use super::RunTensors;
use crate::{
    Error,
    exec::gpu::{
        DeviceTensor, KvPool, Stream,
        launch::Launch,
        maps::{Maps, ShapeId},
        module::Kernel,
        tensor::{VECTOR_BYTES, check_address},
    },
    problem::Spec,
};

/// A launch that was checked and waits for its turn.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub kernel: Kernel,
    pub launch: Launch,
    /// The part of the batch, which has a pool of its own.
    pub part: usize,
    /// As [`Part::heads`](crate::problem::Part::heads) of that part.
    pub heads: u32,
    pub parameters: Parameters,
}

/// The parameters of a kernel, and the shapes of the tensor maps in them.
#[derive(Clone, Copy, Debug)]
pub enum Parameters {
    Decode(DecodeParams, DecodeShapes),
    Latent(LatentParams, LatentShapes),
    DecodeRows(GatherDecodeParams),
    Prefill(PrefillParams, PrefillShapes),
    PrefillRows(GatherPrefillParams, Source),
    /// Widens the keys for the prefill after it.
    Widen(WidenParams),
    /// Rotates the keys for the prefill after it.
    Turn(TurnParams),
    /// A prefill and a decode in one.
    Pod(PodParams),
    Merge(MergeParams),
}

/// The shapes of a decode's tensor maps.
#[derive(Clone, Copy, Debug)]
pub struct DecodeShapes {
    /// Shapes of keys and of values; none if these are read row by row.
    pub maps: Option<[ShapeId; 2]>,
    /// Whether the queries are those of [`RunTensors::unpadded`](super::RunTensors), if there are any.
    pub unpadded: bool,
    /// Whether the outputs are, too: then no launch of the run writes padded ones.
    pub writes_unpadded: bool,
}

/// The shapes of the tensor maps of latent attention.
#[derive(Clone, Copy, Debug)]
pub struct LatentShapes {
    pub q: ShapeId,
    /// Shapes of the two halves of the keys, if they are loaded by tensor maps.
    pub halves: Option<[ShapeId; 2]>,
    /// Likewise the shape of the pool of what only the keys have, if there is one.
    pub rope: Option<ShapeId>,
}

/// The shapes of a prefill's tensor maps.
#[derive(Clone, Copy, Debug)]
pub struct PrefillShapes {
    pub q: ShapeId,
    pub out: ShapeId,
    /// Shapes of keys and values, if they are loaded by pages.
    pub pages: Option<[ShapeId; 2]>,
    /// Where keys and values are.
    pub source: Source,
    /// Whether the queries are those of [`RunTensors::unpadded`](super::RunTensors), if there are any.
    pub unpadded: bool,
}

/// Where a prefill finds keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// In the pool of the run.
    Pool,
    /// In the workspace: the prefill itself converts those of the run's pool.
    Converted,
    /// In the workspace: a launch before the prefill widened them, and multiplied each by its scale if these are `by_token`.
    Widened { by_token: bool },
    /// In the workspace: a launch before the prefill rotated the keys. Values are in the run's pool, unless `values`
    /// says that they were copied along.
    Turned { values: bool },
}

impl Step {
    /// Updates the launch for tensors that differ only in their addresses.
    pub fn follow(
        &mut self,
        spec: &Spec,
        tensors: &RunTensors<'_>,
        maps: &mut Maps,
    ) -> Result<(), Error> {
        let pool = &tensors.pools[self.part];
        let (spec, tokens) = (&spec.times(self.heads), tensors.q.shape[0]);
        let scales = || pool.scale_parameters(spec, tokens / self.heads as usize);
        match &mut self.parameters {
            Parameters::Decode(params, shapes) => {
                params.attention.scales = scales()?;
                let known = &params.attention;
                match shapes.maps {
                    Some([k, v]) if (known.k, known.v) != (pool.k, pool.v) => {
                        params.k_map = maps.at("the key pool", pool.k, k)?;
                        params.v_map = maps.at("the value pool", pool.v, v)?;
                    }
                    Some(_) => (),
                    None => pool.check_addresses()?,
                }
                point(&mut params.attention, tensors, pool);
                params.attention.q = tensors.of_launch(shapes.unpadded)[0].address;
                if let (Some(unpadded), true) = (&tensors.unpadded, shapes.writes_unpadded) {
                    params.attention.out = unpadded.given.address;
                }
            }
            Parameters::Latent(params, shapes) => {
                pool.check_is_one()?;
                let known = &params.attention;
                if known.q != tensors.q.address {
                    params.q_map = maps.at("q", tensors.q.address, shapes.q)?;
                }
                match shapes.halves {
                    Some([left, right]) if known.k != pool.k => {
                        params.left_map = maps.at("the pool", pool.k, left)?;
                        params.right_map = maps.at("the pool", pool.k, right)?;
                    }
                    Some(_) => (),
                    None => pool.check_addresses()?,
                }
                if let Some(rope) = pool.rope {
                    match shapes.rope {
                        Some(shape) if params.rope != rope.pool => {
                            params.rope_map = maps.at("the rope pool", rope.pool, shape)?;
                        }
                        Some(_) => (),
                        None => check_address(
                            "the rope pool",
                            rope.pool,
                            pool.pages == 0,
                            VECTOR_BYTES,
                        )?,
                    }
                    params.rope = rope.pool;
                }
                if let Some(indices) = tensors.indices {
                    params.attention.page_ids = indices.address;
                }
                point(&mut params.attention, tensors, pool);
            }
            Parameters::Prefill(params, shapes) => {
                let known = &params.attention;
                let [q, out] = tensors.of_launch(shapes.unpadded);
                let (q, out) = (q.address, out.address);
                if known.q != q {
                    params.q_map = maps.at("q", q, shapes.q)?;
                }
                if known.out != out {
                    params.out_map = maps.at("out", out, shapes.out)?;
                }
                let read = (known.k, known.v);
                point(&mut params.attention, tensors, pool);
                (params.attention.q, params.attention.out) = (q, out);
                match shapes.source {
                    Source::Pool => {
                        params.attention.scales = scales()?;
                        match shapes.pages {
                            Some([k, v]) if read != (pool.k, pool.v) => {
                                params.k_map = maps.at("the key pool", pool.k, k)?;
                                params.v_map = maps.at("the value pool", pool.v, v)?;
                            }
                            Some(_) => (),
                            None => pool.check_addresses()?,
                        }
                    }
                    Source::Converted => {
                        pool.check_addresses()?;
                        params.attention.scales = scales()?;
                        (params.convert.k, params.convert.v) = (pool.k, pool.v);
                        (params.attention.k, params.attention.v) = read;
                    }
                    Source::Widened { by_token } => {
                        if !by_token {
                            params.attention.scales = scales()?;
                        }
                        (params.attention.k, params.attention.v) = read;
                    }
                    Source::Turned { values: true } => {
                        (params.attention.k, params.attention.v) = read
                    }
                    Source::Turned { values: false } => {
                        if let (Some([_, v]), true) = (shapes.pages, read.1 != pool.v) {
                            params.v_map = maps.at("the value pool", pool.v, v)?;
                        }
                        params.attention.k = read.0;
                    }
                }
            }
            Parameters::Widen(params) => {
                pool.check_addresses()?;
                // Other scales are applied by the prefill.
                if params.scales != ScaleParams::default() {
                    params.scales = scales()?;
                }
                (params.convert.k, params.convert.v) = (pool.k, pool.v);
            }
            Parameters::Turn(params) => {
                pool.check_addresses()?;
                (params.convert.k, params.convert.v) = (pool.k, pool.v);
            }
            Parameters::DecodeRows(params) => {
                pool.check_addresses()?;
                params.attention.scales = scales()?;
                point(&mut params.attention, tensors, pool);
            }
            Parameters::PrefillRows(params, source) => {
                pool.check_addresses()?;
                let read = (params.attention.k, params.attention.v);
                point(&mut params.attention, tensors, pool);
                if let Source::Widened { by_token } = *source {
                    if !by_token {
                        params.attention.scales = scales()?;
                    }
                    (params.attention.k, params.attention.v) = read;
                }
            }
            Parameters::Pod(params) => {
                pool.check_addresses()?;
                point(&mut params.prefill.attention, tensors, pool);
                point(&mut params.decode.attention, tensors, pool);
            }
            Parameters::Merge(params) => {
                params.out = tensors.merged.unwrap_or(tensors.out).address;
                params.lse = tensors.lse.map_or(0, |lse| lse.address);
                params.sinks = tensors.sinks.map_or(0, |sinks| sinks.address);
            }
        }
        Ok(())
    }

    /// Launches it in the current context, which is that of its kernel. `own` is the data of the variant's hooks.
    ///
    /// # Safety
    /// - The memory in its parameters is valid, and stays so until the work on the stream is done.
    /// - `own` has as many bytes as the variant of its kernel has of its own.
    pub unsafe fn make(&self, own: *const c_void, stream: Stream) -> Result<(), Error> {
        // SAFETY: the caller's promises; parameters are those of the step's kernel.
        unsafe { (self.launch).make(&self.kernel, [self.parameters(), own], stream) }
    }

    const fn parameters(&self) -> *const c_void {
        match &self.parameters {
            Parameters::Decode(params, _) => (&raw const *params).cast(),
            Parameters::Latent(params, _) => (&raw const *params).cast(),
            Parameters::DecodeRows(params) => (&raw const *params).cast(),
            Parameters::Prefill(params, _) => (&raw const *params).cast(),
            Parameters::PrefillRows(params, _) => (&raw const *params).cast(),
            Parameters::Widen(params) => (&raw const *params).cast(),
            Parameters::Turn(params) => (&raw const *params).cast(),
            Parameters::Pod(params) => (&raw const *params).cast(),
            Parameters::Merge(params) => (&raw const *params).cast(),
        }
    }

    pub const fn is_prefill(&self) -> bool {
        let parameters = &self.parameters;
        matches!(
            parameters,
            Parameters::Prefill(..) | Parameters::PrefillRows(..)
        )
    }

    pub const fn is_decode(&self) -> bool {
        let parameters = &self.parameters;
        matches!(
            parameters,
            Parameters::Decode(..) | Parameters::Latent(..) | Parameters::DecodeRows(_)
        )
    }

    /// Whether it widens keys for a prefill.
    pub const fn widens_keys(&self) -> bool {
        matches!(self.parameters, Parameters::Widen(_))
    }

    pub const fn is_merge(&self) -> bool {
        matches!(self.parameters, Parameters::Merge(_))
    }

    /// Whether it reads queries whose heads are padded, if any are.
    pub const fn reads_padded(&self) -> bool {
        match &self.parameters {
            Parameters::Decode(_, shapes) => !shapes.unpadded,
            Parameters::Prefill(_, shapes) => !shapes.unpadded,
            Parameters::Widen(_) | Parameters::Turn(_) | Parameters::Merge(_) => false,
            Parameters::Latent(..)
            | Parameters::DecodeRows(_)
            | Parameters::PrefillRows(..)
            | Parameters::Pod(_) => true,
        }
    }

    /// Whether it is a decode that can write outputs whose heads are not padded, if others are.
    pub const fn can_write_unpadded(&self) -> bool {
        matches!(&self.parameters, Parameters::Decode(_, shapes) if shapes.unpadded)
    }

    /// Makes such a decode write these outputs.
    pub fn write_unpadded(&mut self, out: &DeviceTensor<3>) {
        if let Parameters::Decode(params, shapes) = &mut self.parameters {
            params.attention.out = out.address;
            // The stride was checked where outputs are unpadded.
            params.attention.out_token_stride = out.strides[0] as u32;
            params.out_columns = out.shape[2] as u32;
            shapes.writes_unpadded = true;
        }
    }

    /// Whether it writes outputs whose heads are padded, if any are.
    pub const fn writes_padded(&self) -> bool {
        match &self.parameters {
            Parameters::Decode(_, shapes) => !shapes.writes_unpadded,
            Parameters::Widen(_) | Parameters::Turn(_) => false,
            _ => true,
        }
    }

    /// Decodes that leave most of each SM to a prefill.
    pub const fn is_co_resident_decode(&self) -> bool {
        self.is_decode() && self.kernel.info.co_resident
    }
}

fn point(params: &mut AttentionParams, tensors: &RunTensors<'_>, pool: &KvPool) {
    params.q = tensors.q.address;
    params.k = pool.k;
    params.v = pool.v;
    params.out = tensors.out.address;
    params.lse = tensors.lse.map_or(0, |lse| lse.address);
    params.sinks = tensors.sinks.map_or(0, |sinks| sinks.address);
}
