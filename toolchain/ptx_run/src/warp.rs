//! A warp: its registers, the paths of its lanes, and what its lanes know.

use crate::{
    clock::{MEMBERS, Shared, join},
    decode::Code,
    exec::At,
    flow::NEVER,
    op::Row,
    report::{Fault, Step},
    shadow::Layout,
};

pub const LANES: usize = 32;
pub const ALL: u32 = u32::MAX;

/// What is known of a word register.
#[derive(Clone, Copy, Debug, Default)]
pub struct Meta {
    /// Lanes in which it has a value.
    pub valid: u32,
    /// The group of products that writes it; 0 if none. With [`LOADING`] the number of a load that nobody has waited for.
    pub product: u32,
    /// The group of products that reads it as A; 0 if none.
    pub read_by: u32,
    /// Lanes in which it has a value when that product or load is done.
    pub then: u32,
    /// Number of `wgmma.fence`s before it was computed; 0 for a constant or a product.
    pub born: u32,
}

/// In [`Meta::product`]: the register belongs to a load from shared memory, and no instruction has used it since.
pub const LOADING: u32 = 1 << 31;

/// The most loads of a warp that are kept: older ones, which nobody may ever use, are forgotten.
const MOST_LOADS: usize = 64;

/// A load from shared memory whose registers no instruction has used. It may still read.
#[derive(Clone, Debug)]
pub struct Load {
    /// Different for each load of a warp.
    pub number: u32,
    /// Lane, offset and length of each read.
    pub reads: Vec<(usize, u32, usize)>,
    /// Lanes that have arrived at an mbarrier meanwhile, and what each knew when the first of them did.
    pub arrived: u32,
    pub known: Vec<Shared>,
}

/// Lanes that run together.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    pub pc: u32,
    pub mask: u32,
    /// Where they reconverge with the others.
    pub meet: u32,
}

/// The condition that a warp waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    Nothing,
    /// A phase of a named barrier.
    Named {
        id: u32,
        generation: u64,
    },
    /// A phase of an mbarrier that a lane waits for.
    Mbarrier {
        address: u32,
        parity: u32,
    },
    /// A phase of the cluster's barrier.
    Cluster {
        phase: u64,
    },
    /// Registers from the pool.
    Registers {
        wanted: u32,
    },
    /// This step of a traced launch.
    Step(u64),
}

/// A proxy fence, or a fence of an mbarrier's initialisation.
#[derive(Clone, Copy, Debug)]
pub struct FenceMark {
    pub time: u32,
    pub lanes: u32,
    pub kinds: u8,
    /// For each lane, its copies that were done.
    pub copied: [u32; LANES],
}

pub const FENCE_SHARED: u8 = 1;
pub const FENCE_GLOBAL: u8 = 2;
pub const FENCE_BARRIER: u8 = 4;

/// Groups of a lane's copies.
#[derive(Clone, Debug, Default)]
pub struct Groups {
    /// Number of the open group, from 1.
    pub open: u32,
    /// Groups up to this one are done; for copies out of shared memory, the reads are done.
    pub done: u32,
    /// Groups up to this one have also written their data.
    pub written: u32,
    /// Closed groups that are not done.
    pub closed: Vec<u32>,
    /// The last group with a copy.
    pub begun: u32,
}

pub struct Warp {
    pub index: usize,
    pub layout: Layout,
    pub p: Vec<u32>,
    pub w: Vec<[u32; LANES]>,
    pub l: Vec<[u64; LANES]>,
    pub p_valid: Vec<u32>,
    pub w_meta: Vec<Meta>,
    /// Lanes in which the low half and the high half of a long have a value.
    pub l_valid: Vec<[u32; 2]>,
    pub path: Path,
    pub stack: Vec<Path>,
    /// Lanes that have not ended.
    pub alive: u32,
    pub wait: Wait,
    /// The phase of the cluster's barrier in which the warp arrived without having waited for it.
    pub cluster_phase: Option<u64>,
    /// The initialisations of mbarriers that were fenced since the last arrival at the cluster's barrier.
    pub fenced_inits: Option<Shared>,
    /// The last read of uninitialised bytes: instruction, lane, address.
    pub unwritten: Option<(usize, usize, At)>,
    /// Whether a test of an mbarrier must fail once, so that the code runs on.
    pub give_up: bool,
    /// The last test of an mbarrier that failed: the instruction and the phase.
    pub asked: Option<(usize, Wait)>,

