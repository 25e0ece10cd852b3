//! The mode of a hybrid batch.

use kernels_gpu::registry::KernelInfo;

use super::forecast::{Conversion, PrefillLoad};
use crate::{
    plan::{
        conversion::{FIRST_NS, Prefixes, few_rows_see_them, pieces_beside, prepared_ns},
        data::{CtaSplit, Kernel, PlanOptions, PodMode, PodPlan, Rules, SplitMode, Tickets},
        draft::{BatchInput, Draft, DraftSink, Drafter, Drafts, MeanLoads, PartInput},
        model::{Model, PodConfig, PrefillTile, TileTable, gcd},
        split::FEW_ROWS,
    },
    problem::{Compute, Padding, Part, Spec},
};

/// Chooses how a hybrid batch runs. `decodes` are drafted in the tiles for decodes alone, and take `rereads` times as long in those
/// of each configuration. [`tickets`] sets the tickets later, when the units are known.
pub fn choose(
    input: &BatchInput<'_>,
    decodes: &Drafts,
    rereads: &[f64],
    options: &PlanOptions,
) -> PodPlan {
    let model = input.model;
    let device = &model.device;
    let slowdown = model
        .shared
        .as_ref()
        .map_or(1.0, |shared| shared.prefill_slowdown);
    let load = |tiles: &TileTable, slowdown: f64| {
        // With fixed splits, `contiguous_tiles` counts the pieces, which cannot be cut further.
        let mut load = PrefillLoad::new(options.split == SplitMode::Makespan);
        let ns_per_pair = ns_per_pair(model) * padded(&model.spec, tiles);
        for part in input.parts(tiles) {
            let by_rows = prefills_by_rows(&model.spec, part.part);
            part.contiguous_tiles(options.split, |launch, units, keys| {
                let PrefillTile { tile, kernel, .. } = tiles.prefills()[launch];
                let shares = kernel.is_some_and(|id| id.info().co_resident);
                let slowdown = if shares { slowdown } else { 1.0 };
                let rate = if by_rows {
                    BY_ROWS[usize::from(shares)]
                } else {
                    1.0
                };
                let pairs = f64::from(tile.m) * keys;
                let ns = pairs * ns_per_pair * slowdown / rate + device.pod.tile_ns;
                load.add(launch, units, ns);
            });
        }
        load
    };
    let of_8_bits = model.spec.kv_dtype.bytes() == 1;
    let mut parts = input.batch.parts.iter();
    let by_rows = parts.any(copies_rows);
    // On pages that are read row by row, kernels that share SMs took up to 1.3 times as long with 8-bit keys as two streams.
    let may_share =
        co_resident_load_pages(input) && !(by_rows && of_8_bits && options.pod == PodMode::Auto);
    // With fixed splits, results must not depend on the batch: every request needs the kernel that it has alone.
    // Decodes of 8-bit keys in several tiles of few rows would read their keys as often.
    let fits = |tiles: &TileTable| {
        (!options.split.is_fixed() || all_have_what_they_have_alone(input, tiles))
            && (!of_8_bits || decodes_have_one_tile(input, tiles))
    };
    let [before, beside] = conversions(input);
    let by_tickets = options.pod == PodMode::Tickets;
    let fused = model.fused_tiles.iter().zip(&device.pod.configs);
    let fused = fused.zip(rereads.iter().copied());
    // One kernel with both operations is for heads that have no other form, and for callers that ask for it.
    let two_kernels = fused
        .clone()
        .any(|((tiles, config), _)| tiles.is_some() && !config.by_tickets);
    // Kernels that share SMs were faster than those on SMs of their own wherever both were measured.
    let shares = (fused.clone())
        .any(|((tiles, config), _)| config.shares_sms() && tiles.as_ref().is_some_and(&fits));
    let may_be_apart = options.pod != PodMode::Auto || gains_apart(input, decodes);
    let decode_ns = decodes.mean_load_ps(&model.cost) as f64 / 1e3;
    // Tiles of more rows are for decodes that fewer rows would read again.
    let others = fused.clone();
    let gains_nothing = |config: &PodConfig, reread: f64| {
        let before = (others.clone()).take_while(move |((_, other), _)| *other != config);
        before
            .filter(|((tiles, _), _)| tiles.is_some())
            .any(|((_, other), of_other)| config.differs_in_decodes(other) && of_other <= reread)
    };
    let fused = fused.map(|((tiles, config), reread)| {
        let wanted = if config.by_tickets {
            // Both are of one part then.
            (by_tickets || !two_kernels) && !input.beside_heads
        } else {
            !(by_tickets || config.is_apart() && (shares || !may_be_apart))
        };
        let wanted = wanted && (may_share || !config.shares_sms());
        let wanted = wanted && !gains_nothing(config, reread);
        let tiles = tiles.as_ref().filter(|tiles| wanted && fits(tiles));
        // Kernels on SMs of their own convert beside the products: a launch before gained less, and not always.
        let (conversion, slowdown) = match config.shares_sms() {
            true if by_rows => (before, DECODES_BY_ROWS),
            true => (before, 1.0),
            false => (beside, 1.0),
        };
        let decode_ns = decode_ns * reread * slowdown;
        tiles.map(|tiles| (load(tiles, 1.0).converting(conversion), decode_ns))
    });
    let prefill = load(&model.tiles, slowdown).converting(Conversion {
        before_ns: before.before_ns,
        ..beside
    });
    let alone_ns = decode_ns * decode_alone(input, decodes);
    let (mut forecast, choice) = device.pod.forecast(device.sms, &prefill, fused, alone_ns);
    if of_8_bits {
        forecast.streams_ns *= STREAMS_CONVERTING;
    }
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

/// Time on two streams of prefills that convert 8-bit keys, over the forecast: CTAs that start late convert late.
const STREAMS_CONVERTING: f64 = 1.03;

/// Whether prefills and decodes on SMs of their own may be faster than on two streams. So they were, by up to 35 %, with decodes of few
/// rows; of 8-bit keys, with those of one token without a soft cap. Others took 1.06 to 1.25 times as long as the forecast says: their
/// products need all SMs (docs/notes/pod.md).
fn gains_apart(input: &BatchInput<'_>, decodes: &Drafts) -> bool {
    let Model { spec, tiles, .. } = input.model;
    if spec.kv_dtype.bytes() != 1 {
        return decodes.items.iter().all(|draft| draft.tile.m <= FEW_ROWS);
    }
    spec.variant.soft_cap.is_none()
        && input.parts(tiles).all(|part| {
            let decodes = |tokens: u32| part.kernel(tokens) == Kernel::Decode;
            part.tokens().all(|tokens| tokens <= 1 || !decodes(tokens))
        })
}

/// The conversion of 8-bit keys that few rows see, as each mode has it: by a launch before all else and beside the products.
fn conversions(input: &BatchInput<'_>) -> [Conversion; 2] {
    let Model { spec, tiles, .. } = input.model;
    if spec.kv_dtype.bytes() != 1 {
        return [Conversion::NONE; 2];
    }
    let parts = input.parts(tiles).map(|part| part.prefill_keys());
    let sums = parts.fold([0; 2], |sum, part| [0, 1].map(|i| sum[i] + part[i]));
    conversions_of(input.model, sums)
}

/// The same for a number of keys, and pairs of a key and a row that sees it.
fn conversions_of(model: &Model, [keys, pairs]: [u64; 2]) -> [Conversion; 2] {
    let spec = &model.spec;
    if spec.kv_dtype.bytes() != 1 || spec.compute != Compute::F16 {
        return [Conversion::NONE; 2];
    }
    let hidden = Conversion {
        first_ns: FIRST_NS,
        ..Conversion::NONE
    };
    if !few_rows_see_them(pairs, keys, spec.kv_heads) {
        return [hidden; 2];
    }
    let (pieces, piece_ns) = pieces_beside(keys, spec.kv_heads, spec.head_dim_qk);
    let before = Conversion {
        before_ns: prepared_ns(keys, spec.kv_heads, spec.head_dim_qk),
        ..Conversion::NONE
    };
    let beside = Conversion {
        pieces,
        piece_ns,
        ..hidden
    };
    [before, beside]
}

/// Whether keys of a part are copied row by row: kernels load pages in groups of 8 tokens.
const fn copies_rows(part: &Part) -> bool {
    !part.table.page_size.is_multiple_of(8)
}

/// The same for prefills: converted keys lie on pages of 64.
const fn prefills_by_rows(spec: &Spec, part: &Part) -> bool {
    !spec.converts() && copies_rows(part)
}

/// Speed of prefills that copy keys row by row, relative to those that load pages: alone, and with kernels that share SMs
/// (docs/notes/pod.md). Of pages of one token; of others that are no multiple of 8, prefills reach 0.91 alone.
const BY_ROWS: [f64; 2] = [0.94, 0.9];

/// Time of decodes that copy keys row by row, and share SMs, relative to those that load pages (docs/notes/pod.md).
const DECODES_BY_ROWS: f64 = 1.15;

/// Speed of prefills with a soft cap, relative to those without.
const fn with_soft_cap(head_dim: u32) -> f64 {
    match head_dim {
        0..=64 => 0.75,
        65..=128 => 0.69,
        _ => 0.85,
    }
}

/// Time of prefills per pair of a row and a key on one SM, in nanoseconds.
fn ns_per_pair(model: &Model) -> f64 {
    let (spec, device) = (&model.spec, &model.device);
    let capped = match spec.variant.soft_cap {
        Some(_) => with_soft_cap(spec.head_dim_qk),
        None => 1.0,
    };
    let flops_per_ns = device.flops_per_ns * device.prefill.part_of(spec.head_dim_qk) * capped;
    spec.flops_per_pair() as f64 / f64::from(spec.q_heads) * f64::from(device.sms) / flops_per_ns
}

/// Measured time of decodes that share prefixes in addition to the time of their units, in nanoseconds.
const LAUNCHED_NS: f64 = 8e3;

/// Prefixes are read beside the other keys if the step then takes less than this part of its time.
const WORTH_BESIDE: f64 = 0.95;

/// What prefills of wide prefixes take, and the decodes beside them. Drafts are added up, and not kept: most batches are drafted in
/// another way.
struct WidePrefixes<'a> {
    model: &'a Model,
    /// Time to compute one row of a tile with one key.
    ns_per_pair: f64,
    loads: MeanLoads<'a>,
    load: PrefillLoad,
    /// Partial states of the prefills, one for each query token.
    states: f64,
    decode_ps: u64,
    /// If keys are converted: keys of the prefixes, and pairs of a key and a row that sees it.
    seen: [u64; 2],
    prefixes: Prefixes,
}

