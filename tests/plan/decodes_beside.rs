//! Decodes of several new tokens, or behind common prefixes, beside prompt chunks.

use kernels_gpu::registry::Loads;
use tandem_attn::{
    plan::{
        BatchLimits, Bound, DeviceDescription, Kernel, Plan, PlanOptions, Planner, SplitMode,
        pod::PodMode,
    },
    problem::{Batch, Dtype, PageTable, Part, Spec},
};

const PAGE: u32 = 16;

/// A chunk that ends at `context`, and requests of new tokens with keys that all have and keys of their own.
#[derive(Clone, Copy)]
struct Decodes {
    chunk: [u32; 2],
    requests: u32,
    tokens: u32,
    common: u32,
    own: u32,
}

impl Decodes {
    fn batch(&self) -> Batch {
        self.on_pages_of(PAGE)
    }

    fn on_pages_of(&self, page_size: u32) -> Batch {
        let Self {
            chunk: [chunk, context],
            requests,
            tokens,
            common,
            own,
        } = *self;
        let [context_pages, common_pages, own_pages] =
            [context, common, own].map(|keys| keys.div_ceil(page_size));
        let shared = context_pages..context_pages + common_pages;
        let mut table = PageTable::new(page_size, shared.end + requests * own_pages);
        table.push(&(0..context_pages).collect::<Vec<_>>(), context);
        for request in 0..requests {
            let begin = shared.end + request * own_pages;
            let pages = shared.clone().chain(begin..begin + own_pages);
            table.push(&pages.collect::<Vec<_>>(), common + own);
        }
        let tokens = (0..=requests).map(|request| chunk + request * tokens);
        Batch::new([0].into_iter().chain(tokens).collect(), table)
    }
}

fn h200() -> DeviceDescription {
    DeviceDescription::named("h200").unwrap()
}

fn plan(spec: &Spec, batch: &Batch, pod: PodMode) -> Plan {
    let options = PlanOptions::default().with_pod(pod);
    let plan = Planner::new().plan(spec, batch, &h200(), &options).unwrap();
    assert_eq!(plan.verify(batch), Ok(()));
    plan
}

/// Beside a prefill a tile of decodes has 8 rows: with eight query heads for a KV head one token, where tiles of 64 rows hold eight.
/// Forecasts once had the time of the latter.
#[test]
fn keys_that_small_tiles_read_again_are_in_the_forecast() {
    let new_tokens = Decodes {
        chunk: [512, 4096],
        requests: 100,
        tokens: 8,
        common: 0,
        own: 4096,
    };
    let behind_a_prefix = Decodes {
        chunk: [512, 8192],
        requests: 64,
        tokens: 1,
        common: 4096,
        own: 256,
    };
    let bf16 = Spec::new(64, 8, 128);
    let e4m3 = bf16.with_kv_dtype(Dtype::F8E4M3);
    for (name, spec, decodes) in [
        ("new tokens", bf16, &new_tokens),
        ("a prefix", bf16, &behind_a_prefix),
        ("a prefix of 8 bits", e4m3, &behind_a_prefix),
    ] {
        let batch = decodes.batch();
        let [auto, serial, fused] =
            [PodMode::Auto, PodMode::Serial, PodMode::Fused].map(|pod| plan(&spec, &batch, pod));
        let bytes = |plan: &Plan| plan.traffic().kv_bytes as f64;
        assert!(
            bytes(&auto) < 1.2 * bytes(&serial),
            "{name}: {} and {}",
            bytes(&auto),
            bytes(&serial)
        );
        // Whoever asks for it gets it.
        let pod = fused.pod.unwrap();
        assert_eq!(pod.mode, PodMode::Fused, "{name}");
        let forecast = auto.pod.unwrap().forecast;
        assert_eq!(forecast, serial.pod.unwrap().forecast, "{name}");
        let sooner = forecast.serial_ns.min(forecast.streams_ns);
        let again = bytes(&fused) > 1.2 * bytes(&serial);
        assert_eq!(again, forecast.fused_ns > sooner, "{name}: {forecast:?}");
    }
}

/// Two tokens of four query heads fit a tile of 8 rows, and four a tile of 16.
#[test]
fn decodes_that_read_no_key_again_have_the_forecast_of_one_token() {
    let spec = Spec::new(32, 8, 128);
    let forecast = |tokens| {
        let decodes = Decodes {
            chunk: [1024, 8192],
            requests: 50,
            tokens,
            common: 0,
            own: 8192,
        };
        let pod = plan(&spec, &decodes.batch(), PodMode::Auto).pod.unwrap();
        assert!(pod.mode == PodMode::Fused || tokens > 4, "{tokens} tokens");
        pod.forecast.fused_ns
    };
    for tokens in 2..=4 {
        assert_eq!(forecast(tokens), forecast(1));
    }
    assert!(forecast(5) > forecast(1));
}

