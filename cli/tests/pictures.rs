//! Pictures as documents: nothing overlaps, nothing leaves the page, every part is there.

mod common;
#[path = "common/legible.rs"]
mod legible;
#[path = "common/results.rs"]
mod results;

use common::run;
use legible::{legible, number};
use roxmltree::Document;
use tandem_attn::plan::{DeviceDescription, PlanOptions, Planner, pod::PodMode};
use tandem_cli::{picture, workload};

fn workload_of(decodes: u32, chunk: bool) -> workload::Case {
    let chunk = if chunk {
        r#"{"q_len": 512, "kv_len": 2048},"#
    } else {
        ""
    };
    let text = format!(
        r#"{{"heads": 32, "kv_heads": 8, "head_dim": 128,
            "requests": [{chunk} {{"q_len": 1, "kv_len": 1500, "count": {decodes}}}]}}"#
    );
    workload::parse("test", &text).expect("sound").remove(0)
}

#[test]
fn plans_are_legible_from_1_to_1024_requests() {
    let mut planner = Planner::new();
    for name in DeviceDescription::names() {
        let device = DeviceDescription::named(name).unwrap();
        for (decodes, chunk) in [
            (1, false),
            (1, true),
            (15, true),
            (127, false),
            (1023, true),
        ] {
            let case = workload_of(decodes, chunk);
            let batch = case.batch().unwrap();
            let plan = planner
                .plan(&case.spec, &batch, &device, &PlanOptions::default())
                .unwrap();
            let svg = picture::plan(&plan, &device, "a title");
            let texts = legible(&svg);
            assert!(svg.len() < 4 << 20, "{} bytes", svg.len());
            for group in &plan.groups {
                let line = format!("{}, tile {}: ", plan.kernel_name(group), group.tile);
                assert!(
                    texts.iter().any(|text| text.starts_with(&line)),
                    "{line}{texts:?}"
                );
            }
            assert!(texts.iter().any(|text| text.contains("by the cost model")));
            let row = if name == "cpu" { "thread 0" } else { "SM 0" };
            assert!(texts.iter().any(|text| text == row), "{texts:?}");
        }
    }
}

/// Time on a plan's axis is covered: the bars of all units together are as long as the units take.
#[test]
fn bars_cover_the_busy_time() {
    const CHART: f64 = 1200.0 - 84.0 - 36.0;
    let device = DeviceDescription::named("h200").unwrap();
    let case = workload_of(200, false);
    let plan = Planner::new()
        .plan(
            &case.spec,
            &case.batch().unwrap(),
            &device,
            &PlanOptions::default(),
        )
        .unwrap();
    let svg = picture::plan(&plan, &device, "a title");
    let document = Document::parse(&svg).unwrap();
    let bars = document
        .descendants()
        .filter(|node| node.has_tag_name("rect") && node.first_element_child().is_some());
    let drawn: f64 = bars.map(|bar| number(bar, "width")).sum();
    let schedule = plan.schedule(&device);
    let right = schedule.busy() * f64::from(schedule.ctas) * CHART;
    assert!(
        (drawn / right - 1.0).abs() < 0.02,
        "{drawn} pixels drawn, {right} are busy"
    );
}

#[test]
fn an_empty_plan_says_so() {
    let device = DeviceDescription::named("h200").unwrap();
    let case = workload_of(1, false);
    let plan = tandem_attn::plan::Plan::empty(case.spec);
    let texts = legible(&picture::plan(&plan, &device, "a title"));
    assert!(texts.iter().any(|text| text == "nothing to do"));
}

