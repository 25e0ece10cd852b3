//! Launches on a raw stream.

use std::{env, ffi::c_void, sync::OnceLock};

use super::{
    Gpu,
    driver::{
        Check, Current, LaunchAttribute, LaunchConfig, Stream, cuLaunchKernel, cuLaunchKernelEx,
    },
    module::Kernel,
};
use crate::Error;

/// Whether each launch is printed: `TANDEM_TRACE=1`, read once.
fn traced() -> bool {
    static TRACED: OnceLock<bool> = OnceLock::new();
    *TRACED.get_or_init(|| env::var_os("TANDEM_TRACE").is_some_and(|value| value == "1"))
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block, along x.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// Blocks of a cluster, along x; 1 for none.
    pub cluster: u32,
    /// Programmatic dependent launch: the kernel may start while the one before it on the stream still
    /// runs, and waits for it with `griddepcontrol.wait`.
    pub overlap: bool,
}

impl Launch {
    /// A launch of `blocks` blocks along x, without shared memory, clusters or overlap.
    #[must_use]
    pub const fn new(blocks: u32, threads: u32) -> Self {
        Self {
            grid: [blocks, 1, 1],
            threads,
            shared: 0,
            cluster: 1,
            overlap: false,
        }
    }

    /// Prints a line to standard error, for `TANDEM_TRACE`.
    #[cold]
    fn print(&self, kernel: &Kernel, stream: Stream) {
        let [x, y, z] = self.grid;
        let overlap = if self.overlap {
            ", may begin before the launch in front of it ends"
        } else {
            ""
        };
        eprintln!(
            "tandem: {} on stream {stream:?}: grid {x} × {y} × {z}, {} threads, {} bytes of shared memory, clusters of {}{overlap}",
            kernel.name(),
            self.threads,
            self.shared,
            self.cluster
        );
    }

    fn check(&self, kernel: &Kernel) -> Result<(), Error> {
        // The limits of every architecture since Kepler: 2³¹ − 1 blocks along x, 65,535 along y and z.
        let limits = [
            ("threads in a block", self.threads, kernel.max_threads),
            (
                "bytes of dynamic shared memory",
                self.shared,
                kernel.max_dynamic_shared,
            ),
            ("blocks along x", self.grid[0], i32::MAX as u32),
            ("blocks along y", self.grid[1], 65_535),
            ("blocks along z", self.grid[2], 65_535),
            ("blocks in a cluster", self.cluster, 16),
        ];
        for (what, got, limit) in limits {
            if got > limit {
                return Err(Error::LaunchLimit {
                    kernel: kernel.name().into(),
                    what,
                    got: got.into(),
                    limit: limit.into(),
                });
            }
        }
        Ok(())
    }
}

impl Gpu {
    /// Launches a kernel whose only parameter is `parameters`. A launch without blocks is none.
    ///
    /// # Safety
    /// - `kernel` belongs to this GPU and takes one parameter of the type `P`, by value.
    /// - All memory that the kernel touches through `parameters` is valid, and stays so until the work on
    ///   `stream` is done.
    /// - `stream` is a stream of this GPU's primary context, or null (the default stream).
    pub(super) unsafe fn launch<P: Copy>(
        &self,
        kernel: &Kernel,
        launch: &Launch,
        parameters: &P,
        stream: Stream,
    ) -> Result<(), Error> {
        let _current = Current::enter(self.context.raw())?;
        let parameters = (&raw const *parameters).cast::<c_void>();
        // SAFETY: the caller's promises.
        unsafe { launch.make(kernel, [parameters, std::ptr::null()], stream) }
    }
}

impl Launch {
    /// [`Gpu::launch`] in the current context. `parameters` are addresses: of the kernel's parameters and, for kernels
    /// of a variant, of the data of its hooks.
    ///
    /// # Safety
    /// As [`Gpu::launch`].
    pub(super) unsafe fn make(
        &self,
        kernel: &Kernel,
        parameters: [*const c_void; 2],
        stream: Stream,
    ) -> Result<(), Error> {
        let launch = self;
        launch.check(kernel)?;
        if launch.grid.contains(&0) {
            return Ok(());
        }
        if traced() {
            launch.print(kernel, stream);
        }
        // The driver reads as many parameters as the kernel has before it returns, and does not write them.
        let mut pointers = parameters.map(<*const c_void>::cast_mut);
        let overlap = LaunchAttribute::new(LaunchAttribute::PROGRAMMATIC_STREAM_SERIALIZATION, [1]);
        let cluster =
            LaunchAttribute::new(LaunchAttribute::CLUSTER_DIMENSION, [launch.cluster, 1, 1]);
        let both = [overlap, cluster];
        let attributes = match (launch.overlap, launch.cluster > 1) {
            (false, false) => &both[..0],
            (true, false) => &both[..1],
            (false, true) => &both[1..],
            (true, true) => &both[..],
        };
        let [x, y, z] = launch.grid;
        if attributes.is_empty() {
            // SAFETY: the caller vouches for kernel, parameters and stream.
            let code = unsafe {
                cuLaunchKernel(
                    kernel.function,
                    x,
                    y,
                    z,
                    launch.threads,
                    1,
                    1,
                    launch.shared,
                    stream,
                    pointers.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            };
            return code.check("cuLaunchKernel");
        }
        let config = LaunchConfig {
            grid: launch.grid,
            block: [launch.threads, 1, 1],
            shared: launch.shared,
            stream,
            attributes: attributes.as_ptr(),
            attribute_count: attributes.len() as u32,
        };
        // SAFETY: as above; the attributes outlive the call.
        let code = unsafe {
            cuLaunchKernelEx(
                &config,
                kernel.function,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        code.check("cuLaunchKernelEx")
    }
}
