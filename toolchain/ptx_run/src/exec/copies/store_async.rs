//! Executes asynchronous stores to blocks of the cluster (`st.async`).

use crate::{
    block::{Block, Sent},
    clock::{Clock, MEMBERS, Shared},
    exec::{
        Run,
        access::{At, Touch},
        operand,
    },
    op::{Address, Row, Space},
    report::{Fault, Step},
    warp::{Warp, members},
};

impl Run<'_> {
    pub(super) fn store_async(
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
}