/// Side by side, prefill and decode are drawn so: each in its colour, from the first moment on.
#[test]
fn lanes_of_an_sm_are_drawn_side_by_side() {
    const PREFILL: &str = "#d1701f";
    const DECODE: &str = "#2a7fba";
    let text = r#"{"heads": 32, "kv_heads": 8, "head_dim": 128,
        "requests": [{"q_len": 1024, "kv_len": 8192}, {"q_len": 1, "kv_len": 8192, "count": 50}]}"#;
    let case = workload::parse("test", text).expect("sound").remove(0);
    let (batch, device) = (
        case.batch().unwrap(),
        DeviceDescription::named("h200").unwrap(),
    );
    let begins = |pod: PodMode| {
        let options = PlanOptions::default().with_pod(pod);
        let plan = Planner::new()
            .plan(&case.spec, &batch, &device, &options)
            .unwrap();
        let svg = picture::plan(&plan, &device, "a title");
        let texts = legible(&svg);
        let took = tandem_cli::plan::describe(&case, 51, &plan, &device);
        let took = took
            .split("takes ")
            .nth(1)
            .unwrap()
            .split(" by")
            .next()
            .unwrap()
            .to_owned();
        assert!(
            texts
                .iter()
                .any(|text| text.contains(&format!(": {took} by the cost model"))),
            "{took}"
        );
        let document = Document::parse(&svg).unwrap();
        [PREFILL, DECODE].map(|colour| {
            let bars = document.descendants().filter(|node| {
                node.attribute("fill") == Some(colour) && node.first_element_child().is_some()
            });
            bars.map(|bar| number(bar, "x"))
                .fold(f64::INFINITY, f64::min)
        })
    };
    assert_eq!(begins(PodMode::Fused), [84.0; 2]);
    assert_eq!(begins(PodMode::Streams), [84.0; 2]);
    let [prefill, decode] = begins(PodMode::Serial);
    assert!((prefill - decode).abs() > 100.0, "{prefill} {decode}");
    // The same two colours in the picture of what was measured.
    let measured = include_str!("../../docs/notes/pod-on-sms.svg");
    for (colour, name) in [(PREFILL, "tiles of prefill"), (DECODE, "units of decode")] {
        let legend = measured.split(name).next().unwrap();
        let last = legend
            .rsplit("fill=\"")
            .find(|part| part.starts_with('#'))
            .unwrap();
        assert!(last.starts_with(colour), "{name}");
    }
}

#[test]
fn long_and_strange_names_are_legible() {
    let device = DeviceDescription::named("h200").unwrap();
    let case = workload_of(3, false);
    let plan = tandem_attn::plan::Plan::empty(case.spec);
    for title in [
        "word ".repeat(300),
        "x".repeat(3000),
        "\u{1b}[31m \u{202e}\n&<>\"".to_owned(),
    ] {
        legible(&picture::plan(&plan, &device, &title));
    }
}

#[test]
fn rooflines_are_legible_with_1_to_100_points() {
    for points in [1, 2, 30, 100] {
        let texts = legible(&picture::roofline(&results::results(points)));
        let shares = texts.iter().filter(|text| text.ends_with(" %")).count();
        assert_eq!(shares, points);
        // Names are whole, if in lines.
        let all = texts.join(" ");
        for word in ["far beyond the edge of the picture", "tandem", "peer"] {
            assert!(
                all.contains(word) || points == 1 && word == "tandem",
                "{word}: {all}"
            );
        }
    }
}

/// A colour and a shape for each, and an axis that its points fill.
#[test]
fn rooflines_tell_implementations_apart() {
    let mut file = results::results(26);
    for (index, result) in file.results.iter_mut().enumerate() {
        result.implementation = format!("implementation {}", index % 13);
        result.case = format!("case {}", index / 13);
        result.flops = 400_000_000;
    }
    let svg = picture::roofline(&file);
    legible(&svg);
    let document = Document::parse(&svg).unwrap();
    let points = document.descendants().filter(|node| {
        node.first_element_child().is_some()
            && (node.has_tag_name("circle") || node.has_tag_name("polygon"))
    });
    let mut looks = std::collections::HashMap::new();
    let mut heights = Vec::new();
    for point in points {
        let title = point
            .first_element_child()
            .unwrap()
            .text()
            .unwrap()
            .to_owned();
        let name = title.split(['[', ']']).nth(1).unwrap().to_owned();
        let corners = point
            .attribute("points")
            .map_or(0, |points| points.split(' ').count());
        let first = point.attribute("points").map(|points| {
            let pairs: Vec<Vec<f64>> = points
                .split(' ')
                .map(|pair| pair.split(',').map(|n| n.parse().unwrap()).collect())
                .collect();
            (
                (pairs[0][0] - pairs[1][0]).signum() as i32,
                (pairs[0][1] - pairs[1][1]).signum() as i32,
            )
        });
        looks
            .entry((point.attribute("fill").unwrap().to_owned(), corners, first))
            .or_insert_with(Vec::new)
            .push(name);
        if let Some(y) = point.attribute("cy") {
            heights.push(y.parse::<f64>().unwrap());
        }
    }
    assert_eq!(looks.len(), 13, "{looks:?}");
    let reach = heights.iter().fold(0.0, |m: f64, y| m.max(*y))
        - heights.iter().fold(f64::INFINITY, |m: f64, y| m.min(*y));
    assert!(reach > 100.0, "points lie within {reach} pixels");
}

