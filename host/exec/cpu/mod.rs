//! On threads of the CPU: the default backend, and the partner of all GPU tests.
//!
//! [`Cpu`] runs the very items and merges that a GPU runs, in two passes over threads. First every item leaves its
//! states (f32 output and log-sum of each row and head) in a workspace, each in memory of its own; then
//! every query token takes or merges its states, in the plan's order. No result depends on which thread
//! computed what, so the same plan gives the same bits whatever the number of threads.
//!
//! The kernels are compiled once for each instruction set, here and not in the program that uses this
//! library, and chosen when the program runs:
//!
//! - few rows (a decode step): lanes are elements of a head, every key is read once and used for all rows;
//! - many rows: lanes are rows, so that the softmax has no reductions across lanes, and both products are
//!   matrix kernels blocked for registers.

mod append;
mod buffer;
mod finish;
mod isa;
mod merge;
mod narrow;
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
    kv::KvView,
    plan::{DeviceDescription, Plan},
    tensor::{Element, ShapeError, Slice, SliceMut, with_elements},
};
pub use append::append_paged_kv;
pub use merge::{Partials, merge_states};

use finish::Finish;
use isa::Isa;
use sources::Sources;
use unit::{Pools, Scratch, Unit};

/// Runs plans on the threads of the current rayon pool.
///
/// Keep one for all steps: it reuses its workspaces.
#[derive(Debug)]
pub struct Cpu {
    isa: Isa,
    workspaces: Mutex<Vec<Workspace>>,
}

