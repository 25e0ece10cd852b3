//! A plan: units over SMs in time, and what each launch moves and computes.
//!
//! A row for each SM, and a thinner one within it for each resident CTA. Units that follow one another on a
//! CTA and belong to the same item are drawn as one bar; in a plan of so many units that a bar would be
//! thinner than half a pixel, neighbours of one kind become one bar too. The picture stays legible and of
//! moderate size from 1 request to thousands.

use std::collections::BTreeMap;

use tandem_attn::{
    abi::NO_MERGE,
    plan::{DeviceDescription, Kernel, Plan, Schedule, Span, TileGroup, Traffic, pod::PodMode},
};

use super::{Anchor, Svg, text_width, ticks};
use crate::table::{counted, digits, scaled, time};

const WIDTH: f64 = 1200.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 24.0;
const CHART: f64 = WIDTH - LEFT - RIGHT;
const HEADER: f64 = 64.0;
const LEGEND_LINE: f64 = 20.0;
const AXIS: f64 = 44.0;
/// Bars narrower than this are drawn together with their neighbours.
const NARROWEST: f64 = 0.5;

/// Two shades of a colour, so that neighbouring items can be told apart; colours of a kernel are kindred.
fn shades(plan: &Plan, index: usize) -> [&'static str; 2] {
    const BLUES: [[&str; 2]; 4] = [
        ["#2a7fba", "#5fa5d3"],
        ["#3f51a3", "#7482c4"],
        ["#1f8f8f", "#5fb8b8"],
        ["#6b4fa0", "#9a82c6"],
    ];
    const REDS: [[&str; 2]; 3] = [
        ["#d1701f", "#e69a5c"],
        ["#b8452f", "#d68473"],
        ["#a8801c", "#cfae5c"],
    ];
    const GREENS: [[&str; 2]; 2] = [["#4a9a4a", "#80be80"], ["#7d9a2f", "#a9c268"]];
    let kernel = plan.groups[index].kernel;
    let before = plan.groups[..index]
        .iter()
        .filter(|group| group.kernel == kernel)
        .count();
    match kernel {
        Kernel::Decode => BLUES[before % BLUES.len()],
        Kernel::Prefill => REDS[before % REDS.len()],
        _ => GREENS[before % GREENS.len()],
    }
}

/// Draws a plan as the cost model schedules it on a device.
#[must_use]
pub fn draw(plan: &Plan, device: &DeviceDescription, title: &str) -> String {
    let schedule = plan.schedule(device);
    let ctas = schedule.ctas.max(1);
    let row = (700.0 / f64::from(ctas)).clamp(2.0, 22.0);
    let chart_height = row * f64::from(ctas);
    let legend = LEGEND_LINE * plan.groups.len().max(1) as f64 + 8.0;
    let top = HEADER + legend;
    let mut svg = Svg::new(WIDTH, top + chart_height + AXIS, title);

    svg.text((16.0, 26.0), Anchor::Start, 17, title);
    svg.text(
        (16.0, 48.0),
        Anchor::Start,
        13,
        &summary(plan, &schedule, device),
    );
    for (index, group) in plan.groups.iter().enumerate() {
        let y = HEADER + LEGEND_LINE * index as f64;
        svg.rect([16.0, y, 12.0, 12.0], shades(plan, index)[0], None);
        svg.text(
            (36.0, y + 11.0),
            Anchor::Start,
            13,
            &group_line(plan, group),
        );
    }
    let end_ns = schedule.spans_end_ns();
    if end_ns <= 0.0 {
        svg.text((LEFT, top + 16.0), Anchor::Start, 13, "nothing to do");
        return svg.finish();
    }

    let scale = CHART / end_ns;
    axes(&mut svg, &schedule, device, Frame { top, row, scale });
    let group_of = |item: u32| {
        let mut groups = plan.groups.iter();
        groups.position(|group| group.items.contains(&item))
    };
    for bar in bars(&schedule, scale) {
        let Some(index) = group_of(bar.item) else {
            continue;
        };
        let x = LEFT + bar.begin_ns * scale;
        let width = ((bar.end_ns - bar.begin_ns) * scale).max(0.3);
        let gap = if row >= 6.0 { 1.0 } else { 0.25 };
        let y = top + row * f64::from(bar.cta) + gap / 2.0;
        svg.rect(
            [x, y, width, row - gap],
            shades(plan, index)[bar.item as usize % 2],
            Some(&tooltip(plan, &plan.groups[index], &bar)),
        );
    }
    svg.finish()
}

