//! Predicts the time of a step: linear layers by a roofline with tiles, attention by the planner's cost model, and the
//! communication between GPUs.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::{
    CacheType, Hardware, ModelDescription, ScheduleError,
    attention::{AttentionModel, AttentionTime, Overlap, StepShape},
};
use tandem_attn::{
    plan::{DeviceDescription, PlanError, Planner},
    problem::{Batch, Spec},
};

/// Passes over the residual stream per layer outside linear layers and attention: two norms, two additions, the rotary
/// embedding, the activation.
const ELEMENTWISE_PASSES: f64 = 8.0;

/// Calibration measures the [rest](Correction::rest) with decodes up to this number of tokens, and with a prompt chunk
/// above.
pub const DECODES: u32 = 64;

/// Largest numbers of a [`Correction`]: tokens of a step, and nanoseconds (11 days).
const MOST_TOKENS: f64 = (1 << 24) as f64;
const MOST_NS: f64 = 1e15;

/// How a model is spread over GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parallel {
    /// Number of GPUs that share each layer, within one node.
    pub tensor: u32,
    /// Number of pipeline stages, each with a part of the layers. If they do not divide, all stages are as slow as one with
    /// a layer more.
    pub pipeline: u32,
}

impl Default for Parallel {
    fn default() -> Self {
        Self {
            tensor: 1,
            pipeline: 1,
        }
    }
}

/// A measured time and the point at which it was measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Tokens of the step; for attention, the predicted nanoseconds.
    pub at: f64,
    /// Measured nanoseconds: see [`Correction`].
    pub measured_ns: f64,
}

/// What a [`Correction`] was measured with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Origin {
    /// The model.
    pub model: ModelDescription,
    /// Name of the machine's description.
    pub device: String,
    /// How the model was divided among GPUs.
    pub parallel: Parallel,
}

/// Measurements that correct the model. The ratio of measured to predicted time is interpolated between two
/// measurements and constant outside of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Correction {
    /// The type of the KV caches with which it was measured.
    #[serde(skip_serializing_if = "is_auto")]
    pub cache_type: CacheType,
    /// The model and the machine with which it was measured. Older files do not have them, and are taken for any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
    /// All linear layers of a stage, by tokens.
    pub linear: Vec<Measured>,
    /// Attention of one layer for prompt chunks alone, by predicted time.
    pub prefill: Vec<Measured>,
    /// Attention of one layer for decodes alone, by predicted time.
    pub decode: Vec<Measured>,
    /// Everything but linear layers and attention in a step of one stage, by tokens. Measured with decodes, or with a
    /// prompt chunk and one sampled token.
    pub rest: Vec<Measured>,
    /// Replaces the loss of [`Overlap::Pod`]; none keeps it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_loss: Option<f64>,
    /// The times of hybrid steps over the sums of their parts: with attention one after the other, and with prefill and decode
    /// side by side. Their products run at lower clocks than those of other steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hybrid: Option<[f64; 2]>,
}

/// Whether the field is left out: files from before there were other types do not have it.
fn is_auto(cache_type: &CacheType) -> bool {
    *cache_type == CacheType::Auto
}

impl Correction {
    /// The ratios of [`hybrid`](Self::hybrid) that are taken.
    pub const HYBRID: RangeInclusive<f64> = 0.5..=2.0;

