//! Wide common prefixes that prefills read for requests of one token, some of which have no other keys.

use proptest::prelude::*;
use tandem_attn::{
    plan::{DeviceDescription, Kernel, Plan, PlanOptions, Planner, pod::PodMode},
    problem::{Batch, PageTable, Spec},
};

use crate::problems::cases;

/// Requests of one query behind `common` pages that all have. The requests from `second` on have `branch` more pages in common.
/// Each has so many keys of its own.
#[derive(Clone, Debug)]
struct Requests {
    page_size: u32,
    common: u32,
    branch: u32,
    second: usize,
    own: Vec<u32>,
}

impl Requests {
    /// The batch once each request has `more` keys of its own.
    fn batch(&self, more: u32) -> Batch {
        let Self {
            page_size,
            common,
            branch,
            second,
            ref own,
        } = *self;
        // Pages do not depend on `more`: requests grow within theirs, and into the next.
        let most = own
            .iter()
            .max()
            .map_or(0, |own| own + 1)
            .div_ceil(page_size);
        let shared = common + branch;
        let mut table = PageTable::new(page_size, shared + own.len() as u32 * most);
        for (request, own) in own.iter().enumerate() {
            let prefix = if request < second { common } else { shared };
            let (first, keys) = (shared + request as u32 * most, own + more);
            let pages = (0..prefix).chain(first..first + keys.div_ceil(page_size));
            table.push(&pages.collect::<Vec<_>>(), prefix * page_size + keys);
        }
        Batch::new((0..=own.len() as u32).collect(), table)
    }
}

fn plan(batch: &Batch, pod: PodMode) -> Plan {
    let device = DeviceDescription::named("h200").unwrap();
    let options = PlanOptions::default().with_pod(pod);
    let plan = Planner::new().plan(&Spec::new(32, 8, 128), batch, &device, &options);
    plan.unwrap()
}

fn reads_beside(plan: &Plan) -> bool {
    let mut kernels = plan.groups.iter().map(|group| group.kernel);
    kernels.any(|kernel| kernel == Kernel::Prefill)
}

/// Alone, the request has one item, a tile of the prefix: its result is merged nevertheless, as those of its neighbours are.
#[test]
fn a_request_may_end_with_a_prefix_that_prefills_read() {
    for page_size in [1, 16] {
        for lone in [0, 5, 40] {
            let mut own = vec![40; 41];
            own[lone] = 0;
            let requests = Requests {
                page_size,
                common: 272 / page_size,
                branch: 0,
                second: 0,
                own,
            };
            let batch = requests.batch(0);
            let plan = plan(&batch, PodMode::Fused);
            assert!(reads_beside(&plan));
            assert_eq!(plan.verify(&batch), Ok(()), "{page_size} {lone}");
        }
    }
}

/// Kernels beside decodes pad heads of 80 to 128: they take as long. Pages of one token are copied row by row, which takes longer.
#[test]
fn forecasts_of_wide_prefixes_count_padding_and_copies_by_rows() {
    let forecast = |head_dim, page_size| {
        let requests = Requests {
            page_size,
            common: 6000 / page_size,
            branch: 0,
            second: 0,
            own: (0..160).map(|i| 101 + 4 * i).collect(),
        };
        let device = DeviceDescription::named("h200").unwrap();
        let options = PlanOptions::default().with_pod(PodMode::Fused);
        let (spec, batch) = (Spec::new(32, 8, head_dim), requests.batch(0));
        let plan = Planner::new().plan(&spec, &batch, &device, &options);
        let plan = plan.unwrap();
        assert!(reads_beside(&plan));
        plan.pod.unwrap().forecast
    };
    let pages = forecast(128, 16);
    let padded = forecast(80, 16).prefill_ns / pages.prefill_ns;
    assert!((0.99..1.01).contains(&padded), "{padded}");
    let rows = forecast(128, 1);
    let by_rows = [
        rows.prefill_ns / pages.prefill_ns,
        rows.fused_ns / pages.fused_ns,
    ];
    assert!(
        by_rows.iter().all(|by| (1.05..1.2).contains(by)),
        "{by_rows:?}"
    );
}

/// Keys of a request behind the prefix: often none.
fn own() -> impl Strategy<Value = u32> {
    prop_oneof![2 => Just(0), 2 => 1u32..50, 1 => Just(16u32), 1 => 100u32..2000]
}

fn requests() -> impl Strategy<Value = Requests> {
    let own = prop_oneof![
        prop::collection::vec(own(), 32..200),
        prop::collection::vec(prop_oneof![1 => Just(0), 30 => 1u32..200], 32..200),
    ];
    let pages = (prop_oneof![Just(1u32), Just(16u32)], 0u32..3000, 0u32..800);
    (pages, own, any::<prop::sample::Index>(), any::<bool>()).prop_map(
        |((page_size, common, branch), own, second, branches)| Requests {
            page_size,
            common: common / page_size,
            branch: if branches { branch / page_size } else { 0 },
            second: second.index(own.len()),
            own,
        },
    )
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn plans_behind_wide_prefixes_are_right(requests in requests(), fused in prop::bool::weighted(0.8)) {
        let batch = requests.batch(0);
        let pod = if fused { PodMode::Fused } else { PodMode::Auto };
        let mut plan = plan(&batch, pod);
        prop_assert_eq!(plan.verify(&batch), Ok(()));
        let grown = requests.batch(1);
        if plan.grow(&grown).is_some() {
            prop_assert_eq!(plan.verify(&grown), Ok(()));
        }
    }
}