#[test]
fn all_kept_results_are_read_and_drawn() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/results");
    let mut drawn = 0;
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        // Numbers of single kernels, of servers and of several GPUs, in forms of their own.
        if ["raw-", "serve-", "ranks-"]
            .iter()
            .any(|form| name.starts_with(form))
        {
            assert!(
                tandem_cli::bench::ResultFile::load(&path).is_err(),
                "{name} is an ordinary result"
            );
            continue;
        }
        let file =
            tandem_cli::bench::ResultFile::load(&path).unwrap_or_else(|error| panic!("{error}"));
        legible(&picture::roofline(&file));
        drawn += 1;
    }
    assert!(drawn >= 8, "{drawn} pictures");
}

#[test]
fn simulations_are_legible_in_three_sizes() {
    let directory = tempfile::tempdir().unwrap();
    for (line, words) in [
        (
            "--requests 3 --policy sarathi-serve",
            &[
                "llama-3-8b on 1 × h200 (tensor 1, pipeline 1): requests alike",
                "sarathi-serve",
            ][..],
        ),
        (
            "--device a100 --tensor 2 --requests 60 --rate 2 --prompt 3000",
            &["prefill-first", "sarathi-serve+pod", "decode-priority"],
        ),
        (
            "--model gpt-3 --device a100 --tensor 8 --pipeline 8 --requests 60 --prompt 2000 --generated 40 \
             --policy orca,sarathi",
            &["stage 8", "a bubble: the stage stands still"],
        ),
    ] {
        let mut arguments = vec!["serve-sim", "--svg", "s.svg"];
        arguments.extend(line.split_whitespace());
        let said = run(directory.path(), &arguments);
        assert_eq!(said.code, 0, "{}", said.stderr);
        let svg = std::fs::read_to_string(directory.path().join("s.svg")).unwrap();
        let texts = legible(&svg);
        let axes = [
            "time to first token (logarithmic)",
            "time between tokens (logarithmic)",
        ];
        for word in axes.iter().chain(words) {
            assert!(texts.iter().any(|text| text == word), "{word}: {texts:?}");
        }
        let time = texts
            .iter()
            .filter(|text| text.starts_with("time since the first request came, "));
        assert_eq!(time.count(), 1, "one axis for all");
    }
}

/// The example of `tandem serve-sim --help`: pipeline bubbles of Orca, and steps of both kinds.
#[test]
fn the_window_shows_bubbles() {
    let directory = tempfile::tempdir().unwrap();
    let line = "serve-sim --model gpt-3 --device a100 --tensor 8 --pipeline 8 --requests 400 --prompt 2000 \
                --generated 200 --policy orca,sarathi --svg bubbles.svg";
    let said = run(
        directory.path(),
        &line.split_whitespace().collect::<Vec<_>>(),
    );
    assert_eq!(said.code, 0, "{}", said.stderr);
    let svg = std::fs::read_to_string(directory.path().join("bubbles.svg")).unwrap();
    legible(&svg);
    let document = Document::parse(&svg).unwrap();
    let rects = document
        .descendants()
        .filter(|node| node.has_tag_name("rect") && node.has_attribute("x"));
    let (mut lanes, mut steps, mut light) = (0.0, 0.0, 0);
    for rect in rects.filter(|rect| number(*rect, "x") >= 190.0) {
        let area = number(rect, "width") * number(rect, "height");
        match rect.attribute("fill") {
            Some("#ededed") => lanes += area,
            Some("#2a7fba") if number(rect, "height") > 10.0 => {
                (steps, light) = (steps + area, light + 1)
            }
            Some("#d1701f" | "#2a7fba") => steps += area,
            _ => {}
        }
    }
    assert!(
        steps < 0.93 * lanes,
        "{} of the lanes is bubbles",
        1.0 - steps / lanes
    );
    assert!(light > 10, "{light} steps of decodes alone");
}
