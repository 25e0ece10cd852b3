//! Plans of hybrid batches: what POD-Attention decides.

use tandem_attn::{
    kv::PagesByHead,
    plan::{
        BatchLimits, Bound, DeviceDescription, Kernel, PackRule, Plan, PlanError, PlanOptions,
        Planner, Rules, SplitMode, Tile, TileGroup, Update,
        pod::{PodMode, Tickets},
    },
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
};

const PAGE: u32 = 16;

/// A prefill chunk that ends at `context`, and decodes.
fn batch(chunk: u32, context: u32, decodes: u32, kv_len: u32) -> Batch {
    let pages = |keys: u32| keys.div_ceil(PAGE);
    let mut table = PageTable::new(PAGE, pages(context) + decodes * pages(kv_len));
    table.push(&(0..pages(context)).collect::<Vec<_>>(), context);
    for decode in 0..decodes {
        let begin = pages(context) + decode * pages(kv_len);
        table.push(&(begin..begin + pages(kv_len)).collect::<Vec<_>>(), kv_len);
    }
    let tokens = [0]
        .into_iter()
        .chain((0..=decodes).map(|decode| chunk + decode));
    Batch::new(tokens.collect(), table)
}

fn plan(batch: &Batch, device: &str, options: PlanOptions) -> Plan {
    let mut device = DeviceDescription::named(device).unwrap();
    // What is decided here, not how well kernels overlap today.
    device.pod.streams_loss = device.pod.streams_loss.max(0.97);
    let by_tickets = device.compute_capability.0 < 9;
    let configs = device.pod.configs.iter_mut();
    for config in configs.filter(|config| by_tickets && config.by_tickets) {
        (config.prefill_slowdown, config.decode_slowdown) = (1.05, 1.02);
        config.overlap_loss = 0.2;
    }
    let spec = Spec::new(32, 8, 128);
    let plan = Planner::new()
        .plan(&spec, batch, &device, &options)
        .unwrap();
    assert_eq!(plan.verify(batch), Ok(()));
    plan
}

fn tiles(plan: &Plan, kernel: Kernel) -> Vec<Tile> {
    let groups = plan.groups.iter().filter(|group| group.kernel == kernel);
    groups.map(|group| group.tile).collect()
}

#[test]
fn balanced_batches_are_fused_with_tiles_that_leave_room() {
    // Figure 1 of the POD paper, C0.
    let batch = batch(1024, 12288, 80, 12288);
    let fused = plan(&batch, "h200", PlanOptions::default());
    let pod = fused.pod.unwrap();
    assert_eq!(pod.mode, PodMode::Fused);
    let device = DeviceDescription::named("h200").unwrap();
    let config = &device.pod.configs[pod.config.unwrap() as usize];
    assert_eq!(tiles(&fused, Kernel::Prefill), [config.prefill]);
    let forecast = pod.forecast;
    assert!(forecast.fused_ns < forecast.streams_ns && forecast.streams_ns < forecast.serial_ns);
    assert!(forecast.fused_ns > forecast.prefill_ns.max(forecast.decode_ns));

    let serial = plan(
        &batch,
        "h200",
        PlanOptions::default().with_pod(PodMode::Serial),
    );
    assert_eq!(serial.pod.unwrap().mode, PodMode::Serial);
    assert_eq!(tiles(&serial, Kernel::Prefill), [Tile { m: 128, n: 128 }]);
}

#[test]
fn prefills_give_way_where_decodes_take_longer() {
    let prefills_of = |batch: &Batch| {
        let fused = plan(batch, "h200", PlanOptions::default());
        let pod = fused.pod.unwrap();
        assert_eq!(pod.mode, PodMode::Fused);
        (tiles(&fused, Kernel::Prefill)[0].n, pod.ctas.prefill)
    };
    // A slower tile, or fewer SMs.
    let (keys, ctas) = prefills_of(&batch(512, 16384, 54, 16384));
    assert!(keys == 64 || ctas < 100, "{keys} keys on {ctas} SMs");
    // 512 tiles in four rounds.
    let (keys, ctas) = prefills_of(&batch(2048, 16384, 27, 16384));
    assert!(keys == 80 && ctas >= 128, "{keys} keys on {ctas} SMs");
}

