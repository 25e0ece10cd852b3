//! The memory of workspaces: garbage before a run, and what must be unchanged or zero after it.

use std::ffi::c_void;

use tandem_attn::{exec::gpu::Workspace, plan::Plan};

use super::Runner;

impl Runner<'_> {
    fn which(&self, captured: bool) -> &Workspace {
        match &self.captured {
            Some((workspace, _)) if captured => workspace,
            _ => &self.eager,
        }
    }

    /// Fills a workspace with garbage, but for what is zero between runs.
    pub(super) fn spoil(&self, captured: bool) -> Result<(), String> {
        let workspace = self.which(captured);
        let (layout, memory) = (workspace.layout(), workspace.memory());
        let [from, to] = &layout.padded;
        for place in [0..layout.partial_lse.end, from.start..to.end] {
            let bytes = (place.end - place.start) as usize;
            if bytes == 0 {
                continue;
            }
            // SAFETY: inside the memory of the workspace, whose runs come in the order of the stream.
            let code = unsafe {
                let to = memory.address + place.start;
                libcuda::cuMemsetD8Async(to, self.case.poison, bytes, *self.stream)
            };
            if code != libcuda::Code::SUCCESS {
                return Err(format!("cuMemsetD8Async: {}", code.0));
            }
        }
        Ok(())
    }

    /// States that no item has are as they were, and counters are zero again.
    pub(super) fn workspace(&self, captured: bool, plan: &Plan) -> Result<(), String> {
        let workspace = self.which(captured);
        let (layout, memory) = (workspace.layout(), workspace.memory());
        let mut bytes = vec![0_u8; memory.len];
        // SAFETY: so many bytes are there.
        let code = unsafe {
            libcuda::cuMemcpyDtoH(
                bytes.as_mut_ptr().cast::<c_void>(),
                memory.address,
                bytes.len(),
            )
        };
        if code != libcuda::Code::SUCCESS {
            return Err(format!("cuMemcpyDtoH: {}", code.0));
        }
        let heads = u64::from(plan.spec.q_heads);
        let of_slot = [
            (layout.partial_out.end - layout.partial_out.start)
                / u64::from(workspace.bound().slots.max(1)),
            4 * heads,
        ];
        for (name, place, of_slot) in [
            ("outputs", &layout.partial_out, of_slot[0]),
            ("log-sums", &layout.partial_lse, of_slot[1]),
        ] {
            let unowned = place.start + u64::from(plan.slots) * of_slot;
            let unowned = &bytes[unowned as usize..place.end as usize];
            if let Some(at) = unowned.iter().position(|&byte| byte != self.case.poison) {
                return Err(format!(
                    "byte {at} behind the partial {name} was written: {} slots of {}",
                    plan.slots,
                    workspace.bound().slots
                ));
            }
        }
        for (name, place) in [
            ("arrivals", &layout.arrivals),
            ("tickets", &layout.tickets),
            ("counters", &layout.counters),
        ] {
            let counters = &bytes[place.start as usize..place.end as usize];
            if counters.iter().any(|&byte| byte != 0) {
                return Err(format!("{name} are not zero after a run"));
            }
        }
        Ok(())
    }
}
