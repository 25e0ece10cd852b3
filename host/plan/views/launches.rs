//! The kernels that a run of a plan launches on a GPU.
//!
//! A plan names a kernel for each group. A run takes others where the batch or the heads need what that kernel lacks, and launches more
//! around them. Most of this the plan knows. What only the pool says is here as for a plain one: keys and values alike, the heads of a
//! token one after the other (NHD), no scales of tokens.

use std::cmp::Reverse;

use kernels_gpu::{
    Hooks,
    abi::WorkItem,
    passes::merge::{CHUNK, FEW},
    registry::{Arch, Element, KernelId, KernelInfo, Loads, Op},
    variants::BUILT_IN,
};

use crate::{
    plan::{
        data::{Plan, PodMode, TileGroup},
        launched::{
            converted::Conversion,
            element, has_own_heads,
            merging::{self, Merging},
            pairs::{MOST_LENGTHS, gain_by_pairs},
        },
        model::tiles::serves_heads,
    },
    problem::{Compute, Padding},
};

impl Plan {
    /// The entries that a run of this plan launches on a GPU, by their names in a profile: of attention in the order of the groups,
    /// then merges, then what pads, rounds and widens around them. Nothing for a CPU.
    ///
    /// It takes the pool to be plain: the heads of a token follow each other, keys and values have the same strides, and tokens have no
    /// scales. Kernels for other pools have other names. A plan that was read from a file does not know its device: it names no kernels
    /// for two KV heads at a time, and the merging kernel as for few rows.
    #[must_use]
    pub fn launches(&self) -> Vec<String> {
        let merging = self.merging();
        let mut run = Launches::of(self, &merging);
        if run.attention.is_empty() {
            return Vec::new();
        }
        run.merges(&merging);
        run.around();
        run.names
    }

    /// The first entry that runs a group.
    pub(super) fn entry_of_group(&self, group: &TileGroup) -> Option<String> {
        let mut launches = self.launches_of(group);
        let (part, items) = launches.next()?;
        if let Some(pod) = self.ticket_kernel() {
            return Some(self.entry(pod));
        }
        let kernel = self.kernel_of(group, part, &items, &self.merging())?;
        Some(self.entry(kernel))
    }

    fn merging(&self) -> Merging {
        let mut merging = Merging::default();
        merging.divide(self, self.merge_mode);
        merging
    }