/// A batch within the limits of a bound is planned with it, in every mode: also if decodes fill many tiles of few rows.
#[test]
fn a_batch_within_limits_is_planned_in_every_mode() {
    let device = h200();
    let splits = [SplitMode::Makespan, SplitMode::Fixed { tokens: 1024 }];
    let dtypes = [Dtype::BF16, Dtype::F8E4M3];
    for group in [1, 2, 3, 4, 5, 6, 8] {
        for (dtype, split) in dtypes
            .iter()
            .flat_map(|&dtype| splits.map(|split| (dtype, split)))
        {
            for (tokens, requests) in [(1, 512), (2, 64), (4, 256), (6, 130), (8, 64), (8, 1024)] {
                let spec = Spec::new(8 * group, 8, 128).with_kv_dtype(dtype);
                let batch = Decodes {
                    chunk: [512, 4096],
                    requests,
                    tokens,
                    common: 0,
                    own: 512,
                };
                let batch = batch.batch();
                for pod in [
                    PodMode::Auto,
                    PodMode::Serial,
                    PodMode::Streams,
                    PodMode::Fused,
                    PodMode::Tickets,
                ] {
                    let options = PlanOptions::default().with_pod(pod).with_split(split);
                    let limits = BatchLimits::decodes(requests + 1, 4096, PAGE)
                        .with_query_tokens(batch.total_q());
                    let bound = Bound::new(&spec, &device, &options, &limits).unwrap();
                    let options = options.with_bound(bound);
                    let plan = Planner::new().plan(&spec, &batch, &device, &options);
                    if let Err(error) = plan {
                        panic!("group {group}, {requests} of {tokens} tokens, {pod:?}: {error}");
                    }
                }
            }
        }
    }
}

/// A request without queries once made the planner panic, where other pages than its own were of 16 tokens.
#[test]
fn a_request_without_queries_on_pages_of_one_token_is_planned_beside_decodes() {
    let part = |page_size, q_indptr| {
        let mut part = Part::new(q_indptr, PageTable::new(page_size, 1000));
        for first in [0, 100] {
            let pages = 64 / page_size;
            part.table
                .push(&(first..first + pages).collect::<Vec<_>>(), 64);
        }
        part
    };
    let mut parts = vec![part(16, vec![0, 1, 1]), part(1, vec![0, 1, 1])];
    parts[0].keys_after = vec![64, 64];
    let batch = Batch::composed(vec![0, 1, 1], parts);
    let spec = Spec::new(32, 8, 128).with_kv_dtype(Dtype::F8E4M3);
    let plan = plan(&spec, &batch, PodMode::Auto);
    assert!(
        plan.groups
            .iter()
            .all(|group| group.kernel == Kernel::Decode)
    );
}

/// Kernels that share SMs do not pad heads on pages of one token.
#[test]
fn hybrids_on_pages_of_one_token_have_kernels_that_load_them() {
    let device = DeviceDescription::named("h200").unwrap();
    for (head_dim, dtype) in [
        (96, Dtype::BF16),
        (112, Dtype::BF16),
        (64, Dtype::F8E4M3),
        (128, Dtype::F8E4M3),
        (256, Dtype::F8E4M3),
        (128, Dtype::BF16),
    ] {
        let spec = Spec::new(32, 8, head_dim).with_kv_dtype(dtype);
        let mut table = PageTable::new(1, 60_000);
        let mut indptr = vec![0];
        for (request, [tokens, keys]) in [[1024, 2048], [1, 2000], [1, 1500], [1, 2000], [3, 1000]]
            .into_iter()
            .enumerate()
        {
            let first = 3000 * request as u32;
            table.push(&(first..first + keys).collect::<Vec<_>>(), keys);
            indptr.push(indptr[request] + tokens);
        }
        let batch = Batch::new(indptr, table);
        for pod in [
            PodMode::Auto,
            PodMode::Fused,
            PodMode::Streams,
            PodMode::Serial,
        ] {
            let options = PlanOptions::default().with_pod(pod);
            let plan = Planner::new().plan(&spec, &batch, &device, &options);
            let plan = plan.unwrap_or_else(|error| panic!("{head_dim} {dtype:?} {pod:?}: {error}"));
            plan.verify(&batch).unwrap();
        }
    }
}

/// Kernels of 64 rows and those that share SMs once did not: an executor took others in their place, or failed.
#[test]
fn every_decode_kernel_loads_the_pages_of_its_items() {
    let hybrid = Decodes {
        chunk: [512, 4096],
        requests: 60,
        tokens: 1,
        common: 0,
        own: 4000,
    };
    let (prefix, few) = (
        Decodes {
            common: 6000,
            own: 300,
            requests: 160,
            ..hybrid
        },
        Decodes {
            tokens: 8,
            ..hybrid
        },
    );
    let dtypes = [Dtype::BF16, Dtype::F8E4M3, Dtype::F8E5M2];
    for (head_dim, kv_dtype) in [64, 80, 128, 256]
        .into_iter()
        .flat_map(|dim| dtypes.map(|dtype| (dim, dtype)))
    {
        for (decodes, chunk) in [hybrid, prefix, few]
            .into_iter()
            .flat_map(|decodes| [(decodes, decodes.chunk), (decodes, [1, 4096])])
        {
            let decodes = Decodes { chunk, ..decodes };
            for (pod, page_size) in [PodMode::Auto, PodMode::Fused]
                .into_iter()
                .flat_map(|pod| [(pod, 1), (pod, 12)])
            {
                let batch = decodes.on_pages_of(page_size);
                let spec = Spec::new(32, 8, head_dim).with_kv_dtype(kv_dtype);
                let options = PlanOptions::default().with_pod(pod);
                // Prompts of padded heads are refused on such pages.
                let Ok(plan) = Planner::new().plan(&spec, &batch, &h200(), &options) else {
                    assert!(head_dim == 80 && chunk[0] > 1, "{spec:?}");
                    continue;
                };
                let decodes = plan
                    .groups
                    .iter()
                    .filter(|group| group.kernel == Kernel::Decode);
                for row in decodes.map(|group| group.id.expect("a kernel").info()) {
                    assert_eq!(
                        row.loads,
                        Loads::PagesOrRows,
                        "{spec:?}, {pod:?}: {}",
                        row.name
                    );
                }
            }
        }
    }
}