#[test]
fn one_after_the_other_prefills_are_cut_as_if_they_were_alone() {
    let prefill_items = |decodes| {
        let options = PlanOptions::default().with_pod(PodMode::Serial);
        let plan = plan(&batch(256, 16384, decodes, 16384), "h200", options);
        let groups = plan.groups.iter();
        let prefills = groups.filter(|group| group.kernel == Kernel::Prefill);
        prefills.map(|group| group.items.len()).sum::<usize>()
    };
    // Two tiles of 32 heads are half of what the device holds.
    assert!(prefill_items(0) > 2);
    assert_eq!(prefill_items(54), prefill_items(0));
}

#[test]
fn a_batch_of_one_kind_has_nothing_to_overlap() {
    assert_eq!(
        plan(&batch(0, 16, 8, 1000), "h200", PlanOptions::default()).pod,
        None
    );
    assert_eq!(
        plan(&batch(512, 512, 0, 1), "h200", PlanOptions::default()).pod,
        None
    );
}

#[test]
fn small_prefills_beside_many_decodes_are_not_worth_a_fused_shape() {
    let pod = plan(&batch(16, 32, 200, 8192), "h200", PlanOptions::default())
        .pod
        .unwrap();
    assert_eq!(pod.mode, PodMode::Streams);
    let without = plan(
        &batch(1024, 4096, 20, 4096),
        "rtx4090",
        PlanOptions::default(),
    )
    .pod
    .unwrap();
    assert_eq!((without.mode, without.config), (PodMode::Serial, None));
    let asked = PlanOptions::default().with_pod(PodMode::Fused);
    assert_eq!(
        plan(&batch(1024, 4096, 20, 4096), "rtx4090", asked)
            .pod
            .unwrap()
            .mode,
        PodMode::Streams
    );
}

#[test]
fn tickets_are_in_proportion_to_the_work() {
    let batch = batch(1024, 8192, 50, 8192);
    let made = plan(&batch, "h200", PlanOptions::default());
    let units = |kernel| -> u32 {
        let groups = made.groups.iter().filter(|group| group.kernel == kernel);
        groups.map(|group| made.units_of(group)).sum()
    };
    let (prefill, decode) = (units(Kernel::Prefill), units(Kernel::Decode));
    let tickets = made.pod.unwrap().tickets;
    let [mix, all] = [
        u64::from(tickets.prefill) * u64::from(decode),
        u64::from(tickets.decode) * u64::from(prefill),
    ];
    assert_eq!(mix, all, "{tickets:?} for {prefill} and {decode} units");

    // Or as a rule says.
    let rules = Rules {
        tickets: Some(|prefill, decode| Tickets {
            prefill: prefill.min(3),
            decode: decode.min(5),
        }),
        ..Rules::default()
    };
    let device = DeviceDescription::named("h200").unwrap();
    let spec = Spec::new(32, 8, 128);
    let made = Planner::with_rules(rules).plan(&spec, &batch, &device, &PlanOptions::default());
    let expected = Tickets {
        prefill: 3,
        decode: 5,
    };
    assert_eq!(made.unwrap().pod.unwrap().tickets, expected);

    // On an A100 a CTA runs several decodes side by side, with the paper's small tile.
    let asked = PlanOptions::default().with_pod(PodMode::Fused);
    let ampere = plan(&batch, "a100", asked);
    assert!(
        tiles(&ampere, Kernel::Decode)
            .iter()
            .all(|tile| tile.m == 16),
        "{ampere}"
    );
    let config = ampere.pod.unwrap().config.unwrap() as usize;
    let description = &DeviceDescription::named("a100").unwrap().pod.configs[config];
    assert_eq!(tiles(&ampere, Kernel::Prefill), [description.prefill]);
}

#[test]
fn one_kernel_by_tickets_is_taken_where_asked_for_or_where_there_is_no_other() {
    let batch = batch(1024, 12288, 80, 12288);
    let of = |device: &str, pod| {
        let options = PlanOptions::default().with_pod(pod);
        let made = plan(&batch, device, options);
        let device = DeviceDescription::named(device).unwrap();
        let pod = made.pod.unwrap();
        let config = pod
            .config
            .map(|config| &device.pod.configs[config as usize]);
        (pod.mode, config.map(|config| config.by_tickets))
    };
    assert_eq!(of("h200", PodMode::Auto), (PodMode::Fused, Some(false)));
    assert_eq!(of("h200", PodMode::Tickets), (PodMode::Tickets, Some(true)));
    assert_eq!(of("a100", PodMode::Fused), (PodMode::Tickets, Some(true)));
    assert_eq!(of("rtx4090", PodMode::Tickets), (PodMode::Streams, None));
}

