//! `tandem trace`: its picture, its table, and what it refuses.

mod common;
#[path = "common/legible.rs"]
mod legible;

use common::{files, run};
use legible::{legible, number};
use roxmltree::Document;

fn traced(requests: &str, heads: u32, arguments: &[&str]) -> (common::Said, Option<String>) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let workload =
        format!(r#"{{"heads": {heads}, "kv_heads": 1, "head_dim": 64, "requests": [{requests}]}}"#);
    std::fs::write(directory.path().join("case.json"), workload).expect("writable");
    let all = [&["trace", "case.json", "--svg", "trace.svg"], arguments].concat();
    let said = run(directory.path(), &all);
    let svg = std::fs::read_to_string(directory.path().join("trace.svg")).ok();
    if said.code != 0 {
        assert_eq!(files(directory.path()), ["case.json"]);
    }
    (said, svg)
}

#[test]
fn pictures_of_traces_are_legible() {
    for (requests, heads, arguments) in [
        (r#"{"q_len": 1, "kv_len": 70}"#, 4, &[][..]),
        (
            r#"{"q_len": 1, "kv_len": 700, "count": 5}"#,
            8,
            &["--cta", "1"],
        ),
        (
            r#"{"q_len": 70, "kv_len": 150}"#,
            2,
            &["--kernel", "prefill"],
        ),
        (
            r#"{"q_len": 200, "kv_len": 1000, "count": 2}"#,
            2,
            &["--sms", "1"],
        ),
    ] {
        let (said, svg) = traced(requests, heads, arguments);
        assert_eq!(said.code, 0, "{}", said.stderr);
        let svg = svg.expect("a picture");
        assert!(svg.len() < 2 << 20, "{} bytes", svg.len());
        let texts = legible(&svg);
        for part in [
            "warp 0",
            "issues",
            "emulated steps",
            "below a warp: loads in flight",
        ] {
            assert!(texts.iter().any(|text| text == part), "{part}: {texts:?}");
        }
        let waits = texts.iter().filter(|text| text.starts_with("waits at m"));
        assert!(waits.count() > 0, "{texts:?}");
    }
}

/// The bars of a warp follow each other over all of its steps, and none lies on another.
#[test]
fn bars_of_a_warp_cover_its_steps() {
    let (said, svg) = traced(r#"{"q_len": 70, "kv_len": 150}"#, 2, &[]);
    assert_eq!(said.code, 0, "{}", said.stderr);
    let svg = svg.expect("a picture");
    let document = Document::parse(&svg).expect("XML");
    let mut rows: std::collections::BTreeMap<i64, Vec<(f64, f64)>> = Default::default();
    for bar in document
        .descendants()
        .filter(|node| node.has_tag_name("rect") && node.attribute("height") == Some("14"))
    {
        let row = number(bar, "y") as i64;
        let x = number(bar, "x");
        rows.entry(row)
            .or_default()
            .push((x, x + number(bar, "width")));
    }
    assert!(rows.len() >= 8, "{} warps", rows.len());
    let mut longest: f64 = 0.0;
    for bars in rows.values_mut() {
        bars.sort_by(|one, other| one.0.total_cmp(&other.0));
        assert_eq!(bars[0].0, 84.0);
        for pair in bars.windows(2) {
            assert_eq!(pair[0].1, pair[1].0, "a gap, or one bar on another");
        }
        longest = longest.max(bars[bars.len() - 1].1);
    }
    assert!(
        (longest - 1164.0).abs() <= 1.0,
        "the last warp ends at {longest}"
    );
}

#[test]
fn the_table_says_how_much_each_warp_waits() {
    let (said, _) = traced(r#"{"q_len": 1, "kv_len": 300}"#, 8, &[]);
    assert_eq!(said.code, 0, "{}", said.stderr);
    assert!(
        said.stdout.contains("decode_8x32_d64_bf16, CTA 0: "),
        "{}",
        said.stdout
    );
    let warps = said
        .stdout
        .lines()
        .filter(|line| line.contains(": issues "));
    assert!(warps.count() >= 8, "{}", said.stdout);
}

#[test]
fn what_cannot_be_traced_is_refused() {
    for (requests, arguments, part) in [
        (r#"{"q_len": 8192, "kv_len": 8192}"#, &[][..], "too large"),
        // A tile has rows, however few queries there are.
        (r#"{"q_len": 1, "kv_len": 6000000}"#, &[], "too large"),
        (r#"{"q_len": 0, "kv_len": 70}"#, &[], "no queries"),
        (
            r#"{"q_len": 1, "kv_len": 70}"#,
            &["--cta", "900"],
            "smaller --cta",
        ),
        (
            r#"{"q_len": 1, "kv_len": 70}"#,
            &["--kernel", "mla"],
            "decode_8x32_d64_bf16",
        ),
    ] {
        let (said, svg) = traced(requests, 4, arguments);
        assert_eq!((said.code, svg), (2, None), "{}", said.stderr);
        assert!(said.stderr.contains(part), "{}", said.stderr);
    }
}
