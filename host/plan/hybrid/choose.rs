//! The mode of a hybrid batch.

use kernels_gpu::registry::KernelInfo;

use super::forecast::PrefillLoad;
use crate::{
    plan::{
        data::{CtaSplit, PlanOptions, PodMode, PodPlan, Rules, SplitMode, Tickets},
        draft::{BatchInput, Drafts},
        model::{PodConfig, TileTable, gcd},
    },
    problem::Spec,
};

/// How a hybrid batch runs; `decodes` are drafted in the tiles that they have alone. The tickets are for
/// [`tickets`] to say, when the units are known.
pub fn choose(input: &BatchInput<'_>, decodes: &Drafts, options: &PlanOptions) -> PodPlan {
    let model = input.model;
    let device = &model.device;
    let flops: u64 = input
        .parts(&model.tiles)
        .map(|part| part.contiguous_flops())
        .sum();
    let load = |tiles: &TileTable| PrefillLoad {
        ns: flops as f64 / device.flops_per_ns * padded(&model.spec, tiles),
        tiles: input.parts(tiles).map(|part| part.contiguous_units()).sum(),
        divisible: options.split != SplitMode::Off,
    };
    // Results that do not depend on the batch need the same tiles in any batch.
    let any_tiles = !options.split.is_fixed();
    let by_tickets = options.pod == PodMode::Tickets;
    let fused = model.fused_tiles.iter().zip(&device.pod.configs);
    let fused = fused.map(|(tiles, config)| {
        let wanted = any_tiles && (config.by_tickets || !by_tickets);
        tiles.as_ref().filter(|_| wanted).map(load)
    });
    let decode_ns = decodes.mean_load_ps(&model.cost) as f64 / 1e3;
    let prefill = load(&model.tiles);
    let (forecast, choice) = device.pod.forecast(device.sms, &prefill, fused, decode_ns);
    let mode = match options.pod {
        PodMode::Auto => forecast.best(),
        PodMode::Fused | PodMode::Tickets if choice.is_none() => PodMode::Streams,
        PodMode::Tickets => PodMode::Fused,
        mode => mode,
    };
    let choice = choice.filter(|_| mode == PodMode::Fused);
    let config = choice.map(|choice| &device.pod.configs[choice.config as usize]);
    let mut ctas = choice.map_or(CtaSplit::default(), |choice| choice.ctas);
    if let (Some(prefill), true) = (options.prefill_ctas, ctas != CtaSplit::default()) {
        ctas = CtaSplit::new(device.sms, prefill.max(1));
    }
    PodPlan {
        mode: match config {
            Some(config) if config.by_tickets => PodMode::Tickets,
            _ => mode,
        },
        config: choice.map(|choice| choice.config),
        tickets: Tickets::default(),
        ctas,
        forecast,
    }
}

/// How many times the products of a spec's heads prefills make: of padded heads they multiply all columns. Prefills that
/// run beside decodes may pad heads for which there are others of their own.
fn padded(spec: &Spec, tiles: &TileTable) -> f64 {
    let kernel = tiles.prefills().first().and_then(|step| step.kernel);
    let columns = |row: &KernelInfo| f64::from(row.head_dim + row.value_dim);
    let given = f64::from(spec.head_dim_qk + spec.head_dim_v);
    kernel.map_or(1.0, |id| columns(id.info()) / given)
}

/// The mix of CTAs for so many units of decodes and of prefills: as many of each operation as there is work, in lowest
/// terms, so that both end at about the same time.
pub fn tickets(config: Option<&PodConfig>, rules: &Rules, units: [u32; 2]) -> Tickets {
    let [decodes, prefill] = units;
    let decode = decodes.div_ceil(config.map_or(1, |config| config.virtual_decodes.max(1)));
    if let Some(rule) = rules.tickets {
        return rule(prefill, decode);
    }
    let divisor = gcd(prefill, decode).max(1);
    Tickets {
        prefill: prefill / divisor,
        decode: decode / divisor,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_are_in_proportion_and_in_lowest_terms() {
        let mix = |prefill, decode| tickets(None, &Rules::default(), [decode, prefill]);
        let expected = |prefill, decode| Tickets { prefill, decode };
        assert_eq!(mix(100, 199), expected(100, 199));
        assert_eq!(mix(64, 128), expected(1, 2));
        assert_eq!(mix(0, 9), expected(0, 1));
        assert_eq!(mix(0, 0), expected(0, 0));
    }
}