    pub clocks: [Shared; LANES],
    pub time: u32,
    /// Clock of each lane at its last proxy fence.
    pub fence_clocks: [Option<Shared>; LANES],
    /// What a relaxed write of the lane releases after its last fence.
    pub release: [Option<Shared>; LANES],
    /// What its relaxed reads have found, which its next fence acquires.
    pub found: [Option<Shared>; LANES],

    /// Number of the open group of products, from 1, and the last group that is done.
    pub products: u32,
    pub products_done: u32,
    /// In a traced launch, the step in which the products of each group are done.
    pub product_steps: Vec<(u32, u64)>,
    /// Line of the first product of each group that may still run.
    pub product_lines: Vec<(u32, u32)>,
    pub product_fences: u32,
    /// Whether a `wgmma.fence` followed the last wait for products.
    pub fenced_products: bool,
    pub copies: [Groups; LANES],
    pub bulk: [Groups; LANES],
    /// Loads that may still read, oldest first, and how many have begun.
    pub loads: Vec<Load>,
    pub loads_begun: u32,
    /// Those that this instruction uses, of lanes that have arrived at an mbarrier since they began.
    pub late_loads: Vec<Load>,
    /// Number of registers of a thread.
    pub registers: u32,
}

impl Warp {
    pub fn new(code: &Code, index: usize, layout: Layout, lanes: u32) -> Self {
        let [p, w, l] = code.rows.map(|rows| rows as usize);
        let mut warp = Self {
            index,
            layout,
            p: vec![0; p],
            w: vec![[0; LANES]; w],
            l: vec![[0; LANES]; l],
            p_valid: vec![0; p],
            w_meta: vec![Meta::default(); w],
            l_valid: vec![[0; 2]; l],
            path: Path {
                pc: 0,
                mask: lanes,
                meet: NEVER,
            },
            stack: Vec::new(),
            alive: lanes,
            wait: Wait::Nothing,
            cluster_phase: None,
            fenced_inits: None,
            unwritten: None,
            give_up: false,
            asked: None,
            clocks: std::array::from_fn(|_| Shared::default()),
            time: 1,
            fence_clocks: std::array::from_fn(|_| None),
            release: std::array::from_fn(|_| None),
            found: std::array::from_fn(|_| None),
            products: 1,
            products_done: 0,
            product_steps: Vec::new(),
            product_lines: Vec::new(),
            product_fences: 1,
            fenced_products: false,
            copies: std::array::from_fn(|_| Groups {
                open: 1,
                ..Groups::default()
            }),
            bulk: std::array::from_fn(|_| Groups {
                open: 1,
                ..Groups::default()
            }),
            loads: Vec::new(),
            loads_begun: 0,
            late_loads: Vec::new(),
            registers: 0,
        };
        let empty = Shared::default();
        warp.clocks.fill(empty);
        for &(row, value) in &code.bit_constants {
            warp.p[row as usize] = if value { ALL } else { 0 };
            warp.p_valid[row as usize] = ALL;
        }
        for &(row, value) in &code.word_constants {
            warp.constant(row, [value; LANES]);
        }
        for &(row, value) in &code.long_constants {
            warp.l[row as usize] = [value; LANES];
            warp.l_valid[row as usize] = [ALL; 2];
        }
        warp
    }

    /// Sets a row that no instruction writes.
    pub fn constant(&mut self, row: Row, values: [u32; LANES]) {
        self.w[row as usize] = values;
        self.w_meta[row as usize].valid = ALL;
    }

