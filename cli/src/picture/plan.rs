//! Draws a plan: units over SMs in time, and what each launch moves and computes.
//!
//! Each SM has a row, with a thinner row for each resident CTA. If prefills and decodes overlap, the rows of prefills
//! are above those of decodes. Consecutive units of one item on a CTA are drawn as one bar. If a plan has so many units
//! that bars would be thinner than half a pixel, neighbours of one kind are joined, too. The picture stays legible and
//! of moderate size from one request to thousands.

use std::collections::BTreeMap;

use tandem_attn::{
    abi::NO_MERGE,
    plan::{DeviceDescription, Kernel, Plan, Schedule, Span, TileGroup, Traffic},
};

use super::{Anchor, SMALL, Svg, WIDTH, palette};
use crate::{
    plan::form,
    table::{counted, digits, scaled, time},
};

const LEFT: f64 = 84.0;
const RIGHT: f64 = 36.0;
const CHART: f64 = WIDTH - LEFT - RIGHT;
const LEGEND_LINE: f64 = 20.0;
/// Narrower bars are joined with their neighbours, in pixels.
const NARROWEST: f64 = 0.5;

/// Two shades of a colour, to tell neighbouring items apart. Launches of the same kernel have related colours.
fn shades(plan: &Plan, index: usize) -> [&'static str; 2] {
    let kernel = plan.groups[index].kernel;
    let before = plan.groups[..index]
        .iter()
        .filter(|group| group.kernel == kernel)
        .count();
    match kernel {
        Kernel::Decode => palette::DECODE_SHADES[before % palette::DECODE_SHADES.len()],
        Kernel::Prefill => palette::PREFILL_SHADES[before % palette::PREFILL_SHADES.len()],
        _ => palette::OTHER_SHADES,
    }
}

/// Draws a plan as the cost model schedules it on a device.
#[must_use]
pub fn draw(plan: &Plan, device: &DeviceDescription, title: &str) -> String {
    let schedule = plan.schedule(device);
    let mut svg = Svg::new(title);
    let mut top = svg.heading(&[&summary(plan, &schedule, device)]);
    for (index, group) in plan.groups.iter().enumerate() {
        svg.rect([16.0, top - 4.0, 12.0, 12.0], shades(plan, index)[0], None);
        let line = group_line(plan, group);
        svg.text((36.0, top + 7.0), Anchor::Start, 13, &line);
        top += LEGEND_LINE;
    }
    top += 12.0;
    let end_ns = schedule.makespan_ns;
    if end_ns <= 0.0 {
        svg.text((LEFT, top + 16.0), Anchor::Start, 13, "nothing to do");
        return svg.finish(top + 48.0);
    }
    let rows = Rows::of(&schedule, device, top);
    let bottom = rows.bottom();
    svg.time_axis(
        [LEFT, top, CHART, bottom],
        [0.0, end_ns / 1e9],
        "time by the cost model",
    );
    rows.label(&mut svg, device);
    let group_of = |item: u32| {
        let mut groups = plan.groups.iter();
        groups.position(|group| group.items.contains(&item))
    };
    let scale = CHART / end_ns;
    for bar in bars(&schedule, scale) {
        let (Some(index), Some([y, height])) = (group_of(bar.item), rows.place(bar.cta)) else {
            continue;
        };
        let x = LEFT + bar.begin_ns * scale;
        let width = ((bar.end_ns - bar.begin_ns) * scale).max(0.3);
        svg.rect(
            [x, y, width, height],
            shades(plan, index)[bar.item as usize % 2],
            Some(&tooltip(plan, &plan.groups[index], &bar)),
        );
    }
    svg.finish(bottom + 56.0)
}

/// Number and name of the processors of a device that run CTAs.
pub(crate) fn processors(device: &DeviceDescription) -> String {
    counted(device.sms as usize, processor(device))
}

fn processor(device: &DeviceDescription) -> &'static str {
    if device.is_cpu() { "thread" } else { "SM" }
}

