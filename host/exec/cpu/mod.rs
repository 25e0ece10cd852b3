//! Running plans on threads of the CPU: the default backend, with which all GPU tests compare.
//!
//! [`Cpu`] runs the same items and merges as a GPU, in two parallel passes. In the first pass, every item writes its
//! partial states (f32 output and LSE of each row and head) to a workspace. In the second pass,
//! every query token copies or merges its states, in the plan's order. No result depends on which thread
//! computed it, so a plan gives the same bits with any number of threads.
//!
//! The kernels are compiled in this crate, once for each instruction set, and chosen at run time:
//!
//! - few rows (decode): SIMD lanes are elements of a head; every key is read once and used for all rows;
//! - many rows (prefill): SIMD lanes are rows, so that the softmax has no reductions across lanes; both products are
//!   matrix kernels blocked for registers.

mod append;
mod buffer;
mod check;
mod finish;
mod isa;
mod merge;
mod narrow;
mod ranks;
mod simd;
mod sources;
mod tile;
mod unit;
mod wide;

use std::sync::{Mutex, PoisonError};

use kernels_gpu::{
    abi::WorkItem,
    variant::{Standard, Variant},
};
use rayon::prelude::*;

use crate::{
    Error,
    kv::{KvTensors, KvView},
    plan::{DeviceDescription, Plan},
    problem::Spec,
    tensor::{Element, HeadTensors, SliceMut, TensorMut, TensorRef, with_elements},
};
pub use merge::{Partials, merge_states};
unstable! {
    use ranks::{RankState, merge_ranks};
}

pub(in crate::exec) use check::check;
use check::check_tensors;
use finish::Finish;
use isa::Isa;
use sources::Sources;
use unit::{Pools, Queries, Scratch, Unit};

/// Runs plans on the threads of the current rayon pool.
///
/// Keep one for all steps, since it reuses its workspaces.
#[derive(Debug)]
pub struct Cpu {
    isa: Isa,
    workspaces: Mutex<Vec<Workspace>>,
}

/// Outputs of any type.
struct Outputs<'a> {
    elements: SliceMut<'a>,
    /// Elements from a token to the next, at least those of the heads of a token.
    token: usize,
    /// Elements from a head to the next.
    head: usize,
}

/// Queries and outputs without gaps.
fn dense<'a, Q: Element, O: Element>(
    spec: &Spec,
    q: &'a [Q],
    out: &'a mut [O],
) -> (Queries<'a>, Outputs<'a>) {
    let heads = spec.q_heads as usize;
    let (dim_qk, dim_v) = (spec.head_dim_qk as usize, spec.head_dim_v as usize);
    let q = Queries {
        elements: Q::erase(q),
        token: heads * dim_qk,
        head: dim_qk,
    };
    let out = Outputs {
        elements: O::erase_mut(out),
        token: heads * dim_v,
        head: dim_v,
    };
    (q, out)
}

/// The partial states of items.
#[derive(Debug, Default)]
struct Workspace {
    out: Vec<f32>,
    lse: Vec<f32>,
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

impl Cpu {
    /// With the best instruction set of this machine.
    #[must_use]
    pub fn new() -> Self {
        Self {
            isa: Isa::detect(),
            workspaces: Mutex::default(),
        }
    }

    /// With the target's baseline instruction set only, as on other machines.
    #[must_use]
    pub fn portable() -> Self {
        Self {
            isa: Isa::Portable,
            workspaces: Mutex::default(),
        }
    }

    /// The description of the CPU for the planner, with one worker for each thread of the current rayon pool.
    ///
    /// Plans for other devices also run, but have more and smaller items than the threads need.
    #[must_use]
    pub fn device(&self) -> DeviceDescription {
        let mut device = DeviceDescription::named("cpu").expect("it is built in");
        device.sms = rayon::current_num_threads() as u32;
        device
    }

    /// The instruction set in use.
    #[must_use]
    pub const fn instruction_set(&self) -> &'static str {
        self.isa.name()
    }

