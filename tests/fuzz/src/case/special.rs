//! What is special about a case, in words.

use tandem_attn::{
    Hooks,
    problem::{Compute, Dtype},
    variants::{ALIBI, DISTANCE_BIAS, SIGMOID},
};

use super::{Appends, Case, Scales, Step};

impl Case {
    /// What is special about results of a step, in words.
    pub fn special(&self, step: Option<&Step>) -> Vec<&'static str> {
        let (spec, variant) = (&self.spec, &self.spec.variant);
        let hooks = |hooks: &Hooks| variant.hooks == Some(hooks.name);
        let of_step = |special: fn(&Step) -> bool| step.is_some_and(special);
        let all = [
            (spec.rotary.is_some(), "rotary embedding"),
            (spec.compute == Compute::F8, "products of 8 bits"),
            (hooks(&ALIBI), "linear biases"),
            (hooks(&DISTANCE_BIAS), "biases by distance"),
            (hooks(&SIGMOID), "sigmoid weights"),
            (variant.sinks, "sinks"),
            (variant.soft_cap.is_some(), "soft cap"),
            (variant.window_left.is_some(), "window"),
            (spec.q_dtype == Dtype::F32, "queries in F32"),
            (spec.out_dtype == Dtype::F32, "outputs in F32"),
            (spec.latent, "latent keys"),
            (self.scales == Scales::InRow, "rows of 656 bytes"),
            (spec.kv_dtype.bytes() == 1, "keys of 8 bits"),
            (self.appends == Appends::Quantised, "quantised appends"),
            (self.appends == Appends::Computed, "computed scales"),
            (self.ampere, "instructions of Ampere asked for"),
            (of_step(|step| step.composed), "several parts"),
            (of_step(|step| step.trees), "masks of the last keys"),
            (of_step(|step| step.masks), "masks of any keys"),
        ];
        let there = all.into_iter().filter(|&(there, _)| there);
        there.map(|(_, special)| special).collect()
    }

    /// Whether something is special about its results, or it has calls of such a name.
    pub fn has(&self, wanted: &str) -> bool {
        let of_step = |step: &Step| {
            let calls = step.extras.iter().map(|extra| format!("{extra:?}"));
            let special = self.special(Some(step)).into_iter().map(str::to_owned);
            special.chain(calls).any(|there| there.contains(wanted))
        };
        self.steps.iter().any(of_step)
    }
}
