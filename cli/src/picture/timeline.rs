//! Draws the warps of a CTA over the steps of a launch. Each warp has a row, coloured by its state, with concurrent
//! asynchronous work below.

use std::collections::BTreeMap;

use tandem_attn::exec::emulated::{Beside, Flight, State, Timeline};

use super::{Anchor, SMALL, Svg, WIDTH, label, palette, step, text_width};
use crate::table::counted;

const LEFT: f64 = 84.0;
const RIGHT: f64 = 36.0;
const CHART: f64 = WIDTH - LEFT - RIGHT;
/// Height of a warp's row, and of the bar of its state; the rest shows asynchronous work.
const ROW: f64 = 30.0;
const BAR: f64 = 14.0;
const THIN: f64 = 4.0;

const ISSUES: &str = "#4a9a4a";
const NAMED: &str = "#9a9a9a";
const PRODUCTS: &str = palette::PREFILL;
const LOADS: &str = palette::DECODE;
const STORES: &str = "#0d3757";
const COPIES: &str = "#a3cfea";
const REGISTERS: &str = "#e8d44d";
/// Colours of mbarriers, used in turn.
const MBARRIERS: [&str; 8] = [
    "#e3c7ee", "#c79bd9", "#a871bf", "#f3c9c4", "#e39a92", "#cf6b61", "#d6cdb8", "#b3a27c",
];

/// Indices of the mbarriers on which warps wait, in the order of their addresses.
pub(crate) fn barriers(timeline: &Timeline) -> BTreeMap<u32, usize> {
    let mut addresses: Vec<u32> = timeline
        .intervals
        .iter()
        .filter_map(|one| match one.state {
            State::Mbarrier(address) => Some(address),
            _ => None,
        })
        .collect();
    addresses.sort_unstable();
    addresses.dedup();
    addresses
        .into_iter()
        .enumerate()
        .map(|(index, address)| (address, index))
        .collect()
}

/// A warp's state in words.
pub(crate) fn state_name(state: State, names: &BTreeMap<u32, usize>) -> String {
    match state {
        State::Issues => "issues".into(),
        State::Barrier(id) => format!("waits at barrier {id}"),
        State::Cluster => "waits for its cluster".into(),
        State::Mbarrier(address) => {
            format!("waits at m{}", names.get(&address).copied().unwrap_or(0))
        }
        State::Products => "waits for products".into(),
        State::Copies => "waits for its copies".into(),
        State::Registers => "waits for registers".into(),
    }
}

fn colour(state: State, names: &BTreeMap<u32, usize>) -> &'static str {
    match state {
        State::Issues => ISSUES,
        State::Barrier(_) | State::Cluster => NAMED,
        State::Mbarrier(address) => {
            MBARRIERS[names.get(&address).copied().unwrap_or(0) % MBARRIERS.len()]
        }
        State::Products => "#f3c59d",
        State::Copies => COPIES,
        State::Registers => REGISTERS,
    }
}

/// Draws a timeline.
#[must_use]
pub fn draw(timeline: &Timeline, title: &str) -> String {
    let names = barriers(timeline);
    let mut svg = Svg::new(title);
    let summary = format!(
        "{} in {}. In a step every warp that can go on executes an instruction: no time is meant.",
        counted(timeline.warps as usize, "warp"),
        counted(timeline.steps as usize, "step"),
    );
    let top = svg.heading(&[&summary]);
    let top = legend(&mut svg, timeline, &names, top) + 14.0;
    let bottom = top + ROW * f64::from(timeline.warps);
    if timeline.steps == 0 {
        svg.text((LEFT, top + 16.0), Anchor::Start, 13, "nothing was done");
        return svg.finish(top + 48.0);
    }
    axis(&mut svg, timeline.steps, [top, bottom]);
    for warp in 0..timeline.warps {
        let y = top + ROW * f64::from(warp) + 3.0;
        svg.text(
            (LEFT - 8.0, y + 12.0),
            Anchor::End,
            SMALL,
            &format!("warp {warp}"),
        );
        row(&mut svg, timeline, warp, y, &names);
    }
    svg.finish(bottom + 56.0)
}

fn axis(svg: &mut Svg, steps: u64, [top, bottom]: [f64; 2]) {
    let end = steps as f64;
    let tick = step(end, 10);
    for index in 0..=10 {
        let at = tick * f64::from(index);
        if at > end {
            break;
        }
        let x = LEFT + at / end * CHART;
        svg.line((x, top), (x, bottom + 5.0), palette::GRID, 1.0);
        svg.text((x, bottom + 20.0), Anchor::Middle, SMALL, &label(at));
    }
    svg.line((LEFT, bottom), (LEFT + CHART, bottom), palette::AXIS, 1.0);
    let middle = LEFT + CHART / 2.0;
    svg.text(
        (middle, bottom + 40.0),
        Anchor::Middle,
        13,
        "emulated steps",
    );
}

