use super::*;
use crate::problem::ProblemError;

const A: u64 = 1 << 20;

fn good() -> (PartialStates, DeviceTensor<3>, DeviceTensor<2>) {
    let partials = PartialStates {
        out: DeviceTensor::new(A, Dtype::F32, [7, 4, 64]),
        lse: DeviceTensor::new(A, Dtype::F32, [7, 4]),
    };
    (
        partials,
        DeviceTensor::new(A, Dtype::BF16, [3, 4, 64]).with_stride(0, 1024),
        DeviceTensor::new(A, Dtype::F32, [3, 4]),
    )
}

fn check(
    partials: PartialStates,
    out: DeviceTensor<3>,
    lse: Option<DeviceTensor<2>>,
) -> Result<MergeParams, Error> {
    let (rows, slots) = (DeviceArray::new(A, 3), DeviceArray::new(A, 5));
    parameters(&partials, rows, slots, &out, lse.as_ref())
}

#[test]
fn a_good_call_becomes_parameters() {
    let (partials, out, lse) = good();
    let params = check(partials, out, Some(lse)).unwrap();
    assert_eq!((params.chunks, params.chunks_per_row.get()), (3 * 32, 32));
    assert_eq!(
        (params.chunks_per_head.get(), params.out_token_stride),
        (8, 1024)
    );
    assert_eq!(check(partials, out, None).unwrap().lse, 0);
}

/// A change to a good call.
type Slip = fn(&mut PartialStates, &mut DeviceTensor<3>, &mut DeviceTensor<2>);

/// Applies it and returns the error.
fn broken(change: Slip) -> Error {
    let (mut partials, mut out, mut lse) = good();
    change(&mut partials, &mut out, &mut lse);
    check(partials, out, Some(lse)).unwrap_err()
}

#[test]
fn each_thing_that_is_wrong_has_its_error() {
    use Error::{Dtype as WrongDtype, Extent, HeadDim, Misaligned, NullPointer, Stride};
    assert!(matches!(
        broken(|p, _, _| p.out.dtype = Dtype::BF16),
        WrongDtype {
            tensor: "partial_out",
            ..
        }
    ));
    assert!(matches!(
        broken(|p, _, _| p.lse.dtype = Dtype::F16),
        WrongDtype {
            tensor: "partial_lse",
            ..
        }
    ));
    assert!(matches!(
        broken(|_, o, _| o.dtype = Dtype::F8E4M3),
        WrongDtype { tensor: "out", .. }
    ));
    assert!(matches!(
        broken(|_, _, l| l.dtype = Dtype::BF16),
        WrongDtype { tensor: "lse", .. }
    ));
    assert!(matches!(
        broken(|p, _, _| p.out = DeviceTensor::new(A, Dtype::F32, [7, 4, 60])),
        HeadDim { got: 60, .. }
    ));
    assert!(matches!(
        broken(|p, _, _| p.out = DeviceTensor::new(A, Dtype::F32, [7, 0, 64])),
        Extent { got: 0, .. }
    ));
    let extents: [(Slip, &str, usize); 6] = [
        (|p, _, _| p.lse.shape[0] = 6, "partial_lse", 6),
        (|p, _, _| p.lse.shape[1] = 5, "partial_lse", 5),
        (|_, o, _| o.shape[1] = 2, "out", 2),
        (|_, o, _| o.shape[2] = 72, "out", 72),
        (|_, _, l| l.shape[0] = 2, "lse", 2),
        (|_, _, l| l.shape[1] = 2, "lse", 2),
    ];
    for (slip, name, wrong) in extents {
        let error = broken(slip);
        assert!(
            matches!(&error, Extent { tensor, got, .. } if *tensor == name && *got == wrong),
            "{error}"
        );
    }
    let strides: [(Slip, &str, usize); 5] = [
        (|p, _, _| p.out.strides[0] = 512, "partial_out", 512),
        (|_, o, _| o.strides[0] = 1028, "out", 1028),
        (|_, o, _| o.strides[0] = 128, "out", 128),
        (|_, o, _| o.strides[1] = 128, "out", 128),
        (|_, _, l| l.strides[0] = 8, "lse", 8),
    ];
    for (slip, name, wrong) in strides {
        let error = broken(slip);
        assert!(
            matches!(&error, Stride { tensor, got, .. } if *tensor == name && *got == wrong),
            "{error}"
        );
    }
    assert!(matches!(
        broken(|p, _, _| p.out.address = 0),
        NullPointer {
            tensor: "partial_out"
        }
    ));
    assert!(matches!(
        broken(|p, _, _| p.lse.address = 0),
        NullPointer {
            tensor: "partial_lse"
        }
    ));
    assert!(matches!(
        broken(|_, o, _| o.address = 0),
        NullPointer { tensor: "out" }
    ));
    assert!(matches!(
        broken(|_, _, l| l.address = 0),
        NullPointer { tensor: "lse" }
    ));
    assert!(matches!(
        broken(|p, _, _| p.out.address = A + 8),
        Misaligned {
            tensor: "partial_out",
            align: 16,
            ..
        }
    ));
    assert!(matches!(
        broken(|_, o, _| o.address = A + 2),
        Misaligned { tensor: "out", .. }
    ));
}

#[test]
fn index_arrays_are_checked_too() {
    let (partials, out, _) = good();
    let call = |rows, slots| parameters(&partials, rows, slots, &out, None).unwrap_err();
    let (rows, slots) = (DeviceArray::new(A, 3), DeviceArray::new(A, 5));
    assert_eq!(
        call(DeviceArray::new(0, 3), slots),
        Error::NullPointer { tensor: "rows" }
    );
    assert_eq!(
        call(rows, DeviceArray::new(0, 5)),
        Error::NullPointer {
            tensor: "merge_slots"
        }
    );
    assert!(matches!(
        call(DeviceArray::new(A + 8, 3), slots),
        Error::Misaligned { tensor: "rows", .. }
    ));
    let many = DeviceArray::new(A, 1 << 27);
    assert!(matches!(
        call(many, slots),
        Error::Problem(ProblemError::TooLarge { .. })
    ));
}
