//! Runs the example to its end. The example itself asserts its results.

#[path = "../examples/serving_loop.rs"]
mod serving_loop;

#[test]
fn serving_loop_runs() {
    serving_loop::main().unwrap();
}
