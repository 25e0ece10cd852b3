//! `adjust`: biases and penalties of a row's logits, before a token is drawn. A block has a row, a thread some tokens.
//!
//! The newest token of a row may be known to the device alone: the host prepares a step while the one before it runs. It
//! counts once more than the host says. If the host's list does not have it, it becomes an entry of its own, the one behind the list.
//! Each entry keeps the logit that it replaces, so that a second launch, `restore`, undoes the first.

use crate::abi::{AdjustRow, AdjustToken};

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Resident blocks per SM.
const BLOCKS: u32 = 4;

/// The logit with a token's bias, then with the penalties of its row.
#[inline(always)]
#[must_use]
pub fn adjusted(logit: f32, token: &AdjustToken, row: &AdjustRow) -> f32 {
    let mut x = logit + token.bias;
    if token.seen == 0 {
        return x;
    }
    let [times, inverse] = row.repetition;
    x *= if x > 0.0 { inverse } else { times };
    let count = token.seen & !AdjustToken::IN_PROMPT;
    if count > 0 {
        x = x - row.frequency * count as f32 - row.presence;
    }
    x
}

/// The kernel's name, for its row and for its entry.
#[cfg(any(not(target_arch = "nvptx64"), feature = "step"))]
macro_rules! table {
    ($then:ident) => {
        $then! { "adjust_f32" }
    };
}

/// The kernel.
#[cfg(not(target_arch = "nvptx64"))]
pub const ROWS: &[crate::registry::KernelInfo] = {
    use crate::registry::{Arch, Element, Family, KernelInfo, Op, registers};
    macro_rules! row {
        ($name:literal) => {
            KernelInfo {
                element: Element::F32,
                threads: THREADS,
                registers: registers(THREADS, BLOCKS),
                ..KernelInfo::new($name, Family::Step, Arch::Sm80, Op::Adjust)
            }
        };
    }
    &[table!(row)]
};

#[cfg(all(target_arch = "nvptx64", feature = "step"))]
mod device {
    use cuda_std::prelude::*;

    use super::{BLOCKS, THREADS, adjusted};
    use crate::{
        abi::{AdjustParams, AdjustRow, AdjustToken, NO_TOKEN},
        step::begin,
    };

    const TOKEN_BYTES: u64 = size_of::<AdjustToken>() as u64;

    macro_rules! entry {
        ($name:literal) => {
            /// See the module's documentation.
            ///
            /// # Safety
            /// The parameters describe memory as [`AdjustParams`] says.
            #[kernel(name = [$name], max_threads = THREADS, min_blocks = BLOCKS)]
            pub unsafe fn entry(params: AdjustParams) {
                begin();
                // SAFETY: the launch's promise.
                unsafe {
                    let row = load_row(params.rows + u64::from(thread::block_idx_x()) * 32);
                    let logits = params.logits + u64::from(row.row) * params.row * 4;
                    match params.restore {
                        0 => adjust(&params, &row, logits),
                        _ => restore(&params, &row, logits),
                    }
                }
            }
        };
    }
    table!(entry);

    /// # Safety
    /// As [`entry`]; all threads of the block come here.
    #[inline(always)]
    unsafe fn adjust(p: &AdjustParams, row: &AdjustRow, logits: u64) {
        // SAFETY: the caller's promise; tokens of a row are distinct, so each logit has one thread.
        unsafe {
            let newest = match row.newest {
                NO_TOKEN => NO_TOKEN,
                at => ptr::load_u32((p.ids + u64::from(at) * 4) as *const u32),
            };
            let mut found = false;
            let mut index = row.first + thread::thread_idx_x();
            while index < row.end {
                let at = p.tokens + u64::from(index) * TOKEN_BYTES;
                let token = load_token(at);
                let is_newest = token.token == newest;
                found |= is_newest;
                replace(p, row, logits, at, token, is_newest);
                index += THREADS;
            }
            let found = barrier::bar_any(0, THREADS, found);
            if thread::thread_idx_x() == 0 {
                let token = AdjustToken {
                    token: if found { NO_TOKEN } else { newest },
                    bias: 0.0,
                    seen: 0,
                    logit: 0.0,
                };
                let at = p.tokens + u64::from(row.end) * TOKEN_BYTES;
                replace(p, row, logits, at, token, true);
            }
        }
    }