    /// The parts of which a group has items, and these: each is a launch.
    fn launches_of<'a>(
        &'a self,
        group: &'a TileGroup,
    ) -> impl Iterator<Item = (usize, Vec<WorkItem>)> + 'a {
        (0..self.parts.len()).filter_map(|part| {
            let items = self.items_of(group).iter();
            let of_part = items.filter(|item| item.part as usize == part);
            let of_part: Vec<_> = of_part.copied().collect();
            (!of_part.is_empty()).then_some((part, of_part))
        })
    }

    /// The kernel that has prefills and decodes, if this plan's share one.
    fn ticket_kernel(&self) -> Option<KernelId> {
        let tickets = self.pod.is_some_and(|pod| pod.mode == PodMode::Tickets);
        let serves = |id: &KernelId| id.info().op == Op::Pod && serves_heads(id.info(), &self.spec);
        KernelId::all().find(serves).filter(|_| tickets)
    }

    /// The kernel that runs the items of a group that are of this part.
    fn kernel_of(
        &self,
        group: &TileGroup,
        part: usize,
        items: &[WorkItem],
        merging: &Merging,
    ) -> Option<KernelId> {
        let planned = group.id?;
        Some(match planned.info().op {
            Op::Decode => {
                let kernel = self.decode(planned, part, items);
                let pieces = merging.pieces.are_among(items);
                kernel.with_pieces().filter(|_| pieces).unwrap_or(kernel)
            }
            _ => self.prefill(planned),
        })
    }

    fn prefill(&self, planned: KernelId) -> KernelId {
        let (row, variant) = (planned.info(), &self.spec.variant);
        let masked = !self.ancestors.is_empty() || !self.masks.is_empty();
        let sinks = variant.sinks && !(row.sinks && variant.sink_tokens <= 1);
        let needs = masked || sinks || self.spec.rotary.is_some();
        let ampere = |id: KernelId| id.on(Arch::Sm80).unwrap_or(planned);
        let kernel = match needs && !row.extras {
            true => planned.with_extras().unwrap_or_else(|| ampere(planned)),
            false => planned,
        };
        let kernel = match self.has(kernel) {
            true => kernel,
            false => ampere(kernel),
        };
        let pads = kernel.info().arch == Arch::Sm80 && Padding::of(&self.spec).is_some();
        kernel.general().filter(|_| pads).unwrap_or(kernel)
    }

    fn decode(&self, planned: KernelId, part: usize, items: &[WorkItem]) -> KernelId {
        let maps = self.parts[part].page_size.is_multiple_of(8);
        let loads = maps || planned.info().loads != Loads::Pages;
        let kernel = match loads && self.has(planned) {
            true => planned,
            false => {
                let there = planned.by_rows().or_else(|| planned.on(Arch::Sm80));
                there.unwrap_or(planned)
            }
        };
        let (Some(device), false) = (self.origin.device(), self.fixed_splits) else {
            return kernel;
        };
        let kv_heads = self.spec.kv_heads;
        let pair = kernel.of_pairs(self.spec.head_dim_qk).filter(|&pair| {
            let mut lengths: Vec<_> = items.iter().map(WorkItem::kv_len).collect();
            if lengths.len() <= MOST_LENGTHS {
                lengths.sort_unstable_by_key(|&keys| Reverse(keys));
            }
            (self.has(pair) && kv_heads.is_multiple_of(2) && maps)
                && gain_by_pairs(pair.info(), &lengths, kv_heads, device.sms)
        });
        pair.unwrap_or(kernel)
    }

    /// Whether the plan's device has a kernel.
    fn has(&self, kernel: KernelId) -> bool {
        let row = kernel.info();
        self.origin.device().is_none_or(|device| {
            row.arch.runs_on(device.compute_capability)
                && row.shared_bytes <= device.shared_bytes_per_cta
        })
    }

    /// The entry of a kernel: of a variant, the one that has its tile.
    fn entry(&self, kernel: KernelId) -> String {
        let row = kernel.info();
        let Some(name) = self.spec.variant.hooks else {
            return row.name.into();
        };
        let tile = |row: &KernelInfo| {
            let dims = [row.head_dim, row.value_dim];
            (row.op, row.arch, row.element, dims, [row.rows, row.keys])
        };
        let built_in = BUILT_IN.iter().find(|hooks| hooks.name == name);
        let replaces = |row: &KernelInfo| match built_in {
            Some(hooks) => hooks.replaces(row),
            None => Hooks::replaceable(row),
        };
        let mut rows = KernelId::all().map(KernelId::info);
        let replaced = rows.find(|other| replaces(other) && tile(other) == tile(row));
        name.entry(replaced.unwrap_or(row))
    }
}

/// The launches of a run, as they become known.
struct Launches<'a> {
    plan: &'a Plan,
    names: Vec<String>,
    attention: Vec<KernelId>,
    merges: bool,
}

impl<'a> Launches<'a> {
    /// Those of attention, with those before them.
    fn of(plan: &'a Plan, merging: &Merging) -> Self {
        let mut run = Self {
            plan,
            names: Vec::new(),
            attention: Vec::new(),
            merges: false,
        };
        let (mut conversion, mut in_one) = (Conversion::default(), Vec::new());
        for group in &plan.groups {
            for (part, mut items) in plan.launches_of(group) {
                let Some(kernel) = plan.kernel_of(group, part, &items, merging) else {
                    continue;
                };
                if let Some(pod) = plan.ticket_kernel() {
                    // A part's prefills and decodes are one launch.
                    if !in_one.contains(&part) {
                        run.attention(pod);
                    }
                    in_one.push(part);
                    continue;
                }
                if let (Some(planned), Op::Prefill) = (group.id, kernel.info().op) {
                    run.before(&mut conversion, planned, kernel, group.heads, &mut items);
                }
                run.attention(kernel);
            }
        }
        run
    }

