//! Keeps the compiler from moving uses of registers that products still read or write.

use core::arch::asm;

/// Registers of asynchronous products, for [`fence_operand`].
pub trait Registers {
    #[doc(hidden)]
    fn fence(&mut self);
}

/// Prevents moves of uses of these registers across this point. Emits no instruction.
#[inline(always)]
pub fn fence_operand<R: Registers + ?Sized>(registers: &mut R) {
    registers.fence();
}

macro_rules! fence_registers {
    ($registers:expr, [$($i:tt)*]) => {
        // An asm must mention its operands, so they are in a comment.
        // SAFETY: emits no instruction.
        unsafe {
            asm!(
                concat!("//", $(" {", $i, "}",)*),
                $(inout(reg32) $registers[$i],)*
                options(nomem, nostack),
            );
        }
    };
}

impl<const N: usize, R> Registers for [R; N]
where
    R: Register,
{
    #[inline(always)]
    fn fence(&mut self) {
        // In blocks of 8, then one by one, because `N` is not a literal.
        let mut i = 0;
        while i + 8 <= N {
            // SAFETY: `i + 8 <= N`.
            let block: &mut [R; 8] = unsafe { &mut *self.as_mut_ptr().add(i).cast() };
            R::fence_8(block);
            i += 8;
        }
        while i < N {
            R::fence_1(&mut self[i]);
            i += 1;
        }
    }
}

/// An element of [`Registers`].
pub trait Register: Copy {
    #[doc(hidden)]
    fn fence_8(block: &mut [Self; 8]);
    #[doc(hidden)]
    fn fence_1(register: &mut Self);
}

macro_rules! registers {
    ($($type:ty),*) => {$(
        impl Register for $type {
            #[inline(always)]
            fn fence_8(block: &mut [Self; 8]) {
                fence_registers!(block, [0 1 2 3 4 5 6 7]);
            }
            #[inline(always)]
            fn fence_1(register: &mut Self) {
                let mut block = [*register];
                fence_registers!(block, [0]);
                *register = block[0];
            }
        }
    )*};
}

registers!(f32, u32);
