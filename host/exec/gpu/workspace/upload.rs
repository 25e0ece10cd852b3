//! Copies a plan to the device, and checks the copy in debug mode.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use kernels_gpu::abi::{LaunchRecord, QueryRow};

use super::{IN_FLIGHT, Staging, Workspace, check_launches};
use crate::{
    Error,
    exec::gpu::{
        KvPool, RunTensors, Stream, captured,
        driver::{Check, Current, cuMemcpyDtoH, cuMemcpyHtoDAsync, cuStreamSynchronize},
        inspect::{Known, inspect},
        launch_plan::LaunchPlan,
        launch_set::LaunchSubset,
    },
    plan::{Bound, MAX_LAUNCHES, MergeMode, Plan, conversion::most_heads},
    problem::{Masks, Spec, Variant},
};

/// Two arrays with at most this many bytes between them are copied together: one more copy would take as long as these
/// bytes.
const GAP: u64 = 64 << 10;

impl Workspace {
    /// Copies a plan to the device. From then on [`Gpu::run`](super::super::Gpu::run) runs this plan, and so do graphs
    /// that were captured with a [launch set](super::WorkspaceOptions::launches) when they are launched again.
    ///
    /// The copy is queued on `stream`; the plan may be changed or dropped at once. The host waits only if
    /// several earlier copies are still pending.
    ///
    /// # Safety
    /// - The plan is as a [`Planner`](crate::plan::Planner) made it.
    /// - `stream` is a stream of the device's primary context, or null, and is not being captured.
    /// - `stream` waits for active runs of this workspace on other streams.
    ///
    /// # Errors
    /// [`Error::OtherSpec`], [`Error::BrokenPlan`], [`Error::Plan`] if the plan is larger than the bound, [`Error::NotCaptured`],
    /// [`Error::NoInstance`] for a plan that is not for a GPU, [`Error::LaunchLimit`] for a plan of more than 64 launches (a
    /// batch of many parts). After these errors nothing was changed on the device, and the workspace has no plan.
    /// [`Error::InCapture`] on a stream that this thread captures: the workspace keeps its plan. [`Error::Driver`].
    pub unsafe fn upload(&mut self, plan: &Plan, stream: Stream) -> Result<(), Error> {
        // A graph would copy this plan again with each launch, over the plan that was uploaded for it.
        let instead = "upload a plan before the capture, and before each launch of the graph";
        captured::refuse(stream, "Workspace::upload", instead)?;
        self.uploaded.clear();
        self.only_needed = false;
        self.run.forget();
        if plan.spec != self.spec {
            let [workspace, plan] = differences(&self.spec, &plan.spec);
            return Err(Error::OtherSpec { workspace, plan });
        }
        let mut needed = Bound::of(plan);
        plan.check_masks()?;
        let reads_masks = self.captured() && self.bound.mask_words > 0;
        let reads_ancestors = self.captured() && self.bound.ancestors > 0 && !reads_masks;
        let all_see = reads_ancestors && plan.ancestors.is_empty();
        if all_see {
            needed.ancestors = plan.total_q;
        }
        // Captured launches read masks, which say the same as the plan's ancestors, or that nothing is hidden.
        let others = reads_masks && plan.masks.is_empty();
        let others = others.then(|| Masks::of_ancestors(&plan.ancestors, plan.total_q));
        let masks = others.as_ref().unwrap_or(&plan.masks);
        needed.mask_words = masks.array_len() as u32;
        self.bound.check(&needed)?;
        let merge_mode = match &self.options.launches {
            Some(set) => set.merge_mode,
            None => plan.merge_mode,
        };
        self.launch_plan.fill(plan, merge_mode)?;
        // Each page has at least one id. Kernels would write pages beyond the bound past the end of the workspace.
        let pages = self.launch_plan.conversion.ids.len() as u32;
        needed.converted_pages = pages.saturating_mul(most_heads(plan));
        self.bound.check(&needed)?;
        check_launches(self.launch_plan.launches.len())?;
        let mut records = [LaunchRecord::zeroed(); MAX_LAUNCHES as usize + 1];
        let mut needed_launches = LaunchSubset::NONE;
        if let Some(set) = &self.options.launches {
            if merge_mode == MergeMode::Fused && self.launch_plan.merging.mixed {
                return Err(Error::NotCaptured {
                    launch: "that merges states of prefill and decode: choose MergeMode::Kernel"
                        .into(),
                });
            }
            if self.one_table && self.launch_plan.launches.iter().any(|launch| launch.joint) {
                return Err(Error::NotCaptured {
                    launch: "for joint tiles, of which a graph with the instructions of Ampere has none: plan with a device \
                             description without `decode.joint`"
                        .into(),
                });
            }
            set.records(&self.launch_plan, &mut records)?;
            needed_launches = set.needed(&records);
        }
        let _current = Current::enter(self.context.raw())?;
        let (captured, decode_merges) = (self.captured(), self.decode_merges());
        let Staging { memory, copied } = &mut self.staging[self.next];
        copied.wait()?;
        let bytes = memory.bytes();
        let layout = &self.layout;
        layout.write(plan, bytes)?;
        let ancestors = &layout.ancestors;
        let ancestors = ancestors.start..ancestors.start + u64::from(needed.ancestors) * 8;
        if all_see {
            bytes[ancestors.start as usize..ancestors.end as usize].fill(u8::MAX);
        }
        if let Some(masks) = &others {
            layout.write_masks(masks, bytes)?;
        }
        let masks = layout.masks.start..layout.masks.start + u64::from(needed.mask_words) * 8;
        let records = if captured { &records[..] } else { &[] };
        put(records, &layout.records, bytes);
        if let Some(items) = &self.launch_plan.items {
            put(items, &layout.items, bytes);
        }
        if decode_merges {
            for (index, row) in self.launch_plan.changed_rows(plan) {
                let at = layout.rows.start + (index * size_of::<QueryRow>()) as u64;
                put(&[row], &(at..layout.rows.end), bytes);
            }
        }
        let left = self.launch_plan.merging.left_rows(plan);
        put(left, &layout.left_merges, bytes);
        let conversion = &self.launch_plan.conversion;
        put(&conversion.pages, &layout.conversions, bytes);
        put(&conversion.ids, &layout.converted_ids, bytes);
        let filled = [
            filled(records, &layout.records),
            filled(&plan.items, &layout.items),
            filled(&plan.rows, &layout.rows),
            filled(&plan.merges, &layout.merges),
            filled(left, &layout.left_merges),
            filled(&plan.merge_slots, &layout.merge_slots),
            filled(&plan.page_ids, &layout.page_ids),
            ancestors,
            masks,
            filled(&conversion.pages, &layout.conversions),
            filled(&conversion.ids, &layout.converted_ids),
        ];
        let mut copies = joined(&filled);
        let queued = copies.try_for_each(|range| {
            let from = bytes[range.start as usize..range.end as usize].as_ptr();
            let to = self.memory.address() + range.start;
            // SAFETY: both lie in what was allocated for this layout; the staging memory is not touched
            // before the event below has passed.
            unsafe {
                cuMemcpyHtoDAsync(to, from.cast(), (range.end - range.start) as usize, stream)
            }
            .check("cuMemcpyHtoDAsync")
        });
        // SAFETY: the caller vouches for the stream.
        let queued = queued.and_then(|()| unsafe { copied.record(stream) });
        if queued.is_err() {
            // No event says when the copies that were queued finish, so wait before the staging memory is used again.
            // SAFETY: as above.
            let _ = unsafe { cuStreamSynchronize(stream) };
        }
        queued?;
        self.next = (self.next + 1) % IN_FLIGHT;
        if self.options.checks {
            self.known = Known::of(plan);
        }
        let fingerprint = match captured {
            true => 0,
            false => self.launch_plan.fingerprint(),
        };
        let LaunchPlan {
            total_q,
            parts,
            fixed_splits,
            ..
        } = &self.launch_plan;
        self.uploaded
            .set(*total_q, parts, needed_launches, fingerprint, *fixed_splits);
        Ok(())
    }