#[test]
fn prefill_splits_are_limited_beside_decodes() {
    let prefill_units = |plan: &Plan| {
        let groups = plan
            .groups
            .iter()
            .filter(|group| group.kernel == Kernel::Prefill);
        groups.map(|group| plan.units_of(group)).sum::<u32>()
    };
    let uncut = |batch: &Batch| {
        let options = PlanOptions::default().with_split(SplitMode::Off);
        prefill_units(&plan(batch, "h200", options))
    };
    // Three tiles of 48 tokens × 4 heads against 64 K keys: 24 units on 132 SMs.
    let alone = batch(128, 65536, 0, 1);
    let split = plan(&alone, "h200", PlanOptions::default());
    assert!(prefill_units(&split) >= 4 * uncut(&alone), "{split}");
    // Decodes that fill the device for longer: no splits.
    let busy = batch(128, 65536, 256, 16384);
    let split = plan(&busy, "h200", PlanOptions::default());
    assert_eq!(prefill_units(&split), uncut(&busy), "{split}");
    // A few decodes: at most two full waves of units.
    let few = batch(128, 65536, 4, 1024);
    let split = plan(&few, "h200", PlanOptions::default());
    let units = prefill_units(&split);
    assert!(units > uncut(&few) && units <= 2 * 132, "{split}");
}

/// The forecast decides, the table of a plan prints it, and its picture ends there: one number.
#[test]
fn a_schedule_takes_what_the_forecast_says() {
    for device in DeviceDescription::names() {
        let description = DeviceDescription::named(device).unwrap();
        for mode in [
            PodMode::Auto,
            PodMode::Serial,
            PodMode::Streams,
            PodMode::Fused,
            PodMode::Tickets,
        ] {
            for batch in [
                batch(1024, 12288, 80, 12288),
                batch(512, 4096, 3, 300),
                batch(64, 64, 200, 8192),
            ] {
                let options = PlanOptions::default().with_pod(mode);
                let plan = plan(&batch, device, options);
                let pod = plan.pod.unwrap();
                let schedule = plan.schedule(&description);
                assert_eq!(
                    schedule.makespan_ns,
                    pod.forecast.of(pod.mode),
                    "{device} {mode:?}"
                );
                let ends = schedule.spans.iter().map(|span| span.end_ns);
                let last = ends.fold(0.0, f64::max);
                assert_eq!(last, schedule.makespan_ns, "{device} {mode:?}");
                assert!(schedule.busy() > 0.0 && schedule.busy() <= 1.0 + 1e-9);

                // CTAs of one operation each where they overlap, and the work of both is drawn.
                let kernel_of = |item: u32| {
                    let mut groups = plan.groups.iter();
                    groups
                        .find(|group| group.items.contains(&item))
                        .unwrap()
                        .kernel
                };
                let overlap = pod.mode != PodMode::Serial;
                assert_eq!(schedule.prefill_ctas > 0, overlap);
                for span in &schedule.spans {
                    let of_prefill = kernel_of(span.item) == Kernel::Prefill;
                    assert!(!overlap || (span.cta < schedule.prefill_ctas) == of_prefill);
                    assert!(span.cta < schedule.ctas && span.begin_ns < span.end_ns);
                }
                let units: u32 = plan.groups.iter().map(|group| plan.units_of(group)).sum();
                assert_eq!(schedule.spans.len(), units as usize);
            }
        }
    }
}

/// Requests of one query behind `prefix` keys that all have, and so many of their own.
fn behind(prefix: u32, own: &[u32]) -> Batch {
    let common = prefix / PAGE;
    let own_pages: u32 = own.iter().map(|own| own.div_ceil(PAGE)).sum();
    let (mut table, mut next) = (PageTable::new(PAGE, common + own_pages), common);
    for own in own {
        let end = next + own.div_ceil(PAGE);
        table.push(
            &(0..common).chain(next..end).collect::<Vec<_>>(),
            prefix + own,
        );
        next = end;
    }
    Batch::new((0..=own.len() as u32).collect(), table)
}