    /// Reads a correction from JSON.
    ///
    /// # Errors
    /// [`ScheduleError::Description`].
    pub fn from_json(json: &str) -> Result<Self, ScheduleError> {
        let wrong = |reason| ScheduleError::Description {
            kind: "correction",
            reason,
        };
        let table: Self = serde_json::from_str(json).map_err(|error| wrong(error.to_string()))?;
        for (list, points, unit, most) in [
            ("linear", &table.linear, "tokens", MOST_TOKENS),
            ("prefill", &table.prefill, "ns", MOST_NS),
            ("decode", &table.decode, "ns", MOST_NS),
            ("rest", &table.rest, "tokens", MOST_TOKENS),
        ] {
            for point in points {
                for (field, got, unit, most) in [
                    ("at", point.at, unit, most),
                    ("measured_ns", point.measured_ns, "ns", MOST_NS),
                ] {
                    if !(1.0..=most).contains(&got) {
                        return Err(wrong(format!(
                            "`{field}` of a point of `{list}` is {got:?}: give 1 to {most} {unit}"
                        )));
                    }
                }
            }
            if !points.is_sorted_by(|a, b| a.at < b.at) {
                return Err(wrong(format!("the points of `{list}` must ascend by `at`")));
            }
        }
        if table
            .pod_loss
            .is_some_and(|loss| !(0.0..=1.0).contains(&loss))
        {
            return Err(wrong("`pod_loss` must be from 0 to 1".to_owned()));
        }
        let fits = |ratio: &f64| Self::HYBRID.contains(ratio);
        if !table.hybrid.iter().flatten().all(fits) {
            return Err(wrong(
                "`hybrid` must be two ratios from 0.5 to 2".to_owned(),
            ));
        }
        Ok(table)
    }

    /// Checks that it was measured with KV caches of the type that a cost model has, and with its model, machine and parallelism
    /// if it has an [origin](Self::origin). Names of models may differ.
    ///
    /// # Errors
    /// [`ScheduleError::OtherCacheType`], [`ScheduleError::OtherOrigin`].
    pub fn check(&self, cost: &CostModel) -> Result<(), ScheduleError> {
        let (measured, cache_type) = (self.cache_type, cost.cache_type);
        if measured != cache_type {
            return Err(ScheduleError::OtherCacheType {
                measured,
                cache_type,
            });
        }
        let Some(origin) = &self.origin else {
            return Ok(());
        };
        let here = cost.origin();
        let other = |what, measured: String, given: String| {
            Err(ScheduleError::OtherOrigin {
                what,
                measured,
                given,
            })
        };
        let renamed = ModelDescription {
            name: here.model.name.clone(),
            ..origin.model.clone()
        };
        if renamed != here.model {
            let measured = match origin.model.name == here.model.name {
                true => format!("{} of another shape", here.model.name),
                false => origin.model.name.clone(),
            };
            return other("model", measured, here.model.name);
        }
        if origin.device != here.device {
            return other("device", origin.device.clone(), here.device);
        }
        for (what, measured, given) in [
            ("tensor", origin.parallel.tensor, here.parallel.tensor),
            ("pipeline", origin.parallel.pipeline, here.parallel.pipeline),
        ] {
            if measured != given {
                return other(what, measured.to_string(), given.to_string());
            }
        }
        Ok(())
    }
}

/// Ratios at points, interpolated linearly.
#[derive(Clone, Debug, Default)]
struct Ratios(Vec<(f64, f64)>);

impl Ratios {
    fn at(&self, x: f64) -> f64 {
        let above = self.0.partition_point(|&(at, _)| at < x);
        match (above.checked_sub(1).map(|i| self.0[i]), self.0.get(above)) {
            (None, None) => 1.0,
            (Some((_, ratio)), None) | (None, Some(&(_, ratio))) => ratio,
            (Some((x0, y0)), Some(&(x1, y1))) => y0 + (y1 - y0) * (x - x0) / (x1 - x0),
        }
    }
}

/// The parts of a step's time in one pipeline stage, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTime {
    /// Linear layers of the transformer layers.
    pub linear_ns: f64,
    /// Attention.
    pub attention_ns: f64,
    /// Norms, activations and the like.
    pub elementwise_ns: f64,
    /// All-reduces of tensor parallelism.
    pub communication_ns: f64,
    /// The output layer, in the last stage only.
    pub head_ns: f64,
    /// Sending activations to the next stage.
    pub send_ns: f64,
}

