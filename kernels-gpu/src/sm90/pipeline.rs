//! A place in a pipeline of shared-memory stages.

/// Which stage comes next, and the parity of the phase that its barriers are in.
#[derive(Clone, Copy)]
pub struct Pipeline<const STAGES: u32> {
    pub stage: u32,
    pub parity: u32,
}

impl<const STAGES: u32> Pipeline<STAGES> {
    /// Waits for a stage to be filled.
    pub const CONSUMER: Self = Self {
        stage: 0,
        parity: 0,
    };
    /// Waits for a stage to be free: at first they all are, as if an earlier phase had ended.
    pub const PRODUCER: Self = Self {
        stage: 0,
        parity: 1,
    };

    #[inline(always)]
    pub fn advance(&mut self) {
        if STAGES == 2 {
            // One bit. The compiler sees that in some kernels and not in others, where it then adds, compares and
            // selects before each wait.
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