/// 160 requests with a system prompt of 6,000 tokens: products for that, bytes for the rest.
#[test]
fn a_wide_prefix_is_read_by_prefills_beside_the_other_keys() {
    let own: Vec<u32> = (0..160).map(|i| 101 + 4 * i).collect();
    let batch = behind(6000, &own);
    let mut beside = plan(&batch, "h200", PlanOptions::default());
    let pod = beside.pod.unwrap();
    assert_eq!(pod.mode, PodMode::Fused);
    assert_eq!(tiles(&beside, Kernel::Decode), [Tile { m: 8, n: 64 }]);
    let prefills = beside
        .groups
        .iter()
        .find(|group| group.kernel == Kernel::Prefill);
    let prefills = beside.items_of(prefills.unwrap());
    assert!(
        prefills
            .iter()
            .all(|item| item.kv_end <= 6000 && item.rows <= 32)
    );
    let read: u32 = prefills.iter().map(|item| item.kv_len()).sum();
    assert_eq!(read, 5 * 6000);
    assert_eq!(beside.merges.len(), 160);

    // Keys of their own grow within their pages, all by one or some by more.
    for more in [|_| 1, |i: usize| 1 + (i % 2) as u32] {
        let grown: Vec<u32> = own
            .iter()
            .enumerate()
            .map(|(i, own)| own + more(i))
            .collect();
        let grown = behind(6000, &grown);
        assert_eq!(beside.grow(&grown), Some(Update::Patched));
        assert_eq!(beside.verify(&grown), Ok(()));
    }

    // Within what decodes have by default.
    let device = DeviceDescription::named("h200").unwrap();
    let (spec, limits) = (Spec::new(32, 8, 128), BatchLimits::decodes(160, 6800, PAGE));
    let bound = Bound::new(&spec, &device, &PlanOptions::default(), &limits).unwrap();
    let bounded = plan(&batch, "h200", PlanOptions::default().with_bound(bound));
    assert_eq!(bounded.pod.unwrap().mode, PodMode::Fused);
}

/// Prefills convert a prefix of 8-bit keys, if the bound has room for the converted keys; otherwise decodes read it, together.
#[test]
fn a_wide_prefix_of_8_bit_keys_is_converted_by_prefills_if_there_is_room() {
    let own: Vec<u32> = (0..160).map(|i| 101 + 4 * i).collect();
    let batch = behind(6000, &own);
    let device = DeviceDescription::named("h200").unwrap();
    let plan = |kv_dtype, limits: Option<BatchLimits>| {
        let spec = Spec::new(32, 8, 128).with_kv_dtype(kv_dtype);
        let options = PlanOptions::default();
        let bound = limits.map(|limits| Bound::new(&spec, &device, &options, &limits).unwrap());
        let options = options.with_bound(bound);
        let plan = Planner::new()
            .plan(&spec, &batch, &device, &options)
            .unwrap();
        assert_eq!(plan.verify(&batch), Ok(()));
        plan
    };
    let limits = BatchLimits::decodes(160, 6800, PAGE);
    let beside = [None, Some(limits), Some(limits.with_prefill_keys(6016))];
    for plan in beside.map(|limits| plan(Dtype::F8E4M3, limits)) {
        assert_eq!(plan.pod.unwrap().mode, PodMode::Fused);
        assert_eq!(Bound::of(&plan).converted_pages, 6000_u32.div_ceil(64));
    }
    for too_few in [0, 8] {
        let plan = plan(Dtype::F8E4M3, Some(limits.with_prefill_keys(too_few)));
        assert_eq!(plan.pod, None, "{too_few}");
        // The prefix is read by tiles of several requests, not by each request for itself.
        let read: u32 = plan.items.iter().map(|item| item.kv_len()).sum();
        assert!(read < 160 * 6000 / 4, "{too_few}: {read}");
    }
    // No kernels for an SM together have been built for e5m2.
    assert_eq!(plan(Dtype::F8E5M2, None).pod, None);
}

