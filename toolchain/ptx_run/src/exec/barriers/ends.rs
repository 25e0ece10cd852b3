//! What is unfinished when threads or a block end.

use crate::{
    block::Block,
    exec::Run,
    report::{Fault, Place, Step},
    warp::{Warp, members},
};

impl Run<'_> {
    /// Checks that nothing of a block is unfinished when all its threads have ended and all its copies are done.
    pub fn after_end(&self, block: &Block) -> Result<(), (Place, Box<Fault>)> {
        if let Some(id) = block.named.iter().position(|barrier| barrier.arrived != 0) {
            let barrier = &block.named[id];
            let what = format!(
                "the block ends when {} of {} threads are there",
                barrier.arrived, barrier.expected
            );
            let (instruction, warp) = barrier.last;
            let id = id as u32;
            return Err((
                self.place(instruction, block.id, format!("warp {warp}")),
                Box::new(Fault::Barrier { id, what }),
            ));
        }
        let open = block.products.iter().find_map(|of| of.open.front());
        if let Some(&(instruction, warp)) = open {
            let what = "others end without it".into();
            return Err((
                self.place(instruction, block.id, format!("warp {warp}")),
                Box::new(Fault::OtherProduct { what }),
            ));
        }
        if let Some(barrier) = block
            .barriers
            .iter()
            .find(|barrier| barrier.live && barrier.bytes != 0)
        {
            let what = format!(
                "the block ends when {} bytes are expected, less those that came",
                barrier.bytes
            );
            let who = format!("warp {} lane {}", barrier.by_warp, barrier.by_lane);
            let address = format!("{:#x}", barrier.address);
            return Err((
                self.place(barrier.instruction, block.id, who),
                Box::new(Fault::Mbarrier { address, what }),
            ));
        }
        Ok(())
    }

    /// Checks that nothing of these lanes is unfinished when they end.
    pub(in crate::exec) fn before_end(
        &mut self,
        _block: &mut Block,
        warp: &Warp,
        mask: u32,
    ) -> Step {
        for lane in members(mask) {
            let bulk = &warp.bulk[lane];
            if !bulk.closed.is_empty() || bulk.begun > bulk.done {
                let what = format!(
                    "bulk copies of warp {} lane {lane} may still read its shared memory",
                    warp.index
                );
                return Err(Box::new(Fault::Unfinished { what }));
            }
        }
        if warp.products_done + 1 < warp.products {
            return Err(Box::new(Fault::Unfinished {
                what: format!("products of warp {} may still run", warp.index),
            }));
        }
        Ok(())
    }
}
