//! Draws the ranks of a sharding in time: for each rank, a bar of attention and one of the exchange.

use tandem_attn::shard::{Forecast, Share};

use super::{Anchor, SMALL, Svg, WIDTH, palette};
use crate::table::time;

const LEFT: f64 = 84.0;
const RIGHT: f64 = 36.0;
const CHART: f64 = WIDTH - LEFT - RIGHT;
const ROW: f64 = 18.0;

/// Draws the predicted times of each rank. There is a gap between groups of ranks.
#[must_use]
pub fn draw(shares: &[Share], forecast: &Forecast, title: &str, summary: &str) -> String {
    let mut svg = Svg::new(title);
    let mut top = svg.heading(&[summary]);
    for (colour, what) in [
        (palette::DECODE, "attention on the rank's share"),
        (
            palette::PREFILL,
            "exchange: results of the group read and merged",
        ),
    ] {
        svg.rect([16.0, top - 4.0, 12.0, 12.0], colour, None);
        svg.text((36.0, top + 7.0), Anchor::Start, 13, what);
        top += 20.0;
    }
    top += 12.0;
    let groups = shares
        .iter()
        .filter(|share| share.rank == share.group.start)
        .count();
    let bottom = top + ROW * shares.len() as f64 + 6.0 * groups as f64;
    let end_ns = forecast.total_ns.max(1.0);
    svg.time_axis(
        [LEFT, top, CHART, bottom],
        [0.0, end_ns / 1e9],
        "time by the cost model",
    );
    let scale = CHART / end_ns;
    let mut y = top;
    for (share, (attention, exchange)) in shares
        .iter()
        .zip(forecast.attention_ns.iter().zip(&forecast.exchange_ns))
    {
        if share.rank == share.group.start {
            y += 6.0;
        }
        let rank = format!("rank {}", share.rank);
        svg.text((LEFT - 8.0, y + 12.0), Anchor::End, SMALL, &rank);
        let mut bar = |begin: f64, ns: f64, colour: &str, what: &str| {
            let tooltip = format!("{rank}: {what} {}", time(ns));
            let place = [LEFT + begin * scale, y, (ns * scale).max(0.3), ROW - 3.0];
            svg.rect(place, colour, Some(&tooltip));
        };
        bar(0.0, *attention, palette::DECODE, "attention");
        if *exchange > 0.0 {
            let group = share.group.start as usize..share.group.end as usize;
            let last = forecast.attention_ns[group]
                .iter()
                .copied()
                .fold(0.0, f64::max);
            bar(last, *exchange, palette::PREFILL, "exchange");
        }
        y += ROW;
    }
    svg.finish(bottom + 56.0)
}