/// Draws the legend. Returns its bottom.
fn legend(svg: &mut Svg, timeline: &Timeline, names: &BTreeMap<u32, usize>, mut top: f64) -> f64 {
    let mut states: Vec<State> = timeline.intervals.iter().map(|one| one.state).collect();
    states.sort_unstable();
    states.dedup();
    let mut entries: Vec<(&str, String)> = states
        .into_iter()
        .map(|state| {
            let name = state_name(state, names);
            let name = match state {
                State::Mbarrier(address) => format!("{name} ({address:#x})"),
                _ => name,
            };
            (colour(state, names), name)
        })
        .collect();
    for (what, colour, name) in [
        (Beside::Loads, LOADS, "loads in flight"),
        (Beside::Stores, STORES, "stores in flight"),
        (Beside::Products, PRODUCTS, "wgmma in flight"),
    ] {
        if timeline.flights.iter().any(|one| one.what == what) {
            entries.push((colour, format!("below a warp: {name}")));
        }
    }
    let mut x = 16.0;
    for (colour, name) in entries {
        let width = 20.0 + text_width(&name, 13) + 18.0;
        if x > 16.0 && x + width > WIDTH - 16.0 {
            (x, top) = (16.0, top + 20.0);
        }
        svg.rect([x, top - 4.0, 12.0, 12.0], colour, None);
        svg.text((x + 18.0, top + 7.0), Anchor::Start, 13, &name);
        x += width;
    }
    top + 20.0
}

/// A row of pixels, each with the state that takes most of its steps.
struct Pixels<S> {
    steps: Vec<BTreeMap<S, f64>>,
    scale: f64,
}

impl<S: Copy + Ord> Pixels<S> {
    fn new(steps: u64) -> Self {
        Self {
            steps: vec![BTreeMap::new(); CHART as usize],
            scale: CHART / steps as f64,
        }
    }

    fn add(&mut self, begin: u64, end: u64, what: S) {
        let (begin, end) = (begin as f64 * self.scale, end as f64 * self.scale);
        let last = (end.ceil() as usize).min(self.steps.len());
        for pixel in begin as usize..last {
            let part = (pixel as f64 + 1.0).min(end) - (pixel as f64).max(begin);
            *self.steps[pixel].entry(what).or_default() += part;
        }
    }

    /// Runs of equal pixels: begin, end, state.
    fn runs(&self) -> Vec<(usize, usize, S)> {
        let mut runs: Vec<(usize, usize, S)> = Vec::new();
        for (pixel, steps) in self.steps.iter().enumerate() {
            let most = steps.iter().max_by(|one, other| one.1.total_cmp(other.1));
            let Some((&what, _)) = most else { continue };
            match runs.last_mut() {
                Some(run) if run.1 == pixel && run.2 == what => run.1 += 1,
                _ => runs.push((pixel, pixel + 1, what)),
            }
        }
        runs
    }
}

fn row(svg: &mut Svg, timeline: &Timeline, warp: u32, y: f64, names: &BTreeMap<u32, usize>) {
    let mut states = Pixels::new(timeline.steps);
    let own = timeline.intervals.iter().filter(|one| one.warp == warp);
    own.for_each(|one| states.add(one.begin, one.end, one.state));
    for (from, to, state) in states.runs() {
        let (x, width) = (LEFT + from as f64, (to - from) as f64);
        let name = state_name(state, names);
        svg.rect([x, y, width, BAR], colour(state, names), Some(&name));
        let short = match state {
            State::Barrier(id) => format!("{id}"),
            State::Mbarrier(address) => format!("m{}", names[&address]),
            _ => continue,
        };
        if text_width(&short, SMALL) + 6.0 <= width {
            let middle = x + width / 2.0;
            svg.text((middle, y + 11.0), Anchor::Middle, SMALL, &short);
        }
    }
    let beside = |is: fn(&Flight) -> bool| {
        let mut pixels = Pixels::new(timeline.steps);
        let own = timeline
            .flights
            .iter()
            .filter(|one| one.warp == warp && is(one));
        own.for_each(|one| pixels.add(one.begin, one.end, one.what));
        pixels.runs()
    };
    let copies = beside(|one| one.what != Beside::Products);
    let products = beside(|one| one.what == Beside::Products);
    for (runs, y) in [(copies, y + BAR + 1.0), (products, y + BAR + 2.0 + THIN)] {
        for (from, to, what) in runs {
            let (colour, name) = match what {
                Beside::Loads => (LOADS, "loads in flight"),
                Beside::Stores => (STORES, "stores in flight"),
                Beside::Products => (PRODUCTS, "wgmma in flight"),
            };
            let bar = [LEFT + from as f64, y, (to - from) as f64, THIN];
            svg.rect(bar, colour, Some(name));
        }
    }
}