    // Registers.

    pub fn word(&self, row: Row) -> &[u32; LANES] {
        &self.w[row as usize]
    }

    pub fn long(&self, row: Row) -> &[u64; LANES] {
        &self.l[row as usize]
    }

    /// Lanes in which the word has a value, for an instruction that uses it: waits for the load that writes it. Faults if
    /// it belongs to a product that may still run.
    #[inline]
    pub fn valid(&mut self, row: Row, mask: u32) -> Step<u32> {
        let meta = &self.w_meta[row as usize];
        if meta.valid & mask == mask {
            return Ok(ALL);
        }
        self.valid_slow(row)
    }

    #[cold]
    fn valid_slow(&mut self, row: Row) -> Step<u32> {
        let meta = &mut self.w_meta[row as usize];
        if meta.product == 0 {
            return Ok(meta.valid);
        }
        if meta.product & LOADING != 0 {
            let number = meta.product & !LOADING;
            (meta.product, meta.valid) = (0, meta.then);
            // A load writes all of its registers at once.
            let load = self.loads.iter().position(|load| load.number == number);
            let load = load.map(|at| self.loads.remove(at));
            self.late_loads
                .extend(load.filter(|load| load.arrived != 0));
            return Ok(self.w_meta[row as usize].valid);
        }
        if meta.product <= self.products_done {
            (meta.product, meta.valid) = (0, meta.then);
            return Ok(meta.then);
        }
        let product = meta.product;
        Err(self.owned("reads a register of an accumulator", product))
    }

    fn owned(&self, what: &'static str, product: u32) -> Box<Fault> {
        let found = self
            .product_lines
            .iter()
            .find(|&&(group, _)| group == product);
        Box::new(Fault::OwnedRegister {
            what,
            line: found.map_or(0, |&(_, line)| line),
        })
    }

    /// Writes a word in the lanes of `mask`. It has a value in the lanes of `valid`.
    #[inline]
    pub fn set_word(&mut self, row: Row, mask: u32, values: &[u32; LANES], valid: u32) -> Step {
        let meta = &self.w_meta[row as usize];
        if meta.product & LOADING == 0 && meta.product > self.products_done {
            let product = meta.product;
            return Err(self.owned("writes a register of an accumulator", product));
        }
        self.replace_word(row, mask, values, valid)
    }

    /// As [`set_word`](Self::set_word), for a register that may belong to a product: the next product adds to it, or a copy
    /// of another accumulator takes its place.
    #[inline]
    pub fn replace_word(&mut self, row: Row, mask: u32, values: &[u32; LANES], valid: u32) -> Step {
        let meta = &mut self.w_meta[row as usize];
        if meta.read_by > self.products_done {
            let product = meta.read_by;
            return Err(self.owned("writes a register of a product's A", product));
        }
        let target = &mut self.w[row as usize];
        if mask == ALL {
            *meta = Meta {
                valid,
                product: 0,
                read_by: 0,
                then: 0,
                born: self.product_fences,
            };
            *target = *values;
        } else {
            let rest = if meta.product == 0 {
                meta.valid
            } else {
                meta.then
            } & !mask;
            *meta = Meta {
                valid: rest | valid & mask,
                product: 0,
                read_by: 0,
                then: 0,
                born: self.product_fences,
            };
            for lane in 0..LANES {
                if mask >> lane & 1 != 0 {
                    target[lane] = values[lane];
                }
            }
        }
        Ok(())
    }

    /// Notes that lanes arrive at an mbarrier while loads may still read.
    pub fn arrive_before_loads(&mut self, lanes: u32) {
        for load in &mut self.loads {
            if load.arrived == 0 {
                load.known = self.clocks.to_vec();
            }
            load.arrived |= lanes;
        }
    }