impl<'a> WidePrefixes<'a> {
    /// Of a batch of one part, in `tiles`. None if there are no wide prefixes.
    fn of(input: &BatchInput<'a>, tiles: &TileTable, drafter: &mut Drafter) -> Option<Self> {
        let model = input.model;
        let mut parts = input.batch.parts.iter();
        let rate = match parts.any(|part| prefills_by_rows(&model.spec, part)) {
            true => BY_ROWS[1],
            false => 1.0,
        };
        let mut all = Self {
            model,
            ns_per_pair: ns_per_pair(model) * padded(&model.spec, tiles) / rate,
            loads: MeanLoads::new(&model.cost),
            load: PrefillLoad::new(true),
            states: 0.0,
            decode_ps: 0,
            seen: [0; 2],
            prefixes: Prefixes::default(),
        };
        drafter.draft_wide(input, tiles, &mut all).then_some(all)
    }
}

impl DraftSink for WidePrefixes<'_> {
    #[inline(always)] // most of a draft is never written then
    fn add_decode(&mut self, draft: Draft) {
        self.decode_ps += self.loads.of(&draft);
    }

    fn add_prefill(&mut self, draft: Draft) {
        let Model {
            spec, cost, device, ..
        } = self.model;
        let pairs = f64::from(draft.tile.m) * f64::from(draft.kv_len());
        let ns = pairs * self.ns_per_pair + device.pod.tile_ns;
        self.load.add(0, draft.units(cost), ns);
        self.states += f64::from(draft.rows);
        // The tiles of a prefix follow each other.
        if spec.converts() {
            let keys = u64::from(draft.kv_len());
            self.seen[1] += u64::from(draft.rows) * u64::from(spec.group()) * keys;
            if self.prefixes.add(draft.table, draft.kv_begin..draft.kv_end) {
                self.seen[0] += keys;
            }
        }
    }
}