    /// Later work on the stream waits for the plan that was uploaded last. The current context must be the workspace's.
    ///
    /// # Safety
    /// The stream is one of the device's primary context, or null.
    #[cfg(feature = "cust")]
    pub(in crate::exec::gpu) unsafe fn hold_uploaded(&self, stream: Stream) -> Result<(), Error> {
        let last = (self.next + IN_FLIGHT - 1) % IN_FLIGHT;
        // SAFETY: the caller's promise.
        unsafe { self.staging[last].copied.hold(stream) }
    }

    /// The debug mode: waits for the stream and checks the plan on the device.
    ///
    /// # Safety
    /// The stream is one of the device's primary context, or null, and is not being captured.
    pub(in crate::exec::gpu) unsafe fn inspect(
        &self,
        tensors: &RunTensors<'_>,
        stream: Stream,
    ) -> Result<(), Error> {
        let instead = "capture with a workspace without checks";
        captured::refuse(stream, "a run with WorkspaceOptions::checks", instead)?;
        let _current = Current::enter(self.context.raw())?;
        let mut bytes = vec![0_u8; self.layout.upload_bytes as usize];
        // SAFETY: so many bytes were allocated; the caller vouches for the stream.
        unsafe {
            cuStreamSynchronize(stream).check("cuStreamSynchronize")?;
            cuMemcpyDtoH(
                bytes.as_mut_ptr().cast(),
                self.memory.address(),
                bytes.len(),
            )
            .check("cuMemcpyDtoH")?;
        }
        // Indices instead of page ids are only checked by kernels.
        let pages = |pool: &KvPool| match tensors.indices {
            Some(_) => u32::MAX,
            None => pool.pages,
        };
        let pages: Vec<u32> = tensors.pools.iter().map(pages).collect();
        let tokens = u32::try_from(tensors.q.shape[0]).unwrap_or(u32::MAX);
        inspect(
            &bytes,
            &self.layout,
            &self.launch_plan,
            &self.known,
            &pages,
            tokens,
        )
    }
}