/// States that items leave behind.
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
    /// The best instruction set that this machine has.
    #[must_use]
    pub fn new() -> Self {
        Self {
            isa: Isa::detect(),
            workspaces: Mutex::default(),
        }
    }

    /// Without any instruction set beyond the target's baseline: what other machines compute.
    #[must_use]
    pub fn portable() -> Self {
        Self {
            isa: Isa::Portable,
            workspaces: Mutex::default(),
        }
    }

    /// What to plan for: as many workers as the current rayon pool has threads.
    ///
    /// Plans for other devices run as well, with more and smaller items than threads need.
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

    /// Attention of a plan's batch, with the variant of its spec.
    ///
    /// - `q`: `[total_q, q_heads, head_dim_qk]`
    /// - `kv`: one view for each part of the batch
    /// - `out`: `[total_q, q_heads, head_dim_v]`
    /// - `lse`: `[total_q, q_heads]`, natural log, where it is wanted
    ///
    /// A query that sees no key gives output 0 and LSE −∞.
    ///
    /// # Errors
    /// Where a tensor is not what the plan says, or the plan contradicts itself. Nothing is written then.
    pub fn run<Q: Element, T: Element, O: Element>(
        &self,
        plan: &Plan,
        q: &[Q],
        kv: &[KvView<'_, T>],
        out: &mut [O],
        lse: Option<&mut [f32]>,
    ) -> Result<(), Error> {
        check(plan, q, kv, out, lse.as_deref())?;
        let pools: Vec<_> = kv.iter().map(Pools::new).collect();
        self.run_standard(plan, Q::erase(q), &pools, O::erase_mut(out), lse)
    }

    /// Attention of a plan's batch, with any variant.
    ///
    /// The plan leaves out keys that its spec's mask hides altogether; the variant may only hide more.
    ///
    /// # Errors
    /// As [`Cpu::run`].
    pub fn run_with<V: Variant, Q: Element, T: Element, O: Element>(
        &self,
        variant: &V,
        plan: &Plan,
        q: &[Q],
        kv: &[KvView<'_, T>],
        out: &mut [O],
        lse: Option<&mut [f32]>,
    ) -> Result<(), Error> {
        check(plan, q, kv, out, lse.as_deref())?;
        let pools: Vec<_> = kv.iter().map(Pools::new).collect();
        self.execute(variant, plan, Q::erase(q), &pools, O::erase_mut(out), lse)
    }

    fn run_standard(
        &self,
        plan: &Plan,
        q: Slice<'_>,
        pools: &[Pools<'_>],
        out: SliceMut<'_>,
        lse: Option<&mut [f32]>,
    ) -> Result<(), Error> {
        let params = plan.spec.variant_params();
        match plan.spec.variant.soft_cap {
            None => self.execute(&Standard::<false>(params), plan, q, pools, out, lse),
            Some(_) => self.execute(&Standard::<true>(params), plan, q, pools, out, lse),
        }
    }

    fn execute<V: Variant>(
        &self,
        variant: &V,
        plan: &Plan,
        q: Slice<'_>,
        pools: &[Pools<'_>],
        out: SliceMut<'_>,
        lse: Option<&mut [f32]>,
    ) -> Result<(), Error> {
        let apart = plan.taken_apart()?;
        let plan = apart.as_ref();
        let sources = Sources::of(plan)?;
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
                self.isa,
            );
            if unit.rows.len() <= narrow::MAX_ROWS {
                narrow::attend(&unit, scratch, out, lse);
            } else {
                wide::attend(&unit, scratch, out, lse);
            }
        });
        let finish = Finish {
            variant,
            plan,
            sources: &sources,
            out: &workspace.out,
            lse: &workspace.lse,
        };
        with_elements!(SliceMut(out), out => finish.write(out, lse));
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
        // Every element is written before it is read: what is there from another run does not matter.
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

fn check<Q: Element, T: Element, O: Element>(
    plan: &Plan,
    q: &[Q],
    kv: &[KvView<'_, T>],
    out: &[O],
    lse: Option<&[f32]>,
) -> Result<(), Error> {
    plan.spec.check()?;
    let spec = &plan.spec;
    let dtypes = [
        ("q", Q::DTYPE, spec.q_dtype),
        ("kv", T::DTYPE, spec.kv_dtype),
        ("out", O::DTYPE, spec.out_dtype),
    ];
    for (name, got, expected) in dtypes {
        if got != expected {
            return Err(ShapeError::Dtype {
                name,
                got,
                expected,
            }
            .into());
        }
    }
    let heads = plan.total_q as usize * spec.q_heads as usize;
    let lengths = [
        (
            "q",
            q.len(),
            "[total_q, q_heads, head_dim_qk]",
            heads * spec.head_dim_qk as usize,
        ),
        (
            "out",
            out.len(),
            "[total_q, q_heads, head_dim_v]",
            heads * spec.head_dim_v as usize,
        ),
        (
            "lse",
            lse.map_or(heads, <[f32]>::len),
            "[total_q, q_heads]",
            heads,
        ),
    ];
    for (name, got, shape, expected) in lengths {
        if got != expected {
            return Err(ShapeError::Length {
                name,
                got,
                shape,
                expected,
            }
            .into());
        }
    }
    if kv.len() != plan.parts.len() {
        return Err(ShapeError::Parts {
            got: kv.len(),
            expected: plan.parts.len(),
        }
        .into());
    }
    for (index, (view, part)) in kv.iter().zip(&plan.parts).enumerate() {
        let pages = plan
            .page_ids
            .get(part.pages.start as usize..part.pages.end as usize)
            .unwrap_or(&[]);
        let pool_pages = pages
            .iter()
            .fold(0, |max, &page| max.max(page.saturating_add(1)));
        view.check(spec, index, part.page_size, pool_pages)?;
    }
    Ok(())
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

/// Cuts the workspace up: a task for each KV head, or for several of them where the rows are few. Then
/// reading is what takes time, and of keys that lie side by side all heads should be read together.
fn tasks<'a>(plan: &Plan, workspace: &'a mut Workspace) -> Vec<Task<'a>> {
    let spec = &plan.spec;
    let (group, dim) = (spec.group() as usize, spec.head_dim_v as usize);
    let (mut out, mut lse) = (&mut workspace.out[..], &mut workspace.lse[..]);
    let mut tasks = Vec::with_capacity(plan.items.len());
    // A few for each thread: plans for as many workers are balanced already.
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
        while head < spec.kv_heads {
            let kv_heads = head..spec.kv_heads.min(head + together);
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
