//! Planning allocates nothing once its buffers have grown, and appending no more than the new tokens ask for.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use tandem_attn::{
    Cpu,
    plan::{DeviceDescription, Plan, PlanOptions, Planner, SplitMode, Update},
    problem::{Batch, PageTable, Spec},
    tensor::{F8E4M3, TensorMut, TensorRef},
};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static BYTES: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, counting by thread.
struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        BYTES.set(BYTES.get() + layout.size());
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
                let options = PlanOptions::default().with_split(split);
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

#[test]
fn appending_takes_memory_by_the_new_tokens_and_not_by_the_pool() {
    const NEW: usize = 64;
    let rows = [F8E4M3(0x38); NEW * 16];
    let taken = |pages: usize, slots: &[i64]| {
        let mut pool = vec![F8E4M3(0); pages * 16 * 16];
        let pool = TensorMut::new(&mut pool, [pages, 16, 1, 16]).unwrap();
        let rows = TensorRef::new(&rows, [slots.len(), 1, 16]).unwrap();
        let before = BYTES.get();
        Cpu::append_rows(&rows, slots, pool).unwrap();
        BYTES.get() - before
    };
    let scattered: Vec<i64> = (0..NEW as i64).map(|token| 1000 - token * 7).collect();
    let ascending: Vec<i64> = (0..NEW as i64).collect();
    for pages in [64, 65_536] {
        assert_eq!(taken(pages, &[pages as i64 * 16 - 1]), 0);
        assert_eq!(taken(pages, &ascending), 0);
        // Sorted by place and index to see whether two meet, in a list that grows by doubling.
        let bytes = taken(pages, &scattered);
        assert!((NEW * 16..=NEW * 64).contains(&bytes), "{bytes} bytes");
    }
}
