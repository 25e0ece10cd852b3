//! Where the arrays of a workspace lie on the device.

use std::ops::Range;

use kernels_gpu::abi::{ConvertedPage, LaunchRecord, MergeRow, QueryRow, RotaryParams, WorkItem};

use super::Workspace;
use crate::{
    Error,
    checks::extent,
    exec::gpu::{DeviceArray, DeviceTensor, PartialStates},
    problem::{Dtype, Padding, Spec},
    step::Pairing,
};

impl Workspace {
    fn array<T>(&self, range: &Range<u64>) -> DeviceArray<T> {
        let len = (range.end - range.start) as usize / size_of::<T>();
        DeviceArray::new(self.memory.address() + range.start, len)
    }

    pub(in crate::exec::gpu) fn items(&self) -> DeviceArray<WorkItem> {
        self.array(&self.layout.items)
    }

    pub(in crate::exec::gpu) fn rows(&self) -> DeviceArray<QueryRow> {
        self.array(&self.layout.rows)
    }

    pub(in crate::exec::gpu) fn merges(&self) -> DeviceArray<MergeRow> {
        self.array(&self.layout.merges)
    }

    pub(in crate::exec::gpu) fn left_merges(&self) -> DeviceArray<MergeRow> {
        self.array(&self.layout.left_merges)
    }

    pub(in crate::exec::gpu) fn merge_slots(&self) -> DeviceArray<u32> {
        self.array(&self.layout.merge_slots)
    }

    pub(in crate::exec::gpu) fn page_ids(&self) -> DeviceArray<u32> {
        self.array(&self.layout.page_ids)
    }

    /// The pages that prefills convert.
    pub(in crate::exec::gpu) fn conversions(&self) -> DeviceArray<ConvertedPage> {
        self.array(&self.layout.conversions)
    }

    pub(in crate::exec::gpu) fn converted_ids(&self) -> DeviceArray<u32> {
        self.array(&self.layout.converted_ids)
    }

    /// Addresses of the converted keys, of the converted values, of their flags, and of the words by which CTAs share
    /// this work.
    pub(in crate::exec::gpu) fn converted(&self) -> [u64; 4] {
        let [k, v] = &self.layout.converted;
        [
            k,
            v,
            &self.layout.converted_done,
            &self.layout.conversion_control,
        ]
        .map(|range| self.memory.address() + range.start)
    }

    /// Ancestors of the plan's query tokens. A captured launch always reads them, if the bound has room for them and none for masks.
    pub(in crate::exec::gpu) fn ancestors(&self) -> Option<DeviceArray<u64>> {
        let some = match self.captured() {
            true => self.bound.ancestors > 0 && self.bound.mask_words == 0,
            false => self.launch_plan.trees,
        };
        some.then(|| self.array(&self.layout.ancestors))
    }

    /// Masks of the plan's query tokens. A captured launch always reads them, if the bound has room for them.
    pub(in crate::exec::gpu) fn masks(&self) -> Option<DeviceArray<u64>> {
        let some = match self.captured() {
            true => self.bound.mask_words > 0,
            false => self.launch_plan.masks,
        };
        some.then(|| self.array(&self.layout.masks))
    }

    /// The rotary embedding that decodes and the launches before prefills apply. Zeros if there is none.
    pub(in crate::exec::gpu) fn rotary(&self) -> RotaryParams {
        let Some(rope) = self.spec.rotary else {
            return RotaryParams::default();
        };
        let magnitude = rope.magnitude();
        RotaryParams {
            turns: self.memory.address() + self.layout.turns.start,
            pairs: rope.dim / 2,
            interleaved: (rope.pairing == Pairing::Interleaved).into(),
            gain: (magnitude * magnitude) as f32,
            reserved: [0; 3],
        }
    }

