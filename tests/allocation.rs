//! Planning allocates nothing once its buffers have grown.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use tandem_attn::{
    plan::{DeviceDescription, Plan, PlanOptions, Planner, SplitMode, Update},
    problem::{Batch, PageTable, Spec},
};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counting by thread.
struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    work();
    ALLOCATIONS.get() - before
}

/// Decodes that share `shared` pages, and a prefill chunk where there is one.
fn batch(requests: u32, shared: u32, pages: u32, chunk: u32) -> Batch {
    const PAGE: u32 = 16;
    let own = |request: u32| shared + request * pages..shared + (request + 1) * pages;
    let mut table = PageTable::new(PAGE, shared + (requests + 1) * pages);
    let mut tokens = vec![0];
    for request in 0..requests {
        let pages: Vec<u32> = (0..shared).chain(own(request)).collect();
        table.push(&pages, pages.len() as u32 * PAGE - 15);
        tokens.push(request + 1);
    }
    if chunk > 0 {
        let pages: Vec<u32> = own(requests).collect();
        table.push(&pages, pages.len() as u32 * PAGE);
        tokens.push(requests + chunk);
    }
    Batch::new(tokens, table)
}

#[test]
fn the_steady_state_allocates_nothing() {
    let spec = Spec::new(32, 8, 128);
    let device = DeviceDescription::named("h200").unwrap();
    let batches = [
        batch(64, 0, 512, 0),
        batch(300, 40, 3, 0),
        batch(20, 0, 64, 0),
        batch(1, 0, 4096, 0),
        batch(50, 10, 100, 1024),
        batch(0, 0, 1, 0),
    ];
    let modes = [
        SplitMode::Makespan,
        SplitMode::Fixed { tokens: 512 },
        SplitMode::Off,
    ];
    let mut planner = Planner::new();
    let mut plan = Plan::empty(spec);
    let mut all = |planner: &mut Planner| {
        for batch in &batches {
            for split in modes {
                let options = PlanOptions {
                    split,
                    ..PlanOptions::default()
                };
                planner
                    .plan_into(&spec, batch, &device, &options, &mut plan)
                    .unwrap();
            }
        }
    };
    assert!(allocations(|| all(&mut planner)) > 0, "the counter counts");
    assert_eq!(allocations(|| all(&mut planner)), 0);

    let options = PlanOptions::default();
    planner
        .plan_into(&spec, &batches[0], &device, &options, &mut plan)
        .unwrap();
    let mut later = batches[0].clone();
    later.parts[0].table.last_page_len.fill(2);
    let step = || {
        assert_eq!(
            planner.update(&spec, &later, &device, &options, &mut plan),
            Ok(Update::Patched)
        )
    };
    assert_eq!(allocations(step), 0);
}
