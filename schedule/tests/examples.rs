//! The example runs to its end; what it promises it asserts itself.

#[path = "../examples/serving_loop.rs"]
mod serving_loop;

#[test]
fn serving_loop_runs() {
    serving_loop::main().unwrap();
}