impl StepTime {
    /// Time of a stage other than the last.
    #[must_use]
    pub fn stage_ns(&self) -> f64 {
        self.linear_ns + self.attention_ns + self.elementwise_ns + self.communication_ns
    }

    /// Time of the last stage; with one stage, of the whole step.
    #[must_use]
    pub fn last_stage_ns(&self) -> f64 {
        self.stage_ns() + self.head_ns
    }
}

/// The time of steps of one model on one machine.
///
/// ```
/// use tandem_schedule::{Hardware, ModelDescription};
/// use tandem_schedule::{attention::StepShape, cost::{CostModel, Parallel}};
///
/// let model = ModelDescription::named("llama-3-8b")?;
/// let cost = CostModel::new(&model, &Hardware::named("h200")?, Parallel::default())?;
/// let decodes = StepShape::decodes(32, 4096);
/// let hybrid = decodes.clone().with_chunk(512 - 32, 2048);
/// let (alone, with_chunk) = (cost.step(&decodes), cost.step(&hybrid));
/// // The weights are read once for both.
/// assert!(with_chunk.last_stage_ns() < 3.0 * alone.last_stage_ns());
/// # Ok::<(), tandem_schedule::ScheduleError>(())
/// ```
#[derive(Clone, Debug)]
pub struct CostModel {
    model: ModelDescription,
    hardware: Hardware,
    parallel: Parallel,
    cache_type: CacheType,
    overlap: Overlap,
    attention: AttentionModel,
    linear_ratios: Ratios,
    prefill_ratios: Ratios,
    decode_ratios: Ratios,
    rest_ratios: Ratios,
    pod_loss: Option<f64>,
    hybrid: [f64; 2],
}

impl CostModel {
    /// A cost model of a model on a machine, with serial attention.
    ///
    /// # Errors
    /// [`ScheduleError::DoesNotFit`]; [`ScheduleError::Tensor`], [`ScheduleError::TensorOfKvHeads`] and
    /// [`ScheduleError::Pipeline`] if heads or layers cannot be divided in this way; [`ScheduleError::Description`].
    pub fn new(
        model: &ModelDescription,
        hardware: &Hardware,
        parallel: Parallel,
    ) -> Result<Self, ScheduleError> {
        let Parallel { tensor, pipeline } = parallel;
        if tensor == 0 || !model.q_heads.is_multiple_of(tensor) {
            return Err(ScheduleError::Tensor {
                got: tensor,
                q_heads: model.q_heads,
            });
        }
        if !model.kv_heads.is_multiple_of(tensor) && !tensor.is_multiple_of(model.kv_heads) {
            return Err(ScheduleError::TensorOfKvHeads {
                got: tensor,
                kv_heads: model.kv_heads,
            });
        }
        if pipeline == 0 || pipeline > model.layers {
            return Err(ScheduleError::Pipeline {
                got: pipeline,
                layers: model.layers,
            });
        }
        let spec = model.spec(tensor);
        spec.check().map_err(|error| ScheduleError::Description {
            kind: "model",
            reason: error.to_string(),
        })?;
        let cost = Self {
            model: model.clone(),
            hardware: hardware.clone(),
            parallel,
            cache_type: CacheType::Auto,
            overlap: Overlap::Serial,
            attention: AttentionModel::new(&hardware.device()?, &spec),
            linear_ratios: Ratios::default(),
            prefill_ratios: Ratios::default(),
            decode_ratios: Ratios::default(),
            rest_ratios: Ratios::default(),
            pod_loss: None,
            hybrid: [1.0; 2],
        };
        if cost.kv_memory() <= 0.0 {
            return Err(ScheduleError::DoesNotFit {
                model: model.name.clone(),
                hardware: hardware.name.clone(),
                wanted_gb: cost.weights_per_gpu() / 1e9,
                usable_gb: hardware.memory_bytes as f64 * hardware.usable_memory / 1e9,
            });
        }
        Ok(cost)
    }

