//! Threads, blocks and the grid; the barrier of a block.

#[allow(improper_ctypes)]
unsafe extern "C" {
    #[link_name = "llvm.nvvm.read.ptx.sreg.tid.x"]
    safe fn tid_x() -> u32;
    #[link_name = "llvm.nvvm.read.ptx.sreg.tid.y"]
    safe fn tid_y() -> u32;
    #[link_name = "llvm.nvvm.read.ptx.sreg.tid.z"]
    safe fn tid_z() -> u32;
    #[link_name = "llvm.nvvm.read.ptx.sreg.ntid.x"]
    safe fn ntid_x() -> u32;
    #[link_name = "llvm.nvvm.read.ptx.sreg.ntid.y"]
    safe fn ntid_y() -> u32;
    #[link_name = "llvm.nvvm.read.ptx.sreg.ntid.z"]
    safe fn ntid_z() -> u32;
    #[link_name = "llvm.nvvm.read.ptx.sreg.ctaid.x"]
    safe fn ctaid_x() -> u32;
    #[link_name = "llvm.nvvm.read.ptx.sreg.ctaid.y"]
    safe fn ctaid_y() -> u32;
    #[link_name = "llvm.nvvm.read.ptx.sreg.ctaid.z"]
    safe fn ctaid_z() -> u32;
    #[link_name = "llvm.nvvm.read.ptx.sreg.nctaid.x"]
    safe fn nctaid_x() -> u32;
    #[link_name = "llvm.nvvm.read.ptx.sreg.nctaid.y"]
    safe fn nctaid_y() -> u32;
    #[link_name = "llvm.nvvm.read.ptx.sreg.nctaid.z"]
    safe fn nctaid_z() -> u32;
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.all"]
    safe fn barrier_sync_all(id: u32);
    #[link_name = "llvm.nvvm.barrier.cta.red.popc.aligned.all"]
    safe fn barrier_popc_all(id: u32, predicate: bool) -> u32;
    #[link_name = "llvm.nvvm.barrier.cta.red.and.aligned.all"]
    safe fn barrier_and_all(id: u32, predicate: bool) -> bool;
    #[link_name = "llvm.nvvm.barrier.cta.red.or.aligned.all"]
    safe fn barrier_or_all(id: u32, predicate: bool) -> bool;
}

macro_rules! sregs {
    ($($name:ident = $intrinsic:ident, $register:literal, $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// # PTX
        #[doc = concat!("`mov.u32 d, ", $register, "`")]
        #[inline(always)]
        #[must_use]
        pub fn $name() -> u32 {
            $intrinsic()
        }
    )*};
}

sregs! {
    thread_idx_x = tid_x, "%tid.x", "Index of the thread in its block, x.";
    thread_idx_y = tid_y, "%tid.y", "Index of the thread in its block, y.";
    thread_idx_z = tid_z, "%tid.z", "Index of the thread in its block, z.";
    block_dim_x = ntid_x, "%ntid.x", "Threads of a block, x.";
    block_dim_y = ntid_y, "%ntid.y", "Threads of a block, y.";
    block_dim_z = ntid_z, "%ntid.z", "Threads of a block, z.";
    block_idx_x = ctaid_x, "%ctaid.x", "Index of the block in the grid, x.";
    block_idx_y = ctaid_y, "%ctaid.y", "Index of the block in the grid, y.";
    block_idx_z = ctaid_z, "%ctaid.z", "Index of the block in the grid, z.";
    grid_dim_x = nctaid_x, "%nctaid.x", "Blocks of the grid, x.";
    grid_dim_y = nctaid_y, "%nctaid.y", "Blocks of the grid, y.";
    grid_dim_z = nctaid_z, "%nctaid.z", "Blocks of the grid, z.";
}

/// Index of the thread in a one-dimensional grid of one-dimensional blocks.
#[inline(always)]
#[must_use]
pub fn index_1d() -> u32 {
    block_idx_x() * block_dim_x() + thread_idx_x()
}

/// Index of the thread along x and y: `[x, y]`.
#[inline(always)]
#[must_use]
pub fn index_2d() -> [u32; 2] {
    [index_1d(), block_idx_y() * block_dim_y() + thread_idx_y()]
}

/// Index of the thread along x, y and z.
#[inline(always)]
#[must_use]
pub fn index_3d() -> [u32; 3] {
    let [x, y] = index_2d();
    [x, y, block_idx_z() * block_dim_z() + thread_idx_z()]
}

/// Unique index of the thread among all threads of the launch, whatever its layout.
#[inline(always)]
#[must_use]
pub fn index() -> u32 {
    let block = block_idx_x() + grid_dim_x() * (block_idx_y() + grid_dim_y() * block_idx_z());
    let threads = block_dim_x() * block_dim_y() * block_dim_z();
    let thread = thread_idx_x() + block_dim_x() * (thread_idx_y() + block_dim_y() * thread_idx_z());
    block * threads + thread
}

/// Whether this is thread 0 of block 0.
#[inline(always)]
#[must_use]
pub fn first() -> bool {
    block_idx_x() | block_idx_y() | block_idx_z() | thread_idx_x() | thread_idx_y() | thread_idx_z()
        == 0
}

/// Threads of a warp: 32 on every architecture.
#[inline(always)]
#[must_use]
pub const fn warp_size() -> u32 {
    32
}

/// Waits until all threads of the block have arrived. Their earlier memory accesses are then visible to
/// all of them.
///
/// All threads of the block must execute this, or the launch hangs.
///
/// # PTX
/// `barrier.sync.aligned 0` (shown as `bar.sync 0` or `barrier.sync 0` by some tools)
#[inline(always)]
pub fn sync_threads() {
    barrier_sync_all(0);
}

/// [`sync_threads`]; returns the number of threads whose predicate is not 0.
///
/// # PTX
/// `barrier.red.popc.aligned.u32 d, 0, p`
#[inline(always)]
pub fn sync_threads_count(predicate: u32) -> u32 {
    barrier_popc_all(0, predicate != 0)
}

/// [`sync_threads`]; returns 1 if the predicate of every thread is not 0, else 0.
///
/// # PTX
/// `barrier.red.and.pred.aligned q, 0, p`
#[inline(always)]
pub fn sync_threads_and(predicate: u32) -> u32 {
    barrier_and_all(0, predicate != 0) as u32
}

/// [`sync_threads`]; returns 1 if the predicate of any thread is not 0, else 0.
///
/// # PTX
/// `barrier.red.or.pred.aligned q, 0, p`
#[inline(always)]
pub fn sync_threads_or(predicate: u32) -> u32 {
    barrier_or_all(0, predicate != 0) as u32
}

/// Suspends the thread for about this long; the hardware may take between 0 and twice the time.
///
/// # PTX
/// `nanosleep.u32 t`
#[inline(always)]
pub fn nanosleep(nanoseconds: u32) {
    // SAFETY: accesses neither memory nor other state.
    unsafe { core::arch::asm!("nanosleep.u32 {};", in(reg32) nanoseconds, options(nostack, nomem)) }
}
