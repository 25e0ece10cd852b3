//! What to do about a quantity that is too large.

/// The advice of [`ProblemError::TooLarge`](super::ProblemError::TooLarge) for a quantity of this name.
pub(super) fn about(what: &str) -> &'static str {
    let has = |word: &str| what.contains(word);
    if has("stride") {
        "put rows, heads and pages closer together"
    } else if has("query heads × head dimension") {
        "use fewer or smaller heads"
    } else if has("of a row block") {
        "give the request fewer keys"
    } else if has("slot") || has("pool") || has("pages") || what == "tokens in a page" {
        "use a smaller pool"
    } else {
        "split the batch"
    }
}

#[cfg(test)]
mod tests {
    use crate::problem::{Batch, PageTable, ProblemError, Spec};

    fn said(error: ProblemError) -> String {
        error.to_string()
    }

    /// "Split the batch" was once said of everything.
    #[test]
    fn the_advice_is_about_the_quantity() {
        let heads = Spec::new(1 << 31, 1, 64).check().unwrap_err();
        assert_eq!(
            said(heads),
            "query heads × head dimension is 137438953472, past 4294967295: use fewer or smaller heads"
        );
        let mut table = PageTable::new(128, u32::MAX);
        let long = table.try_push([0_u32], u32::MAX).unwrap_err();
        assert!(said(long).ends_with("give the request fewer keys"));
        table.push(&[u32::MAX - 1], 3);
        let slot = table.slots(0, 0..1).unwrap_err();
        assert!(said(slot).ends_with("use a smaller pool"));
        let many = Batch::of_top_k(1 << 20, 1 << 20).unwrap_err();
        assert!(said(many).ends_with("split the batch"));
    }
}