/// What runs CTAs on a device, counted.
pub(crate) fn processors(device: &DeviceDescription) -> String {
    let what = if device.is_cpu() { "thread" } else { "SM" };
    counted(device.sms as usize, what)
}

/// The schedule shows prefills and decodes of a hybrid batch one after the other, however they run.
pub(crate) fn serially(plan: &Plan) -> &'static str {
    match &plan.pod {
        Some(pod) if pod.mode != PodMode::Serial => " serially",
        _ => "",
    }
}

fn summary(plan: &Plan, schedule: &Schedule, device: &DeviceDescription) -> String {
    let Traffic {
        kv_bytes,
        partial_bytes,
        flops,
    } = plan.traffic();
    let busy =
        100.0 * schedule.busy_ns / (schedule.spans_end_ns() * f64::from(schedule.ctas.max(1)));
    format!(
        "{} with {}: {}{} by the cost model, CTAs {} % busy; KV {}, partial states {}, {}; {} of {}",
        device.name,
        processors(device),
        time(schedule.makespan_ns),
        serially(plan),
        if busy.is_finite() {
            digits(busy)
        } else {
            "0".to_owned()
        },
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

/// Where the chart is.
#[derive(Clone, Copy)]
struct Frame {
    top: f64,
    row: f64,
    scale: f64,
}

fn axes(svg: &mut Svg, schedule: &Schedule, device: &DeviceDescription, frame: Frame) {
    let Frame { top, row, scale } = frame;
    let bottom = top + row * f64::from(schedule.ctas);
    let end_ns = schedule.spans_end_ns();
    let (unit_ns, unit) = if end_ns < 1e6 {
        (1e3, "µs")
    } else {
        (1e6, "ms")
    };
    for tick in ticks(end_ns / unit_ns, 8) {
        let x = LEFT + tick * unit_ns * scale;
        svg.line((x, top - 2.0), (x, bottom + 5.0), "#dddddd", 1.0);
        let label = format!("{} {unit}", super::num(tick));
        // The last label may reach the edge.
        let anchor = if x + text_width(&label, 12) / 2.0 > WIDTH - 4.0 {
            Anchor::End
        } else {
            Anchor::Middle
        };
        svg.text((x, bottom + 20.0), anchor, 12, &label);
    }
    let label = if device.is_cpu() { "thread" } else { "SM" };
    let per_sm = (schedule.ctas / device.sms.max(1)).max(1);
    // Labels need 14 pixels each.
    let every = [1, 2, 4, 8, 16, 32, 64, 128]
        .into_iter()
        .find(|&every| f64::from(every * per_sm) * row >= 14.0)
        .unwrap_or(256);
    for sm in (0..device.sms).step_by(every as usize) {
        let y = top + f64::from(sm * per_sm) * row;
        svg.text(
            (LEFT - 8.0, y + 11.0),
            Anchor::End,
            11,
            &format!("{label} {sm}"),
        );
        svg.line((LEFT - 6.0, y), (LEFT, y), "#999999", 1.0);
    }
    svg.line((LEFT, top - 2.0), (LEFT, bottom), "#999999", 1.0);
    svg.line((LEFT, bottom), (WIDTH - RIGHT, bottom), "#999999", 1.0);
}

/// Units drawn as one.
#[derive(Clone, Copy, Debug)]
struct Bar {
    item: u32,
    units: u32,
    cta: u32,
    begin_ns: f64,
    end_ns: f64,
}

/// Joins what follows one another on a CTA: units of an item, and bars too narrow to be seen.
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
