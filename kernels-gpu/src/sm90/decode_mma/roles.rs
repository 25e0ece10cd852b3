//! The roles of the warps.

use cuda_std::{barrier, griddep, mbarrier, thread, tma, warp};

use super::{
    super::follow, config::producers, layout::Layout, load::Loader, mainloop::Consumer,
    open::first_unit, queries::FirstQueries, scheduler::Scheduler,
};
use crate::{
    abi::DecodeParams,
    common::{
        cache::{self, Cache, Stored},
        half::Half,
        policy::Policies,
        variant::Variant,
    },
};

/// Named barriers of the CTA's start; later, the warps of a unit synchronise at them. Each role has its own: waiting at
/// one barrier in several places of the code would need the unaligned form of the instruction, after which ptxas guards
/// every shuffle.
pub const FIRST_INITIALISED: u32 = 2;
const LOADERS_START: u32 = 3;
const QUERIES_START: u32 = 4;
const SCHEDULER_STARTS: u32 = 5;

/// The kernel for a head dimension, rows, consumer warps and a cache. The other constants are the numbers of fragments
/// of a tile and the elements of a row that a lane writes.
///
/// # Safety
/// All threads of a CTA call this; the parameters describe memory as [`DecodeParams`] says; `maps` is the address of
/// its first tensor map.
#[inline(always)]
pub unsafe fn run<
    T: Half,
    V: Variant,
    const DIM: u32,
    const ROWS: u32,
    const WARPS: u32,
    const CACHE: u32,
    const DIM_BLOCKS: usize,
    const ROW_BLOCKS: usize,
    const PER_LANE: usize,
>(
    p: &DecodeParams,
    maps: *const tma::TensorMap,
    variant: V,
) where
    Stored<T, CACHE>: Cache,
{
    let producers = const { producers(DIM, ROWS / cache::kv_heads(CACHE), CACHE) };
    // Warps after the scheduler that start the first loads of keys and queries: the loaders and one consumer. They wait
    // for global memory twice, for the item and for its page ids or rows, and initialise no barriers meanwhile.
    let openers = producers;
    let warp_id = thread::thread_idx_x() / 32;
    let lane = warp::lane_id();
    let layout = Layout::<DIM, ROWS, WARPS, CACHE>::new(p.stages);
    // Each role looks up its own first work, because waiting for another warp would lengthen short steps. The openers
    // wait until the first barriers are initialised, and then all roles wait for the rest.
    let threads = (WARPS + producers) * 32;
    let initialisers = WARPS + producers - 1 - openers;
    let by_rows = cache::kv_heads(CACHE) == 1 && p.loads_rows();
    let initialise = || {
        let nth = warp_id - 1 - openers;
        // SAFETY: each of these warps runs this once.
        unsafe {
            layout.initialise(layout.first_barriers(), [nth, initialisers], by_rows);
            barrier::bar_sync(FIRST_INITIALISED, initialisers * 32);
            barrier::bar_arrive(LOADERS_START, (initialisers + producers - 1) * 32);
            barrier::bar_arrive(QUERIES_START, (initialisers + 1) * 32);
            barrier::bar_arrive(SCHEDULER_STARTS, threads);
            layout.initialise(layout.other_barriers(), [nth, initialisers], by_rows);
            mbarrier::arrive(layout.started());
        }
    };
    // The scheduler lists no unit before all warps have left these barriers: units reuse them.
    // SAFETY: each opener runs this once.
    let open = |barrier, openers| unsafe {
        barrier::bar_sync(barrier, (initialisers + openers) * 32);
        barrier::bar_arrive(SCHEDULER_STARTS, threads);
    };
    // SAFETY: a warp that runs this has initialised the first barriers or waited for them.
    let start = || unsafe { mbarrier::wait(layout.started(), 0) };
    // SAFETY: whole warps, each in one role. Each role has waited above for the barriers that it uses.
    unsafe {
        if warp_id == 0 {
            let scheduler = Scheduler { p, layout, lane };
            let mut first = scheduler.look_up();
            scheduler.begin(&mut first);
            follow(p.early);
            // Lets another tile group of the step start on SMs as this one leaves them.
            griddep::launch_dependents();
            barrier::bar_sync(SCHEDULER_STARTS, threads);
            scheduler.list_first(&first);
            start();
            scheduler.run(first);
        } else if warp_id < producers {
            let loader = Loader {
                p,
                maps,
                index: warp_id - 1,
                policies: Policies::new(p.long, p.attention.record),
                layout,
                lane,
            };
            if lane == 0 && warp_id <= 2 && !by_rows {
                tma::prefetch_tensor_map(maps.add(warp_id as usize - 1));
            }
            let opening = loader.look_up(first_unit(p));
            open(LOADERS_START, producers - 1);
            follow(p.early);
            loader.run(&variant, opening, start);
        } else {
            let consumer = Consumer {
                params: &p.attention,
                group: p.group,
                out_columns: p.out_columns,
                rotary: &p.rotary,
                layout,
                warp: warp_id - producers,
                lane,
            };
            let turns = consumer.load_turns();
            if warp_id <= openers {
                let queries = FirstQueries::look_up(p, first_unit(p), lane);
                open(QUERIES_START, 1);
                follow(p.early);
                queries.load(p, &layout, lane);
            } else {
                initialise();
                follow(p.early);
            }
            start();
            consumer.run::<T, V, DIM_BLOCKS, ROW_BLOCKS, PER_LANE>(&variant, turns);
            // A grid that waits for the end of this one relies on the previous grid having ended, too.
            griddep::wait();
        }
    }
}