#[test]
fn prefixes_stay_with_decodes_where_prefills_would_not_pay_or_are_not_to_be_had() {
    let wide: Vec<u32> = (0..160).map(|i| 101 + 4 * i).collect();
    let serial = PlanOptions::default().with_pod(PodMode::Serial);
    let fixed = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 512 });
    let is_beside = |batch: &Batch, options| plan(batch, "h200", options).pod.is_some();
    assert!(!is_beside(&behind(6000, &wide), serial));
    assert!(!is_beside(&behind(6000, &wide), fixed));
    // Few rows, or few keys in common, or next to nothing of all.
    assert!(!is_beside(
        &behind(6000, &wide[..8]),
        PlanOptions::default()
    ));
    assert!(!is_beside(&behind(64, &wide), PlanOptions::default()));
    assert!(!is_beside(
        &behind(1024, &[12_000; 64]),
        PlanOptions::default()
    ));
    // Every other request has another prompt: none of the two has tokens in a row.
    let mut mixed = PageTable::new(PAGE, 2 * 375 + 160 * 50);
    for (i, own) in (0..).zip(&wide) {
        let first = 750 + i * 50;
        let pages = (375 * (i % 2)..375 * (i % 2 + 1)).chain(first..first + own.div_ceil(PAGE));
        mixed.push(&pages.collect::<Vec<_>>(), 6000 + own);
    }
    let mixed = Batch::new((0..=160).collect(), mixed);
    assert!(!is_beside(&mixed, PlanOptions::default()));
    // Heads that have no two kernels for an SM.
    let device = DeviceDescription::named("h200").unwrap();
    let spec = Spec::new(32, 8, 256);
    let batch = behind(6000, &wide);
    let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
    assert_eq!(plan.unwrap().pod, None);
}

/// Decodes of 8-bit keys share SMs with prefills if they fit a tile of 8 rows.
#[test]
fn kernels_of_8_bit_keys_that_share_sms() {
    let device = DeviceDescription::named("h200").unwrap();
    let config_of = |spec: Spec, batch: &Batch| {
        let plan = Planner::new().plan(&spec, batch, &device, &PlanOptions::default());
        let plan = plan.unwrap();
        let pod = plan.pod.unwrap();
        let config = &device.pod.configs[pod.config.unwrap() as usize];
        assert_eq!(pod.mode, PodMode::Fused);
        let shares = |group: &TileGroup| group.id.is_some_and(|id| id.info().co_resident);
        (config.name.clone(), plan.groups.iter().all(shares))
    };
    let of = |dtype| Spec::new(32, 8, 128).with_kv_dtype(dtype);
    let few = batch(1024, 8192, 50, 8192);
    let (name, all) = config_of(of(Dtype::F8E4M3), &few);
    assert_eq!((name.as_str(), all), ("two kernels, 8 bits", true));
    let (name, any) = config_of(of(Dtype::F8E5M2), &few);
    assert_eq!((name.as_str(), any), ("SMs apart, 8 bits", false));
    // Four tokens of four heads are 16 rows. With SMs of their own, such batches are no faster than without.
    let mut indptr = vec![0, 1024];
    indptr.extend((1..=50).map(|decode| 1024 + 4 * decode));
    let wider = Batch::new(indptr, few.parts[0].table.clone());
    let mode = |options| {
        let plan = Planner::new().plan(&of(Dtype::F8E4M3), &wider, &device, &options);
        plan.unwrap().pod.unwrap().mode
    };
    assert_ne!(mode(PlanOptions::default()), PodMode::Fused);
    let fused = PlanOptions::default().with_pod(PodMode::Fused);
    assert_eq!(mode(fused), PodMode::Fused);
}

/// Alone on its SM, a CTA of 64 rows on 8-bit keys is hardly faster than two: 128 units do not fill 132 SMs.
#[test]
fn decodes_of_many_rows_are_cut_beside_prefills_too() {
    let mut table = PageTable::new(PAGE, 1000);
    let pages: Vec<u32> = (0..16).collect();
    table.push(&pages, 256);
    for _ in 0..16 {
        table.push(&(0..250).collect::<Vec<_>>(), 4000);
    }
    let indptr = [0].into_iter().chain((0..=16).map(|i| 256 + 8 * i));
    let batch = Batch::new(indptr.collect(), table);
    let spec = Spec::new(64, 4, 128).with_kv_dtype(Dtype::F8E4M3);
    let device = DeviceDescription::named("h200").unwrap();
    for pod in [PodMode::Serial, PodMode::Streams, PodMode::Fused] {
        let options = PlanOptions::default()
            .with_pod(pod)
            .with_packing(PackRule::Off);
        let plan = Planner::new()
            .plan(&spec, &batch, &device, &options)
            .unwrap();
        let decodes = plan.groups.iter().filter(|group| group.tile.m == 64);
        let items: usize = decodes.map(|group| plan.items_of(group).len()).sum();
        assert!(items >= 64, "{pod:?}: {items} items");
    }
}

