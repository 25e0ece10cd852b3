//! How even the load of the CTAs is, on random batches.

use tandem_attn::{
    abi::WorkItem,
    plan::{DeviceDescription, Kernel, PlanOptions, Planner, Schedule, SplitMode},
    problem::{Batch, PageTable, Spec},
};

/// A small, fast, seeded generator (SplitMix64): the batches must be the same on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u32) -> u32 {
        (self.next() % u64::from(bound)) as u32
    }
}

/// Lengths of 1 to 256 requests: uniform, Zipf, or one very long among short ones.
fn lengths(random: &mut Random) -> Vec<u32> {
    let requests = 1 << random.below(9);
    let requests = requests + random.below(requests);
    let kind = random.below(3);
    let longest = 256 << random.below(9);
    let length = |index: u32, random: &mut Random| match kind {
        0 => 1 + random.below(longest),
        1 => 1 + longest / (1 + random.below(requests)),
        _ if index == 0 => 32 * longest,
        _ => 1 + random.below(longest),
    };
    (0..requests).map(|index| length(index, random)).collect()
}

fn batch(lengths: &[u32]) -> Batch {
    const PAGE: u32 = 16;
    let pages: u32 = lengths.iter().map(|length| length.div_ceil(PAGE)).sum();
    let mut table = PageTable::new(PAGE, pages);
    let mut next = 0;
    for &length in lengths {
        let end = next + length.div_ceil(PAGE);
        table.push(&(next..end).collect::<Vec<_>>(), length);
        next = end;
    }
    Batch::new((0..=lengths.len() as u32).collect(), table)
}

/// What the uncut items of a batch take, in nanoseconds of a CTA.
struct Work {
    ctas: f64,
    unit: f64,
    unit_cut: f64,
    key: f64,
}

impl Work {
    fn new(device: &DeviceDescription, spec: &Spec) -> Self {
        let ctas = f64::from(device.resident_ctas(Kernel::Decode));
        let bytes_per_ns = device.read_bytes_per_ns / ctas;
        let per_head = |bytes: u64| bytes as f64 / f64::from(spec.kv_heads) / bytes_per_ns;
        let unit = device.decode.unit_ns;
        Self {
            ctas,
            unit,
            unit_cut: unit + 2.0 * per_head(spec.partial_bytes_per_token()),
            key: per_head(spec.kv_bytes_per_token()),
        }
    }

    /// The longest unit that is left when every request is cut as often as pays: a piece lasts at least
    /// twice as long as what it costs whatever its keys.
    fn longest_unsplittable(&self, lengths: &[u32]) -> f64 {
        let shortest = ((self.unit_cut / self.key) as u32).next_multiple_of(16);
        let unit = |&length: &u32| match length / shortest {
            0 | 1 => self.unit + self.key * f64::from(length),
            pieces => self.unit_cut + self.key * f64::from(length / pieces),
        };
        lengths.iter().map(unit).fold(0.0, f64::max)
    }

    /// No plan of any kind is done earlier, even where cutting costs nothing.
    fn bound(&self, lengths: &[u32], kv_heads: u32) -> f64 {
        let units = f64::from(kv_heads) * lengths.len() as f64 * self.unit;
        let keys = lengths
            .iter()
            .map(|&length| self.key * f64::from(length))
            .sum::<f64>()
            * f64::from(kv_heads);
        let mean = (units + keys) / self.ctas;
        mean.max(self.unit + keys / self.ctas)
            .max(self.longest_unsplittable(lengths))
    }
}

fn percentile(values: &mut [f64], part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(part * values.len() as f64) as usize]
}