    fn attention(&mut self, kernel: KernelId) {
        self.names.push(self.plan.entry(kernel));
        self.attention.push(kernel);
    }

    fn pass(&mut self, op: Op, element: Element) {
        if let Some(row) = row_of(op, element) {
            self.names.push(row.name.into());
        }
    }

    /// What converts the keys of a prefill before it.
    fn before(
        &mut self,
        conversion: &mut Conversion,
        planned: KernelId,
        kernel: KernelId,
        heads: u32,
        items: &mut [WorkItem],
    ) {
        let spec = &self.plan.spec;
        if !spec.converts() {
            return;
        }
        if spec.rotary.is_some() {
            return self.pass(Op::Turn, element(spec.kv_dtype));
        }
        let of_ampere = kernel.info().arch == Arch::Sm80;
        let alone = self.plan.pod.is_none_or(|pod| pod.mode == PodMode::Serial);
        let few_rows = (alone || planned.info().co_resident) && spec.compute == Compute::F16 && {
            let pages = conversion.add(self.plan, items);
            conversion.few_rows_see(pages, self.plan, items, heads)
        };
        if of_ampere || few_rows {
            self.pass(Op::Widen, element(spec.on_kernels().q_dtype));
        }
    }

    fn merges(&mut self, merging: &Merging) {
        self.merges = merging.left > 0;
        if !self.merges {
            return;
        }
        let spec = &self.plan.spec;
        let out = match spec.has_f32_outputs() {
            true => Element::F32,
            false => element(spec.on_kernels().out_dtype),
        };
        let dim = match self.pads() {
            Some(_) => spec.on_kernels().head_dim_v,
            None => spec.head_dim_v,
        };
        let per_row = spec.q_heads * dim / CHUNK as u32;
        let chunks = merging.left.saturating_mul(per_row);
        let (device, few) = (self.plan.origin.device(), row_of(Op::Merge(FEW), out));
        let shape = match (device, few) {
            (Some(device), Some(few)) => {
                let most_slots = Some(merging.most_slots);
                merging::shape(chunks, most_slots, few.registers, device.sms).0
            }
            _ => FEW,
        };
        self.pass(Op::Merge(shape), out);
    }

    /// How heads are padded; none if all planned kernels were compiled for them.
    fn pads(&self) -> Option<Padding> {
        let spec = &self.plan.spec;
        let mut planned = self.plan.groups.iter().filter_map(|group| group.id);
        let all_own = planned.all(|kernel| has_own_heads(kernel, spec));
        Padding::of(spec).filter(|_| !all_own)
    }

    /// What pads and rounds queries and outputs.
    fn around(&mut self) {
        let spec = &self.plan.spec;
        if spec.rounds_queries() {
            self.pass(Op::Narrow, element(spec.on_kernels().q_dtype));
        }
        let Some(padding) = self.pads() else { return };
        // Kernels that were compiled for the heads read the given queries, and decodes alone write the given outputs.
        let own =
            |&kernel: &KernelId| has_own_heads(kernel, spec) && kernel.info().loads != Loads::Rows;
        let decodes = |kernel: &KernelId| kernel.info().op == Op::Decode;
        let unpadded = self.attention.iter().all(own);
        let writes = !unpadded || self.merges || !self.attention.iter().all(decodes);
        let back = match (writes, spec.has_f32_outputs()) {
            (false, _) => 0,
            (true, false) => 1,
            // A launch for each slab.
            (true, true) => padding.slabs,
        };
        for _ in 0..back + u32::from(!unpadded) {
            self.pass(Op::Pad, Element::Any);
        }
    }
}

fn row_of(op: Op, element: Element) -> Option<&'static KernelInfo> {
    let mut rows = KernelId::all().map(KernelId::info);
    rows.find(|row| (row.op, row.element) == (op, element))
}
