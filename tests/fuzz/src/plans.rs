//! Plans by the million: each is held against its batch, and none is run.

use std::time::Instant;

use rayon::prelude::*;
use tandem_attn::plan::DeviceDescription;

use crate::{
    draw::{Draw, Size},
    numeric::Rng,
    planned::planned,
    runner::Run,
    tally::{Failure, Tally},
};

/// Plans the cases of some seeds, for any device.
///
/// # Errors
/// The first plan that does not compute its batch.
pub fn run(run: &Run) -> Result<(), String> {
    let devices: Vec<_> = DeviceDescription::names().collect();
    let (start, tally) = (Instant::now(), std::sync::Mutex::new(Tally::default()));
    let one = |seed: u64| -> Result<(), Failure> {
        if run.time.is_some_and(|time| start.elapsed() >= time) {
            return Ok(());
        }
        let mut rng = Rng(seed ^ 9);
        let name = devices[rng.below(devices.len())];
        let mut device = DeviceDescription::named(name).expect("it is built in");
        if rng.below(2) == 0 {
            device.sms = 1 + rng.below(200) as u32;
        }
        let draw = Draw {
            gpu: name != "cpu",
            size: match run.tiny {
                true => Size::Tiny,
                false => Size::Large,
            },
        };
        let mut of_case = Tally::default();
        planned(&draw.case(seed), &device, &mut of_case)?;
        tally.lock().expect("nobody panics").add(of_case);
        Ok(())
    };
    // In chunks, so that time is looked at and an end without limit is no range of work.
    let mut next = run.seeds.start;
    while next < run.seeds.end && run.time.is_none_or(|time| start.elapsed() < time) {
        let end = next.saturating_add(4096).min(run.seeds.end);
        let failed = (next..end)
            .into_par_iter()
            .find_map_any(|seed| one(seed).err().map(|failure| (seed, failure)));
        if let Some((seed, failure)) = failed {
            return Err(format!("seed {seed} fails: {failure}"));
        }
        next = end;
    }
    let tally = tally.into_inner().expect("nobody panics");
    let refused: u64 = tally.wrong.values().sum();
    println!(
        "{} cases in {:.1} s: {} plans verified, {refused} wrong calls of {} classes refused",
        next - run.seeds.start,
        start.elapsed().as_secs_f64(),
        tally.calls - refused - tally.unsupported.values().sum::<u64>(),
        tally.wrong.len()
    );
    Ok(())
}