/// Heads of 64 have two kernels of their own for an SM, those of 256 have them for SMs of their own alone.
#[test]
fn heads_with_and_without_kernels_that_share_sms() {
    let device = DeviceDescription::named("h200").unwrap();
    for (head_dim, name) in [(64, "two kernels, heads of 64"), (256, "SMs apart")] {
        let spec = Spec::new(32, 8, head_dim);
        let batch = batch(1024, 8192, 50, 8192);
        let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
        let pod = plan.unwrap().pod.unwrap();
        let config = &device.pod.configs[pod.config.unwrap() as usize];
        assert_eq!((pod.mode, config.name.as_str()), (PodMode::Fused, name));
    }
}

/// A launch before all else converts 8-bit keys that few rows see: 0.18 ns for a key of 128 elements and its value.
#[test]
fn forecasts_count_the_conversion_of_keys_that_few_rows_see() {
    let times = |chunk, dtype| {
        let spec = Spec::new(32, 8, 128).with_kv_dtype(dtype);
        let device = DeviceDescription::named("h200").unwrap();
        let plan = Planner::new().plan(
            &spec,
            &batch(chunk, 16_000, 40, 4000),
            &device,
            &PlanOptions::default(),
        );
        let forecast = plan.unwrap().pod.unwrap().forecast;
        (forecast.prefill_ns, forecast.serial_ns - forecast.decode_ns)
    };
    let more = |chunk| times(chunk, Dtype::F8E4M3).0 - times(chunk, Dtype::BF16).0;
    let few = more(100);
    assert!(
        (20e3..40e3).contains(&few),
        "16,000 keys of 8 heads: {few} ns"
    );
    let beside = more(1000);
    assert!((7e3..9e3).contains(&beside), "first pieces: {beside} ns");
    // The decodes behind the prefills begin a few microseconds later.
    for dtype in [Dtype::F8E4M3, Dtype::BF16] {
        let (prefill, serial) = times(100, dtype);
        assert!(
            (2e3..3e3).contains(&(serial - prefill)),
            "{prefill} {serial}"
        );
    }
}

/// Where kernels share no SM, a prefill converts 8-bit keys beside its products. If few rows see many keys, that takes longer than
/// a launch before and one operation after the other.
#[test]
fn few_rows_of_many_8_bit_keys_are_not_beside_decodes_on_sms_of_their_own() {
    let mode = |head_dim, dtype| {
        let spec = Spec::new(32, 8, head_dim).with_kv_dtype(dtype);
        let device = DeviceDescription::named("h200").unwrap();
        let plan = Planner::new().plan(
            &spec,
            &batch(100, 16_000, 40, 4000),
            &device,
            &PlanOptions::default(),
        );
        plan.unwrap().pod.unwrap().mode
    };
    assert_eq!(mode(128, Dtype::F8E4M3), PodMode::Fused);
    assert_ne!(mode(256, Dtype::F8E4M3), PodMode::Fused);
    assert_eq!(mode(256, Dtype::BF16), PodMode::Fused);
}

/// The forecast counts the keys that the launch converts: those that a window leaves, and those of a common prefix once.
#[test]
fn forecasts_count_keys_that_are_seen_once() {
    let prefill_ns = |batch: &Batch, window, dtype| {
        let spec = Spec::new(32, 8, 128).with_kv_dtype(dtype);
        let spec = match window {
            Some(window) => spec.with_window_left(window),
            None => spec,
        };
        let device = DeviceDescription::named("h200").unwrap();
        let plan = Planner::new().plan(&spec, batch, &device, &PlanOptions::default());
        plan.unwrap().pod.unwrap().forecast.prefill_ns
    };
    let more = |batch: &Batch, window| {
        prefill_ns(batch, window, Dtype::F8E4M3) - prefill_ns(batch, window, Dtype::BF16)
    };
    let long = batch(100, 30_000, 40, 4000);
    let [all, seen] = [more(&long, None), more(&long, Some(1023))];
    assert!(all > 45e3 && seen < 10e3, "{all} {seen}");
    // 16 chunks of 300 tokens behind the same 500 pages: each key is seen by many rows.
    let mut table = PageTable::new(PAGE, 2000);
    let mut tokens = vec![0];
    for chunk in 0..16 {
        let own = 500 + chunk * 20;
        let pages: Vec<u32> = (0..500).chain(own..own + 19).collect();
        table.push(&pages, 8300);
        tokens.push(tokens[chunk as usize] + 300);
    }
    for decode in 0..40 {
        table.push(
            &(1000 + decode * 20..1020 + decode * 20).collect::<Vec<_>>(),
            320,
        );
        tokens.push(tokens[16] + decode + 1);
    }
    let shared = Batch::new(tokens, table);
    let beside = more(&shared, None);
    assert!((7e3..9e3).contains(&beside), "first pieces: {beside} ns");
}

