//! Completes copies: moves their bytes, and signals those that wait.

use crate::{
    block::{Block, Copy, Pending},
    clock::{MEMBERS, Shared},
    exec::{
        Run,
        access::{At, name},
    },
    report::{Fault, Step},
    shadow::GRANULE,
};

impl Run<'_> {
    /// Completes the lane's copies up to a group.
    pub(super) fn deliver_groups(
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
        let unwritten = |&byte: &usize| !bytes.is_written(at + byte, 1);
        if add_f32 && let Some(byte) = (0..values.len()).find(unwritten) {
            return Err(Box::new(Fault::Uninitialised {
                address: name(At::Global(target + byte as u64)),
                by: None,
            }));
        }
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