    /// Adjusts one logit, and keeps it in the entry at `at`. The count there stays, so that the list serves for more
    /// calls: the newest token counts once more in this call alone.
    ///
    /// # Safety
    /// As [`entry`]; no other thread has this entry or this logit.
    #[inline(always)]
    unsafe fn replace(
        p: &AdjustParams,
        row: &AdjustRow,
        logits: u64,
        at: u64,
        token: AdjustToken,
        is_newest: bool,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut logit = 0.0;
            if token.token < p.vocabulary {
                let of_token = logits + u64::from(token.token) * 4;
                logit = ptr::load_f32(of_token as *const f32);
                let mut counted = token;
                counted.seen += u32::from(is_newest);
                ptr::store_f32(of_token as *mut f32, adjusted(logit, &counted, row));
            }
            let words = [
                token.token,
                token.bias.to_bits(),
                token.seen,
                logit.to_bits(),
            ];
            ptr::store_u32x4(at as *mut u32, words);
        }
    }

    /// # Safety
    /// As [`entry`], after [`adjust`] with the same parameters.
    #[inline(always)]
    unsafe fn restore(p: &AdjustParams, row: &AdjustRow, logits: u64) {
        let mut index = row.first + thread::thread_idx_x();
        while index <= row.end {
            // SAFETY: the caller's promise.
            unsafe {
                let token = load_token(p.tokens + u64::from(index) * TOKEN_BYTES);
                if token.token < p.vocabulary {
                    let of_token = logits + u64::from(token.token) * 4;
                    ptr::store_f32(of_token as *mut f32, token.logit);
                }
            }
            index += THREADS;
        }
    }

    /// # Safety
    /// `from` is the address of an [`AdjustRow`].
    #[inline(always)]
    unsafe fn load_row(from: u64) -> AdjustRow {
        // SAFETY: the caller's promise.
        unsafe {
            let [row, first, end, newest] = ptr::load_u32x4(from as *const u32);
            let [presence, frequency, times, inverse] = ptr::load_f32x4((from + 16) as *const f32);
            AdjustRow {
                row,
                first,
                end,
                newest,
                presence,
                frequency,
                repetition: [times, inverse],
            }
        }
    }

    /// # Safety
    /// `from` is the address of an [`AdjustToken`].
    #[inline(always)]
    unsafe fn load_token(from: u64) -> AdjustToken {
        // SAFETY: the caller's promise.
        let [token, bias, seen, logit] = unsafe { ptr::load_u32x4(from as *const u32) };
        AdjustToken {
            token,
            bias: f32::from_bits(bias),
            seen,
            logit: f32::from_bits(logit),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn biases_come_first_and_penalties_only_to_tokens_of_the_text() {
        let row = AdjustRow {
            row: 0,
            first: 0,
            end: 1,
            newest: 0,
            presence: 0.25,
            frequency: 0.5,
            repetition: [2.0, 0.5],
        };
        let of = |logit: f32, bias: f32, seen: u32| {
            let token = AdjustToken {
                token: 0,
                bias,
                seen,
                logit: 0.0,
            };
            adjusted(logit, &token, &row)
        };
        assert_eq!(of(3.0, 1.0, 0), 4.0);
        assert_eq!(of(3.0, 1.0, AdjustToken::IN_PROMPT), 2.0);
        assert_eq!(of(-3.0, 0.0, AdjustToken::IN_PROMPT), -6.0);
        assert_eq!(of(3.0, 1.0, 3), 2.0 - 1.5 - 0.25);
        assert_eq!(of(3.0, 1.0, AdjustToken::IN_PROMPT | 3), 2.0 - 1.5 - 0.25);
        assert_eq!(of(3.0, f32::NEG_INFINITY, 3), f32::NEG_INFINITY);
    }
}
