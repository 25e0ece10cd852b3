//! Chooses the part of a simulation to draw: where steps differ, stages are idle and requests wait for tokens.

use tandem_schedule::metrics::{Report, STALLS_S, StageSpan};

/// Number of pieces of the common time that are considered.
const BINS: usize = 4000;

/// A time window in seconds, the same for all reports, so that their steps can be compared.
pub(super) fn choose(reports: &[Report]) -> Option<[f64; 2]> {
    let drawn = || reports.iter().filter(|report| !report.timeline.is_empty());
    let end = |report: &Report| {
        report
            .timeline
            .iter()
            .map(|span| span.end_s)
            .fold(0.0, f64::max)
    };
    let common = drawn().map(end).fold(f64::INFINITY, f64::min);
    if !(common > 0.0 && common.is_finite()) {
        return None;
    }
    let width = width(drawn()).min(common);
    let profiles: Vec<_> = drawn().map(|report| Profile::of(report, common)).collect();
    let bins = ((width / common * BINS as f64) as usize).clamp(1, BINS);
    let score = |from: usize| -> f64 {
        let of_each = profiles
            .iter()
            .map(|profile| profile.score(from, from + bins));
        of_each.sum()
    };
    // The first of the best windows.
    let mut best = (f64::NEG_INFINITY, 0);
    for from in (0..=BINS - bins).step_by((bins / 16).max(1)) {
        let score = score(from);
        if score > best.0 + 1e-9 {
            best = (score, from);
        }
    }
    let begin = best.1 as f64 / BINS as f64 * common;
    Some([begin, begin + width])
}

/// Width that shows the maximum number of distinguishable steps, but at least several of the longest.
fn width<'a>(reports: impl Iterator<Item = &'a Report>) -> f64 {
    const STEPS: f64 = 140.0;
    const LONGEST: f64 = 3.0;
    let mut times: Vec<f64> = reports
        .flat_map(|report| &report.timeline)
        .map(|span| span.end_s - span.begin_s)
        .collect();
    times.sort_by(f64::total_cmp);
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
    (STEPS * at(0.5)).max(LONGEST * at(0.99))
}

/// Intervals in which no request got a new token although steps ran.
pub(super) fn stalls(timeline: &[StageSpan]) -> Vec<[f64; 2]> {
    let last_stage = timeline.iter().map(|span| span.stage).max().unwrap_or(0);
    let mut stalls = Vec::new();
    let mut token_s: Option<f64> = None;
    let mut busy_s = 0.0;
    for span in timeline.iter().filter(|span| span.stage == last_stage) {
        busy_s += span.end_s - span.begin_s;
        if span.decodes == 0 {
            continue;
        }
        if let Some(token_s) = token_s {
            let gap_s = span.end_s - token_s;
            // With one stage, idle time means that no request waited. A stage of a pipeline may be idle during a stall.
            let least = if last_stage == 0 { 0.99 } else { 0.5 };
            if gap_s > STALLS_S[0] && busy_s > least * gap_s {
                stalls.push([token_s, span.end_s]);
            }
        }
        (token_s, busy_s) = (Some(span.end_s), 0.0);
    }
    stalls
}

/// Running sums over the bins, for several kinds of time.
struct Profile {
    stages: usize,
    busy: Vec<f64>,
    with_chunk: Vec<f64>,
    stalled: Vec<f64>,
}

impl Profile {
    fn of(report: &Report, end_s: f64) -> Self {
        let spans = &report.timeline;
        let stages = spans.iter().map(|span| span.stage).max().unwrap_or(0) as usize + 1;
        let sums = |parts: &mut dyn Iterator<Item = [f64; 2]>, share: f64| {
            let mut bins = vec![0.0; BINS + 1];
            for [begin, end] in parts {
                let [begin, end] =
                    [begin, end].map(|s| (s / end_s * BINS as f64).clamp(0.0, BINS as f64));
                for (bin, sum) in bins[1..]
                    .iter_mut()
                    .enumerate()
                    .take(end.ceil() as usize)
                    .skip(begin as usize)
                {
                    let (from, to) = (begin.max(bin as f64), end.min(bin as f64 + 1.0));
                    *sum += (to - from).max(0.0) * share;
                }
            }
            for index in 1..bins.len() {
                bins[index] += bins[index - 1];
            }
            bins
        };
        let of = |span: &StageSpan| [span.begin_s, span.end_s];
        let share = 1.0 / stages as f64;
        let mut chunks = spans.iter().filter(|span| span.prompt_tokens > 0).map(of);
        Self {
            stages,
            busy: sums(&mut spans.iter().map(of), share),
            with_chunk: sums(&mut chunks, share),
            stalled: sums(&mut stalls(spans).into_iter(), 1.0),
        }
    }

    /// Score of a window: steps of both kinds, bubbles, stalls.
    fn score(&self, from: usize, to: usize) -> f64 {
        let part = |sums: &[f64]| (sums[to] - sums[from]) / (to - from) as f64;
        let (busy, with_chunk) = (part(&self.busy), part(&self.with_chunk));
        let both = with_chunk.min(busy - with_chunk).min(0.25);
        let bubbles = match self.stages {
            // A single stage is idle only if it has nothing to do.
            1 => busy - 1.0,
            _ => (1.0 - busy).min(0.5),
        };
        2.0 * both + bubbles + part(&self.stalled).min(0.5)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(steps: &[(u32, u32, f64)]) -> Report {
        let mut now = 0.0;
        let spans = steps
            .iter()
            .zip(0..)
            .map(|(&(prompt_tokens, decodes, seconds), step)| {
                let begin_s = now;
                now += seconds;
                StageSpan {
                    stage: 0,
                    step,
                    prompt_tokens,
                    decodes,
                    begin_s,
                    end_s: now,
                }
            });
        Report {
            timeline: spans.collect(),
            ..Report::default()
        }
    }

    #[test]
    fn the_window_has_steps_of_both_kinds() {
        // Prompts first, then hybrid steps, then decodes.
        let mut steps = vec![(512, 0, 0.01); 2000];
        steps.extend((0..200).map(|step| {
            if step % 2 == 0 {
                (512, 8, 0.01)
            } else {
                (0, 8, 0.01)
            }
        }));
        steps.extend(vec![(0, 8, 0.01); 2000]);
        let report = report(&steps);
        let [begin, end] = choose(std::slice::from_ref(&report)).unwrap();
        assert!(end - begin < 1.5, "{begin} {end}");
        assert!(begin > 18.0 && end < 23.0, "{begin} {end}");
        assert_eq!(choose(&[Report::default()]), None);
    }

    #[test]
    fn long_steps_without_decodes_are_stalls() {
        let report = report(&[(0, 4, 0.01), (9000, 0, 0.3), (0, 4, 0.01), (0, 4, 0.1)]);
        let [[begin, end]] = stalls(&report.timeline)[..] else {
            panic!("one stall");
        };
        assert!((begin - 0.01).abs() < 1e-9 && (end - 0.32).abs() < 1e-9);
        // No request existed before the second prompt arrived.
        let mut timeline = report.timeline;
        timeline[1].begin_s += 0.01;
        assert!(stalls(&timeline).is_empty());
    }
}
