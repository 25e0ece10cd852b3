//! Inputs of some variants and batches besides queries, keys and values: their checks and kernel parameters.

use kernels_gpu::{
    abi::{AttentionParams, RotaryParams, TokenMask},
    registry::{Arch, KernelId},
    variant::OwnDefect,
};

use crate::{
    Error,
    checks::check_least,
    exec::gpu::{
        DeviceArray, DeviceTensor, Gpu, KvPool,
        tensor::{COUNTED, fits},
    },
    problem::{Padding, ProblemError, Quantity, Spec},
    tensor::{ShapeError, check_softmax},
};

/// Inputs of some variants and batches besides queries, keys and values.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Extras {
    /// As [`RunTensors::sinks`](super::RunTensors::sinks).
    pub sinks: Option<DeviceArray<f32>>,
    /// `[tokens]`: as [`Batch::ancestors`](crate::problem::Batch::ancestors).
    pub ancestors: Option<DeviceArray<u64>>,
    /// A [`TokenMask`] for each token, and the words of all tokens after these, at the places that these give.
    pub masks: Option<DeviceArray<u64>>,
    /// How heads are padded, if the heads of the pool are smaller than the spec says.
    pub(in crate::exec::gpu) padding: Option<Padding>,
    /// Additional columns between the 64th column of a head and the next, in outputs and partial states. This launch
    /// does not pad heads, but other launches of the run do.
    pub(in crate::exec::gpu) gap: u32,
    /// As [`TileGroup::kv_heads_together`](crate::plan::TileGroup::kv_heads_together).
    pub(in crate::exec::gpu) kv_heads_together: u32,
    /// Whether a prefill multiplies by the scales of 8-bit keys and values.
    pub(in crate::exec::gpu) scaled: bool,
    /// The rotary embedding that decodes apply to queries and keys, and prefills to queries.
    pub(in crate::exec::gpu) rotary: RotaryParams,
    /// The pool of the values, if it is not that of the keys: keys are then in pages that were made from those of the
    /// pool.
    pub(in crate::exec::gpu) values: Option<KvPool>,
}

impl Extras {
    /// Checks that the inputs that the spec needs are there, for this number of query tokens.
    pub(in crate::exec::gpu) fn check(&self, spec: &Spec, tokens: usize) -> Result<(), Error> {
        check_sinks(spec, self.sinks)?;
        if let Some(ancestors) = self.ancestors {
            ancestors.check_address("ancestors", 8)?;
            check_least("ancestors", "tokens", ancestors.len, tokens, ", as in q")?;
        }
        if self.ancestors.is_some() && self.masks.is_some() {
            return Err(ProblemError::MasksAndAncestors.into());
        }
        if let Some(masks) = self.masks {
            let of_token = size_of::<TokenMask>() / size_of::<u64>();
            masks.check_address("masks", size_of::<TokenMask>() as u32)?;
            check_least(
                "masks",
                "u64",
                masks.len,
                of_token * tokens,
                ", two for each token of q",
            )?;
        }
        Ok(())
    }

    /// The kernel to run instead of a prefill's kernel: itself, or a kernel that supports masks, scales, the rotary
    /// embedding and sinks that it does not support itself, if any of these is needed.
    pub(in crate::exec::gpu) fn kernel(
        &self,
        kernel: KernelId,
        spec: &Spec,
    ) -> Result<KernelId, Error> {
        let row = kernel.info();
        let scaled = self.scaled && !row.co_resident;
        let turns = self.rotary.turns != 0;
        if turns && row.co_resident {
            return Err(Error::NoInstance {
                kernel: "prefill",
                asked: format!("a rotary embedding in {kernel}"),
                there: "a rotary embedding in kernels that do not share SMs with decodes",
            });
        }
        let masked = self.ancestors.is_some() || self.masks.is_some();
        let sinks = self.sinks.is_some() && !(row.sinks && spec.variant.sink_tokens <= 1);
        if row.extras || !(scaled || turns || sinks || masked) {
            return Ok(kernel);
        }
        let there = kernel.with_extras().or_else(|| kernel.on(Arch::Sm80));
        there.ok_or_else(|| Error::NoInstance {
            kernel: "prefill",
            asked: format!("sinks, masks, scales or a rotary embedding in {kernel}"),
            there: "these in kernels of one or two tiles of queries",
        })
    }

