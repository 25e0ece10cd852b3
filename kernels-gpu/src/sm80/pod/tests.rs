//! Two CTAs fit on an SM; tickets if one operation has no work.

use super::*;

#[test]
fn two_ctas_share_an_sm() {
    for shape in [Shape::new(64, 128), Shape::new(128, 64)] {
        assert_eq!(shape.prefill.threads(), shape.decode.threads());
        // Shared memory per SM of an A100, and of an H200.
        for (sm, fit) in [(164 << 10, 3), (228 << 10, 4)] {
            let of_cta = sm / shape.ctas_per_sm - 1024;
            let decodes = shape.virtual_decodes(of_cta).expect("there is room");
            assert!(decodes >= fit, "{decodes}");
            assert!(shape.shared_bytes(decodes) <= of_cta);
        }
    }
}

#[test]
fn tickets_of_an_empty_operation_are_for_the_other() {
    for ticket in 0..20 {
        assert!(is_prefill(7, 0, ticket));
        assert!(!is_prefill(0, 7, ticket));
    }
}