fn summary(plan: &Plan, schedule: &Schedule, device: &DeviceDescription) -> String {
    let Traffic {
        kv_bytes,
        partial_bytes,
        flops,
    } = plan.traffic();
    format!(
        "{} with {}: {} by the cost model{}, CTAs {:.0} % busy; KV {}, partial states {}, {}; {} of {}",
        device.name,
        processors(device),
        time(schedule.makespan_ns),
        form(plan, device).map_or(String::new(), |form| format!(
            ", prefills and decodes {form}"
        )),
        100.0 * schedule.busy(),
        scaled(kv_bytes as f64, "B"),
        scaled(partial_bytes as f64, "B"),
        scaled(flops as f64, "FLOP"),
        counted(plan.merges.len(), "merge"),
        counted(plan.slots as usize, "state"),
    )
}

fn group_line(plan: &Plan, group: &TileGroup) -> String {
    let mut traffic = Traffic::default();
    for item in plan.items_of(group) {
        traffic += plan.traffic_of(group.kernel, item);
    }
    format!(
        "{}, tile {}: {}, {}, {}, {}",
        plan.kernel_name(group),
        group.tile,
        counted(group.items.len(), "item"),
        counted(plan.units_of(group) as usize, "unit"),
        scaled(traffic.bytes() as f64, "B"),
        scaled(traffic.flops as f64, "FLOP")
    )
}

/// Positions of the CTAs of each SM.
struct Rows {
    sms: u32,
    /// Every n-th SM is drawn.
    every: u32,
    /// Numbers of prefill CTAs and of all CTAs; then the rows of an SM for prefills, and all its rows.
    ctas: [u32; 2],
    lanes: [u32; 2],
    top: f64,
    /// Height of a CTA's row.
    lane: f64,
}

impl Rows {
    fn of(schedule: &Schedule, device: &DeviceDescription, top: f64) -> Self {
        /// Height of all rows; minimum height of a row if prefills and decodes are to be told apart; maximum height.
        const HEIGHT: f64 = 700.0;
        const LEAST: f64 = 4.5;
        const MOST: f64 = 22.0;
        let sms = device.sms.max(1);
        let prefill = schedule.prefill_ctas;
        let others = (schedule.ctas - prefill).max(1);
        let of_prefill = prefill.div_ceil(sms);
        // An SM without a prefill CTA draws a second decode CTA in that row.
        let lanes = match prefill {
            1.. if others > sms && prefill + others == 2 * sms => [1, 2],
            _ => [of_prefill, of_prefill + others.div_ceil(sms)],
        };
        let mut every = 1;
        while prefill > 0 && HEIGHT / f64::from(sms.div_ceil(every) * lanes[1]) < LEAST {
            every *= 2;
        }
        let drawn = f64::from(sms.div_ceil(every) * lanes[1]);
        Self {
            sms,
            every,
            ctas: [prefill, schedule.ctas],
            lanes,
            top,
            lane: (HEIGHT / drawn).clamp(2.0, MOST),
        }
    }

    /// The SM of a CTA, and its row there.
    fn lane_of(&self, cta: u32) -> (u32, u32) {
        let [prefill, _] = self.ctas;
        let [of_prefill, all] = self.lanes;
        if prefill == 0 {
            return (cta / all, cta % all);
        }
        if cta < prefill {
            return (cta % self.sms, cta / self.sms);
        }
        let cta = cta - prefill;
        match cta / self.sms {
            lane if of_prefill + lane < all => (cta % self.sms, of_prefill + lane),
            // These SMs come after the last one with a prefill CTA.
            _ => (prefill + cta % self.sms, 0),
        }
    }

    fn sm_height(&self) -> f64 {
        self.lane * f64::from(self.lanes[1])
    }

    fn bottom(&self) -> f64 {
        self.top + self.sm_height() * f64::from(self.sms.div_ceil(self.every))
    }

