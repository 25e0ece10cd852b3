//! Rows of logits in device memory.

/// Elements from a row of logits to the next. [`Gpu::sample`](tandem_attn::exec::gpu::Gpu::sample) reads vectors of 8 elements, so rows begin at multiples of 8.
pub(super) const fn stride(vocabulary: usize) -> usize {
    vocabulary.next_multiple_of(8)
}

/// The first rows of logits, without the gaps between them.
pub(super) fn dense(mut logits: Vec<f32>, rows: usize, vocabulary: usize) -> Vec<f32> {
    for row in 1..rows {
        let from = row * stride(vocabulary);
        logits.copy_within(from..from + vocabulary, row * vocabulary);
    }
    logits.truncate(rows * vocabulary);
    logits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logits_leave_without_the_gaps_between_their_rows() {
        let rows = [1.0, 2.0, 3.0].map(|row| [[row; 5].as_slice(), &[-1.0; 3]].concat());
        let [first, second, _] = [1.0, 2.0, 3.0].map(|row| [row; 5]);
        assert_eq!(dense(rows.concat(), 2, 5), [first, second].concat());
        assert_eq!(dense(vec![4.0; 24], 3, 8), [4.0; 24]);
        assert_eq!(dense(rows.concat(), 0, 5), [0.0; 0]);
    }
}
