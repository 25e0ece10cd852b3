//! Executes asynchronous copies: their start and their completion.

use super::{
    Flow, Run,
    access::{At, Touch, name, not_a_barrier},
    barriers::value,
    operand,
};
use crate::{
    block::{Block, Copy, Pending, Sent},
    clock::{Clock, MEMBERS, Shared},
    op::{Address, Op, Row, Space, TensorBox},
    report::{Fault, Step},
    shadow::{GRANULE, Record},
    tensor_map::TensorMap,
    timeline::COPY_STEPS,
    warp::{Groups, Wait, Warp, members},
};

impl Run<'_> {
    pub(super) fn copy_op(
        &mut self,
        block: &mut Block,
        warp: &mut Warp,
        mask: u32,
        op: &Op,
    ) -> Step<Flow> {
        match op {
            Op::CopyAsync {
                target,
                source,
                bytes,
                valid,
            } => {
                let targets = self.addresses(warp, mask, Space::Shared, target)?;
                let sources = self.addresses(warp, mask, Space::Global, source)?;
                for lane in members(mask) {
                    let valid = valid.map_or(Ok(*bytes), |row| value(warp, row, lane))?;
                    if valid > *bytes {
                        return Err(operand(format!("cp.async of {valid} of {bytes} bytes")));
                    }
                    self.copy_lane(
                        block,
                        warp,
                        lane,
                        (targets[lane], sources[lane]),
                        *bytes,
                        valid,
                    )?;
                }
            }
            Op::CopyAsyncCommit => {
                for lane in members(mask) {
                    close(&mut warp.copies[lane]);
                }
            }
            Op::CopyAsyncWait { pending, all } => {
                if self.recorder.is_some()
                    && let Some(step) = copied_at(block, warp, mask, *pending, *all)
                    && step > self.now
                {
                    return Ok(Flow::Wait(Wait::Step(step)));
                }
                for lane in members(mask) {
                    let groups = &mut warp.copies[lane];
                    if *all {
                        close(groups);
                    }
                    if let Some(done) = finish(groups, if *all { 0 } else { *pending }) {
                        self.deliver_groups(block, warp.index, lane, false, done)?;
                    }
                }
            }
            Op::CopyAsyncArrive { address } => {
                let places = self.addresses(warp, mask, Space::Shared, address)?;
                for lane in members(mask) {
                    Self::aligned(places[lane], 8)?;
                    let At::Shared(barrier) = places[lane] else {
                        unreachable!()
                    };
                    // This goes through the generic proxy, so the initialisation needs no proxy fence.
                    self.visible(block, warp, lane, barrier)?;
                    let group = warp.copies[lane].open;
                    warp.copies[lane].open += 1;
                    let barrier = Some((barrier, u32::MAX));
                    let (warp, instruction) = (warp.index, self.pc);
                    block.pending.push(Pending {
                        copy: Copy::Arrive,
                        warp,
                        lane,
                        group,
                        barrier,
                        instruction,
                        begun: self.now,
                    });
                }
            }
            Op::StoreAsync {
                address,
                value,
                barrier,
            } => self.store_async(block, warp, mask, address, *value, barrier)?,
            Op::BulkLoad {
                target,
                source,
                bytes,
                barrier,
            } => {
                let targets = self.addresses(warp, mask, Space::Shared, target)?;
                let sources = self.addresses(warp, mask, Space::Global, source)?;
                let barriers = self.addresses(warp, mask, Space::Shared, barrier)?;
                for lane in members(mask) {
                    let bytes = value(warp, *bytes, lane)?;
                    let At::Global(source) = sources[lane] else {
                        return Err(operand(
                            "a bulk copy from elsewhere than global memory".into(),
                        ));
                    };
                    bulk_sizes(targets[lane], At::Global(source), bytes)?;
                    self.memory.find(source, bytes as usize)?;
                    let At::Shared(target) = targets[lane] else {
                        unreachable!()
                    };
                    let copy = Copy::Bulk {
                        target,
                        source,
                        bytes,
                    };
                    self.begin_load(block, warp, lane, copy, target, bytes, barriers[lane])?;
                }
            }
            Op::TensorLoad {
                target,
                tensor,
                barrier,
            } => {
                let targets = self.addresses(warp, mask, Space::Shared, target)?;
                let barriers = self.addresses(warp, mask, Space::Shared, barrier)?;
                for lane in members(mask) {
                    let (map, coordinates) = self.tensor(warp, lane, tensor)?;
                    Self::aligned(targets[lane], 128)?;
                    let At::Shared(target) = targets[lane] else {
                        unreachable!()
                    };
                    let bytes = map.box_bytes();
                    let copy = Copy::Tensor {
                        map: Box::new(map),
                        coordinates,
                        target,
                    };
                    self.begin_load(block, warp, lane, copy, target, bytes, barriers[lane])?;
                }
            }
            Op::BulkStore {
                target,
                source,
                bytes,
                add_f32,
            } => {
                let targets = self.addresses(warp, mask, Space::Global, target)?;
                let sources = self.addresses(warp, mask, Space::Shared, source)?;
                for lane in members(mask) {
                    let bytes = value(warp, *bytes, lane)?;
                    bulk_sizes(sources[lane], targets[lane], bytes)?;
                    let (At::Shared(source), At::Global(target)) = (sources[lane], targets[lane])
                    else {
                        return Err(operand(
                            "a bulk copy to elsewhere than global memory".into(),
                        ));
                    };
                    let ranges = [(target, bytes as usize)];
                    let copy = Copy::BulkOut {
                        target,
                        source,
                        bytes,
                        add_f32: *add_f32,
                    };
                    self.begin_store(block, warp, lane, copy, (source, bytes), &ranges)?;
                }
            }
            Op::TensorStore {
                tensor,
                source,
                add,
            } => {
                let sources = self.addresses(warp, mask, Space::Shared, source)?;
                for lane in members(mask) {
                    let (map, coordinates) = self.tensor(warp, lane, tensor)?;
                    Self::aligned(sources[lane], 128)?;
                    let At::Shared(source) = sources[lane] else {
                        unreachable!()
                    };
                    if *add && !map.is_f32 {
                        return Err(operand("a reduction of other elements than f32".into()));
                    }
                    let coordinates_used = &coordinates[..map.rank as usize];
                    // An H200 reports such loads and stores as illegal. Loads are allowed here, because the manual's
                    // examples have them.
                    if !*add && coordinates_used.iter().any(|&at| at < 0) {
                        return Err(operand(format!(
                            "a store to a box that begins before its tensor, at {coordinates_used:?}"
                        )));
                    }
                    let rows = match add {
                        true => map.rows(coordinates_used),
                        false => map.stored_rows(coordinates_used),
                    };
                    let ranges: Vec<_> = rows
                        .iter()
                        .filter(|row| row.first < row.last)
                        .map(|row| (row.address + row.first as u64, row.last - row.first))
                        .collect();
                    let bytes = map.box_bytes();
                    let copy = Copy::TensorOut {
                        map: Box::new(map),
                        coordinates,
                        source,
                        add: *add,
                    };
                    self.begin_store(block, warp, lane, copy, (source, bytes), &ranges)?;
                }
            }
            Op::BulkCommit => {
                for lane in members(mask) {
                    close(&mut warp.bulk[lane]);
                }
            }
            Op::BulkWait { pending, read } => {
                for lane in members(mask) {
                    let groups = &mut warp.bulk[lane];
                    if let Some(done) = finish(groups, *pending) {
                        if !read {
                            groups.written = done;
                        }
                        self.deliver_groups(block, warp.index, lane, true, done)?;
                    }
                    if !read && *pending == 0 {
                        let groups = &mut warp.bulk[lane];
                        groups.written = groups.done;
                    }
                }
            }
            _ => unreachable!(),
        }
        if self.eager {
            for lane in members(mask) {
                while self.deliver_lane(block, warp.index * MEMBERS + lane)? {}
            }
            while !block.pending.is_empty() {
                self.deliver(block, 0)?;
            }
        }
        Ok(Flow::Next)
    }

    fn store_async(
        &mut self,
        block: &mut Block,
        warp: &mut Warp,
        mask: u32,
        address: &Address,
        value: Row,
        barrier: &Address,
    ) -> Step {
        const BYTES: usize = 8;
        let targets = self.addresses(warp, mask, Space::Cluster, address)?;
        let barriers = self.addresses(warp, mask, Space::Cluster, barrier)?;
        let record = self.record(block, warp);
        if warp.long_valid(value) & mask != mask {
            return Err(Box::new(Fault::UninitialisedRegister {
                what: "a value that is stored",
                read: None,
            }));
        }
        let own = block.cluster_rank;
        let place = |at| match at {
            At::Shared(offset) => (own, offset),
            At::Peer(rank, offset) => (rank, offset),
            _ => unreachable!("asked for addresses of the cluster"),
        };
        for lane in members(mask) {
            let (at, (rank, barrier)) = (targets[lane], place(barriers[lane]));
            if place(at).0 != rank {
                let what = "an asynchronous store whose mbarrier is in another block";
                return Err(operand(what.into()));
            }
            Self::aligned(at, BYTES)?;
            Self::aligned(barriers[lane], 8)?;
            let touch = Touch {
                lane,
                at,
                len: BYTES,
                record,
                member: lane,
                write: true,
                asynchronous: false,
                same_value: false,
                what: "an asynchronous store writes",
            };
            let bytes = warp.long(value)[lane].to_le_bytes();
            self.write(block, warp, touch, &bytes, u32::MAX)?;
            // The thread's own writes, but nothing that it knows of others: the store orders no other access.
            let mut clock = Clock::default();
            clock.learn(block.id, warp.index * MEMBERS + lane, warp.time);
            block.cluster.borrow_mut().sent.push(Sent {
                rank,
                barrier,
                bytes: BYTES as u32,
                clock: Shared::new(clock),
                instruction: self.pc,
            });
        }
        warp.time += 1;
        self.progress += 1;
        Ok(())
    }

    fn copy_lane(
        &mut self,
        block: &mut Block,
        warp: &Warp,
        lane: usize,
        (target, source): (At, At),
        bytes: u32,
        valid: u32,
    ) -> Step {
        Self::aligned(target, bytes as usize)?;
        let (At::Shared(to), At::Global(from)) = (target, source) else {
            return Err(operand("cp.async from elsewhere than global memory".into()));
        };
        not_a_barrier(block, to, bytes as usize)?;
        let group = warp.copies[lane].open;
        let agent = warp.layout.copies(warp.index);
        let record = Record::new(block.id, agent, group, self.pc, self.launch);
        let touch = Touch {
            lane,
            at: target,
            len: bytes as usize,
            record,
            member: lane,
            write: true,
            asynchronous: false,
            same_value: false,
            what: "cp.async writes",
        };
        self.touch(block, warp, touch)?;
        block.shared.set_written(to as usize, bytes as usize, false);
        if valid > 0 {
            Self::aligned(source, bytes as usize)?;
            let reading = Touch {
                at: source,
                len: valid as usize,
                write: false,
                what: "cp.async reads",
                ..touch
            };
            self.touch(block, warp, reading)?;
        }
        let copy = Copy::Lane {
            target: to,
            source: from,
            bytes,
            valid,
        };
        let (warp, instruction) = (warp.index, self.pc);
        let one = Pending {
            copy,
            warp,
            lane,
            group,
            barrier: None,
            instruction,
            begun: self.now,
        };
        block.lane_copies[warp * MEMBERS + lane].push_back(one);
        self.progress += 1;
        Ok(())
    }

    fn tensor(
        &mut self,
        warp: &mut Warp,
        lane: usize,
        tensor: &TensorBox,
    ) -> Step<(TensorMap, [i64; 5])> {
        if warp.long_valid(tensor.map) >> lane & 1 == 0 {
            return Err(Box::new(Fault::UninitialisedRegister {
                what: "the address of a tensor map",
                read: None,
            }));
        }
        let at = self.at(Space::Generic, warp.long(tensor.map)[lane]);
        Self::aligned(at, 64)?;
        let bytes: [u8; 128] = match at {
            At::Param(offset) => self
                .parameters
                .get(offset..offset + 128)
                .and_then(|bytes| bytes.try_into().ok()),
            At::Global(address) => self.memory.read(address, 128)?.try_into().ok(),
            _ => None,
        }
        .ok_or_else(|| operand(format!("no tensor map can be at {}", name(at))))?;
        let words = std::array::from_fn(|at| {
            u64::from_le_bytes(bytes[8 * at..8 * at + 8].try_into().expect("8 bytes"))
        });
        let map = TensorMap::decode(&words)
            .ok_or_else(|| operand(format!("no tensor map is at {}", name(at))))?;
        if map.rank as usize != tensor.coordinates.len() {
            return Err(operand(format!(
                "a map of rank {} with {} coordinates",
                map.rank,
                tensor.coordinates.len()
            )));
        }
        let mut coordinates = [0; 5];
        for (axis, &row) in tensor.coordinates.iter().enumerate() {
            coordinates[axis] = i64::from(value(warp, row, lane)? as i32);
        }
        // The instruction's manual does not say so, but the hardware reports this as illegal.
        if coordinates[0] * i64::from(map.element_bytes) % 16 != 0 {
            return Err(operand(format!(
                "a box that begins {} elements of {} bytes into its rows, which is no multiple of 16 bytes",
                coordinates[0], map.element_bytes
            )));
        }
        Ok((map, coordinates))
    }

    /// Starts a copy into shared memory that completes at an mbarrier.
    #[allow(clippy::too_many_arguments)]
    fn begin_load(
        &mut self,
        block: &mut Block,
        warp: &Warp,
        lane: usize,
        copy: Copy,
        target: u32,
        bytes: u32,
        barrier: At,
    ) -> Step {
        Self::aligned(barrier, 8)?;
        let At::Shared(barrier) = barrier else {
            unreachable!()
        };
        let (phase, member, time) = self.copy_barrier(block, warp, lane, barrier)?;
        not_a_barrier(block, target, bytes as usize)?;
        let agent = warp.layout.barriers() + member / MEMBERS;
        let record = Record::new(block.id, agent, time, self.pc, self.launch).asynchronous();
        let touch = Touch {
            lane,
            at: At::Shared(target),
            len: bytes as usize,
            record,
            member: member % MEMBERS,
            write: true,
            asynchronous: true,
            same_value: false,
            what: "a bulk copy writes",
        };
        self.touch(block, warp, touch)?;
        block
            .shared
            .set_written(target as usize, bytes as usize, false);
        let ranges = match &copy {
            Copy::Bulk { source, .. } => vec![(*source, bytes as usize)],
            Copy::Tensor {
                map, coordinates, ..
            } => map
                .rows(&coordinates[..map.rank as usize])
                .iter()
                .filter(|row| row.first < row.last)
                .map(|row| (row.address + row.first as u64, row.last - row.first))
                .collect(),
            _ => unreachable!(),
        };
        for (address, len) in ranges {
            let at = At::Global(address);
            self.touch(
                block,
                warp,
                Touch {
                    at,
                    len,
                    write: false,
                    what: "a bulk copy reads",
                    ..touch
                },
            )?;
        }
        let (warp, instruction) = (warp.index, self.pc);
        block.pending.push(Pending {
            copy,
            warp,
            lane,
            group: 0,
            barrier: Some((barrier, phase)),
            instruction,
            begun: self.now,
        });
        self.progress += 1;
        Ok(())
    }

    /// Starts a copy out of shared memory that belongs to the lane's open group.
    fn begin_store(
        &mut self,
        block: &mut Block,
        warp: &Warp,
        lane: usize,
        copy: Copy,
        (source, bytes): (u32, u32),
        ranges: &[(u64, usize)],
    ) -> Step {
        let group = warp.bulk[lane].open;
        let layout = warp.layout;
        let reading = Record::new(
            block.id,
            layout.bulk_reads(warp.index),
            group,
            self.pc,
            self.launch,
        )
        .asynchronous();
        let adds = matches!(
            copy,
            Copy::BulkOut { add_f32: true, .. } | Copy::TensorOut { add: true, .. }
        );
        let writing = Record::new(
            block.id,
            layout.bulk_writes(warp.index),
            group,
            self.pc,
            self.launch,
        )
        .asynchronous()
        .atomic(adds);
        let touch = Touch {
            lane,
            at: At::Shared(source),
            len: bytes as usize,
            record: reading,
            member: lane,
            write: false,
            asynchronous: true,
            same_value: false,
            what: "a bulk copy reads",
        };
        self.touch(block, warp, touch)?;
        for &(address, len) in ranges {
            let at = At::Global(address);
            let write = Touch {
                at,
                len,
                record: writing,
                write: true,
                what: "a bulk copy writes",
                ..touch
            };
            self.touch(block, warp, write)?;
        }
        let (warp, instruction) = (warp.index, self.pc);
        block.pending.push(Pending {
            copy,
            warp,
            lane,
            group,
            barrier: None,
            instruction,
            begun: self.now,
        });
        self.progress += 1;
        Ok(())
    }

    /// Completes the lane's copies up to a group.
    fn deliver_groups(
        &mut self,
        block: &mut Block,
        warp: usize,
        lane: usize,
        bulk: bool,
        done: u32,
    ) -> Step {
        let due = |one: &Pending| {
            let is_bulk = matches!(one.copy, Copy::BulkOut { .. } | Copy::TensorOut { .. });
            is_bulk && one.warp == warp && one.lane == lane && one.group <= done
        };
        if bulk {
            while let Some(at) = block.pending.iter().position(due) {
                self.deliver(block, at)?;
            }
            return Ok(());
        }
        let queue = warp * MEMBERS + lane;
        while block.lane_copies[queue]
            .front()
            .is_some_and(|one| one.group <= done)
        {
            self.deliver_lane(block, queue)?;
        }
        Ok(())
    }

    /// Completes the first copy of a lane. Returns `false` if there is none.
    pub fn deliver_lane(&mut self, block: &mut Block, queue: usize) -> Step<bool> {
        let Some(one) = block.lane_copies[queue].pop_front() else {
            return Ok(false);
        };
        self.deliver_one(block, one)?;
        Ok(true)
    }

    /// Completes a copy.
    pub fn deliver(&mut self, block: &mut Block, at: usize) -> Step {
        let pending = block.pending.swap_remove(at);
        self.deliver_one(block, pending)
    }

    fn deliver_one(&mut self, block: &mut Block, pending: Pending) -> Step {
        self.progress += 1;
        self.stats.copies += 1;
        self.pc = pending.instruction;
        if let Some(recorder) = &mut self.recorder
            && recorder.timeline.block as usize == block.id
        {
            recorder.copy(&pending, self.now, self.code.lines[self.pc]);
        }
        match pending.copy {
            Copy::Bulk {
                target,
                source,
                bytes,
            } => {
                self.bring(block, source, target as usize, bytes as usize)?;
                self.arrived(block, pending.barrier.expect("of a load").0, bytes)?;
            }
            Copy::Lane {
                target,
                source,
                bytes,
                valid,
            } => {
                if valid > 0 {
                    self.bring(block, source, target as usize, valid as usize)?;
                }
                let rest = target as usize + valid as usize..target as usize + bytes as usize;
                block.shared.set_written(rest.start, rest.len(), true);
                block.shared.data[rest].fill(0);
            }
            Copy::Tensor {
                map,
                coordinates,
                target,
            } => {
                let len = map.row_bytes();
                let mut row_bytes = vec![0; len];
                for (index, row) in map
                    .rows(&coordinates[..map.rank as usize])
                    .into_iter()
                    .enumerate()
                {
                    row_bytes.fill(0);
                    // An empty list means that all bytes of the row have a value.
                    let mut written = Vec::new();
                    let count = row.last - row.first;
                    if count > 0 {
                        let source = row.address + row.first as u64;
                        let (bytes, at) = self.memory.find(source, count)?;
                        row_bytes[row.first..row.last].copy_from_slice(&bytes.data[at..at + count]);
                        if !bytes.is_written(at, count) {
                            written = (0..len)
                                .map(|byte| {
                                    !(row.first..row.last).contains(&byte)
                                        || bytes.is_written(at + byte - row.first, 1)
                                })
                                .collect();
                        }
                    }
                    let begin = target as usize + index * len;
                    for unit in (0..len).step_by(16) {
                        let to = map.swizzle.apply((begin + unit) as u32) as usize;
                        block.shared.data[to..to + 16].copy_from_slice(&row_bytes[unit..unit + 16]);
                        block.shared.set_written(to, 16, true);
                        let unwritten = |&byte: &usize| written.get(unit + byte) == Some(&false);
                        (0..16)
                            .filter(unwritten)
                            .for_each(|byte| block.shared.set_written(to + byte, 1, false));
                    }
                }
                self.arrived(
                    block,
                    pending.barrier.expect("of a load").0,
                    map.box_bytes(),
                )?;
            }
            Copy::BulkOut {
                target,
                source,
                bytes,
                add_f32,
            } => {
                let values = block.shared.data[source as usize..][..bytes as usize].to_vec();
                self.take(block, source as usize, bytes as usize)?;
                self.put(target, &values, add_f32)?;
            }
            Copy::TensorOut {
                map,
                coordinates,
                source,
                add,
            } => {
                let len = map.row_bytes();
                let coordinates = &coordinates[..map.rank as usize];
                let rows = match add {
                    true => map.rows(coordinates),
                    false => map.stored_rows(coordinates),
                };
                for (index, row) in rows.into_iter().enumerate() {
                    let mut row_bytes = vec![0; len];
                    for unit in (0..len).step_by(16) {
                        let from = map
                            .swizzle
                            .apply((source as usize + index * len + unit) as u32)
                            as usize;
                        let inside = row.first < (unit + 16).min(row.last);
                        if inside {
                            self.take(block, from, 16)?;
                        }
                        row_bytes[unit..unit + 16]
                            .copy_from_slice(&block.shared.data[from..from + 16]);
                    }
                    if row.first < row.last {
                        self.put(
                            row.address + row.first as u64,
                            &row_bytes[row.first..row.last],
                            add,
                        )?;
                    }
                }
            }
            Copy::Arrive => {
                self.deliver_groups(block, pending.warp, pending.lane, false, pending.group)?;
                self.pc = pending.instruction;
                let mut clock = Shared::default();
                let member = block.layout.copies(pending.warp) * MEMBERS + pending.lane;
                Shared::make_mut(&mut clock).learn(block.id, member, pending.group);
                self.arrive(block, pending.barrier.expect("of an arrival").0, 1, &clock)?;
            }
        }
        Ok(())
    }

    fn bring(&mut self, block: &mut Block, source: u64, target: usize, len: usize) -> Step {
        let (bytes, at) = self.memory.find(source, len)?;
        block.shared.data[target..target + len].copy_from_slice(&bytes.data[at..at + len]);
        let whole = bytes.is_written(at, len);
        block.shared.set_written(target, len, true);
        let unwritten = |&byte: &usize| !whole && !bytes.is_written(at + byte, 1);
        (0..len)
            .filter(unwritten)
            .for_each(|byte| block.shared.set_written(target + byte, 1, false));
        Ok(())
    }

    fn take(&self, block: &mut Block, source: usize, len: usize) -> Step {
        let Some(byte) = (source..source + len).find(|&byte| !block.shared.is_written(byte, 1))
        else {
            return Ok(());
        };
        let by = block.shared.granule(byte / GRANULE).last_write();
        Err(Box::new(Fault::Uninitialised {
            address: name(At::Shared(byte as u32)),
            by: by.map(|record| Box::new(self.place_of(&record))),
        }))
    }

    fn put(&mut self, target: u64, values: &[u8], add_f32: bool) -> Step {
        let (bytes, at) = self.memory.find(target, values.len())?;
        let to = &mut bytes.data[at..at + values.len()];
        if add_f32 {
            for (to, value) in to.chunks_exact_mut(4).zip(values.chunks_exact(4)) {
                let float = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().expect("4 bytes"));
                let sum = float(to) + float(value);
                to.copy_from_slice(&sum.to_le_bytes());
            }
        } else {
            to.copy_from_slice(values);
        }
        bytes.set_written(at, values.len(), true);
        Ok(())
    }
}