    /// Top and height of a CTA's bars; none if its SM is not drawn.
    fn place(&self, cta: u32) -> Option<[f64; 2]> {
        let (sm, lane) = self.lane_of(cta);
        if !sm.is_multiple_of(self.every) || sm >= self.sms {
            return None;
        }
        let y = self.top + self.sm_height() * f64::from(sm / self.every);
        // A gap below each SM, and a smaller one between its CTAs.
        let gap = if self.lane >= 4.0 { 1.0 } else { 0.25 };
        let last = lane + 1 == self.lanes[1];
        let below = if last { gap } else { gap / 4.0 };
        Some([y + self.lane * f64::from(lane), self.lane - below])
    }

    fn label(&self, svg: &mut Svg, device: &DeviceDescription) {
        const LINE: f64 = 16.0;
        let name = processor(device);
        let mut step = self.every;
        while self.sm_height() * f64::from(step / self.every) < LINE {
            step *= 2;
        }
        for sm in (0..self.sms).step_by(step as usize) {
            let y = self.top + self.sm_height() * f64::from(sm / self.every);
            svg.text(
                (LEFT - 10.0, y + 11.0),
                Anchor::End,
                SMALL,
                &format!("{name} {sm}"),
            );
            svg.line((LEFT - 6.0, y), (LEFT, y), palette::AXIS, 1.0);
        }
        svg.line((LEFT, self.top), (LEFT, self.bottom()), palette::AXIS, 1.0);
        let [prefill, _] = self.ctas;
        let mut words = Vec::new();
        if prefill > 0 {
            words.push("in each row: prefills above, decodes below".to_owned());
        }
        if self.every > 1 {
            words.push(format!("one {name} of {} is drawn", self.every));
        }
        let bottom = self.bottom() + 40.0;
        if !words.is_empty() {
            svg.text((16.0, bottom), Anchor::Start, SMALL, &words.join("; "));
        }
    }
}

/// Units that are drawn as one bar.
#[derive(Clone, Copy, Debug)]
struct Bar {
    item: u32,
    units: u32,
    cta: u32,
    begin_ns: f64,
    end_ns: f64,
}

/// Joins neighbours on a CTA: units of one item, and bars that are too narrow to see.
fn bars(schedule: &Schedule, scale: f64) -> Vec<Bar> {
    let mut done = Vec::new();
    let mut open: BTreeMap<u32, Bar> = BTreeMap::new();
    for &Span {
        item,
        cta,
        begin_ns,
        end_ns,
        ..
    } in &schedule.spans
    {
        let new = Bar {
            item,
            units: 1,
            cta,
            begin_ns,
            end_ns,
        };
        match open.get_mut(&cta) {
            Some(bar) if bar.item == item || (bar.end_ns - bar.begin_ns) * scale < NARROWEST => {
                bar.units += 1;
                bar.end_ns = end_ns;
            }
            _ => done.extend(open.insert(cta, new)),
        }
    }
    done.extend(open.into_values());
    done
}

fn tooltip(plan: &Plan, group: &TileGroup, bar: &Bar) -> String {
    let item = &plan.items[bar.item as usize];
    let Traffic {
        kv_bytes, flops, ..
    } = plan.traffic_of(group.kernel, item);
    let units = f64::from(group.units_per_item(&plan.spec));
    let share = f64::from(bar.units) / units;
    let partial = if group.kernel == Kernel::Decode {
        plan.rows_of(item).iter().any(|row| row.merge != NO_MERGE)
    } else {
        item.merge != NO_MERGE
    };
    format!(
        "item {}: {} tokens, keys {}..{}{}; {}, {}, {}; {}–{} µs",
        bar.item,
        item.rows,
        item.kv_begin,
        item.kv_end,
        if partial { ", merged later" } else { "" },
        counted(bar.units as usize, "unit"),
        scaled(kv_bytes as f64 * share, "B"),
        scaled(flops as f64 * share, "FLOP"),
        digits(bar.begin_ns / 1e3),
        digits(bar.end_ns / 1e3),
    )
}