/// `cargo test --test plan -- balance:: --nocapture` prints the distribution.
#[test]
fn the_makespan_is_near_its_bound() {
    let mut random = Random(7);
    let described = DeviceDescription::named("h200").unwrap();
    // The bound knows no merges, so they cost little here.
    let mut device = described.clone();
    for tile in &mut device.decode.tiles {
        tile.cut_ns = None;
    }
    let heads = [(32, 8), (64, 8), (32, 32), (28, 4), (16, 1)];
    let mut planner = Planner::new();
    let (mut ours, mut strict, mut uncut) = (vec![], vec![], vec![]);
    let (mut priced, mut all) = (0.0, 0.0);
    for case in 0..1000 {
        let (q_heads, kv_heads) = heads[case % heads.len()];
        let spec = Spec::new(q_heads, kv_heads, 128);
        let lengths = lengths(&mut random);
        let batch = batch(&lengths);
        let mut schedule = |device: &DeviceDescription, split| {
            let options = PlanOptions::default().with_split(split);
            planner
                .plan(&spec, &batch, device, &options)
                .unwrap()
                .schedule(device)
        };
        let work = Work::new(&device, &spec);
        let longest = work.longest_unsplittable(&lengths);
        let ratio = |schedule: &Schedule| {
            schedule.makespan_ns / (schedule.busy_ns / work.ctas).max(longest)
        };
        let balanced = schedule(&device, SplitMode::Makespan);
        let off = schedule(&device, SplitMode::Off);
        priced += schedule(&described, SplitMode::Makespan).makespan_ns;
        all += balanced.makespan_ns;
        assert!(
            balanced.makespan_ns <= off.makespan_ns * 1.0001,
            "case {case}: {} after {} of {lengths:?}",
            balanced.makespan_ns,
            off.makespan_ns
        );
        ours.push(ratio(&balanced));
        strict.push(balanced.makespan_ns / work.bound(&lengths, kv_heads));
        uncut.push(ratio(&off));
    }
    println!("makespan / max(mean load, longest unsplittable unit)    50 %   90 %   95 %   99 %");
    for (name, ratios) in [
        ("ours", &mut ours),
        ("ours, against the bound of the uncut batch", &mut strict),
        ("not cut", &mut uncut),
    ] {
        let at = [0.5, 0.9, 0.95, 0.99].map(|part| percentile(ratios, part));
        println!(
            "{name:<54} {:6.3} {:6.3} {:6.3} {:6.3}",
            at[0], at[1], at[2], at[3]
        );
    }
    println!(
        "with the prices of cuts: {:.4} times as long in all",
        priced / all
    );
    assert!(priced <= all * 1.02);
    assert!(percentile(&mut ours, 0.95) <= 1.10);
    assert!(percentile(&mut strict, 0.95) <= 1.20);
}

/// CTAs that still have something to do are quicker when others have not: fewer states are better than even CTAs.
#[test]
fn a_few_equal_pieces_are_enough() {
    let device = DeviceDescription::named("h200").unwrap();
    let spec = Spec::new(32, 8, 128);
    let pieces = |lengths: &[u32]| {
        let options = PlanOptions::default();
        let plan = Planner::new().plan(&spec, &batch(lengths), &device, &options);
        let keys = |item: &WorkItem| item.kv_end - item.kv_begin;
        plan.unwrap().items.iter().map(keys).collect::<Vec<_>>()
    };
    assert_eq!(pieces(&[1024]), [128; 8]);
    assert_eq!(pieces(&[16384; 4]), [4096; 16]);
    assert_eq!(pieces(&[131_072]), [8192; 16]);
    assert_eq!(pieces(&[8192; 64]), [8192; 64]);
    // By Zipf's law, 1023 on average: the four longest are cut, the shortest start last.
    let zipf = [
        4842, 2421, 1614, 1210, 968, 807, 692, 605, 538, 484, 440, 403, 372, 346, 323, 303,
    ];
    let pieces = pieces(&zipf);
    assert_eq!(pieces.len(), 24);
    assert_eq!(
        pieces[12..],
        [692, 608, 602, 605, 538, 484, 440, 403, 372, 346, 323, 303]
    );
}