/// Queries that see no key have no items: they change nothing for the others.
#[test]
fn queries_without_keys_are_no_prefills() {
    let of = |queries: u32| {
        let mut table = PageTable::new(PAGE, 40 * 20);
        (0..40).for_each(|i| table.push(&(20 * i..20 * i + 20).collect::<Vec<_>>(), 320));
        let mut ends: Vec<u32> = (0..=40).collect();
        if queries > 0 {
            table.push(&[], 0);
            ends.push(40 + queries);
        }
        plan(&Batch::new(ends, table), "h200", PlanOptions::default())
    };
    let alone = of(0);
    for queries in [1, 5, 100, 5000] {
        let beside = of(queries);
        assert_eq!(beside.pod, None, "{queries}");
        assert_eq!(beside.items, alone.items, "{queries}");
        assert_eq!(beside.groups, alone.groups, "{queries}");
    }
}

/// Page lists by KV head, with a prompt among them or behind them. In the part of the lists the tokens of the prompt are a row block
/// without keys.
#[test]
fn forecasts_do_not_depend_on_where_a_prompt_stands_among_lists() {
    let spec = Spec::new(32, 8, 128);
    let strides = KvLayout::Hnd.strides(PAGE, 8, 128);
    let pod = |tokens: u32, before: u32, options: PlanOptions| {
        let mut lists = PagesByHead::new(&spec, strides, 256 + 40 * 64).unwrap();
        for list in 0..40 {
            if list == before {
                let pages: Vec<u32> = (0..256).collect();
                lists.push_whole(tokens, &pages, 4096).unwrap();
            }
            let pages: Vec<u32> = (256 + 64 * list..320 + 64 * list).collect();
            lists.push(1, &[(&pages[..], 1024); 8]).unwrap();
        }
        let batch = lists.batch();
        let device = DeviceDescription::named("h200").unwrap();
        let plan = Planner::new().plan(lists.spec(), &batch, &device, &options);
        let plan = plan.unwrap();
        assert_eq!(plan.verify(&batch), Ok(()));
        plan.pod.unwrap()
    };
    let times = |before| pod(4096, before, PlanOptions::default()).forecast;
    assert_eq!(times(0).prefill_ns, times(20).prefill_ns);
    let fixed = PlanOptions::default()
        .with_split(SplitMode::Fixed { tokens: 512 })
        .with_pod(PodMode::Fused);
    let modes = [0, 20].map(|before| pod(1024, before, fixed).mode);
    assert_eq!(modes, [PodMode::Fused; 2]);
}

/// CTAs that take both operations by tickets have no number of prefill CTAs.
#[test]
fn numbers_of_prefill_ctas_are_refused_where_one_kernel_runs_both() {
    let batch = batch(1024, 12288, 80, 12288);
    let plan = |device: &str, pod| {
        let options = PlanOptions::default().with_pod(pod).with_prefill_ctas(20);
        let device = DeviceDescription::named(device).unwrap();
        Planner::new().plan(&Spec::new(32, 8, 128), &batch, &device, &options)
    };
    for (device, pod) in [
        ("a100", PodMode::Fused),
        ("a100", PodMode::Auto),
        ("a100", PodMode::Tickets),
        ("h200", PodMode::Tickets),
    ] {
        let error = plan(device, pod).unwrap_err();
        assert!(matches!(error, PlanError::Unsupported(_)), "{error}");
        assert!(error.to_string().contains("prefill_ctas"), "{error}");
    }
    assert!(plan("h200", PodMode::Fused).is_ok());
    // Nothing is fused there, so the number does not count.
    assert!(plan("h200", PodMode::Serial).is_ok() && plan("a100", PodMode::Serial).is_ok());
    assert!(plan("rtx4090", PodMode::Fused).is_ok());
}