    /// Parameters of every attention kernel: heads, tensors and these inputs.
    pub(in crate::exec::gpu) fn parameters(
        &self,
        spec: &Spec,
        q: &DeviceTensor<3>,
        pool: &KvPool,
        out: &DeviceTensor<3>,
        lse: Option<&DeviceTensor<2>>,
    ) -> Result<AttentionParams, Error> {
        Ok(AttentionParams {
            q: q.address,
            k: pool.k,
            v: pool.v,
            out: out.address,
            lse: lse.map_or(0, |lse| lse.address),
            q_heads: spec.q_heads,
            kv_heads: spec.kv_heads,
            group: spec.group(),
            k_strides: pool.k_strides,
            v_strides: pool.v_strides,
            q_token_stride: fits(
                Quantity::Stride("the token stride of q"),
                q.strides[0],
                COUNTED,
            )?,
            out_token_stride: fits(
                Quantity::Stride("the token stride of out"),
                out.strides[0],
                COUNTED,
            )?,
            variant: spec.variant_params(),
            scales: pool.scale_parameters(spec, q.shape[0])?,
            sinks: self.sinks.map_or(0, |sinks| sinks.address),
            ancestors: self.ancestors.map_or(0, |ancestors| ancestors.address),
            masks: self.masks.map_or(0, |masks| masks.address),
            ..AttentionParams::default()
        })
    }
}

/// Checks that there are sinks exactly if the spec has them.
pub(in crate::exec::gpu) fn check_sinks(
    spec: &Spec,
    sinks: Option<DeviceArray<f32>>,
) -> Result<(), Error> {
    let name = "sinks";
    match (spec.variant.sinks, sinks) {
        (true, None) => Err(ShapeError::Missing { name }.into()),
        (false, Some(_)) => Err(ShapeError::Surplus { name }.into()),
        (true, Some(sinks)) => {
            ShapeError::length(name, sinks.len, spec.shape_of_sinks(), spec.sinks())?;
            sinks.check_address(name, 4)
        }
        (false, None) => Ok(()),
    }
}

/// Checks that the hooks of the spec's variant, if any, match the spec and are given valid data.
pub(in crate::exec::gpu) fn check_own(gpu: &Gpu, spec: &Spec, own: &[u8]) -> Result<(), Error> {
    let hooks = spec.variant.hooks.map(|name| gpu.hooks(name)).transpose()?;
    let expected = hooks.map_or(0, |hooks| hooks.own_bytes);
    if own.len() != expected {
        return Err(Error::Shape(ShapeError::OwnBytes {
            hooks: hooks.map(|hooks| hooks.name),
            got: own.len(),
            expected,
        }));
    }
    let Some(hooks) = hooks else {
        return Ok(());
    };
    check_softmax(spec, hooks.softmax)?;
    let wrong = |OwnDefect { name, got, rule }| ShapeError::Own {
        hooks: hooks.name,
        name,
        got,
        rule,
    };
    Ok((hooks.check.0)(own, spec.q_heads).map_err(wrong)?)
}

#[cfg(test)]
mod tests {
    use kernels_gpu::registry::{Arch, Op};

    use super::*;

    /// Prompts with sinks run the kernels of other prompts: those with masks in their main loop are slower.
    #[test]
    fn prefills_with_sinks_are_those_without_where_these_add_them() {
        let spec = Spec::new(64, 8, 64).with_sinks();
        let sinks = Some(DeviceArray::new(1 << 20, 64));
        let only = Extras {
            sinks,
            ..Extras::default()
        };
        let masked = Extras {
            ancestors: Some(DeviceArray::new(1 << 20, 64)),
            ..only
        };
        let turned = Extras {
            rotary: RotaryParams {
                turns: 1,
                ..RotaryParams::default()
            },
            ..only
        };
        let mut of_tokens = spec;
        of_tokens.variant.sink_tokens = 8;
        let hopper = |row: &kernels_gpu::registry::KernelInfo| {
            row.arch == Arch::Sm90a && row.op == Op::Prefill && !row.extras && !row.latent
        };
        let (mut whole, mut shared) = (0, 0);
        for id in KernelId::all().filter(|id| hopper(id.info())) {
            let chosen = only.kernel(id, &spec).expect("there is one");
            assert_eq!(chosen == id, !id.info().co_resident, "{id}");
            assert!(chosen.info().sinks);
            let tokens = only.kernel(id, &of_tokens).expect("there is one");
            assert!(tokens.info().extras, "{id}");
            assert!(
                masked
                    .kernel(id, &spec)
                    .expect("there is one")
                    .info()
                    .extras
            );
            if !id.info().co_resident {
                assert!(
                    turned
                        .kernel(id, &spec)
                        .expect("there is one")
                        .info()
                        .extras
                );
            }
            *if chosen == id {
                &mut whole
            } else {
                &mut shared
            } += 1;
        }
        assert!(whole > 20 && shared > 0, "{whole} {shared}");
    }
}
