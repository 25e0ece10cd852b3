//! How workspaces grow.

use tandem_attn::plan::Bound;

/// The bound of the workspace that replaces one that is too small. Arrays that are too small grow at least by a factor of
/// two, so that growing batches do not allocate every time. The others stay as they are.
pub fn grown(needed: &Bound, had: &Bound) -> Bound {
    let grown = |needed: u32, had: u32| match needed > had {
        true => needed.max(had.saturating_mul(2)),
        false => had,
    };
    each(needed, had, grown)
}

/// The bound for plans of both.
pub fn of_both(one: &Bound, other: &Bound) -> Bound {
    each(one, other, u32::max)
}

fn each(one: &Bound, other: &Bound, of: impl Fn(u32, u32) -> u32) -> Bound {
    Bound {
        items: of(one.items, other.items),
        rows: of(one.rows, other.rows),
        page_ids: of(one.page_ids, other.page_ids),
        merges: of(one.merges, other.merges),
        slots: of(one.slots, other.slots),
        ancestors: of(one.ancestors, other.ancestors),
        mask_words: of(one.mask_words, other.mask_words),
        padded_tokens: of(one.padded_tokens, other.padded_tokens),
        converted_pages: of(one.converted_pages, other.converted_pages),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound([page_ids, slots]: [u32; 2]) -> Bound {
        Bound {
            items: 8,
            rows: 8,
            page_ids,
            merges: 0,
            slots,
            ancestors: 0,
            mask_words: 0,
            padded_tokens: 0,
            converted_pages: 3,
        }
    }

    /// A context that grew page by page once made slots and converted pages grow with its page ids.
    #[test]
    fn only_what_is_too_small_grows() {
        let mut had = bound([64, 264]);
        for page_ids in 65..=4096 {
            let needed = bound([page_ids, 200]);
            if needed.page_ids > had.page_ids {
                had = grown(&needed, &had);
            }
        }
        assert_eq!(had, bound([4096, 264]));
        assert_eq!(grown(&bound([9000, 300]), &had), bound([9000, 528]));
    }
}
