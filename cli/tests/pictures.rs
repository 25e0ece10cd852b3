//! Pictures as documents: nothing overlaps, nothing leaves the page, every part is there.

#[path = "common/results.rs"]
mod results;

use roxmltree::Document;
use tandem_attn::plan::{DeviceDescription, PlanOptions, Planner};
use tandem_cli::{picture, workload};

/// A text and the area that it takes at most.
#[derive(Debug)]
struct Text {
    text: String,
    area: [f64; 4],
}

fn number(node: roxmltree::Node<'_, '_>, name: &str) -> f64 {
    let value = node
        .attribute(name)
        .unwrap_or_else(|| panic!("{node:?} has no {name}"));
    value
        .parse()
        .unwrap_or_else(|_| panic!("{name} is {value}"))
}

fn texts(document: &Document<'_>) -> Vec<Text> {
    let nodes = document
        .descendants()
        .filter(|node| node.has_tag_name("text"));
    nodes
        .map(|node| {
            let text = node.text().unwrap_or("").to_owned();
            let size = number(node, "font-size");
            // Letters of the wider sans-serif fonts.
            let width = text.chars().count() as f64 * size * 0.6;
            let (x, y) = (number(node, "x"), number(node, "y"));
            let left = match node.attribute("text-anchor") {
                Some("end") => x - width,
                Some("middle") => x - width / 2.0,
                _ => x,
            };
            Text {
                text,
                area: [left, y - 0.75 * size, left + width, y + 0.2 * size],
            }
        })
        .collect()
}

/// Texts that the document has, after checking that none overlaps another or leaves the page.
fn legible(svg: &str) -> Vec<String> {
    let document = Document::parse(svg).expect("well-formed");
    let root = document.root_element();
    let (width, height) = (number(root, "width"), number(root, "height"));
    let texts = texts(&document);
    for (index, one) in texts.iter().enumerate() {
        let [left, top, right, bottom] = one.area;
        assert!(
            left >= 0.0 && top >= 0.0 && right <= width && bottom <= height,
            "{one:?} leaves the page of {width} × {height}"
        );
        for other in &texts[index + 1..] {
            let apart = right <= other.area[0]
                || other.area[2] <= left
                || bottom <= other.area[1]
                || other.area[3] <= top;
            assert!(apart, "{one:?} and {other:?} overlap");
        }
    }
    for rect in document
        .descendants()
        .filter(|node| node.has_tag_name("rect"))
    {
        let (right, bottom) = (
            rect.attribute("x").map_or(0.0, |_| number(rect, "x")) + number(rect, "width"),
            rect.attribute("y").map_or(0.0, |_| number(rect, "y")) + number(rect, "height"),
        );
        assert!(
            right <= width + 0.5 && bottom <= height,
            "{rect:?} leaves the page"
        );
    }
    texts.into_iter().map(|text| text.text).collect()
}

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
                let line = format!("{:?}, tile {}: ", group.kernel, group.tile);
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
    let device = DeviceDescription::named("h200").unwrap();
    let case = workload_of(200, true);
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
    let chart = 1200.0 - 64.0 - 24.0;
    let right = schedule.busy_ns / schedule.makespan_ns * chart;
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

#[test]
fn rooflines_are_legible_with_1_to_100_points() {
    for points in [1, 2, 30, 100] {
        let svg = picture::roofline(&results::results(points));
        let texts = legible(&svg);
        let listed = texts
            .iter()
            .filter(|text| text.contains(" % · case "))
            .count();
        assert_eq!(listed, points);
    }
}
