//! The position of a producer or consumer in a ring of shared-memory stages.

/// The next stage, and the parity of the mbarrier phase to wait for.
#[derive(Clone, Copy)]
pub struct Pipeline<const STAGES: u32> {
    pub stage: u32,
    pub parity: u32,
}

impl<const STAGES: u32> Pipeline<STAGES> {
    /// The initial state of a consumer: it waits for phase 0 of the full barrier.
    pub const CONSUMER: Self = Self {
        stage: 0,
        parity: 0,
    };
    /// The initial state of a producer. Parity 1 counts as completed on a fresh mbarrier, so its first wait for each
    /// free barrier returns at once.
    pub const PRODUCER: Self = Self {
        stage: 0,
        parity: 1,
    };

    #[inline(always)]
    pub fn advance(&mut self) {
        if STAGES == 2 {
            // The general code below, for one bit. In some kernels the compiler does not find this form and adds,
            // compares and selects before each wait.
            self.parity ^= self.stage;
            self.stage ^= 1;
            return;
        }
        self.stage += 1;
        if self.stage == STAGES {
            self.stage = 0;
            self.parity ^= 1;
        }
    }
}