    /// Computes the attention of a plan's batch, with the variant of its spec.
    ///
    /// - `q`: `[total_q, q_heads, head_dim_qk]`
    /// - `kv`: one view for each part of the batch
    /// - `out`: `[total_q, q_heads, head_dim_v]`
    /// - `lse`: `[total_q, q_heads]`, natural log, if it is needed
    ///
    /// A query that sees no key gives output 0 and LSE −∞. If element types are known only at run time, or rows have gaps
    /// between them, use [`Cpu::run_tensors`]. If the variant needs data for each head, such as sinks, use [`Cpu::run_heads`].
    ///
    /// # Errors
    /// If a tensor does not match the plan, or the plan contradicts itself. Nothing is written then.
    pub fn run<Q: Element, T: Element, O: Element>(
        &self,
        plan: &Plan,
        q: &[Q],
        kv: &[KvView<'_, T>],
        out: &mut [O],
        lse: Option<&mut [f32]>,
    ) -> Result<(), Error> {
        self.run_heads(plan, q, kv, out, lse, &HeadTensors::default())
    }

    /// [`Cpu::run`] with the variant's data for each query head, such as sinks. A query that sees no key gives
    /// output 0; its LSE is the sink, if there is one.
    ///
    /// # Errors
    /// As [`Cpu::run`]; [`ShapeError::Missing`](crate::tensor::ShapeError::Missing) and
    /// [`ShapeError::Surplus`](crate::tensor::ShapeError::Surplus) if the spec needs other data.
    pub fn run_heads<Q: Element, T: Element, O: Element>(
        &self,
        plan: &Plan,
        q: &[Q],
        kv: &[KvView<'_, T>],
        out: &mut [O],
        lse: Option<&mut [f32]>,
        heads: &HeadTensors<'_>,
    ) -> Result<(), Error> {
        check(plan, q, kv, out, lse.as_deref())?;
        heads.check(&plan.spec)?;
        let pools: Vec<_> = kv.iter().map(Pools::new).collect();
        let (q, out) = dense(&plan.spec, q, out);
        self.run_standard(plan, q, &pools, out, lse, heads)
    }

    /// [`Cpu::run`] for tensors whose types are known only at run time, or whose rows have gaps between
    /// them, such as the queries of a fused projection.
    ///
    /// - `q`: `[total_q, q_heads, head_dim_qk]`, with any strides of tokens and heads
    /// - `kv`: one pair for each part of the batch
    /// - `out`: `[total_q, q_heads, head_dim_v]`, with any gaps between tokens and between the heads of one
    /// - `lse`: `[total_q, q_heads]`, natural log, if it is needed
    ///
    /// ```
    /// use tandem_attn::{
    ///     Cpu,
    ///     kv::{KvScales, KvTensors},
    ///     plan::{PlanOptions, Planner},
    ///     problem::{Batch, Dtype, PageTable, Spec},
    ///     tensor::{TensorMut, TensorRef},
    /// };
    ///
    /// let spec = Spec::new(4, 1, 64).with_dtype(Dtype::F32);
    /// let mut table = PageTable::new(16, 1);
    /// table.push(&[0], 3);
    /// let (cpu, batch) = (Cpu::new(), Batch::new(vec![0, 1], table));
    /// let plan = Planner::new().plan(&spec, &batch, &cpu.device(), &PlanOptions::default())?;
    ///
    /// let (q, pool, mut out) = (vec![1.0_f32; 256], vec![2.0_f32; 16 * 64], vec![0.0_f32; 256]);
    /// let pool = TensorRef::new(&pool, [1, 16, 1, 64])?;
    /// let kv = KvTensors { k: pool, v: pool, scales: KvScales::One };
    /// let q = TensorRef::new(&q, [1, 4, 64])?;
    /// cpu.run_tensors(&plan, &q, &[kv], TensorMut::new(&mut out, [1, 4, 64])?, None)?;
    /// assert_eq!(out, [2.0; 256]);
    /// # Ok::<(), tandem_attn::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`ShapeError::Dtype`](crate::tensor::ShapeError::Dtype) where a tensor has another type than the spec,
    /// [`Error::Extent`] and [`Error::Stride`] for its shape, [`Error::BrokenPlan`]. Nothing is written then.
    pub fn run_tensors(
        &self,
        plan: &Plan,
        q: &TensorRef<'_, 3>,
        kv: &[KvTensors<'_>],
        out: TensorMut<'_, 3>,
        lse: Option<&mut [f32]>,
    ) -> Result<(), Error> {
        self.run_tensors_heads(plan, q, kv, out, lse, &HeadTensors::default())
    }

    /// [`Cpu::run_tensors`] with the variant's data for each query head.
    ///
    /// # Errors
    /// As [`Cpu::run_tensors`] and [`Cpu::run_heads`].
    pub fn run_tensors_heads(
        &self,
        plan: &Plan,
        q: &TensorRef<'_, 3>,
        kv: &[KvTensors<'_>],
        out: TensorMut<'_, 3>,
        lse: Option<&mut [f32]>,
        heads: &HeadTensors<'_>,
    ) -> Result<(), Error> {
        let pools = check_tensors(plan, q, kv, &out, lse.as_deref())?;
        heads.check(&plan.spec)?;
        let [token, head, _] = q.strides();
        let q = Queries {
            elements: q.elements(),
            token,
            head,
        };
        let [token, head, _] = out.strides();
        // From the token's first element to its last, with the gaps between heads.
        let row = (plan.spec.q_heads as usize - 1) * head + plan.spec.head_dim_v as usize;
        let out = Outputs {
            // The stride of a single token does not matter.
            token: if plan.total_q > 1 {
                token
            } else {
                row.max(token)
            },
            head,
            elements: out.into_elements(),
        };
        self.run_standard(plan, q, &pools, out, lse, heads)
    }

    /// Computes the attention of a plan's batch, with any variant. A variant whose hooks contradict each other does not
    /// compile, such as a `unit` without a `logit`.
    ///
    /// The plan omits keys that the mask of its spec hides from all rows. The variant may hide more keys, but not fewer.
    ///
    /// # Errors
    /// As [`Cpu::run_heads`].
    #[cfg(feature = "unstable")]
    #[expect(clippy::too_many_arguments, reason = "what a run is given")]
    pub fn run_with<V: Variant, Q: Element, T: Element, O: Element>(
        &self,
        variant: &V,
        plan: &Plan,
        q: &[Q],
        kv: &[KvView<'_, T>],
        out: &mut [O],
        lse: Option<&mut [f32]>,
        heads: &HeadTensors<'_>,
    ) -> Result<(), Error> {
        const { V::AGREES };
        check(plan, q, kv, out, lse.as_deref())?;
        heads.check(&plan.spec)?;
        crate::tensor::check_softmax(&plan.spec, V::SOFTMAX)?;
        let pools: Vec<_> = kv.iter().map(Pools::new).collect();
        let (q, out) = dense(&plan.spec, q, out);
        self.execute(variant, plan, q, &pools, out, lse, heads)
    }

    fn run_standard(
        &self,
        plan: &Plan,
        q: Queries<'_>,
        pools: &[Pools<'_>],
        out: Outputs<'_>,
        lse: Option<&mut [f32]>,
        heads: &HeadTensors<'_>,
    ) -> Result<(), Error> {
        if let Some(hooks) = plan.spec.variant.hooks {
            return Err(crate::tensor::ShapeError::Hooks { hooks }.into());
        }
        let params = plan.spec.variant_params();
        match plan.spec.variant.soft_cap {
            None => self.execute(&Standard::<false>(params), plan, q, pools, out, lse, heads),
            Some(_) => self.execute(&Standard::<true>(params), plan, q, pools, out, lse, heads),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "what a run is given")]
    fn execute<V: Variant>(
        &self,
        variant: &V,
        plan: &Plan,
        q: Queries<'_>,
        pools: &[Pools<'_>],
        out: Outputs<'_>,
        lse: Option<&mut [f32]>,
        heads: &HeadTensors<'_>,
    ) -> Result<(), Error> {
        let without_joint = plan.without_joint_items()?;
        let plan = without_joint.as_ref();
        let sources = Sources::of(plan)?;
        let rotary = plan.spec.rotary.map(|rope| rope.table()).transpose()?;
        let mut workspace = self.take_workspace(plan, sources.rows);
        let tasks = tasks(plan, &mut workspace).into_par_iter().with_max_len(1);
        tasks.for_each_init(Scratch::default, |scratch, task| {
            let Task {
                item,
                kv_heads,
                out,
                lse,
            } = task;
            let unit = Unit::new(
                variant,
                plan,
                item,
                kv_heads,
                q,
                &pools[item.part as usize],
                rotary.as_ref(),
                self.isa.kernels().load,
            );
            if unit.rows.len() <= narrow::MAX_ROWS {
                narrow::attend(&unit, self.isa, scratch, out, lse);
            } else {
                wide::attend(&unit, self.isa, scratch, out, lse);
            }
        });
        let finish = Finish {
            variant,
            plan,
            sources: &sources,
            out: &workspace.out,
            lse: &workspace.lse,
            sinks: heads.sinks,
        };
        let strides = (out.token, out.head);
        with_elements!(SliceMut(out.elements), out => finish.write(out, strides, lse));
        self.workspaces
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(workspace);
        Ok(())
    }

    fn take_workspace(&self, plan: &Plan, rows: usize) -> Workspace {
        let mut workspaces = self
            .workspaces
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut workspace = workspaces.pop().unwrap_or_default();
        drop(workspaces);
        let states = rows * plan.spec.q_heads as usize;
        // Every element is written before it is read, so values from an earlier run do not matter.
        workspace.out.resize(
            workspace
                .out
                .len()
                .max(states * plan.spec.head_dim_v as usize),
            0.0,
        );
        workspace.lse.resize(workspace.lse.len().max(states), 0.0);
        workspace
    }
}

/// Some KV heads of an item, and the memory for their states.
struct Task<'a> {
    item: WorkItem,
    kv_heads: std::ops::Range<u32>,
    /// `[kv_heads, rows, group, head_dim_v]`.
    out: &'a mut [f32],
    /// `[kv_heads, rows, group]`.
    lse: &'a mut [f32],
}

/// Divides the workspace into tasks: one for each KV head, or for several KV heads if the rows are few. Few rows are
/// limited by reading, and keys of adjacent heads should be read together.
fn tasks<'a>(plan: &Plan, workspace: &'a mut Workspace) -> Vec<Task<'a>> {
    let spec = &plan.spec;
    let (group, dim) = (spec.group() as usize, spec.head_dim_v as usize);
    let (mut out, mut lse) = (&mut workspace.out[..], &mut workspace.lse[..]);
    let mut tasks = Vec::with_capacity(plan.items.len());
    // A few tasks per thread are enough: plans for this number of workers are already balanced.
    let wanted = 2 * rayon::current_num_threads();
    let together = (plan.items.len() * spec.kv_heads as usize / wanted)
        .clamp(1, spec.kv_heads as usize) as u32;
    for &item in &plan.items {
        let rows = item.rows as usize * group;
        let together = if rows <= narrow::MAX_ROWS {
            together
        } else {
            1
        };
        let mut head = 0;
        let all = spec.kv_heads * plan.parts[item.part as usize].heads;
        while head < all {
            let kv_heads = head..all.min(head + together);
            let states = kv_heads.len() * rows;
            let (task_out, task_lse);
            (task_out, out) = out.split_at_mut(states * dim);
            (task_lse, lse) = lse.split_at_mut(states);
            head = kv_heads.end;
            tasks.push(Task {
                item,
                kv_heads,
                out: task_out,
                lse: task_lse,
            });
        }
    }
    tasks
}
