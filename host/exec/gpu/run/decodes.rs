//! The launch of a group of decodes.

use kernels_gpu::registry::Arch;

use super::making::{Making, on, place};
use crate::{
    Error,
    exec::gpu::{
        DecodeCall, DecodeTile, DeviceArray, KvPool, decode::of_pool, launch_plan::GroupLaunch,
        registry::has_own_heads, steps::Step,
    },
};

impl Making<'_> {
    pub(super) fn decodes(
        &mut self,
        index: usize,
        launch: &GroupLaunch,
        pool: &KvPool,
        arch: Option<Arch>,
    ) -> Result<Step, Error> {
        let (gpu, workspace, tensors) = (self.gpu, self.workspace, self.tensors);
        let (mut spec, planned) = (workspace.spec.on_kernels(), launch.key.kernel);
        let units = launch.items.saturating_mul(spec.kv_heads);
        let kernel = match arch.or(workspace.options.arch) {
            Some(arch) => of_pool(on(planned, arch)?, pool),
            None => {
                let kernel = gpu.decode_kernel(planned, &spec, pool);
                match workspace.launch_plan.fixed_splits {
                    true => kernel,
                    false => {
                        let lengths = workspace.launch_plan.lengths_of(launch);
                        gpu.of_pairs(kernel, &workspace.spec, pool, lengths)
                    }
                }
            }
        };
        let kernel = match launch.pieces {
            true => kernel.with_pieces().ok_or_else(|| Error::NoInstance {
                kernel: "decode",
                asked: format!("rows of two items that {kernel} would merge"),
                there: "plans with MergeMode::Kernel",
            })?,
            false => kernel,
        };
        self.pads_by(kernel)?;
        let own_heads = has_own_heads(kernel, &workspace.spec);
        if own_heads {
            spec.head_dim_qk = workspace.spec.head_dim_qk;
            spec.head_dim_v = workspace.spec.head_dim_v;
        }
        let [q, _] = tensors.of_launch(own_heads);
        if launch.joint && !kernel.info().multi_table {
            return Err(Error::NoInstance {
                kernel: "decode",
                asked: "joint tiles with the instructions of Ampere".into(),
                there: "plans for a device description without `decode.joint`",
            });
        }
        self.one_table |=
            workspace.captured() && planned.info().multi_table && !kernel.info().multi_table;
        let co_resident = kernel.info().co_resident;
        // If the plan names a kernel that shares SMs, the decode leaves merges to the merging kernel, also if another
        // kernel runs it.
        let merges = workspace.decode_merges()
            && !planned.info().co_resident
            && (!spec.latent || launch.pieces);
        // A CTA claims several units at a time only if there are enough for all CTAs.
        let units = units / kernel.info().kv_heads;
        let share = (units + gpu.multiprocessors / 2) / gpu.multiprocessors;
        let partials = workspace.partials();
        let (items, record) = place(workspace, index, launch);
        let call = DecodeCall {
            spec: &spec,
            tile: DecodeTile {
                kernel,
                rows: planned.info().rows,
                run: launch.run.min(share.max(1)),
                long: launch.long,
            },
            items,
            rows: workspace.rows(),
            page_ids: match tensors.indices {
                Some(indices) => DeviceArray::new(indices.address, indices.len),
                None => workspace.page_ids(),
            },
            merges: workspace.merges(),
            merge_slots: workspace.merge_slots(),
            q,
            pool,
            out: tensors.out,
            lse: tensors.lse,
            partials: &partials,
            arrivals: merges.then(|| workspace.arrivals()),
            ticket: workspace.ticket(index),
            record,
            extras: self.extras(),
        };
        let mut step = gpu.prepare_decode(kernel, &call, &mut self.maps)?;
        if co_resident && !workspace.captured() {
            step.launch.grid[0] = units.min(match workspace.launch_plan.resident.decode {
                // Without prefills, two CTAs fit on an SM and have twice the bytes in flight.
                0 => 2 * gpu.multiprocessors,
                resident => resident,
            });
        }
        Ok(step)
    }
}