    /// Room for the queries of this many tokens, rounded to 16 bits, with heads as they are.
    pub(in crate::exec::gpu) fn queries(&self, tokens: usize) -> Result<DeviceTensor<3>, Error> {
        let most = self.bound.padded_tokens as usize;
        if tokens > most {
            let rule = format!("at most {most}, as in the bound, because the queries are rounded");
            return Err(extent("q", "tokens", tokens, rule));
        }
        let dtype = self.spec.on_kernels().q_dtype;
        let dims = [self.spec.q_heads, self.spec.head_dim_qk].map(|extent| extent as usize);
        let room = match Padding::of(&self.spec) {
            Some(_) => &self.layout.rounded,
            None => &self.layout.padded[0],
        };
        let address = self.memory.address() + room.start;
        Ok(DeviceTensor::new(
            address,
            dtype,
            [tokens, dims[0], dims[1]],
        ))
    }

    /// An output in 16 bits for kernels that write partial states alone, which have heads of so many elements.
    pub(in crate::exec::gpu) fn never_written(&self, tokens: usize, dim: u32) -> DeviceTensor<3> {
        let shape = [tokens, self.spec.q_heads as usize, dim as usize];
        let address = self.memory.address() + self.layout.partial_out.start;
        DeviceTensor::new(address, self.spec.on_kernels().out_dtype, shape)
    }

    /// Room for queries and outputs of so many tokens whose heads are padded. Outputs are F32 if those of the run are.
    pub(in crate::exec::gpu) fn padded(
        &self,
        tokens: usize,
    ) -> Result<[DeviceTensor<3>; 2], Error> {
        let most = self.bound.padded_tokens as usize;
        if tokens > most {
            let rule = format!("at most {most}, as in the bound, because the heads are padded");
            return Err(extent("q", "tokens", tokens, rule));
        }
        let Spec {
            q_heads,
            q_dtype,
            head_dim_v,
            ..
        } = self.spec.on_kernels();
        let shape = [tokens, q_heads as usize, head_dim_v as usize];
        let tensor = |range: &Range<u64>, dtype| {
            DeviceTensor::new(self.memory.address() + range.start, dtype, shape)
        };
        let [q, out] = &self.layout.padded;
        Ok([tensor(q, q_dtype), tensor(out, self.spec.out_dtype)])
    }

    pub(in crate::exec::gpu) fn arrivals(&self) -> DeviceArray<u32> {
        self.array(&self.layout.arrivals)
    }

    /// The ticket of a launch.
    pub(in crate::exec::gpu) fn ticket(&self, launch: usize) -> DeviceArray<u32> {
        let tickets = self.memory.address() + self.layout.tickets.start;
        DeviceArray::new(tickets + launch as u64 * 4, 1)
    }

    /// The counters of a kernel with prefill and decode in one.
    pub(in crate::exec::gpu) fn counters(&self) -> DeviceArray<u32> {
        self.array(&self.layout.counters)
    }

    /// The record of a captured launch.
    pub(in crate::exec::gpu) fn record(&self, launch: usize) -> DeviceArray<LaunchRecord> {
        let records = self.memory.address() + self.layout.records.start;
        DeviceArray::new(records + (launch * size_of::<LaunchRecord>()) as u64, 1)
    }

    pub(in crate::exec::gpu) fn partials(&self) -> PartialStates {
        let (slots, heads) = (self.bound.slots as usize, self.spec.q_heads as usize);
        let dim = match (Padding::of(&self.spec), self.pads()) {
            (Some(_), None) => self.spec.head_dim_v,
            _ => self.spec.on_kernels().head_dim_v,
        };
        let shape = [slots, heads, dim as usize];
        let tensor = |range: &Range<u64>| self.memory.address() + range.start;
        PartialStates {
            out: DeviceTensor::new(tensor(&self.layout.partial_out), Dtype::F32, shape),
            lse: DeviceTensor::new(tensor(&self.layout.partial_lse), Dtype::F32, [slots, heads]),
        }
    }
}