    /// With KV caches of another type: more tokens fit, and attention reads fewer bytes.
    ///
    /// # Errors
    /// [`ScheduleError::CacheType`] if the machine lacks kernels for it ([`CacheType::missing`]).
    pub fn with_cache_type(self, cache_type: CacheType) -> Result<Self, ScheduleError> {
        self.with_caches(cache_type, |device, spec| cache_type.missing(device, spec))
    }

    /// [`with_cache_type`](Self::with_cache_type) for a backend that serves such caches, perhaps on another machine: a GPU must
    /// have kernels for the attention, but need not have all that an engine on it asks for.
    ///
    /// # Errors
    /// [`ScheduleError::CacheType`] if the device has no kernels for the attention.
    pub fn with_served_cache_type(self, cache_type: CacheType) -> Result<Self, ScheduleError> {
        self.with_caches(cache_type, |device, spec| {
            let supported = device.supports(&cache_type.spec(*spec));
            supported.err().map(|error| error.to_string())
        })
    }

    fn with_caches(
        mut self,
        cache_type: CacheType,
        missing: impl Fn(&DeviceDescription, &Spec) -> Option<String>,
    ) -> Result<Self, ScheduleError> {
        let device = self.hardware.device()?;
        let spec = self.model.spec(self.parallel.tensor);
        if cache_type.is_8_bit()
            && let Some(reason) = missing(&device, &spec)
        {
            return Err(ScheduleError::CacheType {
                cache_type,
                hardware: self.hardware.name.clone(),
                reason,
            });
        }
        self.attention = AttentionModel::with_cache_type(&device, &spec, cache_type);
        self.cache_type = cache_type;
        Ok(self)
    }

    /// With another way in which prefill and decode attention share the GPU.
    #[must_use]
    pub const fn with_overlap(mut self, overlap: Overlap) -> Self {
        self.overlap = overlap;
        self
    }

    /// Corrected with measurements. [`Correction::check`] says whether they were made for this model, machine and type of caches.
    #[must_use]
    pub fn with_correction(mut self, correction: &Correction) -> Self {
        let linear = |point: &Measured| {
            let predicted = self.uncorrected_linear_ns(point.at.round() as u32);
            (point.at, point.measured_ns / predicted)
        };
        let rest = |point: &Measured| {
            let tokens = point.at.round() as u32;
            let sampled = if tokens > DECODES { 1 } else { tokens };
            let predicted = self.uncorrected_rest_ns(tokens, sampled);
            (point.at, point.measured_ns / predicted)
        };
        let attention = |point: &Measured| (point.at, point.measured_ns / point.at);
        let [prefill, decode] = [&correction.prefill, &correction.decode]
            .map(|points| Ratios(points.iter().map(attention).collect()));
        let linear = Ratios(correction.linear.iter().map(linear).collect());
        let rest = Ratios(correction.rest.iter().map(rest).collect());
        (self.linear_ratios, self.rest_ratios) = (linear, rest);
        (self.prefill_ratios, self.decode_ratios) = (prefill, decode);
        self.pod_loss = correction.pod_loss;
        self.hybrid = correction.hybrid.unwrap_or([1.0; 2]);
        self
    }

    /// The model.
    #[must_use]
    pub const fn model(&self) -> &ModelDescription {
        &self.model
    }

    /// The type of the KV caches.
    #[must_use]
    pub const fn cache_type(&self) -> CacheType {
        self.cache_type
    }

    /// Bytes of the keys and values of one token in all layers.
    #[must_use]
    pub fn kv_bytes_per_token(&self) -> u64 {
        let of_layer = self.cache_type.bytes_per_token(&self.model.spec(1));
        u64::from(self.model.layers) * of_layer
    }

    /// The machine.
    #[must_use]
    pub const fn hardware(&self) -> &Hardware {
        &self.hardware
    }

    /// How the model is divided among GPUs.
    #[must_use]
    pub const fn parallel(&self) -> Parallel {
        self.parallel
    }

