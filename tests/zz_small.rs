use tandem_attn::{plan::*, problem::*};
#[test]
fn small() {
    let device = DeviceDescription::named("h200").unwrap();
    let w: Vec<f64> = (1..=16).map(|r| 1.0 / f64::from(r)).collect();
    let t: f64 = w.iter().sum();
    let zipf: Vec<u32> = w
        .iter()
        .map(|x| (x / t * 16.0 * 1023.0).round() as u32)
        .collect();
    for (name, lens) in [
        ("1x1024", vec![1024]),
        ("1x2048", vec![2048]),
        ("1x8192", vec![8192]),
        ("16x1024", vec![1024; 16]),
        ("zipf", zipf),
        ("4x16384", vec![16384; 4]),
        ("1x131072", vec![131072]),
        ("64x8192", vec![8192; 64]),
        ("256x4096", vec![4096; 256]),
        ("5x3000", vec![3000; 5]),
        ("24x2000", vec![2000; 24]),
    ] {
        let mut table = PageTable::new(16, 1 << 20);
        let mut next = 0;
        for &l in &lens {
            let e = next + l.div_ceil(16);
            table.push(&(next..e).collect::<Vec<_>>(), l);
            next = e;
        }
        let batch = Batch::new((0..=lens.len() as u32).collect(), table);
        let spec = Spec::new(32, 8, 128);
        let p = Planner::new()
            .plan(&spec, &batch, &device, &PlanOptions::default())
            .unwrap();
        p.verify(&batch).unwrap();
        println!(
            "{name} {} merges {} {:.1} us: {:?}",
            p.items.len(),
            p.merges.len(),
            p.schedule(&device).makespan_ns / 1e3,
            p.items
                .iter()
                .take(40)
                .map(|i| (p.rows_of(i)[0].token, i.kv_len()))
                .collect::<Vec<_>>()
        );
    }
}
