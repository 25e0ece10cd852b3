//! Copies by the tensor memory accelerator (sm_90): tensors, plain runs of bytes, reductions.
//!
//! One thread issues a copy. A copy into shared memory reports its bytes to an
//! [mbarrier](crate::mbarrier). A copy out of it belongs to a *bulk group* of the thread, closed by
//! [`commit_group`] and awaited by [`wait_group`]. Before a copy out of data that ordinary stores wrote,
//! [`fence::proxy_async_shared`](crate::fence::proxy_async_shared) is needed.
//!
//! `barrier` and shared addresses may be addresses mapped in the cluster's window. An address in the
//! block's own window refers to its own memory.

/// The opaque 128 bytes of a `CUtensorMap`, made on the host by `cuTensorMapEncodeTiled`.
///
/// The hardware needs an alignment of 64, but rustc's NVPTX backend supports at most 16 for a kernel's
/// parameters. So the type has 16, and `#[kernel(tensor_maps)]` raises it: the maps come first in the
/// kernel's first parameter, a struct passed by value, whose address in parameter memory is returned by
/// [`param_address!`](crate::param_address).
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap(pub [u64; 16]);

/// Address of parameter `index` of the entry `entry`; the macro must be used in that entry's body.
///
/// If the address of a parameter is taken, rustc copies it to the stack. But a tensor map must be read
/// from where the launch put it.
///
/// ```text
/// #[kernel(tensor_maps)]
/// pub unsafe fn prefill(p: Params) {
///     let maps: *const TensorMap = param_address!(prefill, 0);
/// }
/// ```
///
/// # PTX
/// `mov.b64 t, <entry>_param_<index>; cvta.param.u64 d, t` (PTX 7.7)
#[macro_export]
macro_rules! param_address {
    ($entry:ident, $index:literal) => {{
        let address;
        // SAFETY: only computes an address.
        #[allow(unused_unsafe)]
        unsafe {
            ::core::arch::asm!(
                concat!(
                    "{{ .reg .b64 t; mov.b64 t, ", stringify!($entry), "_param_", $index,
                    "; cvta.param.u64 {}, t; }}"
                ),
                out(reg64) address,
                options(pure, nomem, nostack),
            );
        }
        address
    }};
}

#[cfg(target_arch = "nvptx64")]
mod bulk;
#[cfg(target_arch = "nvptx64")]
mod tensor;

#[cfg(target_arch = "nvptx64")]
pub use bulk::{
    commit_group, copy_bulk_cluster, load_bulk, load_bulk_hint, load_bulk_multicast,
    load_bulk_multicast_hint, prefetch_bulk, reduce_add_bulk_f32, store_bulk, store_bulk_hint,
    wait_group, wait_group_read,
};
#[cfg(target_arch = "nvptx64")]
pub use tensor::{
    Coordinates, load_tensor, load_tensor_hint, load_tensor_multicast, load_tensor_multicast_hint,
    prefetch_tensor, prefetch_tensor_map, reduce_add_tensor, store_tensor, store_tensor_hint,
};

#[cfg(test)]
mod tests {
    use super::TensorMap;

    #[test]
    fn a_tensor_map_has_the_drivers_size() {
        assert_eq!(size_of::<TensorMap>(), 128);
        assert_eq!(align_of::<TensorMap>(), 16);
    }
}
