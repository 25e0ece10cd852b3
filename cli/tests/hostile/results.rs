//! Results of benchmarks that were never run.

pub fn write(put: &impl Fn(&str, &[u8])) {
    let stats = |median: &str, runs: &str| {
        format!(
            r#"{{"median_us": {median}, "q1_us": 1.0, "q3_us": 3.0, "min_us": 0.5, "runs": {runs}}}"#
        )
    };
    let file = |case: &str, bytes: &str, flops: &str, stats: &str| {
        format!(
            r#"{{"format": "tandem-results-1", "program": "t", "date": "d",
            "machine": {{"backend": "cpu", "name": "n\u001b[2J", "details": "x"}},
            "ceilings": {{"read_bytes_per_s": 1e9, "copy_bytes_per_s": 1e9, "flops_per_s": 1e9}}, "options": [],
            "results": [{{"case": "{case}", "implementation": "tandem", "heads": "h", "page_size": 1, "requests": 1,
            "query_tokens": 1, "bytes": {bytes}, "flops": {flops}, "plan": null, "flushed": {stats}, "warm": null,
            "errors": null, "skipped": null}}]}}"#
        )
    };
    put(
        "r.json",
        file("c", "10", "20", &stats("2.0", "9")).as_bytes(),
    );
    put(
        "r-bom.json",
        format!("\u{feff}{}", file("c", "10", "20", &stats("2.0", "9"))).as_bytes(),
    );
    put(
        "r-few.json",
        file("c", "10", "20", &stats("9.0", "3")).as_bytes(),
    );
    put(
        "r-other.json",
        file("d", "10", "20", &stats("2.0", "9")).as_bytes(),
    );
    put(
        "r-escape.json",
        file(r"c\u001b[31m", "10", "20", &stats("2.0", "9")).as_bytes(),
    );
    put(
        "r-max.json",
        file(
            "c",
            "18446744073709551615",
            "18446744073709551615",
            &stats("1e300", "9"),
        )
        .as_bytes(),
    );
    put(
        "r-tiny.json",
        file("c", "1", "18446744073709551615", &stats("1e-300", "9")).as_bytes(),
    );
    put(
        "r-0-bytes.json",
        file("c", "0", "0", &stats("2.0", "9")).as_bytes(),
    );
    put(
        "r-0-runs.json",
        file("c", "10", "20", &stats("2.0", "0")).as_bytes(),
    );
    put(
        "r-zero.json",
        file("c", "10", "20", &stats("0", "9")).as_bytes(),
    );
    put(
        "r-negative.json",
        file("c", "-10", "20", &stats("2.0", "9")).as_bytes(),
    );
    put("r-null.json", file("c", "10", "20", "null").as_bytes());
    let format = file("c", "10", "20", &stats("2.0", "9")).replace("results-1", "results-9");
    put("r-format.json", format.as_bytes());
    put("r-none.json", br#"{"format": "tandem-results-1", "program": "t", "date": "d", "machine": {"backend": "cpu",
        "name": "n", "details": "x"}, "ceilings": {"read_bytes_per_s": 1, "copy_bytes_per_s": 1, "flops_per_s": 1},
        "options": [], "results": []}"#);
}
