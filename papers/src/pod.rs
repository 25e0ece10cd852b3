//! How the CTAs of POD-Attention's single kernel choose an operation on their SM.
//!
//! The kernel contains both operations. A CTA reads its SM (`%smid`) and takes the next ticket of that SM. The ticket
//! decides whether it computes prefill or decode. The planner mixes the two in proportion to the work.

use kernels_gpu::sm80::pod::is_prefill;
use tandem_attn::plan::{Rules, pod::Tickets};

/// CTAs alternate between the operations, however much work there is of each.
pub const FIFTY_FIFTY: Rules = Rules {
    tickets: Some(in_turns),
    ..crate::NONE
};

fn in_turns(prefill: u32, decode: u32) -> Tickets {
    Tickets {
        prefill: prefill.min(1),
        decode: decode.min(1),
    }
}

/// An operation of a hybrid batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Compute-bound.
    Prefill,
    /// Memory-bound.
    Decode,
}

/// The operation of the CTA with a ticket of its SM. As on a line of Bresenham's, `⌈t · prefill / (prefill + decode)⌉`
/// of the first `t` tickets are for prefill, for any `t`.
///
/// ```
/// use tandem_attn::plan::pod::Tickets;
/// use tandem_papers::pod::{Op, op};
///
/// let tickets = Tickets { prefill: 2, decode: 5 };
/// let ops: Vec<_> = (0..7).map(|ticket| op(tickets, ticket)).collect();
/// use Op::{Decode as D, Prefill as P};
/// assert_eq!(ops, [P, D, D, P, D, D, D]);
/// ```
#[must_use]
pub const fn op(tickets: Tickets, ticket: u32) -> Op {
    if is_prefill(tickets.prefill, tickets.decode, ticket) {
        Op::Prefill
    } else {
        Op::Decode
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_are_exact_over_a_period_and_even_within() {
        for (prefill, decode) in [
            (1, 1),
            (1, 2),
            (100, 199),
            (7, 3),
            (1, 1000),
            (0, 1),
            (1, 0),
            (u32::MAX, u32::MAX - 1),
        ] {
            let tickets = Tickets { prefill, decode };
            let all = u64::from(prefill) + u64::from(decode);
            let mut prefills = 0u64;
            for ticket in 0..all.min(5000) {
                prefills += u64::from(op(tickets, ticket as u32) == Op::Prefill);
                let exact = (ticket + 1) as f64 * f64::from(prefill)
                    / (f64::from(prefill) + f64::from(decode));
                assert!(
                    (prefills as f64 - exact).abs() <= 1.0,
                    "{prefill}:{decode} at {ticket}: {prefills} of {exact}"
                );
            }
            if all <= 5000 {
                assert_eq!(prefills, u64::from(prefill));
            }
        }
    }
}