    /// What its corrections are measured with.
    #[must_use]
    pub fn origin(&self) -> Origin {
        Origin {
            model: self.model.clone(),
            device: self.hardware.name.clone(),
            parallel: self.parallel,
        }
    }

    /// The row tile of linear layers.
    #[must_use]
    pub fn tile(&self) -> u32 {
        self.hardware.gemm.tile()
    }

    /// Bytes of weights on each GPU of the largest stage; embedding and output layer are divided among all stages.
    fn weights_per_gpu(&self) -> f64 {
        let layers = self.layers_per_stage() * self.model.layer_weights() as f64;
        let ends = 2.0 * self.model.head_weights() as f64 / f64::from(self.parallel.pipeline);
        2.0 * (layers + ends) / f64::from(self.parallel.tensor)
    }

    /// Bytes of a GPU left for the KV cache.
    fn kv_memory(&self) -> f64 {
        self.hardware.memory_bytes as f64 * self.hardware.usable_memory - self.weights_per_gpu()
    }

    /// Bytes of keys and values of one token on each GPU of the largest stage.
    fn kv_bytes_per_gpu(&self) -> f64 {
        let spec = self.model.spec(self.parallel.tensor);
        self.layers_per_stage() * self.cache_type.bytes_per_token(&spec) as f64
    }

    /// Number of KV cache pages that fit next to the weights.
    #[must_use]
    pub fn pages(&self, page_size: u32) -> u32 {
        (self.kv_memory() / (self.kv_bytes_per_gpu() * f64::from(page_size))) as u32
    }

    /// Number of requests of `tokens` tokens that fit the KV cache: SARATHI's B = ⌊(M_gpu − M_weights) / (L · m_kv)⌋,
    /// over all stages.
    #[must_use]
    pub fn max_requests(&self, tokens: u32) -> u32 {
        (self.kv_memory() / (self.kv_bytes_per_gpu() * f64::from(tokens))) as u32
    }

    /// Layers of the largest stage, which determines the pace of the pipeline.
    fn layers_per_stage(&self) -> f64 {
        f64::from(self.model.layers.div_ceil(self.parallel.pipeline))
    }

    fn uncorrected_linear_ns(&self, tokens: u32) -> f64 {
        let weights = self.model.layer_weights() as f64 * self.layers_per_stage();
        let gemm = &self.hardware.gemm;
        gemm.ns(tokens, weights / f64::from(self.parallel.tensor))
    }

    /// Time of the output layer for `sampled` rows, and of the elementwise passes for `tokens` tokens.
    fn uncorrected_rest_ns(&self, tokens: u32, sampled: u32) -> f64 {
        self.elementwise_ns(tokens) + self.head_ns(sampled)
    }

    fn elementwise_ns(&self, tokens: u32) -> f64 {
        let pass_ns = self.activation_bytes(tokens) / self.hardware.gemm.bytes_per_ns;
        ELEMENTWISE_PASSES * pass_ns * self.layers_per_stage()
    }

    fn head_ns(&self, sampled: u32) -> f64 {
        let weights = self.model.head_weights() as f64 / f64::from(self.parallel.tensor);
        self.hardware.gemm.ns(sampled, weights)
    }

    fn activation_bytes(&self, tokens: u32) -> f64 {
        f64::from(tokens) * f64::from(self.model.hidden) * 2.0
    }

    /// Time of the linear layers of a stage.
    #[must_use]
    pub fn linear_ns(&self, tokens: u32) -> f64 {
        self.uncorrected_linear_ns(tokens) * self.linear_ratios.at(f64::from(tokens))
    }

    /// Time of a step, with attention estimated from lengths.
    #[must_use]
    pub fn step(&self, shape: &StepShape) -> StepTime {
        self.with_attention(shape, self.attention.estimate(shape))
    }