    /// Notes that a load of these bytes has begun, which has set these words.
    pub fn begin_load(&mut self, reads: Vec<(usize, u32, usize)>, rows: &[Row]) {
        self.loads_begun = (self.loads_begun + 1) & !LOADING;
        let number = self.loads_begun;
        for &row in rows {
            let meta = &mut self.w_meta[row as usize];
            (meta.product, meta.valid, meta.then) = (LOADING | number, 0, meta.valid);
        }
        if self.loads.len() == MOST_LOADS {
            self.loads.remove(0);
        }
        self.loads.push(Load {
            number,
            reads,
            arrived: 0,
            known: Vec::new(),
        });
    }

    /// Waits for all loads, as fences do: too late for those that an arrival came before.
    pub fn await_loads(&mut self) {
        self.loads.retain(|load| load.arrived != 0);
    }

    /// Copies a word together with what is known of it.
    pub fn move_word(&mut self, d: Row, a: Row, mask: u32) -> Step {
        let from = self.w_meta[a as usize];
        let values = self.w[a as usize];
        if from.product > self.products_done {
            self.replace_word(d, mask, &values, 0)?;
            let meta = &mut self.w_meta[d as usize];
            let then = meta.valid | from.then & mask;
            (meta.product, meta.valid, meta.then, meta.born) = (from.product, 0, then, 0);
            return Ok(());
        }
        let valid = if from.product != 0 {
            from.then
        } else {
            from.valid
        };
        self.set_word(d, mask, &values, valid)?;
        self.w_meta[d as usize].born = from.born;
        Ok(())
    }

    /// Lanes in which a long has a value.
    #[inline]
    pub fn long_valid(&self, row: Row) -> u32 {
        let [low, high] = self.l_valid[row as usize];
        low & high
    }

    #[inline]
    pub fn set_long(&mut self, row: Row, mask: u32, values: &[u64; LANES], valid: u32) {
        self.set_halves(row, mask, values, [valid; 2]);
    }

    /// Compilers keep two words in a long, so validity is tracked for each half.
    #[inline]
    pub fn set_halves(&mut self, row: Row, mask: u32, values: &[u64; LANES], valid: [u32; 2]) {
        let known = &mut self.l_valid[row as usize];
        let target = &mut self.l[row as usize];
        if mask == ALL {
            *known = valid;
            *target = *values;
        } else {
            *known = [0, 1].map(|half| known[half] & !mask | valid[half] & mask);
            for lane in 0..LANES {
                if mask >> lane & 1 != 0 {
                    target[lane] = values[lane];
                }
            }
        }
    }

    #[inline]
    pub fn set_bits(&mut self, row: Row, mask: u32, values: u32, valid: u32) {
        let row = row as usize;
        self.p[row] = self.p[row] & !mask | values & mask;
        self.p_valid[row] = self.p_valid[row] & !mask | valid & mask;
    }

    // Lanes and their paths.

    /// Continues with the reconverged lanes, or with others, when this path is finished.
    pub fn settle(&mut self) {
        while self.path.mask == 0 || self.path.pc == self.path.meet {
            match self.stack.pop() {
                Some(path) => {
                    self.path = Path {
                        mask: path.mask & self.alive,
                        ..path
                    }
                }
                None => break,
            }
        }
    }

    /// Splits the lanes: some go to `target`, the others to the next instruction.
    pub fn part(&mut self, taken: u32, target: u32, meet: u32, next: u32) {
        let mask = self.path.mask;
        let other = mask & !taken;
        if taken == 0 || other == 0 {
            self.path.pc = if taken == 0 { next } else { target };
            return;
        }
        if meet != self.path.meet {
            self.stack.push(Path {
                pc: meet,
                mask,
                meet: self.path.meet,
            });
        }
        if next != meet {
            self.stack.push(Path {
                pc: next,
                mask: other,
                meet,
            });
        }
        self.path = Path {
            pc: target,
            mask: taken,
            meet,
        };
    }

