//! Tensor maps.

use std::ffi::{c_uint, c_void};

use ptx_run::{Swizzle, TensorMap};

use crate::gpu::{Code, INVALID_VALUE, SUCCESS};

pub unsafe extern "C" fn cuTensorMapEncodeTiled(
    map: *mut u64,
    data_type: c_uint,
    rank: c_uint,
    address: *mut c_void,
    dims: *const u64,
    strides: *const u64,
    box_dims: *const c_uint,
    element_strides: *const c_uint,
    interleave: c_uint,
    swizzle: c_uint,
    _l2: c_uint,
    fill: c_uint,
) -> Code {
    let element_bytes = match data_type {
        0 => 1,
        1 | 6 | 9 => 2,
        2 | 3 | 7 => 4,
        4 | 5 | 8 => 8,
        _ => return INVALID_VALUE,
    };
    let (count, Some(swizzle)) = (rank as usize, Swizzle::from_number(swizzle.into())) else {
        return INVALID_VALUE;
    };
    if !(1..=5).contains(&count) || interleave != 0 || fill != 0 {
        return INVALID_VALUE;
    }
    let mut made = TensorMap {
        address: address.addr() as u64,
        element_bytes,
        is_f32: data_type == 7,
        rank,
        dims: [0; 5],
        strides: [0; 4],
        box_dims: [0; 5],
        swizzle,
    };
    // SAFETY: the arrays have one entry per dimension, the strides one less.
    unsafe {
        for axis in 0..count {
            made.dims[axis] = *dims.add(axis);
            made.box_dims[axis] = *box_dims.add(axis);
            if *element_strides.add(axis) != 1 {
                return INVALID_VALUE;
            }
        }
        for axis in 0..count - 1 {
            made.strides[axis] = *strides.add(axis);
        }
    }
    if !is_possible(&made) {
        return INVALID_VALUE;
    }
    // SAFETY: the map has this size.
    unsafe { map.cast::<[u64; 16]>().write(made.encode()) };
    SUCCESS
}

/// Whether a driver takes the map: what is a multiple of 16 bytes, and how large boxes and tensors are.
fn is_possible(map: &TensorMap) -> bool {
    let rank = map.rank as usize;
    let row = u64::from(map.box_dims[0]) * u64::from(map.element_bytes);
    let longest = match map.swizzle {
        Swizzle::None => u64::MAX,
        swizzle => u64::from(swizzle.row_bytes()),
    };
    let strides = &map.strides[..rank - 1];
    map.address.is_multiple_of(16)
        && row.is_multiple_of(16)
        && row <= longest
        && map.box_dims[..rank]
            .iter()
            .all(|size| (1..=256).contains(size))
        && map.dims[..rank]
            .iter()
            .all(|size| (1..=1 << 32).contains(size))
        && strides
            .iter()
            .all(|stride| stride.is_multiple_of(16) && *stride < 1 << 40)
}
