//! `tandem plan --gpus N`: the share of each rank and its time predicted by the cost model.

use tandem_attn::{
    plan::{DeviceDescription, Plan},
    problem::Batch,
    shard::{Forecast, Link, MERGED_WHOLE, Sharding, Share},
};

use crate::{
    Failure,
    bench::Planning,
    deal::{Deal, Dealing},
    picture,
    table::{Table, scaled, time},
    workload::Case,
};

/// A batch on several GPUs.
pub(crate) struct Sharded {
    deal: Deal,
    shares: Vec<Share>,
    plans: Vec<Plan>,
    forecast: Forecast,
    /// Time of one GPU predicted by the same model.
    one_ns: f64,
}

impl Sharded {
    /// A case with all requested shardings.
    pub(crate) fn of(
        case: &Case,
        batch: &Batch,
        device: &DeviceDescription,
        dealing: &Dealing,
        planning: &Planning,
    ) -> Result<Vec<Self>, Failure> {
        let spec = &case.spec;
        let link = Link::NVLINK;
        let merge_all = batch.total_q() <= MERGED_WHOLE;
        let mut planner = planning.planner();
        let mut forecast = |sharding: Sharding| -> Result<_, Failure> {
            let shares = sharding.shares(spec, batch);
            let shares = shares.map_err(|error| Failure::Input(error.to_string()))?;
            let plans = shares
                .iter()
                .map(|share| planner.plan(&share.spec, &share.batch, device, &planning.options()))
                .collect::<Result<Vec<_>, _>>()?;
            let forecast = Forecast::new(&shares, &plans, device, &link, merge_all);
            Ok((shares, plans, forecast))
        };
        let (.., one) = forecast(Sharding::one())?;
        let shardings = dealing.shardings(spec, batch).map_err(Failure::Input)?;
        shardings
            .into_iter()
            .map(|(deal, sharding)| {
                let (shares, plans, forecast) = forecast(sharding)?;
                Ok(Self {
                    deal,
                    shares,
                    plans,
                    forecast,
                    one_ns: one.total_ns,
                })
            })
            .collect()
    }

    /// A summary in one line.
    pub(crate) fn summary(&self) -> String {
        let Forecast { total_ns, .. } = self.forecast;
        format!(
            "{} over {} GPUs: {} by the cost model, {:.2} × one GPU ({}); ranks {:.0} % balanced",
            self.deal,
            self.shares.len(),
            time(total_ns),
            self.one_ns / total_ns,
            time(self.one_ns),
            100.0 * self.forecast.balance()
        )
    }

    /// A table with a row for each rank.
    pub(crate) fn describe(&self) -> String {
        let mut table = Table::new([
            "rank",
            "query heads",
            "KV heads",
            "query tokens",
            "pages",
            "moves",
            "computes",
            "attention",
            "exchange",
        ]);
        let of = self.shares.iter().zip(&self.plans);
        let times = self
            .forecast
            .attention_ns
            .iter()
            .zip(&self.forecast.exchange_ns);
        for ((share, plan), (attention, exchange)) in of.zip(times) {
            let traffic = plan.traffic();
            let heads = |heads: &std::ops::Range<u32>| format!("{}–{}", heads.start, heads.end - 1);
            let pages: usize = share
                .batch
                .parts
                .iter()
                .map(|part| part.table.indices.len())
                .sum();
            table.push([
                share.rank.to_string(),
                heads(&share.q_heads),
                heads(&share.kv_heads),
                share.batch.total_q().to_string(),
                pages.to_string(),
                scaled(traffic.bytes() as f64, "B"),
                scaled(traffic.flops as f64, "FLOP"),
                time(*attention),
                time(*exchange),
            ]);
        }
        format!("{}\n\n{}", self.summary(), table.render())
    }

    /// The picture of the ranks.
    pub(crate) fn draw(&self, title: &str) -> String {
        picture::ranks(&self.shares, &self.forecast, title, &self.summary())
    }
}
