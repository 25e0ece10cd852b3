//! Starts bulk copies and copies of boxes of tensors (TMA).

use super::{close, finish};
use crate::{
    block::{Block, Copy},
    clock::MEMBERS,
    exec::{
        Flow, Run,
        access::{At, Touch, name, not_a_barrier},
        barriers::value,
        operand,
    },
    op::{Op, Space, TensorBox},
    report::{Fault, Step},
    shadow::Record,
    tensor_map::TensorMap,
    warp::{Warp, members},
};

impl Run<'_> {
    pub(super) fn bulk_copy_op(
        &mut self,
        block: &mut Block,
        warp: &mut Warp,
        mask: u32,
        op: &Op,
    ) -> Step<Flow> {
        match op {
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
        Ok(Flow::Next)
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
        let one = self.begun(copy, warp, lane, 0, Some((barrier, phase)));
        block.pending.push(one);
        self.progress += 1;
        Ok(())
    }

    /// Starts a copy out of shared memory that belongs to the lane's open group.
    fn begin_store(
        &mut self,
        block: &mut Block,
        warp: &mut Warp,
        lane: usize,
        copy: Copy,
        (source, bytes): (u32, u32),
        ranges: &[(u64, usize)],
    ) -> Step {
        let group = warp.bulk[lane].open;
        warp.bulk[lane].begun = group;
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
        let one = self.begun(copy, warp, lane, group, None);
        block.pending.push(one);
        self.progress += 1;
        Ok(())
    }
}

fn bulk_sizes(shared: At, global: At, bytes: u32) -> Step {
    Run::aligned(shared, 16)?;
    Run::aligned(global, 16)?;
    if bytes == 0 || !bytes.is_multiple_of(16) {
        return Err(operand(format!("a bulk copy of {bytes} bytes")));
    }
    Ok(())
}
