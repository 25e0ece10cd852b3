//! The position of a producer or consumer in a ring of shared-memory stages.

/// The next stage, and the parity of the mbarrier phase to wait for.
#[derive(Clone, Copy, Debug)]
pub struct Pipeline<const STAGES: u32> {
    pub stage: u32,
    pub parity: u32,
}

/// In place of a number of stages that only the launch knows.
const AT_LAUNCH: u32 = 0;

/// A [`Pipeline`] whose number of stages only the launch knows.
pub type LaunchPipeline = Pipeline<AT_LAUNCH>;

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

impl LaunchPipeline {
    /// A stage in the first round, for a consumer. Producers wait for the other parity.
    #[inline(always)]
    #[must_use]
    pub const fn first(stage: u32) -> Self {
        Self { stage, parity: 0 }
    }

    /// Goes `steps` stages forward in a ring of `stages`, at most once around.
    #[inline(always)]
    pub fn advance_in(&mut self, steps: u32, stages: u32) {
        self.stage += steps;
        if self.stage >= stages {
            self.stage -= stages;
            self.parity ^= 1;
        }
    }
}

/// The stage of the block with this number, counted from 0, in a ring of `stages`; and the parity of its full barrier.
#[inline(always)]
#[must_use]
pub const fn stage_of_block(number: u32, stages: u32) -> (u32, u32) {
    (number % stages, number / stages & 1)
}
