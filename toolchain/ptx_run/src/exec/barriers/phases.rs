//! Counts arrivals and bytes of mbarriers, and ends their phases.

use crate::{
    block::{Block, Mbarrier, Sent},
    clock::{MEMBERS, Shared, join},
    exec::Run,
    report::{Fault, Step},
};

/// Maximum number of bytes that may be pending at an mbarrier.
const MAX_BYTES: i64 = (1 << 20) - 1;

impl Run<'_> {
    pub(super) fn expect(&mut self, block: &mut Block, address: u32, bytes: u32) -> Step {
        let barrier = found(block, address)?;
        barrier.bytes += i64::from(bytes);
        self.progress += 1;
        if barrier.bytes > MAX_BYTES {
            let what = format!(
                "{} bytes are pending, at most {MAX_BYTES} may be",
                barrier.bytes
            );
            return Err(Box::new(Fault::Mbarrier {
                address: format!("{address:#x}"),
                what,
            }));
        }
        Ok(())
    }

    /// Counts the bytes of a copy that has arrived.
    pub fn arrived(&mut self, block: &mut Block, address: u32, bytes: u32) -> Step {
        found(block, address)?.bytes -= i64::from(bytes);
        self.progress += 1;
        self.maybe_complete(block, address)
    }

    /// Records arrivals of threads or copies.
    pub fn arrive(&mut self, block: &mut Block, address: u32, count: u32, clock: &Shared) -> Step {
        let barrier = found(block, address)?;
        self.progress += 1;
        if count == 0 || count > barrier.pending {
            let what = format!(
                "{count} arrivals where {} are left of {}",
                barrier.pending, barrier.count
            );
            return Err(Box::new(Fault::Mbarrier {
                address: format!("{address:#x}"),
                what,
            }));
        }
        barrier.pending -= count;
        join(&mut barrier.clock, clock);
        self.maybe_complete(block, address)
    }

    /// Counts the bytes of an asynchronous store.
    pub fn received(&mut self, block: &mut Block, sent: &Sent) -> Step {
        self.pc = sent.instruction;
        join(&mut found(block, sent.barrier)?.clock, &sent.clock);
        self.arrived(block, sent.barrier, sent.bytes)
    }

    fn maybe_complete(&mut self, block: &mut Block, address: u32) -> Step {
        let (id, layout) = (block.id, block.layout);
        let barrier = found(block, address)?;
        if barrier.pending != 0 || barrier.bytes != 0 {
            return Ok(());
        }
        let phase = barrier.phase;
        if let Some(copy) = block
            .pending
            .iter()
            .find(|one| one.barrier == Some((address, phase)))
        {
            let what = format!(
                "its phase ends while a copy is on the way: line {} `{}`",
                self.code.lines[copy.instruction],
                self.module.line(self.code.lines[copy.instruction]).trim()
            );
            return Err(Box::new(Fault::Mbarrier {
                address: format!("{address:#x}"),
                what,
            }));
        }
        let barrier = found(block, address)?;
        let (member, time) = (barrier.member, barrier.time());
        Shared::make_mut(&mut barrier.clock).learn(id, layout.barriers() * MEMBERS + member, time);
        barrier.released = std::mem::take(&mut barrier.clock);
        barrier.pending = barrier.count;
        barrier.phase += 1;
        Ok(())
    }
}

pub(super) fn found(block: &mut Block, address: u32) -> Step<&mut Mbarrier> {
    let what = "there is no barrier, it was not initialised";
    block.barrier(address).ok_or_else(|| {
        Box::new(Fault::Mbarrier {
            address: format!("{address:#x}"),
            what: what.into(),
        })
    })
}