    /// Time in which a step passes all stages, none of which it waits for: the time between the tokens of a request that is
    /// in every step.
    pub(crate) fn pass_ns(&self, shape: &StepShape) -> f64 {
        let time = self.step(shape);
        let sends = f64::from(self.parallel.pipeline - 1);
        sends * (time.stage_ns() + time.send_ns) + time.last_stage_ns()
    }

    /// Time from the end of a step to that of the next, if as many steps as stages are under way. The last stage, which also
    /// computes the output layer, has one of them at a time.
    pub(crate) fn pace_ns(&self, shape: &StepShape) -> f64 {
        let of_each = self.pass_ns(shape) / f64::from(self.parallel.pipeline);
        of_each.max(self.step(shape).last_stage_ns())
    }

    /// Time of a step, with attention predicted from the planner's plans of the batch.
    ///
    /// # Errors
    /// As [`Planner::plan`].
    pub fn planned_step(
        &self,
        shape: &StepShape,
        batch: &Batch,
        planner: &mut Planner,
    ) -> Result<StepTime, PlanError> {
        let attention = self.attention.planned(planner, batch)?;
        Ok(self.with_attention(shape, attention))
    }

    /// Time of a step, with attention estimated for requests that each read their shared prefix.
    #[must_use]
    pub fn unpacked_step(&self, shape: &StepShape, batch: &Batch) -> StepTime {
        self.with_attention(shape, self.attention.estimate_unpacked(shape, batch))
    }

    /// The attention model of one layer on one GPU.
    #[must_use]
    pub const fn attention(&self) -> &AttentionModel {
        &self.attention
    }

    fn with_attention(&self, shape: &StepShape, attention: AttentionTime) -> StepTime {
        let tokens = shape.tokens();
        if tokens == 0 {
            return StepTime::default();
        }
        let layers = self.layers_per_stage();
        let tensor = f64::from(self.parallel.tensor);
        let activation_bytes = self.activation_bytes(tokens);
        let prefill_ns = attention.prefill_ns * self.prefill_ratios.at(attention.prefill_ns);
        let decode_ns = attention.decode_ns * self.decode_ratios.at(attention.decode_ns);
        let overlap = match (self.overlap, self.pod_loss) {
            (Overlap::Pod { .. }, Some(loss)) => Overlap::Pod { loss },
            (overlap, _) => overlap,
        };
        let of_hybrids = match overlap {
            _ if prefill_ns.min(decode_ns) <= 0.0 => 1.0,
            Overlap::Serial => self.hybrid[0],
            Overlap::Pod { .. } => self.hybrid[1],
        };
        let attention_ns = of_hybrids * overlap.join(prefill_ns, decode_ns);
        let rest = of_hybrids * self.rest_ratios.at(f64::from(tokens));
        let link = self.hardware.link;
        let communication_ns = if self.parallel.tensor > 1 {
            // Ring all-reduce: each GPU sends and receives 2·(n−1)/n of the message, after attention and after the FFN.
            let bytes = 2.0 * (tensor - 1.0) / tensor * activation_bytes;
            2.0 * layers * (link.latency_ns + bytes / link.bytes_per_ns)
        } else {
            0.0
        };
        let network = self.hardware.network;
        let send_ns = if self.parallel.pipeline > 1 {
            network.latency_ns + activation_bytes / tensor / network.bytes_per_ns
        } else {
            0.0
        };
        StepTime {
            linear_ns: of_hybrids * self.linear_ns(tokens),
            attention_ns: attention_ns * layers,
            elementwise_ns: rest * self.elementwise_ns(tokens),
            communication_ns,
            head_ns: rest * self.head_ns(shape.sampled),
            send_ns,
        }
    }

    /// Time to copy `pages` pages between device and host.
    #[must_use]
    pub fn swap_ns(&self, pages: usize, page_size: u32) -> f64 {
        pages as f64 * f64::from(page_size) * self.kv_bytes_per_gpu()
            / self.hardware.host_bytes_per_ns
    }
}
