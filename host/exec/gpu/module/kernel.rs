//! A kernel that is ready to be launched: its attributes, set once, and how many of its CTAs an SM holds.

use std::{borrow::Cow, ffi::c_int};

use kernels_gpu::{HooksName, registry::KernelInfo};

use crate::{
    Error,
    exec::gpu::driver::{
        Check, Function, cuFuncGetAttribute, cuFuncSetAttribute,
        cuOccupancyMaxActiveBlocksPerMultiprocessor, function_attribute,
    },
};

/// A kernel that is ready to be launched.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// Its row in the registry; of a variant's kernel, the row that it replaces.
    pub info: &'static KernelInfo,
    /// The variant that it computes.
    pub variant: Option<HooksName>,
    /// Threads of a block at most.
    pub max_threads: u32,
    /// Bytes of dynamic shared memory that a launch may ask for.
    pub max_dynamic_shared: u32,
    /// CTAs that an SM holds, at least 1.
    pub ctas_per_sm: u32,
    pub(in crate::exec::gpu) function: Function,
}

impl Kernel {
    /// In the current context.
    pub(super) fn new(
        info: &'static KernelInfo,
        function: Function,
        max_shared: u32,
    ) -> Result<Self, Error> {
        let get = |attribute| {
            let mut value = 0;
            // SAFETY: writes one integer.
            unsafe { cuFuncGetAttribute(&mut value, attribute, function) }
                .check("cuFuncGetAttribute")?;
            Ok::<u32, Error>(value.unsigned_abs())
        };
        let set = |attribute, value: u32| {
            // SAFETY: the driver checks attribute and value.
            unsafe { cuFuncSetAttribute(function, attribute, value as c_int) }
                .check("cuFuncSetAttribute")
        };
        let static_shared = get(function_attribute::SHARED_SIZE_BYTES)?;
        let max_dynamic_shared = max_shared.saturating_sub(static_shared);
        set(
            function_attribute::MAX_DYNAMIC_SHARED_SIZE_BYTES,
            max_dynamic_shared,
        )?;
        // Configures all of an SM's memory as shared memory, so that blocks of several kernels fit on it. Passes keep
        // their L1, which holds their loads in flight.
        if info.is_attention() || info.shared_bytes > SMALL {
            set(function_attribute::PREFERRED_SHARED_MEMORY_CARVEOUT, 100)?;
        }
        let mut kernel = Self {
            info,
            variant: None,
            max_threads: get(function_attribute::MAX_THREADS_PER_BLOCK)?,
            max_dynamic_shared,
            ctas_per_sm: info.ctas_per_sm.max(1),
            function,
        };
        if info.ctas_per_sm == 0 && info.shared_bytes <= max_dynamic_shared {
            kernel.ctas_per_sm = kernel.resident(info.shared_bytes)?;
        }
        Ok(kernel)
    }

    /// The name of its entry in the module.
    pub(in crate::exec::gpu) fn name(&self) -> Cow<'static, str> {
        match self.variant {
            Some(variant) => variant.entry(self.info).into(),
            None => self.info.name.into(),
        }
    }

    /// CTAs with this much shared memory that an SM holds at the same time, at least 1. In the current context.
    pub(in crate::exec::gpu) fn resident(&self, shared: u32) -> Result<u32, Error> {
        let mut blocks = 0;
        // SAFETY: writes one integer.
        unsafe {
            cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                self.function,
                self.info.threads as c_int,
                shared as usize,
            )
        }
        .check("cuOccupancyMaxActiveBlocksPerMultiprocessor")?;
        Ok(blocks.unsigned_abs().max(1))
    }
}

/// A kernel with at most this much shared memory, in bytes, keeps all of the L1 cache.
const SMALL: u32 = 1 << 10;
