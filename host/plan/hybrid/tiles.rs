//! The tiles of a launch of prefills, and the time that a number of CTAs needs for them.

use crate::plan::split::SHORT;

/// Tiles of less than this part of the time fill the gaps that longer ones leave.
const MANY: f64 = 16.0;

/// Tiles are classified by their time: `FINE` classes for each doubling, from `FIRST_NS` on.
const CLASSES: usize = 96;
const FINE: f64 = 8.0;
const FIRST_NS: f64 = 500.0;

/// Time to write and merge the partial states of prefills that are cut, in nanoseconds.
pub const MERGED_NS: f64 = 8e3;

/// Plans cut prefills only where that saves at least about as much time as this, beyond that of the states.
const SAVED_NS: f64 = 6e3;

/// When tiles that are cut end at the latest, in even shares: the first that needs few enough pieces.
const ENDS: [f64; 2] = [1.15, 1.5];

/// CTAs that are busy until the same time form a group. If there are more groups, the two that end first become one.
const GROUPS: usize = 32;

/// Until when CTAs are busy.
struct Loads {
    /// Times and numbers of CTAs, ascending by time.
    groups: [(f64, u32); GROUPS],
    len: usize,
}

impl Loads {
    fn new(ctas: u32) -> Self {
        let mut groups = [(0.0, 0); GROUPS];
        groups[0].1 = ctas;
        Self { groups, len: 1 }
    }

    /// When the last CTA ends.
    const fn last(&self) -> f64 {
        self.groups[self.len - 1].0
    }

    /// Gives `count` tiles to the CTAs that are free first, and cuts those that would end after `until` into equal pieces for
    /// several CTAs. Returns the number of pieces, or none if they do not end in time.
    fn place(&mut self, mut count: u32, ns: f64, until: f64) -> Option<u32> {
        let mut pieces = 0_u32;
        while count > 0 {
            let (load, ctas) = self.groups[0];
            if load >= until {
                return None;
            }
            let of_tile = (ns / (until - load)).ceil().max(1.0);
            if of_tile > f64::from(ctas) {
                // Too few CTAs are free now: they wait for the next.
                if self.len == 1 {
                    return None;
                }
                self.remove_first();
                self.groups[0].1 += ctas;
                continue;
            }
            let (ns, of_tile) = (ns / of_tile, of_tile as u32);
            let tiles = count.min(ctas / of_tile);
            let taken = tiles * of_tile;
            count -= tiles;
            pieces = pieces.saturating_add(taken);
            if taken == ctas {
                self.remove_first();
            } else {
                self.groups[0].1 -= taken;
            }
            self.insert(load + ns, taken);
        }
        Some(pieces)
    }

    fn remove_first(&mut self) {
        self.groups.copy_within(1..self.len, 0);
        self.len -= 1;
    }

    fn insert(&mut self, load: f64, ctas: u32) {
        if self.len == GROUPS {
            let first = self.groups[0].1;
            self.remove_first();
            self.groups[0].1 += first;
        }
        let groups = &self.groups[..self.len];
        let later = groups.iter().rev().take_while(|group| group.0 > load);
        let at = self.len - later.count();
        match at.checked_sub(1) {
            Some(before) if self.groups[before].0 == load => self.groups[before].1 += ctas,
            _ => {
                self.groups.copy_within(at..self.len, at + 1);
                self.groups[at] = (load, ctas);
                self.len += 1;
            }
        }
    }
}

/// The tiles of one launch of prefills.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tiles {
    /// One bit for each class that has tiles.
    used: u128,
    /// For each class, the number of tiles and their total time.
    count: [u32; CLASSES],
    ns: [f64; CLASSES],
    /// Time of all tiles on one CTA.
    pub work_ns: f64,
}

impl Tiles {
    /// No tiles.
    pub const NONE: Self = Self {
        used: 0,
        count: [0; CLASSES],
        ns: [0.0; CLASSES],
        work_ns: 0.0,
    };

    /// Adds `count` tiles that take `ns` each.
    pub fn add(&mut self, count: u32, ns: f64) {
        let class = ((FINE * (ns / FIRST_NS).log2()) as usize).min(CLASSES - 1);
        let all = f64::from(count) * ns;
        self.used |= u128::from(count > 0) << class;
        self.count[class] = self.count[class].saturating_add(count);
        self.ns[class] += all;
        self.work_ns += all;
    }

    pub const fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Number of tiles.
    pub fn count(&self) -> u32 {
        let counts = self.classes().map(|(count, _)| count);
        counts.fold(0, u32::saturating_add)
    }

    /// Number and mean time of the tiles of each class, the longest first.
    fn classes(&self) -> impl Iterator<Item = (u32, f64)> {
        let mut left = self.used;
        std::iter::from_fn(move || {
            let class = left.checked_ilog2()? as usize;
            left ^= 1 << class;
            let count = self.count[class];
            Some((count, self.ns[class] / f64::from(count)))
        })
    }

    fn even(&self, ctas: u32) -> f64 {
        self.work_ns / f64::from(ctas)
    }

    /// Number of tiles that take less than a part of an even share of all.
    pub fn short(&self, ctas: u32) -> u32 {
        let even = self.even(ctas);
        let short = |&(_, ns): &(u32, f64)| ns * f64::from(SHORT) < even;
        let counts = self.classes().filter(short).map(|(count, _)| count);
        counts.fold(0, u32::saturating_add)
    }

    /// When the last CTA ends if tiles are cut that would end after `until`, and the number of pieces. The longest tiles come
    /// first, as plans launch them. None if they do not end in time.
    fn end(&self, ctas: u32, until: f64) -> Option<(f64, u32)> {
        let even = self.even(ctas);
        let (mut loads, mut pieces) = (Loads::new(ctas), 0_u32);
        for (count, ns) in self.classes() {
            let placed = match ns * MANY < even.max(loads.last()) {
                true => count,
                false => loads.place(count, ns, until)?,
            };
            pieces = pieces.saturating_add(placed);
        }
        Some((even.max(loads.last()), pieces))
    }

    /// Time of whole tiles on a number of CTAs.
    pub fn whole(&self, ctas: u32) -> f64 {
        if self.is_empty() {
            return 0.0;
        }
        self.end(ctas, f64::INFINITY).map_or(0.0, |(end, _)| end)
    }

    /// The same with tiles cut along their keys into at most `most` pieces, where plans do, by the given time of whole tiles; and the
    /// number of pieces.
    pub fn cut(&self, ctas: u32, most: u32, whole: f64) -> (f64, u32) {
        let ends = ENDS.map(|end| end * self.even(ctas));
        let fits = |until: f64| {
            let end = self.end(ctas, until).filter(|end| end.1 <= most);
            end.map(|(last, pieces)| (last.max(ends[0]) + MERGED_NS, pieces))
        };
        let pays = |until: &f64| until + MERGED_NS + SAVED_NS < whole;
        let cut = ends.into_iter().take_while(pays).find_map(fits);
        cut.unwrap_or_else(|| (whole, self.count()))
    }
}
