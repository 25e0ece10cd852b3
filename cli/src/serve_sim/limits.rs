//! Limits of a simulation, checked before memory of that size is allocated.

use tandem_schedule::{cost::CostModel, trace::Trace};

use super::Args;
use crate::{Failure, memory, table::counted};

/// Maximum number of requests of a simulation.
const MOST_REQUESTS: usize = 1 << 24;

pub(super) fn requests(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(requests @ 0..=MOST_REQUESTS) => Ok(requests),
        _ => Err(format!("give a whole number up to {MOST_REQUESTS}")),
    }
}

impl Args {
    /// Checks that memory suffices for the simulation's data per request, token and page.
    pub(super) fn check_size(&self, cost: &CostModel, trace: &Trace) -> Result<(), Failure> {
        const REQUEST: u64 = 640;
        const PAGE: u64 = 16;
        let (requests, policies) = (trace.arrivals.len() as u64, self.policy.len() as u64);
        let tokens = trace
            .arrivals
            .iter()
            .map(|arrival| u64::from(arrival.request.max_new_tokens));
        let generated: u64 = tokens.sum();
        let pages = u64::from(cost.pages(self.page_size)) + u64::from(self.host_pages(cost));
        // The gaps of one policy are sorted while those of the others are in memory.
        let needed =
            requests * (REQUEST + 16 * policies) + 4 * generated * (policies + 2) + PAGE * pages;
        memory::check(
            &format!(
                "simulating {} that generate {generated} tokens, on {pages} pages, under {}",
                counted(requests as usize, "request"),
                if policies == 1 {
                    "1 policy".to_owned()
                } else {
                    format!("{policies} policies")
                }
            ),
            needed,
            "give fewer --requests, fewer policies, or larger pages (--page-size)",
        )
    }

    /// Host pages for requests that are swapped out.
    pub(super) fn host_pages(&self, cost: &CostModel) -> u32 {
        let page_bytes = cost.kv_bytes_per_token() as f64 * f64::from(self.page_size);
        (self.swap_gb * 1e9 / page_bytes) as u32
    }
}