/// What two specifications have different values of, with the values of each.
fn differences(one: &Spec, other: &Spec) -> [String; 2] {
    // All fields, so that none is forgotten.
    let fields = |spec: &Spec| {
        let Spec {
            q_heads,
            kv_heads,
            head_dim_qk,
            head_dim_v,
            latent,
            q_dtype,
            kv_dtype,
            out_dtype,
            scale,
            variant,
            compute,
            rotary,
        } = spec;
        let Variant {
            causal,
            window_left,
            soft_cap,
            sinks,
            sink_tokens,
            hooks,
            adds_up,
        } = variant;
        [
            format!("q_heads {q_heads}"),
            format!("kv_heads {kv_heads}"),
            format!("head_dim_qk {head_dim_qk}"),
            format!("head_dim_v {head_dim_v}"),
            format!("latent {latent}"),
            format!("q_dtype {q_dtype:?}"),
            format!("kv_dtype {kv_dtype:?}"),
            format!("out_dtype {out_dtype:?}"),
            format!("scale {scale}"),
            format!("causal {causal}"),
            format!("window_left {window_left:?}"),
            format!("soft_cap {soft_cap:?}"),
            format!("sinks {sinks}"),
            format!("sink_tokens {sink_tokens}"),
            format!("hooks {hooks:?}"),
            format!("adds_up {adds_up}"),
            format!("compute {compute:?}"),
            format!("rotary {rotary:?}"),
        ]
    };
    let both = fields(one).into_iter().zip(fields(other));
    let (one, other): (Vec<_>, Vec<_>) = both.filter(|(one, other)| one != other).unzip();
    [one.join(", "), other.join(", ")]
}

fn put<T: Pod>(array: &[T], to: &Range<u64>, bytes: &mut [u8]) {
    let array: &[u8] = bytemuck::cast_slice(array);
    bytes[to.start as usize..][..array.len()].copy_from_slice(array);
}

/// The part of its place that an array fills.
fn filled<T>(array: &[T], place: &Range<u64>) -> Range<u64> {
    place.start..place.start + size_of_val(array) as u64
}

/// Joins ascending ranges with little between them, and drops empty ones.
fn joined(ranges: &[Range<u64>]) -> impl Iterator<Item = Range<u64>> {
    let mut rest = ranges.iter().filter(|range| !range.is_empty()).peekable();
    std::iter::from_fn(move || {
        let mut range = rest.next()?.clone();
        while let Some(next) = rest.next_if(|next| next.start <= range.end + GAP) {
            range.end = next.end;
        }
        Some(range)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Dtype;

    /// What an error has to say of two specifications that differ in one thing.
    #[test]
    fn specifications_that_differ_are_described_differently() {
        let one = Spec::new(8, 2, 128);
        let changes: [fn(&mut Spec); 10] = [
            |spec| spec.q_heads = 4,
            |spec| spec.kv_heads = 1,
            |spec| spec.head_dim_qk = 64,
            |spec| spec.head_dim_v = 64,
            |spec| spec.latent = true,
            |spec| spec.q_dtype = Dtype::F32,
            |spec| spec.kv_dtype = Dtype::F8E4M3,
            |spec| spec.out_dtype = Dtype::F32,
            |spec| spec.scale = 0.5,
            |spec| spec.variant.window_left = Some(3),
        ];
        for (change, number) in changes.iter().zip(0..) {
            let mut other = one;
            change(&mut other);
            let [values, others] = differences(&one, &other);
            assert_ne!(values, others, "change {number}");
            assert!(!values.contains(','), "one field: {values}");
        }
        let other = one.with_kv_dtype(Dtype::F8E4M3).with_window_left(127);
        assert_eq!(
            differences(&one, &other),
            [
                "kv_dtype BF16, window_left None",
                "kv_dtype F8E4M3, window_left Some(127)"
            ]
        );
    }

    #[test]
    fn arrays_that_lie_close_are_copied_together() {
        let far = 1 << 20;
        let ranges = [0..0, 256..300, 512..900, 1024..1024, far..far + 4];
        let copies: Vec<_> = joined(&ranges).collect();
        assert_eq!(copies, [256..900, far..far + 4]);
        assert_eq!(joined(&[]).count(), 0);
    }
}
