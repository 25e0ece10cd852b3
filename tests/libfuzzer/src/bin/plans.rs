//! Plans that are read back: refused when they are read, or when they run, or run; what is refused writes nothing.

#![no_main]

use tandem_attn::{exec::Cpu, kv::KvView, plan::Plan, problem::KvLayout};
use tandem_libfuzzer::{plan, problem};

libfuzzer_sys::fuzz_target!(init: tandem_libfuzzer::begin("plans"), |bytes: &[u8]| {
    let Ok(mut read) = serde_json::from_slice::<Plan>(bytes) else {
        return;
    };
    let (spec, batch) = problem();
    let verified = read.verify(&batch);
    let (q, pool) = (vec![0.5_f32; 7 * 2 * 16], vec![0.25_f32; 6 * 4 * 16]);
    let views = [KvView::new(&spec, KvLayout::Nhd, 4, &pool, &pool)];
    let mut out = vec![7.0_f32; q.len()];
    let ran = Cpu::new().run(&read, &q, &views, &mut out, None);
    if read == plan() {
        assert!(verified.is_ok() && ran.is_ok());
    }
    assert!(
        ran.is_ok() || out.iter().all(|&x| x == 7.0),
        "refused, and outputs were written"
    );
    let _ = read.grow(&batch);
});