    /// Lets the lanes on the other side of a branch run first. Returns `false` if there are none.
    pub fn swap(&mut self) -> bool {
        match self.stack.last_mut() {
            Some(other)
                if other.meet == self.path.meet
                    && other.pc != other.meet
                    && other.mask & self.alive != 0 =>
            {
                other.mask &= self.alive;
                std::mem::swap(other, &mut self.path);
                true
            }
            _ => false,
        }
    }

    /// Lets lanes go on for which the lanes of this path may wait: those that wait where paths meet, else those of another
    /// path. Since compute capability 7.0, each lane makes progress. Returns `false` if there are none.
    pub fn let_others_go_on(&mut self) -> bool {
        let (meet, alive) = (self.path.meet, self.alive);
        if let Some(at) = self.stack.iter().rposition(|entry| entry.pc == meet) {
            let above = self.stack[at + 1..].iter().map(|path| path.mask);
            let elsewhere = above.fold(self.path.mask, |all, mask| all | mask);
            let entry = &mut self.stack[at];
            let waiting = entry.mask & alive & !elsewhere;
            if waiting != 0 {
                entry.mask &= !waiting;
                let alone = Path {
                    pc: meet,
                    mask: waiting,
                    meet: entry.meet,
                };
                self.stack.push(std::mem::replace(&mut self.path, alone));
                return true;
            }
        }
        match self.stack.last_mut() {
            Some(other) if other.mask & self.path.mask == 0 && other.mask & alive != 0 => {
                other.mask &= alive;
                std::mem::swap(other, &mut self.path);
                true
            }
            _ => false,
        }
    }

    /// Ends these lanes.
    pub fn end(&mut self, lanes: u32) {
        self.alive &= !lanes;
        self.path.mask &= !lanes;
    }

    // Knowledge of lanes.

    /// Publishes what the lanes have done and know so far. Their later accesses are not included.
    pub fn publish(&mut self, block: usize, lanes: u32) -> Shared {
        let first = lanes.trailing_zeros() as usize;
        let mut result = self.clocks[first].clone();
        let mut last = first;
        for lane in members(lanes) {
            if !Shared::ptr_eq(&self.clocks[lane], &self.clocks[last]) {
                join(&mut result, &self.clocks[lane]);
                last = lane;
            }
        }
        let layout = self.layout;
        let clock = Shared::make_mut(&mut result);
        clock.learn_members(block, self.index, lanes, self.time);
        if self.products_done > 0 {
            clock.learn(
                block,
                layout.products() * MEMBERS + self.index,
                self.products_done,
            );
        }
        for lane in members(lanes) {
            let (copies, bulk) = (&self.copies[lane], &self.bulk[lane]);
            for (agent, done) in [
                (layout.copies(self.index), copies.done),
                (layout.bulk_reads(self.index), bulk.done),
                (layout.bulk_writes(self.index), bulk.written),
            ] {
                if done > 0 {
                    clock.learn(block, agent * MEMBERS + lane, done);
                }
            }
        }
        self.time += 1;
        result
    }

    /// The lanes learn a published clock.
    pub fn learn(&mut self, lanes: u32, from: &Shared) {
        let mut last: Option<(Shared, Shared)> = None;
        for lane in members(lanes) {
            let mine = &mut self.clocks[lane];
            match &last {
                Some((before, after)) if Shared::ptr_eq(before, mine) => *mine = after.clone(),
                _ => {
                    let before = mine.clone();
                    join(mine, from);
                    last = Some((before, mine.clone()));
                }
            }
        }
    }

    /// The lanes take over a published clock that already contains everything they know.
    pub fn replace(&mut self, lanes: u32, by: &Shared) {
        for lane in members(lanes) {
            self.clocks[lane] = by.clone();
        }
    }
}

/// The lanes in a mask.
pub fn members(mask: u32) -> impl Iterator<Item = usize> {
    let mut rest = mask;
    std::iter::from_fn(move || {
        if rest == 0 {
            return None;
        }
        let lane = rest.trailing_zeros() as usize;
        rest &= rest - 1;
        Some(lane)
    })
}