/// Lets prefills read the wide prefixes of decodes, side by side with the keys that each request has alone. Wide
/// prefixes are limited by tensor cores, the other keys by memory bandwidth. Returns none if this is not faster or not
/// possible.
pub fn prefixes_beside(
    input: &BatchInput<'_>,
    drafter: &mut Drafter,
    options: &PlanOptions,
) -> Option<PodPlan> {
    let model = input.model;
    let device = &model.device;
    if !options.reads_prefixes_beside() || !co_resident_load_pages(input) {
        return None;
    }
    let wanted = options.pod == PodMode::Fused;
    let alone_ps = drafter.shared_ps(input, wanted)?;
    let configs = || {
        let configs = model.fused_tiles.iter().zip(&device.pod.configs);
        configs.map(|(tiles, config)| tiles.as_ref().filter(|_| config.shares_sms()))
    };
    let tiles = configs().flatten().next()?;
    let WidePrefixes {
        load,
        states,
        decode_ps,
        seen,
        prefixes,
        ..
    } = WidePrefixes::of(input, tiles, drafter)?;
    let load = load.converting(conversions_of(model, seen)[0]);
    let decode_ns = decode_ps as f64 / 1e3;
    let slowdown = match input.batch.parts.iter().any(copies_rows) {
        true => DECODES_BY_ROWS,
        false => 1.0,
    };
    let fused = configs().map(|tiles| tiles.map(|_| (load, decode_ns * slowdown)));
    let forecast = device.pod.forecast(device.sms, &load, fused, decode_ns);
    let (forecast, choice) = forecast;
    let alone_ns = alone_ps as f64 / 1e3 + LAUNCHED_NS;
    // Partial states of prefills are added here; the time of decodes already has those of decodes.
    let state_bytes = 2.0 * model.spec.partial_bytes_per_token() as f64;
    let beside_ns = forecast.fused_ns + states * state_bytes / device.read_bytes_per_ns;
    let is_sooner = wanted || beside_ns < WORTH_BESIDE * alone_ns;
    let room = options.bound.filter(|_| model.spec.converts());
    let has_room = room.is_none_or(|bound| prefixes.pages() <= bound.converted_pages);
    let choice = choice.filter(|_| is_sooner && has_room)?;
    let ctas = match options.prefill_ctas {
        Some(prefill) => CtaSplit::new(device.sms, prefill.max(1)),
        None => choice.ctas,
    };
    Some(PodPlan {
        mode: PodMode::Fused,
        config: Some(choice.config),
        tickets: Tickets::default(),
        ctas,
        forecast,
    })
}

