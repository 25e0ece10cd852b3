//! What to do about a quantity that is too large.

use super::ProblemError;

/// A quantity that 32 bits count, with its name, by what makes it smaller.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Quantity {
    Batch(&'static str),
    Heads(&'static str),
    Keys(&'static str),
    Page(&'static str),
    Pool(&'static str),
    Stride(&'static str),
    #[cfg(feature = "cuda")]
    Table(&'static str),
}

impl Quantity {
    /// The error of a quantity past its limit.
    pub(crate) const fn too_large(self, got: u64, limit: u64) -> ProblemError {
        let (what, advice) = match self {
            Self::Batch(what) => (what, "split the batch"),
            Self::Heads(what) => (what, "use fewer or smaller heads"),
            Self::Keys(what) => (what, "give the request fewer keys"),
            Self::Page(what) => (what, "use smaller pages"),
            Self::Pool(what) => (what, "use a smaller pool"),
            Self::Stride(what) => (what, "put rows, heads and pages closer together"),
            #[cfg(feature = "cuda")]
            Self::Table(what) => (what, "use a smaller table"),
        };
        ProblemError::TooLarge {
            what,
            got,
            limit,
            advice,
        }
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
        let wide = Spec::new(1 << 20, 1 << 20, 64);
        let mut pages = PageTable::new(128, 1);
        pages.push(&[0], 1);
        let page = Batch::new(vec![0, 1], pages).check(&wide).unwrap_err();
        assert!(said(page).ends_with("use smaller pages"));
        let many = Batch::of_top_k(1 << 20, 1 << 20).unwrap_err();
        assert!(said(many).ends_with("split the batch"));
    }
}
