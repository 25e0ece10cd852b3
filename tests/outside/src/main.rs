//! A program outside the workspace: `cargo xtask adopt` builds it from packed packages, and from git, in an empty
//! environment.

use std::time::Instant;

use tandem_attn::{
    gpu::{Gpu, WorkspaceOptions},
    plan::{Bound, DeviceDescription, PlanOptions, Planner},
    problem::{Batch, PageTable, Spec},
};

fn main() -> Result<(), tandem_attn::Error> {
    let spec = Spec::new(32, 8, 128);
    let mut table = PageTable::new(16, 100);
    table.push(&[7, 3, 5], 40);
    let batch = Batch::new(vec![0, 1], table);
    let device = DeviceDescription::named("h200").expect("it is built in");
    let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default())?;

    let begin = Instant::now();
    match Gpu::new(0) {
        Ok(gpu) => {
            let milliseconds = begin.elapsed().as_secs_f64() * 1e3;
            // The second finds the driver started and the context made.
            let begin = Instant::now();
            let again = Gpu::new(0)?;
            println!(
                "{}: Gpu::new took {milliseconds:.1} ms with the driver's start, {:.1} ms without",
                again.name(),
                begin.elapsed().as_secs_f64() * 1e3
            );
            gpu.workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default())?;
        }
        Err(error) => println!("{error}"),
    }
    Ok(())
}