/// Whether every request of a batch gets the same bits from these kernels as alone.
fn all_have_what_they_have_alone(input: &BatchInput<'_>, tiles: &TileTable) -> bool {
    let alone = &input.model.tiles;
    let same = |part: PartInput<'_>| {
        let same = |tokens| tiles.same_bits(alone, part.kernel(tokens), tokens);
        part.tokens().all(same)
    };
    tiles == alone || input.parts(alone).all(same)
}

/// Whether kernels that share SMs can load the batch's pages. Prefills pad heads by tensor maps: in groups of 8 tokens.
fn co_resident_load_pages(input: &BatchInput<'_>) -> bool {
    let pads = Padding::of(&input.model.spec).is_some();
    let mut parts = input.batch.parts.iter();
    !pads || parts.all(|part| part.table.page_size.is_multiple_of(8))
}

/// Whether every decode fits a tile of these kernels, or has no larger one alone.
fn decodes_have_one_tile(input: &BatchInput<'_>, tiles: &TileTable) -> bool {
    let most = tiles.decode_tokens();
    most >= input.model.tiles.decode_tokens()
        || input.parts(tiles).all(|part| {
            part.tokens()
                .all(|tokens| tokens <= most || part.kernel(tokens) != Kernel::Decode)
        })
}

/// Time of decodes alone, relative to the time that their bytes need.
fn decode_alone(input: &BatchInput<'_>, decodes: &Drafts) -> f64 {
    let model = input.model;
    let alone = model.device.pod.decode_alone;
    let Some(shared) = &model.shared else {
        return alone;
    };
    let shares = |draft: &&Draft| {
        let choice = model.tiles.decode(draft.tile.m);
        choice
            .and_then(|choice| choice.kernel)
            .is_some_and(|id| id.info().co_resident)
    };
    let keys = |draft: &Draft| f64::from(draft.kv_len());
    let all: f64 = decodes.items.iter().map(keys).sum();
    let part = decodes.items.iter().filter(shares).map(keys).sum::<f64>() / all.max(1.0);
    alone + (shared.decode_slowdown - alone) * part
}

/// How many times the products of the given heads prefills compute: kernels multiply all columns of padded heads.
/// Prefills beside decodes may pad heads that have their own kernels alone.
fn padded(spec: &Spec, tiles: &TileTable) -> f64 {
    let kernel = tiles.prefills().first().and_then(|step| step.kernel);
    let columns = |row: &KernelInfo| f64::from(row.head_dim + row.value_dim);
    let given = f64::from(spec.head_dim_qk + spec.head_dim_v);
    kernel.map_or(1.0, |id| columns(id.info()) / given)
}

/// The mix of CTAs for the units of decodes and of prefills: in proportion to the work, in lowest terms, so that both
/// end at about the same time.
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
