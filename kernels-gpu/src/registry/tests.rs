//! Kernels fit on the SM for which they are compiled, alone and together.

use super::*;

#[test]
fn kernels_fit_the_sm_they_are_made_for() {
    for row in &KERNELS {
        assert!(row.shared_bytes <= Sm::HOPPER_CTA, "{row:?}");
        assert!(row.ctas_on(&Sm::HOPPER) > 0, "{row:?}");
        let resident = row.ctas_per_sm * (row.shared_bytes + Sm::RESERVED);
        assert!(resident <= Sm::HOPPER.shared_bytes, "{row:?}");
        let registers = row.ctas_per_sm * row.threads * row.registers;
        assert!(registers <= Sm::HOPPER.registers, "{row:?}");
    }
}

#[test]
fn each_co_resident_prefill_has_a_decode_that_fits_beside_it() {
    let of = |op| {
        KERNELS
            .iter()
            .filter(move |row| row.co_resident && row.op == op)
    };
    assert!(of(Op::Prefill).count() > 0);
    for prefill in of(Op::Prefill) {
        let fits = |row: &&KernelInfo| row.fits_beside(prefill, &Sm::HOPPER);
        let mut decodes = of(Op::Decode).filter(|row| row.element == prefill.element);
        assert!(decodes.any(|row| fits(&row)), "{prefill:?}");
    }
}