fn close(groups: &mut Groups) {
    groups.closed.push(groups.open);
    groups.open += 1;
}

/// Marks all but the latest closed groups as done. Returns the last group that is done.
fn finish(groups: &mut Groups, pending: u32) -> Option<u32> {
    let count = groups.closed.len().checked_sub(pending as usize)?;
    let done = groups.closed.drain(..count).next_back()?;
    groups.done = groups.done.max(done);
    Some(done)
}

fn bulk_sizes(shared: At, global: At, bytes: u32) -> Step {
    Run::aligned(shared, 16)?;
    Run::aligned(global, 16)?;
    if bytes == 0 || !bytes.is_multiple_of(16) {
        return Err(operand(format!("a bulk copy of {bytes} bytes")));
    }
    Ok(())
}

/// The step in which the lanes' copies are done, except those of the latest `pending` groups.
fn copied_at(block: &Block, warp: &Warp, mask: u32, pending: u32, all: bool) -> Option<u64> {
    let of_lane = |lane: usize| {
        let groups = &warp.copies[lane];
        let last = match all {
            true => Some(groups.open),
            false => {
                let waited = groups.closed.len().checked_sub(pending as usize)?;
                groups.closed[..waited].last().copied()
            }
        }?;
        let copies = &block.lane_copies[warp.index * MEMBERS + lane];
        let due = copies.iter().filter(|one| one.group <= last);
        due.map(|one| one.begun + COPY_STEPS).max()
    };
    members(mask).filter_map(of_lane).max()
}
